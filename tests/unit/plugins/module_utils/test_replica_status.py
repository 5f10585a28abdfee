# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import replica_status

FLAGS = ["--tensor-parallel-size", "8", "--nnodes", "2"]


def observed(rank=0, **changes):
    own = ["--host", "0.0.0.0", "--port", "8000"] if rank == 0 else ["--headless"]
    status = {
        "state": "serving",
        "text": "serving, generation 3",
        "generation": 3,
        "since": "2026-12-01T05:00:00Z",
        "configuration": "c" * 64,
        "argv": ["/opt/venv/bin/vllm", "serve", "/srv/model", *FLAGS, "--node-rank", str(rank), *own],
        "last_failure": None,
    }
    base = {
        "changed": False,
        "unit": {"load_state": "loaded", "active_state": "active", "sub_state": "running", "restarts": 0},
        "engine": {"versions": {"vllm": "0.32.0"}, "lock_digest": "1" * 64},
        "checkpoint": {
            "repository": "moonshotai/Kimi-K3",
            "revision": "f831ab66814297da540d832a5235f8e904f29d06",
            "scope": "stage",
            "stages": [rank],
            "bytes": 783_900_000_000,
            "files": 60,
            "identity_digest": "2" * 64,
        },
        "fabric": {"NCCL_IB_HCA": "=" + ",".join(f"mlx5_{n}:1" for n in range(4, 12))},
    }
    base["status"] = {**status, **changes.pop("status", {})} if changes.get("status", {}) is not None else None
    return {**base, **changes}


def entry(rank, seen, host=None, group="kimi_k3"):
    return {"host": host or f"gpu-{'ab'[rank]}", "group": group, "rank": rank, "observed": seen}


def told(*seen):
    return replica_status.document([entry(rank, value) for rank, value in enumerate(seen)], "2026-12-01T06:00:00Z")


def screen(document):
    lines = replica_status.screen(document)
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert all(line == line.rstrip() and line.isprintable() for line in lines)
    return "\n".join(lines)


def test_a_replica_that_serves():
    document = told(observed(0), observed(1))
    assert (document["ready"], document["ready_ranks"], document["notes"]) == (True, 2, [])
    text = screen(document)
    assert text.splitlines()[0] == "READY: all 2 ranks of kimi_k3 serve, generation 3."
    assert "   gpu-a" in text
    assert "moonshotai/Kimi-K3@f831ab66 stage 0 783.9 GB" in text
    assert [line.split()[-1] for line in text.splitlines() if "moonshotai" in line] == ["8", "8"]
    assert "NOTES" not in text
    assert "LAST FAILURE" not in text
    json.dumps(document)


def test_what_belongs_to_a_rank_does_not_change_the_digest_of_the_arguments():
    first, second = told(observed(0), observed(1))["rows"]
    assert first["arguments"] == second["arguments"]
    other = observed(1)
    other["status"]["argv"].append("--enforce-eager")
    document = told(observed(0), other)
    assert document["rows"][1]["arguments"] != first["arguments"]
    assert any(note.startswith("not the same on all hosts of kimi_k3: the arguments") for note in document["notes"])
    assert replica_status.arguments_digest(["vllm", "serve", "/m"]) is None
    assert replica_status.arguments_digest([]) is None


def test_a_host_that_cannot_be_reached_is_a_row():
    document = told(
        observed(0), {"unreachable": True, "msg": "Failed to connect\nto the host via ssh: \x1b[31mno\x1b[0m"}
    )
    assert not document["ready"]
    assert document["rows"][1]["state"] == "unreachable"
    text = screen(document)
    assert text.startswith("NOT READY: 1 of 2 ranks of kimi_k3 serve. rank 1 (gpu-b) is unreachable.")
    assert "rank 1 (gpu-b): Failed to connect to the host via ssh:" in text


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        ({}, "unknown"),
        (None, "unknown"),
        ({"failed": False, "msg": "Module failed"}, "unknown"),
        (observed(unit={"load_state": "not-found", "active_state": "inactive"}, status=None), "not deployed"),
        (observed(unit={"load_state": "loaded", "active_state": "inactive"}, status=None), "inactive"),
        (observed(unit={"load_state": "loaded", "active_state": "failed"}), "failed"),
        (observed(status={"state": "waiting", "text": "waiting for rank 1"}), "waiting"),
        (observed(status={"state": "suspect"}), "suspect"),
        (
            observed(unit={"load_state": "loaded", "active_state": "activating"}, status={"state": "starting"}),
            "starting",
        ),
        # Files that somebody wrote by hand.
        (
            {"unit": {"active_state": "active"}, "status": [], "engine": "x", "checkpoint": 3, "fabric": []},
            "not deployed",
        ),
        (observed(status={"argv": "text", "last_failure": "text", "generation": None, "state": None}), "unknown"),
        (observed(checkpoint={"stages": "all", "bytes": "many"}, status={"state": "x" * 99}), "x" * 99),
    ],
)
def test_whatever_a_host_says_it_is_not_ready(seen, state):
    document = told(observed(0), seen)
    assert (document["ready"], document["ready_ranks"]) == (False, 1)
    assert document["rows"][1]["state"] == state
    screen(document)
    json.dumps(document)


def test_a_status_that_outlived_its_agent_is_not_believed():
    document = told(observed(0), observed(1, unit={"load_state": "loaded", "active_state": "failed"}))
    assert "serving when it last wrote its status, but the unit is failed" in " ".join(screen(document).split())


def test_the_last_failure_is_told_in_full_and_wrapped():
    failure = {"when": "2026-12-01T04:00:00Z", "generation": 2, "cause": "rank 1 (gpu-b) " + "was killed " * 20}
    text = screen(told(observed(0, status={"last_failure": failure}), observed(1)))
    assert "LAST FAILURE\n  rank 0, 2026-12-01T04:00:00Z, generation 2: rank 1 (gpu-b) was killed" in text
    assert " ".join(text.split()).count("was killed") == 20


def test_different_engines_and_generations_are_noted():
    seen = observed(1, engine={"versions": {"vllm": "0.31.0"}, "lock_digest": "3" * 64}, status={"generation": 4})
    notes = told(observed(0), seen)["notes"]
    assert notes == [
        "not the same on all hosts of kimi_k3: vLLM (rank 0 (gpu-a) has 0.32.0, rank 1 (gpu-b) has 0.31.0)",
        "not the same on all hosts of kimi_k3: the engine's lock "
        f"(rank 0 (gpu-a) has {'1' * 12}, rank 1 (gpu-b) has {'3' * 12})",
        "the ranks of kimi_k3 serve different generations: 3, 4",
    ]


def test_rails():
    assert replica_status.rails(None) is None
    assert replica_status.rails({}) == []
    assert replica_status.rails({"NCCL_IB_HCA": "=mlx5_4:1,mlx5_5:1"}) == ["mlx5_4:1", "mlx5_5:1"]
    assert screen(told(observed(0, fabric={}))).splitlines()[-1].endswith("none")


def test_replicas_are_told_apart_and_come_in_order():
    ranks = [entry(1, observed(1), "b1", "two"), entry(0, {}, "b0", "two"), entry(0, observed(), "a0", "one")]
    document = replica_status.document(ranks, "now")
    assert document["groups"] == {"one": True, "two": False}
    assert [row["host"] for row in document["rows"]] == ["a0", "b0", "b1"]
    assert not document["ready"]


def test_nobody_is_not_ready():
    document = replica_status.document([], "now")
    assert not document["ready"]
    assert "Nobody was asked" in screen(document)


def test_a_long_name_leaves_the_columns_where_they_are():
    document = replica_status.document([entry(0, observed(), "a-very-long-name." * 4), entry(1, observed(1))], "now")
    first, second = screen(document).splitlines()[3:5]
    assert first.index("serving") == second.index("serving")
    assert ".." in first


@pytest.mark.parametrize("rank", [None, "x", "12"])
def test_a_rank_that_is_no_number_is_shown(rank):
    document = replica_status.document([{"host": "h", "group": "g", "rank": rank, "observed": {}}], "now")
    screen(document)
