# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over module_utils/launch.py; each is documented in the YAML file of its name beside this one."""

from __future__ import annotations

import typing as t

from ansible.errors import AnsibleFilterError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import launch


def _told(function: t.Callable[..., t.Any]) -> t.Callable[..., t.Any]:
    """Contradicting variables are the operator's to mend: the sentence alone, no traceback."""

    def filter_function(*args: t.Any, **kwargs: t.Any) -> t.Any:
        try:
            return function(*args, **kwargs)
        except launch.LaunchError as error:
            raise AnsibleFilterError(str(error)) from error

    return filter_function


def rank_stages(rank: t.Any, tensor_parallel: t.Any, pipeline_parallel: t.Any, hosts: t.Any) -> list[int]:
    return launch.rank_stages(int(rank), int(tensor_parallel), int(pipeline_parallel), int(hosts))


class FilterModule:
    """The filters of the role serve."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "rank_stages": _told(rank_stages),
            "hosts_by_rank": _told(launch.hosts_by_rank),
            "rank_configuration": _told(launch.rank_configuration),
            "rank_environment": _told(launch.rank_environment),
            "environment_file": _told(launch.environment_file),
            "group_errors": _told(launch.group_errors),
            "launch_errors": _told(launch.launch_errors),
            "service_errors": _told(launch.service_errors),
            "identity_differences": _told(launch.identity_differences),
        }
