# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Revisions of one repository beside each other: what they have in common is held once, what is old goes.

They are directories with the names of commits in one directory. A file of one that another one needs becomes a hard
link. That changes the file's change time, which is part of its receipt, so the receipts of both are brought up to date.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.baremetal.kimi_k3.plugins.module_utils import lease
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import PRIVATE_DIR, SUMMARY_NAME, Entry
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import Receipts
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import (
    Lock,
    StorageError,
    read_json,
    sync_dir,
)

_REVISION = re.compile(r"[0-9a-f]{40}")
_REMOVING = ".removing-"
_MAX_TEXT = 64 << 20


@dataclass(frozen=True)
class Revision:
    """A directory that holds one."""

    path: str
    age: float  # when its summary was written

    @property
    def private(self) -> str:
        return os.path.join(self.path, PRIVATE_DIR)

    @property
    def receipts(self) -> Receipts | None:
        """Nothing where they cannot be read, which is no fault of the revision that asks."""
        try:
            return Receipts(os.path.join(self.private, "receipts.json"), os.path.basename(self.path))
        except OSError:
            return None

    @contextlib.contextmanager
    def locked(self, *, look: bool = False) -> Iterator[bool]:
        """Whether nobody else is at work in it, which then stays so. Who only looks touches nothing."""
        lock = Lock(os.path.join(self.private, "lock"))
        try:
            if look:
                free = not lock.held()
            else:
                lock.acquire(0)
                free = True
        except (StorageError, OSError):
            # In use, or not for us to write to: its files are left alone, and this run needs nothing of it.
            free = False
        try:
            yield free and not lease.held(self.private)
        finally:
            lock.release()


def others(dest: str, repository: str) -> list[Revision]:
    """Other revisions of the repository beside this one, the newest first."""
    parent, own = os.path.split(dest)
    if not _REVISION.fullmatch(own):
        return []
    found = []
    try:
        names = os.listdir(parent)
    except OSError:
        return []
    for name in names:
        path = os.path.join(parent, name)
        if name == own or not _REVISION.fullmatch(name) or os.path.islink(path):
            continue
        summary = os.path.join(path, SUMMARY_NAME)
        # One that cannot be read is none of ours.
        with contextlib.suppress(OSError):
            stored = read_json(summary)
            if isinstance(stored, dict) and stored.get("repository") == repository and stored.get("revision") == name:
                found.append(Revision(path, os.stat(summary).st_mtime))
    return sorted(found, key=lambda revision: -revision.age)


def surplus(dest: str, repository: str, keep: int, protect: Iterable[str]) -> list[Revision]:
    """Revisions beyond the number to keep, this one counted, that nobody uses."""
    if keep < 1:
        return []
    old = others(dest, repository)[keep - 1 :]
    if not old:
        return []
    used = users({revision.path for revision in old}, protect)
    return [revision for revision in old if revision.path not in used]


def users(paths: set[str], protect: Iterable[str] = (), proc: str = "/proc") -> set[str]:
    """Which of these directories are named in a file that says what is used, or used by a process."""
    needles = {path: {path.encode(), os.path.realpath(path).encode()} for path in paths}
    used: set[str] = set()

    def look(text: bytes) -> None:
        used.update(path for path, names in needles.items() if any(name in text for name in names))

    for file in protect:
        with contextlib.suppress(FileNotFoundError):
            look(_read(file))
    for process in os.listdir(proc):
        if not process.isdecimal() or int(process) == os.getpid():
            continue
        # A process that ends while it is looked at uses nothing.
        with contextlib.suppress(OSError):
            look(_read(f"{proc}/{process}/cmdline").replace(b"\0", b" "))
            look(_read(f"{proc}/{process}/maps"))
            for descriptor in os.listdir(f"{proc}/{process}/fd"):
                with contextlib.suppress(OSError):
                    look(os.fsencode(os.readlink(f"{proc}/{process}/fd/{descriptor}")))
    return used


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(_MAX_TEXT)


def link_equal(
    dest: str,
    repository: str,
    wanted: Iterable[Entry],
    *,
    temporary: str,
    dry: bool,
    linked: Callable[[Entry, os.stat_result, dict[str, Any], str], None],
    right: Callable[[list[tuple[str, Entry]]], set[str]] | None = None,
) -> list[Entry]:
    """Take files that another revision holds proven, as hard links; those that were, or would be, taken.

    Its receipts are the proof, unless C(right) is given: it hashes files and says which paths hold what they should.
    """
    left = {(entry.sha256, entry.size): entry for entry in wanted if entry.sha256}
    taken: list[Entry] = []
    for revision in others(dest, repository):
        if not left:
            break
        with revision.locked(look=dry) as free:
            if not free:
                continue
            receipts = revision.receipts
            if receipts is None:
                continue
            found = _proven(revision, receipts, left)
            good = right([(path, entry) for _name, path, entry, _receipt in found]) if right and found else None
            for name, path, entry, receipt in found:
                if good is not None and path not in good:
                    # The next run there is to find it, too.
                    with contextlib.suppress(OSError):
                        if not dry:
                            receipts.drop(name)
                    continue
                if not dry:
                    stats = _link(path, os.path.join(dest, entry.path), temporary)
                    if stats is None:
                        continue
                    # Without it the file is hashed again there, and nothing else is lost.
                    with contextlib.suppress(OSError):
                        receipts.refresh({name: stats})
                    linked(entry, stats, receipt, os.path.basename(revision.path))
                taken.append(left.pop((entry.sha256, entry.size)))
    return taken


def _proven(
    revision: Revision, receipts: Receipts, wanted: Mapping[tuple[str | None, int], Entry]
) -> list[tuple[str, str, Entry, dict[str, Any]]]:
    """The wanted files that a revision holds: name there, path, what it is wanted as, receipt."""
    found: dict[tuple[str | None, int], tuple[str, str, Entry, dict[str, Any]]] = {}
    for name, receipt in receipts.items():
        key = (receipt.get("sha256"), receipt.get("size"))
        entry, path = wanted.get(key), os.path.join(revision.path, name)
        if entry is None or key in found or os.path.islink(path):
            continue
        if receipts.matches(name, path, Entry(name, entry.size, entry.sha256)):
            found[key] = (name, path, entry, receipt)
    return list(found.values())


def _link(path: str, final: str, temporary: str) -> os.stat_result | None:
    """A second name for a file; nothing where that cannot be had."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        os.link(path, temporary, follow_symlinks=False)
        os.makedirs(os.path.dirname(final), exist_ok=True)
        os.replace(temporary, final)
        sync_dir(os.path.dirname(final))
    except OSError:
        # Another file system, one without links, or too many of them: it is fetched like any other.
        return None
    return os.stat(final)


def remove(revision: Revision, kept: Iterable[tuple[str, Receipts]]) -> bool:
    """Remove a revision, whole or not at all; whether it was."""
    parent, name = os.path.split(revision.path)
    grave = os.path.join(parent, _REMOVING + name)
    with revision.locked() as free:
        if not free:
            return False
        try:
            shared = _shared_inodes(revision.path)
            os.replace(revision.path, grave)
        except OSError:
            return False
    valid = []
    for path, receipts in kept:
        names = [name for name, receipt in receipts.items() if receipt.get("ino") in shared]
        valid.append((path, receipts, [name for name in names if receipts.intact(name, os.path.join(path, name))]))
    # What cannot be removed now is removed by a later run.
    shutil.rmtree(grave, ignore_errors=True)
    sync_dir(parent)
    for path, receipts, names in valid:
        # Without it the files are hashed again there, and nothing else is lost.
        with contextlib.suppress(OSError):
            receipts.refresh({name: os.stat(os.path.join(path, name)) for name in names})
    return True


def forget_removed(dest: str) -> None:
    """Finish what a run did that was killed while it removed a revision."""
    parent = os.path.dirname(dest)
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(_REMOVING) and _REVISION.fullmatch(name.removeprefix(_REMOVING)):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)


def _shared_inodes(path: str) -> set[int]:
    shared = set()
    for folder, _folders, files in os.walk(path):
        for name in files:
            stats = os.lstat(os.path.join(folder, name))
            if stats.st_nlink > 1:
                shared.add(stats.st_ino)
    return shared
