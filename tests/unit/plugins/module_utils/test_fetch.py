# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults on the way, each against a server that commits it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import exchange as module_exchange
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import fetch as module
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.direct import Buffers
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.fetch import FetchError, Part, part_path
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import Entry

SHARD = "model-00002-of-00005.safetensors"
BIG = "big.safetensors"

# Runs a fetch in a process of its own, so that it can be killed.
CHILD = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_job import Request, ensure
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.fetch import Options
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import Hub
endpoint, commit, dest = sys.argv[2:]
ensure(Request(hub=Hub(endpoint, "lab/tiny", commit), repository="lab/tiny", revision=commit, dest=dest, scope="all",
    pipeline_layers=[], stages=[], language_model_only=True, allow_tmpfs=True, options=Options(flush_seconds=0)))
"""


def until(condition: Any, seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def complete(world: Any) -> bool:
    return world.held() == world.files


def listed(world: Any, path: str) -> Entry:
    files = json.loads(world.own("listing.json").read_text())["files"]
    return next(Entry(**item) for item in files if item["path"] == path)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("reset", {"after": 100_000}),
        ("cut", {"after": 100_000}),
        ("expire", {"after": 100_000}),
        ("drop", {}),
        ("unavailable", {"times": 3}),
        ("status", {"status": 500, "times": 2}),
        ("throttled", {"seconds": 0}),
        ("short", {"length": 1000}),
        ("long", {}),
        ("gated", {"on": "cdn"}),
    ],
)
def test_passing_faults_cost_nothing_but_time(world: Any, kind: str, options: dict[str, Any]) -> None:
    world.hub.fault(kind, path=SHARD, **{"on": "cdn", **options})
    outcome = world.run()
    assert complete(world)
    assert outcome.fetched_bytes == sum(map(len, world.files.values()))
    assert not world.own("bad").exists()
    assert list(world.own("parts").iterdir()) == []


def test_a_connection_cut_again_and_again_goes_on_from_where_it_was(world: Any) -> None:
    world.hub.fault("cut", path=SHARD, on="cdn", after=30_000, times=None)
    world.run(options={"retries": 2})
    assert complete(world)
    requests = world.hub.seen("cdn", SHARD)
    assert len(requests) == -(-len(world.files[SHARD]) // 30_000)
    assert [request.range for request in requests[1:3]] == ["bytes=30000-", "bytes=60000-"]
    assert world.hub.bytes_sent(SHARD) == len(world.files[SHARD])


def test_an_address_that_expires_in_the_middle_is_asked_for_anew(world: Any) -> None:
    world.hub.fault("expire", path=SHARD, on="cdn", after=200_000)
    world.run()
    assert complete(world)
    assert world.hub.count("resolve", SHARD) == 2
    assert world.hub.bytes_sent(SHARD, "cdn") == len(world.files[SHARD])


def test_a_server_that_stops_sending_is_left(world: Any) -> None:
    world.hub.fault("stall", path=SHARD, on="cdn", after=100_000)
    world.run(client={"timeout": 1})
    assert complete(world)
    assert world.hub.bytes_sent(SHARD, "cdn") == len(world.files[SHARD])


def test_a_server_that_stops_after_every_few_bytes_is_given_up(world: Any) -> None:
    world.hub.fault("stall", path=SHARD, on="cdn", after=100, times=None)
    with pytest.raises(FetchError, match=r"The server stopped sending\. Tried 3 times"):
        world.run(client={"timeout": 0.5}, options={"min_rate": 16384, "retries": 2})


def test_a_trickle_is_left(world: Any) -> None:
    world.hub.fault("trickle", path=SHARD, on="cdn", rate=10_000)
    world.run(options={"min_rate": 1_000_000, "min_rate_seconds": 0.2})
    assert complete(world)
    assert world.hub.count("cdn", SHARD) == 2


def test_a_trickle_for_ever_ends_with_its_reason(world: Any) -> None:
    world.hub.fault("trickle", path=SHARD, on="cdn", rate=10_000, times=None)
    with pytest.raises(FetchError, match=rf"^{SHARD}: .*below the floor of 1\.0 MB/s\. Tried 3 times"):
        world.run(options={"min_rate": 1_000_000, "min_rate_seconds": 0.1, "retries": 2})


def test_a_server_without_ranges_begins_anew(world: Any) -> None:
    world.hub.fault("cut", path=SHARD, on="cdn", after=100_000)
    world.hub.fault("ignore_range", path=SHARD, on="cdn")
    world.run()
    assert complete(world)
    assert world.hub.bytes_sent(SHARD, "cdn") == len(world.files[SHARD]) + 100_000


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("missing", {"on": "resolve"}, f"^{SHARD}: .* has no {SHARD} of lab/tiny .*HTTP 404"),
        ("unauthorized", {"on": "resolve"}, f"^{SHARD}: .* refused {SHARD} .*HTTP 401"),
        ("loop", {"on": "resolve"}, f"^{SHARD}: .* redirects without end"),
        ("short", {"on": "cdn", "length": 1000}, f"^{SHARD}: The server announces 1000 bytes of {SHARD}"),
        ("long", {"on": "cdn"}, f"^{SHARD}: The server announces .* Tried 4 times"),
        ("drop", {"on": "cdn"}, f"^{SHARD}: .*cannot be reached.* Tried 4 times"),
        ("wrong_range", {"on": "cdn", "skip": 1}, f"^{SHARD}: The server answered bytes 1000 to"),
        ("corrupt", {"on": "cdn", "at": 200_000}, f"^{SHARD} from .* has the digest sha256:.*the listing says sha256:"),
    ],
)
def test_lasting_faults_are_named_and_leave_nothing(
    world: Any, kind: str, options: dict[str, Any], message: str
) -> None:
    if kind == "wrong_range":
        world.hub.fault("cut", path=SHARD, on="cdn", after=1000)
        options = {**options, "skip": 0}
    world.hub.fault(kind, path=SHARD, times=None, **options)
    with pytest.raises(FetchError, match=message):
        world.run()
    held = world.held()
    assert SHARD not in held
    assert "model.safetensors.index.json" not in held
    assert not (world.dest / "checkpoint.json").exists()
    assert all(world.files[name] == data for name, data in held.items())
    # What is right with the server again is right here again.
    world.hub.clear_faults()
    world.run()
    assert complete(world)


def test_a_wrong_digest_once_is_fetched_again(world: Any) -> None:
    world.hub.fault("corrupt", path=SHARD, on="cdn", at=5)
    world.run()
    assert complete(world)
    assert world.hub.bytes_sent(SHARD, "cdn") == 2 * len(world.files[SHARD])
    assert list(world.own("bad").iterdir()) == []


def test_wrong_bytes_are_kept_aside_with_both_digests_told(world: Any) -> None:
    world.hub.fault("corrupt", path=SHARD, on="cdn", at=5, times=None)
    with pytest.raises(FetchError) as caught:
        world.run()
    (bad,) = world.own("bad").iterdir()
    assert str(bad) in str(caught.value)
    entry = listed(world, SHARD)
    assert entry.digest in str(caught.value)
    assert f"sha256:{module.hashlib.sha256(bad.read_bytes()).hexdigest()}" in str(caught.value)
    assert bad.stat().st_size == entry.size
    assert world.hub.count("cdn", SHARD) == 2


def test_one_file_that_cannot_be_had_ends_the_others_with_what_they_have(world: Any) -> None:
    world.hub.fault("missing", path=SHARD, on="resolve", times=None)
    world.hub.fault("trickle", path="model-00001*", on="cdn", rate=50_000, times=None)
    # The other one is under way when the fault is met.
    blocker = world.hub.fault("throttled", path=SHARD, on="resolve", seconds=1)
    world.hub.faults.insert(0, world.hub.faults.pop(world.hub.faults.index(blocker)))
    with pytest.raises(FetchError, match=SHARD):
        world.run(options={"connections": 8})
    entry = listed(world, "model-00001-of-00005.safetensors")
    assert module.journaled(str(world.own("")), entry) > 0
    world.hub.clear_faults()
    world.hub.clear_log()
    outcome = world.run()
    assert complete(world)
    assert outcome.resumed_bytes > 0
    assert world.hub.bytes_sent("model-00001*", "cdn") < entry.size


def test_a_killed_fetch_goes_on_inside_the_file(world: Any) -> None:
    block = 1 << 20
    numbers = bytes(range(256)) * (4 * block // 256)
    world.publish({BIG: b"\x08\0\0\0\0\0\0\0{}      " + b"", "big.bin": numbers + b"tail"})
    command = [sys.executable, "-c", CHILD, json.dumps(sys.path), world.hub.endpoint, world.commit, str(world.dest)]
    reached = 0
    for stop_at in (1, 3):
        world.hub.fault("stall", path="big.bin", on="cdn", after=stop_at * block + 1000 - reached)
        with subprocess.Popen(command) as child:

            def journaled(at: int = stop_at) -> bool:
                if not world.own("listing.json").exists():
                    return False
                return module.journaled(str(world.own("")), listed(world, "big.bin")) >= at * block

            until(journaled)
            child.kill()
        assert "big.bin" not in world.held()
        reached = module.journaled(str(world.own("")), listed(world, "big.bin"))
    sent = world.hub.bytes_sent("big.bin", "cdn")
    outcome = world.run()
    assert complete(world)
    assert outcome.resumed_bytes >= 3 * block
    size = len(world.files["big.bin"])
    assert world.hub.bytes_sent("big.bin", "cdn") - sent == size - outcome.resumed_bytes
    assert outcome.fetched_bytes == size - outcome.resumed_bytes
    assert list(world.own("parts").iterdir()) == []


def test_a_journal_that_lies_costs_a_fetch_and_nothing_else(world: Any) -> None:
    world.hub.fault("missing", path=SHARD, on="resolve")
    with pytest.raises(FetchError):
        world.run()
    entry = listed(world, SHARD)
    part = Path(part_path(str(world.own("parts")), entry))
    part.write_bytes(b"\xff" * entry.size)
    Path(f"{part}.journal").write_text(f"{250_000:020d}\n")
    world.run()
    assert complete(world)


@pytest.mark.parametrize("text", ["", "x", "-5", "99999999999999999999"])
def test_odd_journals(tmp_path: Path, text: str) -> None:
    entry = Entry("a", 10, "0" * 64)
    path = Path(part_path(str(tmp_path), entry))
    path.write_bytes(b"12345")
    Path(f"{path}.journal").write_text(text)
    part = Part(str(tmp_path), entry, Buffers())
    part.close()
    assert part.position in (0, 5)


def test_a_full_disk_is_told_before_the_bytes_come_and_is_no_loss(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _offset: int, length: int) -> None:
        if length > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "posix_fallocate", full)
        with pytest.raises(
            FetchError, match=r"no room left on the file system of .*300\.\d kB of this file are missing"
        ):
            world.run(options={"connections": 1})
    assert world.hub.count("cdn", "model-0000[1-4]*") == 0
    world.run()
    assert complete(world)


def test_a_disk_that_fills_in_the_middle_keeps_what_is_there(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"big.bin": bytes(3 << 20)}
    world.publish(files)
    real = os.pwrite

    def write(descriptor: int, data: Any, offset: int) -> int:
        # As a full disk does: what there is room for, and an error only when there is none.
        if offset >= 2 << 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[: (2 << 20) - offset], offset)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "pwrite", write)
        with pytest.raises(FetchError, match="Make room and run again: what is there is kept"):
            world.run(options={"flush_seconds": 0})
    outcome = world.run()
    assert complete(world)
    assert 2 << 20 <= outcome.resumed_bytes < 3 << 20
    assert outcome.fetched_bytes == (3 << 20) - outcome.resumed_bytes


def test_a_file_system_that_cannot_preallocate_will_do(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(module.os, "posix_fallocate", unsupported)
    world.run()
    assert complete(world)


def test_a_limit_holds_over_all_connections(world: Any) -> None:
    began = time.monotonic()
    world.run(options={"rate_limit": 4_000_000})
    assert complete(world)
    assert time.monotonic() - began >= sum(map(len, world.files.values())) / 4_000_000 * 0.9


def test_a_limit_of_ones_own_is_no_trickle(world: Any) -> None:
    world.run(options={"rate_limit": 2_000_000, "min_rate": 200_000, "min_rate_seconds": 0.2, "retries": 0})
    assert complete(world)


def test_small_files_by_redirect(world: Any) -> None:
    world.hub.relative_redirects = True
    world.run()
    assert complete(world)


def test_the_own_bytes_of_a_run_are_none_that_it_resumed(world: Any) -> None:
    from lab_hub import Hub as Server  # noqa: PLC0415

    with Server(world.root) as mirror:
        client = world.request().hub.__class__(mirror.endpoint, "lab/tiny", world.commit, retries=0, backoff=0.01)
        mirror.fault("cut", path=SHARD, on="cdn", after=100_000, times=None)
        mirror.fault("missing", path=SHARD, on="resolve", skip=1, times=None)
        outcome = world.run(mirrors=[client], options={"retries": 0})
    assert complete(world)
    assert world.hub.bytes_sent(SHARD, "cdn") == len(world.files[SHARD]) - 100_000
    assert outcome.resumed_bytes == 0
    assert outcome.fetched_bytes == sum(map(len, world.files.values()))


def test_no_room_for_a_receipt_is_told_as_that(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.Fetcher

    def fetcher(*arguments: Any, done: Any, **options: Any) -> Any:
        def full(task: Any, *values: Any) -> None:
            if task.entry.path == SHARD:
                raise OSError(errno.ENOSPC, "No space left on device")
            done(task, *values)

        return real(*arguments, done=full, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "Fetcher", fetcher)
        with pytest.raises(FetchError, match=rf"^{SHARD}: it is whole and in its place, but there is no room left on"):
            world.run()
    outcome = world.run()
    assert SHARD in outcome.hashed
    assert SHARD not in outcome.fetch
    assert complete(world)


def test_bytes_of_a_peer_say_nothing_about_the_line(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []

    def observe(governor: Any, rate: float, _wanted: int) -> int:
        rates.append(rate)
        return governor.target

    monkeypatch.setattr(module, "WINDOW", 0.05)
    monkeypatch.setattr(module.Governor, "observe", observe)
    near = world.request().hub
    near.near = True
    world.hub.fault("trickle", path="model-*", on="cdn", rate=1_000_000, times=None)
    outcome = world.run(mirrors=[near])
    assert outcome.peer_bytes > 0
    assert max(rates, default=0) == 0
    world.dest = world.dest.with_name("other")
    world.run()
    assert max(rates) > 0


class Reluctant:
    """The other host of an exchange, which for a while cannot say what it has."""

    peer = None

    def __init__(self, refusals: int) -> None:
        self.left = refusals
        self.claims = 0
        self.granted: list[str] = []
        self.lock = threading.Lock()

    def taken(self, _entry: Entry) -> bool:
        return False

    def claim(self, entry: Entry) -> str:
        with self.lock:
            self.claims += 1
            self.left -= 1
            if self.left >= 0:
                return module_exchange.TAKEN
            self.granted.append(entry.path)
            return module_exchange.GRANTED


class Looks:
    """A wait that notes how long it was asked for."""

    def __init__(self, wait: Any, asked: list[float]) -> None:
        self.wait, self.asked = wait, asked

    def __call__(self, seconds: float) -> bool:
        self.asked.append(seconds)
        return self.wait(seconds)


def test_a_refused_claim_is_not_made_again_at_once_and_loses_no_place(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_AGAIN", 0.0123)
    world.run()
    entries = sorted((listed(world, name) for name in world.files if name.startswith("model-")), key=lambda e: e.path)
    request = world.request()
    for threads, refusals in ((1, 3), (3, 9)):
        exchange, stop = Reluctant(refusals), threading.Event()
        fetcher = module.Fetcher(
            [request.hub],
            str(tmp_path / f"private{threads}"),
            options=module.Options(connections=threads, max_connections=threads),
            progress=module.Progress(),
            stop=stop,
            done=lambda *_: None,
            exchange=exchange,
        )
        waits: list[float] = []
        fetcher._changed.wait = Looks(fetcher._changed.wait, waits)
        fetcher.run([module.Task(entry, str(tmp_path / f"{threads}" / entry.path)) for entry in entries])
        assert exchange.claims == refusals + len(entries)
        assert waits.count(module._LOOK_AGAIN) == refusals
        if threads == 1:
            assert exchange.granted == [entry.path for entry in entries]


def test_progress_is_told_while_it_lasts(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPORT_SECONDS", 0.01)
    seen: list[dict[str, Any]] = []
    real = module.write_json

    def spy(path: str, value: Any, **options: Any) -> None:
        seen.append(value)
        real(path, value, **options)

    monkeypatch.setattr(module, "write_json", spy)
    world.run(options={"rate_limit": 6_000_000})
    fetching = [value for value in seen if value["state"] == "fetching"]
    assert any(0 < value["bytes_done"] < value["bytes_total"] and value["active"] for value in fetching)
    last = json.loads(world.own("progress.json").read_text())
    assert last["state"] == "done"
    assert last["bytes_done"] == last["bytes_total"]
    assert last["files_done"] == last["files_total"]
    assert module.describe(fetching[-1]).startswith("fetching ")
    assert module.describe(last) == "done"
    assert module.describe(None) == ""


def test_a_journal_of_this_boot_speaks_of_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text(f"{4096:020d} {8192:020d} {module.boot_id()}\n")
    assert module.read_journal(str(path)) == 8192
    # After a crash of the host, only of what was on the disk.
    path.write_text(f"{4096:020d} {8192:020d} another-boot\n")
    assert module.read_journal(str(path)) == 4096


def test_resuming_in_the_middle_of_a_block(world: Any) -> None:
    for reached in (1, 4095, 4097, 100_001):
        world.hub.fault("cut", path=SHARD, on="cdn", after=reached)
        with pytest.raises(FetchError):
            world.run(options={"retries": 0, "min_rate": 1 << 40, "min_rate_seconds": 99})
    before = module.journaled(str(world.own("")), listed(world, SHARD))
    assert before == 1 + 4095 + 4097 + 100_001
    world.hub.clear_faults()
    assert world.run().resumed_bytes == before
    assert complete(world)
    assert world.hub.bytes_sent(SHARD, "cdn") == len(world.files[SHARD])


def test_data_is_made_to_last_while_it_comes(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    world.hub.fault("trickle", path=SHARD, on="cdn", rate=400_000)
    world.run(options={"flush_seconds": 0.1})
    assert complete(world)
    assert len(synced) >= 4, "the data and the journal, more than once"


def test_a_connection_too_many_hands_its_file_back(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[int] = []

    def observe(governor: Any, _rate: float, _wanted: int) -> int:
        governor.target = 1 if not targets else 4
        targets.append(governor.target)
        return governor.target

    monkeypatch.setattr(module, "WINDOW", 0.1)
    monkeypatch.setattr(module.Governor, "observe", observe)
    outcome = world.run(options={"rate_limit": 3_000_000})
    assert targets[:2] == [1, 4]
    assert complete(world)
    assert outcome.resumed_bytes == 0, "the digest was kept, nothing was read again"
    assert outcome.fetched_bytes == sum(map(len, world.files.values()))
    assert max(world.hub.count("cdn", path) for path in world.files) > 1
    assert list(world.own("parts").iterdir()) == []


def test_what_was_handed_back_is_kept_when_the_run_ends(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(governor: Any, _rate: float, _wanted: int) -> int:
        governor.target = 1
        return 1

    monkeypatch.setattr(module, "WINDOW", 0.1)
    monkeypatch.setattr(module.Governor, "observe", observe)
    world.hub.fault("missing", path="tiktoken.model", on="cdn", times=None)
    blocker = world.hub.fault("throttled", path="tiktoken.model", on="cdn", seconds=1)
    world.hub.faults.insert(0, world.hub.faults.pop(world.hub.faults.index(blocker)))
    with pytest.raises(FetchError):
        world.run(options={"rate_limit": 500_000, "connections": 8})
    world.hub.clear_faults()
    fetched = world.hub.bytes_sent("model-*", "cdn")
    outcome = world.run()
    assert complete(world)
    assert outcome.resumed_bytes > 0
    assert fetched > 0


def test_mirrors_are_asked_first(world: Any) -> None:
    from lab_hub import Hub as Server  # noqa: PLC0415

    with Server(world.root) as mirror:
        client = world.request().hub.__class__(mirror.endpoint, "lab/tiny", world.commit, retries=0, backoff=0.01)
        mirror.fault("missing", path=SHARD, on="resolve", times=None)
        mirror.fault("corrupt", path="model-00001*", on="cdn", at=7, times=None)
        mirror.fault("drop", path="model-00003*", on="cdn", times=None)
        world.run(mirrors=[client])
        assert complete(world)
        assert mirror.count("cdn", "model-00004*") == 1
        assert world.hub.count("cdn", "model-00004*") == 0
        for name in ("model-00001*", SHARD, "model-00003*"):
            assert world.hub.count("cdn", name) == 1
    receipts = json.loads(world.own("receipts.json").read_text())["files"]
    assert receipts[SHARD]["source"] == world.hub.endpoint
    assert receipts["model-00004-of-00005.safetensors"]["source"] == mirror.endpoint
    # One that is gone altogether is no loss either.
    (world.dest / SHARD).unlink()
    world.run(mirrors=[client])
    assert complete(world)


# Fetches again and again in processes that are killed after a moment, as many times as it is told to.
KILLER = """
import json, os, random, signal, sys, time
sys.path[:0] = json.loads(sys.argv[1])
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_job import Request, ensure
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.fetch import Options
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import Hub
endpoint, commit, dest = sys.argv[2:5]
numbers = random.Random(int(sys.argv[5]))
for _kill in range(int(sys.argv[6])):
    child = os.fork()
    if child == 0:
        ensure(Request(hub=Hub(endpoint, "lab/tiny", commit), repository="lab/tiny", revision=commit, dest=dest,
            scope="all", pipeline_layers=[], stages=[], language_model_only=True, allow_tmpfs=True, lock_timeout=10,
            options=Options(connections=3, max_connections=3, flush_seconds=0)))
        os._exit(0)
    time.sleep(numbers.uniform(0, 0.2))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_killed_fifty_times_it_ends_with_every_byte_right_and_none_fetched_twice(world: Any) -> None:
    numbers = random.Random(11)
    size, rate = 600_000, 500_000
    step = rate // 10
    world.publish({f"part {number}.bin": numbers.randbytes(size + number) for number in range(6)})
    world.hub.fault("trickle", path="*.bin", on="cdn", rate=rate, times=None)
    arguments = [json.dumps(sys.path), world.hub.endpoint, world.commit, str(world.dest), "23", "50"]
    subprocess.run([sys.executable, "-c", KILLER, *arguments], check=True, timeout=300)
    world.hub.clear_faults()
    world.run()
    assert complete(world)
    assert list(world.own("parts").iterdir()) == []
    for path, data in world.files.items():
        requests = [request for request in world.hub.seen("cdn", path) if request.bytes]
        starts = [int((request.range or "bytes=0-")[6:-1]) for request in requests]
        ends = [start + request.bytes for start, request in zip(starts, requests, strict=True)]
        assert ends[-1] == len(data)
        assert starts == sorted(starts)
        assert len(starts) < 3 or starts[-1] > 0, (path, starts, ends)
        for end, start in zip(ends[:-1], starts[1:], strict=True):
            # What was on its way when the process was killed, more on a busy machine, and what is no whole block.
            assert end - start <= 5 * step + 4096, (path, starts, ends)


def test_what_a_run_leaves_that_was_killed_when_the_file_had_its_name_is_cleared_away(world: Any) -> None:
    world.publish({"a.bin": b"x" * 10_000})
    world.run()
    (world.own("receipts.json")).unlink()
    journal = Path(module.part_path(str(world.own("parts")), listed(world, "a.bin")) + ".journal")
    journal.write_text("10000")
    world.run()
    assert list(world.own("parts").iterdir()) == []
    assert complete(world)


def test_clocks_that_jump_change_nothing(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world.hub.url_lifetime = 1e12
    clock = itertools.cycle([1_800_000_000.0, 0.0, 4_000_000_000.0, 1_000_000_000.0])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    world.hub.fault("unavailable", path=SHARD, on="cdn")
    world.hub.fault("cut", path=SHARD, on="cdn", after=100_000)
    world.run()
    assert complete(world)
    stamp = 4_000_000_000
    for path in world.dest.rglob("*.safetensors"):
        os.utime(path, (stamp, stamp))
    outcome = world.run()
    assert not outcome.changed
    assert outcome.hashed
    assert world.run().hashed == []
