# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The header of a safetensors file: which tensors it holds, how large each is, and how long the file must be."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # the format's own limit
_SHOWN = 3
# Bits of a number; of a type that is not here only the offsets can be looked at.
_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}
_BITS |= {"BOOL": 8, "I8": 8, "U8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}


class StructureError(ValueError):
    """A file is no safetensors file as announced; the text says what differs."""


def read_header(stream: BinaryIO, size: int) -> dict[str, tuple[int, int]]:
    """Tensor names and their first and last offset, from the start of a file of the given size."""
    prefix = stream.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        raise StructureError("it is too short for a safetensors header")
    (length,) = _LENGTH.unpack(prefix)
    if length > min(_MAX_HEADER, size - _LENGTH.size):
        raise StructureError(f"its header claims {length} bytes, more than there can be")
    try:
        header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for name, entry in header.items()
        }
        sizes = {name: _size_of(entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise StructureError(f"its header cannot be read ({error})") from error
    end = max((last for _first, last in tensors.values()), default=0)
    if any(not 0 <= first <= last for first, last in tensors.values()):
        raise StructureError("its header has offsets that run backwards")
    for name, (first, last) in tensors.items():
        if sizes[name] not in (None, last - first):
            raise StructureError(f"its header gives {name} {last - first} bytes, but a shape of {sizes[name]}")
    if _LENGTH.size + length + end != size:
        raise StructureError(f"its header describes {_LENGTH.size + length + end} bytes, the file has {size}")
    return tensors


def _size_of(entry: Mapping[str, Any]) -> int | None:
    """Bytes of a tensor by its type and shape, where the header has both and the type is known."""
    bits = _BITS.get(entry.get("dtype", ""))
    shape = entry.get("shape")
    return None if bits is None or shape is None else math.prod(map(int, shape)) * bits // 8


def check_file(path: str, size: int, names: Iterable[str]) -> int:
    """Bytes of tensor data in the file, once its header agrees with its size and holds the given names."""
    with Path(path).open("rb") as stream:
        tensors = read_header(stream, size)
    absent = sorted(name for name in names if name not in tensors)
    if absent:
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        raise StructureError(f"it lacks {', '.join(absent[:_SHOWN])}{more}, which the index places in it")
    return max((last for _first, last in tensors.values()), default=0)
