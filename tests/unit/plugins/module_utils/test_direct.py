# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import direct as module
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.direct import ALIGN, Buffers, DirectFile


def open_for(path: Path) -> DirectFile:
    return DirectFile(str(path), os.O_RDWR | os.O_CREAT)


def use(path: Path) -> DirectFile:
    """Write two blocks and a little, read them again."""
    file = open_for(path)
    buffer = Buffers(8 * ALIGN).take()
    buffer[: 2 * ALIGN] = b"a" * ALIGN + b"b" * ALIGN
    assert file.write(buffer[: 2 * ALIGN], 0) == 2 * ALIGN
    buffer[:5] = b"tail!"
    assert file.write(buffer[:5], 2 * ALIGN) == 5
    back = Buffers(8 * ALIGN).take()
    assert file.read(back, 0) == 2 * ALIGN + 5
    assert bytes(back[: 2 * ALIGN + 5]) == b"a" * ALIGN + b"b" * ALIGN + b"tail!"
    return file


def test_whole_blocks_and_a_tail(tmp_path: Path) -> None:
    file = use(tmp_path / "file")
    assert not file.direct, "what is no whole block goes through the page cache"
    file.drop(3 * ALIGN, at_once=True)
    file.close()
    file.close()
    assert (tmp_path / "file").stat().st_size == 2 * ALIGN + 5


def test_a_file_system_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "open", refuse)
        file = use(tmp_path / "file")
    file.close()


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_a_device_that_wants_other_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = getattr(os, name)
    refused = []

    def refuse(*arguments: object) -> int:
        if not refused:
            refused.append(1)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(*arguments)

    monkeypatch.setattr(module.os, name, refuse)
    file = open_for(tmp_path / "file")
    file.direct = True
    buffer = Buffers(ALIGN).take()
    assert file.write(buffer, 0) == ALIGN
    assert file.read(buffer, 0) == ALIGN
    assert refused
    assert not file.direct
    file.close()


def test_other_errors_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        DirectFile(str(tmp_path / "none"), os.O_RDONLY)

    def full(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "pwrite", full)
    file = open_for(tmp_path / "file")
    with pytest.raises(OSError, match="No space"):
        file.write(Buffers().take()[:ALIGN], 0)
    file.close()


def test_what_was_used_is_dropped_in_strides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(module.os, "posix_fadvise", lambda _fd, start, count, _advice: calls.append((start, count)))
    file = open_for(tmp_path / "file")
    file.direct = True
    file.drop(1 << 30)
    assert calls == []
    file.direct = False
    stride = module._DROP_AFTER
    for offset in range(0, 2 * stride + 1, stride // 4):
        file.drop(offset)
    file.drop(2 * stride + 7, at_once=True)
    assert calls == [(0, stride), (stride, stride), (2 * stride, 7)]
    file.close()


def test_buffers_are_used_again() -> None:
    buffers = Buffers(ALIGN)
    first = buffers.take()
    second = buffers.take()
    assert first is not second
    buffers.give(first)
    assert buffers.take() is first
