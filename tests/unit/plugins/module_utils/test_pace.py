# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import threading
import time

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import pace as module
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.pace import Governor, Throttle
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import StoppedError

MANY = 1000


def drive(governor: Governor, rate: object, windows: int) -> list[int]:
    """The numbers of connections over so many windows, with a rate that follows from the number."""
    return [governor.observe(rate(governor.target), MANY) for _window in range(windows)]


def test_connections_are_added_while_each_brings_more() -> None:
    governor = Governor(8, 32)
    targets = drive(governor, lambda count: 100.0 * min(count, 14), 60)
    assert targets[:6] == [9, 10, 11, 12, 13, 14]
    assert max(targets) == 15, "one too many is tried, and given up"
    assert targets[8:18] == [14] * 10


def test_never_more_than_the_most() -> None:
    governor = Governor(8, 10)
    assert max(drive(governor, lambda count: 100.0 * count, 50)) == 10
    assert Governor(64, 32).target == 32
    assert set(drive(Governor(8, 8), lambda count: 100.0 * count, 50)) == {8}


def test_a_collapse_halves_them_and_is_not_run_into_again() -> None:
    def line(count: int) -> float:
        # As was reported: fine with a few, next to nothing with more.
        return 75.0 * count if count <= 9 else 5.0

    governor = Governor(8, 32)
    targets = drive(governor, line, 12 + 12)
    assert targets[:2] == [9, 10]
    assert targets[-1] in (5, 6, 7, 8, 9)
    assert min(targets) == 5
    later = drive(governor, line, 300)
    assert max(later) == 9
    assert later[-1] == 9


def test_one_bad_moment_changes_nothing() -> None:
    governor = Governor(8, 8)
    drive(governor, lambda _count: 800.0, 5)
    assert set(drive(governor, lambda _count: 1.0, module._COLLAPSED_WINDOWS - 1)) == {8}
    assert governor.observe(800.0, MANY) == 8
    assert set(drive(governor, lambda _count: 1.0, module._COLLAPSED_WINDOWS - 1)) == {8}


def test_the_end_of_the_list_is_no_collapse() -> None:
    governor = Governor(8, 32)
    governor.observe(800.0, MANY)
    target = governor.target
    assert {governor.observe(10.0, 2) for _window in range(50)} == {target}


def test_nothing_at_all_adds_nothing() -> None:
    assert set(drive(Governor(8, 32), lambda _count: 0.0, 50)) == {8}


def test_a_throttle_can_be_stopped() -> None:
    stop = threading.Event()
    Throttle(0, stop).take(1 << 40)
    stop.set()
    with pytest.raises(StoppedError):
        Throttle(1, stop).take(100)


def test_a_throttle_keeps_its_rate() -> None:
    throttle = Throttle(1_000_000, threading.Event())
    began = time.monotonic()
    for _piece in range(10):
        throttle.take(10_000)
    assert time.monotonic() - began >= 0.09
