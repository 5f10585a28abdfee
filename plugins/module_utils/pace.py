# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast to go: a limit over all connections, and how many connections there should be."""

from __future__ import annotations

import threading
import time

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import StoppedError

WINDOW = 5.0  # seconds over which a rate is measured
_WORTH = 1.04  # one more connection must bring this much to be worth having
_PATIENCE = 12  # windows before another number of connections is tried again
_COLLAPSE = 0.25  # of the best rate seen
_COLLAPSED_WINDOWS = 12  # a minute


class Throttle:
    """A limit of bytes per second, shared by all connections."""

    def __init__(self, rate: int, stop: threading.Event) -> None:
        self._rate = rate
        self._stop = stop
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int) -> None:
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            delay = self._free_at - now
        if self._stop.wait(delay):
            raise StoppedError


class Governor:
    """Decides how many connections there should be, from the rate that they bring together.

    One more as long as one more brings more. A server or a line that gives way under too many is a known thing: when
    the rate stays below a quarter of the best for a minute, half of the connections are closed, and the number that
    led there is not tried again.
    """

    def __init__(self, start: int, most: int) -> None:
        self.target = min(start, most)
        self._most = most
        self._best = 0.0
        self._before = 0.0  # rate before the last connection was added
        self._trying = False
        self._quiet = 0
        self._low = 0

    def observe(self, rate: float, wanted: int) -> int:
        """Take in the rate of a window, in which so many files were in work or waiting; the number to have next."""
        if wanted < self.target:
            # The end of the list is near: what is slow now is not slow for want or for excess of connections.
            self._trying, self._quiet, self._low = False, 0, 0
            return self.target
        self._low = self._low + 1 if rate < self._best * _COLLAPSE else 0
        self._best = max(self._best, rate)
        if self._low >= _COLLAPSED_WINDOWS:
            self._most = max(1, self.target - 1)
            self.target = max(1, self.target // 2)
            self._best, self._low, self._quiet, self._trying = rate, 0, 0, False
            return self.target
        if self._low:
            return self.target
        if self._trying:
            self._trying = False
            if rate < self._before * _WORTH:
                self.target = max(1, self.target - 1)
                self._quiet = _PATIENCE
                return self.target
            self._quiet = 0
        if self._quiet:
            self._quiet -= 1
        elif self.target < self._most and rate > 0:
            self._before, self._trying = rate, True
            self.target += 1
        return self.target
