# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The modules of the controller: what they write, and what they refuse."""

from __future__ import annotations

import json
import shutil
import sys
import typing as t
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_bench import KEY, Engine, Server
from run_module import run_module

WORKLOAD = {"name": "one", "input_len": 16, "output_len": 8, "prompts": 4, "concurrency": 2}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, t.Any]:
    """A measurement with the stand-in."""
    folder = tmp_path_factory.mktemp("host")
    engine = Engine(folder / "bin")
    (folder / "key").write_text(KEY)
    with Server() as server:
        result = run_module(
            "bench_serve",
            {
                "executable": str(engine.executable),
                "url": server.url,
                "api_key_file": str(folder / "key"),
                "model": "kimi-k3",
                "tokenizer": str(folder),
                "directory": str(folder / "bench"),
                "workloads": [WORKLOAD],
                "repetitions": 3,
                "seed": 5,
            },
        )
    assert "runs" in result, result
    return result


@pytest.fixture
def report(tmp_path: Path, measured: dict[str, t.Any]) -> t.Callable[..., dict[str, t.Any]]:
    def run(name: str = "a", check_mode: bool = False, **changes: t.Any) -> dict[str, t.Any]:
        shutil.copytree(measured["result_dir"], tmp_path / name / "runs", dirs_exist_ok=True)
        arguments = {
            "folder": str(tmp_path / name),
            "about": {"name": name, "model": "kimi-k3", "host": "gpu-a", "replica": {"tensor_parallel": 8}},
            "hosts": {"gpu-a": {"number": 0}},
            "measured": measured,
            "plots": False,
        }
        return run_module("bench_report", {**arguments, **changes}, check_mode)

    return run


def test_writes_the_folder_once(report, tmp_path):
    result = report(plots=True)
    assert result["changed"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "bench.json",
        "report.html",
        "report.md",
        "runs",
    ]
    assert KEY not in "".join(path.read_text() for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert (tmp_path / "a" / "report.html").read_text().count("data:image/svg+xml") == 1
    assert result["lines"][0].startswith("one (random, 16 in / 8 out, 4 prompts, 2 at a time)")
    assert not report(plots=True)["changed"]
    # From the record alone, the reports are the same ones.
    assert run_module("bench_report", {"folder": str(tmp_path / "a")})["files"] == []


def test_check_mode_writes_nothing(report, tmp_path):
    result = report(check_mode=True)
    assert len(result["files"]) == 3
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["runs"]


def test_what_was_measured_is_kept_when_it_cannot_be_shown(report, tmp_path):
    (tmp_path / "a" / "runs").mkdir(parents=True)
    result = report(plots=True, folder=str(tmp_path / "elsewhere"))
    assert result["msg"] == f"There is no {tmp_path}/elsewhere/runs/one-1.json."
    assert json.loads((tmp_path / "elsewhere" / "bench.json").read_text())["seed"] == 5


def test_a_folder_without_a_record_is_none(tmp_path):
    result = run_module("bench_report", {"folder": str(tmp_path)})
    assert result["msg"] == f"There is no {tmp_path}/bench.json."


def compare(tmp_path: Path, *names: str, check_mode: bool = False) -> dict[str, t.Any]:
    folders = [str(tmp_path / name) for name in names]
    return run_module("bench_compare", {"folders": folders, "dest": str(tmp_path / "out")}, check_mode)


def change(path: Path, **workload: t.Any) -> None:
    document = json.loads(path.read_text())
    document["workloads"][0].update(workload)
    path.write_text(json.dumps(document))


def test_compares_two_and_more(report, tmp_path):
    for name in "abc":
        report(name)
    assert compare(tmp_path, "a", "b", "c", check_mode=True)["changed"]
    assert not (tmp_path / "out").exists()
    result = compare(tmp_path, "a", "b", "c")
    assert [entry["name"] for entry in result["comparisons"]] == ["b", "c"]
    rows = result["comparisons"][0]["workloads"][0]["rows"]
    assert {row["verdict"] for row in rows} == {"within noise"}
    assert {row["percent"] for row in rows} == {0}
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert "## a → b" in text
    assert "## a → c" in text
    assert "<td>within noise</td>" in (tmp_path / "out" / "comparison.html").read_text()
    assert not compare(tmp_path, "a", "b", "c")["changed"]


def test_another_workload_is_refused(report, tmp_path):
    report("a")
    report("b")
    change(tmp_path / "b" / "bench.json", concurrency=8)
    result = compare(tmp_path, "a", "b")
    assert result["failed"]
    assert "no workload in common that can be compared: 'one': concurrency is 2 and 8." in result["msg"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["a"], "bench_compare must name two folders or more"),
        (["a", "a"], "bench_compare names a folder twice"),
        (["a", "nowhere"], "/nowhere/bench.json."),
        (["a", "broken"], "/broken/bench.json cannot be read: "),
        (["a", "other"], "/other/bench.json is no record of a benchmark."),
    ],
)
def test_what_cannot_be_compared_is_told(report, tmp_path, names, sentence):
    report("a")
    for name, text in (("broken", "{"), ("other", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bench.json").write_text(text)
    result = compare(tmp_path, *names)
    assert result["failed"]
    assert sentence in result["msg"]
