# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hash files of a shared directory on several hosts at once.

The host that holds the lease puts up a list. It and those that wait for it claim one file after the other by creating a
name, and the others write down what they found. What has been claimed by somebody who is not heard of any more, or was
another file than the one that the holder sees, is hashed by the holder itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.lease import look_again
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import Digest, Entry, ListingError, parse_stored
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import (
    ChangedError,
    hash_files,
    proof_of,
)
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import (
    FILE_MODE,
    make_dirs,
    read_json,
    write_json,
)

_DIRECTORY = "proving"
_LIST = "list.json"
_ALIVE = "alive."
_BEATS = 8
_POLL = 0.2


def forget(private: str) -> None:
    """Remove lists of holders that are gone."""
    shutil.rmtree(os.path.join(private, _DIRECTORY), ignore_errors=True)


@dataclass(frozen=True)
class Told:
    """A digest that another host has computed."""

    found: str
    sha256: str
    blob: str | None
    right: bool


class Board:
    """The list of one holder, and what has become of it."""

    def __init__(self, private: str, token: str, timeout: float) -> None:
        self._private = private
        self._token = token
        self._directory = os.path.join(private, _DIRECTORY, token)
        self._timeout = timeout
        self._numbers: dict[str, int] = {}

    # Whoever works on it

    def claim(self, entry: Entry) -> bool:
        """Whether it is ours to hash."""
        path = os.path.join(self._directory, f"{self._numbers[entry.path]}.claim")
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))
        except OSError:
            # Somebody has it, or the list is gone and with it the reason to hash.
            return False
        return True

    def _result(self, entry: Entry) -> str:
        return os.path.join(self._directory, f"{self._numbers[entry.path]}.json")

    # The holder

    def put_up(self, entries: Sequence[Entry]) -> None:
        """Begin a list; lists of earlier holders are of no use to anybody."""
        forget(self._private)
        make_dirs(self._directory)
        self._numbers = {entry.path: number for number, entry in enumerate(entries)}
        write_json(
            os.path.join(self._directory, _LIST), {"files": [entry.as_dict() for entry in entries]}, lasting=False
        )

    def take_down(self) -> None:
        forget(self._private)

    def collect(
        self,
        entries: Sequence[Entry],
        path_of: Callable[[Entry], str],
        done: Callable[[Entry, Any, os.stat_result], None],
        stopped: Callable[[], bool],
    ) -> list[Entry]:
        """Wait for what others have claimed; what is left over for the holder itself."""
        left, own = list(entries), []
        before: list[str] = []
        since = time.monotonic()
        while left and not stopped():
            look_again(self._directory, self._token)
            for entry in list(left):
                told = read_json(self._result(entry))
                if told is None:
                    continue
                left.remove(entry)
                stats = os.stat(path_of(entry))
                digest = _told(entry, told, proof_of(stats))
                if digest is None:
                    own.append(entry)
                else:
                    done(entry, digest, stats)
            names = sorted(name for name in os.listdir(self._directory) if not name.startswith("."))
            if names != before:
                before, since = names, time.monotonic()
            elif time.monotonic() - since >= self._timeout:
                break
            time.sleep(min(_POLL, self._timeout / _BEATS))
        return own + left

    # Those that wait

    def help(self, path_of: Callable[[Entry], str], stopped: Callable[[], bool], begin: Callable[[int], None]) -> int:
        """Hash what nobody has claimed; how many files that were."""
        listed = read_json(os.path.join(self._directory, _LIST))
        try:
            entries = sorted(parse_stored(listed["files"]), key=lambda entry: -entry.size)
            self._numbers = {item["path"]: number for number, item in enumerate(listed["files"])}
        except (KeyError, TypeError, ListingError):
            return 0
        if all(os.path.lexists(os.path.join(self._directory, f"{number}.claim")) for number in range(len(entries))):
            return 0
        begin(len(entries))
        count = 0

        def done(entry: Entry, digest: Digest, stats: os.stat_result) -> None:
            nonlocal count
            count += 1
            found = {"found": digest.found, "sha256": digest.sha256, "blob": digest.blob, "proof": proof_of(stats)}
            # The holder may be done without us.
            with contextlib.suppress(OSError):
                write_json(self._result(entry), found, lasting=False)

        with contextlib.suppress(OSError, ChangedError), self._alive():
            hash_files([(path_of(entry), entry) for entry in entries], done=done, stopped=stopped, claim=self.claim)
        return count

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        """Be heard of, by a name that changes."""
        name = _ALIVE + secrets.token_hex(8)
        ended = threading.Event()
        path = os.path.join(self._directory, f"{name}.0")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, FILE_MODE))

        def keep() -> None:
            beat, now = 0, path
            while not ended.wait(self._timeout / _BEATS):
                beat += 1
                following = os.path.join(self._directory, f"{name}.{beat}")
                with contextlib.suppress(OSError):
                    os.rename(now, following)
                    now = following
            with contextlib.suppress(OSError):
                os.unlink(now)

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _told(entry: Entry, told: Any, proof: dict[str, int]) -> Told | None:
    """What another host says of a file, when it speaks of the file that is here."""
    try:
        if told["proof"] != proof:
            return None
        found = str(told["found"])
        return Told(found, str(told["sha256"]), told["blob"], found == entry.digest)
    except (KeyError, TypeError):
        return None
