# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter over module_utils/preflight.py, documented in preflight_verdict.yml."""

from __future__ import annotations

import re
import typing as t

from ansible.errors import AnsibleFilterError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import preflight


def preflight_verdict(observations: t.Any, expectations: t.Any) -> dict[str, t.Any]:
    missing = sorted(set(observations) - set(expectations))
    if missing:
        raise AnsibleFilterError(f"preflight_verdict: nothing is declared for {', '.join(missing)}.")
    for host, expected in expectations.items():
        try:
            re.compile(str(expected.get("gpu_name", "")))
        except re.error as error:
            told = f"preflight_expect_gpu_name of {host} is '{expected['gpu_name']}'"
            raise AnsibleFilterError(f"{told}, which is no regular expression: {error}.") from error
    result = preflight.verdict(observations, expectations)
    return {**result, "lines": preflight.lines(result)}


class FilterModule:
    """The filter of the role preflight."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"preflight_verdict": preflight_verdict}
