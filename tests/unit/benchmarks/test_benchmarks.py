# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tools")]

import checks
import measure
import peers

HOLD = "b = b'x' * (32 << 20); import time; time.sleep(0.3)"


def test_a_cost_is_that_of_the_command_and_not_of_who_started_it(tmp_path: Path) -> None:
    ballast = bytearray(64 << 20)
    cost = measure.run("sleep", "0.2", cwd=tmp_path, output=tmp_path / "out")
    assert len(ballast) > cost.peak > 0


def test_memory_of_processes_side_by_side_is_added_up(tmp_path: Path) -> None:
    words = ["sh", "-c", '"$1" -c "$2" & "$1" -c "$2"; wait', "sh", sys.executable, HOLD]
    both = measure.run(*words, cwd=tmp_path, output=tmp_path / "out", parallel=2)
    one = measure.run(sys.executable, "-c", HOLD, cwd=tmp_path, output=tmp_path / "out")
    assert both.peak > 64 << 20
    assert 32 << 20 < one.peak < 64 << 20


def test_a_command_that_fails_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(measure.CommandError, match="exited 3, not 0"):
        measure.run("sh", "-c", "echo no; exit 3", cwd=tmp_path, output=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "no\n"


def test_costs_of_steps_in_a_row_add_up_but_for_memory() -> None:
    total = measure.Cost(1, 2, 30, 0.5) + measure.Cost(2, 1, 20, 0.25)
    assert (total.wall, total.cpu, total.peak, total.lasting) == (3, 3, 30, 3.75)


def test_wrong_bytes_end_the_benchmark(tmp_path: Path) -> None:
    digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"  # of "test"
    repository = peers.Repository("http://127.0.0.1", "a/b", "0" * 40, {"file": digest}, tmp_path)
    (tmp_path / "file").write_text("test")
    peers.sha256sum(repository, tmp_path)
    (tmp_path / "file").write_text("tets")
    with pytest.raises(measure.CommandError):
        peers.sha256sum(repository, tmp_path)


def uplink(alone: float, together: float) -> dict[str, Any]:
    ways = {"each host for itself": [{"body_bytes": alone}], "peers exchange": [{"body_bytes": together}]}
    return {"measured": True, "union_bytes": 100, "ways": ways}


def test_the_smoke_run_judges_what_crossed_the_uplink() -> None:
    assert "2.0" in checks.judge_uplink(uplink(200, 100), None)
    assert checks.judge_uplink({"measured": False}, "tc not installed").endswith("not measured: tc not installed")
    without = uplink(200, 100)
    del without["ways"]["peers exchange"]
    for told in ({"measured": False}, {}, uplink(100, 100), uplink(200, 200), without):
        with pytest.raises(checks.CheckError, match="uplink"):
            checks.judge_uplink(told, None)


def test_ceilings_count_every_byte(tmp_path: Path) -> None:
    sizes = {"whole": 8 << 20, "part": (4 << 20) + 4097, "small": 5}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    words = [sys.executable, str(BENCHMARKS / "ceiling.py")]
    read = subprocess.run(
        [*words, "read", *(str(tmp_path / name) for name in sizes)], stdout=subprocess.PIPE, check=True
    )
    assert json.loads(read.stdout)["bytes"] == sum(sizes.values())
    hashed = subprocess.run([*words, "hash", str(64 << 20)], stdout=subprocess.PIPE, check=True)
    told = json.loads(hashed.stdout)
    assert told["bytes"] <= 64 << 20
    assert told["bytes"] > (64 << 20) - (told["threads"] << 20)


def test_the_clients_pay_for_no_timers_of_the_server() -> None:
    text = "import measure; print(measure.own_network()); print(open('/proc/net/dev').read().count(':'))"
    made = subprocess.run([sys.executable, "-c", text], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["cubic", "1"]
