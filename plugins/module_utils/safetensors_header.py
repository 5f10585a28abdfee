# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The header of a safetensors file: which tensors it holds, and how long the file must be."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # the format's own limit
_SHOWN = 3


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
        tensors = {
            name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise StructureError(f"its header cannot be read ({error})") from error
    end = max((last for _first, last in tensors.values()), default=0)
    if any(not 0 <= first <= last for first, last in tensors.values()):
        raise StructureError("its header has offsets that run backwards")
    if _LENGTH.size + length + end != size:
        raise StructureError(f"its header describes {_LENGTH.size + length + end} bytes, the file has {size}")
    return tensors


def check_file(path: str, size: int, names: Iterable[str]) -> int:
    """Bytes of tensor data in the file, once its header agrees with its size and holds the given names."""
    with Path(path).open("rb") as stream:
        tensors = read_header(stream, size)
    absent = sorted(name for name in names if name not in tensors)
    if absent:
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        raise StructureError(f"it lacks {', '.join(absent[:_SHOWN])}{more}, which the index places in it")
    return max((last for _first, last in tensors.values()), default=0)
