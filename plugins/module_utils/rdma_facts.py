# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which RDMA ports are rails: pure functions over what sysfs says, no I/O.

On HGX and DGX B200 the ports that manage NVSwitch look like ordinary active InfiniBand adapters, so "all active
ports" is wrong there. A port is a rail when nothing speaks against it, and every port that is none is told with the
reason.
"""

from __future__ import annotations

import re
import typing as t

# How far a device is from a GPU, nearest first; the words of C(nvidia-smi topo).
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
NCCL_MAX_HCAS = 32


class Rule(t.NamedTuple):
    """What a rail must be."""

    link_layer: str
    min_rate: float
    virtual: bool


# The sentence behind each reason for which a port is no rail.
REASONS = {
    "nvswitch-management": "manages the NVSwitches and carries no traffic between hosts",
    "virtual-function": "is a virtual function",
    "bond-member": "is part of a bond",
    "other-link-layer": "has another link layer than the rails",
    "down": "is not up",
    "not-on-subnet": "has no subnet manager (sm_lid 0)",
    "slow": "is slower than a rail must be",
    "far-from-gpus": "shares no PCIe switch with a GPU",
    "not-chosen": "is not in the list that was set",
}


def parse_vpd(content: bytes | None) -> dict[str, t.Any]:
    """Vital product data: the product's name and the marks of a port that manages NVSwitch."""
    if content is None:
        return {"readable": False, "product": None, "part": None, "sw_mng": False}
    product = None
    # A large resource of type 2: tag 0x82, two bytes of length, the name.
    if len(content) > 3 and content[0] == 0x82:
        length = content[1] | content[2] << 8
        product = content[3 : 3 + length].decode("ascii", "replace").strip("\0 ") or None
    part = re.search(rb"PN([\x01-\x40])", content)
    number = None
    if part:
        start = part.end()
        number = content[start : start + part[1][0]].decode("ascii", "replace").strip("\0 ")
    return {
        "readable": True,
        "product": product,
        "part": number,
        "sw_mng": b"SW_MNG" in content,
    }


def parse_rate(text: str | None) -> float | None:
    """C(400 Gb/sec (4X NDR)) as 400."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*Gb/sec", text or "")
    if not match:
        return None
    rate = float(match[1])
    return int(rate) if rate == int(rate) else rate


def parse_state(text: str | None) -> str | None:
    """C(4: ACTIVE) as C(ACTIVE)."""
    return text.split(":", 1)[1].strip() if text and ":" in text else (text or None)


def parse_gid(text: str | None) -> str | None:
    """A GID, None for the empty entries of its table."""
    text = (text or "").strip().lower()
    return None if not text or set(text) <= {"0", ":"} else text


def gid_kind(gid: str) -> str:
    """C(link-local), C(ipv4) for an IPv4-mapped address, else C(global)."""
    if gid.startswith("fe80:"):
        return "link-local"
    if gid.startswith("0000:0000:0000:0000:0000:ffff:"):
        return "ipv4"
    return "global"


def distance(path: t.Sequence[str], other: t.Sequence[str], numa: t.Any = None, other_numa: t.Any = None) -> str:
    """How far two devices are from each other by their ways from the host bridge, in the words of NVIDIA's topology.

    PIX at most one switch, PXB several, PHB the host bridge, NODE the same NUMA node, SYS beyond it.
    """
    shared = 0
    for one, two in zip(path, other, strict=False):
        if one != two:
            break
        shared += 1
    if shared == 0:
        return "NODE" if numa is not None and numa == other_numa and numa >= 0 else "SYS"
    if shared == 1:
        return "PHB"
    # Behind a shared switch each side has its downstream port and itself.
    return "PIX" if max(len(path), len(other)) - shared <= 2 else "PXB"


def nearest(device: t.Mapping[str, t.Any], gpus: t.Sequence[t.Mapping[str, t.Any]]) -> dict[str, t.Any] | None:
    """The nearest GPU to a device: its bus address and the distance; None without GPUs or without a known way."""
    best: tuple[int, str] | None = None
    for gpu in gpus:
        if not device["pci_path"] or not gpu["path"]:
            continue
        word = distance(device["pci_path"], gpu["path"], device["numa"], gpu["numa"])
        key = (DISTANCES.index(word), gpu["bus"])
        best = key if best is None or key < best else best
    return None if best is None else {"gpu": best[1], "distance": DISTANCES[best[0]]}


def management_devices(devices: t.Sequence[t.Mapping[str, t.Any]]) -> set[str]:
    """Names of devices that manage NVSwitch.

    The mark is C(SW_MNG) in the vital product data. The other functions of a card that carries it belong to the same
    bridge, whether they carry it or not. Where the data cannot be read, two lanes of PCIe, 100 Gb/s and functions
    beside it are taken for it: no adapter with two lanes can be a rail.
    """
    marked = {device["name"] for device in devices if device["vpd"]["sw_mng"]}
    cards = {_card(device) for device in devices if device["name"] in marked}
    found = set(marked)
    for device in devices:
        siblings = [other for other in devices if other["pci"] and _card(other) == _card(device)]
        if (device["pci"] and _card(device) in cards) or (
            not device["vpd"]["readable"]
            and device["pcie_width"] is not None
            and device["pcie_width"] <= 2
            and len(siblings) > 1
        ):
            found.add(device["name"])
    return found


def _card(device: t.Mapping[str, t.Any]) -> str:
    return (device["pci"] or device["name"]).rsplit(".", 1)[0]


def judge(
    devices: t.Sequence[t.Mapping[str, t.Any]],
    gpus: t.Sequence[t.Mapping[str, t.Any]],
    *,
    mode: str = "infiniband",
    min_rate: float = 400,
    virtual: bool = False,
    chosen: t.Sequence[str] = (),
) -> dict[str, t.Any]:
    """The verdict over every port, the rails in the order of their PCI addresses, and the value of E(NCCL_IB_HCA).

    A port that would be a rail but for its state or its rate is C(broken), any other that is none C(rejected).
    C(chosen), names with or without a port, wins over the rule; the rule still says what it thinks of them.
    """
    management = management_devices(devices)
    rule = Rule("Ethernet" if mode == "roce" else "InfiniBand", min_rate, virtual)
    bonded = any(device["bond"] for device in devices)
    ports = []
    for device in sorted(devices, key=lambda device: (device["pci"] or "", device["name"])):
        near = nearest(device, gpus)
        for port in device["ports"]:
            reason, text, broken = _rule(
                device, port, near, management=device["name"] in management, bonded=bonded, rule=rule
            )
            ports.append(
                {
                    "device": device["name"],
                    "port": port["port"],
                    "pci": device["pci"],
                    "verdict": "rail" if reason is None else ("broken" if broken else "rejected"),
                    "reason": reason,
                    "text": text,
                    "link_layer": port["link_layer"],
                    "state": port["state"],
                    "rate": port["rate"],
                    "firmware": device["firmware"],
                    "near": near,
                    "netdev": port["netdev"],
                }
            )
    warnings: list[str] = []
    if chosen:
        ports, warnings = _choose(ports, chosen)
    rails = [port for port in ports if port["verdict"] == "rail"]
    return {
        "ports": ports,
        "rails": rails,
        "broken": [port for port in ports if port["verdict"] == "broken"],
        "nccl_ib_hca": nccl_hca(rails) if rails else None,
        "warnings": warnings,
    }


def _rule(
    device: t.Mapping[str, t.Any],
    port: t.Mapping[str, t.Any],
    near: t.Mapping[str, t.Any] | None,
    *,
    management: bool,
    bonded: bool,
    rule: Rule,
) -> tuple[str | None, str, bool]:
    """Reason (None for a rail), sentence, and whether the port would have been a rail."""
    name = f"{device['name']} port {port['port']}"
    wanted, min_rate, virtual = rule
    if management:
        return "nvswitch-management", f"{name} {REASONS['nvswitch-management']}.", False
    if device["vf"] and not virtual:
        return "virtual-function", f"{name} {REASONS['virtual-function']}.", False
    if device["bond_member"] and bonded:
        return "bond-member", f"{name} {REASONS['bond-member']}.", False
    if port["link_layer"] != wanted:
        return "other-link-layer", f"{name} is {port['link_layer']}, the rails are {wanted}.", False
    # A guest sees a flat bus: nothing there tells near from far.
    close = near is None or near["distance"] in ("PIX", "PXB") or virtual
    if not close:
        return (
            "far-from-gpus",
            f"{name} {REASONS['far-from-gpus']} (nearest: {near['distance'] if near else 'none'}).",
            False,
        )
    beside = near is not None and near["distance"] in ("PIX", "PXB")
    # A slot nobody plugged a cable into is told apart from a rail that fell over by the GPU beside it.
    if port["state"] != "ACTIVE" or port["phys_state"] != "LinkUp":
        return (
            "down",
            f"{name} is {port['state']} / {port['phys_state']}, a rail must be ACTIVE / LinkUp.",
            beside or virtual,
        )
    if wanted == "InfiniBand" and not port["sm_lid"]:
        return "not-on-subnet", f"{name} {REASONS['not-on-subnet']}.", beside
    if port["rate"] is None or port["rate"] < min_rate:
        return "slow", f"{name} runs at {port['rate']} Gb/s, a rail must have {min_rate:g}.", beside
    return None, f"{name} is a rail.", False


def _choose(ports: list[dict[str, t.Any]], chosen: t.Sequence[str]) -> tuple[list[dict[str, t.Any]], list[str]]:
    """Make the chosen ports rails in the order given, and say where the rule or the host disagrees."""
    warnings, picked = [], []
    for word in chosen:
        name, _colon, number = str(word).partition(":")
        found = [port for port in ports if port["device"] == name and (not number or str(port["port"]) == number)]
        if not found:
            warnings.append(f"'{word}' is chosen as a rail, but this host has no such port.")
        for port in found:
            if port["verdict"] != "rail":
                warnings.append(f"'{word}' is chosen as a rail, but {port['text']}")
            picked.append({**port, "verdict": "rail", "reason": port["reason"]})
    names = {(port["device"], port["port"]) for port in picked}
    for port in ports:
        if (port["device"], port["port"]) not in names:
            if port["verdict"] == "rail":
                told = f"{port['device']} port {port['port']} {REASONS['not-chosen']}."
                picked.append({**port, "verdict": "rejected", "reason": "not-chosen", "text": told})
            else:
                # What was left out by choice is nobody's loss.
                picked.append({**port, "verdict": "rejected"})
    return picked, warnings


def nccl_hca(rails: t.Sequence[t.Mapping[str, t.Any]]) -> str:
    """The value of E(NCCL_IB_HCA) for these rails: exact names, explicit ports.

    Without C(=) NCCL compares beginnings, and C(mlx5_1) also takes C(mlx5_10) to C(mlx5_19).
    """
    words = [f"{rail['device']}:{rail['port']}" for rail in rails]
    if len(words) > NCCL_MAX_HCAS:
        raise ValueError(f"{len(words)} rails are more than the {NCCL_MAX_HCAS} that NCCL takes.")
    return "=" + ",".join(words) if words else ""


def matches(value: str, device: str, port: int) -> bool:
    """Whether NCCL takes a port by a value of E(NCCL_IB_HCA); C(^) excludes, C(=) wants whole names."""
    negative = value.startswith("^")
    value = value[1:] if negative else value
    exact = value.startswith("=")
    value = value[1:] if exact else value
    found = False
    for word in filter(None, value.split(",")):
        name, _colon, rest = word.partition(":")
        number = rest.split(":")[0]
        same = device == name if exact else device.startswith(name)
        found = found or (same and (not number or number == str(port)))
    return found != negative


def hca_errors(value: str, verdict: t.Mapping[str, t.Any]) -> list[str]:
    """What is wrong with a value of E(NCCL_IB_HCA) that somebody set, on a host with this verdict."""
    taken = [port for port in verdict["ports"] if matches(value, port["device"], port["port"])]
    errors = [f"it takes {port['text']}" for port in taken if port["verdict"] != "rail"]
    left = [
        port
        for port in verdict["rails"]
        if (port["device"], port["port"]) not in {(one["device"], one["port"]) for one in taken}
    ]
    if left:
        errors.append(f"it leaves out {', '.join(port['device'] for port in left)}")
    return errors


def roce_gid_index(port: t.Mapping[str, t.Any]) -> int | None:
    """The index of the RoCE v2 GID with an IPv4 address, which a routed fabric needs; None without one."""
    for gid in port["gids"]:
        if gid["kind"] == "ipv4" and (gid["type"] or "").lower() == "roce v2":
            return gid["index"]
    return None
