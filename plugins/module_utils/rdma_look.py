# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One look at a host's RDMA devices and network interfaces; what it finds is judged by C(rdma_facts)."""

from __future__ import annotations

import os
import re
import struct
import typing as t

from ansible_collections.baremetal.kimi_k3.plugins.module_utils import gpu_facts, gpu_look
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import rdma_facts as facts
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.host_look import Look, first_line

COUNTERS = (
    "link_downed",
    "link_error_recovery",
    "symbol_error",
    "port_rcv_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
# PCI Express: extended capability "Access Control Services", and where its control register is in it.
ACS_CAPABILITY, ACS_CONTROL = 0x000D, 6
SM_DISABLED = 1 << 10  # isSMDisabled in a port's capability mask
ACS_REDIRECTS = 0x1D  # source validation, request, completion and upstream redirection


def gather(look: Look) -> list[dict[str, t.Any]]:
    """Every RDMA device with its ports, in the order of their PCI addresses."""
    devices = [_device(look, name) for name in look.names(look.sys("class/infiniband"))]
    return sorted(devices, key=lambda device: (device["pci"] or "", device["name"]))


def _device(look: Look, name: str) -> dict[str, t.Any]:
    folder = look.sys("class/infiniband", name)
    device = os.path.join(folder, "device")
    path = gpu_look.pci_path(device)
    address = path[-1] if path else None
    vpd = facts.parse_vpd(look.raw(os.path.join(device, "vpd"), 4096))
    netdevs = look.names(os.path.join(device, "net"))
    masters = [look.sys("class/net", netdev, "master") for netdev in netdevs]
    return {
        "name": name,
        "pci": address,
        "pci_path": path,
        "numa": gpu_facts.number_of(look.text(os.path.join(device, "numa_node"))),
        "pcie_width": gpu_facts.number_of(look.text(os.path.join(device, "current_link_width"))),
        "pcie_width_max": gpu_facts.number_of(look.text(os.path.join(device, "max_link_width"))),
        "pcie_speed": look.text(os.path.join(device, "current_link_speed")),
        "pcie_speed_max": look.text(os.path.join(device, "max_link_speed")),
        "type": look.text(os.path.join(folder, "hca_type")),
        "firmware": look.text(os.path.join(folder, "fw_ver")),
        "board": look.text(os.path.join(folder, "board_id")),
        "guid": look.text(os.path.join(folder, "node_guid")),
        "image_guid": look.text(os.path.join(folder, "sys_image_guid")),
        "vf": os.path.lexists(os.path.join(device, "physfn")),
        "bond": "bond" in name,
        "bond_member": any(os.path.lexists(master) for master in masters),
        "netdevs": netdevs,
        "vpd": vpd,
        "ports": [
            _port(look, os.path.join(folder, "ports", number), int(number), netdevs)
            for number in look.names(os.path.join(folder, "ports"))
            if number.isdigit()
        ],
    }


def _port(look: Look, folder: str, number: int, netdevs: list[str]) -> dict[str, t.Any]:
    def word(name: str) -> str | None:
        return look.text(os.path.join(folder, name))

    layer = word("link_layer")
    gids = []
    for index in look.names(os.path.join(folder, "gids")):
        gid = facts.parse_gid(word(f"gids/{index}"))
        # A RoCE port lists a GID per address of its interface; of an InfiniBand port the first is enough.
        if gid and (layer == "Ethernet" or index == "0"):
            gids.append(
                {
                    "index": int(index),
                    "gid": gid,
                    "kind": facts.gid_kind(gid),
                    "type": word(f"gid_attrs/types/{index}"),
                    "netdev": word(f"gid_attrs/ndevs/{index}"),
                }
            )
    keys = [word(f"pkeys/{index}") for index in look.names(os.path.join(folder, "pkeys"))[:8]]
    return {
        "port": number,
        "link_layer": layer,
        "state": facts.parse_state(word("state")),
        "phys_state": facts.parse_state(word("phys_state")),
        "rate": facts.parse_rate(word("rate")),
        "rate_text": word("rate"),
        "lid": int(word("lid") or "0", 16),
        "sm_lid": int(word("sm_lid") or "0", 16),
        "sm_disabled": bool(int(word("cap_mask") or "0", 16) & SM_DISABLED),
        "pkeys": [key for key in keys if key and int(key, 16)],
        "gids": sorted(gids, key=lambda gid: gid["index"]),
        "netdev": next((gid["netdev"] for gid in gids if gid["netdev"]), None) or next(iter(netdevs), None),
        "counters": {
            name: int(value) for name in COUNTERS if (value := word(f"counters/{name}")) is not None and value.isdigit()
        },
    }


def interfaces(look: Look) -> dict[str, dict[str, t.Any]]:
    """Network interfaces by name: MTU, state, speed, type."""
    found = {}
    for name in look.names(look.sys("class/net")):
        folder = look.sys("class/net", name)
        mtu = look.text(os.path.join(folder, "mtu"))
        if mtu is None:
            continue
        speed = gpu_facts.number_of(look.text(os.path.join(folder, "speed")))
        found[name] = {
            "mtu": int(mtu),
            "state": look.text(os.path.join(folder, "operstate")),
            "speed": speed if speed is not None and speed > 0 else None,
            "infiniband": look.text(os.path.join(folder, "type")) == "32",
            "master": os.path.lexists(os.path.join(folder, "master")),
        }
    return found


def virtualization(look: Look) -> str | None:
    """The kind of virtual machine this host is, V(none) on metal; None where nothing tells."""
    answer = look.run("systemd-detect-virt", "--vm")
    # It exits 1 when it detects none, and says so.
    if answer is not None and answer[1].strip():
        return first_line(answer[1])
    cpu = look.text(look.proc("cpuinfo"), 1 << 14)
    if cpu is None:
        return None
    return "unknown hypervisor" if re.search(r"^flags\s*:.*\bhypervisor\b", cpu, re.MULTILINE) else "none"


def acs_enabled(look: Look) -> list[str]:
    """Addresses of PCIe bridges whose Access Control Services send traffic between devices up to the root."""
    found = []
    for address in look.names(look.sys("bus/pci/devices")):
        folder = look.sys("bus/pci/devices", address)
        if not (look.text(f"{folder}/class") or "").startswith("0x0604"):
            continue
        control = acs_control(look.raw(f"{folder}/config", 4096) or b"")
        if control is not None and control & ACS_REDIRECTS:
            found.append(address)
    return found


def acs_control(config: bytes) -> int | None:
    """The control register of Access Control Services in a device's configuration space; None where it has none."""
    offset, seen = 0x100, set()
    while 0x100 <= offset <= len(config) - 8 and offset not in seen:
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == ACS_CAPABILITY:
            (control,) = struct.unpack_from("<H", config, offset + ACS_CONTROL)
            return control
        offset = header >> 20
    return None


def iommu(look: Look) -> dict[str, t.Any]:
    """Whether an IOMMU translates, and what the kernel was told."""
    words = (look.text(look.proc("cmdline")) or "").split()
    kinds: dict[str, int] = {}
    for group in look.names(look.sys("kernel/iommu_groups")):
        kind = look.text(look.sys("kernel/iommu_groups", group, "type"))
        if kind:
            kinds[kind] = kinds.get(kind, 0) + 1
    return {
        "active": bool(look.names(look.sys("class/iommu"))),
        "types": kinds,
        "cmdline": [word for word in words if "iommu" in word],
    }


def stack(look: Look) -> dict[str, t.Any]:
    """Whose RDMA stack it is: NVIDIA's by C(ofed_info), or the kernel's own."""
    told = look.word("ofed_info", "-s").rstrip(":") or None
    version = look.word("modinfo", "-F", "version", "mlx5_core") or None
    return {"ofed": told, "mlx5_core": version, "kind": "ofed" if told else "inbox"}
