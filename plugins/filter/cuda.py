# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over module_utils/cuda_plan.py; each is documented in the YAML file of its name beside this one."""

from __future__ import annotations

import base64
import typing as t

from ansible.errors import AnsibleFilterError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import cuda_plan


def _told(function: t.Callable[..., t.Any]) -> t.Callable[..., t.Any]:
    """What a host is stands in the way: the sentence alone, no traceback."""

    def filter_function(*args: t.Any, **kwargs: t.Any) -> t.Any:
        try:
            return function(*args, **kwargs)
        except cuda_plan.CudaError as error:
            raise AnsibleFilterError(str(error)) from error

    return filter_function


def decide(settings: t.Any, look: t.Any) -> dict[str, t.Any]:
    """The plan, with the sentence of what stands in its way instead of an error: the role fails with it itself."""
    try:
        return {**cuda_plan.plan(settings, look), "problem": ""}
    except cuda_plan.CudaError as error:
        return {**cuda_plan.NOTHING, "case": "stuck", "problem": str(error)}


def fingerprints(content: str) -> list[str]:
    return cuda_plan.fingerprints(base64.b64decode(content))


class FilterModule:
    """The filters of the role cuda."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "cuda_plan": decide,
            "cuda_packages": _told(cuda_plan.choose),
            "cuda_repository": _told(cuda_plan.repository),
            "openpgp_fingerprints": _told(fingerprints),
        }
