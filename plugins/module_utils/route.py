# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one fact from which a host's address and interface towards its peer come."""

from __future__ import annotations

import json
import socket
import typing as t


def parse_links(text: str) -> list[dict[str, t.Any]]:
    """What C(ip -json address show) says. Raises ValueError when it is no list of links."""
    listing = json.loads(text or "[]")
    if not isinstance(listing, list):
        raise ValueError("no list of links")  # noqa: TRY004 - the caller tells both alike
    return [link for link in listing if isinstance(link, dict) and isinstance(link.get("addr_info", []), list)]


def interface_of(address: str, listing: list[dict[str, t.Any]]) -> str | None:
    """The interface that carries C(address), from C(ip -json address show)."""
    for link in listing:
        if any(isinstance(info, dict) and info.get("local") == address for info in link.get("addr_info", [])):
            return link.get("ifname")
    return None


class RouteError(ValueError):
    """One sentence on why the way to the peer cannot be told."""


def route_to(peer: str, address: str, list_links: t.Callable[[], str]) -> dict[str, t.Any] | None:
    """C(address) and C(interface) by which this host and its peer meet; None when neither is named.

    C(list_links) gives the output of C(ip -json address show). Raises RouteError.
    """
    if not address and not peer:
        return None
    if not address:
        try:
            address = route_address(peer)
        except OSError as error:
            raise RouteError(
                f"This host has no route to its peer '{peer}' ({error}): "
                "set serve_address of both hosts to the private addresses they share."
            ) from error
    try:
        listing = parse_links(list_links())
    except ValueError as error:
        raise RouteError(f"'ip -json address show' cannot be read ({error}): is 'ip' that of iproute2?") from error
    return {"address": address, "interface": interface_of(address, listing)}


def route_address(peer: str) -> str:
    """This host's source address on the route to C(peer). Raises OSError when it does not resolve or has no route."""
    family, kind, protocol, _name, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]
