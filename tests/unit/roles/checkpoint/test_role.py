# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role does to two hosts, counted."""

from __future__ import annotations

from typing import Any


def test_two_hosts_share_a_checkpoint_and_come_back_to_it(hosts: Any) -> None:
    output = hosts.play("--check")
    assert f"host1: would fetch {len(hosts.files)} of {len(hosts.files)} files, 1.8 MB, in 1 s at 300.0 MB/s" in output
    hosts.hub.clear_log()
    output = hosts.play("-vvv")
    for number in (1, 2):
        assert hosts.held(number) == hosts.files
        assert f"host{number}" in output
    for path, data in hosts.files.items():
        assert hosts.hub.bytes_sent(path) == len(data), path
    hosts.hub.clear_log()
    output = hosts.play("-vvv")
    assert "changed=0" in output
    assert "changed=1" not in output
    assert hosts.hub.log == []
    sent = [line for line in output.splitlines() if " PUT " in line]
    assert len(sent) == 2, "one remote task for each host, and no other"


def test_an_address_that_is_empty_is_none(hosts: Any) -> None:
    """Role serve's default is empty, and means the address by which Ansible knows the host."""
    hosts.address = "ansible_host"
    hosts.variables = {"serve_address": ""}
    hosts.play()
    for number in (1, 2):
        assert hosts.held(number) == hosts.files
    for path, data in hosts.files.items():
        assert hosts.hub.bytes_sent(path) == len(data), path


def test_a_host_alone_needs_nobody(hosts: Any) -> None:
    output = hosts.play("--limit", "host2")
    assert hosts.held(2) == hosts.files
    assert hosts.held(1) == {}
    assert "skipping: [host2]" in output
    # The other one then takes it all from there.
    hosts.hub.clear_log()
    hosts.play()
    assert hosts.held(1) == hosts.files
    assert hosts.hub.bytes_sent("part*") == 0


def test_no_exchange_is_one_task(hosts: Any) -> None:
    hosts.variables = {"checkpoint_exchange": "never"}
    hosts.play()
    for number in (1, 2):
        assert hosts.held(number) == hosts.files
    for path, data in hosts.files.items():
        assert hosts.hub.bytes_sent(path) == 2 * len(data), path


def test_hosts_that_share_a_directory_fetch_once_and_into_no_other(hosts: Any) -> None:
    hosts.shared = True
    hosts.variables = {"checkpoint_shared": True, "checkpoint_stages": [1]}
    hosts.play()
    assert hosts.held(1) == hosts.files
    assert hosts.held(2) == {}
    for path, data in hosts.files.items():
        assert hosts.hub.bytes_sent(path) == len(data), path
    hosts.hub.clear_log()
    output = hosts.play("-vvv")
    assert "changed=1" not in output
    assert len([line for line in output.splitlines() if " PUT " in line]) == 2
    assert hosts.hub.log == []


def test_present_fails_on_what_is_wrong(hosts: Any) -> None:
    hosts.play()
    hosts.hub.clear_log()
    victim = hosts.folder / "srv2" / "lab--tiny" / hosts.commit / "part-3.bin"
    victim.write_bytes(b"x" * 300_000)
    hosts.variables = {"checkpoint_source": "present", "checkpoint_verify": "full"}
    output = hosts.play(ok=False)
    assert "part-3.bin has the digest sha256:" in output
    assert hosts.hub.log == []
