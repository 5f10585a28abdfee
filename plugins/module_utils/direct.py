# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read and write big files past the page cache.

A checkpoint is larger than what it pushes out of memory is worth. Where the file system knows O_DIRECT, the bytes go
between the disk and our buffer and nowhere else, which also saves the processor a copy. Where it does not, they go
through the page cache, and what has been used is dropped from there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from typing import Any

#: What O_DIRECT wants memory, offset and length to be multiples of, on every disk we know.
ALIGN = 4096
BUFFER = 2 << 20
# For all buffers that are in use at once, however many cores or connections there are.
_ALL_BUFFERS = 64 << 20
_LEAST_BUFFER = 128 << 10

# Answers of file systems and devices that cannot do it, or not with this alignment.
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_DROP_AFTER = 32 << 20


def whole_blocks(count: int) -> int:
    """The part of a length or offset that is whole blocks."""
    return count - count % ALIGN


def buffer_size(count: int) -> int:
    """How large each of so many buffers may be."""
    return max(_LEAST_BUFFER, min(BUFFER, whole_blocks(_ALL_BUFFERS // max(1, count))))


class Buffers:
    """Aligned buffers that are used again and again, so that their memory is asked for once."""

    def __init__(self, size: int = BUFFER) -> None:
        self.size = size
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self) -> memoryview:
        with self._lock:
            if self._free:
                return self._free.pop()
        # A private mapping begins at a page.
        return memoryview(mmap.mmap(-1, self.size))

    def give(self, buffer: memoryview) -> None:
        with self._lock:
            self._free.append(buffer)


class DirectFile:
    """A file that is read and written past the page cache where that can be done."""

    def __init__(self, path: str, flags: int, mode: int = 0o644) -> None:
        self.path = path
        self.direct = True
        try:
            self.descriptor = os.open(path, flags | os.O_DIRECT, mode)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self.direct = False
            self.descriptor = os.open(path, flags, mode)
        self._dropped = 0

    def fileno(self) -> int:
        return self.descriptor

    def read(self, buffer: memoryview, offset: int) -> int:
        """Bytes from an offset that is a whole number of blocks, into the start of an aligned buffer."""
        return self._try(os.preadv, [buffer], offset)

    def write(self, data: memoryview, offset: int) -> int:
        """Bytes of an aligned buffer, at an offset of whole blocks; less than a block only without O_DIRECT."""
        if self.direct and len(data) % ALIGN:
            self._give_up()
        return self._try(os.pwrite, data, offset)

    def _try(self, call: Any, data: Any, offset: int) -> int:
        try:
            return call(self.descriptor, data, offset)
        except OSError as error:
            if not self.direct or error.errno not in _REFUSALS:
                raise
        self._give_up()
        return call(self.descriptor, data, offset)

    def _give_up(self) -> None:
        """Go through the page cache from now on."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False

    def drop(self, upto: int, *, at_once: bool = False) -> None:
        """Leave the memory of what was used, up to an offset, to others. What is not on the disk yet stays."""
        if self.direct:
            return
        if upto - self._dropped >= _DROP_AFTER or (at_once and upto > self._dropped):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, self._dropped, upto - self._dropped, os.POSIX_FADV_DONTNEED)
            self._dropped = whole_blocks(upto)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
