# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From one look at a host to the files that role fabric wants on it: pure functions, no I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.baremetal.kimi_k3.plugins.module_utils import preflight, rdma_facts
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.launch import applicable_environment, environment_file

HEADER = "# Written by the role fabric of baremetal.kimi_k3; changes are lost.\n"
MODULES_FILE = "/etc/modules-load.d/kimi-k3-fabric.conf"
SYSCTL_FILE = "/etc/sysctl.d/60-kimi-k3-fabric.conf"
LIMITS_FILE = "/etc/security/limits.d/60-kimi-k3-fabric.conf"
GRUB_FILE = "/etc/default/grub.d/60-kimi-k3-fabric.cfg"
RESERVED = "net.ipv4.ip_local_reserved_ports"
# Why a kernel parameter is set.
SYSCTLS = {
    RESERVED: "The replica listens on these: a port chosen early must still be free after the weights were loaded.",
    "net.ipv4.ip_local_port_range": "NCCL, Gloo and ZMQ take hundreds of ports that the kernel chooses out of these.",
}
# What each module is for; ib_umad stands first because the Fabric Manager's check at its start wants it on NVLink 5.
MODULES = {
    "ib_umad": "NVLSM and the tools of infiniband-diags",
    "mlx5_core": "the adapters",
    "mlx5_ib": "their RDMA side",
    "ib_uverbs": "NCCL",
    "rdma_cm": "connections by address",
    "rdma_ucm": "the same for programs",
}


class FabricError(ValueError):
    """The variables contradict what the host is; the message is one sentence for the operator."""


def environment(settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]) -> dict[str, str]:
    """NCCL's and Gloo's environment on this host; the operator's own comes last, and None leaves a variable out."""
    found: dict[str, str] = {}
    interface = (look.get("route") or {}).get("interface")
    if interface:
        # NCCL compares beginnings without "="; Gloo takes the plain name and nothing else.
        found["NCCL_SOCKET_IFNAME"] = f"={interface}"
        found["GLOO_SOCKET_IFNAME"] = str(interface)
    verdict = look["verdict"]
    if int(settings["rail_count"]) and verdict["nccl_ib_hca"]:
        found["NCCL_IB_HCA"] = str(verdict["nccl_ib_hca"])
    if settings["gpudirect"] == "peermem":
        found["NCCL_DMABUF_ENABLE"] = "0"
    if settings["mode"] == "roce" and settings["roce_gid"] == "pin":
        found["NCCL_IB_GID_INDEX"] = str(gid_index(look))
    for name, value in settings["environment"].items():
        if value is None:
            found.pop(name, None)
    return {**found, **applicable_environment(settings["environment"], "0", {})}


def gid_index(look: t.Mapping[str, t.Any]) -> int:
    """The one index at which all rails have their IPv4-mapped RoCE v2 GID."""
    names = {rail["device"] for rail in look["verdict"]["rails"]}
    found = {
        device["name"]: rdma_facts.roce_gid_index(port)
        for device in look["devices"]
        for port in device["ports"]
        if device["name"] in names
    }
    if len(set(found.values())) != 1 or None in found.values():
        told = ", ".join(f"{name}: {'none' if index is None else index}" for name, index in sorted(found.items()))
        raise FabricError(
            f"fabric_roce_gid is 'pin', but the rails have no RoCE v2 GID with an IPv4 address at one index ({told}): "
            "give every rail one IPv4 address."
        )
    return int(next(iter(found.values())) or 0)


def reserved(current: str | None, ports: t.Sequence[int]) -> str:
    """Ports that the kernel must not hand out: those that are reserved already, and ours, as the kernel writes them."""
    numbers = sorted(preflight.reserved_ports(current or "") | {int(port) for port in ports})
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def plan(settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """What role fabric has to do on a host.

    C(files) to write (path and content), C(modules) to load now, those to load C(later), after the driver, C(sysctls)
    to set now, C(packages) to install, C(told), sentences for the operator, and C(environment), which is in one of the
    files.
    """
    rails = int(settings["rail_count"]) > 0
    names = [*MODULES, *(["nvidia_peermem"] if settings["gpudirect"] == "peermem" else [])] if rails else []
    missing = [name for name in names if name not in look["loaded"]]
    # Role cuda comes after this one: without the driver there is nothing yet that peermem could be loaded into.
    later = [name for name in missing if name == "nvidia_peermem" and "nvidia" not in look["loaded"]]
    sysctls = {name: str(value) for name, value in settings["sysctls"].items() if value is not None}
    if settings["reserve_ports"]:
        sysctls[RESERVED] = reserved(look["sysctls"].get(RESERVED), settings["reserve_ports"])
    variables = environment(settings, look)
    wanted = {settings["environment_file"]: HEADER + environment_file(variables)}
    if names:
        comments = [f"# {name}: {MODULES.get(name, 'GPUDirect without dma-buf')}\n{name}\n" for name in names]
        wanted[MODULES_FILE] = HEADER + "".join(comments)
    if sysctls:
        lines = [
            f"# {SYSCTLS.get(name, 'fabric_sysctls asks for it.')}\n{name} = {sysctls[name]}\n" for name in sysctls
        ]
        wanted[SYSCTL_FILE] = HEADER + "".join(sorted(lines, key=lambda line: line.split("\n")[1]))
    if settings["memlock"]:
        # The unit has its own limit: this one is for people who measure by hand.
        wanted[LIMITS_FILE] = HEADER + "* soft memlock unlimited\n* hard memlock unlimited\n"
    current = look["files"]
    if settings["iommu"] == "passthrough" and (current.get(GRUB_FILE) or not passes_through(look)):
        wanted[GRUB_FILE] = (
            HEADER + "# With an IOMMU that translates, GPUDirect between GPU and adapter is slow or hangs.\n"
            'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT iommu=pt"\n'
        )
    return {
        "environment": variables,
        "files": [
            {"path": path, "content": content} for path, content in wanted.items() if current.get(path) != content
        ],
        "modules": [name for name in missing if name not in later],
        "later": later,
        "sysctls": {
            name: value
            for name, value in sysctls.items()
            if look["sysctls"].get(name) is not None and _words(look["sysctls"][name]) != _words(value)
        },
        "packages": [name for name in settings["packages"] if rails and name not in look["packages"]],
        "told": _told(settings, look),
    }


def _words(value: str) -> list[str]:
    return sorted(value.replace(",", " ").split()) if "-" in value or "," in value else value.split()


def _told(settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]) -> list[str]:
    verdict, told = look["verdict"], []
    count = int(settings["rail_count"])
    if count or verdict["rails"]:
        names = ", ".join(rail["device"] for rail in verdict["rails"]) or "none"
        told.append(f"Rails: {names} ({len(verdict['rails'])} of {count}); RDMA stack: {look['stack']['kind']}.")
    told += [f"Broken: {port['text']}" for port in verdict["broken"]]
    told += list(verdict["warnings"])
    for path in ("/etc/nccl.conf", "/root/.nccl.conf"):
        if look["files"].get(path) is not None:
            told.append(
                f"{path} is there and changes NCCL for every program on this host: move it into fabric_environment."
            )
    virtual = look["virtualization"] not in (None, "none")
    if look["acs"] and not virtual and settings["acs"] == "observe" and count:
        told.append(
            f"{len(look['acs'])} PCIe bridges redirect traffic between devices to the root: set fabric_acs to disable."
        )
    if count and not virtual and look["iommu"]["active"] and not passes_through(look):
        asked = settings["iommu"] == "passthrough"
        told.append(f"The IOMMU translates: {'reboot' if asked else 'set fabric_iommu to passthrough, and reboot'}.")
    return told


def passes_through(look: t.Mapping[str, t.Any]) -> bool:
    """Whether no group of devices has an IOMMU in between that translates."""
    return not any(kind.startswith("DMA") for kind in look["iommu"]["types"])
