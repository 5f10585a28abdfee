# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tiny checkpoint: always the same bytes, in the shape that the plans need."""

from __future__ import annotations

import json
import struct

import lab_checkpoint
import pytest
from lab_checkpoint import LAYERS, REPOSITORY, SHARDS, files, publish, shard_name

# If this changes, completions that were noted somewhere change with it.
REVISION = "b0d1a427bb035e6402dc09eb60350bb6b0c6764d"


@pytest.fixture(scope="module")
def repository():
    return dict(files())


def header(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), len(data) - 8 - length


def test_the_revision_is_known_and_the_second_call_makes_nothing(tmp_path):
    said = []
    assert publish(tmp_path, said.append) == REVISION
    stamp = (tmp_path / REPOSITORY / REVISION / "config.json").stat()
    assert publish(tmp_path, said.append) == REVISION
    assert (tmp_path / REPOSITORY / REVISION / "config.json").stat() == stamp
    assert len(said) == 1


def test_a_half_made_one_is_made_again(tmp_path):
    publish(tmp_path, str)
    base = tmp_path / REPOSITORY
    (base / "refs/.made-by").unlink()
    (base / REVISION / shard_name(1)).write_bytes(b"half")
    (base / ".new").mkdir()
    (base / ".new/leftover").write_text("x")
    assert publish(tmp_path, str) == REVISION
    assert (base / REVISION / shard_name(1)).stat().st_size > 100_000
    assert sorted(path.name for path in base.iterdir()) == sorted([REVISION, "refs"])


def test_index_and_shards_agree(repository):
    index = json.loads(repository["model.safetensors.index.json"])
    found, total = {}, 0
    for number in range(1, SHARDS + 1):
        head, size = header(repository[shard_name(number)])
        assert head.pop("__metadata__") == {"format": "pt"}
        end = 0
        for name, tensor in head.items():
            count = 2
            for extent in tensor["shape"]:
                count *= extent
            assert tensor["data_offsets"] == [end, end + count]
            end += count
            found[name] = shard_name(number)
        assert end == size
        total += size
    assert found == index["weight_map"]
    assert total == index["metadata"]["total_size"]
    assert set(index["weight_map"].values()) == {shard_name(number) for number in range(1, SHARDS + 1)}


def test_the_shape_of_the_plan(repository):
    """Both stages of [4, 2] need two shards in common, and neither needs all."""
    stages = [set(), set()]
    for name, shard in json.loads(repository["model.safetensors.index.json"])["weight_map"].items():
        if name.startswith("model.layers."):
            stages[int(name.split(".")[2]) >= 4].add(shard)
        else:
            stages[name != "model.embed_tokens.weight"].add(shard)
    assert stages[0] & stages[1] == {shard_name(10), shard_name(16)}
    assert [len(stage) for stage in stages] == [11, 7]


def test_every_layer_has_all_its_weights(repository):
    names = json.loads(repository["model.safetensors.index.json"])["weight_map"]
    assert len(names) == 9 * LAYERS + 3
    assert json.loads(repository["config.json"])["num_hidden_layers"] == LAYERS


def test_the_vocabulary_is_whole(repository):
    model = json.loads(repository["tokenizer.json"])["model"]
    assert sorted(model["vocab"].values()) == list(range(lab_checkpoint.VOCABULARY))
    for left, right in model["merges"]:
        assert {left, right, left + right} <= set(model["vocab"])


def test_the_model_says_what_can_be_read(repository):
    head, _rest = header(repository[shard_name(SHARDS)])
    begin = head["lm_head.weight"]["data_offsets"][0]
    data = repository[shard_name(SHARDS)]
    start = len(data) - max(item["data_offsets"][1] for name, item in head.items() if name[0] != "_") + begin
    row = 2 * lab_checkpoint.HIDDEN
    silent = {n for n in range(lab_checkpoint.VOCABULARY) if not any(data[start + n * row : start + (n + 1) * row])}
    letters = {token: number for number, token in enumerate(lab_checkpoint.vocabulary()[0])}
    assert {0, 1, 2} < silent
    assert letters["a"] not in silent
    assert letters["Ġlayers"] not in silent
