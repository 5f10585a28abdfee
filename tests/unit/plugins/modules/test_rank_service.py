# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.modules import rank_service
from ansible_collections.baremetal.kimi_k3.plugins.modules.rank_service import File

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from run_module import run_module


def entry(path, content="x", mode="0644"):
    return {"path": path, "content": content, "mode": mode}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry("relative")], "no absolute, plain path"),
        ([entry("/a/../b")], "no absolute, plain path"),
        ([entry("/a", mode="u=rw")], "no octal number"),
        ([entry("/a", mode="4755")], "no octal number"),
        ([entry("/a"), entry("/a")], "in the set twice"),
    ],
)
def test_what_cannot_be_written_is_refused(entries, expected):
    with pytest.raises(ValueError, match=expected):
        rank_service.parse_files(entries, [])


def test_a_secret_is_for_its_owner_alone():
    assert rank_service.parse_files([], [{"path": "/s", "content": "k"}]) == [File("/s", b"k", 0o600, True)]


def test_digest_tells_sets_apart_and_ignores_their_order():
    one, two = File("/a", b"xy", 0o644, False), File("/b", b"", 0o644, False)
    digest = rank_service.set_digest([one, two])
    assert digest == rank_service.set_digest([two, one])
    others = [
        [one],
        [File("/a", b"x", 0o644, False), File("/b", b"y", 0o644, False)],
        [File("/a", b"xy", 0o600, False), two],
        [File("/a", b"xz", 0o644, False), two],
    ]
    assert len({digest, *map(rank_service.set_digest, others)}) == 5


def test_write_replaces_by_rename_with_the_mode_asked_for(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    file = File(str(path), b"one", 0o600, False)
    assert rank_service.read(file.path) is None
    rank_service.write(file)
    assert rank_service.read(file.path) == (b"one", 0o600)
    before = path.stat().st_ino
    rank_service.write(file._replace(content=b"two", mode=0o644))
    assert rank_service.read(file.path) == (b"two", 0o644)
    assert path.stat().st_ino != before
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    file = File(str(tmp_path / "file"), b"old", 0o644, False)
    rank_service.write(file)

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        rank_service.write(file._replace(content=b"new"))
    assert rank_service.read(file.path) == (b"old", 0o644)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_umask_does_not_matter(tmp_path):
    old = os.umask(0o077)
    try:
        rank_service.write(File(str(tmp_path / "file"), b"", 0o644, False))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def test_differences_hide_secrets_and_show_modes():
    secret = File("/s", b"new-secret", 0o600, True)
    shown = rank_service.difference(secret, (b"old-secret", 0o600))
    assert "old-secret" not in str(shown)
    assert "new-secret" not in str(shown)
    assert shown["before"] != shown["after"]
    plain = File("/p", b"same", 0o644, False)
    assert rank_service.difference(plain, (b"same", 0o600))["after"] == "mode: 0644\n"
    assert rank_service.difference(plain, None)["after"] == "same"
    program = plain._replace(brief=True)
    assert rank_service.difference(program, None)["before"] == ""
    assert rank_service.difference(program, None)["after"].startswith("sha256: ")


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Arguments of the module, and a systemctl that knows whether it has read the unit as it is."""
    programs, unit, read = tmp_path / "bin", tmp_path / "kimi-k3.service", tmp_path / "read"
    programs.mkdir()
    (programs / "systemctl").write_text(
        f"""#!/bin/sh
echo "$*" >> {tmp_path}/calls
case "$1" in
  show) cmp -s {unit} {read} && echo no || echo yes;;
  is-enabled) echo enabled;;
  daemon-reload) [ ! -e {tmp_path}/broken ] && cp {unit} {read};;
esac
"""
    )
    (programs / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    return {"files": [entry(str(unit), "[Service]\nExecStart=/bin/true\n")], "digest_file": str(tmp_path / "digest")}


def reloads(tmp_path):
    return (tmp_path / "calls").read_text().split("\n").count("daemon-reload")


def test_a_unit_that_systemd_has_not_read_is_read_by_the_next_run(tmp_path, host):
    (tmp_path / "broken").touch()
    assert "'systemctl daemon-reload' failed" in run_module("rank_service", host)["msg"]
    assert not (tmp_path / "digest").exists()
    (tmp_path / "broken").unlink()
    assert run_module("rank_service", host, check_mode=True)["changed"]
    assert reloads(tmp_path) == 1
    again = run_module("rank_service", host)
    assert again["changed"]
    assert again["written"] == [str(tmp_path / "digest")]
    assert reloads(tmp_path) == 2
    assert not run_module("rank_service", host)["changed"]
    assert reloads(tmp_path) == 2
    # Changed by hand and back: the files are right, what systemd has in memory is not.
    (tmp_path / "read").write_text("another")
    assert run_module("rank_service", host)["changed"]
    assert reloads(tmp_path) == 3
