# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who may work in a directory of several hosts. Hosts are threads, or processes, with names of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import lease as module
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.lease import FREE, Lease, LeaseLostError

# Takes the lease many times, and each time counts in a file as only somebody who is alone can.
COUNTER = """
import json, sys, time
sys.path[:0] = json.loads(sys.argv[1])
import socket
socket.gethostname = lambda: sys.argv[3]
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import lease
lease._POLL = 0.001
for _ in range(int(sys.argv[5])):
    one = lease.Lease(sys.argv[2], 20)
    one.prepare()
    one.acquire()
    with open(sys.argv[4]) as stream:
        count = int(stream.read())
    time.sleep(0.002)
    with open(sys.argv[4], "w") as stream:
        stream.write(str(count + 1))
    one.release()
"""


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL", 0.01)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint" / ".kimi-k3"


def of(private: Path, timeout: float = 20, **options: Any) -> Lease:
    lease = Lease(str(private), timeout, **options)
    lease.prepare()
    return lease


def names(private: Path) -> list[str]:
    return [path.name for path in (private / "lease").iterdir()]


def halt(lease: Lease) -> None:
    """A holder that is not heard of any more, and does not know."""
    lease._ended.set()
    lease._thread.join()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What runs in here runs on a host of the given name."""

    def function(name: str) -> None:
        monkeypatch.setattr(module, "host_id", lambda: name)

    return function


def test_it_is_free_or_somebodys(private: Path) -> None:
    assert not module.leased(str(private))
    first = of(private)
    assert module.leased(str(private))
    assert names(private) == [FREE]
    first.acquire()
    assert names(private)[0].startswith(first.token)
    assert module.held(str(private))
    assert json.loads((private / "holders" / first.token / "holder.json").read_text())["pid"] == os.getpid()
    first.release()
    assert names(private) == [FREE]
    assert not module.held(str(private))
    assert list((private / "holders").iterdir()) == []
    of(private).acquire()


def test_never_two_at_once(private: Path, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    rounds, hosts = 15, 4
    command = [sys.executable, "-c", COUNTER, json.dumps(sys.path), str(private)]
    children = [subprocess.Popen([*command, f"host{number}", str(counter), str(rounds)]) for number in range(hosts)]
    assert [child.wait(120) for child in children] == [0] * hosts
    assert counter.read_text() == str(rounds * hosts)
    assert names(private) == [FREE]
    assert [path.name for path in private.iterdir() if path.name.startswith("lease.")] == []


def test_one_that_is_heard_of_is_waited_for(private: Path, elsewhere: Any) -> None:
    first = of(private, 0.4)
    first.acquire()
    elsewhere("other")
    second = of(private, 0.4)
    said: list[str] = []
    waiter = threading.Thread(target=second.acquire, args=(said.append,))
    waiter.start()
    while first._beat < 3 * module._BEATS:
        waiter.join(0.05)
    assert waiter.is_alive(), "three times the time after which a silent one would be replaced"
    first.release()
    waiter.join(20)
    assert names(private)[0].startswith(second.token)
    assert second.seen == {first.token}
    assert said[0].startswith(f"another run on {os.uname().nodename} (process {os.getpid()}, since ")
    second.release()


def test_one_that_is_silent_is_replaced_and_told_so(private: Path, elsewhere: Any) -> None:
    told = []
    first = of(private, 0.3, on_lost=lambda: told.append(True))
    first.acquire()
    halt(first)
    elsewhere("other")
    second, said = of(private, 0.3), []
    began = time.monotonic()
    second.acquire(said.append)
    assert time.monotonic() - began >= 0.3
    assert "not heard of for" in said[-1]
    with pytest.raises(LeaseLostError, match=r"another one has taken over the work in .*checkpoint: .* run again"):
        first.renew()
    assert told == [True]
    first.release()
    assert names(private)[0].startswith(second.token), "who has lost it cannot give it away"
    second.renew()
    second.release()


def test_an_old_listing_takes_nothing_from_one_that_lives(private: Path, elsewhere: Any) -> None:
    first = of(private, 0.2)
    first.acquire()
    stale = names(private)[0]
    first.renew()
    elsewhere("other")
    second = of(private, 0.2)
    assert not second._take(stale)
    first.renew()
    first.release()


def test_clocks_that_jump_take_nothing(private: Path, elsewhere: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = of(private, 0.5)
    first.acquire()
    for number, path in enumerate((private / "lease").iterdir()):
        os.utime(path, (number, 4e9 * number))
    clock = iter([0.0, 4e9] * 10_000)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    elsewhere("other")
    waiter = threading.Thread(target=of(private, 0.5).acquire, daemon=True)
    waiter.start()
    waiter.join(1)
    assert waiter.is_alive()
    first.renew()
    first.release()
    waiter.join(20)


def test_a_dead_run_of_this_host_is_replaced_at_once(private: Path) -> None:
    first = of(private, 3600)
    first.acquire()
    halt(first)
    second = of(private, 3600)
    second.acquire()
    assert second.inherited == []
    assert not (private / "holders" / first.token).exists()
    second.release()


def test_a_server_that_is_asked_twice(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = of(private)
    first.acquire()
    real = os.rename

    def twice(old: Any, new: Any) -> None:
        real(old, new)
        raise FileNotFoundError(old)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", twice)
        first.renew()
    first.renew()
    first.release()


def test_a_file_system_that_is_silent_for_a_while(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = of(private, 0.2)
    first.acquire()

    def fail(*_args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(first, "_rename", fail)
        time.sleep(0.2)
    first.renew()
    first.release()


def test_who_looks_changes_the_directory_and_leaves_nothing(private: Path) -> None:
    one = of(private)
    before = (private / "lease").stat().st_mtime_ns
    module.look_again(str(private / "lease"), one.token)
    assert (private / "lease").stat().st_mtime_ns > before
    assert names(private) == [FREE]
    module.look_again(str(private / "absent"), one.token)
    # One that was killed while it looked.
    (private / "lease" / ".look.dead").touch()
    assert not module.held(str(private))
    one.acquire()
    assert module.held(str(private))
    one.release()
    (private / "lease" / FREE).unlink()
    of(private, 0.2).acquire()


@pytest.mark.parametrize("ruin", [lambda path: (path / FREE).unlink(), shutil.rmtree])
def test_a_lease_that_somebody_removed_is_made_again(private: Path, ruin: Any) -> None:
    one = of(private, 0.2)
    ruin(private / "lease")
    one.acquire()
    one.release()
    assert names(private) == [FREE]


def test_what_was_begun_goes_from_one_to_the_next(private: Path, elsewhere: Any) -> None:
    (private / "parts").mkdir(parents=True)
    (private / "parts" / "before").touch()
    first = of(private, 0.2)
    first.acquire()
    parts = Path(first.work) / "parts"
    assert [path.name for path in parts.iterdir()] == ["before"]
    (parts / "mine").touch()
    halt(first)
    elsewhere("other")
    second = of(private, 0.2)
    second.acquire()
    assert second.inherited == [first.work], "who may still be writing is not disturbed"
    assert {path.name for path in parts.iterdir()} == {"before", "mine"}
    (Path(second.work) / "parts" / "theirs").touch()
    second.bequeath()
    assert not Path(first.work).exists()
    second.release()
    assert {path.name for path in (private / "parts").iterdir()} == {"theirs"}
