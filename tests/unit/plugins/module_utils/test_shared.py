# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two hosts, here two processes with different names, and one directory."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import checkpoint_job as module
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import joint, lease, receipts
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.direct import Buffers
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.fetch import Options, Part
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.joint import Board
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import Digest, Entry
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import StorageError

# argv: paths, what to do as JSON. Says what came of it.
HOST = """
import json, os, socket, sys, threading, time
sys.path[:0] = json.loads(sys.argv[1])
how = json.loads(sys.argv[2])
socket.gethostname = lambda: how["name"]
os.fsync = os.fdatasync = lambda _descriptor: None
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import fetch, lease, receipts
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_job import ERRORS, Request, ensure
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import Hub
lease._POLL = 0.02
real = receipts.hash_file
def slow(*arguments, **options):
    time.sleep(how["slow"])
    return real(*arguments, **options)
receipts.hash_file = slow
stop = threading.Event()
client = {"retries": 3, "backoff": 0.01, "timeout": 5, "stop": stop}
options = fetch.Options(retries=3, backoff=0.01, connections=2, flush_bytes=50_000, flush_seconds=0.05)
request = Request(
    repository="lab/tiny", revision=how["commit"], dest=how["dest"], scope="all", pipeline_layers=[], stages=[],
    language_model_only=True, hub=Hub(how["endpoint"], "lab/tiny", how["commit"], **client), options=options,
    stop=stop, allow_tmpfs=True, shared=True, shared_timeout=how["timeout"], lock_timeout=60, verify=how["verify"],
)
try:
    outcome = ensure(request)
    said = {
        "changed": outcome.changed, "fetched": outcome.fetched_bytes, "hashed": outcome.hashed,
        "resumed": outcome.resumed_bytes, "verified": outcome.verified, "warnings": outcome.warnings,
    }
except ERRORS as error:
    said = {"failed": str(error)}
print(json.dumps(said), flush=True)
"""


class Hosts:
    """Processes that are hosts."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.children: list[subprocess.Popen[str]] = []

    def start(
        self, name: str, *, timeout: float = 20, verify: str = "receipt", slow: float = 0
    ) -> subprocess.Popen[str]:
        how = {
            "name": name,
            "commit": self.world.commit,
            "dest": str(self.world.dest),
            "endpoint": self.world.hub.endpoint,
            "timeout": timeout,
            "verify": verify,
            "slow": slow,
        }
        command = [sys.executable, "-c", HOST, json.dumps(sys.path), json.dumps(how)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.children.append(child)
        return child

    def holder(self) -> dict[str, Any] | None:
        """Who has the lease."""
        try:
            (name,) = names(self.world.own("lease"))
            token = name.partition(".")[0]
            return json.loads(self.world.own(f"holders/{token}/holder.json").read_text())
        except (OSError, ValueError):
            return None


def names(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir()]


def said(child: subprocess.Popen[str]) -> dict[str, Any]:
    output, _errors = child.communicate(timeout=120)
    return json.loads(output)


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


def written(world: Any, name: str) -> int:
    """How much of a file the holder has written."""
    journals = list(world.own("holders").glob(f"*/parts/{name}.*.journal"))
    fields = journals[0].read_text().split() if journals else []
    return int(fields[1]) if len(fields) == 3 else 0


@pytest.fixture
def hosts(world: Any) -> Iterator[Hosts]:
    hosts = Hosts(world)
    yield hosts
    for child in hosts.children:
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
        child.communicate()


def clean(world: Any) -> None:
    """Nothing is left but a lease that is free."""
    assert names(world.own("lease")) == ["free"]
    assert names(world.own("holders")) == []
    assert list(world.own("parts").iterdir()) == []
    assert not world.own("proving").exists()
    assert not world.own("bad").exists()


def test_one_fetches_and_both_have_it(world: Any, hosts: Hosts) -> None:
    world.hub.fault("trickle", path="model-00001*", on="cdn", rate=600_000)
    children = [hosts.start(name) for name in ("rank0", "rank1")]
    results = [said(child) for child in children]
    assert sorted(result["changed"] for result in results) == [False, True]
    assert world.held() == world.files
    for path, data in world.files.items():
        assert world.hub.bytes_sent(path) == len(data), path
    assert all("failed" not in result for result in results)
    assert {result["verified"].split(" ")[0] for result in results} == {"sha256", "receipt"}
    clean(world)
    world.hub.clear_log()
    for name in ("rank0", "rank1"):
        again = said(hosts.start(name))
        assert not again["changed"]
        assert again["hashed"] == []
    assert world.hub.log == []


def test_one_is_killed_with_the_lease_and_the_other_one_goes_on(world: Any, hosts: Hosts) -> None:
    name = "model-00001-of-00005.safetensors"
    world.hub.fault("trickle", path=name, on="cdn", rate=60_000)
    first = hosts.start("rank0", timeout=1)
    until(hosts.holder)
    second = hosts.start("rank1", timeout=1)
    until(lambda: written(world, name) > 100_000)
    assert hosts.holder()["host"] == "rank0"
    os.kill(first.pid, signal.SIGKILL)
    result = said(second)
    assert result["changed"]
    assert world.held() == world.files
    assert result["resumed"] >= 100_000 - 4096
    assert world.hub.bytes_sent(name, "cdn") < len(world.files[name]) + 100_000
    clean(world)


def test_killed_at_any_point_the_directory_is_right_in_the_end(world: Any, hosts: Hosts) -> None:
    numbers = random.Random(5)
    size, rate = 400_000, 400_000
    world.publish({f"part {number}.bin": numbers.randbytes(size + number) for number in range(5)})
    world.hub.fault("trickle", path="*.bin", on="cdn", rate=rate, times=None)
    running = {name: hosts.start(name, timeout=0.8) for name in ("rank0", "rank1")}
    for _kill in range(12):
        holder = until(hosts.holder)
        time.sleep(numbers.uniform(0, 0.6))
        for name, child in running.items():
            if child.pid == holder["pid"] and child.poll() is None:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
                running[name] = hosts.start(name, timeout=0.8)
        if all(child.poll() is not None for child in running.values()):
            break
    world.hub.clear_faults()
    results = [said(child) for child in running.values()]
    assert all("failed" not in result for result in results), results
    assert world.held() == world.files
    again = said(hosts.start("rank1", verify="full"))
    assert not again["changed"]
    clean(world)
    for path, data in world.files.items():
        assert world.hub.bytes_sent(path, "cdn") < 2.5 * len(data), "most of what the dead had fetched was used"


def test_one_that_was_halted_spoils_nothing_when_it_wakes(world: Any, hosts: Hosts) -> None:
    name = "model-00001-of-00005.safetensors"
    world.hub.fault("trickle", path=name, on="cdn", rate=200_000)
    first = hosts.start("rank0", timeout=1)
    until(lambda: written(world, name) > 50_000)
    os.kill(first.pid, signal.SIGSTOP)
    second = said(hosts.start("rank1", timeout=1))
    assert second["changed"]
    assert world.held() == world.files
    before = {path: path.stat().st_ino for path in world.dest.glob("*.safetensors")}
    os.kill(first.pid, signal.SIGCONT)
    result = said(first)
    assert "another one has taken over the work" in result["failed"]
    assert {path: path.stat().st_ino for path in world.dest.glob("*.safetensors")} == before
    assert world.held() == world.files
    assert not said(hosts.start("rank1"))["changed"]


def test_bytes_of_a_former_holder_that_come_late_are_not_in_the_file(world: Any, tmp_path: Path) -> None:
    name = "model-00001-of-00005.safetensors"
    data = world.files[name]
    world.run(scope="all", shared=True, options={"connections": 1})
    listed = json.loads(world.own("listing.json").read_text())["files"]
    entry = next(Entry(**item) for item in listed if item["path"] == name)
    (world.dest / name).unlink()
    # Another host has begun, was not heard of any more, and still has the file open.
    other = lease.Lease(str(world.own("")), 20)
    world.own("lease/free").rename(world.own(f"lease/{other.token}.0"))
    parts = world.own(f"holders/{other.token}/parts")
    parts.mkdir(parents=True)
    part = Part(str(parts), entry, Buffers())
    part.room()[:200_000] = data[:200_000]
    part.took(200_000)
    part.put_down(Options())
    descriptor = os.open(part.path, os.O_WRONLY)
    world.hub.clear_log()
    arrived = threading.Event()
    real = module.fetch.Fetcher._receive_into

    def receive(self: Any, task: Any, source: Any, own: Part, digest: Digest) -> None:
        os.pwrite(descriptor, b"late", 0)
        os.pwrite(descriptor, b"late", 150_000)
        arrived.set()
        real(self, task, source, own, digest)
        os.pwrite(descriptor, b"late", 250_000)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.fetch.Fetcher, "_receive_into", receive)
        outcome = world.run(shared=True, shared_timeout=0.2)
    os.close(descriptor)
    assert arrived.is_set()
    assert outcome.resumed_bytes == 200_000
    assert world.held() == world.files
    assert world.hub.bytes_sent(name, "cdn") == len(data) - 200_000
    assert world.run(verify="full").replaced == []
    clean(world)


def test_each_host_proves_a_part(world: Any, hosts: Hosts) -> None:
    world.publish({f"part {number}.bin": bytes([number]) * 1000 for number in range(40)})
    world.run()
    world.hub.clear_log()
    children = [hosts.start(name, verify="full", slow=0.2) for name in ("rank0", "rank1")]
    results = [said(child) for child in children]
    assert not any(result["changed"] for result in results)
    assert sorted(result["verified"].partition(" (")[2].partition(" ")[2] for result in results)[0] != ""
    words = sorted(result["verified"] for result in results)
    assert words[1].startswith("sha256 (together with rank"), words
    assert words[0].endswith(" of them by another host)"), words
    helped = int(words[0].partition("(")[2].split()[0])
    assert 5 <= helped <= 35
    assert world.hub.log == []
    clean(world)


def test_a_wrong_file_that_the_other_host_finds_is_replaced(world: Any, hosts: Hosts) -> None:
    world.publish({f"part {number}.bin": bytes([number]) * 1000 for number in range(20)})
    world.run()
    for number in range(20):
        (world.dest / f"part {number}.bin").write_bytes(b"x" * 1000)
    children = [hosts.start(name, slow=0.2) for name in ("rank0", "rank1")]
    results = [said(child) for child in children]
    assert sorted(result["changed"] for result in results) == [False, True]
    assert world.held() == world.files
    (winner,) = [result for result in results if result["changed"]]
    assert len(winner["warnings"]) == 20
    assert "of them by another host" in winner["verified"]


def test_without_the_option_a_shared_directory_is_respected(world: Any, hosts: Hosts) -> None:
    world.run(shared=True)
    (world.dest / "config.json").unlink()
    taken = lease.Lease(str(world.own("")), 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "host_id", lambda: "other")
        taken.acquire()
    told: list[str] = []
    runner = threading.Thread(target=world.run, kwargs={"tell": told.append})
    runner.start()
    until(lambda: told)
    assert told[0].startswith("waiting for another run on")
    assert not (world.dest / "config.json").exists()
    taken.release()
    runner.join(30)
    assert (world.dest / "config.json").exists()


def test_a_host_alone_needs_nobody(world: Any) -> None:
    assert world.run(shared=True).changed
    assert world.held() == world.files
    assert world.run(shared=True, verify="full").verified == "sha256"
    clean(world)


def test_a_failure_leaves_the_lease_to_the_next(world: Any) -> None:
    name = "model-00001-of-00005.safetensors"
    world.hub.fault("cut", path=name, on="cdn", after=200_000)
    world.hub.fault("missing", path=name, on="resolve", skip=1, times=None)
    with pytest.raises(module.fetch.FetchError):
        world.run(shared=True, options={"connections": 1, "retries": 0})
    assert names(world.own("lease")) == ["free"]
    world.hub.clear_faults()
    world.run(shared=True)
    assert world.held() == world.files
    clean(world)


@pytest.mark.parametrize("swept", [False, True])
def test_a_lease_that_is_lost_in_the_middle_ends_the_run(world: Any, swept: bool) -> None:
    real = module.Checkpoint._check_room

    def rob(self: Any, wanted: Any) -> None:
        (name,) = names(world.own("lease"))
        world.own(f"lease/{name}").rename(world.own("lease/other.0"))
        if swept:
            shutil.rmtree(world.own("holders"))
            world.own("holders").touch()
        real(self, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Checkpoint, "_check_room", rob)
        with pytest.raises(StorageError, match="another one has taken over the work"):
            world.run(shared=True)
    assert names(world.own("lease")) == ["other.0"]
    assert "model-00001-of-00005.safetensors" not in world.held()


# Hashing together


def files(tmp_path: Path, count: int) -> tuple[list[Entry], Callable[[Entry], str]]:
    entries = []
    for number in range(count):
        data = bytes([number]) * (100 + number)
        (tmp_path / f"file{number}").write_bytes(data)
        digest = Digest(Entry(f"file{number}", len(data), "0" * 64))
        digest.update(data)
        entries.append(Entry(f"file{number}", len(data), digest.sha256))
    return entries, lambda entry: str(tmp_path / entry.path)


def test_a_helper_that_dies_leaves_its_files_to_the_holder(tmp_path: Path) -> None:
    entries, path_of = files(tmp_path, 4)
    board, helper = Board(str(tmp_path), "token", 0.3), Board(str(tmp_path), "token", 0.3)
    board.put_up(entries)
    helper._numbers = dict(board._numbers)
    assert helper.claim(entries[0])
    assert not board.claim(entries[0])
    began = time.monotonic()
    assert board.collect(entries[:1], path_of, lambda *_: None, lambda: False) == entries[:1]
    assert time.monotonic() - began >= 0.3
    board.take_down()
    assert not (tmp_path / "proving").exists()


def test_what_a_helper_says_of_another_file_is_not_believed(tmp_path: Path) -> None:
    entries, path_of = files(tmp_path, 3)
    board, helper = Board(str(tmp_path), "token", 5), Board(str(tmp_path), "token", 5)
    board.put_up(entries)
    assert helper.help(path_of, lambda: False, lambda _count: None) == 3
    (tmp_path / "file1").write_bytes(b"x" * entries[1].size)
    told: list[str] = []
    left = board.collect(entries, path_of, lambda entry, _digest, _stats: told.append(entry.path), lambda: False)
    assert left == [entries[1]]
    assert told == ["file0", "file2"]


@pytest.mark.parametrize("text", ["", "{}", '{"files": 3}', '{"files": [{"path": "../x"}]}'])
def test_a_list_that_is_none_is_not_worked_on(tmp_path: Path, text: str) -> None:
    (tmp_path / "proving" / "token").mkdir(parents=True)
    (tmp_path / "proving" / "token" / "list.json").write_text(text)
    assert Board(str(tmp_path), "token", 5).help(str, lambda: False, lambda _count: None) == 0


def test_files_of_others_are_handed_back(tmp_path: Path) -> None:
    entries, path_of = files(tmp_path, 4)
    seen: list[str] = []
    others = receipts.hash_files(
        [(path_of(entry), entry) for entry in entries],
        done=lambda entry, _digest, _stats: seen.append(entry.path),
        claim=lambda entry: entry.path != "file2",
    )
    assert [entry.path for entry in others] == ["file2"]
    assert sorted(seen) == ["file0", "file1", "file3"]
    assert joint.forget(str(tmp_path)) is None
