# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Revisions beside each other: what they share, and which of them go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import revisions as module
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.fetch import FetchError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import Nowhere
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import Lock, locked

SHARDS = [f"model-0000{number}-of-00005.safetensors" for number in range(1, 6)]


class Revisions:
    """A world in which each revision has the directory of its name."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.parent = world.dest.parent
        self.names: list[str] = []
        self.now = 1_700_000_000

    def add(self, text: str, **changes: Any) -> Any:
        """Fetch another revision, which differs in one file."""
        self.world.publish({**self.world.files, "config.json": json.dumps({"text": text}).encode()})
        self.names.append(self.world.commit)
        return self.again(**changes)

    def again(self, number: int = -1, **changes: Any) -> Any:
        self.world.commit = self.names[number]
        self.world.dest = self.parent / self.names[number]
        outcome = self.world.run(**changes)
        self.now += 1
        if not changes.get("check"):
            os.utime(self.world.dest / "checkpoint.json", (self.now, self.now))
        return outcome

    def there(self) -> list[int]:
        found = {path.name for path in self.parent.iterdir()}
        assert found <= set(self.names), "nothing is left on the way"
        return [number for number, name in enumerate(self.names) if name in found]

    def receipts_hold(self, number: int) -> bool:
        """Whether a run needs to hash nothing."""
        outcome = self.again(number, hub=Nowhere())
        return outcome.hashed == [] and outcome.verified.startswith("receipt")


@pytest.fixture
def several(world: Any) -> Revisions:
    return Revisions(world)


def test_what_is_equal_is_linked(several: Revisions) -> None:
    several.add("one")
    several.world.hub.clear_log()
    would = several.add("two", check=True)
    assert sorted(would.linked) == sorted([*SHARDS, "tiktoken.model"])
    assert "config.json" in would.fetch
    assert not (several.parent / several.names[1]).exists()
    outcome = several.again()
    assert outcome.linked == would.linked
    assert several.world.hub.count("cdn") == 0
    assert several.world.held() == several.world.files
    first, second = (several.parent / name for name in several.names)
    for name in outcome.linked:
        assert (first / name).stat().st_ino == (second / name).stat().st_ino
    receipt = json.loads((second / ".kimi-k3/receipts.json").read_text())["files"][SHARDS[0]]
    assert receipt["source"] == f"revision {several.names[0]}"
    assert several.receipts_hold(0)
    assert several.receipts_hold(1)


def test_what_is_not_proven_any_more_is_not_linked(several: Revisions) -> None:
    several.add("one")
    (several.world.dest / SHARDS[2]).touch()
    outcome = several.add("two")
    assert SHARDS[2] in outcome.fetch
    assert SHARDS[1] in outcome.linked
    assert several.world.held() == several.world.files


def test_a_repair_leaves_the_other_name_alone(several: Revisions) -> None:
    several.add("one")
    several.add("two")
    first = several.parent / several.names[0]
    second = several.parent / several.names[1]
    with (second / SHARDS[0]).open("r+b") as stream:
        stream.write(b"xx")
    assert several.again(1).replaced == [SHARDS[0]]
    assert (first / SHARDS[0]).stat().st_ino != (second / SHARDS[0]).stat().st_ino
    assert several.again(0).replaced == [SHARDS[0]], "and is found there by its receipt"
    assert several.world.held()[SHARDS[0]] == several.world.files[SHARDS[0]]


def test_where_links_cannot_be_had_it_is_fetched(several: Revisions, monkeypatch: pytest.MonkeyPatch) -> None:
    several.add("one")

    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(module.os, "link", refuse)
    outcome = several.add("two")
    assert outcome.linked == []
    assert several.world.held() == several.world.files


def test_a_revision_that_is_being_worked_on_is_not_taken_from(several: Revisions) -> None:
    several.add("one")
    lock = several.world.dest / ".kimi-k3" / "lock"
    holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX)\n"
        "print(1, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert several.add("two").linked == []
        process.kill()


def test_a_half_fetched_file_that_is_linked_leaves_no_part(several: Revisions) -> None:
    several.add("one")
    several.world.hub.fault("missing", path="config.json", times=1)
    original = module.link_equal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "link_equal", lambda *_a, **_k: [])
        several.world.hub.fault("stall", path=SHARDS[0], on="cdn", after=100_000)
        with pytest.raises(FetchError):
            several.add("two")
    assert module.link_equal is original
    several.again()
    assert list((several.world.dest / ".kimi-k3/parts").iterdir()) == []


def rot(path: Path) -> None:
    """Change a file below the file system: no time changes, and so its receipt agrees."""
    with path.open("r+b") as stream:
        stream.seek(1000)
        stream.write(b"rot")
    book = path.parent / ".kimi-k3" / "receipts.json"
    stored = json.loads(book.read_text())
    stored["files"][path.name].update(mtime_ns=path.stat().st_mtime_ns, ctime_ns=path.stat().st_ctime_ns)
    book.write_text(json.dumps(stored))


def test_full_verification_hashes_what_it_takes_over(several: Revisions) -> None:
    several.add("one")
    first = several.world.dest
    rot(first / SHARDS[2])
    would = several.add("two", verify="full", check=True)
    assert json.loads((first / ".kimi-k3/receipts.json").read_text())["files"].get(SHARDS[2])
    outcome = several.again(verify="full")
    for each in (would, outcome):
        assert SHARDS[2] in each.fetch
        assert sorted(each.linked) == sorted([*SHARDS[:2], *SHARDS[3:], "tiktoken.model"])
        assert set(each.linked) <= set(each.hashed)
        assert any(f"{first / SHARDS[2]} has the digest" in warning for warning in each.warnings)
    assert outcome.verified == "sha256"
    assert several.world.held() == several.world.files
    assert several.again(0).replaced == [SHARDS[2]], "and it is found there, too"


def test_who_only_looks_links_and_removes_nothing(several: Revisions) -> None:
    for text in ("one", "two"):
        several.add(text)
    outcome = several.again(hub=Nowhere(), keep_revisions=1)
    assert not outcome.changed
    assert outcome.verified.startswith("receipt")
    outcome = several.again(hub=Nowhere(), keep_revisions=1, verify="full")
    assert outcome.removed == []
    assert several.there() == [0, 1]
    (several.world.dest / SHARDS[0]).unlink()
    for check in (True, False):
        with pytest.raises(FetchError, match=f"{SHARDS[0]} is absent"):
            several.again(hub=Nowhere(), keep_revisions=1, check=check)
    assert not (several.world.dest / SHARDS[0]).exists()
    several.again(0)
    assert several.again(1).linked == [SHARDS[0]], "once it is proven beside"


def state(path: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.stat().st_mtime_ns, file.stat().st_ctime_ns) for file in [path, *path.rglob("*")]}


def test_check_mode_touches_no_revision_beside(several: Revisions) -> None:
    several.add("one")
    first = several.world.dest
    for _time in range(2):
        before = state(first)
        assert SHARDS[0] in several.add("two", check=True).linked
        assert state(first) == before
        (first / ".kimi-k3" / "lock").unlink(missing_ok=True)


@pytest.mark.parametrize("name", [".kimi-k3/lock", ".kimi-k3/receipts.json", "checkpoint.json"])
def test_a_revision_beside_that_cannot_be_read_is_left_alone(several: Revisions, name: str) -> None:
    several.add("one")
    (several.world.dest / name).unlink()
    (several.world.dest / name).mkdir()
    for check in (True, False):
        outcome = several.add("two", check=check)
    assert SHARDS[0] not in outcome.linked
    assert several.world.held() == several.world.files
    several.again(keep_revisions=1)


def test_a_revision_beside_that_cannot_be_written_to_gives_what_it_has(
    several: Revisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    several.add("one")

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Receipts, "refresh", full)
    assert SHARDS[0] in several.add("two").linked
    assert several.world.held() == several.world.files


def test_a_failure_while_a_revision_is_locked_is_told_as_it_is(several: Revisions) -> None:
    several.add("one")
    revision = module.Revision(str(several.world.dest), 0)
    for error in (module.StorageError("told"), FileNotFoundError("told")):
        with pytest.raises(type(error), match="told"), revision.locked():
            raise error
    with revision.locked() as free:
        assert free


# Removal


def test_old_revisions_go_and_the_receipts_of_the_others_stay_true(several: Revisions) -> None:
    for text in ("one", "two", "three", "four"):
        several.add(text)
    assert several.there() == [0, 1, 2, 3]
    would = several.again(check=True, keep_revisions=2)
    assert would.changed
    assert several.there() == [0, 1, 2, 3]
    outcome = several.again(keep_revisions=2)
    assert outcome.changed
    assert outcome.removed == would.removed
    assert several.there() == [2, 3]
    assert several.receipts_hold(2)
    assert several.receipts_hold(3)
    again = several.again(keep_revisions=2)
    assert not again.changed
    assert again.removed == []
    assert several.world.held() == several.world.files


def test_nothing_is_removed_unless_asked_or_before_all_is_proven(several: Revisions) -> None:
    several.add("one")
    several.add("two")
    several.world.hub.fault("missing", path="config.json", times=None)
    with pytest.raises(FetchError):
        several.add("three", keep_revisions=1)
    assert several.there() == [0, 1, 2]


def test_what_a_process_uses_stays(several: Revisions) -> None:
    several.add("one")
    first = several.world.dest
    several.add("two")
    code = "import sys; f = open(sys.argv[1]); print(1, flush=True); sys.stdin.read()"
    for argument in (str(first / SHARDS[0]), "/dev/null"):
        # Open in it, or only named in its arguments.
        command = [sys.executable, "-c", code, argument, f"--model={first}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            outcome = several.again(keep_revisions=1)
            assert outcome.removed == []
            assert not outcome.changed
            process.kill()
    assert several.again(keep_revisions=1).removed == [str(first)]


def test_what_a_configuration_names_stays(several: Revisions, tmp_path: Path) -> None:
    several.add("one")
    first = several.world.dest
    several.add("two")
    configuration = tmp_path / "rank.json"
    configuration.write_text(json.dumps({"argv": ["vllm", "serve", str(first)]}))
    protect = [str(configuration), str(tmp_path / "absent")]
    assert several.again(keep_revisions=1, protect=protect).removed == []
    configuration.write_text(json.dumps({"argv": ["vllm", "serve", str(several.world.dest)]}))
    assert several.again(keep_revisions=1, protect=protect).removed == [str(first)]


def test_one_that_another_run_is_at_stays(several: Revisions) -> None:
    several.add("one")
    (old,) = [module.Revision(str(several.world.dest), 0)]
    several.add("two")
    code = (
        "import json, sys; sys.path[:0] = json.loads(sys.argv[1])\n"
        "from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import Lock\n"
        "Lock(sys.argv[2]).acquire(0); print(1, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path), f"{old.private}/lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not module.remove(old, [])
        process.kill()
    with locked(Lock(f"{old.private}/lock"), 5):
        pass
    assert module.remove(old, [])
    assert several.there() == [1]


def test_only_revisions_of_this_repository_are_looked_at(several: Revisions) -> None:
    several.add("one")
    several.add("two")
    other = several.parent / ("f" * 40)
    other.mkdir()
    (other / "checkpoint.json").write_text(json.dumps({"repository": "else/where", "revision": "f" * 40}))
    several.names.append("f" * 40)
    (several.parent / ("e" * 40)).mkdir()
    several.names.append("e" * 40)
    several.again(1, keep_revisions=1)
    assert several.there() == [1, 2, 3]
    assert module.others(str(several.parent / "current"), "lab/tiny") == []
    assert module.others(str(several.parent / "absent" / ("a" * 40)), "lab/tiny") == []


def test_a_removal_that_was_killed_is_finished(several: Revisions) -> None:
    several.add("one")
    several.add("two")
    several.add("three")
    grave = several.parent / f".removing-{several.names[0]}"
    (several.parent / several.names[0]).rename(grave)
    several.again(keep_revisions=1)
    assert several.there() == [2]
    assert several.world.held() == several.world.files
