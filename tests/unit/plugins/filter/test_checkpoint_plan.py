# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.baremetal.kimi_k3.plugins.filter.checkpoint_plan import FilterModule

INDEX = {
    "weight_map": {
        "model.embed_tokens.weight": "a",
        "model.layers.0.w": "a",
        "model.layers.1.w": "b",
        "model.norm.weight": "b",
        "lm_head.weight": "c",
    }
}
checkpoint_plan = FilterModule().filters()["checkpoint_plan"]


def test_what_a_stage_needs() -> None:
    plan = checkpoint_plan(INDEX, ["1", 1], stages=["1"], layers="2", language_model_only=True)
    assert plan["weight_files"] == ["b", "c"]
    assert plan["layers"] == [[1, 1]]
    assert plan["tensors"] == 3
    assert plan["tensors_by_file"] == {"b": ["model.layers.1.w", "model.norm.weight"], "c": ["lm_head.weight"]}
    assert len(plan["digest"]) == 64
    assert plan["warnings"] == []


@pytest.mark.parametrize(
    ("index", "options"), [({}, {}), (INDEX, {"layers": 3}), (INDEX, {"stages": ["x"]}), (INDEX, {"layers": [1]})]
)
def test_errors_are_for_people(index: object, options: dict[str, object]) -> None:
    with pytest.raises(AnsibleFilterError, match="checkpoint_plan: "):
        checkpoint_plan(index, [1, 1], **options)
