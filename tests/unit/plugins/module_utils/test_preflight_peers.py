# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts that meet: here on addresses of loopback, each of which is a host of its own."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import preflight_peers

ADDRESSES = {"a": "127.0.0.21", "b": "127.0.0.22", "c": "127.0.0.23"}


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.21", 0))
        return probe.getsockname()[1]


@pytest.fixture
def other():
    with socket.socket() as probe:
        probe.bind(("127.0.0.21", 0))
        return probe.getsockname()[1]


def meet(names, port, others=(), timeout=20, group="g"):
    """All of these hosts at once, by name."""

    def one(name):
        peers = [{"name": peer, "address": ADDRESSES[peer]} for peer in names if peer != name]
        return preflight_peers.meet(
            name, ADDRESSES[name], peers, port=port, others=others, group=group, timeout=timeout
        )

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def test_three_hosts_meet_both_ways(port, other):
    results = meet(["a", "b", "c"], port, [other])
    for name, result in results.items():
        assert result["problem"] is None
        assert result["absent"] == []
        assert [peer["name"] for peer in result["peers"]] == sorted({"a", "b", "c"} - {name})
        for peer in result["peers"]:
            assert peer["reached"]
            assert peer["closed"] == {}
            assert other in peer["open"]
            # The port that the kernel chose, besides the one asked for.
            assert len(peer["open"]) == 2
            assert abs(peer["offset"]) < 1


def test_a_host_that_is_not_there_is_refused_and_told(port):
    result = preflight_peers.meet(
        "a", ADDRESSES["a"], [{"name": "b", "address": ADDRESSES["b"]}], port=port, others=[], group="g", timeout=0.5
    )
    (peer,) = result["peers"]
    assert not peer["reached"]
    assert peer["error"] == "refused (nothing listens there, or a firewall rejects it)"
    assert result["absent"] == ["b"]


def test_a_port_that_something_listens_on_is_left_alone(port, other):
    with socket.socket() as taken:
        taken.bind((ADDRESSES["a"], other))
        taken.listen()
        results = meet(["a", "b"], port, [other])
    assert results["a"]["busy"] == [other]
    (peer,) = results["b"]["peers"]
    assert peer["busy"] == [other]
    assert peer["closed"] == {}


def test_a_stranger_on_the_port_is_no_peer(port):
    with socket.socket() as stranger:
        stranger.bind((ADDRESSES["b"], port))
        stranger.listen()

        def hang_up():
            while True:
                try:
                    connection, _peer = stranger.accept()
                except OSError:
                    return
                connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        result = preflight_peers.meet(
            "a",
            ADDRESSES["a"],
            [{"name": "b", "address": ADDRESSES["b"]}],
            port=port,
            others=[],
            group="g",
            timeout=0.5,
        )
        stranger.shutdown(socket.SHUT_RDWR)
    assert not result["peers"][0]["reached"]


def test_hosts_of_two_groups_do_not_answer_each_other(port):
    listener = preflight_peers.Listener(ADDRESSES["a"], port, [], "a", "one")
    try:
        with pytest.raises(ConnectionError):
            preflight_peers.say(ADDRESSES["a"], port, {"name": "b", "group": "two"}, 5)
        answer = preflight_peers.say(ADDRESSES["a"], port, {"name": "b", "group": "one"}, 5)
        assert answer["name"] == "a"
        with socket.create_connection((ADDRESSES["a"], port)) as connection:
            connection.sendall(b"no json at all\n[1]\n")
            assert connection.recv(100) == b""
    finally:
        listener.close()


def test_an_address_that_is_not_ours_is_one_sentence(port):
    result = preflight_peers.meet("a", "192.0.2.1", [], port=port, others=[], group="g", timeout=1)
    assert result["problem"].startswith("this host cannot listen on 192.0.2.1")


def test_who_cannot_listen_has_not_reached_its_peers(port):
    """An empty list would say that there are none, and the check of ports would be skipped."""
    peer = {"name": "b", "address": ADDRESSES["b"]}
    result = preflight_peers.meet("a", "192.0.2.1", [peer], port=port, others=[], group="g", timeout=1)
    assert result["absent"] == ["b"]
    (told,) = result["peers"]
    assert (told["name"], told["reached"], told["error"]) == ("b", False, result["problem"])
