# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module measures, tells the truth about it, and never shows the key."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import typing as t
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_bench import KEY, Engine, Server
from run_module import run_module

SMALL = {"name": "one", "input_len": 16, "output_len": 8, "prompts": 4, "concurrency": 1}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "bin")


@pytest.fixture
def server() -> t.Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture
def arguments(tmp_path: Path, engine: Engine, server: Server) -> dict[str, t.Any]:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "api.key").write_text(f"{KEY}\n")
    return {
        "executable": str(engine.executable),
        "url": server.url,
        "api_key_file": str(tmp_path / "api.key"),
        "model": "kimi-k3",
        "tokenizer": str(tmp_path / "tokenizer"),
        "directory": str(tmp_path / "bench"),
        "workloads": [SMALL, {**SMALL, "name": "two", "concurrency": 2}],
        "repetitions": 2,
        "seed": 5,
    }


def look(arguments: dict[str, t.Any], ident: str | None = None, seconds: float = 30) -> dict[str, t.Any]:
    return run_module("bench_serve", {**arguments, "_progress": {"run": ident, "slice": seconds}})


def wait_for(condition: t.Callable[[], t.Any]) -> t.Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def gone(pid: str) -> bool:
    """Ended, whether or not somebody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def everything_below(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_measures_in_turns_and_keeps_what_was_measured(arguments, engine, tmp_path):
    result = run_module("bench_serve", {**arguments, "warmup_prompts": 3})
    assert not result.get("failed"), result
    assert result["changed"] is False
    assert [(run["workload"], run["repetition"], run["seed"]) for run in result["runs"]] == [
        ("one", 1, 6),
        ("two", 1, 8),
        ("one", 2, 9),
        ("two", 2, 10),
    ]
    calls = [call["words"] for call in engine.calls()]
    assert calls == [command[1:] for command in result["commands"]]
    warm = calls[0]
    assert warm[warm.index("--num-prompts") + 1] == "3"
    kept = json.loads((Path(result["result_dir"]) / "two-2.json").read_text())
    assert len(kept["ttfts"]) == 4
    assert "generated_texts" not in kept
    assert result["runs"][3]["figures"]["output_throughput"] == kept["output_throughput"]
    assert [workload["name"] for workload in result["workloads"]] == ["one", "two"]
    assert result["workloads"][0]["dataset"] == "random"
    assert result["machine"]["processors"] >= 1
    assert not (tmp_path / "bench" / "work").exists()


def test_the_key_is_in_the_environment_of_the_process_and_nowhere_else(arguments, engine, tmp_path):
    result = run_module("bench_serve", arguments)
    call = engine.calls()[0]
    assert call["environment"]["OPENAI_API_KEY"] == KEY
    assert KEY not in " ".join(call["words"])
    assert KEY not in json.dumps(result)
    # The stand-in writes it into its result, as a library that quotes a request might.
    assert KEY not in everything_below(tmp_path / "bench")


def test_the_key_is_in_no_message_of_a_failure(arguments, engine, tmp_path):
    engine.behave(failed=1)
    result = run_module("bench_serve", arguments)
    assert result["failed"]
    assert "1 of 4 requests failed" in result["msg"]
    assert "'ConnectionError: refused'" in result["msg"]
    assert KEY not in json.dumps(result)
    assert KEY not in everything_below(tmp_path / "bench")


def test_the_environment_is_made_from_nothing(arguments, engine, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://192.0.2.1:1")
    monkeypatch.setenv("HF_TOKEN", "private")
    run_module("bench_serve", {**arguments, "environment": {"OMP_NUM_THREADS": 1}})
    seen = engine.calls()[0]["environment"]
    assert "HTTPS_PROXY" not in seen
    assert "HF_TOKEN" not in seen
    assert seen["OMP_NUM_THREADS"] == "1"
    assert seen["HF_HUB_OFFLINE"] == "1"
    assert seen["HOME"].startswith(arguments["directory"])


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (
            {"crash": True},
            "ended with status 1 and without a result. Its last words: Namespace of the command with *** / ValueError",
        ),
        ({"silent": True}, "ended with status 0 and without a result."),
        ({"garbage": True}, "one-1.json is no JSON object"),
        ({"missing": ["output_throughput"]}, "has no number for output_throughput"),
        ({"failed": 4}, "4 of 4 requests failed"),
    ],
)
def test_what_went_wrong_is_told(arguments, engine, behaviour, sentence):
    engine.behave(**behaviour)
    result = run_module("bench_serve", arguments)
    assert result["failed"]
    assert sentence in result["msg"]
    assert len(engine.calls()) == 1


def test_a_run_that_takes_too_long_is_ended(arguments, engine):
    engine.behave(wait_for="never")
    result = run_module("bench_serve", {**arguments, "timeout": 1})
    assert result["failed"]
    assert "workload 'one', run 1 of 2 was ended after 1 s (bench_timeout)" in result["msg"]
    assert "1/4" in result["msg"]


def test_answers_of_another_length_are_warned_of(arguments, engine):
    engine.behave(tokens=3)
    result = run_module("bench_serve", {**arguments, "workloads": [SMALL]})
    # Once, though each of two runs says it.
    assert [text for text in result["warnings"] if "3 tokens came and 32 were asked for" in str(text)] == result[
        "warnings"
    ]
    assert len(result["warnings"]) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "kimi-k9"}, "serves kimi-k3, not kimi-k9."),
        ({"url": "http://127.0.0.1:1"}, "There is nothing to measure: connection refused by 127.0.0.1:1"),
        ({"api_key_file": None}, "the server wants an API key and none was given"),
        ({"api_key_file": "/nonexistent/key"}, "the API key cannot be read: /nonexistent/key"),
        ({"executable": "/nonexistent/vllm"}, "There is no /nonexistent/vllm here: run the playbook engine first."),
        ({"tokenizer": "/nonexistent"}, "There is no tokenizer at /nonexistent: run the playbook fetch first."),
        ({"user": "nobody-of-that-name"}, "There is no account nobody-of-that-name here (bench_user)."),
        ({"url": "nowhere"}, "'nowhere' is not an address"),
        ({"directory": "bench"}, "directory must be an absolute path"),
        ({"workloads": [{"name": "a", "dataset": "sonnets"}]}, "has dataset 'sonnets'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(arguments, engine, changes, sentence):
    result = run_module("bench_serve", {key: value for key, value in {**arguments, **changes}.items() if value})
    assert result["failed"]
    assert sentence in result["msg"]
    assert engine.calls() == []


def test_check_mode_measures_nothing_and_says_what_it_would(arguments, engine, tmp_path):
    result = run_module("bench_serve", arguments, check_mode=True)
    assert result["changed"] is False
    assert result["runs"] == []
    assert len(result["commands"]) == 4
    assert engine.calls() == []
    assert not (tmp_path / "bench").exists()


def test_check_mode_warns_of_a_server_that_is_not_there(arguments):
    result = run_module("bench_serve", {**arguments, "url": "http://127.0.0.1:1"}, check_mode=True)
    assert not result.get("failed")
    assert "connection refused" in str(result["warnings"])


def test_progress_is_seen_and_a_second_look_finds_the_same_run(arguments, engine):
    engine.behave(wait_for="go")
    first = look(arguments, seconds=0)["_running"]
    assert first["attached"] is False
    seen = wait_for(lambda: (now := look(arguments, first["run"], 0.2)["_running"]) and "1 of 4" in now["text"] and now)
    assert seen["text"].startswith("workload 'one', run 1 of 2: 1 of 4 requests, ")
    # Another run of the playbook has another seed, and is the same measurement.
    other = look({**arguments, "seed": 99}, seconds=0)["_running"]
    assert (other["run"], other["attached"]) == (first["run"], True)
    (engine.folder / "go").touch()
    result = look(arguments, first["run"])
    assert result["seed"] == 5
    assert len(result["runs"]) == 4


def test_two_measurements_at_a_time_are_refused(arguments, engine):
    engine.behave(wait_for="go")
    first = look(arguments, seconds=0)["_running"]
    result = look({**arguments, "repetitions": 1}, seconds=0)
    assert result["failed"]
    assert f"Process {first['pid']} measures other workloads on this host: workload 'one'" in result["msg"]
    (engine.folder / "go").touch()
    assert len(look(arguments, first["run"])["runs"]) == 4
    assert len(look({**arguments, "repetitions": 1})["runs"]) == 2


def test_a_measurement_that_is_stopped_takes_its_command_along(arguments, engine):
    engine.behave(wait_for="never")
    first = look(arguments, seconds=0)["_running"]
    wait_for(lambda: "1 of 4" in look(arguments, first["run"], 0.2)["_running"]["text"])
    children = Path(f"/proc/{first['pid']}/task/{first['pid']}/children").read_text().split()
    assert len(children) == 1
    os.kill(first["pid"], signal.SIGTERM)
    result = look(arguments, first["run"])
    assert result["msg"] == "Stopped by SIGTERM; nothing was measured to the end."
    wait_for(lambda: gone(children[0]))


def test_a_killed_measurement_is_told(arguments, engine):
    engine.behave(wait_for="never")
    first = look(arguments, seconds=0)["_running"]
    wait_for(lambda: "1 of 4" in look(arguments, first["run"], 0.2)["_running"]["text"])
    (child,) = Path(f"/proc/{first['pid']}/task/{first['pid']}/children").read_text().split()
    os.kill(first["pid"], signal.SIGKILL)
    result = look(arguments, first["run"])
    assert "ended without a word" in result["msg"]
    assert "Run again to measure anew." in result["msg"]
    wait_for(lambda: gone(child))
