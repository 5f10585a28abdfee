# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The runner of the checks: it tells what hangs, ends it, and goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import checks

# Ignores what an interrupt says, and so does what it started in a session of its own, as Ansible's workers have, and
# with enough memory that its end takes a moment.
STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
heavy = "import time; held = b'x' * 500_000_000; print('held', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", heavy], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
print("still at it", flush=True)
time.sleep(600)
"""
# Says where it stands when it is interrupted, as a playbook or a test run does.
TALKATIVE = """
import time
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("was in the middle of it", flush=True)
    raise
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> checks.Log:
    monkeypatch.setattr(checks, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(checks, "GRACE", 2.0)
    return checks.Log("some-check")


def lives(pid: int) -> bool:
    try:
        # A dead process that nobody has waited for has a state, too.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_command_that_hangs_is_told_and_ended_with_all_that_it_started(log: checks.Log, tmp_path: Path) -> None:
    log.limit = 6.0
    told = tmp_path / "child"
    with pytest.raises(checks.CheckError, match=r"did not end within 6 s"):
        log.run(sys.executable, "-c", STUBBORN, told)
    written = log.path.read_text()
    assert "still at it" in written
    child = told.read_text()
    assert child in [line.split()[0] for line in written.splitlines() if line.strip()], written
    assert not lives(int(child))
    assert not checks.RUNNING


def test_what_a_command_says_when_it_is_interrupted_is_kept(log: checks.Log) -> None:
    log.limit = 3.0
    with pytest.raises(checks.CheckError):
        log.run(sys.executable, "-c", TALKATIVE)
    assert "was in the middle of it" in log.path.read_text()


def test_a_command_is_judged_by_its_exit_status(log: checks.Log) -> None:
    assert log.run("echo", "one") == "one\n"
    assert log.run("false", expect=1) == ""
    with pytest.raises(checks.CheckError, match="exited 1, not 0"):
        log.run("false")


def test_each_failure_is_among_the_last_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, log: checks.Log
) -> None:
    def broken(log: checks.Log) -> None:
        log.say("\n".join(f"line {number}" for number in range(200)))
        raise checks.CheckError("it did not hold")

    monkeypatch.setattr(checks, "ROOT", checks.LOGS.parent)
    monkeypatch.setitem(checks.CHECKS, "ruff", broken)
    monkeypatch.setitem(checks.CHECKS, "docs", lambda log: log.say("nothing"))
    monkeypatch.setattr(sys, "argv", ["checks.py", "ruff", "docs"])
    assert checks.main() == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["FAIL ruff: it did not hold", "1 passed, 1 failed"]
