# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter over module_utils/checkpoint_plan.py; it is documented in the YAML file of its name beside this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import checkpoint_plan as planning


def checkpoint_plan(
    index: Any,
    pipeline_layers: Sequence[Any],
    stages: Sequence[Any] = (),
    *,
    layers: Any = None,
    language_model_only: bool = False,
    scope: str = "stage",
    tied_embeddings: bool = False,
) -> dict[str, Any]:
    try:
        weight_map = planning.weight_map_of(index)
        selection = planning.select(
            weight_map,
            scope=scope,
            pipeline_layers=[int(count) for count in pipeline_layers],
            stages=[int(stage) for stage in stages],
            layers=None if layers is None else int(layers),
            language_model_only=language_model_only,
            tied_embeddings=tied_embeddings,
        )
    except (ValueError, TypeError) as error:
        raise AnsibleFilterError(f"checkpoint_plan: {error}") from error
    return {
        **selection.summary(),
        "warnings": selection.warnings,
        "digest": selection.digest,
        "tensors_by_file": {file: sorted(names) for file, names in selection.tensors.items()},
    }


class FilterModule:
    """The filter of the role checkpoint."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"checkpoint_plan": checkpoint_plan}
