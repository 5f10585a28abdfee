# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kimi K3's checkpoint without its bytes: every name, every size, every header; the numbers themselves are holes.

    k3_index.py DIR                     the index, the small files, and the tree listing (tree.json)
    k3_index.py DIR --shards            and the 96 shards: real safetensors headers, then a hole of the real size
    k3_index.py DIR --shards 1 94 96    only some of them

What is as published: the names, shapes and data types of all 497,220 tensors, the shard that holds each of them, the
``total_size`` that follows from them (93 layers, of which 69 with KDA and 24 with MLA; 896 experts in all but the
first; a vision tower of 27 blocks and its projector), and the length of the index, 59,764,096 bytes.

What is made up: the order of the tensors in a shard, the digests of the shards (nobody hashes 1.5 TB of holes in a
test; they follow from the names), and the contents of the small files, of which those that no description names are
called ``extra/NN.txt`` to reach the published count of 119 files.

As a library: ``tensors``, ``weight_map``, ``index``, ``tree``, ``write_shard``, ``write_files``. Standard library only.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LAYERS = 93
EXPERTS = 896
SHARDS = 96
VISION_BLOCKS = 27
MLA_LAYERS = frozenset({*range(3, LAYERS, 4), LAYERS - 1})
PIPELINE_LAYERS = [47, 46]
TENSORS = 497_220
TOTAL_SIZE = 1_560_860_324_864
REPOSITORY = "moonshotai/Kimi-K3"
REVISION = "f831ab66814297da540d832a5235f8e904f29d06"
INDEX_NAME = "model.safetensors.index.json"

TEXT = "language_model.model."
_HIDDEN, _HEADS_SIZE, _LATENT, _EXPERT, _SHARED, _DENSE, _VOCABULARY = 7168, 12288, 3584, 3072, 6144, 33792, 163840
_VISION, _VISION_HEADS, _VISION_MLP = 1024, 1536, 4096
_WIDTH = {"BF16": 2, "F32": 4, "U8": 1}

_EVERY_LAYER = {
    "input_layernorm.weight": (_HIDDEN,),
    "post_attention_layernorm.weight": (_HIDDEN,),
    "mlp_res_norm.weight": (_HIDDEN,),
    "mlp_res_proj.weight": (1, _HIDDEN),
    "self_attention_res_norm.weight": (_HIDDEN,),
    "self_attention_res_proj.weight": (1, _HIDDEN),
    "self_attn.g_proj.weight": (_HEADS_SIZE, _HIDDEN),
    "self_attn.o_proj.weight": (_HIDDEN, _HEADS_SIZE),
}
_KDA = {
    "self_attn.b_proj.weight": (96, _HIDDEN),
    "self_attn.f_a_proj.weight": (128, _HIDDEN),
    "self_attn.f_b_proj.weight": (_HEADS_SIZE, 128),
    "self_attn.q_proj.weight": (_HEADS_SIZE, _HIDDEN),
    "self_attn.k_proj.weight": (_HEADS_SIZE, _HIDDEN),
    "self_attn.v_proj.weight": (_HEADS_SIZE, _HIDDEN),
}
_KDA_F32 = {
    "self_attn.A_log": (128,),
    "self_attn.dt_bias": (_HEADS_SIZE,),
    "self_attn.o_norm.weight": (128,),
    "self_attn.q_conv1d.weight": (_HEADS_SIZE, 1, 4),
    "self_attn.k_conv1d.weight": (_HEADS_SIZE, 1, 4),
    "self_attn.v_conv1d.weight": (_HEADS_SIZE, 1, 4),
}
_MLA = {
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_a_proj_with_mqa.weight": (576, _HIDDEN),
    "self_attn.kv_b_proj.weight": (24576, 512),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.q_a_proj.weight": (1536, _HIDDEN),
    "self_attn.q_b_proj.weight": (18432, 1536),
}
_DENSE_MLP = {
    "mlp.gate_proj.weight": (_DENSE, _HIDDEN),
    "mlp.up_proj.weight": (_DENSE, _HIDDEN),
    "mlp.down_proj.weight": (_HIDDEN, _DENSE),
}
_MOE = {
    "block_sparse_moe.gate.weight": (EXPERTS, _HIDDEN),
    "block_sparse_moe.routed_expert_down_proj.weight": (_LATENT, _HIDDEN),
    "block_sparse_moe.routed_expert_norm.weight": (_LATENT,),
    "block_sparse_moe.routed_expert_up_proj.weight": (_HIDDEN, _LATENT),
    "block_sparse_moe.shared_experts.gate_proj.weight": (_SHARED, _HIDDEN),
    "block_sparse_moe.shared_experts.up_proj.weight": (_SHARED, _HIDDEN),
    "block_sparse_moe.shared_experts.down_proj.weight": (_HIDDEN, _SHARED),
}
_MOE_F32 = {"block_sparse_moe.gate.e_score_correction_bias": (EXPERTS,)}
# Two four-bit numbers in a byte, one scale for 32 of them.
_EXPERT_U8 = {
    "w1.weight_packed": (_EXPERT, _LATENT // 2),
    "w1.weight_scale": (_EXPERT, _LATENT // 32),
    "w2.weight_packed": (_LATENT, _EXPERT // 2),
    "w2.weight_scale": (_LATENT, _EXPERT // 32),
    "w3.weight_packed": (_EXPERT, _LATENT // 2),
    "w3.weight_scale": (_EXPERT, _LATENT // 32),
}
_ENDS = {
    f"{TEXT}embed_tokens.weight": (_VOCABULARY, _HIDDEN),
    f"{TEXT}norm.weight": (_HIDDEN,),
    f"{TEXT}output_attn_res_norm.weight": (_HIDDEN,),
    f"{TEXT}output_attn_res_proj.weight": (1, _HIDDEN),
    "language_model.lm_head.weight": (_VOCABULARY, _HIDDEN),
}
_PROJECTOR = {
    "mm_projector.post_norm.weight": (_HIDDEN,),
    "mm_projector.proj.0.weight": (4096, 4096),
    "mm_projector.proj.2.weight": (_HIDDEN, 4096),
}
_VISION_BLOCK = {
    "mlp.fc0.weight": (_VISION_MLP, _VISION),
    "mlp.fc1.weight": (_VISION, _VISION_MLP),
    "norm0.weight": (_VISION,),
    "norm1.weight": (_VISION,),
    "wo.weight": (_VISION, _VISION_HEADS),
    "wqkv.weight": (3 * _VISION_HEADS, _VISION),
}
_VISION_ENDS = {
    "vision_tower.encoder.final_layernorm.weight": (_VISION,),
    "vision_tower.patch_embed.pos_emb.weight": (64, 64, _VISION),
    "vision_tower.patch_embed.proj.weight": (_VISION, 3, 14, 14),
}
_SMALL = {
    ".gitattributes": "*.safetensors filter=lfs diff=lfs merge=lfs -text\n",
    "README.md": "# A stand-in for Kimi K3\n",
    "LICENSE": "A stand-in.\n",
    "config.json": json.dumps(
        {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "text_config": {"num_hidden_layers": LAYERS, "tie_word_embeddings": False},
        },
        indent=2,
    )
    + "\n",
    "generation_config.json": "{}\n",
    "tokenizer_config.json": "{}\n",
    **{
        f"{name}.py": f'"""A stand-in for {name}."""\n'
        for name in (
            "configuration_kimi_k3",
            "encoding_k3",
            "kimi_k3_processor",
            "kimi_k3_vision_processing",
            "media_utils",
            "modeling_kimi_k3",
            "modeling_kimi_linear",
            "tokenization_kimi",
        )
    },
    "tiktoken.model": "IQ== 0\n",
}
_FILES = 119
_LFS_SUFFIXES = (".safetensors", ".model", INDEX_NAME)


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes


def shard_name(number: int) -> str:
    return f"model-{number:05d}-of-{SHARDS:06d}.safetensors"


def layer_of_shard(number: int) -> int | None:
    """Shards are numbered from 1, layers from 0; the last three shards hold the rest."""
    return number - 1 if number <= LAYERS else None


@functools.cache
def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _WIDTH[dtype]


def _typed(dtype: str, shapes: dict[str, tuple[int, ...]], prefix: str = "") -> Iterator[Tensor]:
    for name, shape in shapes.items():
        yield Tensor(prefix + name, dtype, shape, _size(dtype, shape))


def _layer(number: int) -> Iterator[Tensor]:
    prefix = f"{TEXT}layers.{number}."
    yield from _typed("BF16", _EVERY_LAYER, prefix)
    if number in MLA_LAYERS:
        yield from _typed("BF16", _MLA, prefix)
    else:
        yield from _typed("BF16", _KDA, prefix)
        yield from _typed("F32", _KDA_F32, prefix)
    if number == 0:
        yield from _typed("BF16", _DENSE_MLP, prefix)
        return
    yield from _typed("BF16", _MOE, prefix)
    yield from _typed("F32", _MOE_F32, prefix)
    for expert in range(EXPERTS):
        yield from _typed("U8", _EXPERT_U8, f"{prefix}block_sparse_moe.experts.{expert}.")


def tensors(number: int) -> list[Tensor]:
    """What shard NUMBER (from 1) holds."""
    layer = layer_of_shard(number)
    if layer is not None:
        return list(_layer(layer))
    if number == LAYERS + 1:
        return list(_typed("BF16", _ENDS))
    if number == LAYERS + 2:
        return list(_typed("BF16", _PROJECTOR))
    blocks = (f"vision_tower.encoder.blocks.{block}." for block in range(VISION_BLOCKS))
    return [tensor for prefix in blocks for tensor in _typed("BF16", _VISION_BLOCK, prefix)] + list(
        _typed("BF16", _VISION_ENDS)
    )


@functools.cache
def data_size(number: int) -> int:
    """Bytes of tensors in a shard."""
    return sum(tensor.size for tensor in tensors(number))


@functools.cache
def header(number: int) -> bytes:
    """The start of a shard, up to its first tensor."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors(number):
        end = offset + tensor.size
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def weight_map() -> dict[str, str]:
    """Tensor name -> file, in the order of names."""
    pairs = [(tensor.name, shard_name(number)) for number in range(1, SHARDS + 1) for tensor in tensors(number)]
    return dict(sorted(pairs))


def index() -> bytes:
    """model.safetensors.index.json."""
    value = {"metadata": {"total_size": TOTAL_SIZE}, "weight_map": weight_map()}
    return json.dumps(value, indent=2).encode()


def small_files() -> dict[str, bytes]:
    """All files but shards and index."""
    files = {name: text.encode() for name, text in _SMALL.items()}
    extra = _FILES - SHARDS - 1 - len(files)
    return files | {f"extra/{number:02d}.txt": b"%d\n" % number for number in range(extra)}


def _tree_item(path: str, size: int, sha256: str, blob: str) -> dict[str, Any]:
    item: dict[str, Any] = {"type": "file", "oid": blob, "size": size, "path": path}
    if path.endswith(_LFS_SUFFIXES):
        item["lfs"] = {"oid": sha256, "size": size, "pointerSize": 136}
    return item


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def shard_digest(number: int) -> str:
    """What the listing says of a shard: made up, but always the same."""
    return hashlib.sha256(shard_name(number).encode()).hexdigest()


def tree(index_bytes: bytes, headers: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """The Hub's listing. HEADERS are the lengths of the shards' headers, when they are known already."""
    lengths = list(headers) if headers is not None else [len(header(number)) for number in range(1, SHARDS + 1)]
    items = [
        _tree_item(
            shard_name(number), lengths[number - 1] + data_size(number), shard_digest(number), _blob(b"%d" % number)
        )
        for number in range(1, SHARDS + 1)
    ]
    for path, data in {INDEX_NAME: index_bytes, **small_files()}.items():
        items.append(_tree_item(path, len(data), hashlib.sha256(data).hexdigest(), _blob(data)))
    return sorted(items, key=lambda item: item["path"])


def write_shard(directory: Path, number: int) -> Path:
    """A shard: its header, then a hole of the size of its tensors."""
    path = directory / shard_name(number)
    start = header(number)
    with path.open("wb") as stream:
        stream.write(start)
        stream.truncate(len(start) + data_size(number))
    return path


def write_files(directory: Path, shards: Iterable[int] = ()) -> list[dict[str, Any]]:
    """Index and small files, and the given shards; the listing of all there would be."""
    directory.mkdir(parents=True, exist_ok=True)
    index_bytes = index()
    for path, data in {INDEX_NAME: index_bytes, **small_files()}.items():
        target = directory / path
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)
    for number in shards:
        write_shard(directory, number)
    return tree(index_bytes)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--shards", type=int, nargs="*", metavar="N", help="write these shards too, all when none is named"
    )
    options = parser.parse_args(arguments)
    wanted = options.shards if options.shards or options.shards is None else range(1, SHARDS + 1)
    listing = write_files(options.directory, wanted or ())
    target = options.directory / "tree.json"
    target.write_text(json.dumps(listing, indent=1) + "\n", encoding="utf-8")
    size = sum(item["size"] for item in listing)
    held = sum(path.stat().st_blocks * 512 for path in options.directory.rglob("*") if path.is_file())
    sys.stdout.write(f"{len(listing)} files of {size} bytes listed in {target}; {held} bytes written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
