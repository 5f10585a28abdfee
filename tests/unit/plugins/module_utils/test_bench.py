# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What vllm bench serve is asked, and what its results are worth."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import bench

PLACE = {
    "url": "http://127.0.0.1:8000",
    "model": "kimi-k3",
    "tokenizer": "/models/Kimi-K3",
    "trust_remote_code": True,
    "seed": 7,
    "folder": "/var/lib/kimi-k3-bench/work/out",
    "file": "page-1.json",
}
SETTINGS = {
    "workloads": [{"name": "page"}],
    "repetitions": 3,
    "warmup_prompts": 32,
    "timeout": 7200,
    "seed": "",
    "environment": {},
}


def result(**changes: t.Any) -> dict[str, t.Any]:
    made: dict[str, t.Any] = dict.fromkeys(bench.needed(), 1.0)
    made |= {"completed": 512, "failed": 0, "total_output_tokens": 512 * 2048, "output_throughput": 1408.0}
    return made | {"generated_texts": ["x"], "errors": [""], "ttfts": [0.1]} | changes


def test_the_published_workload_word_by_word() -> None:
    assert bench.words({"name": "page"}, **PLACE) == [
        "bench",
        "serve",
        "--backend",
        "openai",
        "--base-url",
        "http://127.0.0.1:8000",
        "--endpoint",
        "/v1/completions",
        "--model",
        "kimi-k3",
        "--tokenizer",
        "/models/Kimi-K3",
        "--trust-remote-code",
        "--dataset-name",
        "random",
        "--input-len",
        "8192",
        "--output-len",
        "2048",
        "--num-prompts",
        "512",
        "--max-concurrency",
        "32",
        "--seed",
        "7",
        "--percentile-metrics",
        "ttft,itl,tpot,e2el",
        "--metric-percentiles",
        "50,90,99",
        "--save-result",
        "--save-detailed",
        "--result-dir",
        "/var/lib/kimi-k3-bench/work/out",
        "--result-filename",
        "page-1.json",
    ]


def test_another_workload_and_its_options() -> None:
    workload = {
        "name": "chat",
        "backend": "openai-chat",
        "endpoint": "/v1/chat/completions",
        "dataset": "sharegpt",
        "path": "/srv/data/sharegpt.json",
        "prompts": 20,
        "concurrency": 0,
        "rate": 4.5,
        "args": {"temperature": 0, "no_stream": True, "skip": False, "goodput": ["ttft:2000", "tpot:50"]},
    }
    words = " ".join(bench.words(workload, **{**PLACE, "trust_remote_code": False}))
    assert "--dataset-name sharegpt --dataset-path /srv/data/sharegpt.json --num-prompts 20 --request-rate 4.5" in words
    assert "--temperature 0 --no-stream --goodput ttft:2000 tpot:50" in words
    for absent in ("--trust-remote-code", "--max-concurrency", "--input-len", "--output-len", "skip"):
        assert absent not in words


@pytest.mark.parametrize("text", ["inf", "Infinity", float("inf")])
def test_no_rate_is_no_option(text: t.Any) -> None:
    assert "--request-rate" not in bench.words({"name": "page", "rate": text}, **PLACE)


def test_good_settings_have_no_errors() -> None:
    assert bench.errors(SETTINGS) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"repetitions": 0}, "bench_repetitions is '0': it must be a whole number, 1 or more."),
        ({"warmup_prompts": -1}, "bench_warmup_prompts is '-1'"),
        ({"timeout": 1.5}, "bench_timeout is '1.5'"),
        ({"seed": "now"}, "bench_seed is 'now'"),
        ({"seed": 2**32}, "bench_seed is '4294967296'"),
        ({"environment": {"HF_TOKEN": "x"}}, "bench_environment names HF_TOKEN, which looks like a secret"),
        ({"environment": {"A B": "x"}}, "'A B' in bench_environment is no name"),
        ({"workloads": []}, "bench_workloads must be a list with at least one workload."),
        ({"workloads": "page"}, "bench_workloads must be a list"),
        ({"workloads": [{"prompts": 1}]}, "Workload 1 of bench_workloads must be a dictionary with a name"),
        ({"workloads": [{"name": "../x"}]}, "Workload 1 of bench_workloads must be a dictionary with a name"),
        ({"workloads": [{"name": "a"}, {"name": "a"}]}, "Workload 'a' of bench_workloads is there twice"),
        ({"workloads": [{"name": "a", "prompt": 3}]}, "Workload 'a' of bench_workloads has prompt, which nobody reads"),
        ({"workloads": [{"name": "a", "prompts": 0}]}, "has prompts '0': it must be a whole number, 1 or more."),
        ({"workloads": [{"name": "a", "concurrency": True}]}, "has concurrency 'True'"),
        ({"workloads": [{"name": "a", "rate": 0}]}, "has rate '0': it must be requests per second above 0, or inf."),
        ({"workloads": [{"name": "a", "rate": "nan"}]}, "has rate 'nan'"),
        ({"workloads": [{"name": "a", "rate": "fast"}]}, "has rate 'fast'"),
        ({"workloads": [{"name": "a", "dataset": "sonnets"}]}, "has dataset 'sonnets': vllm bench serve knows random,"),
        ({"workloads": [{"name": "a", "dataset": "sharegpt"}]}, "reads dataset 'sharegpt': say where it is"),
        ({"workloads": [{"name": "a", "path": "/x"}]}, "has a path, but dataset 'random' is made up"),
        ({"workloads": [{"name": "a", "endpoint": "v1"}]}, "has endpoint 'v1'"),
        ({"workloads": [{"name": "a", "args": ["x"]}]}, "has args that are no dictionary"),
        ({"workloads": [{"name": "a", "args": {"--num_prompts": 3}}]}, "set prompts for it instead"),
        ({"workloads": [{"name": "a", "args": {"header": "a=b"}}]}, "set bench_api_key_file for it instead"),
        ({"workloads": [{"name": "a", "args": {"result_dir": "/"}}]}, "the results would not be found or read"),
    ],
)
def test_a_mistake_is_one_sentence(changes: dict[str, t.Any], sentence: str) -> None:
    found = bench.errors({**SETTINGS, **changes})
    assert len(found) == 1
    assert sentence in found[0]


def test_every_run_has_prompts_of_its_own_and_workloads_take_turns() -> None:
    runs = bench.plan([{"name": "a"}, {"name": "b"}], 2, 4, 2**32 - 2)
    assert [run["file"] for run in runs] == [
        "a-warmup.json",
        "a-1.json",
        "b-warmup.json",
        "b-1.json",
        "a-2.json",
        "b-2.json",
    ]
    assert [run["prompts"] for run in runs] == [4, None, 4, None, None, None]
    assert [run["seed"] for run in runs] == [2**32 - 2, 2**32 - 1, 0, 1, 2, 3]


def test_progress_is_that_of_the_run_not_of_what_came_before() -> None:
    assert bench.progress("") is None
    assert bench.progress("50%|# | 1/2 [00:01<00:01]") is None
    text = f"2/2 [x]\n{bench.BEGUN}...\n"
    assert bench.progress(text) is None
    assert bench.progress(text + " 0%| | 0/512 [00:00<?]\r 2%|#| 13/512 [00:09<05:00]") == (13, 512)


def test_a_good_result_has_no_warnings_and_figures() -> None:
    assert bench.judge(result(), {"name": "page"}, 512, "f") == []
    figures = bench.figures(result(), {"name": "page"})
    assert figures["per_user_throughput"] == 44.0
    assert set(bench.needed()) < set(figures)


def test_users_of_an_unlimited_run_are_those_that_were_there() -> None:
    workload = {"name": "a", "concurrency": 0}
    assert bench.figures(result(max_concurrent_requests=64), workload)["per_user_throughput"] == 22.0
    assert bench.figures(result(), workload)["per_user_throughput"] == 0.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"failed": 3, "completed": 509, "errors": ["", "T\nRefused: no"]}, "3 of 512 requests failed"),
        ({"failed": 3, "completed": 509, "errors": ["", "T\nRefused: no"]}, "The first said: 'Refused: no'."),
        ({"completed": 0, "failed": 512, "errors": []}, "512 of 512 requests failed"),
        ({"completed": 500}, "12 of 512 requests failed"),
        ({"p99_itl_ms": None}, "has no number for p99_itl_ms: this release of vLLM writes results that are not known"),
        ({"duration": None, "failed": None}, "has no number for failed, duration"),
    ],
)
def test_what_is_no_result_fails(changes: dict[str, t.Any], sentence: str) -> None:
    with pytest.raises(bench.BenchError, match="Workload 'page'") as raised:
        bench.judge(result(**changes), {"name": "page"}, 512, "f.json")
    assert sentence in str(raised.value)


def test_no_json_object_is_no_result() -> None:
    with pytest.raises(bench.BenchError, match=r"f\.json is no JSON object"):
        bench.judge([], {"name": "page"}, 512, "f.json")


def test_answers_of_another_length_are_told_where_lengths_are_fixed() -> None:
    short = result(total_output_tokens=512 * 1000)
    assert "512000 tokens came and 1048576 were asked for" in bench.judge(short, {"name": "page"}, 512, "f")[0]
    for other in ({"args": {"random_range_ratio": 0.5}}, {"dataset": "sharegpt", "path": "/x"}):
        assert bench.judge(short, {"name": "page", **other}, 512, "f") == []


def test_what_was_generated_is_not_kept() -> None:
    assert set(bench.strip(result())) & {"generated_texts", "errors"} == set()
    assert bench.strip(result())["ttfts"] == [0.1]


def test_identity_knows_text_from_templates_and_defaults() -> None:
    assert bench.identity({"name": "a", "prompts": "512"}) == bench.identity({"name": "b"})
    assert bench.identity({"name": "a", "rate": float("inf")}) == bench.identity({"name": "b"})
    assert bench.identity({"name": "a", "input_len": 1}) != bench.identity({"name": "a"})
    assert bench.identity({"name": "a", "dataset": "hf", "path": "p"})["input_len"] == 0
    assert bench.identity({"name": "a", "dataset": "hf", "path": "p", "output_len": 5})["output_len"] == 5


def test_a_secret_is_taken_out() -> None:
    assert bench.redact("Bearer sesame", "sesame") == "Bearer ***"
    assert bench.redact("Bearer sesame", None) == "Bearer sesame"
