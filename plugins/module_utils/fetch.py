# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fetch files so that each of them is either not there or right.

One connection per file, many files at once. Bytes are hashed as they arrive and written past the page cache to a
preallocated file under a private name. A journal records how far the data is written, and how far it is known to be on
the disk: a fetch that was killed starts again from the former, after a crash of the host from the latter, in both cases
after hashing what it has once more, since a digest's state cannot be stored. A file gets its final name when size and
digest have been proven and the data is on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.direct import (
    Buffers,
    DirectFile,
    buffer_size,
    whole_blocks,
)
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.exchange import GRANTED, HERE, Exchange
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import (
    Backoff,
    Body,
    Floor,
    HubError,
    Source,
    TransientError,
    wrong_digest,
)
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import Digest, Entry
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.pace import WINDOW, Governor, Throttle
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import StoppedError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import (
    FILE_MODE,
    boot_id,
    duration,
    human,
    make_dirs,
    sync_dir,
    utc_now,
    write_json,
)

_NAME_LENGTH = 150
_REPORT_SECONDS = 1.0
_FLUSH_POLL = 0.25
_LOOK_AGAIN = 0.1
_NEAR_RETRIES = 1  # there is always another source


class FetchError(Exception):
    """A file could not be fetched; the text names it and says why."""


@dataclass
class Options:
    """How to fetch."""

    connections: int = 8  # to begin with
    max_connections: int = 8  # as long as more of them bring more
    retries: int = 8
    backoff: float = 1.0
    rate_limit: int = 0  # bytes per second over all connections; 0 is none
    min_rate: int = 0  # bytes per second and connection below which it is given up; 0 is none
    min_rate_seconds: float = 30.0  # of waiting for bytes
    # Data that may have to be fetched again after a crash of the host; after a kill it is what was in the buffers.
    flush_bytes: int = 64 << 20
    flush_seconds: float = 2.0


@dataclass
class Task:
    """One file to fetch to its final name."""

    entry: Entry
    final: str
    # Looks at the proven file before it gets its name; its result goes to Fetcher's done.
    inspect: Callable[[str], Any] | None = None
    resumed: int = 0
    fetched: int = 0
    near: int = 0  # of the fetched bytes, those from a near source
    waited: float = 0.0  # seconds in which the other side had the turn
    kept: tuple[Part, Digest] | None = None  # of a connection that was closed to have fewer of them
    place: int = 0  # in the list
    begun: bool = False
    named: bool = False  # it has its final name


@dataclass
class Progress:
    """How far a run is: written to a file that anybody can read, and that never is half written."""

    path: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    state: str = "starting"
    bytes_total: int = 0
    bytes_done: int = 0
    bytes_fetched: int = 0
    bytes_near: int = 0  # of those, from near sources
    files_total: int = 0
    files_done: int = 0
    connections: int = 0
    temporary: str | None = None
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

    def advance(self, entry: Entry, count: int, *, fetched: bool = True, near: bool = False) -> None:
        with self._lock:
            self._active[entry.path][0] += count
            self.bytes_done += count
            if fetched:
                self.bytes_fetched += count
            if near:
                self.bytes_near += count

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
                "connections": self.connections,
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
            write_json(self.path, self.snapshot(), lasting=False, temporary=self.temporary)

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
        state = str(progress["state"])
        if state not in ("fetching", "hashing") or not progress["bytes_total"]:
            return state
        share = 100 * progress["bytes_done"] / progress["bytes_total"]
        words = [
            f"{state} {human(progress['bytes_done'])} of {human(progress['bytes_total'])} ({share:.1f} %)",
            f"{human(progress['rate'])}/s",
            f"{progress['files_done']} of {progress['files_total']} files",
        ]
        if progress["seconds_left"] is not None:
            words.append(f"{duration(progress['seconds_left'])} left")
        return ", ".join(words)
    except (KeyError, TypeError):
        return ""


class Part:
    """A file on its way: data under a private name, a buffer of what comes next, and a journal of how far it is."""

    def __init__(self, directory: str, entry: Entry, buffers: Buffers) -> None:
        self.path = part_path(directory, entry)
        self.journal = self.path + ".journal"
        self.entry = entry
        self.position = 0  # bytes that are here, in the file or in the buffer
        self.synced_at = self.stored_at = time.monotonic()
        self._buffers = buffers
        self._base = 0  # where in the file the buffer begins, always whole blocks
        self._written = self._durable = 0
        self._lock = threading.RLock()  # against syncing a file that is being closed or begun anew
        self._journal_lock = threading.Lock()
        self._record = -1
        self._closed = False
        self._file = DirectFile(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        self._buffer = buffers.take()
        try:
            os.fchmod(self._file.descriptor, FILE_MODE)
            size = os.fstat(self._file.descriptor).st_size
            self.position = self._written = self._durable = min(read_journal(self.journal), size, entry.size)
            self._base = whole_blocks(self.position)
            if size != entry.size:
                os.ftruncate(self._file.descriptor, entry.size)
            self._allocate()
            self._record = os.open(self.journal, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        except BaseException:
            self.close()
            raise

    def _allocate(self) -> None:
        # No room is found out here, and not after most of the bytes have come.
        if not self.entry.size:
            return
        try:
            os.posix_fallocate(self._file.descriptor, 0, self.entry.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise

    def rehash(self, digest: Digest, advance: Callable[[int], None], stop: threading.Event) -> None:
        """Feed what is there into the digest, and what is no whole block into the buffer."""
        done = count = 0
        while done < self.position:
            if stop.is_set():
                raise StoppedError
            count = min(self._file.read(self._buffer, done), self.position - done)
            if not count or (count % len(self._buffer) and done + count < self.position):
                raise FetchError(f"{self.path} ended while it was read.")
            digest.update(self._buffer[:count])
            done += count
            advance(count)
            self._file.drop(done)
        tail = self.position - self._base
        self._buffer[:tail] = bytes(self._buffer[count - tail : count])

    def copy(
        self, parts: str, digest: Digest, advance: Callable[[int], None], stop: threading.Event, options: Options
    ) -> None:
        """Begin with what somebody else has of the file, who may still write to it: what is hashed is what is kept."""
        path = part_path(parts, self.entry)
        try:
            there = min(read_journal(path + ".journal"), os.stat(path).st_size, self.entry.size)
            other = DirectFile(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            while self.position < there:
                if stop.is_set():
                    raise StoppedError
                count = min(other.read(self._buffer, self.position), there - self.position)
                if not count:
                    break
                digest.update(self._buffer[:count])
                self.took(count)
                advance(count)
                self.store(options)
                if self.position != self._base:
                    break  # less than a block, which is the end of what is there
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            # It went away: what has been read of it is right.
        finally:
            other.close()
        forget_part_in(parts, self.entry)

    def restart(self) -> None:
        with self._lock:
            self.position = self._base = self._written = self._durable = 0
            self._note()

    def room(self) -> memoryview:
        """Where the next bytes go."""
        return self._buffer[self.position - self._base : min(len(self._buffer), self.entry.size - self._base)]

    def took(self, count: int) -> None:
        self.position += count

    @property
    def full(self) -> bool:
        return self.position - self._base == len(self._buffer) or self.position == self.entry.size

    def store(self, options: Options, *, tail: bool = False) -> None:
        """Write what has come to the file: whole blocks, and only at the end what is less than one."""
        filled = self.position - self._base
        whole = whole_blocks(filled)
        self._write(self._buffer[:whole], self._base)
        if tail and filled > whole:
            self._write(self._buffer[whole:filled], self._base + whole)
        self._buffer[: filled - whole] = bytes(self._buffer[whole:filled])
        self._base += whole
        self.stored_at = time.monotonic()
        if not self._file.direct and self._written - self._durable > 2 * options.flush_bytes:
            # The disk does not keep up, and memory is not the place to wait in.
            self.sync()

    def _write(self, data: memoryview, offset: int) -> None:
        try:
            while data:
                count = self._file.write(data, offset)
                offset += count
                data = data[count:]
        finally:
            # A disk that fills in the middle has kept what came before.
            if offset > self._written:
                self._written = offset
                self._note()

    def due(self, options: Options) -> bool:
        """Whether the data should be made to last now."""
        unsynced = self._written - self._durable
        return unsynced >= options.flush_bytes or (
            unsynced > 0 and time.monotonic() - self.synced_at >= options.flush_seconds
        )

    def sync(self) -> None:
        """Data first, then the journal that speaks of it."""
        with self._lock:
            written = self._written
            if self._closed or written <= self._durable:
                return
            os.fdatasync(self._file.descriptor)
            self._durable = written
            self._note()
            os.fdatasync(self._record)
            self.synced_at = time.monotonic()
            # On the disk, not needed again before the engine reads it: leave the memory to others.
            self._file.drop(written)

    def _note(self) -> None:
        # One short record of fixed length; whatever it says, the digest decides.
        with self._journal_lock:
            os.pwrite(self._record, f"{self._durable:020d} {self._written:020d} {boot_id()}\n".encode(), 0)

    def put_down(self, options: Options) -> None:
        """Keep everything that has come for another run."""
        with contextlib.suppress(OSError):
            self.store(options, tail=True)
        with contextlib.suppress(OSError):
            self.sync()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._file.close()
            if self._record >= 0:
                os.close(self._record)
            self._buffers.give(self._buffer)

    def finish(self, final: str, aside: str) -> os.stat_result:
        """Give the file its name. A file that had the name before is kept aside until this moment and after it."""
        os.fsync(self._file.descriptor)
        self._file.drop(self.entry.size, at_once=True)
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


def forget_part(directory: str, entry: Entry) -> None:
    """Remove what was fetched of a file that is here by other means."""
    forget_part_in(parts_dir(directory), entry)


def forget_part_in(parts: str, entry: Entry) -> None:
    path = part_path(parts, entry)
    for name in (path, path + ".journal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


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
    """How many bytes of a half fetched file can be built upon."""
    try:
        with open(path, "rb") as stream:
            fields = stream.read(128).decode("ascii", "replace").split()
    except FileNotFoundError:
        return 0
    if not fields or not fields[0].isdecimal():
        return 0
    # What was written outlives its process, and only what was synced outlives the kernel.
    same_boot = len(fields) == 3 and fields[1].isdecimal() and fields[2] == boot_id() != "unknown"
    return max(int(fields[0]), int(fields[1])) if same_boot else int(fields[0])


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


class _YieldedError(Exception):
    """The connection was given up so that there is one less."""


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
        exchange: Exchange | None = None,
        work: str | None = None,
        copies: Sequence[str] = (),
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._sources = sources
        self._exchange = exchange
        self._directory = directory
        self._work_directory = work or directory  # for half fetched files
        self._parts = parts_dir(self._work_directory)
        self._copies = copies  # directories with half fetched files of others
        self._guard = guard  # raises when this run may not give a file its name
        self._bad = os.path.join(directory, "bad")
        self._options = options
        self._progress = progress
        self._stop = stop
        self._done = done
        self._throttle = Throttle(options.rate_limit, stop)
        self._buffers = Buffers(buffer_size(max(options.connections, options.max_connections)))
        self._governor = Governor(options.connections, options.max_connections)
        self._changed = threading.Condition()
        # All of these under the condition's lock.
        self._waiting: deque[Task] = deque()
        self._working = self._yielding = 0
        self._errors: list[BaseException] = []
        self._open_parts: set[Part] = set()
        self._open_bodies: set[Body] = set()

    def run(self, tasks: Sequence[Task]) -> None:
        """Fetch all tasks; the first one that cannot be had ends the others, which keep what they have."""
        make_dirs(self._parts)
        for place, task in enumerate(tasks):
            task.place = place
        self._waiting.extend(tasks)
        workers: list[threading.Thread] = []
        try:
            with self._flushed():
                self._steer(workers)
        except BaseException:
            self._stop.set()
            raise
        finally:
            self._end(workers)
        real = [error for error in self._errors if not isinstance(error, StoppedError)]
        if real or self._errors:
            raise (real or self._errors)[0]
        if self._stop.is_set() and self._waiting:
            raise StoppedError

    def _steer(self, workers: list[threading.Thread]) -> None:
        """Keep as many connections at work as are good, until there is nothing left to do."""
        window, fetched, near = time.monotonic(), self._progress.bytes_fetched, self._progress.bytes_near
        while True:
            with self._changed:
                while self._working < min(self._governor.target, self._working + len(self._waiting)):
                    self._working += 1
                    workers.append(threading.Thread(target=self._work, daemon=True))
                    workers[-1].start()
                if self._errors or self._stop.is_set() or not (self._working + self._yielding + len(self._waiting)):
                    return
                self._changed.wait(max(0.0, window + WINDOW - time.monotonic()))
                wanted = self._working + len(self._waiting)
            now = time.monotonic()
            if now - window >= WINDOW:
                rate = (self._progress.bytes_fetched - fetched) / (now - window)
                # While a near source gives, some connections are at that, and the rate says nothing about the line.
                if self._progress.bytes_near == near:
                    self._governor.observe(rate, wanted)
                self._progress.connections = self._governor.target
                window, fetched, near = now, self._progress.bytes_fetched, self._progress.bytes_near
                workers[:] = [worker for worker in workers if worker.is_alive()]

    def _end(self, workers: list[threading.Thread]) -> None:
        if self._errors:
            self._stop.set()
        if self._stop.is_set():
            with self._changed:
                bodies = list(self._open_bodies)
            for body in bodies:
                body.abort()
        for worker in workers:
            worker.join()
        for task in self._waiting:
            if task.kept:
                task.kept[0].put_down(self._options)
                task.kept[0].close()
                task.kept = None

    @contextlib.contextmanager
    def _flushed(self) -> Iterator[None]:
        """Make data last while it comes, beside the threads that fetch it."""
        ended = threading.Event()
        poll = max(0.01, min(_FLUSH_POLL, self._options.flush_seconds))

        def flush() -> None:
            while not ended.wait(poll):
                with self._changed:
                    parts = list(self._open_parts)
                for part in parts:
                    if part.due(self._options):
                        # Whatever is wrong with the disk is met by the thread that writes to it, and told by it.
                        with contextlib.suppress(OSError):
                            part.sync()

        thread = threading.Thread(target=flush, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _work(self) -> None:
        """What a thread does: one task after the other, while there are not too many threads."""
        counted = True
        try:
            while True:
                following = self._next()
                if following is None:
                    return
                task, sources = following
                try:
                    self._guarded(task, sources)
                except _YieldedError:
                    counted = False
                    with self._changed:
                        self._yielding -= 1
                        self._waiting.appendleft(task)
                    return
        except BaseException as error:  # noqa: BLE001  (told by the thread that waits for this one)
            with self._changed:
                self._errors.append(error)
        finally:
            with self._changed:
                self._working -= counted
                self._changed.notify_all()

    def _next(self) -> tuple[Task, Sequence[Source]] | None:
        """What to fetch now, and from where; nothing when this thread is not needed any more."""
        while True:
            with self._changed:
                if not self._waiting or self._errors or self._stop.is_set():
                    return None
                if self._working > self._governor.target:
                    return None
                exchange = self._exchange
                if exchange is None:
                    return self._waiting.popleft(), self._sources
                task = next((task for task in self._waiting if not exchange.taken(task.entry)), None)
                if task is None:
                    # The other host is at all that is left.
                    self._changed.wait(_LOOK_AGAIN)
                    continue
                self._waiting.remove(task)
            answer = exchange.claim(task.entry)
            if answer == GRANTED:
                return task, self._sources
            if answer == HERE:
                return task, [exchange.peer, *self._sources]
            with self._changed:
                later = (index for index, other in enumerate(self._waiting) if other.place > task.place)
                self._waiting.insert(next(later, len(self._waiting)), task)
                # The other host is at it, or cannot say yet: it says no more when it is asked again at once.
                self._changed.wait(_LOOK_AGAIN)

    def _guarded(self, task: Task, sources: Sequence[Source]) -> None:
        try:
            self._fetch(task, sources)
        except HubError as error:
            raise FetchError(f"{task.entry.path}: {error}") from error
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full and task.named:
                raise FetchError(
                    f"{task.entry.path}: it is whole and in its place, but there is no room left on the file system of "
                    f"{self._directory} for its receipt. Make room and run again: it is hashed then, and not fetched."
                ) from error
            if full:
                missing = task.entry.size - allocated(self._work_directory, task.entry)
                raise FetchError(
                    f"{task.entry.path}: no room left on the file system of {task.final} "
                    f"({human(missing)} of this file are missing). Make room and run again: what is there is kept."
                ) from error
            raise FetchError(
                f"{task.entry.path}: {error.strerror or error} ({error.filename or task.final})."
            ) from error

    def _fetch(self, task: Task, sources: Sequence[Source]) -> None:
        entry = task.entry
        rejected = os.path.join(self._bad, flat_name(entry) + ".fetched")
        # Bytes of one source may have been mixed with wrong ones of another: the last one gets a second chance.
        left = deque([*sources, sources[-1]])
        tries = 0
        while left:
            source = left.popleft()
            try:
                digest, part = self._receive(task, source)
            except HubError:
                if all(other is source for other in left):
                    raise
                continue
            tries += 1
            try:
                if not digest.right:
                    part.reject(rejected)
                    wrong = wrong_digest(entry, digest, source.name)
                    continue
                try:
                    details = task.inspect(part.path) if task.inspect else None
                except ValueError as error:
                    part.reject(rejected)
                    raise FetchError(
                        f"{entry.path} has the digest of the listing, but {error}. The bytes are in {rejected}."
                    ) from error
                self._guard()
                stats = part.finish(task.final, replaced_path(self._directory, entry))
                task.named = True
            finally:
                part.close()
                with self._changed:
                    self._open_parts.discard(part)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(rejected)
            self._done(task, stats, digest, source.name, details)
            self._progress.close(entry)
            return
        raise FetchError(f"{wrong} Fetched {tries} times; the bytes are in {rejected}.")

    def _receive(self, task: Task, source: Source) -> tuple[Digest, Part]:
        """The digest of all bytes of the file, and the part file that holds them."""
        part, digest = self._begin(task)
        try:
            self._receive_into(task, source, part, digest)
        except _YieldedError:
            task.kept = part, digest
            raise
        except BaseException:
            part.put_down(self._options)
            part.close()
            with self._changed:
                self._open_parts.discard(part)
            raise
        return digest, part

    def _begin(self, task: Task) -> tuple[Part, Digest]:
        """A part file and the digest of what is in it."""
        if task.kept:
            kept, task.kept = task.kept, None
            return kept
        entry = task.entry
        part = Part(self._parts, entry, self._buffers)
        digest = Digest(entry)
        self._progress.open(entry, 0)

        def advance(count: int) -> None:
            self._progress.advance(entry, count, fetched=False)

        try:
            part.rehash(digest, advance, self._stop)
            for parts in self._copies:
                if not part.position:
                    part.copy(parts, digest, advance, self._stop, self._options)
        except BaseException:
            part.close()
            raise
        # What is here when the next source is asked, this run has fetched itself.
        if not task.begun:
            task.begun, task.resumed = True, part.position
        with self._changed:
            self._open_parts.add(part)
        return part, digest

    def _receive_into(self, task: Task, source: Source, part: Part, digest: Digest) -> None:
        entry = task.entry
        backoff = Backoff(_NEAR_RETRIES if source.near else self._options.retries, self._options.backoff, self._stop)
        while part.position < entry.size:
            waited, before = task.waited, task.fetched
            try:
                body = source.open(entry, part.position)
                with self._changed:
                    self._open_bodies.add(body)
                try:
                    if body.start != part.position:
                        part.restart()
                        digest.restart()
                        self._progress.open(entry, 0)
                    self._copy(task, source, body, part, digest)
                finally:
                    with self._changed:
                        self._open_bodies.discard(body)
                    body.close()
            except TransientError as error:
                received = task.fetched - before
                # Only a connection that was worth having earns new tries.
                if received and received >= self._options.min_rate * (task.waited - waited):
                    backoff.reset()
                part.store(self._options)
                backoff.wait(error)
        part.store(self._options, tail=True)

    def _copy(self, task: Task, source: Source, body: Body, part: Part, digest: Digest) -> None:
        entry, options = task.entry, self._options
        floor = Floor(options.min_rate, options.min_rate_seconds)
        while part.position < entry.size:
            if self._stop.is_set():
                raise StoppedError
            if self._working > self._governor.target:
                part.store(options)
                if self._yield():
                    raise _YieldedError
            room = part.room()
            began = time.monotonic()
            try:
                count = body.readinto1(room)
            finally:
                now = time.monotonic()
                waited = now - began
                task.waited += waited
            if not count:
                raise TransientError(f"The server closed after {part.position} of {entry.size} bytes of {entry.path}.")
            digest.update(room[:count])
            part.took(count)
            task.fetched += count
            self._progress.advance(entry, count, near=source.near)
            if source.near:
                task.near += count
            else:
                self._throttle.take(count)
            if part.full or now - part.stored_at >= options.flush_seconds:
                part.store(options)
            floor.took(entry.path, count, waited)
        # Bytes beyond the size are not even read: the digest says whether these are the right ones.

    def _yield(self) -> bool:
        """Whether it is this thread that ends."""
        with self._changed:
            if self._working <= self._governor.target:
                return False
            # Counted off here, so that no second thread ends for the same reason.
            self._working -= 1
            self._yielding += 1
            return True
