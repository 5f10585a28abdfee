# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of one revision as the Hub lists them: names checked, sizes and digests kept."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PRIVATE_DIR = ".kimi-k3"
SUMMARY_NAME = "checkpoint.json"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_MAX_COMPONENT = 255


class ListingError(ValueError):
    """The listing cannot be used; the text says why."""


@dataclass(frozen=True)
class Entry:
    """One file: its size and the digest that proves it (SHA-256 for LFS files, git's blob SHA-1 for the others)."""

    path: str
    size: int
    sha256: str | None = None
    blob: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"path": self.path, "size": self.size, "sha256": self.sha256, "blob": self.blob}

    @property
    def digest(self) -> str:
        """The digest in words, for messages and names."""
        return f"sha256:{self.sha256}" if self.sha256 else f"git-blob:{self.blob}"


class Digest:
    """Digests of one file, fed piece by piece."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.restart()

    def restart(self) -> None:
        """Forget what has been fed."""
        self._sha256 = hashlib.sha256()
        self._blob = None
        if not self._entry.sha256:
            # git's object identifier, which protects nothing here but against accidents; there is no other one.
            self._blob = hashlib.sha1(f"blob {self._entry.size}\0".encode(), usedforsecurity=False)

    def update(self, data: Any) -> None:
        self._sha256.update(data)
        if self._blob is not None:
            self._blob.update(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def blob(self) -> str | None:
        return self._blob.hexdigest() if self._blob is not None else None

    @property
    def found(self) -> str:
        return f"git-blob:{self.blob}" if self._blob is not None else f"sha256:{self.sha256}"

    @property
    def right(self) -> bool:
        return self.found == self._entry.digest


def why_unsafe(path: Any) -> str | None:
    """Why a name must not be used as a path below the destination; nothing when it may."""
    if not isinstance(path, str) or not path:
        return "is empty or no text"
    if path.startswith("/"):
        return "is absolute"
    try:
        encoded = [part.encode() for part in path.split("/")]
    except UnicodeEncodeError:
        return "is not valid Unicode"
    parts = path.split("/")
    if ".." in parts:
        return "leaves the destination"
    if "." in parts or "" in parts:
        return "has an empty component"
    if any(ord(char) < 32 or ord(char) == 127 for char in path):
        return "has control characters"
    if any(len(part) > _MAX_COMPONENT for part in encoded):
        return f"has a component of more than {_MAX_COMPONENT} bytes"
    if parts[0] == PRIVATE_DIR or path == SUMMARY_NAME:
        return "is a name this collection uses itself"
    return None


def parse_tree(items: Iterable[Any]) -> list[Entry]:
    """Entries of the Hub's tree listing, all pages together."""
    entries = []
    for item in items:
        if not isinstance(item, Mapping):
            raise ListingError(f"the listing has an entry that is no object: {item!r:.80}")
        if item.get("type", "file") != "file":
            continue
        lfs = item.get("lfs") or {}
        sha256 = str(lfs.get("oid") or "").removeprefix("sha256:") or None
        entries.append(_entry(item.get("path"), lfs.get("size", item.get("size")), sha256, item.get("oid")))
    return check_entries(entries)


def parse_stored(items: Iterable[Any]) -> list[Entry]:
    """Entries as this collection stored them."""
    return check_entries(_entry(item["path"], item["size"], item["sha256"], item["blob"]) for item in items)


def _entry(path: Any, size: Any, sha256: str | None, blob: str | None) -> Entry:
    reason = why_unsafe(path)
    if reason:
        raise ListingError(f"the listing names a file {path!r} that {reason}: refused.")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ListingError(f"the listing gives no size for {path}.")
    if sha256 is not None:
        if not _SHA256.fullmatch(sha256):
            raise ListingError(f"the listing gives {sha256!r:.80} as SHA-256 of {path}.")
        return Entry(path, size, sha256, None)
    if not isinstance(blob, str) or not _SHA1.fullmatch(blob):
        raise ListingError(f"the listing gives no digest for {path}.")
    return Entry(path, size, None, blob)


def check_entries(entries: Iterable[Entry]) -> list[Entry]:
    """Sorted entries, or an error when two of them cannot both exist in one directory."""
    result = sorted(entries, key=lambda entry: entry.path)
    paths = {entry.path for entry in result}
    if len(paths) != len(result):
        twice = next(a.path for a, b in itertools.pairwise(result) if a.path == b.path)
        raise ListingError(f"the listing names {twice} twice.")
    for path in paths:
        parent = path.rpartition("/")[0]
        while parent:
            if parent in paths:
                raise ListingError(f"the listing names {parent} as a file and as a directory.")
            parent = parent.rpartition("/")[0]
    return result
