# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import checkpoint_job as module
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import receipts
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_job import ERRORS
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_plan import PlanError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.fetch import FetchError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import HubError, Nowhere
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import ListingError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import StorageError

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00005.safetensors" for number in range(1, 6)]

HOLDER = """
import fcntl, sys
stream = open(sys.argv[1], "w")
fcntl.lockf(stream, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def spoil(path: Path) -> None:
    """Flip a byte and put the modification time back."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(before.st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def snapshot(path: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.stat().st_mtime_ns, file.stat().st_ino) for file in path.rglob("*")}


def weights(names: dict[str, bytes]) -> list[str]:
    return sorted(name for name in names if name in SHARDS)


# The whole revision


def test_all_of_it(world: Any) -> None:
    outcome = world.run()
    assert outcome.changed
    assert world.held() == world.files
    assert outcome.verified == "sha256"
    assert outcome.fetch == sorted(set(world.files) - {INDEX})
    assert outcome.fetched_bytes == sum(map(len, world.files.values()))
    summary = world.summary()
    assert summary.pop("proven").endswith("Z")
    assert summary == {
        "schema": 1,
        "repository": "lab/tiny",
        "revision": world.commit,
        "scope": "all",
        "stages": [],
        "pipeline_layers": [],
        "language_model_only": True,
        "plan_digest": outcome.plan.plan_digest,
        "identity_digest": outcome.plan.identity_digest,
        "files": len(world.files) - 1,
        "bytes": sum(map(len, world.files.values())) - len(world.files[INDEX]),
        "verify": "full",
    }
    for path in world.dest.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644)


def test_a_second_run_asks_nobody_and_writes_nothing(world: Any) -> None:
    world.run()
    before = snapshot(world.dest)
    world.hub.stop()
    for check in (False, True):
        outcome = world.run(check=check)
        assert not outcome.changed
        assert outcome.fetched_bytes == 0
        assert outcome.hashed == []
        assert outcome.verified.startswith("receipt (hashed 20")
    assert snapshot(world.dest) == before


def test_a_second_run_goes_by_receipts_alone(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run()
    monkeypatch.setattr(module.Checkpoint, "_work", lambda _self: pytest.fail("worked"))
    assert not world.run().changed


# One stage


def test_a_stage_has_its_files_and_an_index_of_them(world: Any) -> None:
    first, last = world.stage(0), None
    held = world.held()
    assert weights(held) == [*SHARDS[:3], SHARDS[4]]
    assert set(world.files) - set(SHARDS) <= set(held)
    index = json.loads(held[INDEX])
    assert set(index["weight_map"].values()) == {*SHARDS[:3], SHARDS[4]}
    assert index["metadata"]["total_size"] == 3 * 300_000 + 15_000
    assert world.own(INDEX).read_bytes() == world.files[INDEX]
    assert world.summary()["stages"] == [0]
    assert world.summary()["pipeline_layers"] == [3, 1]
    world.dest = world.dest.with_name("other-host")
    last = world.stage(1)
    assert weights(world.held()) == SHARDS[3:]
    assert first.plan.identity_digest == last.plan.identity_digest
    assert first.plan.plan_digest != last.plan.plan_digest


def test_changes_of_plan_fetch_only_what_is_missing(world: Any) -> None:
    world.stage(0)
    assert world.stage(0, pipeline_layers=[2, 2]).fetch == []
    assert world.stage(1, pipeline_layers=[2, 2]).fetch == [SHARDS[3]]
    world.hub.clear_log()
    outcome = world.run(scope="all", pipeline_layers=[2, 2])
    assert outcome.changed
    assert outcome.fetch == []
    assert world.hub.log == []
    assert world.held() == world.files
    outcome = world.stage(0)
    assert outcome.changed
    assert outcome.fetch == []
    assert set(json.loads(world.held()[INDEX])["weight_map"].values()) == {*SHARDS[:3], SHARDS[4]}
    assert set(SHARDS) < set(world.held()), "files outside the plan stay"
    assert not world.stage(0).changed


def test_tied_embeddings_follow_the_configuration(world: Any) -> None:
    files = dict(world.files)
    index = json.loads(files[INDEX])
    index["weight_map"]["model.embed_tokens.weight"] = SHARDS[0]
    files[SHARDS[0]] = safetensors_with(files[SHARDS[0]], "model.embed_tokens.weight")
    files[INDEX] = json.dumps(index).encode()
    world.publish(files)
    assert SHARDS[0] not in world.stage(1, check=True).fetch
    world.publish({**files, "config.json": b'{"text_config": {"tie_word_embeddings": true}}'})
    assert SHARDS[0] in world.stage(1, check=True).fetch


def safetensors_with(file: bytes, name: str) -> bytes:
    """The file with one more tensor, of four bytes."""
    length = int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8 : 8 + length]), file[8 + length :]
    header[name] = {"dtype": "U8", "shape": [4], "data_offsets": [len(data), len(data) + 4]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data + b"1234"


def test_unplaced_tensors_are_warned_of_in_every_run(world: Any) -> None:
    files = dict(world.files)
    files[SHARDS[0]] = safetensors_with(files[SHARDS[0]], "oddity")
    index = json.loads(files[INDEX])
    index["weight_map"]["oddity"] = SHARDS[0]
    world.publish({**files, INDEX: json.dumps(index).encode()})
    for _run in (1, 2):
        outcome = world.stage(1)
        assert SHARDS[0] in world.held()
        assert outcome.warnings == ["1 tensors belong to no known part of the model (oddity): every stage holds them."]


def test_the_index_goes_on_where_it_was(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGE", 100)
    size = len(world.files[INDEX])
    world.hub.fault("cut", path=INDEX, after=200)
    with pytest.raises(FetchError, match=INDEX):
        world.stage(0, options={"retries": 0})
    world.hub.fault("cut", path=INDEX, after=100)
    outcome = world.stage(0)
    assert [request.range for request in world.hub.seen("resolve", INDEX)] == [None, "bytes=200-", "bytes=300-"]
    assert world.hub.bytes_sent(INDEX) == size
    assert outcome.resumed_bytes == 200
    assert outcome.fetched_bytes == sum(len(world.files[name]) for name in outcome.fetch) + size - 200
    assert world.own(INDEX).read_bytes() == world.files[INDEX]
    assert not world.own("early").exists()


# Check mode


def test_check_mode_tells_all_and_writes_nothing(world: Any) -> None:
    outcome = world.stage(0, check=True)
    assert outcome.changed
    assert not world.dest.exists()
    assert not world.dest.parent.exists()
    real = world.stage(0)
    assert outcome.fetch == real.fetch
    assert outcome.fetched_bytes == real.fetched_bytes
    assert outcome.plan.plan_digest == real.plan.plan_digest
    assert outcome.before == {}
    assert outcome.after == real.after
    outcome = world.stage(1, check=True)
    assert outcome.fetch == [SHARDS[3]]
    assert outcome.before == real.after
    assert f"{SHARDS[3]} {len(world.files[SHARDS[3]])}" in outcome.after["holds"]
    assert SHARDS[3] not in world.held()


def test_check_mode_finds_what_a_run_would_repair(world: Any) -> None:
    world.run()
    spoil(world.dest / SHARDS[1])
    before = snapshot(world.dest)
    outcome = world.run(check=True)
    assert outcome.changed
    assert outcome.fetch == [SHARDS[1]]
    assert snapshot(world.dest) == before


def test_check_mode_warns_of_a_disk_too_small(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_no_room", lambda _path, _missing: "No room.")
    assert "No room." in world.run(check=True).warnings
    with pytest.raises(StorageError, match="No room"):
        world.run()
    assert world.hub.count("cdn") == 0


# Files that are there


def test_right_files_of_another_tool_are_taken_over(world: Any) -> None:
    for name, data in world.files.items():
        path = world.dest / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    outcome = world.run()
    assert outcome.changed, "there was no summary before"
    assert outcome.fetched_bytes == 0
    assert outcome.fetch == []
    assert set(outcome.hashed) == set(world.files) - {INDEX}
    assert world.hub.count("resolve") == 0
    assert not world.run().changed
    assert json.loads(world.own("receipts.json").read_text())["files"][SHARDS[0]]["source"] == "found"


def test_links_to_right_files_are_taken_over(world: Any, tmp_path: Path) -> None:
    world.dest.mkdir(parents=True)
    (tmp_path / "blob").write_bytes(world.files[SHARDS[0]])
    (world.dest / SHARDS[0]).symlink_to(tmp_path / "blob")
    assert SHARDS[0] not in world.run().fetch
    assert not world.run().changed
    spoil(tmp_path / "blob")
    assert world.run().fetch == [SHARDS[0]]
    assert not (world.dest / SHARDS[0]).is_symlink()


@pytest.mark.parametrize("verify", ["receipt", "full"])
def test_a_flipped_byte_is_found_and_repaired(world: Any, verify: str) -> None:
    world.run()
    spoil(world.dest / SHARDS[2])
    bad = (world.dest / SHARDS[2]).read_bytes()
    outcome = world.run(verify=verify)
    assert outcome.changed
    assert outcome.fetch == outcome.replaced == [SHARDS[2]]
    assert world.held() == world.files
    (aside,) = world.own("bad").iterdir()
    assert aside.read_bytes() == bad
    assert len(outcome.warnings) == 1
    assert str(aside) in outcome.warnings[0]
    assert not world.run().changed


def test_a_bad_file_keeps_its_place_until_the_right_one_is_there(world: Any) -> None:
    world.run()
    spoil(world.dest / SHARDS[2])
    bad = (world.dest / SHARDS[2]).read_bytes()
    world.hub.fault("missing", path=SHARDS[2], times=None)
    with pytest.raises(FetchError, match=SHARDS[2]):
        world.run()
    assert (world.dest / SHARDS[2]).read_bytes() == bad
    assert not world.own("bad").exists()


@pytest.mark.parametrize("change", [spoil, Path.unlink, lambda path: os.truncate(path, 10)])
def test_what_is_not_proven_any_more_is_not_said_to_be(world: Any, change: Any) -> None:
    world.run()
    before = world.summary()
    change(world.dest / SHARDS[2])
    world.hub.fault("missing", path=SHARDS[2], times=None)
    world.run(check=True)
    assert world.summary() == before
    with pytest.raises(FetchError, match=SHARDS[2]):
        world.run()
    assert not (world.dest / "checkpoint.json").exists()
    world.hub.clear_faults()
    assert world.run().fetch == [SHARDS[2]]
    assert {**world.summary(), "proven": ""} == {**before, "proven": "", "verify": "receipt"}
    assert not world.run().changed


def test_a_configuration_that_is_gone_is_not_said_to_be_proven_either(world: Any) -> None:
    world.stage(0)
    (world.dest / "config.json").unlink()
    world.hub.fault("missing", path="config.json", times=None)
    with pytest.raises(HubError, match=r"config\.json"):
        world.stage(0)
    assert not (world.dest / "checkpoint.json").exists()
    world.hub.clear_faults()
    assert world.stage(0).fetch == ["config.json"]
    assert (world.dest / "checkpoint.json").exists()


def test_what_is_found_wrong_is_told_before_all_is_hashed(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run()
    spoil(world.dest / SHARDS[2])
    real = module.hash_files

    def ended(jobs: list[Any], **options: Any) -> None:
        real([job for job in jobs if job[0].endswith(SHARDS[2])], **options)
        raise receipts.StoppedError

    monkeypatch.setattr(module, "hash_files", ended)
    with pytest.raises(FetchError, match="Stopped from outside"):
        world.run(verify="full")
    assert not (world.dest / "checkpoint.json").exists()


def test_what_another_plan_needs_leaves_the_proof_of_this_one(world: Any) -> None:
    world.stage(0)
    before = world.summary()
    world.hub.fault("missing", path=SHARDS[3], times=None)
    with pytest.raises(FetchError, match=SHARDS[3]):
        world.stage(1)
    assert world.summary() == before


@pytest.mark.parametrize("size", [0, 100_000, 400_000])
def test_a_file_of_the_wrong_size_is_replaced_without_hashing(world: Any, size: int) -> None:
    world.run()
    os.truncate(world.dest / SHARDS[0], size)
    outcome = world.run()
    assert outcome.replaced == [SHARDS[0]]
    assert outcome.hashed == []
    assert world.held() == world.files


def test_a_directory_in_the_place_of_a_file(world: Any) -> None:
    (world.dest / "config.json").mkdir(parents=True)
    world.run()
    assert world.held() == world.files


def test_a_touched_file_is_hashed_and_nothing_else(world: Any) -> None:
    world.run()
    (world.dest / SHARDS[0]).touch()
    world.hub.stop()
    outcome = world.run()
    assert not outcome.changed
    assert outcome.hashed == [SHARDS[0]]
    assert outcome.verified.startswith(f"sha256 for 1 files, receipt for {len(world.files) - 2} (hashed ")
    assert world.run().hashed == []


def test_full_verification_hashes_everything_and_needs_no_network(world: Any) -> None:
    world.run()
    proven = world.summary()["proven"]
    world.hub.stop()
    outcome = world.run(verify="full")
    assert not outcome.changed
    assert len(outcome.hashed) == len(world.files) - 1
    assert outcome.verified == "sha256"
    assert world.summary()["proven"] >= proven
    assert world.summary()["verify"] == "full"


@pytest.mark.parametrize("name", [INDEX, "checkpoint.json"])
@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("{}")])
def test_what_this_collection_writes_is_written_anew(world: Any, name: str, change: Any) -> None:
    world.stage(0)
    path = world.dest / name
    before = path.read_bytes()
    change(path)
    world.hub.stop()
    assert world.stage(0, check=True).changed
    assert world.stage(0).changed
    if name == INDEX:
        assert path.read_bytes() == before
    assert not world.stage(0).changed


@pytest.mark.parametrize("name", ["receipts.json", "plan.json", "listing.json", INDEX, "lock"])
@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("{half")])
def test_lost_notes_are_made_again(world: Any, name: str, change: Any) -> None:
    world.stage(0)
    change(world.own(name))
    world.hub.clear_log()
    outcome = world.stage(0)
    assert not outcome.changed
    assert world.hub.count("cdn") == 0
    assert not world.stage(0).changed


def test_the_index_of_another_tool_is_taken_over(world: Any) -> None:
    world.dest.mkdir(parents=True)
    (world.dest / INDEX).write_bytes(world.files[INDEX])
    world.stage(0)
    assert world.hub.count("resolve", INDEX) == 0
    assert world.own(INDEX).read_bytes() == world.files[INDEX]
    assert world.held()[INDEX] != world.files[INDEX]


def test_another_revision_in_the_same_place(world: Any) -> None:
    world.run()
    world.publish({**world.files, "config.json": b'{"changed": 1}'})
    outcome = world.run()
    assert outcome.fetch == ["config.json"]
    assert set(outcome.hashed) == set(world.files) - {INDEX, "config.json"}, "what was proven for another one"
    assert world.held() == world.files
    assert world.run().hashed == []


def test_half_files_of_this_revision_alone_are_kept(world: Any) -> None:
    world.hub.fault("stall", path=SHARDS[3], on="cdn", after=200_000, times=None)
    with pytest.raises(FetchError):
        world.run(client={"timeout": 1}, options={"retries": 0})
    kept = {path.name for path in world.own("parts").iterdir()}
    assert len(kept) == 2
    world.own("parts/other.0123456789ab.part").write_bytes(b"x")
    world.own("parts/other.0123456789ab.part.journal").write_bytes(b"1")
    world.stage(0)
    assert {path.name for path in world.own("parts").iterdir()} == kept


# Repositories with faults of their own


def test_an_index_that_names_a_file_the_listing_lacks(world: Any) -> None:
    files = dict(world.files)
    del files[SHARDS[3]]
    world.publish(files)
    for run in (world.run, lambda: world.stage(0)):
        with pytest.raises(
            PlanError, match=f"names {SHARDS[3]}, but the listing of revision {world.commit} has no such"
        ):
            run()
    assert world.held() == {}
    assert world.hub.count("cdn") == 0


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b'{"weight_map": {}}'])
def test_an_index_that_is_none(world: Any, content: bytes) -> None:
    world.publish({**world.files, INDEX: content})
    with pytest.raises(PlanError, match=INDEX):
        world.run()
    assert world.held() == {}


def test_a_repository_without_index(world: Any) -> None:
    files = {"model.safetensors": world.files[SHARDS[0]], "config.json": b"{}"}
    world.publish(files)
    with pytest.raises(PlanError, match=f"has no {INDEX}.*set scope to all"):
        world.stage(0)
    world.run()
    assert world.held() == files
    assert not world.run().changed


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"no safetensors at all", "has the digest of the listing, but"),
        (None, "it lacks model.layers.1.mlp.down.weight"),
    ],
)
def test_a_shard_that_is_not_what_the_index_says(world: Any, file: bytes | None, message: str) -> None:
    wrong = file or world.files[SHARDS[2]]
    world.publish({**world.files, SHARDS[1]: wrong})
    with pytest.raises(FetchError, match=f"^{SHARDS[1]} .*{message}"):
        world.run()
    assert SHARDS[1] not in world.held()
    # The same when the file was there before.
    (world.dest / SHARDS[1]).write_bytes(wrong)
    with pytest.raises(ERRORS, match=SHARDS[1]):
        world.run()


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", ".kimi-k3/lock", "a/../../outside", ""])
def test_unsafe_names_are_refused_before_anything_is_fetched(world: Any, name: str) -> None:
    body = json.dumps([{"type": "file", "path": name, "size": 3, "oid": "0" * 40}])
    world.hub.fault("status", on="tree", status=200, body=body)
    with pytest.raises(ERRORS, match="refused"):
        world.run()
    assert world.held() == {}
    assert not (world.dest.parent / "outside").exists()


def test_a_linked_directory_that_leads_out_is_refused(world: Any, tmp_path: Path) -> None:
    world.dest.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (world.dest / "tokenizer").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is a link that leaves"):
        world.run()
    assert list((tmp_path / "elsewhere").iterdir()) == []


# The destination


@pytest.mark.parametrize("check", [True, False])
def test_a_place_below_a_file_is_told(world: Any, check: bool) -> None:
    world.dest.parent.parent.mkdir(exist_ok=True)
    world.dest.parent.write_text("")
    with pytest.raises(StorageError, match=rf"^{world.dest.parent} is no directory, but has to be one: "):
        world.run(check=check)
    assert world.hub.log == []


def test_memory_is_refused(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_filesystem", lambda path, allow: pytest.fail(f"{path} {allow}"))
    with pytest.raises(pytest.fail.Exception, match="False"):
        world.run(allow_tmpfs=False)
    assert world.hub.log == []


def test_the_place_below_a_linked_directory(world: Any, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    world.dest.parent.symlink_to(tmp_path / "disk")
    world.run()
    assert (tmp_path / "disk" / world.dest.name / SHARDS[0]).read_bytes() == world.files[SHARDS[0]]
    assert not world.run().changed


def test_another_run_in_the_same_place(world: Any) -> None:
    world.own("").mkdir(parents=True)
    command = [sys.executable, "-c", HOLDER, str(world.own("lock"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(StorageError, match=f"{world.dest} is in use by another run"):
            world.run()
        assert world.hub.log == []
        holder.kill()
    world.run()
    assert world.held() == world.files


def test_a_failure_is_told_in_the_progress(world: Any) -> None:
    world.hub.fault("missing", path=SHARDS[0], times=None)
    with pytest.raises(FetchError):
        world.run()
    assert json.loads(world.own("progress.json").read_text())["state"].startswith(f"failed: {SHARDS[0]}: ")


def test_plan_digest_follows_the_content(world: Any) -> None:
    first = world.run(check=True).plan.plan_digest
    world.publish({**world.files, "empty.txt": b"x"})
    assert world.run(check=True).plan.plan_digest != first


def test_moved_to_another_disk_it_is_proven_anew(world: Any) -> None:
    world.stage(0)
    copy = world.dest.with_name("copy")
    shutil.copytree(world.dest, copy)
    world.dest = copy
    world.hub.stop()
    outcome = world.stage(0)
    assert not outcome.changed
    assert len(outcome.hashed) == len(outcome.plan.entries)
    assert (
        hashlib.sha256((copy / SHARDS[0]).read_bytes()).hexdigest()
        == json.loads(world.own("receipts.json").read_text())["files"][SHARDS[0]]["sha256"]
    )


# Proving without a network


def test_present_proves_and_asks_nobody(world: Any) -> None:
    world.run()
    world.hub.stop()
    assert not world.run(hub=Nowhere()).changed
    outcome = world.run(hub=Nowhere(), verify="full")
    assert not outcome.changed
    assert outcome.verified == "sha256"


def test_present_names_what_is_wrong_and_touches_nothing(world: Any) -> None:
    world.run()
    spoil(world.dest / SHARDS[2])
    os.truncate(world.dest / SHARDS[0], 10)
    (world.dest / "empty.txt").unlink()
    world.hub.clear_log()
    held = world.held()
    for check in (True, False):
        with pytest.raises(FetchError) as caught:
            world.run(hub=Nowhere(), check=check)
        text = str(caught.value)
        assert text.startswith(f"3 of {len(world.files) - 1} files in {world.dest} are not as listed")
        assert "empty.txt is absent" in text
        assert f"{SHARDS[0]} is no file of" in text
        assert f"{SHARDS[2]} has the digest sha256:" in text
        assert "the listing says sha256:" in text
        assert (world.dest / "checkpoint.json").exists() is check, "only the statement that it is proven goes"
    assert world.held() == held
    assert world.hub.log == []
    assert world.run().replaced == [SHARDS[0], SHARDS[2]]
    assert world.held() == world.files


def test_present_where_no_run_was_before(world: Any, tmp_path: Path) -> None:
    for name, data in world.files.items():
        path = world.dest / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with pytest.raises(HubError, match=r"The listing of the revision is not here.*set listing_file"):
        world.run(hub=Nowhere())
    with urllib.request.urlopen(
        f"{world.hub.endpoint}/api/models/lab/tiny/tree/{world.commit}?recursive=true", timeout=10
    ) as answer:
        (tmp_path / "listing.json").write_bytes(answer.read())
    world.hub.stop()
    outcome = world.run(hub=Nowhere(), listing_file=str(tmp_path / "listing.json"))
    assert outcome.fetch == []
    assert outcome.verified == "sha256"
    (tmp_path / "broken.json").write_text("{}")
    world.own("listing.json").unlink()
    world.own("plan.json").unlink()
    with pytest.raises(ListingError, match=r"broken\.json is absent or holds no list"):
        world.run(hub=Nowhere(), listing_file=str(tmp_path / "broken.json"))


# Rolling


def age(world: Any) -> None:
    """Receipts of different age, in the order of names."""
    path = world.own("receipts.json")
    stored = json.loads(path.read_text())
    for number, name in enumerate(sorted(stored["files"])):
        stored["files"][name]["hashed"] = f"2020-01-{number + 1:02d}T00:00:00Z"
    path.write_text(json.dumps(stored))


def test_rolling_reads_what_was_not_read_for_longest(world: Any) -> None:
    world.run()
    age(world)
    world.hub.stop()
    rounds = [world.run(verify="rolling", verify_bytes=350_000) for _run in range(3)]
    assert not any(outcome.changed for outcome in rounds)
    first, second, third = (outcome.hashed for outcome in rounds)
    assert first == ["config.json", "empty.txt", *SHARDS[:2]]
    assert second == SHARDS[2:4]
    assert {SHARDS[4], "tiktoken.model"} < set(third)
    outcome = rounds[-1]
    assert "receipt for" in outcome.verified
    assert world.summary()["verify"] == "rolling"


def test_rolling_finds_what_no_receipt_can(world: Any) -> None:
    world.run()
    age(world)
    spoil(world.dest / SHARDS[1])
    # Rot below the file system changes no time: the receipt is made to agree.
    path = world.own("receipts.json")
    stored = json.loads(path.read_text())
    stored["files"][SHARDS[1]]["ctime_ns"] = (world.dest / SHARDS[1]).stat().st_ctime_ns
    path.write_text(json.dumps(stored))
    assert not world.run().changed
    with pytest.raises(FetchError, match=f"{SHARDS[1]} has the digest"):
        world.run(verify="rolling", hub=Nowhere())
    # What was found once is not forgotten.
    with pytest.raises(FetchError, match=f"{SHARDS[1]} has the digest"):
        world.run(hub=Nowhere())
    outcome = world.run(verify="rolling")
    assert outcome.replaced == [SHARDS[1]]
    assert world.held() == world.files


def test_rolling_stops_when_its_time_is_over_but_not_before_the_first(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run()
    age(world)
    # However many cores there are.
    monkeypatch.setattr(receipts.os, "sched_getaffinity", lambda _process: set(range(64)))
    for name in ("config.json", "empty.txt", SHARDS[0]):
        assert world.run(verify="rolling", verify_seconds=1e-9).hashed == [name]
    assert len(world.run(verify="rolling", verify_seconds=3600).hashed) == len(world.files) - 1
