# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One host at work in a directory that several hosts see, and another one when that host is gone.

A lock of the file system is not enough for that: some network file systems let every host have it, others keep it for a
host that will never come back. What all of them do on the server, and for one of two at once, is to rename a file. So
the lease is one file, and its name says all: it is free, or whose it is and how often that one has been heard of. The
holder renames it again and again. Who wants it watches the name, and when it has stayed the same for long enough by its
own clock, which nobody can set, renames it to its own. That fails when the holder was heard of after all, whatever an
old listing in a cache says, and the holder's next renaming fails when the lease was taken from it.

A holder that lost its lease may not know yet, or have bytes on their way to the server. It cannot spoil anything: what
it writes to is in a directory of its own, which its successor copies from and never writes to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import (
    StorageError,
    boot_id,
    host_id,
    make_dirs,
    read_json,
    sync_dir,
    utc_now,
    write_json,
)

FREE = "free"
_DIRECTORY = "lease"
_HOLDERS = "holders"
_BEATS = 8  # in the time after which a holder is taken for gone
_POLL = 0.5
_TRIES = 10
_LOOK = ".look."


def look_again(directory: str, token: str) -> None:
    """Make a client of a network file system ask what is in a directory.

    It believes for up to a minute what it knew, also that a file is not there. That ends when it changes the directory.
    """
    path = os.path.join(directory, _LOOK + token)
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        os.unlink(path)


class LeaseLostError(StorageError):
    """Another host is at work in the place of this one."""


def leased(private: str) -> bool:
    """Whether hosts have ever shared the directory that this is the private one of."""
    return os.path.isdir(os.path.join(private, _DIRECTORY))


def held(private: str) -> bool:
    """Whether it is somebody's, dead or alive."""
    try:
        return FREE not in os.listdir(os.path.join(private, _DIRECTORY))
    except OSError:
        return False


class Lease:
    """The lease of one destination, for one run."""

    def __init__(
        self,
        private: str,
        timeout: float,
        *,
        state: Callable[[], str] = lambda: "",
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.token = secrets.token_hex(8)
        self.seen: set[str] = set()  # other holders that were met while waiting
        self.lost = False
        self.inherited: list[str] = []  # directories of holders that may still write to them
        self._private = private
        self._directory = os.path.join(private, _DIRECTORY)
        self._timeout = timeout
        self._state = state
        self._on_lost = on_lost
        self._beat = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def work(self) -> str:
        """The holder's own directory: nobody else writes there."""
        return self._work_of(self.token)

    def _work_of(self, token: str) -> str:
        return os.path.join(self._private, _HOLDERS, token)

    # To have it

    def prepare(self) -> None:
        """Make the lease where there is none. It comes into being free, and whole."""
        for _try in range(_TRIES):
            if self._names():
                return
            self._sweep()
            own = f"{self._directory}.{self.token}"
            make_dirs(own)
            os.close(os.open(os.path.join(own, FREE), os.O_WRONLY | os.O_CREAT, 0o644))
            try:
                # Works only where there is no directory with anything in it.
                os.rename(own, self._directory)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
                shutil.rmtree(own, ignore_errors=True)
                time.sleep(_POLL / _TRIES)
        if not self._names():
            raise StorageError(f"{self._directory} cannot be made: this file system does not rename directories.")

    def acquire(
        self,
        on_wait: Callable[[str], None] | None = None,
        *,
        meanwhile: Callable[[str], None] = lambda _token: None,
    ) -> None:
        """Wait until it is free or its holder is gone, for as long as the holder is heard of; C(meanwhile) may help."""
        watched, since = "", time.monotonic()
        while True:
            for directory in (self._private, self._directory):
                look_again(directory, self.token)
            name = self._current()
            if name == FREE:
                if self._take(name):
                    break
                continue
            if name and name != watched:
                watched, since = name, time.monotonic()
            silent = time.monotonic() - since
            if name:
                token = name.partition(".")[0]
                who = read_json(os.path.join(self._work_of(token), "holder.json"))
                if (silent >= self._timeout or self._dead(who)) and self._take(name):
                    break
                self.seen.add(token)
                if on_wait:
                    on_wait(self._described(who, silent))
                meanwhile(token)
            elif silent >= self._timeout:
                self.prepare()
            time.sleep(min(_POLL, self._timeout / _BEATS))
        self._begin()

    def _begin(self) -> None:
        make_dirs(self.work)
        about = {"host": socket.gethostname(), "id": host_id(), "boot": boot_id(), "pid": os.getpid()}
        write_json(os.path.join(self.work, "holder.json"), {**about, "since": utc_now()}, lasting=False)
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()
        self._inherit()

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._directory) if not name.startswith(".")]
        except FileNotFoundError:
            return []

    def _sweep(self) -> None:
        """What somebody who was killed while looking has left, where the lease itself is not any more."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                # Nothing else: a lease that is being renamed may be in no listing.
                if name.startswith(_LOOK):
                    os.unlink(os.path.join(self._directory, name))

    def _current(self) -> str | None:
        """The name of the lease; nothing while it is being renamed."""
        names = self._names()
        return names[0] if len(names) == 1 else None

    def _take(self, name: str) -> bool:
        return self._rename(name, f"{self.token}.0")

    def _rename(self, old: str, new: str) -> bool:
        target = os.path.join(self._directory, new)
        try:
            os.rename(os.path.join(self._directory, old), target)
        except FileNotFoundError:
            # A network file system may ask twice, and be told of the first time only here.
            return os.path.lexists(target)
        return True

    @staticmethod
    def _dead(who: Any) -> bool:
        """Whether the holder was a run of this host and boot: whoever asks has this host's lock, so that it is gone."""
        return isinstance(who, dict) and who.get("id") == host_id() and who.get("boot") == boot_id() != "unknown"

    def _described(self, who: Any, silent: float) -> str:
        try:
            text = f"another run on {who['host']} (process {who['pid']}, since {who['since']})"
        except (KeyError, TypeError):
            text = "another run"
        if silent >= self._timeout / 2:
            return f"{text}, not heard of for {silent:.0f} s and replaced after {self._timeout:.0f} s"
        state = self._state()
        return f"{text}, {state}" if state else text

    # To keep it

    def renew(self) -> None:
        """Be heard of; an error when the lease is another one's by now."""
        with self._lock:
            if not self.lost:
                self.lost = not self._rename(f"{self.token}.{self._beat}", f"{self.token}.{self._beat + 1}")
                self._beat += 1
            lost = self.lost
        if lost:
            self._on_lost()
            raise LeaseLostError(self.reason)

    def gone(self) -> bool:
        """Whether it was lost, also when nobody has noticed yet."""
        with contextlib.suppress(LeaseLostError, OSError):
            self.renew()
        return self.lost

    @property
    def reason(self) -> str:
        return (
            f"This host was not heard of for {self._timeout:.0f} s, so that another one has taken over the work in "
            f"{os.path.dirname(self._private)}: it was halted, or the shared file system did not answer. Nothing is "
            "spoilt: run again, or raise shared_timeout when that happens often."
        )

    def _keep(self) -> None:
        while not self._ended.wait(self._timeout / _BEATS):
            try:
                self.renew()
            except LeaseLostError:
                return
            except OSError:
                # The file system has its moments. Whether the lease is lost, it says itself as soon as it answers.
                continue

    # What others leave

    def _inherit(self) -> None:
        """Take over half fetched files: as they are where nobody can write to them any more, else to be copied."""
        self._move_parts(self._private, self.work)
        for token in sorted(os.listdir(os.path.join(self._private, _HOLDERS))):
            other = self._work_of(token)
            if token == self.token:
                continue
            if self._dead(read_json(os.path.join(other, "holder.json"))):
                self._move_parts(other, self.work)
                shutil.rmtree(other, ignore_errors=True)
            else:
                self.inherited.append(other)
        for name in os.listdir(self._private):
            # Of somebody who was killed while it made the lease that is there.
            if name.startswith(f"{_DIRECTORY}."):
                shutil.rmtree(os.path.join(self._private, name), ignore_errors=True)

    @staticmethod
    def _move_parts(source: str, target: str) -> None:
        source, target = os.path.join(source, "parts"), os.path.join(target, "parts")
        make_dirs(target)
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(source)):
                with contextlib.suppress(OSError):
                    os.rename(os.path.join(source, name), os.path.join(target, name))

    def bequeath(self) -> None:
        """All is done: nobody needs what earlier holders have left."""
        for other in self.inherited:
            shutil.rmtree(other, ignore_errors=True)

    # To give it up

    def release(self) -> None:
        """Leave it, and what was begun, to the next one. Nothing may write to this holder's files any more."""
        self._ended.set()
        if self._thread:
            self._thread.join()
        with contextlib.suppress(OSError, LeaseLostError):
            self.renew()
            self._move_parts(self.work, self._private)
            shutil.rmtree(self.work, ignore_errors=True)
            sync_dir(self._private)
            self._rename(f"{self.token}.{self._beat}", FREE)


def copies_of(inherited: Sequence[str]) -> list[str]:
    """Directories with half fetched files to copy from."""
    return [os.path.join(other, "parts") for other in inherited]
