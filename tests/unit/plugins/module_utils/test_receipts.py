# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import Entry
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import (
    ChangedError,
    Receipts,
    StoppedError,
    hash_file,
    hash_files,
)

DATA = b"x" * 10_000
REVISION = "a" * 40


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Entry, Path]:
    """A file with a receipt."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    entry = Entry("file", len(DATA), hashlib.sha256(DATA).hexdigest())
    book = tmp_path / "receipts.json"
    digest, stats = hash_file(str(path), entry)
    assert digest.right
    Receipts(str(book), REVISION).put("file", stats, digest, "found")
    return path, entry, book


def holds(stored: tuple[Path, Entry, Path]) -> bool:
    path, entry, book = stored
    return Receipts(str(book), REVISION).matches("file", str(path), entry) is not None


def test_a_receipt_holds_while_nothing_changes(stored: tuple[Path, Entry, Path]) -> None:
    assert holds(stored)
    stored[0].read_bytes()
    assert holds(stored)


def edit_in_place(path: Path) -> None:
    """The hard one: same size, and the modification time put back."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.write(b"y")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def copy_over(path: Path) -> None:
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(DATA)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize(
    "change",
    [
        edit_in_place,
        copy_over,
        Path.unlink,
        lambda path: path.write_bytes(DATA[:-1]),
        lambda path: path.chmod(0o600),
        lambda path: os.utime(path, (1, 1)),
    ],
)
def test_any_change_voids_the_receipt(stored: tuple[Path, Entry, Path], change: object) -> None:
    change(stored[0])
    assert not holds(stored)


def test_a_receipt_for_other_content_is_none(stored: tuple[Path, Entry, Path]) -> None:
    path, entry, book = stored
    assert not holds((path, Entry("file", entry.size, "0" * 64), book))
    assert not holds((path, Entry("file", entry.size, None, "0" * 40), book))
    assert not holds((path, Entry("file", entry.size + 1, entry.sha256), book))


def test_a_receipt_for_another_revision_is_none(stored: tuple[Path, Entry, Path]) -> None:
    path, entry, book = stored
    assert Receipts(str(book), "b" * 40).matches("file", str(path), entry) is None
    text = book.read_text()
    assert text.count(REVISION) == 1
    book.write_text(text.replace(f'"revision": "{REVISION}",', ""))
    assert not holds(stored), "nor one that does not say for which"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2, "files": {}}', '{"schema": 1, "files": {"file": 3}}'])
def test_a_broken_book_has_no_receipts(stored: tuple[Path, Entry, Path], text: str) -> None:
    stored[2].write_text(text)
    assert not holds(stored)


def test_a_file_that_changes_while_it_is_read_is_told(
    stored: tuple[Path, Entry, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, entry, _book = stored
    with pytest.raises(ChangedError, match="changed while it was read"):
        hash_file(str(path), entry, advance=lambda _count: path.chmod(0o640))


def test_hashing_many_reads_each_once(tmp_path: Path) -> None:
    entries = []
    for number in range(5):
        data = bytes([number]) * 3_000_000
        (tmp_path / str(number)).write_bytes(data)
        entries.append(Entry(str(number), len(data), hashlib.sha256(data).hexdigest()))
    counts: list[int] = []
    right: list[str] = []
    hash_files(
        [(str(tmp_path / entry.path), entry) for entry in entries],
        threads=3,
        done=lambda entry, digest, _stats: right.append(entry.path) if digest.right else None,
        advance=counts.append,
    )
    assert sorted(right) == ["0", "1", "2", "3", "4"]
    assert sum(counts) == 15_000_000


def test_when_it_is_enough_the_first_file_is_finished_and_no_other(tmp_path: Path) -> None:
    size, files = 8 << 20, 12
    names = [str(number) for number in range(files)]
    for name in names:
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    entries = [Entry(name, size, hashlib.sha256(bytes(size)).hexdigest()) for name in names]
    all_begun = threading.Barrier(files, timeout=30)
    begun: set[int] = set()
    read: list[int] = []

    def advance(count: int) -> None:
        read.append(count)
        # The time is over as soon as every thread has read the first piece of a file, as on a host of many cores.
        if threading.get_ident() not in begun:
            begun.add(threading.get_ident())
            all_begun.wait()

    done: list[str] = []
    hash_files(
        [(str(tmp_path / entry.path), entry) for entry in entries],
        threads=files,
        done=lambda entry, digest, _stats: done.append(entry.path) if digest.right else None,
        enough=lambda: len(begun) == files,
        advance=advance,
    )
    assert done == ["0"]
    assert sum(read) <= size + files * (2 << 20)


def test_hashing_can_be_stopped(stored: tuple[Path, Entry, Path]) -> None:
    with pytest.raises(StoppedError):
        hash_files([(str(stored[0]), stored[1])], threads=1, done=lambda *_: None, stopped=lambda: True)
