# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Long work that goes on when the connection of who began it is gone, and that a later run finds again.

The work is a process of its own session that holds a lock as long as it lives and keeps a status file. The kernel ends
the lock with the process, so that a dead one is never taken for a slow one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import (
    FILE_MODE,
    make_dirs,
    read_json,
    utc_now,
    write_json,
)

_FLOCK = struct.Struct("@hhqqi")
_POLL = 0.05
_TAKEN = 3  # exit status of a worker that finds another one in its place
_MAX_DESCRIPTORS = 4096

#: Says what is going on, in words.
Tell = Callable[[str], None]


class BackgroundError(Exception):
    """The work ended without a result; the text says what is known."""


@dataclass
class Job:
    """One piece of work, by its name: the same work has the same name."""

    directory: str
    name: str
    advice: str = "What it has fetched is kept: run again to go on."  # to who finds it dead

    @property
    def status(self) -> str:
        return os.path.join(self.directory, f"{self.name}.json")

    @property
    def lock(self) -> str:
        return os.path.join(self.directory, f"{self.name}.lock")

    @property
    def log(self) -> str:
        return os.path.join(self.directory, f"{self.name}.log")


@dataclass
class Run:
    """A process that does the work."""

    job: Job
    ident: str
    attached: bool  # somebody else began it
    pid: int = 0

    def result(self) -> dict[str, Any] | None:
        """The status, once the work is done."""
        status = read_json(self.job.status)
        if not isinstance(status, dict):
            return None
        if status.get("id") and status["id"] != self.ident:
            # Ours has ended, and somebody began the same work again before we looked: theirs is as good.
            self.ident, self.attached, self.pid = status["id"], True, int(status.get("pid") or 0)
        return status if status.get("done") else None

    def state(self) -> str:
        status = read_json(self.job.status)
        return str(status.get("state", "")) if isinstance(status, dict) and status.get("id") == self.ident else ""

    def follow(self, seconds: float) -> dict[str, Any] | None:
        """Wait for the result, but not longer than this; nothing when the work goes on."""
        deadline = time.monotonic() + seconds
        while True:
            ident, alive = self.ident, self._alive()
            result = self.result()
            if result is not None:
                return result
            if not alive and self.ident == ident:
                raise BackgroundError(
                    f"The run in the background (process {self.pid or 'unknown'} on {socket.gethostname()}) ended "
                    f"without a word: it was killed, or this host was restarted. {self.job.advice} "
                    f"{_last_line(self.job.log)}".rstrip()
                )
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(_POLL, left))

    def _alive(self) -> bool:
        if self.pid and not self.attached:
            try:
                return os.waitpid(self.pid, os.WNOHANG) == (0, 0)
            except ChildProcessError:
                pass
        return holder_of(self.job.lock) is not None


def holder_of(path: str) -> int | None:
    """The process that holds a lock, 0 for one of another host; nothing when nobody does."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _whence, _start, _length, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else max(0, pid)


def running(job: Job) -> Run | None:
    """The run that is at this work now."""
    pid = holder_of(job.lock)
    status = read_json(job.status)
    if pid is None or not isinstance(status, dict) or status.get("done") or not status.get("id"):
        return None
    return Run(job, status["id"], True, int(status.get("pid") or pid))


def again(job: Job, ident: str) -> Run:
    """A run that was followed before."""
    status = read_json(job.status)
    pid = status.get("pid") if isinstance(status, dict) and status.get("id") == ident else 0
    return Run(job, ident, True, int(pid or 0))


def start(job: Job, work: Callable[[Tell], dict[str, Any]], patience: float = 30.0) -> Run:
    """Begin the work, or attach to who has begun it."""
    make_dirs(job.directory)
    deadline = time.monotonic() + patience
    while True:
        found = running(job)
        if found is not None:
            return found
        if holder_of(job.lock) is None:
            ident = secrets.token_hex(8)
            pid = os.fork()
            if pid == 0:
                _child(job, ident, work)
            run = Run(job, ident, False, pid)
            while True:
                # In this order: short work can begin and be done between the two looks.
                ended, code = os.waitpid(pid, os.WNOHANG)
                status = read_json(job.status)
                if isinstance(status, dict) and status.get("id") == ident:
                    return run
                if ended:
                    break
                time.sleep(_POLL / 5)
            exit_code = os.waitstatus_to_exitcode(code)
            if exit_code == 0:
                return run
            if exit_code != _TAKEN:
                raise BackgroundError(f"The run in the background could not begin. {_last_line(job.log)}".rstrip())
        if time.monotonic() > deadline:
            raise BackgroundError(f"Another run holds {job.lock} and says nothing: end it.")
        time.sleep(_POLL)


def _child(job: Job, ident: str, work: Callable[[Tell], dict[str, Any]]) -> None:
    """Never returns: what called us belongs to the process that goes on in front."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.closerange(3, _MAX_DESCRIPTORS)
        _redirect(job.log)
        lock = os.open(job.lock, os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            code = _TAKEN if error.errno in (errno.EACCES, errno.EAGAIN) else 1
            raise
        code = _serve(job, ident, work)
    except BaseException:  # noqa: BLE001  (there is nobody above to tell it to)
        if code != _TAKEN:
            traceback.print_exc()
    finally:
        os._exit(code)


def _redirect(log: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, FILE_MODE)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _serve(job: Job, ident: str, work: Callable[[Tell], dict[str, Any]]) -> int:
    about: dict[str, Any] = {
        "schema": 1,
        "id": ident,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": utc_now(),
        "done": False,
        "state": "starting",
    }

    def tell(state: str) -> None:
        about["state"] = state
        # A full disk must not end the work for the sake of its report.
        with contextlib.suppress(OSError):
            write_json(job.status, about, lasting=False)

    tell("starting")
    try:
        about["result"] = work(tell)
    except BaseException as error:  # noqa: BLE001  (whoever follows is told)
        traceback.print_exc()
        about["result"] = {"failed": True, "msg": f"{type(error).__name__}: {error}"}
    about["done"] = True
    tell("done")
    return 0


def _last_line(log: str) -> str:
    try:
        with open(log, encoding="utf-8", errors="replace") as stream:
            lines = stream.read(65536).strip().splitlines()
    except OSError:
        return ""
    return f"Its last word: {lines[-1]}" if lines else ""
