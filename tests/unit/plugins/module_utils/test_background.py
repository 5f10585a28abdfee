# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work that outlives who began it, each in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import background as module
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.background import BackgroundError, Job

# Begins work that ends when a file appears, follows it for a moment, and says what it saw.
CHILD = """
import json, os, sys, time
sys.path[:0] = json.loads(sys.argv[1])
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.background import BackgroundError, Job, start
job = Job(sys.argv[2], "job")
def work(tell):
    tell("waiting for the file")
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.01)
    with open(sys.argv[3]) as stream:
        text = stream.read()
    if text == "fail":
        raise ValueError("as asked")
    return {"text": text}
run = start(job, work)
print(json.dumps([run.ident, run.attached, run.pid]), flush=True)
try:
    print(json.dumps(run.follow(float(sys.argv[4]))), flush=True)
except BackgroundError as error:
    print(json.dumps(str(error)), flush=True)
"""


class Play:
    """Who begins work and follows it."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "runs"
        self.file = tmp_path / "file"
        self.job = Job(str(self.directory), "job")

    def process(self, seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, json.dumps(sys.path), str(self.directory), str(self.file), str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def run(self, seconds: float) -> list[Any]:
        with self.process(seconds) as process:
            output, _errors = process.communicate(timeout=60)
        return [json.loads(line) for line in output.splitlines()]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


def test_work_that_ends_in_time(play: Play) -> None:
    play.file.write_text("x")
    (_ident, attached, _pid), status = play.run(60)
    assert not attached
    assert status["done"]
    assert status["result"] == {"text": "x"}
    assert module.running(play.job) is None


def test_who_comes_later_attaches_and_all_get_the_result(play: Play) -> None:
    (ident, attached, pid), status = play.run(0)
    assert not attached
    assert status is None, "it goes on, though who began it is gone"
    (second, attached, same), status = play.run(0.1)
    assert (second, attached, same) == (ident, True, pid)
    run = module.running(play.job)
    assert run is not None
    assert run.state() == "waiting for the file"
    with play.process(60) as third:
        assert third.stdout is not None
        assert json.loads(third.stdout.readline())[1:] == [True, pid]
        play.file.write_text("y")
        assert json.loads(third.stdout.readline())["result"] == {"text": "y"}
    result = module.again(play.job, ident).follow(0)
    assert result is not None
    assert result["result"] == {"text": "y"}


def test_who_missed_the_end_follows_the_next_run_of_the_same_work(play: Play) -> None:
    play.file.write_text("first")
    (missed, _attached, _pid), _status = play.run(60)
    play.file.unlink()
    (ident, _attached, pid), _status = play.run(0)
    run = module.again(play.job, missed)
    assert run.follow(0) is None
    assert (run.ident, run.pid) == (ident, pid)
    play.file.write_text("second")
    status = module.again(play.job, missed).follow(30)
    assert status is not None
    assert status["result"] == {"text": "second"}


@pytest.mark.parametrize("after", ["status", "waitpid"])
def test_work_that_is_done_between_two_looks(play: Play, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """Whatever is looked at first, the work begins and ends right after it."""
    ended: list[tuple[int, int]] = []

    def end(pid: int) -> None:
        if not ended:
            ended.append(os.waitpid(pid, 0))

    pids: list[int] = []
    real_fork, real_wait, real_read = os.fork, os.waitpid, module.read_json

    def fork() -> int:
        pids.append(real_fork())
        return pids[-1]

    def wait(pid: int, options: int) -> tuple[int, int]:
        if options == 0 or not pids:
            return real_wait(pid, options)
        seen = ended[-1] if ended else (0, 0)
        if after == "waitpid":
            end(pid)
        return seen

    def read(path: str) -> Any:
        seen = real_read(path)
        if pids and pids[-1] and after == "status":
            end(pids[-1])
        return seen

    monkeypatch.setattr(module.os, "fork", fork)
    monkeypatch.setattr(module.os, "waitpid", wait)
    monkeypatch.setattr(module, "read_json", read)
    run = module.start(play.job, lambda _tell: {"text": "at once"})
    status = run.follow(30)
    assert status is not None
    assert status["result"] == {"text": "at once"}


def test_work_whose_status_is_overwritten_at_once(play: Play) -> None:
    """Somebody begins the same work again before we look: theirs is as good."""
    real = module.read_json
    other = {"id": "another", "pid": 1, "done": True, "result": {"text": "theirs"}}

    def read(path: str) -> Any:
        return None if real(path) is None else other

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "read_json", read)
        status = module.start(play.job, lambda _tell: {"text": "ours"}).follow(30)
    assert status is not None
    assert status["result"] == {"text": "theirs"}


def test_an_end_without_a_word_is_told(play: Play) -> None:
    (ident, _attached, pid), _status = play.run(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(BackgroundError, match=f"process {pid} on .* ended without a word"):
        module.again(play.job, ident).follow(30)
    # The next one begins anew.
    play.file.write_text("z")
    (second, attached, _pid), status = play.run(60)
    assert second != ident
    assert not attached
    assert status["result"] == {"text": "z"}


def test_an_error_nobody_thought_of_is_told(play: Play) -> None:
    play.file.write_text("fail")
    _run, status = play.run(60)
    assert status["result"] == {"failed": True, "msg": "ValueError: as asked"}
    assert "as asked" in Path(play.job.log).read_text()


def test_a_hang_up_does_not_end_it(play: Play) -> None:
    (ident, _attached, pid), _status = play.run(0)
    os.kill(pid, signal.SIGHUP)
    play.file.write_text("x")
    status = module.again(play.job, ident).follow(30)
    assert status is not None
    assert status["result"] == {"text": "x"}


def test_two_at_once_begin_it_once(play: Play) -> None:
    processes = [play.process(60) for _number in range(4)]
    runs = [json.loads(process.stdout.readline()) for process in processes if process.stdout]
    play.file.write_text("x")
    for process in processes:
        with process:
            assert json.loads(process.communicate(timeout=60)[0])["result"] == {"text": "x"}
    assert len({pid for _ident, _attached, pid in runs}) == 1
    assert sorted(attached for _ident, attached, _pid in runs) == [False, True, True, True]


def test_a_lock_of_nobody_is_none(tmp_path: Path) -> None:
    assert module.holder_of(str(tmp_path / "none")) is None
    (tmp_path / "lock").touch()
    assert module.holder_of(str(tmp_path / "lock")) is None
