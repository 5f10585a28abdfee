# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over module_utils/bench.py; each is documented in the YAML file of its name."""

from __future__ import annotations

import importlib.util
import typing as t

from ansible_collections.baremetal.kimi_k3.plugins.module_utils import bench, bench_report


def bench_errors(settings: t.Mapping[str, t.Any]) -> list[str]:
    """What is wrong before anything is measured; plots are drawn after an hour of it, and want to be possible."""
    found = bench.errors(settings)
    if settings["plots"] and importlib.util.find_spec("matplotlib") is None:
        found.append(bench_report.NO_MATPLOTLIB)
    return found


class FilterModule:
    """The filters of the role bench."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"bench_errors": bench_errors}
