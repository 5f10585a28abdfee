# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fabric test over both hosts, with the engine's torch, and what role fabric wrote in the engine's environment."""

from __future__ import annotations

from replica import playbook


def test_the_environment_of_role_fabric_reaches_the_engine(replica):
    replica.wait_serving()
    for rank in replica.ranks:
        environment = rank.run(f"tr '\\0' '\\n' < /proc/{rank.status()['child_pid']}/environ").splitlines()
        assert "NCCL_SOCKET_IFNAME=" + "=host0" in environment
        assert "GLOO_SOCKET_IFNAME=host0" in environment


def test_a_change_of_it_restarts_the_group_once(replica):
    before = replica.generation()
    changed = ("-e", '{"fabric_environment": {"NCCL_DEBUG": "VERSION"}}')
    playbook("site.yml", *changed)
    assert replica.generation() == before + 1
    pids = replica.pids()
    playbook("site.yml", *changed)
    assert replica.pids() == pids


def test_it_is_not_measured_beside_a_replica_that_runs(replica):
    pids = replica.pids()
    output = " ".join(playbook("playbooks/fabric_test.yml", expect=2).split())
    assert "the replica runs (kimi-k3.service)" in output
    assert replica.pids() == pids


def test_messages_go_between_the_hosts_and_add_up(mended):
    """The last one with this configuration: the group stays down until the next module gives the API a key."""
    playbook("playbooks/stop.yml")
    output = playbook("playbooks/fabric_test.yml")
    assert "all-reduce over all hosts at 1 MiB" in output
    assert "send/recv of a pair at 1 MiB" in output
    output = playbook(
        "playbooks/fabric_test.yml", "-e", '{"fabric_test_gates": {"send_recv": {"fail": 9999}}}', expect=2
    )
    assert "The fabric is not as fast as it must be" in output
