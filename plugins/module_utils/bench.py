# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What `vllm bench serve` is asked, and what it says: pure functions, no I/O.

A workload is a dictionary; a key that it leaves out is that of the published measurement of Kimi K3 on two hosts.
"""

from __future__ import annotations

import math
import re
import typing as t

#: The published workload; `path` is the file of a dataset that has one, `args` are further options by name.
DEFAULTS: dict[str, t.Any] = {
    "backend": "openai",
    "endpoint": "/v1/completions",
    "dataset": "random",
    "path": "",
    "input_len": 8192,
    "output_len": 2048,
    "prompts": 512,
    "concurrency": 32,
    "rate": "inf",
    "args": {},
}
# Datasets that vLLM makes up by itself, and those that it reads from a path.
_MADE_UP = ("random", "prefix_repetition")
_READ = ("sharegpt", "burstgpt", "hf", "custom", "custom_image", "custom_audio", "spec_bench", "timed_trace")
DATASETS = (*_MADE_UP, *_READ)
#: What the workload's own keys, or the role, give; `header` would put a secret into the process list.
RESERVED = {
    "backend": "backend",
    "base-url": "bench_host",
    "host": "bench_host",
    "port": "serve_api_port",
    "endpoint": "endpoint",
    "model": "bench_model",
    "served-model-name": "bench_model",
    "tokenizer": "bench_tokenizer",
    "trust-remote-code": "bench_trust_remote_code",
    "dataset-name": "dataset",
    "dataset-path": "path",
    "input-len": "input_len",
    "output-len": "output_len",
    "num-prompts": "prompts",
    "max-concurrency": "concurrency",
    "request-rate": "rate",
    "seed": "bench_seed",
    "num-warmups": "bench_warmup_prompts",
    "header": "bench_api_key_file",
    "percentile-metrics": "",
    "metric-percentiles": "",
    "save-result": "",
    "save-detailed": "",
    "append-result": "",
    "result-dir": "",
    "result-filename": "",
    "disable-tqdm": "",
}
#: Latencies by the name they have in a result, and for people.
LATENCIES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "E2E"}
PERCENTILES = (50, 90, 99)
_THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
_COUNTS = ("completed", "failed", "total_input_tokens", "total_output_tokens", "duration")
_STATISTICS = ("mean", "std", *(f"p{number}" for number in PERCENTILES))
# What a request said is nobody's business here, and is most of a result's bytes.
_LEFT_OUT = ("generated_texts", "errors")
_SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
#: `vllm bench serve` prints this when it has its prompts.
BEGUN = "Starting main benchmark run"
_SEEDS = 2**32  # what numpy takes


class BenchError(Exception):
    """It cannot be measured, or was not; one sentence on what to do."""


def complete(workload: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The workload with all its keys."""
    return {**DEFAULTS, **workload}


def identity(workload: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """What makes two measurements comparable: everything but the name."""
    whole = complete(workload)
    if whole["dataset"] not in _MADE_UP[:1]:
        # Lengths that come with the data, unless the workload says otherwise.
        for key in ("input_len", "output_len"):
            if key not in workload:
                whole[key] = 0
    whole.pop("name", None)
    whole["rate"] = "inf" if math.isinf(rate(whole["rate"]) or 0) else whole["rate"]
    return {key: _plain(value) for key, value in whole.items()}


def _plain(value: t.Any) -> t.Any:
    """Numbers that came as text through a template are numbers."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    return value


def flag_of(name: str) -> str:
    return str(name).lstrip("-").replace("_", "-")


def errors(settings: t.Mapping[str, t.Any]) -> list[str]:
    """What is wrong with the settings of the role, each in a sentence."""
    found = []
    for key, least in (("repetitions", 1), ("warmup_prompts", 0), ("timeout", 1)):
        if not _whole(settings[key], least):
            found.append(f"bench_{key} is '{settings[key]}': it must be a whole number, {least} or more.")
    if str(settings["seed"]) and not _whole(settings["seed"], 0, _SEEDS - 1):
        found.append(f"bench_seed is '{settings['seed']}': it must be empty or a whole number from 0 to {_SEEDS - 1}.")
    for name in settings["environment"]:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            found.append(f"'{name}' in bench_environment is no name of an environment variable.")
        elif _SECRET.search(str(name)):
            found.append(
                f"bench_environment names {name}, which looks like a secret, and the result folder shows that "
                "environment: put the API key of the server into the file that bench_api_key_file names."
            )
    workloads = settings["workloads"]
    if not isinstance(workloads, list) or not workloads:
        return [*found, "bench_workloads must be a list with at least one workload."]
    seen: set[str] = set()
    for number, workload in enumerate(workloads, 1):
        found += _workload_errors(number, workload, seen)
    return found


def _workload_errors(number: int, workload: t.Any, seen: set[str]) -> list[str]:
    if not isinstance(workload, dict) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", str(workload.get("name", ""))):
        return [
            f"Workload {number} of bench_workloads must be a dictionary with a name of letters, digits, '.', '_' "
            "and '-'."
        ]
    name = str(workload["name"])
    place = f"Workload '{name}' of bench_workloads"
    found = []
    if name in seen:
        found.append(f"{place} is there twice: the results of one would be taken for those of the other.")
    seen.add(name)
    unknown = sorted(str(key) for key in workload if key not in DEFAULTS and key != "name")
    if unknown:
        found.append(
            f"{place} has {', '.join(unknown)}, which nobody reads: a workload has name, {', '.join(DEFAULTS)}; "
            "any other option of vllm bench serve belongs into args."
        )
    whole = complete(workload)
    for key, least in (("input_len", 1), ("output_len", 1), ("prompts", 1), ("concurrency", 0)):
        if not _whole(whole[key], least):
            found.append(f"{place} has {key} '{whole[key]}': it must be a whole number, {least} or more.")
    if rate(whole["rate"]) is None:
        found.append(f"{place} has rate '{whole['rate']}': it must be requests per second above 0, or inf.")
    dataset = whole["dataset"]
    if dataset not in DATASETS:
        found.append(f"{place} has dataset '{dataset}': vllm bench serve knows {', '.join(DATASETS)}.")
    elif dataset in _READ and not whole["path"]:
        found.append(f"{place} reads dataset '{dataset}': say where it is on the host that measures, with path.")
    elif dataset in _MADE_UP and whole["path"]:
        found.append(f"{place} has a path, but dataset '{dataset}' is made up: leave path out or name another dataset.")
    if not str(whole["endpoint"]).startswith("/"):
        found.append(f"{place} has endpoint '{whole['endpoint']}': it must be a path such as /v1/completions.")
    if not isinstance(whole["args"], dict):
        return [*found, f"{place} has args that are no dictionary: write options by name, without the dashes."]
    for key in whole["args"]:
        if flag_of(key) in RESERVED:
            instead = RESERVED[flag_of(key)]
            told = f"set {instead} for it instead" if instead else "the results would not be found or read without it"
            found.append(f"{place} has '{key}' in args, which the role gives by itself: {told}.")
    return found


def _whole(value: t.Any, least: int, most: float = math.inf) -> bool:
    if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)):
        return False
    return least <= int(value) <= most


def rate(value: t.Any) -> float | None:
    """Requests per second, infinite when all are there at once; nothing when it is no rate."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if number > 0 and not isinstance(value, bool) else None


def words(
    workload: t.Mapping[str, t.Any],
    *,
    url: str,
    model: str,
    tokenizer: str,
    trust_remote_code: bool,
    seed: int,
    folder: str,
    file: str,
    prompts: int | None = None,
) -> list[str]:
    """The arguments of `vllm`. No secret is among them."""
    whole = complete(workload)
    made = ["bench", "serve", "--backend", str(whole["backend"]), "--base-url", url]
    made += ["--endpoint", str(whole["endpoint"]), "--model", model, "--tokenizer", tokenizer]
    if trust_remote_code:
        made.append("--trust-remote-code")
    made += ["--dataset-name", str(whole["dataset"])]
    if whole["path"]:
        made += ["--dataset-path", str(whole["path"])]
    for key, flag in (("input_len", "--input-len"), ("output_len", "--output-len")):
        # Data that were read have lengths of their own.
        if key in workload or whole["dataset"] == "random":
            made += [flag, str(whole[key])]
    made += ["--num-prompts", str(whole["prompts"] if prompts is None else prompts)]
    if int(whole["concurrency"]):
        made += ["--max-concurrency", str(whole["concurrency"])]
    if not math.isinf(rate(whole["rate"]) or math.inf):
        made += ["--request-rate", str(whole["rate"])]
    made += ["--seed", str(seed)]
    for key, value in whole["args"].items():
        made += _option(f"--{flag_of(key)}", value)
    made += ["--percentile-metrics", ",".join(LATENCIES)]
    made += ["--metric-percentiles", ",".join(str(number) for number in PERCENTILES)]
    return [*made, "--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", file]


def _option(flag: str, value: t.Any) -> list[str]:
    if value is True:
        return [flag]
    if value is None or value is False:
        return []
    if isinstance(value, (list, tuple)):
        return [flag, *(str(item) for item in value)]
    return [flag, str(value)]


def seeds(first: int, count: int) -> list[int]:
    """A seed for every run: equal prompts would be answered from the prefix cache the second time."""
    return [(first + number) % _SEEDS for number in range(count)]


def plan(
    workloads: t.Sequence[t.Mapping[str, t.Any]], repetitions: int, warmup: int, seed: int
) -> list[dict[str, t.Any]]:
    """The runs in their order: in turns, so that what changes with time meets all workloads alike."""
    runs: list[dict[str, t.Any]] = []
    for repetition in range(1, repetitions + 1):
        for workload in workloads:
            name = str(workload["name"])
            if repetition == 1 and warmup:
                runs.append({"workload": name, "repetition": 0, "file": f"{name}-warmup.json", "prompts": warmup})
            file = f"{name}-{repetition}.json"
            runs.append({"workload": name, "repetition": repetition, "file": file, "prompts": None})
    for number, own in enumerate(seeds(seed, len(runs))):
        runs[number]["seed"] = own
    return runs


_BAR = re.compile(r"(\d+)/(\d+) \[")


def progress(text: str) -> tuple[int, int] | None:
    """How many requests of how many are done, from the end of what the command printed."""
    _before, begun, after = text.rpartition(BEGUN)
    bars = _BAR.findall(after) if begun else []
    return (int(bars[-1][0]), int(bars[-1][1])) if bars else None


def judge(result: t.Any, workload: t.Mapping[str, t.Any], prompts: int, file: str) -> list[str]:
    """Warnings; raises when the result is none, or a request failed.

    `vllm bench serve` ends with status 0 whatever became of the requests, so only these counts tell.
    """
    name = workload["name"]
    if not isinstance(result, dict):
        raise BenchError(f"Workload '{name}': {file} is no JSON object, so this vLLM writes another kind of result.")
    missing = [key for key in needed() if not isinstance(result.get(key), (int, float))]
    if missing:
        raise BenchError(
            f"Workload '{name}': the result {file} has no number for {', '.join(missing[:4])}"
            f"{' and others' if len(missing) > 4 else ''}: this release of vLLM writes results that are not known here."
        )
    if result["failed"] or result["completed"] != prompts:
        raise BenchError(
            f"Workload '{name}': {prompts - int(result['completed'])} of {prompts} requests failed, and throughput "
            f"of the rest means nothing. The first said: {_first_error(result)} The journal of the unit on the host of "
            "rank 0 may say more."
        )
    warnings = []
    if workload_is_fixed(workload):
        wanted = prompts * int(complete(workload)["output_len"])
        if abs(result["total_output_tokens"] - wanted) > 0.01 * wanted:
            warnings.append(
                f"Workload '{name}': {int(result['total_output_tokens'])} tokens came and {wanted} were asked for, so "
                "these figures are of another workload than its name says."
            )
    return warnings


def workload_is_fixed(workload: t.Mapping[str, t.Any]) -> bool:
    """Whether every request is as long as the workload says."""
    whole = complete(workload)
    return whole["dataset"] == "random" and not any(flag_of(key) == "random-range-ratio" for key in whole["args"])


def needed() -> list[str]:
    """The keys without which there is no table."""
    return [*_COUNTS, *_THROUGHPUTS, *(f"{kind}_{name}_ms" for name in LATENCIES for kind in _STATISTICS)]


def _first_error(result: t.Mapping[str, t.Any]) -> str:
    for error in result.get("errors") or []:
        lines = str(error or "").strip().splitlines()
        if lines:
            return f"'{lines[-1][:300]}'."
    return "nothing."


def strip(result: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The result as vLLM wrote it, without what was generated."""
    return {key: value for key, value in result.items() if key not in _LEFT_OUT}


def figures(result: t.Mapping[str, t.Any], workload: t.Mapping[str, t.Any]) -> dict[str, float]:
    """The figures of the tables."""
    kept = {key: result[key] for key in needed()}
    users = int(complete(workload)["concurrency"]) or int(result.get("max_concurrent_requests") or 0)
    kept["per_user_throughput"] = result["output_throughput"] / users if users else 0.0
    return kept


def redact(text: str, secret: str | None) -> str:
    return text.replace(secret, "***") if secret else text
