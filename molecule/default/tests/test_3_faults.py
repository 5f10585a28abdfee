# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever dies on either host, the group serves again without a human, and says the same."""

from __future__ import annotations

import pytest
from replica import FAULTS, playbook


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
    assert replica.serving(after=before)
    assert replica.complete() == expected
