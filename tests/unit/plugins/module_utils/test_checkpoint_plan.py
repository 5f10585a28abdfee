# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import checkpoint_plan as planning

K3 = "language_model.model."


def k3_shard(number: int) -> str:
    return f"model-{number:05d}-of-000096.safetensors"


def k3_map(experts: int = 2) -> dict[str, str]:
    """Names as Kimi K3 has them: a file per layer, three more for the rest."""
    names = {}
    for layer in range(93):
        for part in ("self_attn.q_proj.weight", "input_layernorm.weight", "mlp.norm.weight"):
            names[f"{K3}layers.{layer}.{part}"] = k3_shard(layer + 1)
        for expert in range(experts if layer else 0):
            names[f"{K3}layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight_packed"] = k3_shard(layer + 1)
    for name in ("embed_tokens.weight", "norm.weight", "output_attn_res_norm.weight", "output_attn_res_proj.weight"):
        names[K3 + name] = k3_shard(94)
    names["language_model.lm_head.weight"] = k3_shard(94)
    names["mm_projector.proj.0.weight"] = k3_shard(95)
    names["vision_tower.encoder.blocks.0.mlp.fc0.weight"] = k3_shard(96)
    return names


def llama_map(layers: int = 4, head: bool = True) -> dict[str, str]:
    names = {f"model.layers.{layer}.mlp.up_proj.weight": f"m{layer}" for layer in range(layers)}
    names |= {"model.embed_tokens.weight": "first", "model.norm.weight": "last"}
    return names | ({"lm_head.weight": "last"} if head else {})


def k3(stage: int, **changes: object) -> planning.Selection:
    options = {"pipeline_layers": [47, 46], "layers": 93, "language_model_only": True, **changes}
    return planning.select(k3_map(), stages=[stage], **options)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("language_model.model.layers.92.self_attn.q_proj.weight", 92),
        ("model.layers.0.input_layernorm.weight", 0),
        ("transformer.h.11.mlp.c_fc.weight", 11),
        ("layers.3.w", 3),
        ("language_model.model.embed_tokens.weight", planning.EMBEDDING),
        ("model.embed_tokens.weight", planning.EMBEDDING),
        ("model.norm.weight", planning.TAIL),
        ("language_model.model.output_attn_res_proj.weight", planning.TAIL),
        ("lm_head.weight", planning.HEAD),
        ("language_model.lm_head.weight", planning.HEAD),
        ("vision_tower.encoder.layers.3.weight", planning.VISION),
        ("model.vision_tower.blocks.0.weight", planning.VISION),
        ("mm_projector.linear_1.weight", planning.VISION),
        ("model.layers.x.weight", planning.UNPLACED),
        ("model.layers", planning.UNPLACED),
        ("rotary.inv_freq", planning.UNPLACED),
        ("model", planning.UNPLACED),
        ("", planning.UNPLACED),
    ],
)
def test_names_are_classified(name: str, kind: object) -> None:
    assert planning.classify(name) == kind


def test_first_stage_of_k3_has_its_layers_and_the_embeddings() -> None:
    plan = k3(0)
    assert plan.files == [k3_shard(number) for number in [*range(1, 48), 94]]
    assert plan.tensors[k3_shard(94)] == [f"{K3}embed_tokens.weight"]
    assert plan.layer_ranges == [[0, 46]]
    assert not plan.tied_embeddings
    assert plan.warnings == []


def test_last_stage_of_k3_has_its_layers_and_the_end() -> None:
    plan = k3(1)
    assert plan.files == [k3_shard(number) for number in [*range(48, 94), 94]]
    assert sorted(plan.tensors[k3_shard(94)]) == [
        "language_model.lm_head.weight",
        f"{K3}norm.weight",
        f"{K3}output_attn_res_norm.weight",
        f"{K3}output_attn_res_proj.weight",
    ]
    assert plan.layer_ranges == [[47, 92]]


def test_files_follow_from_the_index_and_not_from_their_numbers() -> None:
    moved = {name: (k3_shard(95) if ".layers.60." in name else file) for name, file in k3_map().items()}
    options = {"pipeline_layers": [47, 46], "language_model_only": True}
    assert k3_shard(95) not in planning.select(moved, stages=[0], **options).files
    last = planning.select(moved, stages=[1], **options)
    assert k3_shard(95) in last.files
    assert k3_shard(61) not in last.files


@pytest.mark.parametrize("stage", [0, 1])
def test_vision_goes_to_every_stage_when_wanted(stage: int) -> None:
    plan = k3(stage, language_model_only=False)
    assert {k3_shard(95), k3_shard(96)} <= set(plan.files)
    assert plan.vision_tensors == 2
    assert k3(stage).vision_tensors == 0


def test_all_stages_together_hold_the_language_model() -> None:
    both = planning.select(k3_map(), pipeline_layers=[47, 46], stages=[], language_model_only=True)
    assert both.stages == (0, 1)
    assert set(both.files) == set(k3(0).files) | set(k3(1).files)
    tensors = sum(len(names) for names in both.tensors.values())
    assert tensors == sum(len(names) for plan in (k3(0), k3(1)) for names in plan.tensors.values())


def test_scope_all_takes_everything_and_needs_no_layers() -> None:
    plan = planning.select(k3_map(), scope="all", pipeline_layers=[], language_model_only=True)
    assert len(plan.files) == 96
    assert plan.vision_tensors == 2


def test_moving_the_boundary_moves_only_the_layers_between() -> None:
    assert set(k3(0).files) - set(k3(0, pipeline_layers=[45, 48]).files) == {k3_shard(46), k3_shard(47)}


@pytest.mark.parametrize(
    ("names", "said"), [(llama_map(head=False), None), (llama_map(head=False), False), (llama_map(), True)]
)
def test_tied_embeddings_go_to_the_last_stage_too(names: dict[str, str], said: bool | None) -> None:
    last = planning.select(names, pipeline_layers=[2, 2], stages=[1], tied_embeddings=said)
    assert last.tied_embeddings
    assert "first" in last.files
    assert "last" not in planning.select(names, pipeline_layers=[2, 2], stages=[0], tied_embeddings=said).files


def test_untied_embeddings_stay_with_the_first_stage() -> None:
    assert "first" not in planning.select(llama_map(), pipeline_layers=[2, 2], stages=[1]).files


def test_a_middle_stage_has_layers_only() -> None:
    assert planning.select(llama_map(), pipeline_layers=[1, 2, 1], stages=[1]).files == ["m1", "m2"]


def test_unknown_names_go_to_every_stage_with_one_warning() -> None:
    names = llama_map() | {"model.layers.4.eh_proj.weight": "extra", "oddity": "odd"}
    for stage in (0, 1):
        plan = planning.select(names, pipeline_layers=[2, 2], stages=[stage])
        assert {"extra", "odd"} <= set(plan.files)
        assert plan.warnings == [
            "2 tensors belong to no known part of the model (model.layers.4.eh_proj.weight, oddity): "
            "every stage holds them."
        ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_layers": []}, "must be a list of whole numbers"),
        ({"pipeline_layers": [4, 0]}, "must be a list of whole numbers"),
        ({"pipeline_layers": [2, True, 1]}, "must be a list of whole numbers"),
        ({"layers": 5}, "sum to 4, but the model has 5 layers"),
        ({"stages": [2]}, "there are 2 pipeline stages, 0 to 1"),
        ({"stages": [-1]}, "there are 2 pipeline stages, 0 to 1"),
        ({"pipeline_layers": [47, 46]}, "the index lacks 4, 5, 6, 7, 8 and 84 more (layers in the index: 0 to 3)"),
        ({"scope": "some"}, "scope must be"),
    ],
)
def test_contradictions_are_told(changes: dict[str, object], message: str) -> None:
    options = {"pipeline_layers": [2, 2], "stages": [0], **changes}
    with pytest.raises(planning.PlanError) as caught:
        planning.select(llama_map(), **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("index", [None, [], {}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_what_is_no_index_is_told(index: object) -> None:
    with pytest.raises(planning.PlanError):
        planning.weight_map_of(index)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("piece", [0, 7, 1 << 20])
@pytest.mark.parametrize("last", ["weight_map", "metadata"])
def test_an_index_in_pieces_is_what_json_says(
    monkeypatch: pytest.MonkeyPatch, indent: int | None, piece: int, last: str
) -> None:
    names = {
        f'model.layers.{number}.{odd}"\\': f'file{number % 3}"' for number in range(9) for odd in ("a", '\u00e9",{}')
    }
    parts = {"metadata": {"total_size": 7, "text": 'a", "b": "c"}'}, "weight_map": names}
    index = {key: parts[key] for key in sorted(parts, key=lambda key: key == last)}
    monkeypatch.setattr(planning, "_PIECE", piece)
    for escaped in (True, False):
        data = json.dumps(index, indent=indent, ensure_ascii=escaped).encode()
        weights = planning.parse_index(data)
        assert weights == names
        assert list(weights) == list(names)
    plain = json.dumps({**index, "weight_map": {f"t{number}": "file" for number in range(9)}}, indent=indent).encode()
    assert len({id(file) for file in planning.parse_index(plain).values()}) == 1, "one text for each file"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "b"}',
        '{"weight_map": {"a": "b", }}',
        '{"weight_map": {"a": "b"}}}',
        '{"weight_map": {"a": ["b", "c"], "d": "e"}}',
        '{"x": {"weight_map": {"a": "b", "c": "d"}}}',
        '{"weight_map": {"a": {"b": "c", "d": "e"}}}',
    ],
)
@pytest.mark.parametrize("piece", [0, 1 << 20])
def test_an_index_that_is_none_is_refused_in_pieces_too(monkeypatch: pytest.MonkeyPatch, text: str, piece: int) -> None:
    monkeypatch.setattr(planning, "_PIECE", piece)
    with pytest.raises(ValueError, match=r".+"):
        planning.parse_index(text.encode())


def test_a_pruned_index_is_written_as_json_would_write_it() -> None:
    names = {'model.layers.0.a"\\\u00e9\n': "a b.safetensors", "model.layers.0.b": "a b.safetensors", "lm_head.w": "c"}
    tensors = {file: [name for name in names if names[name] == file] for file in sorted(set(names.values()))}
    expected = {"metadata": {"total_size": 7}, "weight_map": names}
    assert planning.pruned_index(tensors, 7) == json.dumps(expected, indent=2, sort_keys=True).encode()


def test_pruned_index_lists_all_that_its_files_hold() -> None:
    tensors = {file: [name for name, place in k3_map().items() if place == file] for file in k3(0).files}
    index = json.loads(planning.pruned_index(tensors, 123))
    assert index["metadata"] == {"total_size": 123}
    assert set(index["weight_map"].values()) == set(k3(0).files)
    assert index["weight_map"]["language_model.lm_head.weight"] == k3_shard(94)


def test_other_weights_are_left_out_of_a_stage_only() -> None:
    names = ["config.json", "tiktoken.model", "model.safetensors.index.json", "m0", "m3.safetensors", "old/pytorch.bin"]
    plan = planning.select(llama_map(), pipeline_layers=[2, 2], stages=[0])
    hold, left = planning.files_to_hold(names, plan)
    assert hold == ["config.json", "m0", "tiktoken.model"]
    assert left == ["m3.safetensors", "old/pytorch.bin"]
    assert planning.files_to_hold(names, None) == (sorted({*names} - {"model.safetensors.index.json"}), [])


def test_absent_files_are_named() -> None:
    assert planning.absent_files(llama_map(), ["m0", "m2", "first", "last", "more"]) == ["m1", "m3"]


def test_digest_tells_stages_and_partitions_apart() -> None:
    plans = [k3(0), k3(1), k3(0, pipeline_layers=[46, 47]), k3(0, language_model_only=False)]
    assert len({plan.digest for plan in plans}) == 4
    assert k3(0).digest == k3(0).digest


def test_identity_is_equal_between_stages_and_differs_with_all_else() -> None:
    base = {
        "repository": "a/b",
        "revision": "0" * 40,
        "scope": "stage",
        "pipeline_layers": [47, 46],
        "language_model_only": True,
        "index_digest": "1",
    }
    others = {
        "repository": "a/c",
        "revision": "1" * 40,
        "scope": "all",
        "pipeline_layers": [46, 47],
        "language_model_only": False,
        "index_digest": "2",
    }
    digests = {planning.identity_digest(**base)} | {
        planning.identity_digest(**{**base, key: value}) for key, value in others.items()
    }
    assert len(digests) == len(base) + 1


def test_an_index_of_full_size_is_planned_name_by_name() -> None:
    names = k3_map(experts=1800 * 3)
    assert len(names) > 497_000
    plan = planning.select(names, pipeline_layers=[47, 46], stages=[0], layers=93, language_model_only=True)
    assert len(plan.files) == 48
