# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever dies on either host, the group serves again without a human, and says the same."""

from __future__ import annotations

import pytest
from replica import FAULTS, interrupted_playbook, playbook


@pytest.fixture(scope="module")
def expected(replica):
    replica.wait_serving()
    return replica.complete()


@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("number", [0, 1])
def test_the_group_comes_back(replica, expected, number, fault):
    before = replica.generation()
    FAULTS[fault](replica.ranks[number])
    replica.wait_serving(after=before)
    assert replica.complete() == expected


@pytest.mark.parametrize("number", [0, 1])
def test_restarting_one_rank_by_playbook(replica, expected, number):
    before = replica.generation()
    playbook("playbooks/restart.yml", "--limit", replica.ranks[number].name)
    replica.wait_serving(after=before)
    assert replica.complete() == expected


@pytest.mark.parametrize("number", [0, 1])
def test_a_hung_rank_is_found(replica, expected, number):
    """Nothing has died and C(/health) says 200: only a token that does not come tells."""
    before = replica.generation()
    rank = replica.ranks[number]
    rank.run(f"pkill -STOP --session $(ps -o sid= -p {rank.status()['child_pid']})")
    replica.wait_serving(after=before)
    assert replica.complete() == expected
    failures = [rank.status()["last_failure"]["cause"] for rank in replica.ranks]
    assert any("wedged" in cause for cause in failures), failures


def test_a_run_that_is_interrupted_is_finished_by_the_next(replica, expected):
    before = replica.generation()
    change = ("-e", '{"serve_environment": {"INTERRUPTED": "yes"}}')
    interrupted_playbook("Start | Start the rank", "site.yml", *change)
    playbook("site.yml", *change)
    replica.wait_serving(after=before)
    assert replica.complete() == expected
    for rank in replica.ranks:
        assert "INTERRUPTED=yes" in rank.run(f"cat /proc/{rank.status()['child_pid']}/environ")
