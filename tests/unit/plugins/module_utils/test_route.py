# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The address and interface by which hosts meet."""

from __future__ import annotations

import json

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import route

LINKS = [
    {"ifname": "lo", "addr_info": [{"local": "127.0.0.1"}]},
    {"ifname": "eno1", "addr_info": [{"local": "10.0.0.1"}]},
]


def links():
    return json.dumps(LINKS)


def test_an_interface_is_found_by_its_address():
    assert route.route_to("", "10.0.0.1", links) == {"address": "10.0.0.1", "interface": "eno1"}
    assert route.route_to("elsewhere.invalid", "10.0.0.2", links) == {"address": "10.0.0.2", "interface": None}


def test_the_way_to_loopback_leaves_from_loopback():
    assert route.route_to("127.0.0.1", "", links) == {"address": "127.0.0.1", "interface": "lo"}


def test_nothing_is_asked_where_nothing_is_named():
    assert route.route_to("", "", lambda: pytest.fail("asked")) is None


def test_a_peer_that_does_not_resolve_is_told_with_what_to_do():
    with pytest.raises(
        route.RouteError, match=r"no route to its peer 'nothing.invalid' \(.*\): set serve_address of both"
    ):
        route.route_to("nothing.invalid", "", links)


@pytest.mark.parametrize("said", ["{", "{}", "3", "null", "\0", '"x"'])
def test_a_listing_that_is_none_is_told(said):
    with pytest.raises(route.RouteError, match="'ip -json address show' cannot be read"):
        route.route_to("", "10.0.0.1", lambda: said)


def test_links_of_another_form_are_passed_over():
    odd = ["eno1", {"ifname": "eno2"}, {"ifname": "eno3", "addr_info": "x"}, {"addr_info": [1, {}]}, 1]
    assert route.route_to("", "10.0.0.1", lambda: json.dumps(odd + LINKS))["interface"] == "eno1"
