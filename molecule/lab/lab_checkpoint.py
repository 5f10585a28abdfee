# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A tiny checkpoint that has the shape of the big one: 6 layers in 16 shards, an index, a tokenizer, a chat template.

The bytes follow from this file alone, so the revision does too. As in Kimi K3's repository the embeddings, the last
norm and the output head share one shard, which both pipeline stages need; one more shard lies across the border between
layers 3 and 4. Layers have two or three shards, so no arithmetic on shard numbers finds them.

The weights are random, scaled so that greedy text is varied and depends on every layer: a stage that misses a layer, or
has a wrong one, says something else. Rows of the head for special tokens and bytes that are no text are zero, so a
completion has always as many tokens as were asked for, and can be read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lab_hub import tree_revision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = "lab/tiny-k3"
LAYERS = 6
SHARDS = 16
SEED = 3

HIDDEN = 256
HEADS = 4
KEY_HEADS = 2
HEAD_SIZE = 64
INNER = 512
VOCABULARY = 512
POSITIONS = 2048

SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXT = """
One deployment turns two hosts into one replica of a large model. The first host owns the first layers and the interface
that clients talk to; the second host owns the remaining layers and the head that names the next token. Every token
passes through both of them, over the network between them. A host that is gone takes the whole replica with it, and
nobody notices until a request hangs. So somebody has to look: an agent on every host starts the engine, watches the
others, ends the engine when another one has ended, and starts it again when all are there. The words of this text serve
to train a small vocabulary, in which the most frequent pairs of characters become one token, and then the most frequent
pairs of those, until there are enough of them. What the model says with these tokens means nothing at all, since its
weights are random numbers; but it says the same thing every time, and it would say another thing if a layer were
missing. That is all that a test wants from a model. The quick brown fox jumps over the lazy dog, pack my box with five
dozen liquor jugs, how vexingly quick daft zebras jump. Numbers: 0 1 2 3 4 5 6 7 8 9, 10, 100, 1000, 2024, 2025, 2026.
Question: what is the capital of France? Answer: Paris is the capital of France. Question: how many layers are there?
Answer: there are six layers, four of them in the first stage and two of them in the second stage.
"""


class Tensor(NamedTuple):
    """A weight: its name, its shape, and what its numbers are like."""

    name: str
    shape: tuple[int, ...]
    gain: float


def layer_tensors(layer: int) -> dict[str, list[Tensor]]:
    """The weights of a layer, by the part they belong to."""
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return {
        "norms": [
            Tensor(f"{prefix}.input_layernorm.weight", (HIDDEN,), 0),
            Tensor(f"{prefix}.post_attention_layernorm.weight", (HIDDEN,), 0),
        ],
        "attention": [
            Tensor(f"{attention}.q_proj.weight", (HEADS * HEAD_SIZE, HIDDEN), 1.8),
            Tensor(f"{attention}.k_proj.weight", (KEY_HEADS * HEAD_SIZE, HIDDEN), 1.8),
            Tensor(f"{attention}.v_proj.weight", (KEY_HEADS * HEAD_SIZE, HIDDEN), 1.5),
            Tensor(f"{attention}.o_proj.weight", (HIDDEN, HEADS * HEAD_SIZE), 2.0),
        ],
        "inner": [
            Tensor(f"{mlp}.gate_proj.weight", (INNER, HIDDEN), 1.5),
            Tensor(f"{mlp}.up_proj.weight", (INNER, HIDDEN), 1.5),
        ],
        "down": [Tensor(f"{mlp}.down_proj.weight", (HIDDEN, INNER), 1.5)],
    }


def layout() -> list[list[Tensor]]:
    """The weights of each shard."""
    shards: list[list[Tensor]] = []
    for layer in range(LAYERS):
        part = layer_tensors(layer)
        if layer == 4:  # its norms lie at the end of the layer before
            shards[-1] += part["norms"]
            shards.append(part["attention"])
        else:
            shards.append(part["norms"] + part["attention"])
        if layer in {2, 3, 5}:
            shards += [part["inner"], part["down"]]
        else:
            shards.append(part["inner"] + part["down"])
    shards.append(
        [
            Tensor("model.embed_tokens.weight", (VOCABULARY, HIDDEN), HIDDEN**0.5),
            Tensor("model.norm.weight", (HIDDEN,), 0),
            Tensor("lm_head.weight", (VOCABULARY, HIDDEN), 1),
        ]
    )
    return shards


def shard_name(number: int) -> str:
    """The file name of a shard; numbers begin with 1."""
    return f"model-{number:05d}-of-{SHARDS:05d}.safetensors"


def bfloat16(value: float) -> bytes:
    """A number as bfloat16, cut off rather than rounded."""
    return struct.pack("<f", value)[2:]


def numbers(tensor: Tensor) -> bytes:
    """The numbers of a weight: 256 evenly spaced levels, picked by random bytes that follow from the name."""
    count = 1
    for size in tensor.shape:
        count *= size
    if tensor.gain:
        # Such numbers have the variance scale**2 / 3; the output of a row then has the variance gain**2.
        scale = tensor.gain * (3 / tensor.shape[-1]) ** 0.5
        levels = [bfloat16((step - 127.5) / 128 * scale) for step in range(256)]
    else:
        levels = [bfloat16(0.5 + step / 256) for step in range(256)]
    seed = int.from_bytes(hashlib.sha256(f"{SEED} {tensor.name}".encode()).digest()[:8], "big")
    picked = random.Random(seed).randbytes(count)
    data = bytearray(2 * count)
    data[0::2] = picked.translate(bytes(level[0] for level in levels))
    data[1::2] = picked.translate(bytes(level[1] for level in levels))
    return bytes(data)


def safetensors(tensors: dict[str, tuple[tuple[int, ...], bytes]]) -> bytes:
    """A file in the format safetensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _rest, data in tensors.values())


# The tokenizer: byte pairs over the text above


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself if it can be printed, else one above."""
    letters: list[str] = []
    above = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            letters.append(chr(byte))
        else:
            letters.append(chr(above))
            above += 1
    return letters


def train(text: str, count: int) -> list[tuple[str, str]]:
    """The ``count`` most useful merges of neighbouring tokens; of equals the first in order."""
    letters = byte_letters()
    words: Counter[tuple[str, ...]] = Counter()
    for word in re.findall(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+", text.replace("\n", " ")):
        words[tuple(letters[byte] for byte in word.encode())] += 1
    merges: list[tuple[str, str]] = []
    known = set(letters)
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += times
        best = min((pair for pair in pairs if "".join(pair) not in known), key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        known.add("".join(best))
        merged: Counter[tuple[str, ...]] = Counter()
        for word, times in words.items():
            merged[_merge(word, best)] += times
        words = merged
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    result: list[str] = []
    for token in word:
        if result and (result[-1], token) == pair:
            result[-1] += token
        else:
            result.append(token)
    return tuple(result)


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """All tokens in the order of their numbers, and the merges."""
    letters = byte_letters()
    merges = train(TEXT, VOCABULARY - len(letters) - len(SPECIAL))
    return [*SPECIAL, *letters, *("".join(pair) for pair in merges)], merges


def tokenizer() -> dict[str, object]:
    """The contents of ``tokenizer.json``."""
    tokens, merges = vocabulary()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, token in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def silent_tokens() -> list[int]:
    """The tokens that the model never says: special ones, and bytes that alone are no printable text."""
    plain = {len(SPECIAL) + byte for byte in range(32, 127)}
    return [number for number in range(len(SPECIAL) + 256) if number not in plain]


# The repository


def files() -> Iterator[tuple[str, bytes]]:
    """Every file of the repository, with its bytes."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(layout(), start=1):
        content: dict[str, tuple[tuple[int, ...], bytes]] = {}
        for tensor in tensors:
            data = numbers(tensor)
            if tensor.name == "lm_head.weight":
                data = _silence(data)
            content[tensor.name] = (tensor.shape, data)
            weight_map[tensor.name] = shard_name(number)
            total += len(data)
        yield shard_name(number), safetensors(content)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    yield "model.safetensors.index.json", _json(index)
    yield "config.json", _json(config())
    yield "generation_config.json", _json({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    yield "tokenizer.json", _json(tokenizer())
    yield "tokenizer_config.json", _json(tokenizer_config())
    yield "chat_template.jinja", CHAT_TEMPLATE.encode()
    yield ".gitattributes", b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
    yield "README.md", b"# tiny-k3\n\nRandom weights in the shape of a large checkpoint, for tests.\n"
    yield "docs/layout.md", b"Embeddings, last norm and head are in the last shard.\n"


def _silence(head: bytes) -> bytes:
    row = 2 * HIDDEN
    data = bytearray(head)
    for token in silent_tokens():
        data[token * row : (token + 1) * row] = bytes(row)
    return bytes(data)


def config() -> dict[str, object]:
    """The contents of ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "bfloat16",
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "max_position_embeddings": POSITIONS,
        "mlp_bias": False,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KEY_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }


def tokenizer_config() -> dict[str, object]:
    """The contents of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": POSITIONS,
    }


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def publish(root: Path, say: Callable[[str], None]) -> str:
    """Have the repository below a hub's root, and give its revision."""
    base = root / REPOSITORY
    stamp, refs = base / "refs/.made-by", base / "refs/main"
    made_by = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == made_by and (base / refs.read_text().strip()).is_dir():
        return refs.read_text().strip()
    say(f"making the checkpoint {REPOSITORY}")
    new = base / ".new"
    shutil.rmtree(new, ignore_errors=True)
    for path, data in files():
        (new / path).parent.mkdir(parents=True, exist_ok=True)
        (new / path).write_bytes(data)
    revision = tree_revision(new)
    target = base / revision
    if target.exists():
        shutil.rmtree(target)
    new.rename(target)
    refs.parent.mkdir(exist_ok=True)
    refs.write_text(f"{revision}\n")
    stamp.write_text(made_by)
    return revision
