# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Receipts: proof that a file was hashed, valid as long as nothing about the file has changed.

Size, modification time, change time, inode and allocated blocks all have to be as they were. The change time is what
catches an edit in place whose modification time was put back, blocks what catches a hole.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.direct import Buffers, DirectFile, buffer_size
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import Digest, Entry
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import read_json, utc_now, write_json

SCHEMA = 1
FIELDS = ("size", "mtime_ns", "ctime_ns", "ino", "blocks")
_MOST_THREADS = 64


class ChangedError(Exception):
    """A file changed while it was being hashed."""


class StoppedError(Exception):
    """Asked to stop."""


def _ignore(_count: int) -> None:
    pass


def _never() -> bool:
    return False


def proof_of(stats: os.stat_result) -> dict[str, int]:
    return {
        "size": stats.st_size,
        "mtime_ns": stats.st_mtime_ns,
        "ctime_ns": stats.st_ctime_ns,
        "ino": stats.st_ino,
        "blocks": stats.st_blocks,
    }


class Receipts:
    """The receipts of one destination for one revision; every change is on disk before the call returns.

    What was proven for another revision is hashed again for this one.
    """

    def __init__(
        self, path: str, revision: str, *, temporary: str | None = None, guard: Callable[[], None] = lambda: None
    ) -> None:
        self._path = path
        self._revision = revision
        self._temporary = temporary
        self._guard = guard
        self._lock = threading.Lock()
        stored = read_json(path)
        valid = isinstance(stored, dict) and stored.get("schema") == SCHEMA and isinstance(stored.get("files"), dict)
        self._files: dict[str, dict[str, Any]] = stored["files"] if valid else {}

    def get(self, name: str) -> dict[str, Any] | None:
        receipt = self._files.get(name)
        return receipt if isinstance(receipt, dict) else None

    def matches(self, name: str, path: str, entry: Entry) -> dict[str, Any] | None:
        """The receipt, if it is about this content and the file is as it was."""
        receipt = self.get(name)
        if receipt is None or receipt.get("revision") != self._revision or receipt.get("size") != entry.size:
            return None
        right = receipt.get("sha256") == entry.sha256 if entry.sha256 else receipt.get("blob") == entry.blob
        if not right:
            return None
        try:
            proof = proof_of(os.stat(path))
        except OSError:
            return None
        return receipt if all(receipt.get(field) == proof[field] for field in FIELDS) else None

    def put(self, name: str, stats: os.stat_result, digest: Digest, source: str) -> None:
        receipt = {
            **proof_of(stats),
            "revision": self._revision,
            "sha256": digest.sha256,
            "blob": digest.blob,
            "hashed": utc_now(),
            "source": source,
        }
        with self._lock:
            self._files[name] = receipt
            self._write()

    def items(self) -> list[tuple[str, dict[str, Any]]]:
        with self._lock:
            return [(name, receipt) for name, receipt in self._files.items() if isinstance(receipt, dict)]

    def intact(self, name: str, path: str) -> bool:
        """Whether a file is as its receipt says, whatever it should be."""
        receipt = self.get(name)
        try:
            proof = proof_of(os.stat(path))
        except OSError:
            return False
        return receipt is not None and all(receipt.get(field) == proof[field] for field in FIELDS)

    def adopt(self, name: str, stats: os.stat_result, receipt: Mapping[str, Any], source: str) -> None:
        """The receipt of a file that is another one's second name, with the time at which that one was hashed."""
        with self._lock:
            self._files[name] = {**receipt, **proof_of(stats), "revision": self._revision, "source": source}
            self._write()

    def refresh(self, changed: Mapping[str, os.stat_result]) -> None:
        """Files whose bytes were left alone while the number of their names changed, and so their change time."""
        with self._lock:
            for name, stats in changed.items():
                self._files[name] = {**self._files[name], **proof_of(stats)}
            if changed:
                self._write()

    def drop(self, name: str) -> None:
        """A file was found to be wrong, whatever its receipt says."""
        with self._lock:
            if self._files.pop(name, None) is not None:
                self._write()

    def _write(self) -> None:
        self._guard()
        write_json(self._path, {"schema": SCHEMA, "files": self._files}, temporary=self._temporary)


def hash_file(
    path: str,
    entry: Entry,
    *,
    buffers: Buffers | None = None,
    stopped: Callable[[], bool] = lambda: False,
    advance: Callable[[int], None] = _ignore,
    enough: Callable[[], bool] = lambda: False,
) -> tuple[Digest, os.stat_result] | None:
    """Digest of a file that holds still meanwhile, as the disk has it, and the file's state at that time.

    Nothing when C(enough) said in the middle that this is no time for it.
    """
    digest = Digest(entry)
    buffers = buffers or Buffers()
    file = DirectFile(path, os.O_RDONLY)
    buffer = buffers.take()
    try:
        before = os.fstat(file.descriptor)
        offset = 0
        while offset < before.st_size:
            if stopped():
                raise StoppedError
            if enough():
                return None
            count = file.read(buffer, offset)
            if not count:
                break
            digest.update(buffer[:count])
            offset += count
            advance(count)
            # Reading a checkpoint through must not push everything else out of memory.
            file.drop(offset)
        file.drop(offset, at_once=True)
        after = os.fstat(file.descriptor)
    finally:
        buffers.give(buffer)
        file.close()
    if proof_of(before) != proof_of(after) or offset != after.st_size:
        raise ChangedError(f"{path} changed while it was read: something else writes to it.")
    return digest, after


def reading_threads(files: int) -> int:
    """Twice as many as there are cores: while one waits for the disk, another one hashes."""
    return max(1, min(files, 2 * len(os.sched_getaffinity(0)), _MOST_THREADS))


def hash_files(
    jobs: Iterable[tuple[str, Entry]],
    *,
    threads: int | None = None,
    done: Callable[[Entry, Digest, os.stat_result], None],
    stopped: Callable[[], bool] = lambda: False,
    enough: Callable[[], bool] = lambda: False,
    advance: Callable[[int], None] = _ignore,
    claim: Callable[[Entry], bool] = lambda _entry: True,
) -> list[Entry]:
    """Hash files in parallel (hashing leaves the interpreter free); each result is handed over as it comes.

    When C(enough) says so, no other file is begun, and those in work are given up without a verdict, all but the first
    one: so there is always something done, and in the order of the jobs nothing is put off for ever. Files that
    C(claim) says are somebody else's are returned.
    """
    ordered = list(jobs)
    threads = threads or reading_threads(len(ordered))
    buffers = Buffers(buffer_size(threads))
    failed = threading.Event()
    others: list[Entry] = []

    def one(number: int) -> None:
        path, entry = ordered[number]
        over = enough if number else _never
        if over():
            return
        if failed.is_set() or stopped():
            raise StoppedError
        if not claim(entry):
            others.append(entry)
            return
        try:
            hashed = hash_file(
                path,
                entry,
                buffers=buffers,
                stopped=lambda: failed.is_set() or stopped(),
                advance=advance,
                enough=over,
            )
            if hashed is not None:
                done(entry, *hashed)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(max_workers=threads) as pool:
        futures = [pool.submit(one, number) for number in range(len(ordered))]
    errors = [error for future in futures if (error := future.exception())]
    real = [error for error in errors if not isinstance(error, StoppedError)]
    if real or errors:
        raise (real or errors)[0]
    return others
