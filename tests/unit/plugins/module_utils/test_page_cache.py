# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a fetch and a verification leave in memory, which is nothing."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import direct
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import MEMORY_FILESYSTEMS, filesystem_of

BIG = "big.bin"
SIZE = (16 << 20) + 5
# What is no whole block at the end of a file cannot go past the page cache.
TAIL = 4
_LIBC = ctypes.CDLL(None, use_errno=True)
# As they are before a test replaces them.
_FSYNC, _FDATASYNC, _OPEN = os.fsync, os.fdatasync, os.open


def resident(path: Path) -> int:
    """Pages of a file that are in memory."""
    size = path.stat().st_size
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
        del first
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages)


def forget(path: Path) -> None:
    """Leave a file on the disk alone."""
    with path.open("rb") as stream:
        _FSYNC(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def big(world: Any) -> Path:
    world.publish({BIG: random.Random(5).randbytes(SIZE), "config.json": b"{}"})
    return world.dest / BIG


@pytest.fixture
def disk(tmp_path: Path) -> None:
    """A file in memory has no other place to be in."""
    if filesystem_of(str(tmp_path))[0] in MEMORY_FILESYSTEMS:
        pytest.skip("the temporary directory is in memory")


@pytest.fixture
def direct_io(disk: None, tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the temporary directory has no O_DIRECT")


@pytest.fixture
def no_direct_io(disk: None, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT. Data really is made to last there: what is not on the disk cannot be dropped."""

    def refuse(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return _OPEN(path, flags, mode, **options)

    monkeypatch.setattr(os, "fsync", _FSYNC)
    monkeypatch.setattr(os, "fdatasync", _FDATASYNC)
    monkeypatch.setattr(direct.os, "open", refuse)


def test_the_measure_sees_what_is_there(disk: None, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert resident(path) == (1 << 20) // mmap.PAGESIZE
    forget(path)
    assert resident(path) == 0


def test_a_fetch_goes_past_the_page_cache(direct_io: None, world: Any, big: Path) -> None:
    # Nothing is synced here, so that what was written through the page cache would still be in it.
    world.run()
    assert resident(big) <= TAIL
    assert world.held() == world.files


def test_a_verification_goes_past_the_page_cache(direct_io: None, world: Any, big: Path) -> None:
    world.run()
    forget(big)
    outcome = world.run(verify="full")
    assert BIG in outcome.hashed
    assert resident(big) <= TAIL


def test_without_direct_io_what_was_used_is_dropped(no_direct_io: None, world: Any, big: Path) -> None:
    world.run()
    assert resident(big) <= TAIL
    outcome = world.run(verify="full")
    assert BIG in outcome.hashed
    assert resident(big) <= TAIL
    assert world.held() == world.files
