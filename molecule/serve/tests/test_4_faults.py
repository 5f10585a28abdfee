# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever dies on either host, the group comes back without a human."""

from __future__ import annotations

import pytest
from replica import FAULTS


def engines(replica):
    """Processes of the engine on each host."""
    return [rank.run("pgrep -c -f 'scenario-serve/venv/bin/vllm'", check=False).strip() for rank in replica.ranks]


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "power cut"])
@pytest.mark.parametrize("number", [0, 1])
def test_the_group_comes_back_and_leaves_nothing_behind(replica, number, fault):
    replica.wait_serving()
    before, running = replica.generation(), engines(replica)
    FAULTS[fault](replica.ranks[number])
    replica.wait_serving(after=before)
    assert engines(replica) == running
