# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over module_utils/rdma_facts.py and fabric_plan.py; each is documented in the YAML file of its name."""

from __future__ import annotations

import typing as t

from ansible.errors import AnsibleFilterError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import fabric_gate, fabric_plan, rdma_facts


def nccl_hca(rails: t.Any) -> str:
    """Rails, as C(rdma_info) returns them or as words, as the value of E(NCCL_IB_HCA)."""
    ports = []
    for rail in rails:
        if isinstance(rail, str):
            name, _colon, port = rail.partition(":")
            ports.append({"device": name, "port": port or "1"})
        else:
            ports.append(rail)
    try:
        return rdma_facts.nccl_hca(ports)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


def plan(settings: t.Any, look: t.Any) -> dict[str, t.Any]:
    try:
        return fabric_plan.plan(settings, look)
    except fabric_plan.FabricError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """The filters of the role fabric."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"nccl_hca": nccl_hca, "fabric_plan": plan, "fabric_verdict": fabric_gate.judge}
