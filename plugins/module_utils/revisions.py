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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ansible_collections.baremetal.kimi_k3.plugins.module_utils import lease
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import PRIVATE_DIR, SUMMARY_NAME, Entry
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import Receipts
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import (
    Lock,
    StorageError,
    locked,
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
    def receipts(self) -> Receipts:
        return Receipts(os.path.join(self.private, "receipts.json"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether nobody else is at work in it, which then stays so."""
        try:
            with locked(Lock(os.path.join(self.private, "lock")), 0):
                yield not lease.held(self.private)
        except (StorageError, FileNotFoundError):
            yield False


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
) -> list[Entry]:
    """Take files that another revision holds proven, as hard links; those that were, or would be, taken."""
    left = {(entry.sha256, entry.size): entry for entry in wanted if entry.sha256}
    taken: list[Entry] = []
    for revision in others(dest, repository):
        if not left:
            break
        with revision.locked() as free:
            if not free:
                continue
            receipts = revision.receipts
            for name, receipt in receipts.items():
                entry = left.get((receipt.get("sha256"), receipt.get("size")))
                path = os.path.join(revision.path, name)
                if entry is None or os.path.islink(path):
                    continue
                if not receipts.matches(name, path, Entry(name, entry.size, entry.sha256)):
                    continue
                if not dry:
                    stats = _link(path, os.path.join(dest, entry.path), temporary)
                    if stats is None:
                        continue
                    receipts.refresh({name: stats})
                    linked(entry, stats, receipt, os.path.basename(revision.path))
                taken.append(left.pop((entry.sha256, entry.size)))
    return taken


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
        shared = _shared_inodes(revision.path)
        os.replace(revision.path, grave)
    valid = []
    for path, receipts in kept:
        names = [name for name, receipt in receipts.items() if receipt.get("ino") in shared]
        valid.append((path, receipts, [name for name in names if receipts.intact(name, os.path.join(path, name))]))
    shutil.rmtree(grave)
    sync_dir(parent)
    for path, receipts, names in valid:
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
