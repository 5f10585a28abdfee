# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What this machine can do at most: SHA-256 of what is in the processor's cache, and plain reading past the page cache.

ceiling.py hash BYTES        all cores hash as many bytes as that together, one MiB again and again
ceiling.py read FILE...      all cores read files, each byte once, with O_DIRECT
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

BLOCK = 1 << 20
READ = 4 << 20


def hash_memory(count: int) -> int:
    data = memoryview(bytearray(os.urandom(BLOCK)))
    digest = hashlib.sha256()
    for _block in range(count // BLOCK):
        digest.update(data)
    return count // BLOCK * BLOCK


def read_file(path: str) -> int:
    # Anonymous memory of mmap begins at a page, which O_DIRECT insists on.
    buffer = mmap.mmap(-1, READ)
    flags = os.O_RDONLY | os.O_DIRECT
    try:
        descriptor = os.open(path, flags)
    except OSError:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    total = 0
    try:
        while count := os.preadv(descriptor, [buffer], total):
            total += count
            if count % mmap.PAGESIZE:
                break
    finally:
        os.close(descriptor)
    return total


def main() -> None:
    what, rest = sys.argv[1], sys.argv[2:]
    cores = len(os.sched_getaffinity(0))
    began, spent = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(cores) as pool:
        if what == "hash":
            total = sum(pool.map(hash_memory, [int(rest[0]) // cores] * cores))
        else:
            total = sum(pool.map(read_file, rest))
    wall, cpu = time.monotonic() - began, time.process_time() - spent
    sys.stdout.write(json.dumps({"bytes": total, "wall_s": wall, "cpu_s": cpu, "threads": cores}) + "\n")


if __name__ == "__main__":
    main()
