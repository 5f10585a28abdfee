# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the checkpoint code asks of a file system: whole files or none, room beforehand, one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

FILE_MODE = 0o644
DIR_MODE = 0o755
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "rootfs", "devtmpfs"})
_OCTAL = re.compile(r"\\([0-7]{3})")
_POLL_SECONDS = 0.5
_FLOCK = struct.Struct("@hhqqi")


class StorageError(Exception):
    """The destination cannot be used; the text says why and what to do."""


def utc_now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@functools.cache
def boot_id() -> str:
    """What no two boots of any hosts have in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return "unknown"


def host_id() -> str:
    """What no two hosts have in common: the name too, since a copied disk has a copied machine-id."""
    try:
        with open("/etc/machine-id", encoding="ascii") as stream:
            machine = stream.read().strip()
    except (OSError, ValueError):
        machine = ""
    return hashlib.sha256(f"{socket.gethostname()}\0{machine}".encode()).hexdigest()[:16]


def human(count: float) -> str:
    """Bytes in words, decimal units as disks and checkpoints are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB" if count < 10 else f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds in words, as precise as anybody wants to know."""
    seconds = round(seconds)
    if seconds < 100:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def make_dirs(path: str) -> None:
    """Create a directory and its parents, readable by all whatever the umask is."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:
            # Somebody else has made it meanwhile; or it is something else, whose mode is not ours to change.
            check_directories(directory)
        else:
            os.chmod(directory, DIR_MODE)


def check_directories(path: str) -> None:
    """An error when something that is no directory is in the way of one."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        raise StorageError(f"{path} is no directory, but has to be one: move it away, or set dest to another path.")


def sync_dir(path: str) -> None:
    """Make names in a directory last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such call for directories.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_atomic(path: str, data: bytes, *, lasting: bool = True, temporary: str | None = None) -> None:
    """The whole content under the name, or the old one: never a part of it.

    There is one writer at a time, so that the temporary name can be a fixed one: what a killed run leaves is used up by
    the next one.
    """
    temporary = temporary or f"{path}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        try:
            os.fchmod(descriptor, FILE_MODE)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if lasting:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if lasting:
        sync_dir(os.path.dirname(path))


def write_json(path: str, value: Any, *, lasting: bool = True, temporary: str | None = None) -> None:
    data = json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"
    write_atomic(path, data, lasting=lasting, temporary=temporary)


def read_json(path: str) -> Any:
    """The parsed file; nothing when it is absent or not JSON (all of ours can be made again)."""
    try:
        with open(path, "rb") as stream:
            return json.load(stream)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def existing_parent(path: str) -> str:
    """The nearest directory that is there, links resolved: its file system will hold the path."""
    path = os.path.realpath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def filesystem_of(path: str, mounts: str | None = None) -> tuple[str, str]:
    """Type and mount point of the file system that holds a path."""
    path = existing_parent(path)
    if mounts is None:
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
                mounts = stream.read()
        except OSError:
            return "unknown", path
    best = ("unknown", "/")
    for line in mounts.splitlines():
        before, _separator, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # A later line of the same mount point covers the earlier one.
        if inside and len(point) >= len(best[1]):
            best = (after.split(" ")[0], point)
    return best


def check_filesystem(path: str, allow_memory: bool) -> None:
    """Refuse to put a checkpoint into memory."""
    kind, point = filesystem_of(path)
    if kind in MEMORY_FILESYSTEMS and not allow_memory:
        raise StorageError(
            f"{path} is on {kind} ({point}), which is memory and lost at the next boot: "
            "set dest to a directory on a disk, or allow_tmpfs if this is what you want."
        )


def why_no_room(path: str, missing: int, mounts: str | None = None) -> str | None:
    """Why the given number of bytes does not fit; nothing when it does."""
    if missing <= 0:
        return None
    parent = existing_parent(path)
    stats = os.statvfs(parent)
    free = stats.f_bavail * stats.f_frsize
    spare = min(missing // 20, 10**9)
    if missing + spare <= free:
        return None
    kind, point = filesystem_of(parent, mounts)
    return (
        f"{path} needs {human(missing)} more ({human(spare)} spare on top), but {point} ({kind}) has "
        f"{human(free)} free: {missing + spare - free} bytes are missing. Make room or set dest to another file system."
    )


class Lock:
    """One writer per destination.

    lockf, because it reaches across hosts on the network file systems where flock does not. The lock ends with the
    process, however that ends; the text in the file only says whose it is.
    """

    def __init__(self, path: str, state: Callable[[], str] | None = None) -> None:
        self._path = path
        self._state = state or (lambda: "")
        self._descriptor: int | None = None

    def acquire(self, timeout: float, on_wait: Callable[[str], None] | None = None) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            self._wait(descriptor, timeout, on_wait)
            who = {"host": socket.gethostname(), "pid": os.getpid(), "since": utc_now()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(who).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _wait(self, descriptor: int, timeout: float, on_wait: Callable[[str], None] | None) -> None:
        deadline = time.monotonic() + timeout
        while not self._try(descriptor):
            holder = self._holder(descriptor)
            if on_wait:
                on_wait(holder)
            left = deadline - time.monotonic()
            if left <= 0:
                raise StorageError(
                    f"{os.path.dirname(os.path.dirname(self._path))} is in use by {holder}. "
                    f"Waited {timeout:.0f} s; wait for that run, end it, or raise lock_timeout."
                )
            time.sleep(min(_POLL_SECONDS, left))

    def held(self) -> bool:
        """Whether some process has it, found out without touching anything. Nobody has a lock that was never made."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_rest = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        finally:
            os.close(descriptor)
        return kind != fcntl.F_UNLCK

    def _try(self, descriptor: int) -> bool:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise StorageError(
                f"{self._path} cannot be locked ({error.strerror}): mount its file system with locks, which need not "
                "reach across hosts."
            ) from error
        return True

    def _holder(self, descriptor: int) -> str:
        try:
            who = json.loads(os.pread(descriptor, 4096, 0))
            text = f"another run on {who['host']} (process {who['pid']}, since {who['since']})"
        except (ValueError, KeyError, TypeError):
            text = "another run"
        state = self._state()
        return f"{text}, {state}" if state else text

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None


@contextlib.contextmanager
def locked(lock: Lock, timeout: float, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    lock.acquire(timeout, on_wait)
    try:
        yield
    finally:
        lock.release()
