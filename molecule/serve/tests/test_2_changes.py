# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The group is restarted once when something changed on any host, and never otherwise."""

from __future__ import annotations

import json
import re

import pytest
from replica import interrupted_playbook, playbook

CONVERGE = "molecule/serve/converge.yml"


def changes(output: str) -> list[str]:
    return re.findall(r"^rank\d .*changed=(\d+)", output, re.MULTILINE)


@pytest.fixture(scope="module")
def made():
    """What the tests of single changes have changed so far: each of them adds one, and only that."""
    return {}


@pytest.mark.parametrize(
    "change",
    [
        {"serve_args": {"max-model-len": 256}},
        {"serve_environment": {"SOME_VARIABLE": 'with a $ and a " in it'}},
        {"serve_api_key": "another-key"},
        {"serve_group_secret": "another-secret-for-the-group-of-ranks"},
        {"serve_unit_extra": {"Nice": 5}},
        {"serve_probe_interval": 7},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_restarts_the_group_once(replica, made, change):
    replica.wait_serving()
    before, pids = replica.generation(), replica.pids()
    made.update(change)
    output = playbook(CONVERGE, "-e", json.dumps(made))
    assert "0" not in changes(output)
    replica.wait_serving(after=before)
    assert replica.generation() == before + 1
    assert all(old != new for old, new in zip(pids, replica.pids(), strict=True))
    assert all(rank.property("NRestarts") == "0" for rank in replica.ranks)
    assert changes(playbook(CONVERGE, "-e", json.dumps(made))) == ["0", "0"]
    assert replica.generation() == before + 1


def test_environment_reaches_the_engine_as_it_was_written(replica):
    value = 'with a $ and a " and a \\ and a ` in it'
    playbook(CONVERGE, "-e", json.dumps({"serve_environment": {"SOME_VARIABLE": value}}))
    for rank in replica.ranks:
        environment = rank.run(f"cat /proc/{rank.status()['child_pid']}/environ").split("\0")
        assert f"SOME_VARIABLE={value}" in environment
    playbook(CONVERGE)


def test_the_difference_is_shown_without_secrets(replica):
    change = {
        "serve_args": {"max-model-len": 128},
        "serve_api_key": "a-new-key",
        "serve_group_secret": "a-new-secret" * 4,
    }
    pids = replica.pids()
    output = playbook(CONVERGE, "--check", "--diff", "-vvv", "-e", json.dumps(change))
    assert '"128"' in output
    assert "a-key-that-nobody-may-see" not in output
    assert replica.ranks[0].run("cat /etc/scenario-serve/group.secret").strip() not in output
    shown = re.sub(r"^.*(EXEC|extra_vars|-e ).*$", "", output, flags=re.MULTILINE)
    assert "a-new-key" not in shown
    assert "a-new-secret" not in shown
    assert replica.pids() == pids


def test_a_rank_that_was_stopped_is_started_and_the_other_left_to_the_agents(replica):
    replica.wait_serving()
    before = replica.generation()
    replica.ranks[1].run("systemctl stop scenario-serve")
    replica.wait("rank 0 waits", lambda: replica.ranks[0].status().get("state") == "waiting")
    assert replica.ranks[1].status()["state"] == "stopped"
    playbook(CONVERGE)
    replica.wait_serving(after=before)


def test_a_unit_that_systemd_refuses_is_not_written(replica):
    pids = replica.pids()
    digest = replica.ranks[0].run("cat /etc/scenario-serve/digest")
    output = playbook(CONVERGE, "-e", json.dumps({"serve_unit_extra": {"Nonsense": 1}}), expect=2)
    assert "systemd does not take the unit" in output
    assert "Nonsense" in output
    assert replica.pids() == pids
    assert replica.ranks[0].run("cat /etc/scenario-serve/digest") == digest
    assert "Nonsense" not in replica.ranks[0].run("cat /etc/systemd/system/scenario-serve.service")


@pytest.mark.parametrize("task", ["Configure | Write the unit", "Start | Stop the group", "Start | Start the rank"])
def test_a_run_that_is_interrupted_is_finished_by_the_next(replica, task):
    replica.wait_serving()
    before = replica.generation()
    change = json.dumps({"serve_environment": {"INTERRUPTED": task}})
    interrupted_playbook(task, CONVERGE, "-e", change)
    playbook(CONVERGE, "-e", change)
    replica.wait_serving(after=before)
    for rank in replica.ranks:
        assert "INTERRUPTED" in rank.run(f"cat /proc/{rank.status()['child_pid']}/environ")
    assert changes(playbook(CONVERGE, "-e", change)) == ["0", "0"]
