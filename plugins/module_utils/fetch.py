# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fetch files so that each of them is either not there or right.

One connection per file, many files at once. Bytes are hashed as they arrive and written to a preallocated file under a
private name; a journal records how far the data is known to be on the disk. A fetch that was killed starts again from
there, after hashing what it has once more, since a digest's state cannot be stored. A file gets its final name when
size and digest have been proven and the data is on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import (
    Backoff,
    Body,
    HubError,
    Source,
    TransientError,
    wrong_digest,
)
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import Digest, Entry
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import StoppedError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import (
    FILE_MODE,
    human,
    make_dirs,
    sync_dir,
    utc_now,
    write_json,
)

_BUFFER = 1 << 20
_NAME_LENGTH = 150
_REPORT_SECONDS = 1.0
_DIGEST_TRIES = 2


class FetchError(Exception):
    """A file could not be fetched; the text names it and says why."""


@dataclass
class Options:
    """How to fetch."""

    connections: int = 8
    retries: int = 8
    backoff: float = 1.0
    rate_limit: int = 0  # bytes per second over all connections; 0 is none
    min_rate: int = 0  # bytes per second and connection below which it is given up; 0 is none
    min_rate_seconds: float = 30.0  # of waiting for bytes
    flush_bytes: int = 64 << 20  # data that may have to be fetched again after a kill
    flush_seconds: float = 1.0


@dataclass
class Task:
    """One file to fetch to its final name."""

    entry: Entry
    final: str
    # Looks at the proven file before it gets its name; its result goes to Fetcher's done.
    inspect: Callable[[str], Any] | None = None
    resumed: int = 0
    fetched: int = 0
    waited: float = 0.0  # seconds in which the other side had the turn


class Throttle:
    """A limit of bytes per second, shared by all connections."""

    def __init__(self, rate: int, stop: threading.Event) -> None:
        self._rate = rate
        self._stop = stop
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int) -> None:
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            delay = self._free_at - now
        if self._stop.wait(delay):
            raise StoppedError


@dataclass
class Progress:
    """How far a run is: written to a file that anybody can read, and that never is half written."""

    path: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    state: str = "starting"
    bytes_total: int = 0
    bytes_done: int = 0
    bytes_fetched: int = 0
    files_total: int = 0
    files_done: int = 0
    _active: dict[str, list[int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _started: float = field(default_factory=time.monotonic)
    _since: str = field(default_factory=utc_now)
    _last: tuple[float, int] = (0.0, 0)

    def begin(self, state: str, files: int = 0, size: int = 0) -> None:
        with self._lock:
            self.state = state
            self.files_total, self.bytes_total = files, size
            self.files_done = self.bytes_done = 0
            self._started = time.monotonic()
            self._last = (self._started, 0)
        self.write()

    def open(self, entry: Entry, done: int) -> None:
        with self._lock:
            previous = self._active.pop(entry.path, [0])[0]
            self._active[entry.path] = [done, entry.size]
            self.bytes_done += done - previous

    def advance(self, entry: Entry, count: int, fetched: bool = True) -> None:
        with self._lock:
            self._active[entry.path][0] += count
            self.bytes_done += count
            if fetched:
                self.bytes_fetched += count

    def count(self, count: int) -> None:
        """Bytes that were read without being fetched."""
        with self._lock:
            self.bytes_done += count

    def close(self, entry: Entry) -> None:
        """A file is done."""
        with self._lock:
            self._active.pop(entry.path, None)
            self.files_done += 1

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            now = time.monotonic()
            before, done = self._last
            rate = (self.bytes_done - done) / (now - before) if now > before else 0.0
            self._last = (now, self.bytes_done)
            average = self.bytes_done / (now - self._started) if now > self._started else 0.0
            left = self.bytes_total - self.bytes_done
            return {
                "schema": 1,
                **self.about,
                "state": self.state,
                "files_total": self.files_total,
                "files_done": self.files_done,
                "bytes_total": self.bytes_total,
                "bytes_done": self.bytes_done,
                "bytes_fetched": self.bytes_fetched,
                "rate": round(rate),
                "average_rate": round(average),
                "seconds_left": round(left / average) if average > 0 else None,
                "active": {path: {"done": done, "size": size} for path, (done, size) in sorted(self._active.items())},
                "started": self._since,
                "updated": utc_now(),
            }

    def write(self) -> None:
        if self.path is None:
            return
        # A full disk must not end the run for the sake of its report.
        with self._writing, contextlib.suppress(OSError):
            write_json(self.path, self.snapshot(), lasting=False)

    @contextlib.contextmanager
    def reported(self) -> Any:
        """Keep the file up to date while the block runs."""
        ended = threading.Event()

        def report() -> None:
            while not ended.wait(_REPORT_SECONDS):
                self.write()

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.write()


def describe(progress: Any) -> str:
    """A progress file in a few words."""
    try:
        if progress["state"] != "fetching":
            return str(progress["state"])
        return f"fetching, {human(progress['bytes_done'])} of {human(progress['bytes_total'])}"
    except (KeyError, TypeError):
        return ""


class Part:
    """A file on its way: data under a private name, and a journal of how much of it is on the disk."""

    def __init__(self, directory: str, entry: Entry) -> None:
        self.path = part_path(directory, entry)
        self.journal = self.path + ".journal"
        self.entry = entry
        self.offset = 0
        self._flushed = 0
        self.flushed_at = time.monotonic()
        self._dirty = False
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        try:
            os.fchmod(self._descriptor, FILE_MODE)
            size = os.fstat(self._descriptor).st_size
            self.offset = self._flushed = min(read_journal(self.journal), size, entry.size)
            if size != entry.size:
                os.ftruncate(self._descriptor, entry.size)
            self._allocate()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _allocate(self) -> None:
        # No room is found out here, and not after most of the bytes have come.
        if not self.entry.size:
            return
        try:
            os.posix_fallocate(self._descriptor, 0, self.entry.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise

    def rehash(self, digest: Digest, advance: Callable[[int], None], stop: threading.Event) -> None:
        """Feed what is there into the digest."""
        buffer = memoryview(bytearray(_BUFFER))
        done = 0
        while done < self.offset:
            if stop.is_set():
                raise StoppedError
            count = os.preadv(self._descriptor, [buffer[: min(_BUFFER, self.offset - done)]], done)
            if not count:
                raise FetchError(f"{self.path} ended while it was read.")
            digest.update(buffer[:count])
            done += count
            advance(count)

    def restart(self) -> None:
        self.offset = self._flushed = 0
        self._write_journal()

    def append(self, data: memoryview, options: Options) -> None:
        while data:
            count = os.pwrite(self._descriptor, data, self.offset)
            self.offset += count
            data = data[count:]
        self._dirty = True
        if (
            self.offset - self._flushed >= options.flush_bytes
            or time.monotonic() - self.flushed_at >= options.flush_seconds
        ):
            self.flush()

    def flush(self) -> None:
        """Data first, then the journal that speaks of it."""
        if not self._dirty:
            return
        os.fdatasync(self._descriptor)
        self._write_journal()
        # On the disk, not needed again before the engine reads it: leave the memory to others.
        os.posix_fadvise(self._descriptor, self._flushed, self.offset - self._flushed, os.POSIX_FADV_DONTNEED)
        self._flushed = self.offset
        self.flushed_at = time.monotonic()
        self._dirty = False

    def _write_journal(self) -> None:
        descriptor = os.open(self.journal, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        try:
            # One short record of fixed length; whatever it says, the digest decides.
            os.pwrite(descriptor, f"{self.offset:020d}\n".encode(), 0)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def finish(self, final: str, aside: str) -> os.stat_result:
        """Give the file its name. A file that had the name before is kept aside until this moment and after it."""
        os.fsync(self._descriptor)
        self.close()
        parent = os.path.dirname(final)
        make_dirs(parent)
        if os.path.lexists(final):
            keep_aside(final, aside)
        os.replace(self.path, final)
        sync_dir(parent)
        self.forget_journal()
        return os.stat(final)

    def reject(self, aside: str) -> None:
        """Put wrong bytes aside."""
        self.close()
        make_dirs(os.path.dirname(aside))
        os.replace(self.path, aside)
        self.forget_journal()

    def forget_journal(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.journal)


def flat_name(entry: Entry) -> str:
    """A name for one content of one path, in one directory with all others."""
    identity = hashlib.sha256(f"{entry.path}\0{entry.size}\0{entry.digest}".encode()).hexdigest()[:12]
    base = entry.path.rpartition("/")[2].encode()[:_NAME_LENGTH].decode(errors="ignore")
    return f"{base}.{identity}"


def replaced_path(directory: str, entry: Entry) -> str:
    """Where a file goes that the entry's content has replaced."""
    return os.path.join(directory, "bad", flat_name(entry) + ".replaced")


def part_path(directory: str, entry: Entry) -> str:
    return os.path.join(directory, flat_name(entry) + ".part")


def parts_dir(directory: str) -> str:
    return os.path.join(directory, "parts")


def allocated(directory: str, entry: Entry) -> int:
    """Bytes that a half fetched file already occupies."""
    try:
        return min(entry.size, os.stat(part_path(parts_dir(directory), entry)).st_blocks * 512)
    except OSError:
        return 0


def journaled(directory: str, entry: Entry) -> int:
    """Bytes of a half fetched file that need not be fetched again."""
    path = part_path(parts_dir(directory), entry)
    try:
        return min(read_journal(path + ".journal"), os.stat(path).st_size, entry.size)
    except OSError:
        return 0


def forget_parts(directory: str, entries: Iterable[Entry]) -> None:
    """Remove half fetched files that are none of the entries'."""
    known = {os.path.basename(part_path("", entry)) for entry in entries}
    parts = parts_dir(directory)
    try:
        names = os.listdir(parts)
    except FileNotFoundError:
        return
    for name in names:
        if name.removesuffix(".journal") not in known:
            os.unlink(os.path.join(parts, name))


def read_journal(path: str) -> int:
    try:
        with open(path, "rb") as stream:
            text = stream.read(64).strip()
    except FileNotFoundError:
        return 0
    return int(text) if text.isdigit() else 0


def keep_aside(path: str, aside: str) -> None:
    """A second name for a file that is about to be replaced."""
    make_dirs(os.path.dirname(aside))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)
    try:
        os.link(path, aside, follow_symlinks=False)
    except OSError:
        # No hard links here: the name is free for a moment, which is better than losing the bytes.
        os.replace(path, aside)


class Fetcher:
    """Fetches tasks in parallel."""

    def __init__(
        self,
        sources: Sequence[Source],
        directory: str,
        *,
        options: Options,
        progress: Progress,
        stop: threading.Event,
        done: Callable[[Task, os.stat_result, Digest, str, Any], None],
    ) -> None:
        self._sources = sources
        self._directory = directory
        self._parts = parts_dir(directory)
        self._bad = os.path.join(directory, "bad")
        self._options = options
        self._progress = progress
        self._stop = stop
        self._done = done
        self._throttle = Throttle(options.rate_limit, stop)

    def run(self, tasks: Sequence[Task]) -> None:
        """Fetch all tasks; the first one that cannot be had ends the others, which keep what they have."""
        make_dirs(self._parts)
        futures: list[Future[None]] = []
        with ThreadPoolExecutor(max_workers=self._options.connections) as pool:
            try:
                futures = [pool.submit(self._guarded, task) for task in tasks]
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # Reached early on an error or on an interruption from outside.
                if not all(future.done() for future in futures) or any(future.exception() for future in futures):
                    self._stop.set()
                    for future in futures:
                        future.cancel()
        errors = [future.exception() for future in futures if not future.cancelled() and future.exception()]
        real = [error for error in errors if not isinstance(error, StoppedError)]
        if real or errors:
            raise (real or errors)[0]

    def _guarded(self, task: Task) -> None:
        try:
            self._fetch(task)
        except HubError as error:
            raise FetchError(f"{task.entry.path}: {error}") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                missing = task.entry.size - allocated(self._directory, task.entry)
                raise FetchError(
                    f"{task.entry.path}: no room left on the file system of {task.final} "
                    f"({human(missing)} of this file are missing). Make room and run again: what is there is kept."
                ) from error
            raise FetchError(
                f"{task.entry.path}: {error.strerror or error} ({error.filename or task.final})."
            ) from error

    def _fetch(self, task: Task) -> None:
        entry = task.entry
        rejected = os.path.join(self._bad, flat_name(entry) + ".fetched")
        for attempt in range(_DIGEST_TRIES):
            source = self._sources[attempt % len(self._sources)]
            part = Part(self._parts, entry)
            try:
                digest = self._receive(task, part, source)
                if not digest.right:
                    part.reject(rejected)
                    continue
                try:
                    details = task.inspect(part.path) if task.inspect else None
                except ValueError as error:
                    part.reject(rejected)
                    raise FetchError(
                        f"{entry.path} has the digest of the listing, but {error}. The bytes are in {rejected}."
                    ) from error
                stats = part.finish(task.final, replaced_path(self._directory, entry))
            finally:
                part.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(rejected)
            self._done(task, stats, digest, source.name, details)
            self._progress.close(entry)
            return
        raise FetchError(
            f"{wrong_digest(entry, digest, source.name)} Fetched {_DIGEST_TRIES} times; the bytes are in {rejected}."
        )

    def _receive(self, task: Task, part: Part, source: Source) -> Digest:
        """All bytes of the file in the part file, and their digest."""
        entry = task.entry
        digest = Digest(entry)
        self._progress.open(entry, 0)
        part.rehash(digest, lambda count: self._progress.advance(entry, count, fetched=False), self._stop)
        task.resumed += part.offset
        backoff = Backoff(self._options.retries, self._options.backoff, self._stop)
        while part.offset < entry.size:
            waited, before = task.waited, task.fetched
            try:
                body = source.open(entry, part.offset)
                try:
                    if body.start != part.offset:
                        part.restart()
                        digest = Digest(entry)
                        self._progress.open(entry, 0)
                    self._copy(task, body, part, digest)
                finally:
                    body.close()
            except TransientError as error:
                received = task.fetched - before
                # Only a connection that was worth having earns new tries.
                if received and received >= self._options.min_rate * (task.waited - waited):
                    backoff.reset()
                backoff.wait(error)
            finally:
                part.flush()
        return digest

    def _copy(self, task: Task, body: Body, part: Part, digest: Digest) -> None:
        entry, options = task.entry, self._options
        buffer = memoryview(bytearray(min(_BUFFER, max(1, entry.size))))
        window, received = task.waited, 0
        filled = 0

        def store() -> None:
            nonlocal filled
            digest.update(buffer[:filled])
            part.append(buffer[:filled], options)
            filled = 0

        try:
            while part.offset + filled < entry.size:
                if self._stop.is_set():
                    raise StoppedError
                began = time.monotonic()
                try:
                    count = body.readinto1(buffer[filled : min(len(buffer), entry.size - part.offset)])
                finally:
                    now = time.monotonic()
                    task.waited += now - began
                if not count:
                    raise TransientError(
                        f"The server closed after {part.offset + filled} of {entry.size} bytes of {entry.path}."
                    )
                filled += count
                received += count
                task.fetched += count
                self._progress.advance(entry, count)
                self._throttle.take(count)
                if filled == len(buffer) or now - part.flushed_at >= options.flush_seconds:
                    store()
                # Only the time spent waiting for bytes counts: a slow disk or a limit of our own is not their fault.
                spent = task.waited - window
                if options.min_rate and spent >= options.min_rate_seconds:
                    if received < options.min_rate * spent:
                        raise TransientError(
                            f"{entry.path} came at {human(received / spent)}/s, "
                            f"below the floor of {human(options.min_rate)}/s."
                        )
                    window, received = task.waited, 0
        finally:
            if filled:
                store()
        # Bytes beyond the size are not even read: the digest says whether these are the right ones.
