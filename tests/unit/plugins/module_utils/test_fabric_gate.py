# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verdict over what was measured; tests/fixtures/fabric-test is real output from two H200."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import fabric_gate

ROOT = Path(__file__).resolve().parents[4]
REAL = ROOT / "tests" / "fixtures" / "fabric-test"
GATES = yaml.safe_load((ROOT / "roles/fabric/defaults/main.yml").read_text(encoding="utf-8"))["fabric_test_gates"]


def real(name):
    return json.loads((REAL / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def pair():
    return {"a": real("two0"), "b": real("two1")}


def row(result, name):
    return next(row for row in result["rows"] if row["measurement"] == name)


def test_real_figures_of_two_hosts(pair):
    result = fabric_gate.judge(pair, GATES)
    assert result["failed"] == 0
    assert row(result, "send/recv of a pair") == {
        "measurement": "send/recv of a pair",
        "bytes": 1073741824,
        "worst": 369.433,
        "where": "rank 0 to 1",
        "best": 369.433,
        "unit": "GB/s",
        "gate": GATES["send_recv"],
        "status": "ok",
        "straggler": False,
    }
    # Ring is gated at 300 and was faster here; it warns below 350.
    assert row(result, "all-reduce over all hosts, Ring")["status"] == "warn"
    assert any(line.startswith("WARN all-reduce over all hosts, Ring at 1024 MiB: ") for line in result["lines"])


def test_real_figures_of_one_host_fail_the_gate_of_eight_gpus():
    result = fabric_gate.judge({"a": real("one")}, GATES)
    assert row(result, "all-reduce within a host")["status"] == "fail"
    assert result["failed"] == 1
    assert fabric_gate.judge({"a": real("one")}, {})["failed"] == 0


def test_fewer_gpus_than_were_declared_fail_as_they_did_on_a_real_machine():
    """One H200, where two were declared."""
    assert fabric_gate.judge(real("fewer"), {})["problems"] == [
        f"h0: rank {rank} failed ({algorithm}): RuntimeError: torch sees 1 GPUs, and 2 were declared"
        for algorithm in ("default", "Ring")
        for rank in (0, 1)
    ]
    assert fabric_gate.judge(real("one-gpu"), GATES)["failed"] == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("NCCL error\nncclInvalidUsage: x.\nLast error:\nDuplicate GPU detected\n", "Duplicate GPU detected"),
        ("one\ntwo", "one"),
        ("", ""),
    ],
)
def test_the_last_word_of_nccl_is_what_is_told(tmp_path, monkeypatch, text, told):
    module = program()

    def fail(*_args):
        raise RuntimeError(text)

    monkeypatch.setattr(module, "_measure", fail)
    module.measure(0, {"host": 0, "local": 1}, str(tmp_path))
    assert json.loads((tmp_path / "0.json").read_text())["error"] == f"RuntimeError: {told}"


def test_what_could_not_be_measured_is_a_problem(pair):
    broken = copy.deepcopy(pair)
    process = broken["b"]["runs"][0]["processes"][0]
    process["error"] = "DistBackendError: NCCL error: unhandled system error"
    broken["a"]["runs"][0]["processes"][0]["sum_is_right"] = False
    broken["a"]["runs"][1]["processes"][0]["received_is_right"] = False
    broken["a"]["rails"] = [{"rail": "mlx5_4:1", "index": 0, "gbit_s": None, "error": "Couldn't connect"}]
    problems = fabric_gate.judge(broken, GATES)["problems"]
    assert problems == [
        "a: rail mlx5_4:1 could not be measured: Couldn't connect",
        "a: the sum that rank 0 got is wrong (default).",
        "a: rank 0 received other bytes than were sent.",
        "b: rank 1 failed (default): DistBackendError: NCCL error: unhandled system error",
    ]


def test_sockets_where_there_are_rails_are_a_failure_whatever_the_figures(pair):
    run = pair["a"]["runs"][0]
    run["network"] = {"infiniband": 0, "sockets": 8, "gpudirect": 0}
    assert fabric_gate.judge(pair, GATES)["failed"] == 0
    run["expect_infiniband"] = True
    (problem,) = fabric_gate.judge(pair, GATES)["problems"]
    assert problem.startswith("a: NCCL goes through sockets, not InfiniBand")


def test_one_slow_rail_among_eight(pair):
    pair["a"]["rails"] = [
        {"rail": f"mlx5_{n}:1", "index": n, "gbit_s": 391.0 if n != 3 else 196.0, "error": None} for n in range(8)
    ]
    found = row(fabric_gate.judge(pair, GATES), "one rail")
    assert (found["worst"], found["where"], found["status"], found["straggler"]) == (196.0, "a mlx5_3:1", "fail", True)


def program():
    spec = importlib.util.spec_from_file_location("fabric_test_program", ROOT / "roles/fabric/files/fabric_test.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pairs_of_one_host_are_all_of_its_gpus():
    ways = [way for kind, turn in program().turns(8, 1) for way in turn if kind == "send_recv"]
    assert len(ways) == len(set(ways)) == 8 * 7 // 2
    assert program().turns(1, 1) == []


def test_pairs_of_two_hosts_are_the_same_gpu_of_each_alone_and_all_at_once():
    assert program().turns(2, 2) == [
        ("send_recv", [(0, 2)]),
        ("send_recv", [(1, 3)]),
        ("send_recv_at_once", [(0, 2), (1, 3)]),
    ]
    assert program().turns(1, 3)[-1] == ("send_recv_at_once", [(1, 2)])
