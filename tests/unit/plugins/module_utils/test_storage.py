# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import storage

HOLDER = """
import fcntl, json, sys
stream = open(sys.argv[1], "w+")
fcntl.lockf(stream, fcntl.LOCK_EX)
stream.write(json.dumps({"host": "rank7", "pid": 4711, "since": "2026-11-30T00:00:00Z"}))
stream.flush()
print("held", flush=True)
sys.stdin.read()
"""

MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:5 / /dev rw - devtmpfs udev rw
24 22 0:6 / /srv rw - xfs /dev/md0 rw
25 24 0:7 / /srv/with\\040space rw - tmpfs tmpfs rw
26 22 0:8 / /srv/covered rw - ext4 /dev/sdb rw
27 22 0:9 / /srv/covered rw shared:1 master:2 - tmpfs tmpfs rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/nowhere/at/all", ("ext4", "/")),
        ("/srv", ("xfs", "/srv")),
        ("/srv/kimi-k3/x", ("xfs", "/srv")),
        ("/srvx", ("ext4", "/")),
        ("/srv/with space/x", ("tmpfs", "/srv/with space")),
        ("/srv/covered", ("tmpfs", "/srv/covered")),
    ],
)
def test_the_file_system_that_holds_a_path(
    path: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "existing_parent", lambda path: path)
    assert storage.filesystem_of(path, MOUNTS) == expected


def test_links_are_followed_to_the_file_system_that_really_holds(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert storage.existing_parent(str(tmp_path / "link" / "a" / "b")) == str((tmp_path / "real").resolve())


def test_memory_is_refused_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "filesystem_of", lambda _path: ("tmpfs", "/memory"))
    with pytest.raises(storage.StorageError, match="is on tmpfs"):
        storage.check_filesystem(str(tmp_path), allow_memory=False)
    storage.check_filesystem(str(tmp_path), allow_memory=True)


def test_room_is_counted_before_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stats:
        f_bavail, f_frsize = 1000, 1000

    monkeypatch.setattr(storage.os, "statvfs", lambda _path: Stats)
    path = str(tmp_path / "not" / "yet")
    assert storage.why_no_room(path, 0) is None
    assert storage.why_no_room(path, 900_000) is None
    reason = storage.why_no_room(path, 1_000_000)
    assert reason is not None
    assert "50000 bytes are missing" in reason
    assert path in reason


def test_directories_are_open_to_readers(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        storage.make_dirs(str(tmp_path / "a" / "b"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755


def test_a_file_in_the_way_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    for path in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        for check in (storage.make_dirs, storage.check_directories):
            with pytest.raises(storage.StorageError, match=rf"^{tmp_path}/file is no directory, but has to be one: "):
                check(str(path))
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_a_directory_that_somebody_else_makes_meanwhile_keeps_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(path: str) -> None:
        real(path, 0o700)
        raise FileExistsError

    real = os.mkdir
    monkeypatch.setattr(storage.os, "mkdir", late)
    storage.make_dirs(str(tmp_path / "a"))
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    storage.write_atomic(str(path), b"old")

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        storage.write_atomic(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_json_reads_as_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert storage.read_json(str(path)) is None
    path.write_text("{half")
    assert storage.read_json(str(path)) is None
    storage.write_json(str(path), {"a": 1})
    assert storage.read_json(str(path)) == {"a": 1}


def test_the_lock_says_whose_it_is_and_ends_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "dest" / ".kimi-k3" / "lock"
    path.parent.mkdir(parents=True)
    waited: list[str] = []
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        lock = storage.Lock(str(path), lambda: "fetching, 1 of 2")
        with pytest.raises(storage.StorageError) as caught:
            lock.acquire(0, waited.append)
        assert "another run on rank7 (process 4711, since 2026-11-30T00:00:00Z), fetching, 1 of 2" in str(caught.value)
        assert waited
        assert lock.held()
        holder.kill()
    with storage.locked(lock, 5):
        assert f'"pid": {os.getpid()}' in path.read_text()
    assert path.read_text() == ""
    assert not lock.held()
    path.unlink()
    assert not lock.held()
    assert not path.exists(), "to look is not to touch"


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(storage.fcntl, "lockf", lockf)
    with pytest.raises(storage.StorageError, match=r"cannot be locked \(Function not implemented\): mount its file"):
        storage.Lock(str(tmp_path / "lock")).acquire(0)


def test_waiting_for_the_lock_ends_when_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        lock = storage.Lock(str(path))
        lock.acquire(30, lambda _who: holder.kill())
        lock.release()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (783_900_000_000, "783.9 GB"), (1.56e12, "1.56 TB")],
)
def test_bytes_in_words(count: float, text: str) -> None:
    assert storage.human(count) == text
