# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.safetensors_header import (
    StructureError,
    check_file,
    read_header,
)


def build(header: object, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(first: int, last: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [last - first], "data_offsets": [first, last]}


GOOD = build({"__metadata__": {"format": "pt"}, "a": tensor(0, 4), "b": tensor(4, 10)}, bytes(10))


def test_a_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(GOOD)
    assert check_file(str(path), len(GOOD), ["a", "b"]) == 10
    assert check_file(str(path), len(GOOD), []) == 10


def test_absent_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(GOOD)
    with pytest.raises(StructureError, match="it lacks c, d, e and 1 more"):
        check_file(str(path), len(GOOD), ["a", "f", "e", "d", "c"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "too short"),
        (b"1234567", "too short"),
        (build({}, b"", length=1 << 40), "claims"),
        (build(b"{", b""), "cannot be read"),
        (build(b"[1]", b""), "cannot be read"),
        (build({"a": {}}, b""), "cannot be read"),
        (build({"a": tensor(0, 4)}, bytes(3)), "describes"),
        (build({"a": tensor(0, 4)}, bytes(5)), "describes"),
        (build({"a": {"data_offsets": [5, 4]}}, bytes(4)), "backwards"),
        (
            build({"a": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 4]}}, bytes(4)),
            "a 4 bytes, but a shape of 6",
        ),
        (build({"a": {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]}}, bytes(4)), "cannot be read"),
    ],
)
def test_unsound_files_are_told(data: bytes, message: str) -> None:
    with pytest.raises(StructureError, match=message):
        read_header(io.BytesIO(data), len(data))


def test_a_file_without_tensors() -> None:
    data = build({}, b"")
    assert read_header(io.BytesIO(data), len(data)) == {}


@pytest.mark.parametrize(("dtype", "count"), [("F4", 8), ("U8", 4), ("BF16", 2), ("F32", 1), ("OF_TOMORROW", 100)])
def test_a_shape_is_held_against_the_offsets_where_the_type_is_known(dtype: str, count: int) -> None:
    data = build({"a": {"dtype": dtype, "shape": [1, count], "data_offsets": [0, 4]}}, bytes(4))
    assert read_header(io.BytesIO(data), len(data)) == {"a": (0, 4)}
