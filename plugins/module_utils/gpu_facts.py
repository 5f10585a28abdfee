# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What NVIDIA's tools, the kernel and the package manager say of a host's GPUs: pure parsers, no I/O.

What a tool does not tell is None, never a guess: C(N/A) and C([N/A]) are None, C(Not Active) is False.
"""

from __future__ import annotations

import re
import typing as t
from xml.etree import ElementTree

# NVIDIA's names on the PCI bus.
NVIDIA_VENDOR = "0x10de"
# Packages of the driver's family, as they are called in NVIDIA's, Canonical's, Debian's and Lambda's repositories.
PACKAGE_PATTERNS = (
    "nvidia-*",
    "libnvidia-*",
    "libnvsdm*",
    "libcuda1",
    "libcudadebugger1",
    "libnvcuvid1",
    "libnvoptix1",
    "xserver-xorg-video-nvidia*",
    "firmware-nvidia-*",
    "nvlsm",
    "datacenter-gpu-manager*",
    "cuda-keyring",
    "cuda-compat-*",
    "cuda-toolkit-*",
    "cuda-drivers*",
    "linux-modules-nvidia-*",
    "lambda-*",
    "doca-*",
    "mlnx-*",
    "unattended-upgrades",
    # What Ansible's modules for apt need on the host.
    "python3-apt",
    "python3-debian",
)
# Companions whose version must be the driver's: their names, an old one with the branch in it included.
COMPANIONS = {
    "fabricmanager": re.compile(r"nvidia-fabricmanager(-\d+)?"),
    "nscq": re.compile(r"libnvidia-nscq(-\d+)?"),
    "nvsdm": re.compile(r"libnvsdm(-\d+)?"),
    "imex": re.compile(r"nvidia-imex(-\d+)?"),
}


class SmiError(ValueError):
    """nvidia-smi answered with something that is not its XML."""


def value_of(text: str | None) -> str | None:
    """A word of nvidia-smi, None where it says that there is none."""
    text = (text or "").strip()
    return None if text in ("", "N/A", "[N/A]", "None found", "Unknown Error", "[Unknown Error]") else text


def number_of(text: str | None) -> float | int | None:
    """The number that a value of nvidia-smi begins with: C(143771 MiB) gives 143771, C(16x) gives 16."""
    match = re.match(r"\s*(-?\d+(?:\.\d+)?)", text or "")
    if not match:
        return None
    return float(match[1]) if "." in match[1] else int(match[1])


def yes_no(text: str | None) -> bool | None:
    """Yes, Enabled and Active as True, their opposites as False, anything else as None."""
    word = (text or "").strip().lower()
    if word in ("yes", "enabled", "active", "true"):
        return True
    if word in ("no", "disabled", "not active", "false"):
        return False
    return None


def parse_smi(text: str) -> dict[str, t.Any]:
    """C(nvidia-smi -q -x) as driver, cuda and a list of GPUs in the order of the tool."""
    start = text.find("<nvidia_smi_log")
    if start < 0:
        raise SmiError("no <nvidia_smi_log> in its output")
    try:
        root = ElementTree.fromstring(text[start:])  # noqa: S314 - the output of a root-owned tool
    except ElementTree.ParseError as error:
        raise SmiError(f"its XML breaks off ({error})") from error
    return {
        "driver": value_of(root.findtext("driver_version")),
        "cuda": value_of(root.findtext("cuda_version")),
        "gpus": [_gpu(index, gpu) for index, gpu in enumerate(root.iter("gpu"))],
    }


def _gpu(index: int, gpu: ElementTree.Element) -> dict[str, t.Any]:
    def word(path: str) -> str | None:
        return value_of(gpu.findtext(path))

    def number(path: str) -> float | int | None:
        return number_of(gpu.findtext(path))

    health = {child.tag: value_of(child.text) for child in gpu.iterfind("fabric/health/*")}
    reasons = gpu.find("clocks_event_reasons")
    if reasons is None:  # before R535
        reasons = gpu.find("clocks_throttle_reasons")
    return {
        "index": index,
        "name": word("product_name"),
        "architecture": word("product_architecture"),
        "uuid": word("uuid"),
        "serial": word("serial"),
        "bus": normalise_bus(gpu.get("id") or ""),
        "vbios": word("vbios_version"),
        "module_id": word("platformInfo/module_id"),
        "gsp": word("gsp_firmware_version"),
        "virtualization": word("gpu_virtualization_mode/virtualization_mode"),
        "persistence": yes_no(word("persistence_mode")),
        "mig": yes_no(word("mig_mode/current_mig")),
        "compute_mode": word("compute_mode"),
        "recovery_action": gpu.findtext("gpu_recovery_action", "").strip() or None,
        "memory_total_mib": number("fb_memory_usage/total"),
        "memory_used_mib": number("fb_memory_usage/used"),
        "ecc": {
            "enabled": yes_no(word("ecc_mode/current_ecc")),
            "pending": yes_no(word("ecc_mode/pending_ecc")),
            "volatile_uncorrectable": _sum(gpu, "ecc_errors/volatile", "uncorrectable"),
            "aggregate_uncorrectable": _sum(gpu, "ecc_errors/aggregate", "uncorrectable"),
            "sram_threshold_exceeded": yes_no(word("ecc_errors/aggregate/sram_threshold_exceeded")),
            "repair_pending": any(
                yes_no(word(f"ecc_errors/{name}_repair_pending")) is True for name in ("channel", "tpc")
            ),
            "unrepairable": yes_no(word("ecc_errors/unrepairable_memory")),
        },
        "remapped_rows": {
            "correctable": number("remapped_rows/remapped_row_corr"),
            "uncorrectable": number("remapped_rows/remapped_row_unc"),
            "pending": yes_no(word("remapped_rows/remapped_row_pending")),
            "failure": yes_no(word("remapped_rows/remapped_row_failure")),
            "banks_none_left": number("remapped_rows/row_remapper_histogram/row_remapper_histogram_none"),
        },
        "retired_pages_pending": yes_no(word("retired_pages/pending_retirement")),
        "clocks": {
            "sm_mhz": number("clocks/sm_clock"),
            "max_sm_mhz": number("max_clocks/sm_clock"),
            "reasons": sorted(
                re.sub(r"^clocks_(event|throttle)_reason_", "", reason.tag)
                for reason in (reasons if reasons is not None else [])
                if yes_no(reason.text) is True
            ),
        },
        "temperature_c": number("temperature/gpu_temp"),
        "temperature_margin_c": number("temperature/gpu_temp_tlimit"),
        "power_w": number("gpu_power_readings/instant_power_draw") or number("gpu_power_readings/power_draw"),
        "power_limit_w": number("gpu_power_readings/current_power_limit"),
        "power_limit_default_w": number("gpu_power_readings/default_power_limit"),
        "pcie": {
            "generation": number("pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
            "generation_max": number("pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
            "width": number("pci/pci_gpu_link_info/link_widths/current_link_width"),
            "width_max": number("pci/pci_gpu_link_info/link_widths/max_link_width"),
            "replays": number("pci/replay_counter"),
        },
        "fabric": {
            "state": word("fabric/state"),
            "status": word("fabric/status"),
            "clique": word("fabric/cliqueId"),
            "cluster": word("fabric/clusterUuid"),
            "health": {name: word for name, word in health.items() if word is not None},
        },
        "processes": [
            {
                "pid": number_of(process.findtext("pid")),
                "type": value_of(process.findtext("type")),
                "name": value_of(process.findtext("process_name")),
                "memory_mib": number_of(process.findtext("used_memory")),
            }
            for process in gpu.findall("processes/process_info")
        ],
    }


def _sum(gpu: ElementTree.Element, path: str, word: str) -> int | None:
    """The sum of all counters below C(path) with C(word) in their name, None when the GPU has none of them."""
    block = gpu.find(path)
    counts = [number_of(child.text) for child in (block if block is not None else []) if word in child.tag]
    known = [int(count) for count in counts if count is not None]
    return sum(known) if known else None


def normalise_bus(bus: str) -> str:
    """A PCI address as sysfs writes it: C(00000000:1B:00.0) gives C(0000:1b:00.0)."""
    match = re.fullmatch(r"(?:([0-9a-fA-F]+):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])", bus.strip())
    if not match:
        return bus.strip().lower()
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower()


def parse_driver_version(text: str) -> dict[str, str | None]:
    """C(/proc/driver/nvidia/version): the version of the running module and its flavour, open or proprietary."""
    line = next((line for line in text.splitlines() if line.startswith("NVRM version")), "")
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", f"{line} ")
    flavour = None
    if line:
        flavour = "open" if "Open Kernel Module" in line else "proprietary"
    return {"version": match[1] if match else None, "flavour": flavour}


def flavour_of_license(text: str) -> str | None:
    """The flavour of a module on disk by C(modinfo -F license nvidia)."""
    text = text.strip()
    if not text:
        return None
    return "open" if "GPL" in text or "MIT" in text else "proprietary"


def parse_nvlink_status(text: str) -> list[dict[str, t.Any]]:
    """C(nvidia-smi nvlink --status): per GPU the links that are up and their rates in GB/s, and those that are not."""
    gpus: list[dict[str, t.Any]] = []
    for line in text.splitlines():
        if match := re.match(r"\s*GPU (\d+):", line):
            gpus.append({"index": int(match[1]), "up": 0, "inactive": [], "rates": []})
        elif gpus and (match := re.match(r"\s*Link (\d+):\s*(.*\S)", line)):
            rate = number_of(match[2])
            if rate:
                gpus[-1]["up"] += 1
                gpus[-1]["rates"].append(float(rate))
            else:
                gpus[-1]["inactive"].append(int(match[1]))
    for gpu in gpus:
        gpu["rates"] = sorted(set(gpu["rates"]))
    return gpus


def parse_nvlink_errors(text: str) -> dict[int, dict[str, int]]:
    """C(nvidia-smi nvlink --errorcounters): per GPU the counters that are not zero, added up over its links."""
    gpus: dict[int, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in text.splitlines():
        if match := re.match(r"\s*GPU (\d+):", line):
            current = gpus.setdefault(int(match[1]), {})
        elif match := re.match(r"\s*Link \d+:\s*(.*\S)\s*:\s*(\d+)\s*$", line):
            name, count = match[1], int(match[2])
            if count and tells_of_errors(name):
                current[name] = current.get(name, 0) + count
    return gpus


def tells_of_errors(name: str) -> bool:
    """Whether a counter of an NVLink, when it is not zero, tells of something that went wrong.

    Since NVLink 5 there are many that count on a healthy link: traffic, lanes before correction (C(Raw Errors)), and
    C(FEC Errors - N), the code words in which N symbols were put right: those with none are billions, and one or two
    are what the correction is there for. More in one word is worth a look, long before it is too many.
    """
    if match := re.fullmatch(r"FEC Errors - (\d+)", name):
        return int(match[1]) > 2
    if name.startswith(("Raw ", "Total ")):
        return False
    return bool(re.search(r"[Ee]rrors?\b|discards$|recovery \w+ events$", name))


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """The matrix of C(nvidia-smi topo -m); the tool underlines its header with escapes even into a pipe."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    header: list[str] = []
    matrix: dict[str, dict[str, str]] = {}
    for line in lines:
        cells = [cell.strip() for cell in line.split("\t")]
        if not header and any(re.fullmatch(r"GPU0|NIC0", cell) for cell in cells[1:]):
            header = cells[1:]
        elif header and re.fullmatch(r"(GPU|NIC)\d+", cells[0]):
            matrix[cells[0]] = {
                name: cell for name, cell in zip(header, cells[1:], strict=False) if re.fullmatch(r"(GPU|NIC)\d+", name)
            }
    return matrix


# What the kernel's log tells, since boot.
_KERNEL = {
    "rm_init_adapter": re.compile(r"RmInitAdapter failed"),
    "module_rejected": re.compile(r"Key was rejected by service|module verification failed.*nvidia"),
    "hmm": re.compile(r"request_free_mem_region|uvm_(?:hmm|devmem).*-34"),
    "symbol_version": re.compile(r"nvidia_peermem: disagrees about version of symbol|nvidia_peermem: Unknown symbol"),
    "version_mismatch": re.compile(r"API mismatch: the client has the version"),
    "not_open": re.compile(r"requires use of the NVIDIA open kernel modules"),
    "mlx5": re.compile(r"mlx5_core.*(?:health poll failed|Port module event: module \d+, Cable error|FW fatal)"),
}


def parse_kernel_log(lines: t.Iterable[str]) -> dict[str, t.Any]:
    """Xid and SXid events and the sentences of a driver that did not come up; every event once, with its count."""
    xids: dict[tuple[int, str], dict[str, t.Any]] = {}
    sxids: dict[tuple[int, str], dict[str, t.Any]] = {}
    told: dict[str, str] = {}
    for line in lines:
        if match := re.search(r"NVRM: Xid \(([^)]*)\): (\d+)(.*)", line):
            _count(xids, int(match[2]), normalise_bus(match[1].replace("PCI:", "") + ".0"), match[3])
        elif match := re.search(r"SXid \(([^)]*)\): (\d+)(.*)", line):
            _count(sxids, int(match[2]), normalise_bus(match[1].replace("PCI:", "")), match[3])
        for name, pattern in _KERNEL.items():
            if name not in told and pattern.search(line):
                told[name] = line.strip()[:300]
    return {"xid": list(xids.values()), "sxid": list(sxids.values()), **{name: told.get(name) for name in _KERNEL}}


def _count(events: dict[tuple[int, str], dict[str, t.Any]], code: int, bus: str, text: str) -> None:
    event = events.setdefault((code, bus), {"code": code, "bus": bus, "count": 0, "text": text.strip(" ,:")[:200]})
    event["count"] += 1


def parse_packages(text: str) -> dict[str, dict[str, str]]:
    """Lines of C(dpkg-query): status, package, version, architecture, as name to version; only what is installed."""
    packages = {}
    for line in text.splitlines():
        cells = line.split("\t")
        if len(cells) == 4 and cells[0].strip() in ("ii", "hi", "iU", "iF", "hU", "hF"):
            packages[cells[1]] = {"version": cells[2], "architecture": cells[3], "state": cells[0].strip()}
    return packages


def parse_policy(text: str) -> dict[str, dict[str, t.Any]]:
    """C(apt-cache policy NAME ...): installed and candidate version, and where each comes from."""
    result: dict[str, dict[str, t.Any]] = {}
    entry: dict[str, t.Any] = {}
    version = ""
    for line in text.splitlines():
        if match := re.match(r"(\S+):$", line):
            entry = result.setdefault(match[1], {"installed": None, "candidate": None, "versions": {}})
        elif match := re.match(r"  (Installed|Candidate): (\S+)", line):
            entry[match[1].lower()] = None if match[2] == "(none)" else match[2]
        elif match := re.match(r" (?:\*\*\*|   ) (\S+) (-?\d+)$", line):
            version = match[1]
            entry["versions"][version] = {"priority": int(match[2]), "origins": []}
        elif match := re.match(r"\s+(-?\d+) (\S.*)$", line):
            origin = match[2].split()[0]
            if version and origin != "/var/lib/dpkg/status":
                entry["versions"][version]["origins"].append(origin)
    return result


def origin_kind(urls: t.Iterable[str]) -> str | None:
    """Whose repository a package comes from, by its address."""
    for url in urls:
        if "lambdalabs.com" in url or "lambda.ai" in url:
            return "lambda"
        if "nvidia.com" in url or "/cuda/repos/" in url:
            return "nvidia"
        if "ubuntu.com" in url or "canonical" in url:
            return "ubuntu"
        if "debian.org" in url:
            return "debian"
    return "other" if list(urls) else None


def parse_source_lines(text: str) -> list[dict[str, t.Any]]:
    """Lines of a list of sources of apt: C(deb [signed-by=KEY] ADDRESS SUITE COMPONENT ...)."""
    found = []
    for line in text.splitlines():
        if match := re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)", line):
            options = dict(word.split("=", 1) for word in (match[1] or "").split() if "=" in word)
            found.append({"url": match[2], "suites": [match[3]], "signed_by": options.get("signed-by")})
    return found


def parse_source_stanzas(text: str) -> list[dict[str, t.Any]]:
    """Stanzas of a C(.sources) file; a key that is written into it is given as C(embedded)."""
    found = []
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t") and name:
                fields[name] += f" {line.strip()}"
            elif ":" in line:
                name, _colon, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if fields.get("enabled", "yes").lower() in ("no", "false", "0", "off", "without", "disable"):
            continue
        if "deb" not in fields.get("types", "").split():
            continue
        key = fields.get("signed-by")
        signed_by = "embedded" if key and "BEGIN PGP" in key else key
        for url in fields.get("uris", "").split():
            found.append({"url": url, "suites": fields.get("suites", "").split(), "signed_by": signed_by})
    return found


def release_of(version: str | None) -> tuple[int, ...]:
    """The numbers of a driver or package version: C(1:580.126.09-1) gives (580, 126, 9)."""
    match = re.match(r"(?:\d+:)?(\d+(?:\.\d+)*)", version or "")
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def upstream_of(version: str | None) -> str | None:
    """The upstream part of a package version: C(1:580.126.09-1ubuntu1) gives C(580.126.09)."""
    match = re.match(r"(?:\d+:)?(\d+(?:\.\d+)+)", version or "")
    return match[1] if match else None


def companions_of(packages: t.Mapping[str, t.Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """The companions of the driver that are installed: kind to package and version."""
    found = {}
    for kind, pattern in COMPANIONS.items():
        for name in sorted(packages):
            if pattern.fullmatch(name):
                found[kind] = {"package": name, "version": packages[name]["version"]}
    return found
