# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which tensors and files of a checkpoint a pipeline stage needs: pure functions of the checkpoint's index.

The index (C(model.safetensors.index.json)) maps tensor names to files. Selection goes by those names only, never by
the numbers in file names: the layout of a repository may change, the names are what the engine asks for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

INDEX_NAME = "model.safetensors.index.json"
PLANNER = 1  # raise it when the same inputs would give another selection: stored plans are then made anew

# Components that only wrap the language model; what follows them decides.
_WRAPPERS = frozenset({"language_model", "model", "transformer", "text_model", "decoder", "llm"})
_LAYER_LISTS = frozenset({"layers", "h"})
_EMBEDDINGS = frozenset({"embed_tokens", "wte", "wpe", "tok_embeddings", "word_embeddings"})
_TAIL = frozenset({"norm", "final_norm", "final_layernorm", "ln_f"})
_TAIL_PREFIXES = ("output_attn_res_",)
_HEADS = frozenset({"lm_head", "output"})
_VISION = frozenset(
    {
        "vision_tower",
        "vision_model",
        "vision_encoder",
        "visual",
        "mm_projector",
        "multi_modal_projector",
        "multimodal_projector",
        "vision_projector",
    }
)
# Weights in formats that the engine does not load from an index; never needed by a stage.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")

_SHOWN = 5
_MAP = re.compile(rb'"weight_map"\s*:\s*\{')
_PIECE = 1 << 20

# What a tensor is, when it is not part of a numbered layer.
EMBEDDING, TAIL, HEAD, VISION, UNPLACED = "embedding", "tail", "head", "vision", "unplaced"


class PlanError(ValueError):
    """The inputs do not describe a plan; the text says what to change."""


@dataclass(frozen=True)
class Selection:
    """What the given stages need of one checkpoint."""

    scope: str
    stages: tuple[int, ...]
    pipeline_layers: tuple[int, ...]
    language_model_only: bool
    tied_embeddings: bool
    tensors: dict[str, list[str]] = field(repr=False)  # file -> names of the needed tensors in it
    unplaced: tuple[str, ...] = ()
    vision_tensors: int = 0

    @property
    def files(self) -> list[str]:
        return sorted(self.tensors)

    @property
    def layer_ranges(self) -> list[list[int]]:
        """First and last layer of each selected stage."""
        ranges = []
        for stage in self.stages:
            first = sum(self.pipeline_layers[:stage])
            ranges.append([first, first + self.pipeline_layers[stage] - 1])
        return ranges

    @property
    def warnings(self) -> list[str]:
        if not self.unplaced:
            return []
        return [
            f"{len(self.unplaced)} tensors belong to no known part of the model ({shorten(self.unplaced)}): "
            "every stage holds them."
        ]

    def summary(self) -> dict[str, Any]:
        """The selection in a form to print and compare."""
        return {
            "scope": self.scope,
            "stages": list(self.stages),
            "pipeline_layers": list(self.pipeline_layers),
            "layers": self.layer_ranges,
            "language_model_only": self.language_model_only,
            "tied_embeddings": self.tied_embeddings,
            "tensors": sum(len(names) for names in self.tensors.values()),
            "vision_tensors": self.vision_tensors,
            "weight_files": self.files,
            "unplaced": list(self.unplaced[:_SHOWN]),
        }

    @property
    def digest(self) -> str:
        """SHA-256 over the choice and every tensor's place."""
        tensors = hashlib.sha256()
        for name in self.files:
            tensors.update(f"{name}\0{len(self.tensors[name])}\n".encode())
            for tensor in sorted(self.tensors[name]):
                tensors.update(tensor.encode() + b"\n")
        return digest_of({"planner": PLANNER, **self.summary(), "tensors": tensors.hexdigest()})


def canonical(value: Any) -> bytes:
    """One byte string for one value: what digests are taken over."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def digest_of(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def shorten(names: Iterable[str], shown: int = _SHOWN) -> str:
    names = list(names)
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def classify(name: str) -> int | str:
    """The layer number of a tensor, or what else it is."""
    parts = name.split(".")
    at = 0
    while at < len(parts) - 1 and parts[at] in _WRAPPERS:
        at += 1
    head = parts[at]
    if head in _LAYER_LISTS and at + 2 < len(parts) and parts[at + 1].isdecimal():
        return int(parts[at + 1])
    if head in _EMBEDDINGS:
        return EMBEDDING
    if head in _TAIL or head.startswith(_TAIL_PREFIXES):
        return TAIL
    if head in _HEADS:
        return HEAD
    if head in _VISION:
        return VISION
    return UNPLACED


def check_layers(pipeline_layers: Sequence[int], layers: int | None = None) -> tuple[int, ...]:
    """The layers of each stage, checked."""
    counts = tuple(pipeline_layers)
    if not counts or any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in counts):
        raise PlanError(
            f"pipeline_layers must be a list of whole numbers above 0, one per pipeline stage, not {list(counts)}."
        )
    if layers is not None and sum(counts) != layers:
        raise PlanError(
            f"pipeline_layers {list(counts)} sum to {sum(counts)}, but the model has {layers} layers: "
            "make them agree, or correct the number of layers."
        )
    return counts


def check_stages(stages: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """The stages this host holds, checked; none named means every stage."""
    if not stages:
        return tuple(range(count))
    wrong = [
        stage for stage in stages if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage < count
    ]
    if wrong:
        raise PlanError(f"stages {list(stages)} do not fit: there are {count} pipeline stages, 0 to {count - 1}.")
    return tuple(sorted(set(stages)))


def weight_map_of(index: Any) -> dict[str, str]:
    """The C(weight_map) of a parsed index, checked."""
    weights = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(weights, Mapping) or not weights:
        raise PlanError(f"{INDEX_NAME} has no weight_map with entries: it is not the index of a sharded checkpoint.")
    for name, file in weights.items():
        if not isinstance(name, str) or not isinstance(file, str):
            raise PlanError(f"{INDEX_NAME} maps {name!r} to {file!r}: both must be text.")
    return weights if isinstance(weights, dict) else dict(weights)


def parse_index(data: bytes) -> dict[str, str]:
    """The C(weight_map) of an index, checked.

    At full size it names half a million tensors in a hundred files. To have the name of a file once for each tensor, if
    only for a moment, would take more memory than all the rest of a run, so it is parsed in pieces where it can be.
    """
    try:
        weights = _in_pieces(data)
    except ValueError:
        weights = None
    return weight_map_of(json.loads(data) if weights is None else {"weight_map": weights})


def _in_pieces(data: bytes) -> dict[str, str] | None:
    """The C(weight_map), or nothing when the index does not look as usual."""
    found = _MAP.search(data) if data.count(b'"weight_map"') == 1 else None
    if found is None:
        return None
    weights: dict[str, str] = {}
    files: dict[str, str] = {}
    begin, ended = found.end(), False
    while not ended:
        # A quote and a comma end an entry, unless the quote is one within a text.
        end = data.find(b'",', begin + _PIECE) + 1
        ended = not end or data[end - 2 : end - 1] == b"\\"
        text = "{" + (data[begin:] if ended else data[begin:end] + b"}").decode()
        piece, length = json.JSONDecoder().raw_decode(text)
        if not piece or not all(isinstance(file, str) for file in piece.values()):
            return None
        if not ended and length != len(text):
            return None
        weights.update((name, files.setdefault(file, file)) for name, file in piece.items())
        begin = begin if ended else end + 1
    # What is around the map has to be right, too.
    around = json.loads(data[: found.end()].decode() + "}" + text[length:])
    return weights if isinstance(around, dict) and around.get("weight_map") == {} else None


def select(
    weight_map: Mapping[str, str],
    *,
    scope: str = "stage",
    pipeline_layers: Sequence[int],
    stages: Sequence[int] | None = None,
    layers: int | None = None,
    language_model_only: bool = True,
    tied_embeddings: bool | None = None,
) -> Selection:
    """Choose the tensors, and so the files, that the given pipeline stages need."""
    if scope not in ("all", "stage"):
        raise PlanError(f"scope must be 'stage' or 'all', not {scope!r}.")
    # Who holds everything need not say how the layers are split.
    counts = check_layers(pipeline_layers, layers) if pipeline_layers or scope == "stage" else ()
    chosen = check_stages(stages, len(counts)) if scope == "stage" else tuple(range(len(counts)))
    kinds = [classify(name) for name in weight_map]
    # Without a head of its own the model reuses its embeddings as the head.
    tied = bool(tied_embeddings) or HEAD not in kinds
    needed: dict[str, list[str]] = {}
    unplaced: list[str] = []
    vision = 0
    if scope == "all":
        for (name, file), kind in zip(weight_map.items(), kinds, strict=True):
            needed.setdefault(file, []).append(name)
            vision += kind == VISION
        return Selection("all", chosen, counts, language_model_only, tied, needed, (), vision)

    total = sum(counts)
    stage_of = [stage for stage, count in enumerate(counts) for _layer in range(count)]
    first, last = 0 in chosen, len(counts) - 1 in chosen
    seen: set[int] = set()
    for (name, file), kind in zip(weight_map.items(), kinds, strict=True):
        if isinstance(kind, int):
            seen.add(kind)
            if kind >= total:
                unplaced.append(name)
            elif stage_of[kind] not in chosen:
                continue
        elif kind == EMBEDDING:
            if not (first or (tied and last)):
                continue
        elif kind in (TAIL, HEAD):
            if not last:
                continue
        elif kind == VISION:
            if language_model_only:
                continue
            vision += 1
        else:
            unplaced.append(name)
        needed.setdefault(file, []).append(name)
    absent = [number for number in range(total) if number not in seen]
    if absent:
        known = f"{min(seen)} to {max(seen)}" if seen else "none"
        raise PlanError(
            f"pipeline_layers {list(counts)} need layers 0 to {total - 1}, but the index lacks "
            f"{shorten(map(str, absent))} (layers in the index: {known}): set the layers of this model."
        )
    return Selection("stage", chosen, counts, language_model_only, tied, needed, tuple(sorted(unplaced)), vision)


def files_to_hold(paths: Iterable[str], selection: Selection | None) -> tuple[list[str], list[str]]:
    """Split a repository's files into those to hold and those to leave out, the index itself not among them.

    Everything that is no weight file belongs to every stage; of the weight files only the selected ones do.
    """
    if selection is None or selection.scope == "all":
        return sorted(path for path in paths if path != INDEX_NAME), []
    hold, leave = [], []
    for path in sorted(paths):
        if path == INDEX_NAME:
            continue
        wanted = path in selection.tensors or not path.endswith(_WEIGHT_SUFFIXES)
        (hold if wanted else leave).append(path)
    return hold, leave


def absent_files(weight_map: Mapping[str, str], paths: Iterable[str]) -> list[str]:
    """Files that the index names and the repository does not have."""
    return sorted(set(weight_map.values()) - set(paths))


def pruned_index(tensors: Mapping[str, Iterable[str]], total_size: int) -> bytes:
    """The index of a directory that holds these files only, each with its tensors.

    It lists everything the files hold, needed or not: an index is a description of its directory.
    """
    file_of = {name: file for file, names in tensors.items() for name in names}
    kept = sorted(file_of)
    # As json.dumps would write it with indent=2, in a tenth of its time and memory.
    quoted = json.encoder.encode_basestring_ascii
    content = bytearray(f'{{\n  "metadata": {{\n    "total_size": {total_size}\n  }},\n  "weight_map": {{'.encode())
    separator = "\n"
    for name in kept:
        content += f"{separator}    {quoted(name)}: {quoted(file_of[name])}".encode()
        separator = ",\n"
    content += b"\n  }\n}" if kept else b"}\n}"
    return bytes(content)


def identity_digest(
    *,
    repository: str,
    revision: str,
    scope: str,
    pipeline_layers: Sequence[int],
    language_model_only: bool,
    index_digest: str,
) -> str:
    """SHA-256 over what must be equal on every rank of a group, whichever stage each of them holds."""
    return digest_of(
        {
            "repository": repository,
            "revision": revision,
            "scope": scope,
            "pipeline_layers": list(pipeline_layers),
            "language_model_only": language_model_only,
            "index": index_digest,
        }
    )
