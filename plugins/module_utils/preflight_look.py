# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One look at everything of a host that a start of the replica depends on; the judgement is C(preflight)'s."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import typing as t

from ansible_collections.baremetal.kimi_k3.plugins.module_utils import gpu_facts, gpu_look, rdma_facts, rdma_look
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.host_look import Look
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import PRIVATE_DIR

SYSCTLS = (
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "vm.max_map_count",
    "kernel.numa_balancing",
)
# How the kernel says that it refuses a module: without its name. What modprobe says of it is in no log of the kernel.
REJECTED = re.compile(
    r"Loading of .*module.* is rejected|unsigned module loading is restricted"
    r"|PKCS#7 signature not signed with a trusted key"
)
# Environment that changes what the replica does without anybody having asked it to.
NCCL_FILES = ("/etc/nccl.conf", "/root/.nccl.conf")
SECURE_BOOT = "firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
KNOWN_NAMES = re.compile(r"(?!.*(?:KEY|TOKEN|SECRET|PASS))(?:NCCL_|GLOO_|VLLM_|CUDA_|PYTORCH_|TORCH_|UCX_|LD_|ARCH$)")
FLASHINFER_PARTS = ("flashinfer-cubin", "flashinfer-jit-cache")
READ_LIMIT = 512 << 20
READ_SECONDS = 2.0


def host(look: Look) -> dict[str, t.Any]:
    release = fields(look.text(look.host("/etc/os-release")) or "")
    memory = re.search(r"MemTotal:\s+(\d+) kB", look.text(look.proc("meminfo")) or "")
    nodes = [name for name in look.names(look.sys("devices/system/node")) if re.fullmatch(r"node\d+", name)]
    return {
        "name": socket.gethostname(),
        "os": f"{release.get('ID', '?')} {release.get('VERSION_ID', '?')}",
        "kernel": os.uname().release,
        "architecture": os.uname().machine,
        "cpus": os.cpu_count() or 0,
        "memory_mib": int(memory[1]) // 1024 if memory else 0,
        "numa_nodes": len(nodes) or 1,
        "nvme": len([name for name in look.names(look.sys("class/nvme")) if re.fullmatch(r"nvme\d+", name)]),
        "clocksource": look.text(look.sys("devices/system/clocksource/clocksource0/current_clocksource")),
        "synchronized": synchronized(look),
        "iommu": rdma_look.iommu(look),
    }


def fields(text: str) -> dict[str, str]:
    """C(NAME=value) lines, quotes taken off, as in os-release and environment files."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$", line)
        if match:
            found[match[1]] = match[2].strip().strip("\"'")
    return found


def synchronized(look: Look) -> bool | None:
    """Whether something keeps the clock right; None where nothing tells."""
    told = look.word("timedatectl", "show", "--property=NTPSynchronized", "--value")
    return {"yes": True, "no": False}.get(told)


def resolution(name: str) -> dict[str, t.Any]:
    """What the host's own name leads to; Gloo connects its peers to it."""
    try:
        found = sorted({entry[4][0] for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        return {"name": name, "addresses": [], "error": str(error)}
    return {"name": name, "addresses": found, "error": None}


def shared_memory(path: str = "/dev/shm") -> dict[str, t.Any]:  # noqa: S108 - looked at, not written
    try:
        room = os.statvfs(path)
    except OSError as error:
        return {"size_mib": 0, "free_mib": 0, "stale": [], "error": str(error)}
    stale = []
    for name in Look.names(path):
        if name.startswith(("nccl-", "psm_", "torch_", "sem.mp-")):
            try:
                size = os.stat(os.path.join(path, name)).st_size
            except OSError:
                continue
            stale.append({"name": name, "mib": size >> 20})
    return {
        "size_mib": room.f_blocks * room.f_frsize >> 20,
        "free_mib": room.f_bavail * room.f_frsize >> 20,
        "stale": stale,
        "error": None,
    }


def storage(look: Look, path: str | None, measure: bool) -> dict[str, t.Any] | None:
    """The file system that holds the checkpoint, or will: its kind, room, and the rate of a cold read.

    A disk that breaks and a mount whose server has forgotten it (EIO, ESTALE) are what is looked for, not an end of it.
    """
    if not path:
        return None
    there = path
    while not os.path.isdir(there) and there != "/":
        there = os.path.dirname(there)
    mount = mount_of(there, look.text(look.proc("self/mountinfo"), 1 << 22) or look.text("/proc/self/mountinfo") or "")
    found: dict[str, t.Any] = {
        "path": path,
        "mount": mount["point"],
        "type": mount["type"],
        "device": mount["device"],
        "free_gib": None,
        "size_gib": None,
        "inodes_free": None,
        "read_mb_s": None,
        "error": None,
    }
    try:
        # A path that fails otherwise than by not being there would be taken for one that is still to be made.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)
        room = os.statvfs(there)
        found["free_gib"] = room.f_bavail * room.f_frsize >> 30
        found["size_gib"] = room.f_blocks * room.f_frsize >> 30
        found["inodes_free"] = room.f_favail if room.f_files else None
        found["read_mb_s"] = read_rate(path) if measure else None
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found


def mount_of(path: str, mountinfo: str) -> dict[str, str]:
    """The mount that holds a path: the last one with the longest mount point above it."""
    best = {"point": "/", "type": "unknown", "device": "unknown"}
    real = os.path.realpath(path)
    for line in mountinfo.splitlines():
        before, _dash, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape") if len(before.split()) > 4 else ""
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if point and inside and len(point) >= len(best["point"]):
            kind, device = [*after.split(), "", ""][:2]
            best = {"point": point, "type": kind, "device": device}
    return best


def read_rate(path: str) -> int | None:
    """Megabytes per second of reading the largest shard with an empty cache; None without a file large enough.

    Raises OSError when what is there cannot be read.
    """
    try:
        entries = [entry for entry in os.scandir(path) if entry.name.endswith(".safetensors") and entry.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    largest = max(entries, key=lambda entry: entry.stat().st_size, default=None)
    if largest is None or largest.stat().st_size < READ_LIMIT:
        return None
    descriptor = os.open(largest.path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, READ_LIMIT, os.POSIX_FADV_DONTNEED)
        start, total = time.monotonic(), 0
        while total < READ_LIMIT and time.monotonic() - start < READ_SECONDS:
            part = os.read(descriptor, 16 << 20)
            if not part:
                break
            total += len(part)
        seconds = time.monotonic() - start
    finally:
        os.close(descriptor)
    return int(total / max(seconds, 1e-6) / 1e6)


def unit(look: Look, name: str) -> dict[str, t.Any]:
    """State of the replica's unit, and the limits that it would start with."""
    words = "LoadState,ActiveState,SubState,LimitMEMLOCK,ControlGroup"
    told = fields(look.output("systemctl", "show", "--property", words, "--", name))
    active = told.get("ActiveState") in ("active", "activating", "reloading", "deactivating")
    return {
        "loaded": told.get("LoadState") == "loaded",
        "active": active,
        # Between two attempts of a start that fails again and again the unit is active, and nothing of it runs.
        "running": active and not (told.get("SubState") or "").startswith("auto-restart"),
        "memlock": told.get("LimitMEMLOCK"),
        "cgroup": told.get("ControlGroup") or None,
    }


def listeners(look: Look, ports: t.Iterable[int], own: str | None) -> dict[str, bool]:
    """Of each of these ports that something listens on whether it is a process of this control group.

    Empty where that cannot be told: no such group, or a host that does not show it.
    """
    members: set[str] = set()
    base = look.sys("fs/cgroup" + own) if own else ""
    for folder, _folders, files in os.walk(base) if base else ():
        if "cgroup.procs" in files:
            members |= set((look.text(os.path.join(folder, "cgroup.procs")) or "").split())
    sockets = set()
    for process in members:
        folder = look.proc(process, "fd")
        for name in look.names(folder):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(os.path.join(folder, name)))
    if not sockets:
        return {}
    found: dict[str, bool] = {}
    wanted = {int(port) for port in ports}
    for table in ("self/net/tcp", "self/net/tcp6"):
        for line in (look.text(look.proc(table), 1 << 24) or "").splitlines()[1:]:
            # sl, local address, remote address, state (0A listens), queues, timer, retransmits, user, timeout, inode
            words = line.split()
            if len(words) > 9 and words[3] == "0A" and (port := int(words[1].rpartition(":")[2], 16)) in wanted:
                found[str(port)] = found.get(str(port), True) and f"socket:[{words[9]}]" in sockets
    return found


def module_rejected(look: Look) -> str | None:
    """The kernel's line about a module that it refuses, since boot."""
    out = look.output("journalctl", "--dmesg", "--boot", "--no-pager", "--quiet", "--output=cat")
    lines = (out if out.strip() else look.output("dmesg")).splitlines()
    return next((line.strip()[:300] for line in lines if REJECTED.search(line)), None)


def processes(look: Look, gpus: t.Sequence[t.Mapping[str, t.Any]], own: str | None) -> list[dict[str, t.Any]]:
    """Processes on GPUs, each with its control group and whether it is the replica's own."""
    found = []
    for gpu in gpus:
        for process in gpu["processes"]:
            text = look.text(look.proc(str(process["pid"]), "cgroup")) or ""
            group = next((line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2), None)
            mine = bool(own and group and (group == own or group.startswith(own.rstrip("/") + "/")))
            found.append({**process, "gpu": gpu["index"], "cgroup": group, "own": mine})
    return found


def secure_boot(look: Look) -> bool | None:
    """Whether Secure Boot is on: the last byte of its EFI variable; None on a machine without EFI."""
    content = look.raw(look.sys(SECURE_BOOT), 16)
    return bool(content[4]) if content and len(content) >= 5 else None


def reboot(look: Look, driver: t.Mapping[str, t.Any], kernel: str) -> dict[str, t.Any]:
    """Why this host wants to be rebooted, and whether the kernel it would come up with has the driver's module."""
    reasons = []
    if os.path.exists(look.host("/run/reboot-required")):
        packages = (look.text(look.host("/run/reboot-required.pkgs")) or "").split()
        reasons.append("packages ask for it" + (f" ({', '.join(sorted(set(packages))[:5])})" if packages else ""))
    if driver["running"] and driver["installed"] and driver["running"] != driver["installed"]:
        reasons.append(f"driver {driver['running']} runs, {driver['installed']} is installed")
    if (
        driver["running_flavour"]
        and driver["installed_flavour"]
        and driver["running_flavour"] != driver["installed_flavour"]
    ):
        reasons.append(
            f"the {driver['running_flavour']} module runs, the {driver['installed_flavour']} one is installed"
        )
    kernels = [name[8:] for name in look.names(look.host("/boot")) if name.startswith("vmlinuz-")]
    newest = max(kernels, key=version_key) if kernels else None
    if newest and version_key(newest) > version_key(kernel):
        reasons.append(f"kernel {kernel} runs, {newest} is installed")
    module = None
    if newest and driver["installed"]:
        module = module_of(look, newest)
    return {"reasons": reasons, "newest_kernel": newest, "module_for_newest": module}


def module_of(look: Look, kernel: str) -> bool:
    """Whether there is a module of the driver for a kernel."""
    base = look.host(f"/lib/modules/{kernel}")
    for folder, folders, files in os.walk(base):
        if any(re.match(r"nvidia\.ko", name) for name in files):
            return True
        # Nobody puts it deeper; the folders beside a deep one are still to be looked at.
        if folder.count("/") - base.count("/") > 6:
            folders.clear()
    return False


def version_key(text: str) -> list[tuple[int, t.Any]]:
    """Kernel releases in their order: numbers as numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.findall(r"\d+|[a-z]+", text.lower())]


def document(path: str) -> dict[str, t.Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def engine(look: Look, venv: str | None) -> dict[str, t.Any] | None:
    """The engine's receipt, and whether it can compile kernels or has them compiled."""
    if not venv:
        return None
    receipt = document(os.path.join(venv, "engine.json"))
    if receipt is None:
        return None
    found: dict[str, str] = {}
    nvcc = None
    library = os.path.join(venv, "lib")
    for python in look.names(library):
        site = os.path.join(library, python, "site-packages")
        if os.path.isdir(site):
            for name in look.names(site):
                distribution = re.fullmatch(r"(.+?)-([^-]+)\.dist-info", name)
                if distribution:
                    found[re.sub(r"[-_.]+", "-", distribution[1]).lower()] = distribution[2]
            candidate = os.path.join(site, "nvidia", "cu13", "bin", "nvcc")
            nvcc = candidate if os.path.exists(candidate) else nvcc
    return {
        "lock_digest": receipt.get("lock_digest"),
        "versions": receipt.get("versions", {}),
        "nvcc": nvcc,
        "ninja": "ninja" in found or look.program("ninja") is not None,
        "cubins": set(FLASHINFER_PARTS) <= set(found),
        "flashinfer": found.get("flashinfer-python"),
        # The wheel of compiled kernels is built per CUDA release, which is no part of FlashInfer's own version.
        "flashinfer_parts": {name: found[name].partition("+")[0] for name in FLASHINFER_PARTS if name in found},
    }


def checkpoint(path: str | None) -> dict[str, t.Any] | None:
    """What the checkpoint states of itself; which files of its index are not there, or of another size than proven."""
    if not path:
        return None
    statement = document(os.path.join(path, "checkpoint.json"))
    if statement is None:
        return None
    index = document(os.path.join(path, "model.safetensors.index.json")) or {}
    wanted = set((index.get("weight_map") or {}).values())
    receipts = (document(os.path.join(path, PRIVATE_DIR, "receipts.json")) or {}).get("files") or {}
    missing, short = [], []
    for name in sorted(wanted):
        try:
            size = os.stat(os.path.join(path, name)).st_size
        except OSError:
            missing.append(name)
            continue
        receipt = receipts.get(name)
        if isinstance(receipt, dict) and receipt.get("size") not in (None, size):
            short.append(name)
    return {"statement": statement, "files": len(wanted), "missing": missing, "short": short}


def environments(look: Look, config: str) -> dict[str, dict[str, str]]:
    """Variables of environment files that a check knows; others may hold what is nobody's business."""
    found = {}
    for path in ("/etc/environment", f"{config}/serve.env", f"{config}/fabric.env"):
        text = look.text(look.host(path))
        if text is not None:
            found[path] = {name: value for name, value in fields(text).items() if KNOWN_NAMES.match(name)}
    return found


def nccl_files(look: Look) -> dict[str, list[str]]:
    """System-wide settings of NCCL, which change the service of whoever happens to share the host."""
    found = {}
    for path in NCCL_FILES:
        text = look.text(look.host(path))
        if text is not None:
            found[path] = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return found


def fabric_mode(look: Look) -> str | None:
    """C(FABRIC_MODE) of the Fabric Manager's configuration."""
    text = look.text(look.host("/usr/share/nvidia/nvswitch/fabricmanager.cfg")) or ""
    match = re.search(r"(?m)^\s*FABRIC_MODE\s*=\s*(\d+)", text)
    return match[1] if match else None


def diagnose(look: Look, level: int, busy: bool) -> dict[str, t.Any] | None:
    """The verdict of C(dcgmi diag), which must not run beside the replica."""
    if level < 1 or busy:
        return None
    answer = look.run("dcgmi", "diag", "--run", str(level), seconds=3 * 3600)
    if answer is None:
        return {"level": level, "rc": None, "failed": ["there is no dcgmi on this host"]}
    rc, out, err = answer
    failed = [" ".join(line.replace("|", " ").split()) for line in (out + err).splitlines() if "fail" in line.lower()]
    return {"level": level, "rc": rc, "failed": failed[:8]}


def gather(look: Look, asked: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """All that the module C(preflight_info) returns, but for the connections to the peers."""
    gpu = gpu_look.gather(look)
    devices = rdma_look.gather(look)
    virtual = rdma_look.virtualization(look)
    verdict = rdma_facts.judge(
        devices,
        gpu["pci"],
        mode=asked["mode"],
        min_rate=asked["min_rate"],
        virtual=virtual not in (None, "none"),
        chosen=asked["rails"],
    )
    own = unit(look, asked["unit"])
    there = host(look)
    name = asked["unit"].removesuffix(".service")
    return {
        "gpu": gpu,
        "rdma": {
            "devices": devices,
            "verdict": verdict,
            "interfaces": rdma_look.interfaces(look),
            "acs": rdma_look.acs_enabled(look),
            "stack": rdma_look.stack(look),
        },
        "virtualization": virtual,
        "host": there,
        "resolution": resolution(there["name"]),
        "shm": shared_memory(),
        "storage": storage(look, asked["checkpoint"], asked["read_rate"] and not own["active"]),
        "unit": own,
        "processes": processes(look, gpu["gpus"], own["cgroup"]),
        "listeners": listeners(look, [asked["port"], *asked["ports"]], own["cgroup"]),
        "secure_boot": secure_boot(look),
        "module_rejected": module_rejected(look),
        "reboot": reboot(look, gpu["driver"], there["kernel"]),
        "nouveau": os.path.isdir(look.sys("module/nouveau")) or "nouveau" in gpu["modules"],
        "engine": engine(look, asked["venv"]),
        "checkpoint": checkpoint(asked["checkpoint"]),
        "environment": environments(look, f"/etc/{name}"),
        "nccl_files": nccl_files(look),
        "fabric_mode": fabric_mode(look),
        "sysctls": {
            key: gpu_facts.value_of(" ".join((look.text(look.proc("sys", *key.split("."))) or "").split()))
            for key in SYSCTLS
        },
        "dcgm": diagnose(look, asked["dcgm_level"], own["active"]),
    }
