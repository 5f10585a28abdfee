# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbooks on this machine as both hosts of a replica, with a stand-in for vllm and a server for the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "plugins"))

from fake_bench import KEY, Engine, Server

SMALL = [
    {"name": "c1", "input_len": 16, "output_len": 8, "prompts": 4, "concurrency": 1},
    {"name": "c2", "input_len": 16, "output_len": 8, "prompts": 4, "concurrency": 2},
]


class Controller:
    """Runs playbooks."""

    def __init__(self, folder: Path, engine: Engine, server: Server) -> None:
        self.folder, self.engine = folder, engine
        (folder / "checkpoint").mkdir()
        (folder / "api.key").write_text(KEY)
        self.variables: dict[str, t.Any] = {
            "ansible_connection": "local",
            "ansible_become": False,
            "ansible_python_interpreter": sys.executable,
            "vllm_venv": str(engine.folder.parent),
            "checkpoint_path": str(folder / "checkpoint"),
            "serve_secrets_dir": str(folder / "secrets"),
            "serve_api_host": "127.0.0.1",
            "serve_api_port": int(server.url.rpartition(":")[2]),
            "serve_api_key": KEY,
            "serve_unit_extra": {"PrivateTmp": "no"},
            "bench_api_key_file": str(folder / "api.key"),
            "bench_user": "",
            "bench_workloads": SMALL,
            "bench_repetitions": 2,
            "bench_warmup_prompts": 0,
            "bench_results_dir": str(folder / "results"),
            "bench_directory": str(folder / "bench"),
        }

    def play(self, name: str, *words: str, expect: int = 0, **changes: t.Any) -> str:
        hosts = {
            "gpu-a": {"serve_rank": 0, "serve_address": "192.0.2.1"},
            "gpu-b": {"serve_rank": 1, "serve_address": "192.0.2.2"},
        }
        inventory = {"kimi_k3": {"hosts": hosts, "vars": self.variables | changes}}
        (self.folder / "hosts.json").write_text(json.dumps(inventory))
        command = [sys.executable, "-m", "ansible", "playbook", "-i", str(self.folder / "hosts.json")]
        run = subprocess.run(
            [*command, f"playbooks/{name}", *words],
            cwd=ROOT,
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_FORCE_COLOR": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        output = run.stdout + run.stderr
        assert run.returncode == expect, output
        return " ".join(output.split())

    def folders(self) -> list[Path]:
        found = (self.folder / "results").glob("2*") if (self.folder / "results").exists() else []
        return sorted(found)


@pytest.fixture
def controller(tmp_path: Path) -> t.Iterator[Controller]:
    with Server() as server:
        yield Controller(tmp_path, Engine(tmp_path / "venv" / "bin"), server)


def test_a_measurement_from_check_mode_to_comparison(controller):
    output = controller.play("bench.yml", "--check")
    assert "--num-prompts 4 --max-concurrency 1" in output
    assert controller.engine.calls() == []
    assert controller.folders() == []

    output = controller.play("bench.yml", "-vvv", bench_name="one")
    (first,) = controller.folders()
    assert first.name.endswith("-one")
    assert sorted(path.name for path in (first / "runs").iterdir()) == [
        "c1-1.json",
        "c1-2.json",
        "c2-1.json",
        "c2-2.json",
    ]
    record = json.loads((first / "bench.json").read_text())
    assert list(record["hosts"]) == ["gpu-a", "gpu-b"]
    assert record["host"] == "gpu-a"
    assert record["replica"]["pipeline_layers"] == "47,46"
    assert len(record["runs"]) == 4
    page = (first / "report.html").read_text()
    assert page.count("data:image/svg+xml") == 2
    assert f"The report is {first}/report.html" in output
    # Where the play says all there is to say, the key is not among it.
    assert controller.engine.calls()[0]["environment"]["OPENAI_API_KEY"] == KEY
    assert KEY not in output
    for folder in (first, controller.folder / "bench"):
        assert KEY not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert "changed=0" in output
    assert "changed=1" not in output

    controller.play("bench.yml", bench_name="two", bench_plots=False)
    second = controller.folders()[-1]
    assert "svg" not in (second / "report.html").read_text()
    seeds = [json.loads((folder / "bench.json").read_text())["seed"] for folder in (first, second)]
    assert seeds[0] != seeds[1]
    words = ("-e", f"bench_compare={first},{second}", "-e", f"bench_results_dir={controller.folder}/results")
    output = controller.play("bench_compare.yml", *words)
    assert f"{first.name} → {second.name}" in output
    (found,) = (controller.folder / "results" / "compare").glob(f"{first.name}-with-*/comparison.md")
    assert "fewer than 3 runs" in found.read_text()


def test_from_another_host_rank_0_is_asked_by_its_address(controller):
    output = controller.play("bench.yml", "--check", bench_host="gpu-b", serve_api_host="0.0.0.0")
    assert f"--base-url http://192.0.2.1:{controller.variables['serve_api_port']}" in output


def test_a_failed_request_fails_the_play_and_leaves_no_folder(controller):
    controller.engine.behave(failed=1)
    output = controller.play("bench.yml", expect=2)
    assert "Workload 'c1': 1 of 4 requests failed" in output
    assert KEY not in output
    assert controller.folders() == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bench_workloads": [{"name": "a", "dataset": "sonnets"}]}, "has dataset 'sonnets'"),
        ({"bench_host": "elsewhere"}, "elsewhere (bench_host) is not in group kimi_k3 (serve_group)"),
        ({"bench_name": "../x"}, "bench_name is '../x'"),
        ({"bench_repetition": 3}, "bench_repetition"),
        ({"bench_environment": {"API_KEY": "x"}}, "bench_environment names API_KEY, which looks like a secret"),
    ],
)
def test_a_mistake_is_told_before_a_host_is_reached(controller, changes, sentence):
    # Nothing answers on addresses for documentation.
    output = controller.play("bench.yml", expect=2, ansible_connection="ssh", ansible_host="192.0.2.1", **changes)
    assert sentence in output
    assert "UNREACHABLE" not in output


def test_a_part_of_the_replica_cannot_measure(controller):
    output = controller.play("bench.yml", "--limit", "gpu-b", expect=2)
    assert "gpu-a (bench_host) is not in this run" in output


@pytest.mark.parametrize("given", ["", "results/A"])
def test_a_comparison_wants_two_folders(controller, given):
    output = controller.play("bench_compare.yml", "-e", f"bench_compare={given}", expect=2)
    assert "bench_compare must name two folders or more, such as -e bench_compare=results/A,results/B" in output


def test_defaults_are_the_published_workload() -> None:
    defaults = yaml.safe_load((ROOT / "roles" / "bench" / "defaults" / "main.yml").read_text())
    assert defaults["bench_workloads"] == [
        {
            "name": "page",
            "backend": "openai",
            "endpoint": "/v1/completions",
            "dataset": "random",
            "input_len": 8192,
            "output_len": 2048,
            "prompts": 512,
            "concurrency": 32,
            "rate": "inf",
        }
    ]
