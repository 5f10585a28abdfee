# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One look at a host's GPUs, driver and packages; what it finds is parsed by C(gpu_facts)."""

from __future__ import annotations

import os
import re
import typing as t

from ansible_collections.baremetal.kimi_k3.plugins.module_utils import gpu_facts as facts
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.host_look import Look, first_line

SERVICES = (
    "nvidia-fabricmanager.service",
    "nvidia-persistenced.service",
    "nvidia-dcgm.service",
    "nvidia-imex.service",
    "nvlsm.service",
)
MODULES = (
    "nvidia",
    "nvidia_uvm",
    "nvidia_peermem",
    "nouveau",
    "mlx5_core",
    "mlx5_ib",
    "ib_umad",
    "ib_uverbs",
    "rdma_cm",
)

# How apt's lists of sources are written, by the end of their name; apt reads no others.
PARSERS = {".list": facts.parse_source_lines, ".sources": facts.parse_source_stanzas}


def gather(look: Look, packages: bool = True, kernel_log: bool = True, ask: t.Sequence[str] = ()) -> dict[str, t.Any]:
    """All that the module C(gpu_info) returns."""
    smi, problem = smi_answer(look)
    log = facts.parse_kernel_log(kernel_lines(look) if kernel_log else [])
    found = {
        "gpus": smi["gpus"],
        "smi": {"problem": problem, "driver": smi["driver"], "cuda": smi["cuda"]},
        "pci": pci_gpus(look),
        "driver": driver(look),
        "modules": loaded_modules(look),
        "services": services(look, SERVICES),
        "nvlink": nvlink(look) if smi["gpus"] else [],
        "kernel_log": log,
        "cuda_compat": compat_paths(look),
        "system": system(look),
        "toolkit": toolkit(look),
    }
    found["packages"] = package_state(look, ask) if packages else None
    return found


def smi_answer(look: Look) -> tuple[dict[str, t.Any], str | None]:
    """What nvidia-smi says, and one sentence when it says nothing."""
    empty: dict[str, t.Any] = {"driver": None, "cuda": None, "gpus": []}
    answer = look.run("nvidia-smi", "-q", "-x")
    if answer is None:
        return empty, "there is no nvidia-smi on this host"
    rc, out, err = answer
    if rc != 0:
        told = " ".join((out + " " + err).split())[:300]
        return empty, f"nvidia-smi exited {rc}: {told}"
    try:
        return facts.parse_smi(out), None
    except facts.SmiError as error:
        return empty, f"nvidia-smi -q -x cannot be read: {error}"


def pci_gpus(look: Look) -> list[dict[str, t.Any]]:
    """NVIDIA's GPUs on the bus, whatever driver they have: address, device id, driver, NUMA node, path."""
    found = []
    for address in look.names(look.sys("bus/pci/devices")):
        folder = look.sys("bus/pci/devices", address)
        if look.text(f"{folder}/vendor") != facts.NVIDIA_VENDOR:
            continue
        kind = look.text(f"{folder}/class") or ""
        if kind[:6] not in ("0x0300", "0x0302"):
            continue
        link = f"{folder}/driver"
        found.append(
            {
                "bus": address,
                "device": look.text(f"{folder}/device"),
                "driver": os.path.basename(os.path.realpath(link)) if os.path.lexists(link) else None,
                "numa": facts.number_of(look.text(f"{folder}/numa_node")),
                "path": pci_path(folder),
            }
        )
    return found


def pci_path(folder: str) -> list[str]:
    """The way from the host bridge to a device, as the names of sysfs."""
    parts = os.path.realpath(folder).split("/")
    start = next((i for i, part in enumerate(parts) if re.match(r"pci[0-9a-f]{4}:[0-9a-f]{2}$", part)), None)
    return [] if start is None else parts[start:]


def driver(look: Look) -> dict[str, t.Any]:
    """The running module, the one on disk, and how it came there."""
    running = facts.parse_driver_version(look.text(look.proc("driver/nvidia/version")) or "")
    path = look.word("modinfo", "-F", "filename", "nvidia") or None
    owner = None
    if path and not path.startswith("("):
        told = look.output("dpkg-query", "--search", path)
        owner = told.split(":", 1)[0] if ":" in told else None
    return {
        "running": running["version"],
        "running_flavour": running["flavour"],
        "installed": look.word("modinfo", "-F", "version", "nvidia") or None,
        "installed_flavour": facts.flavour_of_license(look.word("modinfo", "-F", "license", "nvidia")),
        "module": path,
        "owner": owner,
        "dkms": bool(path and "/updates/dkms/" in path),
        "run_file": os.path.exists(look.host("/usr/bin/nvidia-uninstall")),
        "parameters": parameters(look.text(look.proc("driver/nvidia/params")) or ""),
    }


def parameters(text: str) -> dict[str, str]:
    """C(/proc/driver/nvidia/params) as a dictionary."""
    return {
        name.strip(): value.strip()
        for name, colon, value in (line.partition(":") for line in text.splitlines())
        if colon
    }


def loaded_modules(look: Look) -> list[str]:
    """Which of the modules that matter are loaded, or built into the kernel."""
    loaded = {line.split()[0] for line in (look.text(look.proc("modules"), 1 << 22) or "").splitlines() if line}
    return [name for name in MODULES if name in loaded or os.path.isdir(look.sys("module", name))]


def services(look: Look, names: t.Iterable[str]) -> dict[str, dict[str, str]]:
    """State of units in one call of systemctl; what systemd does not know is left out."""
    words = ["show", "--property", "Id,LoadState,ActiveState,SubState,UnitFileState,Result", "--", *names]
    found = {}
    for block in look.output("systemctl", *words).split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if fields.get("Id") and fields.get("LoadState") not in ("not-found", "", None):
            found[fields["Id"]] = {
                "load": fields["LoadState"],
                "active": fields.get("ActiveState", ""),
                "sub": fields.get("SubState", ""),
                "enabled": fields.get("UnitFileState", ""),
                "result": fields.get("Result", ""),
            }
    return found


def nvlink(look: Look) -> list[dict[str, t.Any]]:
    """Per GPU the links that are up, with the error counters that are not zero."""
    gpus = facts.parse_nvlink_status(look.output("nvidia-smi", "nvlink", "--status"))
    errors = facts.parse_nvlink_errors(look.output("nvidia-smi", "nvlink", "--errorcounters")) if gpus else {}
    return [{**gpu, "errors": errors.get(gpu["index"], {})} for gpu in gpus]


def kernel_lines(look: Look) -> list[str]:
    """The kernel's log since boot, from the journal, or from its ring buffer where there is no journal."""
    out = look.output("journalctl", "--dmesg", "--boot", "--no-pager", "--quiet", "--output=cat")
    if not out.strip():
        out = look.output("dmesg")
    return [line for line in out.splitlines() if re.search(r"NVRM|nvidia|nouveau|SXid|mlx5|free_mem_region|uvm_", line)]


def compat_paths(look: Look) -> list[str]:
    """Places in the dynamic linker's configuration that put CUDA's compatibility libraries before the driver's."""
    found = []
    folder = look.host("/etc/ld.so.conf.d")
    for name in look.names(folder):
        for line in (look.text(os.path.join(folder, name)) or "").splitlines():
            entry = line.split("#")[0].strip()
            if re.search(r"/cuda[^/]*/compat|/compat/?$", entry):
                found.append(f"/etc/ld.so.conf.d/{name}: {entry}")
    return found


def system(look: Look) -> dict[str, str | None]:
    """The distribution, the machine's architecture, and the kind of virtual machine."""
    release = dict(re.findall(r'(?m)^(ID|VERSION_ID)="?([^"\n]*)"?$', look.text(look.host("/etc/os-release")) or ""))
    answer = look.run("systemd-detect-virt", "--vm")
    virtual = first_line(answer[1]) if answer else None
    return {**release, "machine": os.uname().machine, "virtualization": virtual or None}


def toolkit(look: Look) -> str | None:
    """The release of the CUDA toolkit's compiler, where there is one."""
    program = look.program("nvcc") or look.host("/usr/local/cuda/bin/nvcc")
    if not os.path.exists(program):
        return None
    match = re.search(r"release [\d.]+, V([\d.]+)", look.output(program, "--version"))
    return match[1] if match else None


def package_state(look: Look, ask: t.Sequence[str] = ()) -> dict[str, t.Any]:
    """The driver's packages, where they come from, what holds and pins them; empty where dpkg is not."""
    listing = look.run(
        "dpkg-query",
        "--show",
        "--showformat=${db:Status-Abbrev}\\t${Package}\\t${Version}\\t${Architecture}\\n",
        *facts.PACKAGE_PATTERNS,
    )
    # dpkg-query exits 1 when one of the patterns matches nothing, which is the usual case.
    installed = facts.parse_packages(listing[1]) if listing else {}
    names = [name for name in installed if re.search(r"nvidia|nvlsm|nvsdm|gpu-manager|lambda|doca", name)]
    names += [name for name in ask if name not in names]
    policy = facts.parse_policy(look.output("apt-cache", "policy", *names)) if names else {}
    origins = {}
    for name, entry in policy.items():
        here = entry["versions"].get(entry["installed"] or "", {"origins": []})
        origins[name] = facts.origin_kind(here["origins"])
    return {
        "installed": installed,
        "origins": origins,
        "candidates": {name: entry["candidate"] for name, entry in policy.items()},
        "policy": {name: policy[name] for name in ask if name in policy},
        "held": sorted(set(look.output("apt-mark", "showhold").split())),
        "companions": facts.companions_of(installed),
        "sources": sources(look),
        "preferences": preferences(look),
        "unattended_exclusions": unattended(look),
    }


def sources(look: Look) -> list[dict[str, t.Any]]:
    """The entries of apt's lists of sources that are in force: file, address, suites, key."""
    found = []
    folder = look.host("/etc/apt/sources.list.d")
    for file in [look.host("/etc/apt/sources.list"), *[os.path.join(folder, name) for name in look.names(folder)]]:
        parse = PARSERS.get(os.path.splitext(file)[1])
        if parse:
            found += [{"file": file[len(look.root) :], **entry} for entry in parse(look.text(file) or "")]
    return found


def preferences(look: Look) -> list[dict[str, str]]:
    """The stanzas of apt's preferences: file, packages, pin, priority."""
    found = []
    folder = look.host("/etc/apt/preferences.d")
    files = [look.host("/etc/apt/preferences"), *[os.path.join(folder, name) for name in look.names(folder)]]
    for file in files:
        if file.endswith((".dpkg-old", ".dpkg-dist", ".bak", ".disabled")):
            continue
        for stanza in re.split(r"\n\s*\n", look.text(file) or ""):
            fields = dict(re.findall(r"(?mi)^(Package|Pin|Pin-Priority):\s*(.*?)\s*$", stanza))
            fields = {name.lower(): value for name, value in fields.items()}
            if "package" in fields and "pin" in fields:
                found.append(
                    {
                        "file": file[len(look.root) :],
                        "package": fields["package"],
                        "pin": fields["pin"],
                        "priority": fields.get("pin-priority", ""),
                    }
                )
    return found


def unattended(look: Look) -> list[str]:
    """Patterns that unattended-upgrades leaves alone."""
    text = look.output("apt-config", "dump", "Unattended-Upgrade::Package-Blacklist")
    return re.findall(r'Unattended-Upgrade::Package-Blacklist:: "([^"]*)"', text)
