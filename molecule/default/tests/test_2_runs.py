# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run of a playbook does to a group that serves."""

from __future__ import annotations

import re

import pytest
from replica import playbook

REMOTE_TASKS = 30


def test_a_second_run_changes_nothing_and_is_short(replica):
    pids = replica.pids()
    # With pipelining every execution on a host is one line of this kind.
    output = playbook("site.yml", "-vvv")
    recap = re.findall(r"^(rank\d) .*changed=(\d+) .*failed=(\d+)", output, re.MULTILINE)
    assert recap == [("rank0", "0", "0"), ("rank1", "0", "0")]
    assert replica.pids() == pids
    executions = re.findall(r"^<[^>]+> SSH: EXEC", output, re.MULTILINE)
    assert 0 < len(executions) <= REMOTE_TASKS, len(executions)


def test_check_mode_on_a_serving_group_says_no_change(replica):
    pids = replica.pids()
    output = playbook("site.yml", "--check", "--diff")
    assert re.findall(r"^rank\d .*changed=(\d+)", output, re.MULTILINE) == ["0", "0"]
    assert replica.pids() == pids


def test_a_change_in_check_mode_is_shown_and_not_made(replica):
    pids = replica.pids()
    output = playbook("site.yml", "--check", "--diff", "-e", '{"serve_environment": {"SHOWN": "in the difference"}}')
    assert '+SHOWN="in the difference"' in output
    assert replica.pids() == pids
    secret = replica.ranks[0].run("cat /etc/kimi-k3/group.secret").strip()
    assert secret not in output


def test_a_part_of_the_group_is_refused_before_anything_happens(replica):
    pids = replica.pids()
    output = playbook("site.yml", "--limit", "rank1", expect=2)
    assert "--limit leaves out rank0" in output
    assert replica.pids() == pids


@pytest.mark.parametrize("name", ["status.yml", "verify.yml", "validate.yml"])
def test_looking_changes_nothing(replica, name):
    pids = replica.pids()
    output = playbook(f"playbooks/{name}")
    assert set(re.findall(r"changed=(\d+)", output)) == {"0"}
    assert replica.pids() == pids


def test_fetch_works_with_a_limit(replica):
    pids = replica.pids()
    playbook("playbooks/fetch.yml", "--limit", "rank1")
    assert replica.pids() == pids
