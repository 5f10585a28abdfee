# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter engine_lock: judge a lock on the controller, before a host is touched."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.engine_lock import KEY_PACKAGES, parse_lock


def engine_lock(text: Any, distribution: str = "vllm") -> dict[str, Any]:
    """Give digest, size, key versions and problems of a lock."""
    if not isinstance(text, str):
        raise AnsibleFilterError(f"engine_lock wants the text of a lock, not a {type(text).__name__}")
    lock = parse_lock(text, distribution)
    names = dict.fromkeys((distribution, *KEY_PACKAGES))
    return {
        "digest": lock.digest(),
        "packages": len({entry.name for entry in lock.requirements}),
        "versions": {name: lock.versions(name) for name in names},
        "problems": lock.problems,
    }


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Any]:
        return {"engine_lock": engine_lock}
