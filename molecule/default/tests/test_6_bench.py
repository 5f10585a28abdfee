# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real measurements of the replica, small ones: folder, report, and a comparison of two."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest
from replica import playbook

# As small as says that it works; a run is nearly all importing of Python modules.
SMALL = {"input_len": 16, "output_len": 8, "prompts": 8}
BOTH = [{"name": "c1", "concurrency": 1, **SMALL}, {"name": "c2", "concurrency": 2, **SMALL}]


class Measurement(t.NamedTuple):
    folder: Path
    output: str
    record: dict[str, t.Any]


def measure(replica, results: Path, name: str, workloads: list[dict[str, t.Any]]) -> Measurement:
    variables = {
        "bench_name": name,
        "bench_results_dir": str(results),
        "bench_workloads": workloads,
        "bench_repetitions": 2,
        "bench_warmup_prompts": 0,
    }
    output = playbook("playbooks/bench.yml", *replica.key_words, "-e", json.dumps(variables))
    (folder,) = results.glob(f"*-{name}")
    return Measurement(folder, output, json.loads((folder / "bench.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def first(replica, api_key, results) -> Measurement:
    replica.wait_serving()
    pids = replica.pids()
    measured = measure(replica, results, "first", BOTH)
    assert replica.pids() == pids
    return measured


def test_it_says_how_far_it_is_and_changes_nothing(first):
    assert "rank0: workload 'c" in first.output
    assert " of 2: " in first.output
    assert "changed=1" not in first.output
    assert f"The report is {first.folder}/report.html" in " ".join(first.output.split())


def test_every_request_was_answered_in_full(first):
    assert [(run["workload"], run["repetition"]) for run in first.record["runs"]] == [
        ("c1", 1),
        ("c2", 1),
        ("c1", 2),
        ("c2", 2),
    ]
    assert first.record["warnings"] == []
    for run in first.record["runs"]:
        figures = run["figures"]
        assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (8, 0, 64)
        assert figures["output_throughput"] > 0
        raw = json.loads((first.folder / "runs" / run["file"]).read_text(encoding="utf-8"))
        assert len(raw["ttfts"]) == 8
        assert "generated_texts" not in raw
    assert len({run["seed"] for run in first.record["runs"]}) == 4


def test_the_record_says_what_was_measured(first, replica):
    assert (first.record["host"], first.record["model"]) == ("rank0", "kimi-k3")
    assert list(first.record["hosts"]) == ["rank0", "rank1"]
    for rank in replica.ranks:
        seen, status = first.record["hosts"][rank.name], rank.status()
        assert seen["versions"]["vllm"].startswith("0.32.0")
        assert seen["command"] == status["argv"]
        assert seen["configuration"] == status["configuration"]
        assert seen["generation"] == status["generation"]
        assert len(seen["checkpoint"]["identity_digest"]) == 64
        assert "GLOO_SOCKET_IFNAME" in seen["fabric"]


def test_the_key_is_used_and_kept_out_of_the_results(first, api_key):
    assert api_key not in first.output
    files = [path for path in first.folder.rglob("*") if path.is_file()]
    assert len(files) > len(first.record["runs"])
    assert not [path for path in files if api_key.encode() in path.read_bytes()]


def test_the_report_is_one_page_with_its_plots(first):
    page = (first.folder / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "<script" not in page
    text = (first.folder / "report.md").read_text(encoding="utf-8")
    assert "| c1 | 1 | " in text
    assert "| c2 | 2 | " in text


def test_nothing_but_the_last_results_stays_on_the_host(first, replica):
    listed = replica.ranks[0].run("ls /var/lib/kimi-k3-bench/results").split()
    assert sorted(name for name in listed if name.endswith(".json")) == sorted(
        run["file"] for run in first.record["runs"]
    )
    assert replica.ranks[0].run("ls -d /var/lib/kimi-k3-bench/work", check=False) == ""
    assert replica.ranks[1].run("ls -d /var/lib/kimi-k3-bench", check=False) == ""


def test_two_measurements_are_compared_with_their_noise(first, replica, results):
    second = measure(replica, results, "second", BOTH[:1])
    output = playbook(
        "playbooks/bench_compare.yml",
        "-e",
        json.dumps({"bench_compare": [str(first.folder), str(second.folder)], "bench_results_dir": str(results)}),
    )
    assert f"{first.folder.name} → {second.folder.name}" in output
    (text,) = (path.read_text(encoding="utf-8") for path in results.glob("compare/*/comparison.md"))
    assert "Workload c1, 2 and 2 runs:" in text
    assert f"Workload c2 is not compared: only {first.folder.name} has it." in text
    assert "With fewer than 3 runs on a side" in text
    assert "Versions, commands, checkpoint, fabric and hardware are the same." in text


def test_a_model_that_is_not_served_is_refused(replica, api_key, results):
    words = json.dumps({"bench_model": "another", "bench_results_dir": str(results)})
    output = " ".join(playbook("playbooks/bench.yml", *replica.key_words, "-e", words, expect=2).split())
    assert "serves kimi-k3, not another." in output
    assert api_key not in output
