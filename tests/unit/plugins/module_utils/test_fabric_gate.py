# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verdict over what was measured; tests/fixtures/fabric-test is real output from two H200."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
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


SHAPE = {"hosts": 2, "local": 1, "backend": "nccl", "rails": 0}


def test_a_gate_whose_measurement_is_missing_fails(pair):
    """Silence is no success: the figures of two GPUs as two hosts have no rails, and no copy within a GPU."""
    assert fabric_gate.judge(pair, GATES, SHAPE)["problems"] == []
    gates = {**GATES, "gpu_memory": {"warn": 1}}
    result = fabric_gate.judge(pair, gates, {**SHAPE, "rails": 8})
    assert result["problems"] == [
        "one rail: not measured, though it has a gate (rail).",
        "memory of a GPU, copied within it: not measured, though it has a gate (gpu_memory).",
    ]
    assert result["failed"] == 2
    assert result["lines"][0].startswith("FAIL one rail: not measured")
    # What nobody gates may be missing.
    assert fabric_gate.judge(pair, {"rail": {"fail": 0}}, {**SHAPE, "rails": 8})["failed"] == 0


@pytest.mark.parametrize(
    ("shape", "missing"),
    [
        ({"hosts": 1, "local": 1, "backend": "nccl", "rails": 8}, ["host_to_gpu", "gpu_memory"]),
        (
            {"hosts": 1, "local": 8, "backend": "nccl", "rails": 8},
            ["all_reduce_host", "all_reduce_host_ring", "send_recv", "host_to_gpu", "gpu_memory"],
        ),
        ({"hosts": 2, "local": 1, "backend": "gloo", "rails": 0}, ["all_reduce_all", "send_recv", "send_recv_at_once"]),
        ({"hosts": 2, "local": 8, "backend": "nccl", "rails": 8}, list(fabric_gate.GATES)),
    ],
)
def test_hosts_are_not_failed_for_what_such_hosts_do_not_have(shape, missing):
    gates = {name: {"fail": 1} for name in fabric_gate.GATES}
    result = fabric_gate.judge({"a": {"rails": [], "runs": []}}, gates, shape)
    assert {problem.split("(")[-1].split(")")[0] for problem in result["problems"]} == set(missing)
    told = {line.split("(gate ")[-1].split(")")[0] for line in result["lines"] if line.startswith("SKIP")}
    assert told == fabric_gate.GATES - set(missing)


def test_every_measurement_can_be_gated(pair):
    variables = yaml.safe_load((ROOT / "roles/fabric/vars/main.yml").read_text(encoding="utf-8"))
    assert set(variables["__fabric_gates"]) == fabric_gate.GATES
    assert set(GATES) <= fabric_gate.GATES
    result = fabric_gate.judge({"a": real("one-gpu")["h0"]}, {"host_to_gpu": {"fail": 9999}})
    assert row(result, "memory of a host to its GPU")["status"] == "fail"


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


def test_every_host_is_in_a_rail_test_and_in_one_at_a_time():
    turns = program().rail_turns
    assert turns(1) == []
    assert turns(2) == [(0, 1)]
    assert turns(5) == [(0, 1), (2, 3), (1, 2), (3, 4)]


STAND_IN = """#!/usr/bin/env python3
# ib_write_bw between two processes of this machine: who listens makes a file, who connects finds it, or is refused.
import json, sys, time
from pathlib import Path
words = sys.argv[1:]
known = {"--ib-dev": 1, "--ib-port": 1, "--port": 1, "--report_gbits": 0, "--duration": 1}
given, rest = {}, []
while words:
    word = words.pop(0)
    if word.startswith("-"):
        if word not in known:
            sys.exit("ib_write_bw: invalid option " + word)
        given[word] = words.pop(0) if known[word] else True
    else:
        rest.append(word)
folder = Path(sys.argv[0]).parent
# All hosts are in one folder here: a device begins with the last number of its host's address.
host = rest[0].split(".")[-1] if rest else given["--ib-dev"][0]
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps([given["--ib-dev"], given["--ib-port"], given["--port"], rest]) + "\\n")
mark = folder / ("listens-" + host + "-" + given["--port"])
if given["--ib-dev"].endswith("broken"):
    sys.exit("Failed to modify QP to RTR")
if rest:
    if not mark.exists():
        sys.exit("Couldn't connect to " + rest[0] + ":" + given["--port"])
    mark.unlink()
else:
    mark.touch()
    while mark.exists():
        time.sleep(0.02)
print(" #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]")
print(" 65536      465000           0.00               391.77              0.747238")
"""


@pytest.fixture
def perftest(tmp_path, monkeypatch):
    file = tmp_path / "ib_write_bw"
    file.write_text(STAND_IN)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = {
        "hosts": 3, "addresses": ["10.0.0.1", "10.0.0.2", "10.0.0.3"], "rail_port": 29520, "rail_seconds": 1,
        "rail_patience": 20,
    }  # fmt: skip

    def run(rails, hosts):
        def one(host):
            own = [f"{host + 1}{rail}" for rail in rails]
            return program().rail_runs({**settings, "host": host, "rails": own})

        with ThreadPoolExecutor(len(hosts)) as pool:
            return list(pool.map(one, hosts))

    run.calls = lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    return run


def test_rails_are_measured_between_all_neighbours(perftest):
    first, second, third = perftest(["mlx5_4:1", "mlx5_5"], [0, 1, 2])
    assert [(row["rail"], row["peer"], row["gbit_s"], row["error"]) for row in second] == [
        ("2mlx5_4:1", 0, 391.77, None),
        ("2mlx5_5", 0, 391.77, None),
        ("2mlx5_4:1", 2, 391.77, None),
        ("2mlx5_5", 2, 391.77, None),
    ]
    assert [row["peer"] for row in first] == [1, 1]
    assert [row["peer"] for row in third] == [1, 1]
    assert all(row["gbit_s"] for row in first + third)
    calls = perftest.calls()
    # One port per rail, and the address of whom it connects to.
    assert {(device[1:], port, number) for device, port, number, _to in calls} == {
        ("mlx5_4", "1", "29520"),
        ("mlx5_5", "1", "29521"),
    }
    assert {tuple(to) for _device, _port, _number, to in calls} == {(), ("10.0.0.1",), ("10.0.0.2",)}


def test_a_rail_that_cannot_be_measured_says_why(perftest):
    (rows,) = perftest(["broken:1"], [0])
    assert rows == [{"rail": "1broken:1", "index": 0, "gbit_s": None, "error": "Failed to modify QP to RTR", "peer": 1}]


def test_no_tool_to_measure_with_is_a_problem_too(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    settings = {"rail_port": 1, "rail_seconds": 1}
    assert "No such file" in program().rail_run("mlx5_4", 0, [], settings)["error"]


def test_what_is_measured_has_the_environment_of_the_service_and_no_other(tmp_path, monkeypatch):
    file = tmp_path / "fabric.env"
    file.write_text('NCCL_IB_HCA="=mlx5_4:1"\nNCCL_DMABUF_ENABLE="0"\nGLOO_SOCKET_IFNAME="eno1"\nHF_TOKEN="x"\n')
    monkeypatch.setattr(os, "environ", {"NCCL_P2P_DISABLE": "1", "PATH": "/bin"})
    given = {"NCCL_DMABUF_ENABLE": None, "NCCL_CUMEM_ENABLE": 1, "NCCL_NVLS_ENABLE": False, "NCCL_IB_HCA": "=mlx5_5:1"}
    program().load_environment([str(file), str(tmp_path / "none")], given)
    assert os.environ == {
        "PATH": "/bin",
        "NCCL_IB_HCA": "=mlx5_5:1",
        "GLOO_SOCKET_IFNAME": "eno1",
        "NCCL_CUMEM_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
