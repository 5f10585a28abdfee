# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judging what was observed on all hosts against what was declared, and the hosts against each other: pure, no I/O.

Nothing is learned from a host: a link that is already degraded would become the norm. A check is a function that yields
what is not right; no word from it means that all is well. Each has an id by which it can be waived, with a reason.
"""

from __future__ import annotations

import json
import re
import typing as t
from dataclasses import dataclass, field

from ansible_collections.baremetal.kimi_k3.plugins.module_utils import gpu_facts, rdma_facts
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.launch import applicable_environment

FAIL, WARN = "fail", "warn"

# Xid codes that mean a broken GPU, link or driver; what is not among them is often an application's own fault.
# From NVIDIA's catalogue; 94/95 contained and uncontained ECC, 140 to 150 NVLink 5, 154 recovery action changed.
XID_FATAL = frozenset(
    {
        48,
        56,
        57,
        58,
        62,
        63,
        64,
        65,
        68,
        69,
        73,
        74,
        79,
        80,
        81,
        92,
        94,
        95,
        119,
        120,
        121,
        136,
        140,
        *range(142, 151),
        154,
    }
)
# Environment that must not reach the service, and why. Switches do nothing at 0, the others have no harmless value.
FORBIDDEN_SWITCHES = {
    "NCCL_P2P_DISABLE": "turns NVLink off",
    "NCCL_IB_DISABLE": "turns InfiniBand off",
    "NCCL_SHM_DISABLE": "turns shared memory off",
    "NCCL_IGNORE_NET_MISMATCH": "turns a mismatch between hosts into a silent hang",
    "CUDA_LAUNCH_BLOCKING": "makes every kernel wait",
}
FORBIDDEN = {
    "NCCL_ALGO": "belongs to a measurement",
    "NCCL_PROTO": "belongs to a measurement",
    "NCCL_TOPO_FILE": "replaces what NCCL sees of the machine",
    "LD_PRELOAD": "puts a foreign library into every process",
}
FORBIDDEN_DEBUG = {"NCCL_DEBUG": ("INFO", "TRACE")}
# Words of a healthy NVLink fabric, by the entry of its health block: what is fine for one is a fault in another.
NO_FAULT = ("False", "No")
FABRIC_HEALTH = {
    "summary": ("Healthy",),
    "bandwidth": ("Full",),
    "route_recovery_in_progress": NO_FAULT,
    "route_unhealthy": NO_FAULT,
    "access_timeout_recovery": NO_FAULT,
    "incorrect_configuration": ("None", *NO_FAULT),
    "partition_assigned": ("True", "Yes"),
}
# Packages that unattended-upgrades would break a running replica with: the driver and what must equal it.
DRIVER_PACKAGE = re.compile(r"nvidia-|libnvidia-|libnvsdm|nvlsm$|cuda-drivers")

CHECKS: dict[str, Check] = {}


class Problem(t.NamedTuple):
    """What is not right, in words for the operator."""

    observed: str
    expected: str
    text: str
    remedy: str | None = None
    # Where one finding of a check is less, or more, than the check usually is.
    severity: str | None = None


@dataclass(frozen=True)
class Host:
    """One host: its name, what was observed on it, and what was declared of it."""

    name: str
    facts: t.Mapping[str, t.Any]
    expect: t.Mapping[str, t.Any]

    @property
    def gpus(self) -> list[dict[str, t.Any]]:
        return list(self.facts["gpu"]["gpus"])

    @property
    def driver(self) -> str | None:
        return self.facts["gpu"]["driver"]["running"]

    @property
    def packages(self) -> dict[str, t.Any]:
        return self.facts["gpu"]["packages"] or {}

    @property
    def virtual(self) -> bool:
        return self.facts["virtualization"] not in (None, "none")

    @property
    def serving(self) -> bool:
        """Whether processes of the replica run: not so between two attempts of a unit that is restarted in vain."""
        return bool(self.facts["unit"]["running"])

    @property
    def peers(self) -> int:
        return len(self.facts.get("meeting", {}).get("peers", []))

    @property
    def fabric_env(self) -> dict[str, tuple[str, str]]:
        """What role fabric has written, each value with the path of its file."""
        files = {path: found for path, found in self.facts["environment"].items() if path.endswith("/fabric.env")}
        return {name: (value, path) for path, found in files.items() for name, value in found.items()}

    @property
    def environment(self) -> dict[str, tuple[str, str]]:
        """Each variable that the next start would have, with its value and where it was set.

        That is what role serve renders: fabric.env, and over it serve_environment, whose None leaves a variable out.
        The serve.env that is there is an earlier rendering, and would hold the run up that replaces it. What
        /etc/environment sets reaches who logs in, never a service.
        """
        given = self.expect.get("environment") or {}
        found = {name: value for name, value in self.fabric_env.items() if given.get(name, "") is not None}
        for name, value in applicable_environment(given, "0", {}).items():
            found[name] = (value, "serve_environment")
        return found

    @property
    def version(self) -> str:
        """The engine's release, empty when there is none yet."""
        return str(((self.facts["engine"] or {}).get("versions") or {}).get("vllm") or "")

    def flag(self, name: str) -> t.Any:
        return (self.expect.get("args") or {}).get(name)


Finder = t.Callable[..., t.Iterator[t.Any]]


@dataclass(frozen=True)
class Check:
    """A check of one host (C(across) false) or of all hosts together."""

    id: str
    title: str
    severity: str
    looks_at: str
    remedy: str
    needs: str
    across: bool
    find: Finder = field(compare=False)


def check(
    id_: str, title: str, severity: str, *, looks_at: str, remedy: str, needs: str = "", across: bool = False
) -> t.Callable[[Finder], Finder]:
    """Register a check. C(needs): C(gpus), C(rails), C(fabric) or nothing; hosts declared without it are skipped."""

    def register(find: Finder) -> Finder:
        CHECKS[id_] = Check(id_, title, severity, looks_at, remedy, needs, across, find)
        return find

    return register


def wanted(host: Host, needs: str) -> bool:
    """Whether a check applies to a host by what was declared of it."""
    return {
        "": True,
        "gpus": int(host.expect["gpus"]) > 0,
        "rails": int(host.expect["rails"]) > 0,
        "fabric": int(host.expect["gpus"]) > 0 and bool(host.expect["fabric"]),
        "peers": host.peers > 0,
    }[needs]


def gpu_list(gpus: t.Iterable[t.Mapping[str, t.Any]]) -> str:
    return ", ".join(f"GPU {gpu['index']}" for gpu in gpus)


# The driver


@check(
    "smi",
    "nvidia-smi answers",
    FAIL,
    needs="gpus",
    looks_at="`nvidia-smi -q -x`, its exit status and what it says",
    remedy="Run playbooks/prepare.yml; where library and module differ in version, reboot.",
)
def _smi(host: Host) -> t.Iterator[Problem]:
    problem = host.facts["gpu"]["smi"]["problem"]
    if not problem:
        return
    remedy = None
    if re.search(r"version mismatch", problem, re.IGNORECASE):
        remedy = "Reboot, or reload the modules: user space was upgraded under a running driver. Hold the packages."
    yield Problem(problem, "an answer", f"The GPUs of {host.name} cannot be asked: {problem}.", remedy)


@check(
    "gpu-count",
    "GPU count",
    FAIL,
    looks_at="GPUs that the driver has, against `preflight_expect_gpus`; GPUs on the PCI bus",
    remedy="Look for Xid 79 and RmInitAdapter in the kernel's log, reseat or replace the GPU, power-cycle the host.",
)
def _gpu_count(host: Host) -> t.Iterator[Problem]:
    expected, seen, bus = int(host.expect["gpus"]), len(host.gpus), len(host.facts["gpu"]["pci"])
    if seen == expected:
        return
    if not host.gpus and host.facts["gpu"]["smi"]["problem"] and bus == expected:
        return  # nvidia-smi is the problem, and told by its own check
    text = f"{host.name} has {seen} GPUs that the driver can use and {bus} on its PCI bus, {expected} are expected."
    yield Problem(f"{seen} ({bus} on the bus)", str(expected), text)


@check(
    "gpu-model",
    "GPU name and memory",
    FAIL,
    needs="gpus",
    looks_at="product name and memory of every GPU, against `preflight_expect_gpu_name` and `_gpu_memory_mib`",
    remedy="Declare what the hosts have, or use hosts that have what the shape of the replica was made for.",
)
def _gpu_model(host: Host) -> t.Iterator[Problem]:
    name, memory = str(host.expect["gpu_name"]), int(host.expect["gpu_memory_mib"])
    others = [gpu for gpu in host.gpus if name and not re.search(name, gpu["name"] or "")]
    if others:
        seen = ", ".join(sorted({str(gpu["name"]) for gpu in others}))
        yield Problem(seen, name, f"{gpu_list(others)} of {host.name} is {seen}, expected is {name}.")
    small = [gpu for gpu in host.gpus if (gpu["memory_total_mib"] or 0) < memory]
    if small:
        seen = str(min(gpu["memory_total_mib"] or 0 for gpu in small))
        yield Problem(f"{seen} MiB", f"{memory} MiB", f"{gpu_list(small)} of {host.name} has {seen} MiB of memory.")


@check(
    "driver-version",
    "Driver branch",
    FAIL,
    needs="gpus",
    looks_at="`/proc/driver/nvidia/version`, against `preflight_expect_driver`",
    remedy="Run playbooks/prepare.yml with cuda_manage_driver: true, or set cuda_compat: true for an older driver.",
)
def _driver_version(host: Host) -> t.Iterator[Problem]:
    floor = str(host.expect["driver"])
    if host.driver is None:
        text = f"No NVIDIA driver runs on {host.name}."
        yield Problem("none", f">= {floor}", text, "Run playbooks/prepare.yml.")
    elif gpu_facts.release_of(host.driver) < gpu_facts.release_of(floor) and not host.expect["cuda_compat"]:
        text = f"{host.name} runs driver {host.driver}: CUDA 13 needs {floor} or newer, or its compatibility libraries."
        yield Problem(host.driver, f">= {floor}", text)


@check(
    "driver-flavour",
    "Open kernel modules",
    FAIL,
    needs="gpus",
    looks_at=(
        "the words of `/proc/driver/nvidia/version`, `modinfo -F license nvidia`, RmInitAdapter in the kernel's log"
    ),
    remedy="Install the open modules (nvidia-open): Blackwell has no others. playbooks/prepare.yml does, when told.",
)
def _driver_flavour(host: Host) -> t.Iterator[Problem]:
    driver = host.facts["gpu"]["driver"]
    flavour = driver["running_flavour"] or driver["installed_flavour"]
    if flavour == "proprietary":
        text = f"{host.name} has the proprietary kernel modules, which do not start a Blackwell GPU (RmInitAdapter)."
        yield Problem("proprietary", "open", text)
    told = host.facts["gpu"]["kernel_log"].get("rm_init_adapter")
    if told and flavour != "proprietary":
        yield Problem(told, "no such line", f"A GPU of {host.name} did not start: {told}")


@check(
    "cuda-version",
    "CUDA of the driver fits the engine",
    FAIL,
    needs="gpus",
    looks_at="the CUDA release that the driver states, against `preflight_expect_cuda` and the engine's torch",
    remedy="Upgrade the driver, or install an engine built for the CUDA that it has.",
)
def _cuda_version(host: Host) -> t.Iterator[Problem]:
    cuda, floor = host.facts["gpu"]["smi"]["cuda"], str(host.expect["cuda"])
    engine = host.facts["engine"] or {"versions": {}}
    torch = str((engine["versions"] or {}).get("torch") or "")
    match = re.search(r"\+cu(\d\d)(\d)", torch)
    if match and gpu_facts.release_of(f"{match[1]}.{match[2]}")[:1] > gpu_facts.release_of(floor)[:1]:
        floor = f"{match[1]}.{match[2]}"
    if cuda and gpu_facts.release_of(cuda)[:1] < gpu_facts.release_of(floor)[:1] and not host.expect["cuda_compat"]:
        text = f"The driver of {host.name} knows CUDA {cuda}, the engine needs {floor}."
        yield Problem(cuda, f">= {floor}", text)


@check(
    "companions",
    "Fabric Manager, NSCQ, NVSDM and IMEX equal the driver",
    FAIL,
    needs="gpus",
    looks_at="versions of the installed companions, against the running driver",
    remedy="Install the companions in exactly the driver's version and hold them: playbooks/prepare.yml.",
)
def _companions(host: Host) -> t.Iterator[Problem]:
    for kind, found in sorted((host.packages.get("companions") or {}).items()):
        version = gpu_facts.upstream_of(found["version"])
        if host.driver and version and version != host.driver:
            text = f"{found['package']} of {host.name} is {version}, but its driver is {host.driver}."
            yield Problem(f"{kind} {version}", host.driver, text)


@check(
    "fabric-manager",
    "Fabric Manager runs",
    FAIL,
    needs="fabric",
    looks_at="state of nvidia-fabricmanager.service; on metal alone, since a guest's runs outside of it",
    remedy="systemctl status nvidia-fabricmanager; it needs the driver's version, and on NVLink 5 nvlsm and ib_umad.",
)
def _fabric_manager(host: Host) -> t.Iterator[Problem]:
    service = host.facts["gpu"]["services"].get("nvidia-fabricmanager.service")
    if host.virtual:
        return
    if service is None:
        text = f"{host.name} has no Fabric Manager: without it CUDA ends with error 802."
        yield Problem("not installed", "active", text)
    elif service["active"] != "active":
        text = f"The Fabric Manager of {host.name} is {service['active']} ({service['result']})."
        yield Problem(service["active"], "active", text)


@check(
    "nvlsm",
    "NVLink 5 has NVLSM and ib_umad",
    FAIL,
    needs="fabric",
    looks_at=(
        "package nvlsm, module ib_umad, on metal with `preflight_expect_nvlsm`; isSMDisabled (bit 10 of the capability "
        "mask) of the NVSwitch management ports"
    ),
    remedy="Install nvlsm and load ib_umad before the Fabric Manager: roles cuda and fabric do. Cloud kernels have the "
    "module in linux-modules-extra.",
)
def _nvlsm(host: Host) -> t.Iterator[Problem]:
    if host.virtual or not host.expect["nvlsm"]:
        return
    if "nvlsm" not in (host.packages.get("installed") or {}) and host.facts["gpu"]["packages"] is not None:
        text = f"{host.name} has no nvlsm: its Fabric Manager says NV_WARN_NOTHING_TO_DO, and CUDA ends with error 802."
        yield Problem("not installed", "nvlsm", text)
    if "ib_umad" not in host.facts["gpu"]["modules"]:
        text = f"ib_umad is not loaded on {host.name}: its Fabric Manager's precheck fails."
        yield Problem("not loaded", "ib_umad", text)
    # NVLSM takes a port of a marked function whose subnet manager is not disabled.
    marked = [port for device in host.facts["rdma"]["devices"] if device["vpd"]["sw_mng"] for port in device["ports"]]
    if marked and all(port["sm_disabled"] for port in marked):
        text = f"Every NVSwitch management port of {host.name} has its subnet manager disabled."
        yield Problem("all disabled", "one that is not", text, "Ask the vendor of the machine: NVLSM has no port.")


@check(
    "fabric-state",
    "NVLink fabric is complete",
    FAIL,
    needs="fabric",
    looks_at="fabric state and status of every GPU",
    remedy=(
        "In Progress is normal for some seconds after boot. If it stays: fix the Fabric Manager first, "
        "see fabric-manager."
    ),
)
def _fabric_state(host: Host) -> t.Iterator[Problem]:
    bad = [gpu for gpu in host.gpus if (gpu["fabric"]["state"], gpu["fabric"]["status"]) != ("Completed", "Success")]
    if bad:
        seen = ", ".join(sorted({f"{gpu['fabric']['state']} / {gpu['fabric']['status']}" for gpu in bad}))
        text = f"The fabric of {gpu_list(bad)} on {host.name} is {seen}: CUDA would end with error 802."
        yield Problem(seen, "Completed / Success", text)


@check(
    "fabric-health",
    "NVLink fabric is healthy and one",
    FAIL,
    needs="fabric",
    looks_at="the fabric's health block, clique and cluster of every GPU",
    remedy="nvidia-smi -q shows the block; too few links or a degraded bandwidth is the vendor's to mend.",
)
def _fabric_health(host: Host) -> t.Iterator[Problem]:
    for gpu in host.gpus:
        health = gpu["fabric"]["health"]
        bad = {name: word for name, word in health.items() if word not in FABRIC_HEALTH.get(name, (word,))}
        # An entry that a newer driver adds: what is no fault in any other passes, the rest is for somebody to look at.
        fine = ("Healthy", "Full", "None", *NO_FAULT)
        new = {name: word for name, word in health.items() if name not in FABRIC_HEALTH and word not in fine}
        for found, severity in ((bad, None), (new, WARN)):
            if found:
                told = ", ".join(f"{name.replace('_', ' ')}: {word}" for name, word in sorted(found.items()))
                text = f"The fabric of GPU {gpu['index']} on {host.name} says {told}."
                yield Problem(told, "Healthy", text, severity=severity)
    cliques = {(gpu["fabric"]["cluster"], gpu["fabric"]["clique"]) for gpu in host.gpus if gpu["fabric"]["state"]}
    if len(cliques) > 1:
        told = ", ".join(f"{cluster}.{clique}" for cluster, clique in sorted(cliques, key=str))
        yield Problem(told, "one clique", f"The GPUs of {host.name} are in {len(cliques)} NVLink cliques: {told}.")


@check(
    "fabric-mode",
    "Fabric Manager is not in a mode for VM hosts",
    FAIL,
    needs="fabric",
    looks_at="FABRIC_MODE in fabricmanager.cfg",
    remedy="Set FABRIC_MODE=0 and reset the GPUs: another mode hands partitions to virtual machines.",
)
def _fabric_mode(host: Host) -> t.Iterator[Problem]:
    mode = host.facts["fabric_mode"]
    if mode not in (None, "0") and not host.virtual:
        yield Problem(f"FABRIC_MODE={mode}", "0", f"The Fabric Manager of {host.name} is in mode {mode}, for VM hosts.")


@check(
    "imex",
    "IMEX is off",
    WARN,
    needs="gpus",
    looks_at="state of nvidia-imex.service: HGX hosts have no NVLink between them",
    remedy="systemctl disable --now nvidia-imex: it does not carry NVLink over InfiniBand.",
)
def _imex(host: Host) -> t.Iterator[Problem]:
    service = host.facts["gpu"]["services"].get("nvidia-imex.service")
    if service and service["active"] == "active":
        yield Problem("active", "inactive", f"nvidia-imex runs on {host.name}, whose GPUs share no NVLink with others.")


@check(
    "persistence",
    "Persistence",
    WARN,
    needs="gpus",
    looks_at="persistence mode of every GPU",
    remedy="systemctl enable --now nvidia-persistenced.",
)
def _persistence(host: Host) -> t.Iterator[Problem]:
    off = [gpu for gpu in host.gpus if gpu["persistence"] is False]
    if off:
        yield Problem("off", "on", f"Persistence mode is off on {gpu_list(off)} of {host.name}.")


@check(
    "mig",
    "MIG is off",
    FAIL,
    needs="gpus",
    looks_at="MIG mode and compute mode of every GPU",
    remedy="nvidia-smi -mig 0, nvidia-smi -c DEFAULT, with no process on the GPU.",
)
def _mig(host: Host) -> t.Iterator[Problem]:
    on = [gpu for gpu in host.gpus if gpu["mig"]]
    if on:
        yield Problem("MIG", "off", f"{gpu_list(on)} of {host.name} is divided by MIG.")
    odd = [gpu for gpu in host.gpus if gpu["compute_mode"] not in (None, "Default", "Exclusive_Process")]
    if odd:
        seen = odd[0]["compute_mode"]
        yield Problem(seen, "Default", f"{gpu_list(odd)} of {host.name} has compute mode {seen}.")


@check(
    "ecc",
    "ECC",
    FAIL,
    needs="gpus",
    looks_at="ECC mode, uncorrectable errors since boot, SRAM threshold, pending repairs",
    remedy=(
        "Uncorrectable errors: reset the GPU; if they come back, or a repair is pending, drain and reboot or replace."
    ),
)
def _ecc(host: Host) -> t.Iterator[Problem]:
    for gpu in host.gpus:
        ecc, name = gpu["ecc"], f"GPU {gpu['index']} of {host.name}"
        if ecc["enabled"] is False:
            yield Problem("off", "on", f"ECC of {name} is off.", "nvidia-smi -e 1, then reboot.")
        if ecc["volatile_uncorrectable"]:
            count = ecc["volatile_uncorrectable"]
            yield Problem(f"{count} uncorrectable", "0", f"{name} has {count} uncorrectable memory errors since boot.")
        if ecc["sram_threshold_exceeded"]:
            yield Problem(
                "SRAM threshold", "not exceeded", f"{name} has exceeded its threshold of SRAM errors: replace it."
            )
        if ecc["repair_pending"] or ecc["unrepairable"]:
            word = "memory that cannot be repaired" if ecc["unrepairable"] else "a memory repair pending"
            yield Problem(word, "none", f"{name} has {word}.")


@check(
    "remapped-rows",
    "Remapped rows and retired pages",
    FAIL,
    needs="gpus",
    looks_at="remapping pending, remapping failure, banks with no spare row left, page retirement pending",
    remedy="Pending: reset the GPU. Failure or no spare row left: replace it.",
)
def _remapped_rows(host: Host) -> t.Iterator[Problem]:
    for gpu in host.gpus:
        rows, name = gpu["remapped_rows"], f"GPU {gpu['index']} of {host.name}"
        if rows["failure"]:
            yield Problem("failure", "none", f"{name} could not remap a broken row: replace it.")
        if rows["pending"] or gpu["retired_pages_pending"]:
            yield Problem("pending", "none", f"{name} has a row remapping pending: reset it.")
        if rows["banks_none_left"]:
            yield Problem(
                f"{rows['banks_none_left']} banks", "0", f"{name} has banks with no spare row left: replace it."
            )


@check(
    "recovery",
    "Recovery action",
    FAIL,
    needs="gpus",
    looks_at="the recovery action that the driver asks for",
    remedy="Do what it says: reset the GPU, or drain and reboot the host.",
)
def _recovery(host: Host) -> t.Iterator[Problem]:
    for gpu in host.gpus:
        action = gpu["recovery_action"]
        if action not in (None, "None", "N/A"):
            yield Problem(action, "None", f"GPU {gpu['index']} of {host.name} asks for: {action}.")


@check(
    "xid",
    "Xid since boot",
    FAIL,
    needs="gpus",
    looks_at="Xid lines of the kernel's log since boot that mean broken hardware or a lost GPU",
    remedy="Look the code up in NVIDIA's Xid catalogue; reset the GPU or reboot, and replace what comes back.",
)
def _xid(host: Host) -> t.Iterator[Problem]:
    for event in host.facts["gpu"]["kernel_log"]["xid"]:
        if event["code"] in XID_FATAL:
            text = (
                f"{host.name} had Xid {event['code']} on {event['bus']} {event['count']} times since "
                f"boot: {event['text']}"
            )
            yield Problem(f"Xid {event['code']}", "none", text)


@check(
    "sxid",
    "SXid since boot",
    FAIL,
    needs="gpus",
    looks_at="SXid lines (NVSwitch) of the kernel's log since boot",
    remedy="Restart the Fabric Manager or reboot; what comes back is the vendor's to mend.",
)
def _sxid(host: Host) -> t.Iterator[Problem]:
    for event in host.facts["gpu"]["kernel_log"]["sxid"]:
        text = (
            f"{host.name} had SXid {event['code']} on {event['bus']} {event['count']} times since boot: {event['text']}"
        )
        yield Problem(f"SXid {event['code']}", "none", text)


@check(
    "clocks",
    "Nothing slows the clocks",
    FAIL,
    needs="gpus",
    looks_at="clock event reasons of hardware: slowdown, thermal, power brake; software thermal too",
    remedy="Look at cooling and power: a power brake comes from the power supply or the rack.",
)
def _clocks(host: Host) -> t.Iterator[Problem]:
    slow = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
    for gpu in host.gpus:
        active = [reason for reason in gpu["clocks"]["reasons"] if reason in slow]
        if active:
            told = ", ".join(active).replace("_", " ")
            yield Problem(told, "none", f"GPU {gpu['index']} of {host.name} is slowed down: {told}.")


@check(
    "temperature",
    "Temperature and power limit",
    WARN,
    needs="gpus",
    looks_at=(
        "degrees below the slowdown threshold, against `preflight_expect_temperature_margin`; power "
        "limit and its default"
    ),
    remedy="Look at cooling; nvidia-smi -pl sets the limit back.",
)
def _temperature(host: Host) -> t.Iterator[Problem]:
    margin = int(host.expect["temperature_margin"])
    for gpu in host.gpus:
        left, name = gpu["temperature_margin_c"], f"GPU {gpu['index']} of {host.name}"
        if left is not None and left < margin:
            yield Problem(
                f"{left} C left",
                f">= {margin}",
                f"{name} is {left} degrees below its slowdown, at {gpu['temperature_c']}.",
            )
        limit, default = gpu["power_limit_w"], gpu["power_limit_default_w"]
        if limit and default and limit < default:
            yield Problem(
                f"{limit:g} W", f"{default:g} W", f"The power limit of {name} is {limit:g} W, below its default."
            )


@check(
    "gpu-processes",
    "No process left on a GPU",
    FAIL,
    needs="gpus",
    looks_at="compute processes on GPUs that are not of the replica's own unit",
    remedy="Stop them: a killed serve leaves its workers behind, and the next start runs out of memory.",
)
def _gpu_processes(host: Host) -> t.Iterator[Problem]:
    for process in host.facts["processes"]:
        if not process["own"] and process["type"] != "G":
            text = (
                f"Process {process['pid']} ({process['name']}) holds {process['memory_mib']} MiB of "
                f"GPU {process['gpu']} "
                f"on {host.name}, and is not of the replica."
            )
            yield Problem(f"pid {process['pid']}", "none", text)


@check(
    "gpu-memory",
    "GPU memory is free",
    FAIL,
    needs="gpus",
    looks_at="used memory of every GPU while the replica does not run, against `preflight_expect_gpu_memory_used_mib`",
    remedy="Stop what uses it; memory without a process comes back with a GPU reset.",
)
def _gpu_memory(host: Host) -> t.Iterator[Problem]:
    limit = int(host.expect["gpu_memory_used_mib"])
    held = {process["gpu"] for process in host.facts["processes"]}
    for gpu in host.gpus:
        used = gpu["memory_used_mib"] or 0
        if not host.serving and used > limit and gpu["index"] not in held:
            text = f"GPU {gpu['index']} of {host.name} has {used} MiB in use and no process that owns it."
            yield Problem(f"{used} MiB", f"<= {limit} MiB", text)


@check(
    "dcgm",
    "DCGM diagnosis",
    FAIL,
    needs="gpus",
    looks_at="`dcgmi diag` at `preflight_dcgm_level`, never beside a replica that runs; DCGM built for CUDA 13",
    remedy="dcgmi diag -r 2 -v tells more; with R580 and CUDA 13 DCGM must be of the -cuda13 packages.",
)
def _dcgm(host: Host) -> t.Iterator[Problem]:
    installed = host.packages.get("installed") or {}
    old = [name for name in installed if re.fullmatch(r"datacenter-gpu-manager(-4-cuda1[12])?", name)]
    if old and not any(name.endswith("cuda13") for name in installed) and gpu_facts.release_of(host.driver) >= (580,):
        text = f"{host.name} has {old[0]}, whose diagnosis fails with driver {host.driver}."
        yield Problem(old[0], "datacenter-gpu-manager-4-cuda13", text)
    result = host.facts["dcgm"]
    if result and (result["rc"] != 0 or result["failed"]):
        told = "; ".join(result["failed"]) or f"exit status {result['rc']}"
        yield Problem(told, "pass", f"DCGM's diagnosis of level {result['level']} failed on {host.name}: {told}")


@check(
    "nvlink",
    "NVLinks are up",
    FAIL,
    needs="fabric",
    looks_at="links that are up per GPU and their rate, against `preflight_expect_nvlinks` and `_nvlink_rate`",
    remedy="nvidia-smi nvlink --status; reset the GPUs with the Fabric Manager stopped, or call the vendor.",
)
def _nvlink(host: Host) -> t.Iterator[Problem]:
    expected, rate = int(host.expect["nvlinks"]), float(host.expect["nvlink_rate"])
    links = {gpu["index"]: gpu for gpu in host.facts["gpu"]["nvlink"]}
    for gpu in host.gpus:
        seen = links.get(gpu["index"], {"up": 0, "rates": []})
        if seen["up"] < expected:
            text = f"GPU {gpu['index']} of {host.name} has {seen['up']} NVLinks up, {expected} are expected."
            yield Problem(str(seen["up"]), str(expected), text)
        slow = [one for one in seen["rates"] if one < rate]
        if slow:
            text = f"An NVLink of GPU {gpu['index']} on {host.name} runs at {slow[0]:g} GB/s."
            yield Problem(f"{slow[0]:g} GB/s", f">= {rate:g} GB/s", text)


@check(
    "nvlink-errors",
    "NVLinks without errors",
    WARN,
    needs="fabric",
    looks_at="counters of errors, recoveries, discards and code words that needed much correction",
    remedy="Watch whether they grow under load (playbooks/fabric_test.yml); growing counters are the vendor's to mend.",
)
def _nvlink_errors(host: Host) -> t.Iterator[Problem]:
    for gpu in host.facts["gpu"]["nvlink"]:
        if gpu["errors"]:
            told = ", ".join(f"{name}: {count}" for name, count in sorted(gpu["errors"].items()))
            yield Problem(told, "0", f"NVLinks of GPU {gpu['index']} on {host.name} have counted {told}.")


@check(
    "gpu-pcie",
    "PCIe link of GPUs",
    FAIL,
    needs="gpus",
    looks_at=(
        "width of every GPU's link against what it can, maximum generation against `preflight_expect_pcie_generation`"
    ),
    remedy="Reseat the board; an idle GPU lowers its generation, never its width.",
)
def _gpu_pcie(host: Host) -> t.Iterator[Problem]:
    expected = int(host.expect["pcie_generation"])
    for gpu in host.gpus:
        pcie, name = gpu["pcie"], f"GPU {gpu['index']} of {host.name}"
        if pcie["width"] and pcie["width_max"] and pcie["width"] < pcie["width_max"]:
            text = f"{name} has {pcie['width']} PCIe lanes of {pcie['width_max']}."
            yield Problem(f"x{pcie['width']}", f"x{pcie['width_max']}", text)
        if pcie["generation_max"] and pcie["generation_max"] < expected:
            text = f"The PCIe link of {name} reaches generation {pcie['generation_max']}, {expected} is expected."
            yield Problem(f"gen {pcie['generation_max']}", f"gen {expected}", text)


@check(
    "hmm",
    "Kernel hands memory regions to CUDA",
    FAIL,
    needs="gpus",
    looks_at="request_free_mem_region in the kernel's log",
    remedy=(
        "options nvidia_uvm uvm_disable_hmm=1 in /etc/modprobe.d, then reload the module (role cuda: cuda_disable_hmm)."
    ),
)
def _hmm(host: Host) -> t.Iterator[Problem]:
    told = host.facts["gpu"]["kernel_log"]["hmm"]
    if told:
        yield Problem(told, "no such line", f"CUDA will not start on {host.name}, whose kernel found no region: {told}")


@check(
    "cuda-compat",
    "No compatibility library shadows the driver",
    FAIL,
    needs="gpus",
    looks_at="/etc/ld.so.conf.d and LD_LIBRARY_PATH, for CUDA's compat folder with a driver that needs none",
    remedy="Remove the line and run ldconfig: with a newer driver the compatibility libraries end in CUDA error 803.",
)
def _cuda_compat(host: Host) -> t.Iterator[Problem]:
    found = list(host.facts["gpu"]["cuda_compat"])
    value, path = host.environment.get("LD_LIBRARY_PATH", ("", ""))
    if "compat" in value:
        found.append(f"{path}: LD_LIBRARY_PATH={value}")
    if found and gpu_facts.release_of(host.driver) >= gpu_facts.release_of(str(host.expect["driver"])):
        text = f"CUDA's compatibility libraries come before the driver's on {host.name} ({found[0]}): error 803."
        yield Problem(found[0], "none", text)


@check(
    "nouveau",
    "nouveau is not loaded",
    FAIL,
    needs="gpus",
    looks_at="loaded modules",
    remedy="Role cuda blacklists it; reboot.",
)
def _nouveau(host: Host) -> t.Iterator[Problem]:
    if host.facts["nouveau"]:
        yield Problem("loaded", "not loaded", f"nouveau is loaded on {host.name} and keeps NVIDIA's driver out.")


@check(
    "secure-boot",
    "Secure Boot takes the driver's module",
    FAIL,
    needs="gpus",
    looks_at=(
        "the EFI variable SecureBoot, who built the module, and the kernel's log where no driver runs: 'Loading of ... "
        "module ... is rejected', 'unsigned module loading is restricted', 'signed with a trusted key'"
    ),
    remedy=(
        "Enrol the machine owner's key at the console, use the distribution's signed modules, or turn Secure Boot off."
    ),
)
def _secure_boot(host: Host) -> t.Iterator[Problem]:
    # The kernel names no module when it refuses one: it is the driver's where that is installed and does not run.
    told, driver = host.facts["module_rejected"], host.facts["gpu"]["driver"]
    if host.driver is not None:
        return
    if told and driver["installed"]:
        yield Problem(told, "accepted", f"The kernel of {host.name} rejects the driver's module: {told}")
    elif host.facts["secure_boot"] and driver["dkms"]:
        text = f"Secure Boot is on at {host.name}, and its driver's module was built there: it needs an enrolled key."
        yield Problem("Secure Boot, DKMS", "a signed module", text)


@check(
    "pending-reboot",
    "No reboot is pending",
    WARN,
    looks_at=(
        "/run/reboot-required, running and installed driver, its flavours, running and newest kernel, a module for that"
    ),
    remedy="Reboot one host at a time (role cuda: cuda_reboot), before the replica is started.",
)
def _pending_reboot(host: Host) -> t.Iterator[Problem]:
    pending = host.facts["reboot"]
    for reason in pending["reasons"]:
        yield Problem(reason, "none", f"{host.name} wants to be rebooted: {reason}.")
    if pending["module_for_newest"] is False:
        newest = pending["newest_kernel"]
        text = f"{host.name} would boot kernel {newest}, for which there is no module of the driver."
        yield Problem(f"no module for {newest}", "a module", text, "dkms autoinstall; hold the kernel with the driver.")


@check(
    "apt-pins",
    "apt holds and pins",
    WARN,
    needs="gpus",
    looks_at="held driver packages, pins, unattended-upgrades' exclusions, candidates newer than what is installed",
    remedy="Role cuda pins the branch and holds companions; a pin of 1001 for all packages (Lambda Stack) outranks it.",
)
def _apt_pins(host: Host) -> t.Iterator[Problem]:
    packages = host.packages
    if not packages or not packages.get("installed"):
        return
    installed, held = packages["installed"], set(packages["held"])
    moving = []
    for name, candidate in sorted(packages["candidates"].items()):
        have = gpu_facts.release_of(installed.get(name, {}).get("version"))
        if name in installed and name not in held and have and gpu_facts.release_of(candidate)[:1] > have[:1]:
            moving.append(f"{name} {installed[name]['version']} -> {candidate}")
    if moving:
        text = f"The next apt upgrade would move the driver of {host.name} to another branch: {'; '.join(moving[:3])}."
        yield Problem(moving[0], "pinned or held", text)
    # A hold on one package keeps the others as little as an exclusion of one does.
    loose = [
        name
        for name in sorted(installed)
        if DRIVER_PACKAGE.match(name) and name not in held and not _excluded(name, packages["unattended_exclusions"])
    ]
    if "unattended-upgrades" in installed and loose:
        more = f" and {len(loose) - 3} more" if len(loose) > 3 else ""
        told = f"{', '.join(loose[:3])}{more}"
        text = (
            f"unattended-upgrades may move the driver of {host.name} while it serves: {told} is not excluded or held."
        )
        yield Problem(told, "excluded or held", text)
    all_pinned = [pin for pin in packages["preferences"] if pin["package"] == "*" and pin["priority"].isdigit()]
    strong = [pin for pin in all_pinned if int(pin["priority"]) > 1000]
    ours = [pin for pin in packages["preferences"] if "nvidia" in pin["package"]]
    if strong and ours:
        text = (
            f"{strong[0]['file']} on {host.name} pins every package at {strong[0]['priority']} and "
            "outranks NVIDIA's pin."
        )
        yield Problem(strong[0]["priority"], "<= 1000", text)


def _excluded(name: str, patterns: t.Iterable[str]) -> bool:
    """Whether unattended-upgrades leaves a package alone: its patterns are regular expressions for the beginning."""
    for pattern in patterns:
        try:
            if re.match(pattern, name):
                return True
        except re.error:
            continue
    return False


# InfiniBand


@check(
    "rails",
    "Rails",
    FAIL,
    looks_at=(
        "ports by the rule of rdma_info, against `preflight_expect_rails`: NVSwitch management ports, "
        "VFs, storage and "
        "slow or dead ports are no rails"
    ),
    remedy="The table of all ports with reasons is in the report; look at cable, switch port and subnet manager.",
)
def _rails(host: Host) -> t.Iterator[Problem]:
    verdict, expected = host.facts["rdma"]["verdict"], int(host.expect["rails"])
    if expected == 0:
        return
    for port in verdict["broken"]:
        wanted_rate = f"ACTIVE, {host.expect['rail_rate']:g} Gb/s"
        yield Problem(
            f"{port['device']}: {port['reason']}", wanted_rate, f"A rail of {host.name} is broken: {port['text']}"
        )
    seen = len(verdict["rails"])
    if seen != expected and seen + len(verdict["broken"]) != expected:
        others: dict[str, int] = {}
        for port in verdict["ports"]:
            if port["reason"]:
                others[port["reason"]] = others.get(port["reason"], 0) + 1
        told = ", ".join(f"{count} {reason}" for reason, count in sorted(others.items())) or "no other ports"
        text = f"{host.name} has {seen} rails, {expected} are expected ({told})."
        yield Problem(str(seen), str(expected), text)
    for warning in verdict["warnings"]:
        yield Problem(warning, "rails", f"{host.name}: {warning}")


@check(
    "rail-pcie",
    "PCIe link of rails",
    FAIL,
    needs="rails",
    looks_at="width and speed of every rail's PCIe link, against what the adapter can",
    remedy="Reseat the adapter; look for AER errors in the kernel's log.",
)
def _rail_pcie(host: Host) -> t.Iterator[Problem]:
    names = {port["device"] for port in host.facts["rdma"]["verdict"]["rails"]}
    for device in host.facts["rdma"]["devices"]:
        if device["name"] not in names:
            continue
        width, most = device["pcie_width"], device["pcie_width_max"]
        if width and most and width < most:
            text = f"{device['name']} of {host.name} has {width} PCIe lanes of {most}."
            yield Problem(f"x{width}", f"x{most}", text)
        speed, fastest = gpu_facts.number_of(device["pcie_speed"]), gpu_facts.number_of(device["pcie_speed_max"])
        if speed and fastest and speed < fastest:
            text = f"The PCIe link of {device['name']} on {host.name} runs at {speed:g} of {fastest:g} GT/s."
            yield Problem(f"{speed:g} GT/s", f"{fastest:g} GT/s", text)


@check(
    "link-errors",
    "Links of rails without errors",
    WARN,
    needs="rails",
    looks_at="counters of downed links, recoveries, symbol errors and discards since the driver was loaded",
    remedy="Clean or replace the cable and watch whether they grow; playbooks/fabric_test.yml makes load.",
)
def _link_errors(host: Host) -> t.Iterator[Problem]:
    rails = {(port["device"], port["port"]) for port in host.facts["rdma"]["verdict"]["rails"]}
    limits = host.expect["link_errors"]
    for device in host.facts["rdma"]["devices"]:
        for port in device["ports"]:
            bad = {name: count for name, count in port["counters"].items() if count > int(limits.get(name, 1 << 62))}
            if (device["name"], port["port"]) in rails and bad:
                told = ", ".join(f"{name} {count}" for name, count in sorted(bad.items()))
                yield Problem(told, str(limits), f"{device['name']} of {host.name} has counted {told}.")


@check(
    "gid",
    "GIDs of RoCE rails",
    FAIL,
    needs="rails",
    looks_at="RoCE v2 GIDs with an IPv4 address; with link-local GIDs alone all-reduce runs and send/recv does not",
    remedy=(
        "Give the rail an IPv4 address. If NCCL still chooses fe80::, set NCCL_IB_GID_INDEX to the index named here."
    ),
)
def _gid(host: Host) -> t.Iterator[Problem]:
    if host.expect["rail_mode"] != "roce":
        return
    names = {port["device"] for port in host.facts["rdma"]["verdict"]["rails"]}
    for device in host.facts["rdma"]["devices"]:
        for port in device["ports"]:
            if device["name"] in names and rdma_facts.roce_gid_index(port) is None:
                text = f"{device['name']} of {host.name} has no RoCE v2 GID with an IPv4 address, only link-local ones."
                yield Problem("link-local", "IPv4", text)


@check(
    "pkey",
    "Partition key",
    WARN,
    needs="rails",
    looks_at="the default partition in the table of every InfiniBand rail",
    remedy="Ask who runs the subnet manager which partition is yours, and set NCCL_IB_PKEY to its index.",
)
def _pkey(host: Host) -> t.Iterator[Problem]:
    names = {port["device"] for port in host.facts["rdma"]["verdict"]["rails"]}
    index = host.environment.get("NCCL_IB_PKEY")
    for device in host.facts["rdma"]["devices"]:
        for port in device["ports"]:
            keys = port["pkeys"]
            if device["name"] in names and port["link_layer"] == "InfiniBand" and keys and not index:
                first = int(keys[0], 16) & 0x7FFF
                if first != 0x7FFF:
                    text = f"The first partition of {device['name']} on {host.name} is {keys[0]}, not the default one."
                    yield Problem(keys[0], "0xffff", text)


@check(
    "rdma-modules",
    "RDMA modules are loaded",
    FAIL,
    needs="rails",
    looks_at="mlx5_core, mlx5_ib, ib_uverbs; on cloud kernels they are in linux-modules-extra",
    remedy=(
        "Role fabric loads and keeps them; install linux-modules-extra for the running kernel where they are missing."
    ),
)
def _rdma_modules(host: Host) -> t.Iterator[Problem]:
    missing = [name for name in ("mlx5_core", "mlx5_ib", "ib_uverbs") if name not in host.facts["gpu"]["modules"]]
    if missing:
        text = f"{', '.join(missing)} is not loaded on {host.name}."
        yield Problem(", ".join(missing), "loaded", text)


@check(
    "gpudirect",
    "GPUDirect RDMA has a way",
    WARN,
    needs="rails",
    looks_at="dma-buf (open driver, kernel 5.12 or newer) or nvidia_peermem; its symbol versions in the kernel's log",
    remedy=(
        "Open driver and a newer kernel, or fabric_gpudirect: peermem, which sets NCCL_DMABUF_ENABLE=0. "
        "A peermem that "
        "disagrees about symbols must be rebuilt after DOCA-OFED."
    ),
)
def _gpudirect(host: Host) -> t.Iterator[Problem]:
    modules, told = host.facts["gpu"]["modules"], host.facts["gpu"]["kernel_log"]["symbol_version"]
    if told:
        text = f"nvidia_peermem of {host.name} was built against another ib_core: {told}"
        yield Problem(told, "loaded", text)
    flavour = host.facts["gpu"]["driver"]["running_flavour"]
    kernel = gpu_facts.release_of(host.facts["host"]["kernel"])
    if "nvidia_peermem" not in modules and (flavour != "open" or kernel < (5, 12)):
        text = (
            f"{host.name} has neither dma-buf (open driver, kernel 5.12) nor nvidia_peermem: RDMA goes through memory."
        )
        yield Problem("neither", "dma-buf or nvidia_peermem", text)
    disabled = host.environment.get("NCCL_DMABUF_ENABLE", ("1", ""))[0] == "0"
    if disabled and "nvidia_peermem" not in modules:
        text = f"NCCL_DMABUF_ENABLE=0 on {host.name}, and nvidia_peermem is not loaded."
        yield Problem("neither", "nvidia_peermem", text, "modprobe nvidia_peermem, or leave NCCL_DMABUF_ENABLE out.")


@check(
    "acs",
    "PCIe Access Control Services and IOMMU",
    WARN,
    needs="rails",
    looks_at="control register of every PCIe bridge, types of the IOMMU's groups; on metal alone, a guest needs them",
    remedy=(
        "fabric_acs: disable clears it at each boot; iommu=pt on the kernel's command line. Never in a virtual machine."
    ),
)
def _acs(host: Host) -> t.Iterator[Problem]:
    if host.virtual:
        return
    bridges = host.facts["rdma"]["acs"]
    if bridges:
        text = (
            f"{len(bridges)} PCIe bridges of {host.name} send traffic between GPU and adapter up to the "
            f"root ({bridges[0]})."
        )
        yield Problem(f"{len(bridges)} bridges", "0", text)
    kinds = host.facts["host"]["iommu"]["types"]
    if any(kind.startswith("DMA") for kind in kinds):
        text = f"The IOMMU of {host.name} translates ({', '.join(sorted(kinds))}): GPUDirect is slow or hangs."
        yield Problem(
            ", ".join(sorted(kinds)), "identity", text, "Add iommu=pt to the kernel's command line and reboot."
        )


@check(
    "nccl-hca",
    "NCCL_IB_HCA names the rails",
    FAIL,
    needs="rails",
    looks_at="the value that would reach the service, against the verdict over the ports; that there is one",
    remedy=(
        "Leave it to role fabric, or correct it: a name without '=' also takes every longer name that begins like it."
    ),
)
def _nccl_hca(host: Host) -> t.Iterator[Problem]:
    value, path = host.environment.get("NCCL_IB_HCA", ("", ""))
    if not value:
        # Before anything was installed nobody can have written it.
        if host.expect["installed"] or any(file.endswith("/fabric.env") for file in host.facts["environment"]):
            expected = host.facts["rdma"]["verdict"]["nccl_ib_hca"] or "the rails"
            text = f"NCCL_IB_HCA is not set on {host.name}: NCCL takes every active port, those of the NVSwitches too."
            yield Problem("not set", expected, text, "Run playbooks/prepare.yml: role fabric writes it.")
        return
    for error in rdma_facts.hca_errors(value, host.facts["rdma"]["verdict"]):
        text = f"NCCL_IB_HCA of {host.name} is '{value}' ({path}): {error}."
        yield Problem(value, host.facts["rdma"]["verdict"]["nccl_ib_hca"] or "rails", text)


# Host, network, disk


@check(
    "cpu-memory",
    "Processors, memory, NUMA nodes, NVMe drives",
    WARN,
    looks_at="counts, against `preflight_expect_cpus`, `_memory_gib`, `_numa_nodes` and `_nvme`",
    remedy="Look for a memory module or a socket that is missing; a guest needs its NUMA nodes passed through.",
)
def _cpu_memory(host: Host) -> t.Iterator[Problem]:
    seen = host.facts["host"]
    for key, value, word in (
        ("cpus", seen["cpus"], "processors"),
        ("memory_gib", seen["memory_mib"] // 1024, "GiB of memory"),
        ("numa_nodes", seen["numa_nodes"], "NUMA nodes"),
        ("nvme", seen["nvme"], "NVMe drives"),
    ):
        expected = int(host.expect[key])
        if value < expected:
            yield Problem(str(value), f">= {expected}", f"{host.name} has {value} {word}, {expected} are expected.")


@check(
    "checkpoint-disk",
    "Disk of the checkpoint",
    FAIL,
    looks_at=(
        "kind of the file system that really holds the path, free room and inodes; nothing is needed once it is "
        "proven; that it can be read at all"
    ),
    remedy="Point checkpoint_root to a file system on a disk with room: a directory below /var can be a small tmpfs.",
)
def _checkpoint_disk(host: Host) -> t.Iterator[Problem]:
    disk = host.facts["storage"]
    if disk is None:
        return
    if disk["error"]:
        text = f"{disk['path']} of {host.name} cannot be read: {disk['error']}."
        remedy = "Look at the disk or its server; a stale mount (ESTALE) must be unmounted and mounted again."
        yield Problem(disk["error"], "readable", text, remedy)
    if disk["type"] in ("tmpfs", "ramfs"):
        text = f"{disk['path']} of {host.name} lies on a {disk['type']} of {disk['size_gib']} GiB, in memory."
        yield Problem(disk["type"], "a disk", text)
    needed = 0 if host.facts["checkpoint"] else int(host.expect["checkpoint_gib"])
    if disk["free_gib"] is not None and disk["free_gib"] < needed:
        text = f"{disk['mount']} of {host.name} has {disk['free_gib']} GiB free, the checkpoint needs {needed}."
        yield Problem(f"{disk['free_gib']} GiB", f">= {needed} GiB", text)
    if disk["inodes_free"] is not None and disk["inodes_free"] < 10000:
        text = f"{disk['mount']} of {host.name} has {disk['inodes_free']} inodes free."
        yield Problem(str(disk["inodes_free"]), ">= 10000", text)


@check(
    "checkpoint-read-rate",
    "Read rate of the checkpoint",
    WARN,
    looks_at=(
        "a cold read of up to 512 MiB or 2 s of the largest shard, against `preflight_expect_read_mb_s`; "
        "not beside a replica"
    ),
    remedy="A start reads 0.8 TB per host; use local NVMe, or wait longer (serve_start_timeout).",
)
def _read_rate(host: Host) -> t.Iterator[Problem]:
    disk, expected = host.facts["storage"], int(host.expect["read_mb_s"])
    if disk and disk["read_mb_s"] is not None and disk["read_mb_s"] < expected:
        text = f"{disk['mount']} of {host.name} reads {disk['read_mb_s']} MB/s, {expected} are expected."
        yield Problem(f"{disk['read_mb_s']} MB/s", f">= {expected} MB/s", text)


@check(
    "checkpoint",
    "Checkpoint is there and complete",
    WARN,
    looks_at="checkpoint.json; every file that the index beside it names is there and as long as its receipt says",
    remedy="Run playbooks/fetch.yml: it proves every file by digest.",
)
def _checkpoint(host: Host) -> t.Iterator[Problem]:
    if not host.expect["installed"]:
        return
    seen = host.facts["checkpoint"]
    if seen is None:
        yield Problem("none", "proven", f"{host.name} has no proven checkpoint yet.")
    elif seen["missing"]:
        text = (
            f"{len(seen['missing'])} files of the checkpoint are gone on {host.name}: {', '.join(seen['missing'][:3])}."
        )
        yield Problem(f"{len(seen['missing'])} missing", "none missing", text)
    if seen is not None and seen["short"]:
        told = ", ".join(seen["short"][:3])
        text = f"{len(seen['short'])} files of the checkpoint on {host.name} have another size than was proven: {told}."
        yield Problem(f"{len(seen['short'])} of another size", "as proven", text)


@check(
    "engine",
    "Engine is there and can compile",
    WARN,
    looks_at=(
        "the engine's receipt; nvcc of a toolkit or a wheel with ninja, or FlashInfer's compiled kernels, in its own "
        "version, where there are GPUs"
    ),
    remedy=(
        "Run playbooks/engine.yml; for FlashInfer install the toolkit (cuda_toolkit: true) or its cubin "
        "and jit-cache wheels."
    ),
)
def _engine(host: Host) -> t.Iterator[Problem]:
    if not host.expect["installed"]:
        return
    engine = host.facts["engine"]
    if engine is None:
        yield Problem("none", "installed", f"{host.name} has no engine yet.")
        return
    compiles = engine["nvcc"] or host.facts["gpu"]["toolkit"]
    if int(host.expect["gpus"]) and engine["flashinfer"] and not engine["cubins"] and not compiles:
        text = f"{host.name} has FlashInfer, but neither nvcc nor its compiled kernels: its first start cannot compile."
        yield Problem("no nvcc", "nvcc or cubins", text)
    elif int(host.expect["gpus"]) and engine["flashinfer"] and not engine["cubins"] and not engine["ninja"]:
        text = f"{host.name} has nvcc, but no ninja, by which FlashInfer calls it: its first start cannot compile."
        yield Problem("no ninja", "ninja or cubins", text, "Put ninja into the engine's lock, or install ninja-build.")
    own, others = engine["flashinfer"], engine["flashinfer_parts"]
    unlike = [f"{name} {version}" for name, version in sorted(others.items()) if own and version != own]
    if unlike:
        text = f"FlashInfer of {host.name} is {own}, but its compiled kernels are {', '.join(unlike)}: it refuses them."
        yield Problem(", ".join(unlike), own, text, "Lock all parts of FlashInfer to one version.")


@check(
    "clock-sync",
    "Clock is kept right",
    WARN,
    looks_at="timedatectl, and the kernel's clock source",
    remedy="Install and enable chrony or systemd-timesyncd.",
)
def _clock_sync(host: Host) -> t.Iterator[Problem]:
    seen = host.facts["host"]
    if seen["synchronized"] is False and host.expect["clock_sync"]:
        yield Problem("not synchronized", "synchronized", f"Nothing keeps the clock of {host.name} right.")
    if seen["clocksource"] in ("hpet", "acpi_pm", "jiffies"):
        text = f"The kernel of {host.name} takes its time from {seen['clocksource']}, which is slow."
        yield Problem(seen["clocksource"], "tsc", text)


@check(
    "hostname",
    "Host name leads to a routable address",
    WARN,
    looks_at="what the host's own name resolves to",
    remedy="Take the name off the 127.0.1.1 line of /etc/hosts, or give it the private address there.",
)
def _hostname(host: Host) -> t.Iterator[Problem]:
    seen = host.facts["resolution"]
    if seen["error"]:
        text = f"The name of {host.name}, {seen['name']}, does not resolve ({seen['error']})."
        yield Problem("nothing", "an address", text)
    loop = [address for address in seen["addresses"] if address.startswith("127.") or address == "::1"]
    if loop:
        pinned = "GLOO_SOCKET_IFNAME" in host.environment or bool((host.facts["route"] or {}).get("interface"))
        more = " The interface is set, so that Gloo does not use it." if pinned else ""
        text = (
            f"The name of {host.name}, {seen['name']}, leads to {loop[0]}: Gloo would connect its peers "
            f"to themselves.{more}"
        )
        yield Problem(loop[0], "a routable address", text)


@check(
    "route",
    "Way to the peer",
    FAIL,
    looks_at="address and interface of the route to the peer, and the interface's MTU against `preflight_expect_mtu`",
    remedy="Set serve_address to a private IPv4 address of this host.",
)
def _route(host: Host) -> t.Iterator[Problem]:
    route = host.facts["route"]
    if route is None:
        return
    if route.get("error"):
        yield Problem("none", "a route", f"{host.name}: {route['error']}")
        return
    if route["interface"] is None:
        yield Problem("none", "an interface", f"No interface of {host.name} has the address {route['address']}.")
        return
    link = host.facts["rdma"]["interfaces"].get(route["interface"], {})
    expected = int(host.expect["mtu"])
    if link and link["mtu"] < expected:
        text = f"{route['interface']} of {host.name} has MTU {link['mtu']}, {expected} is expected."
        yield Problem(str(link["mtu"]), f">= {expected}", text)
    if route["address"].lower().startswith("fe80:"):
        text = f"{host.name} reaches its peer from the link-local address {route['address']}: Gloo times out over it."
        yield Problem(route["address"], "IPv4", text)


@check(
    "memlock",
    "Locked memory of the unit",
    FAIL,
    looks_at="LimitMEMLOCK of the unit itself, where it is installed: limits.conf does not reach services",
    remedy="Role serve sets LimitMEMLOCK=infinity; look for a drop-in that takes it back (systemctl cat).",
)
def _memlock(host: Host) -> t.Iterator[Problem]:
    unit = host.facts["unit"]
    if unit["loaded"] and unit["memlock"] not in (None, "infinity"):
        text = f"The unit on {host.name} may lock {unit['memlock']} bytes: registering memory with an adapter fails."
        yield Problem(unit["memlock"], "infinity", text)


@check(
    "shm",
    "/dev/shm",  # noqa: S108 - a title
    FAIL,
    looks_at="free room, against `preflight_expect_shm_mib`, and what earlier runs left there",
    remedy="Remove nccl-* and psm_* files that no process has open; mount -o remount,size=... /dev/shm.",
)
def _shm(host: Host) -> t.Iterator[Problem]:
    seen, expected = host.facts["shm"], int(host.expect["shm_mib"])
    stale = sum(entry["mib"] for entry in seen["stale"])
    if seen["free_mib"] < expected and not host.serving:
        more = f", of which earlier runs hold {stale} MiB" if stale else ""
        text = (
            f"The shared memory of {host.name} (/dev/shm) has {seen['free_mib']} MiB free, {expected} are needed{more}."
        )
        yield Problem(f"{seen['free_mib']} MiB", f">= {expected} MiB", text)


@check(
    "sysctl",
    "Ports that the kernel hands out",
    WARN,
    looks_at="ip_local_port_range, ip_local_reserved_ports, against the replica's own ports",
    remedy="Role fabric reserves them: otherwise another process can get the port between a choice and its use.",
)
def _sysctl(host: Host) -> t.Iterator[Problem]:
    words = (host.facts["sysctls"].get("net.ipv4.ip_local_port_range") or "").split()
    if len(words) != 2:
        return
    low, high = int(words[0]), int(words[1])
    reserved = reserved_ports(host.facts["sysctls"].get("net.ipv4.ip_local_reserved_ports") or "")
    risky = [int(port) for port in host.expect["ports"] if low <= int(port) <= high and int(port) not in reserved]
    if risky:
        told = ", ".join(map(str, risky))
        text = f"The kernel of {host.name} may hand out {told}, which the replica listens on (range {low} to {high})."
        yield Problem(told, "reserved", text)
    if high - low < 16000:
        text = f"The kernel of {host.name} has {high - low + 1} ports to hand out: NCCL, Gloo and ZMQ take hundreds."
        yield Problem(f"{low}-{high}", ">= 16000 ports", text)


def reserved_ports(text: str) -> set[int]:
    """C(29500-29502,8000) as numbers."""
    found: set[int] = set()
    for part in filter(None, text.replace(" ", ",").split(",")):
        low, _dash, high = part.partition("-")
        if low.isdigit() and (not high or high.isdigit()):
            found |= set(range(int(low), int(high or low) + 1))
    return found


@check(
    "ports",
    "Ports are reachable both ways",
    FAIL,
    needs="peers",
    looks_at=(
        "real connections between the hosts, in both directions, to the replica's ports and one that the kernel chose"
    ),
    remedy="Allow all TCP between the two private addresses; on 1-Click Clusters the firewall is the provider's.",
)
def _ports(host: Host) -> t.Iterator[Problem]:
    meeting = host.facts["meeting"]
    if meeting["problem"]:
        yield Problem(meeting["problem"], "listening", f"{host.name}: {meeting['problem']}.")
        return
    for peer in meeting["peers"]:
        if not peer["reached"]:
            text = f"{host.name} does not reach {peer['name']} at {peer['address']}: {peer['error']}."
            yield Problem(peer["error"] or "no", "connected", text)
        if peer["closed"]:
            told = "; ".join(f"{port}: {why}" for port, why in sorted(peer["closed"].items()))
            text = f"{host.name} reaches {peer['name']}, but not every port of it: {told}."
            yield Problem(told, "open", text)


@check(
    "ports-taken",
    "The replica's ports are free",
    FAIL,
    needs="peers",
    looks_at="whether something that is not of the replica's unit listens on them",
    remedy="ss -ltnp tells who; stop it, or choose other serve_*_port values.",
)
def _ports_taken(host: Host) -> t.Iterator[Problem]:
    # While the replica runs, its ports are busy by right: only what is known to be another's is told.
    owners = host.facts["listeners"]
    foreign = [port for port in host.facts["meeting"]["busy"] if owners.get(str(port), host.serving) is False]
    if foreign:
        told = ", ".join(map(str, foreign))
        state = "is not the replica" if host.serving else "the replica does not run"
        text = f"Something else listens on {told} of {host.name}, and {state}."
        yield Problem(told, "free", text)


@check(
    "environment",
    "No environment that breaks the service",
    FAIL,
    looks_at=(
        "what the next start would have, fabric.env and over it serve_environment: debugging crutches, hidden GPUs, "
        "names of interfaces that are not there, allocator settings that pipelines cannot have; /etc/environment, "
        "which no service reads but every measurement by hand, is a warning"
    ),
    remedy="Take the variable out where it was set.",
)
def _environment(host: Host) -> t.Iterator[Problem]:
    interfaces = host.facts["rdma"]["interfaces"]
    for name, value in sorted(host.facts["environment"].get("/etc/environment", {}).items()):
        reason = _forbidden(host, name, value)
        if reason:
            text = (
                f"{name}={value} is set for everybody on {host.name} and changes what is measured by hand: it {reason}."
            )
            yield Problem(f"{name}={value}", "not set", text, "Take it out of /etc/environment.", WARN)
        if name == "ARCH":
            text = f"ARCH={value} is set for everybody on {host.name}: building kernel modules fails with it."
            yield Problem(f"ARCH={value}", "not set", text, "Take it out of /etc/environment.", WARN)
    for name, (value, path) in sorted(host.environment.items()):
        reason = _forbidden(host, name, value)
        if reason:
            text = f"{name}={value} is set on {host.name} ({path}): it {reason}."
            yield Problem(f"{name}={value}", "WARN" if name in FORBIDDEN_DEBUG else "not set", text)
        if name == "PYTORCH_CUDA_ALLOC_CONF" and "expandable_segments" in value:
            text = f"{name}={value} is set on {host.name} ({path}): expandable segments fail with pipeline parallelism."
            yield Problem(value, "not set", text)
        if name == "GLOO_SOCKET_IFNAME" and value[:1] in ("^", "="):
            text = f"{name}={value} on {host.name} ({path}): Gloo takes a plain name, without '{value[0]}'."
            yield Problem(value, value[1:], text)
        if name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") and interfaces and value[:1] != "^":
            plain = value.lstrip("=")
            exact = name == "GLOO_SOCKET_IFNAME" or value.startswith("=")
            there = [link for link in interfaces if link == plain or (not exact and link.startswith(plain))]
            if plain and "," not in plain and not there:
                text = f"{name}={value} on {host.name} ({path}), which has no such interface."
                yield Problem(value, ", ".join(sorted(interfaces)), text)


def _forbidden(host: Host, name: str, value: str) -> str | None:
    """Why a variable must not have this value; None where it may."""
    if name in FORBIDDEN_SWITCHES:
        return FORBIDDEN_SWITCHES[name] if value not in ("", "0") else None
    if name in FORBIDDEN:
        return FORBIDDEN[name] if value else None
    if value.upper() in FORBIDDEN_DEBUG.get(name, ()):
        return "floods the log"
    if name == "CUDA_VISIBLE_DEVICES":
        # A list that names all of them hides none; an empty one hides all.
        named = {word.strip() for word in value.split(",") if re.match(r"\d|GPU-", word.strip())}
        return "hides GPUs from the replica" if len(named) < int(host.expect["gpus"]) else None
    return None


@check(
    "nccl-conf",
    "No stray configuration of NCCL",
    WARN,
    looks_at="/etc/nccl.conf, /root/.nccl.conf",
    remedy="Move what is right into fabric_environment and remove the file: it changes every program on the host.",
)
def _nccl_conf(host: Host) -> t.Iterator[Problem]:
    for path, lines in sorted(host.facts["nccl_files"].items()):
        told = "; ".join(lines[:5]) or "empty"
        yield Problem(told, "no such file", f"{path} of {host.name} changes NCCL for everybody: {told}")


@check(
    "launch",
    "Launch arguments fit the machine",
    WARN,
    needs="gpus",
    looks_at=(
        "serve_args and what the environment is in effect, defaults of the engine's release included, against what is "
        "known of K3, TP x PP over two hosts without NVLink between them"
    ),
    remedy="The profile lambda has values that start; change one at a time.",
)
def _launch(host: Host) -> t.Iterator[Problem]:
    version, release = host.version, gpu_facts.release_of(host.version)
    # What is not set is what the release takes it for; where there is no engine yet, nobody knows.
    across = host.peers > 0
    flashinfer = _switch(host, "VLLM_ALLREDUCE_USE_FLASHINFER", release >= (0, 29))
    passes = _mapping(_mapping(host.flag("compilation-config")).get("pass_config"))
    fused = passes.get("fuse_allreduce_rms")
    if across and flashinfer and fused is not False:
        text = "FlashInfer's all-reduce hangs between hosts that share no NVLink."
        known = "VLLM_ALLREDUCE_USE_FLASHINFER" in host.environment
        told = "VLLM_ALLREDUCE_USE_FLASHINFER is on" if known else f"vLLM {version} turns it on unless told otherwise"
        remedy = "Set VLLM_ALLREDUCE_USE_FLASHINFER to 0."
        yield Problem("1" if known else "not set", "0", f"{host.name}: {text} {told}.", remedy)
    if across and fused is True:
        text = "fuse_allreduce_rms hung at autotuning and graph capture with a pipeline of tensor-parallel stages."
        yield Problem("true", "false", f"{host.name}: {text}", "Leave fuse_allreduce_rms out, or set it to false.")
    if release and release < (0, 28) and _switch(host, "VLLM_USE_V2_MODEL_RUNNER", release >= (0, 27)):
        known = "VLLM_USE_V2_MODEL_RUNNER" in host.environment
        text = f"VLLM_USE_V2_MODEL_RUNNER {'is on' if known else 'not set is on for K3'} with vLLM {version}: "
        text += "the first request of a pipeline ends in an IndexError."
        remedy = "Set VLLM_USE_V2_MODEL_RUNNER to 0, or use vLLM 0.28 or newer."
        yield Problem("1" if known else "not set", "0", f"{host.name}: {text}", remedy)
    limit = host.environment.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", ("", ""))[0]
    if limit.isdigit() and int(limit) < 300:
        text = (
            f"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS={limit}: a step that compiles kernels takes longer, and ends it all."
        )
        yield Problem(limit, ">= 300", f"{host.name}: {text}", "Leave it out (300), or set it to 1800.")
    offload = [name for name in ("kv-offloading-size", "kv-offloading-backend") if host.flag(name)]
    if "offload" in json.dumps(host.flag("kv-transfer-config") or "").lower():
        offload.append("kv-transfer-config")
    if across and offload:
        text = (
            f"{', '.join(offload)}: offloading the cache to the host's memory crashed in a pipeline (batched memcpy)."
        )
        yield Problem("set", "not set", f"{host.name}: {text}", "Leave offloading out until a long run has proven it.")
    if host.expect.get("args") is not None and not host.flag("disable-custom-all-reduce"):
        text = "without --disable-custom-all-reduce a start can hang on two hosts with 8 B200."
        yield Problem("not set", "true", f"{host.name}: {text}", "Set disable-custom-all-reduce: true in serve_args.")
    share = host.flag("gpu-memory-utilization")
    if share is not None and float(share) > 0.92 and "B200" in str(host.expect["gpu_name"]):
        text = f"gpu-memory-utilization {share}: a B200 ran out of memory at its first warm-up with 0.95."
        yield Problem(str(share), "<= 0.92", f"{host.name}: {text}", "Set gpu-memory-utilization to 0.90.")
    if host.flag("speculative-config") and release and release < (0, 31):
        text = f"speculative decoding with a pipeline is refused by vLLM {version}."
        yield Problem("set", "not set", f"{host.name}: {text}", "Leave speculative-config out, or upgrade.")


def _switch(host: Host, name: str, default: bool) -> bool:
    """Whether one of vLLM's switches is on: a whole number that is not 0, or its default."""
    value = host.environment.get(name, ("", ""))[0].strip()
    return default if not value else value not in ("0", "00")


def _mapping(value: t.Any) -> t.Mapping[str, t.Any]:
    """A flag that is a mapping, given as one or as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


# Hosts against each other


class Difference(t.NamedTuple):
    """A value that must be equal on all hosts, by host."""

    what: str
    values: dict[str, t.Any]


def _compare(what: str, hosts: t.Sequence[Host], value: t.Callable[[Host], t.Any]) -> t.Iterator[Difference]:
    values = {host.name: value(host) for host in hosts}
    known = [one for one in values.values() if one not in (None, "", [])]
    if any(one != known[0] for one in known[1:]):
        yield Difference(what, values)


@check(
    "driver-equal",
    "Same driver on all hosts",
    FAIL,
    across=True,
    looks_at="running driver, CUDA release, VBIOS and product name of GPUs",
    remedy="Bring the hosts to one version, one after the other: playbooks/prepare.yml.",
)
def _driver_equal(hosts: t.Sequence[Host]) -> t.Iterator[Difference]:
    yield from _compare("driver", hosts, lambda host: host.driver)
    yield from _compare("GPU name", hosts, lambda host: sorted({gpu["name"] for gpu in host.gpus}))


@check(
    "vbios-equal",
    "Same VBIOS on all GPUs",
    WARN,
    across=True,
    looks_at="VBIOS version of every GPU of every host",
    remedy="Ask the vendor for one firmware bundle on all hosts.",
)
def _vbios_equal(hosts: t.Sequence[Host]) -> t.Iterator[Difference]:
    versions = {host.name: sorted({gpu["vbios"] for gpu in host.gpus if gpu["vbios"]}) for host in hosts}
    if len({version for found in versions.values() for version in found}) > 1:
        yield Difference("VBIOS", {name: ", ".join(found) for name, found in versions.items()})


@check(
    "firmware-equal",
    "Same firmware on all rails",
    WARN,
    across=True,
    needs="rails",
    looks_at="firmware of every rail of every host, and whose RDMA stack it is",
    remedy="mlxfwmanager or the vendor's bundle; the same RDMA stack on all hosts.",
)
def _firmware_equal(hosts: t.Sequence[Host]) -> t.Iterator[Difference]:
    versions = {
        host.name: sorted({str(port["firmware"]) for port in host.facts["rdma"]["verdict"]["rails"]}) for host in hosts
    }
    if len({version for found in versions.values() for version in found}) > 1:
        yield Difference("firmware of the rails", {name: ", ".join(found) for name, found in versions.items()})
    yield from _compare("RDMA stack", hosts, lambda host: host.facts["rdma"]["stack"]["ofed"] or "inbox")


@check(
    "rails-equal",
    "Same rails in the same order on all hosts",
    FAIL,
    across=True,
    needs="rails",
    looks_at="names of the rails by PCI address: NCCL pairs them by position",
    remedy=(
        "Name them alike (udev), or set fabric_rails per host so that both lists pair what is cabled to the same leaf."
    ),
)
def _rails_equal(hosts: t.Sequence[Host]) -> t.Iterator[Difference]:
    yield from _compare("number of rails", hosts, lambda host: len(host.facts["rdma"]["verdict"]["rails"]))
    yield from _compare(
        "order of the rails",
        hosts,
        lambda host: ", ".join(port["device"] for port in host.facts["rdma"]["verdict"]["rails"]),
    )


@check(
    "system-equal",
    "Same system on all hosts",
    WARN,
    across=True,
    looks_at="kernel, operating system, memory, processors",
    remedy="Differences are seldom fatal and always in the way when two hosts must be compared.",
)
def _system_equal(hosts: t.Sequence[Host]) -> t.Iterator[Difference]:
    for what, key in (("kernel", "kernel"), ("operating system", "os"), ("number of processors", "cpus")):
        yield from _compare(what, hosts, lambda host, key=key: host.facts["host"][key])


@check(
    "mtu-equal",
    "Same MTU on the way between the hosts",
    WARN,
    across=True,
    looks_at="MTU of the interface of the route to the peer",
    remedy="Set one MTU on both; unlike ones let small messages through and stall large ones.",
)
def _mtu_equal(hosts: t.Sequence[Host]) -> t.Iterator[Difference]:
    def mtu(host: Host) -> t.Any:
        name = (host.facts["route"] or {}).get("interface")
        return (host.facts["rdma"]["interfaces"].get(name) or {}).get("mtu")

    yield from _compare("MTU", hosts, mtu)


@check(
    "engine-equal",
    "Same engine on all hosts",
    FAIL,
    across=True,
    looks_at="digest of the lock, versions of vLLM, torch and NCCL in the receipts",
    remedy="Run playbooks/engine.yml on all hosts: ranks with unlike engines refuse each other.",
)
def _engine_equal(hosts: t.Sequence[Host]) -> t.Iterator[Difference]:
    yield from _compare(
        "engine lock", hosts, lambda host: str((host.facts["engine"] or {}).get("lock_digest") or "")[:12]
    )
    for package in ("vllm", "torch", "nvidia-nccl-cu13"):
        yield from _compare(
            f"version of {package}",
            hosts,
            lambda host, package=package: ((host.facts["engine"] or {}).get("versions") or {}).get(package),
        )


@check(
    "checkpoint-equal",
    "Same checkpoint on all hosts",
    FAIL,
    across=True,
    looks_at="identity in checkpoint.json: repository, revision, scope, layers per stage, digest of the index",
    remedy="Run playbooks/fetch.yml on all hosts with the same checkpoint_revision.",
)
def _checkpoint_equal(hosts: t.Sequence[Host]) -> t.Iterator[Difference]:
    for what, key in (("revision of the checkpoint", "revision"), ("identity of the checkpoint", "identity_digest")):
        yield from _compare(
            what,
            hosts,
            lambda host, key=key: str(((host.facts["checkpoint"] or {}).get("statement") or {}).get(key) or "")[:12],
        )


@check(
    "clock-offset",
    "Clocks agree",
    WARN,
    needs="peers",
    looks_at=(
        "difference of the clocks, measured over the connections between the hosts, against "
        "`preflight_expect_clock_offset`"
    ),
    remedy="Let one service keep both right (chrony): logs and time-outs of two hosts are compared by their clocks.",
)
def _clock_offset(host: Host) -> t.Iterator[Problem]:
    limit = float(host.expect["clock_offset"])
    for peer in host.facts["meeting"]["peers"]:
        # Half of the way there and back is what the measurement cannot tell.
        if peer["offset"] is not None and abs(peer["offset"]) - peer["round_trip"] / 2 > limit:
            text = f"The clock of {peer['name']} is {peer['offset']:+.3f} s off from that of {host.name}."
            yield Problem(f"{peer['offset']:+.3f} s", f"within {limit:g} s", text)


# The verdict


def verdict(
    observations: t.Mapping[str, t.Mapping[str, t.Any]],
    expectations: t.Mapping[str, t.Mapping[str, t.Any]],
) -> dict[str, t.Any]:
    """Rows of what is not right, and counts.

    Both arguments are by host; C(expectations) also has waivers and severities.
    """
    hosts = [Host(name, observations[name], expectations[name]) for name in observations]
    rows: list[dict[str, t.Any]] = []
    performed: set[str] = set()
    for one in CHECKS.values():
        chosen = [host for host in hosts if wanted(host, one.needs)]
        if not chosen:
            continue
        performed.add(one.id)
        if one.across:
            for what, values in one.find(chosen):
                told = ", ".join(f"{name} has {_told(value)}" for name, value in sorted(values.items()))
                text = f"The {what} differs between the hosts: {told}."
                rows.append(_row(one, chosen[0], Problem(told, "equal", text), "all hosts"))
        else:
            rows += [_row(one, host, problem, host.name) for host in chosen for problem in one.find(host)]
    unknown = sorted(
        {name for host in hosts for key in ("waivers", "severities") for name in host.expect.get(key) or {}}
        - set(CHECKS)
    )
    counts = {status: sum(row["status"] == status for row in rows) for status in (FAIL, WARN, "waived")}
    return {
        "rows": sorted(rows, key=lambda row: ((FAIL, WARN, "waived").index(row["status"]), row["host"], row["check"])),
        "performed": sorted(performed),
        "skipped": sorted(set(CHECKS) - performed),
        "unknown": unknown,
        "failed": counts[FAIL],
        "warned": counts[WARN],
        "waived": counts["waived"],
        "summary": _summary(hosts, performed, counts),
    }


def _told(value: t.Any) -> str:
    if value in (None, "", []):
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _row(one: Check, host: Host, problem: Problem, name: str) -> dict[str, t.Any]:
    reason = (host.expect.get("waivers") or {}).get(one.id)
    severity = (host.expect.get("severities") or {}).get(one.id, problem.severity or one.severity)
    return {
        "check": one.id,
        "host": name,
        "status": "waived" if reason else severity,
        "observed": problem.observed,
        "expected": problem.expected,
        "text": problem.text,
        "remedy": problem.remedy or one.remedy,
        "waiver": str(reason) if reason else None,
    }


def _summary(hosts: t.Sequence[Host], performed: t.Collection[str], counts: t.Mapping[str, int]) -> str:
    told = f"{len(performed)} checks on {len(hosts)} host{'s' if len(hosts) != 1 else ''}: "
    parts = [f"{counts[FAIL]} failed"] if counts[FAIL] else []
    parts += [f"{counts[WARN]} warnings"] if counts[WARN] else []
    parts += [f"{counts['waived']} waived"] if counts["waived"] else []
    return told + (", ".join(parts) if parts else "all is well") + "."


def lines(result: t.Mapping[str, t.Any]) -> list[str]:
    """The verdict for a terminal: only what is not right, and one line that sums up."""
    told = []
    for row in result["rows"]:
        told.append(f"{row['status'].upper():6} {row['check']:<20} {row['host']}: {row['text']}")
        if row["status"] == "waived":
            told.append(f"       waived: {row['waiver']}")
        else:
            told.append(f"       remedy: {row['remedy']}")
    return [*told, result["summary"]]


def table() -> str:
    """The checks as a Markdown table, for the documentation."""
    head = ["| Check | Severity | Looks at | Remedy |", "|---|---|---|---|"]
    rows = [f"| `{one.id}`: {one.title} | {one.severity} | {one.looks_at} | {one.remedy} |" for one in CHECKS.values()]
    return "\n".join([*head, *rows]).replace("`_", "`preflight_expect_") + "\n"
