# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: bench_serve
short_description: Measure a served model with vllm bench serve
version_added: "1.0.0"
description:
  - Runs C(vllm bench serve) from the engine's own environment against a server, for every workload and repetition,
    in turns.
  - Every run has prompts of its own. Equal ones would be answered from the prefix cache the second time.
  - A request that failed fails the module. C(vllm bench serve) itself ends with status 0 whatever became of its
    requests.
  - Measures in the background and survives the connection. The same options find a measurement that is still running.
  - The results stay in O(directory) until the next measurement begins.
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
extends_documentation_fragment:
  - baremetal.kimi_k3.attributes
  - baremetal.kimi_k3.attributes.actiongroup
attributes:
  check_mode:
    support: full
    details:
      - In check mode the server is asked whether it serves the model, and nothing is measured.
        What is missing becomes a warning.
  diff_mode:
    support: N/A
    details:
      - A measurement changes nothing but O(directory), which holds nothing else.
  idempotent:
    support: N/A
    details:
      - Every run is a new measurement.
options:
  executable:
    description:
      - The C(vllm) of the engine.
    type: path
    required: true
  url:
    description:
      - Address of the server, such as V(http://127.0.0.1:8000).
    type: str
    required: true
  api_key_file:
    description:
      - File with the key of the server, on the host that measures.
      - The key is handed over in the environment of the process, and is in no argument, log or result.
    type: path
  model:
    description:
      - Name under which the model is served.
    type: str
    required: true
  tokenizer:
    description:
      - Directory with the model's tokenizer on the host that measures, such as the checkpoint.
    type: path
    required: true
  trust_remote_code:
    description:
      - Whether code that comes with the tokenizer may run.
    type: bool
    default: false
  workloads:
    description:
      - What is measured. Each has a C(name); what else it leaves out is that of the published measurement of Kimi K3.
      - The keys are those of O(baremetal.kimi_k3.bench#role:main:bench_workloads).
    type: list
    elements: dict
    required: true
  repetitions:
    description:
      - How often each workload is measured.
    type: int
    default: 1
  warmup_prompts:
    description:
      - Requests of each workload that are sent before its first run and not counted; V(0) sends none.
    type: int
    default: 0
  seed:
    description:
      - Seed of the prompts of the first run; each further run takes the next one.
    type: int
    required: true
  environment:
    description:
      - Variables for C(vllm bench serve) beyond those that it needs.
    type: dict
    default: {}
  user:
    description:
      - Account that C(vllm bench serve) runs as. Without it, the one that runs the module.
    type: str
  directory:
    description:
      - Directory of this module alone, on the host that measures.
    type: path
    required: true
  timeout:
    description:
      - Seconds that one run may take.
    type: int
    default: 7200
  _progress:
    description:
      - Used by the action plugin alone.
    type: dict
"""
EXAMPLES = r"""
- name: Measure for a minute
  baremetal.kimi_k3.bench_serve:
    executable: /opt/kimi-k3/venv/bin/vllm
    url: http://127.0.0.1:8000
    model: kimi-k3
    tokenizer: /srv/kimi-k3/moonshotai--Kimi-K3/f831ab66814297da540d832a5235f8e904f29d06
    trust_remote_code: true
    directory: /var/lib/kimi-k3-bench
    seed: 1
    workloads:
      - name: short
        input_len: 1024
        output_len: 128
        prompts: 64
        concurrency: 8
  register: measured
"""
RETURN = r"""
runs:
  description: Every run that counts, in the order in which they were measured.
  returned: success
  type: list
  elements: dict
  contains:
    workload:
      description: Name of the workload.
      type: str
    repetition:
      description: Counts from 1.
      type: int
    seed:
      description: Seed of the prompts.
      type: int
    file:
      description: Name of the result within RV(result_dir).
      type: str
    command:
      description: The words of the command.
      type: list
      elements: str
    started:
      description: When it started, in UTC.
      type: str
    seconds:
      description: How long the command took, its own start included.
      type: float
    figures:
      description: Throughput in tokens or requests per second, latencies in milliseconds.
      type: dict
commands:
  description: Each run's command, warm-up included, in check mode as well.
  returned: success
  type: list
  elements: list
result_dir:
  description: Directory with the results.
  returned: success
  type: str
workloads:
  description: The workloads with all their keys.
  returned: success
  type: list
  elements: dict
machine:
  description: Processor, number of processors and memory of the host that measured.
  returned: success
  type: dict
  sample: {"processor": "Intel(R) Xeon(R) Platinum 8570", "processors": 224, "memory_gib": 2015}
seed:
  description: Seed of the first run.
  returned: success
  type: int
"""

import json
import os
import pwd
import re
import shutil
import signal
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import bench
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.api import Api, ApiError, read_key
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.background import (
    BackgroundError,
    Job,
    Tell,
    again,
    holder_of,
    running,
    start,
)
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_plan import digest_of
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.child import Child
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import (
    duration,
    make_dirs,
    read_json,
    utc_now,
)

_FOREVER = 10 * 365 * 86400.0
# Neither says what is measured: another run of the playbook finds the measurement that goes on.
_MANNER = frozenset({"seed", "_progress"})


def check_server(params: dict[str, Any], key: str | None) -> None:
    """The server answers, takes the key and serves the model."""
    try:
        api = Api(params["url"], key)
    except ValueError as error:
        raise bench.BenchError(f"There is nothing to measure: {error}.") from None
    try:
        answer = api.request("/v1/models")
        names = [str(entry.get("id")) for entry in answer["data"]]
    except ApiError as error:
        raise bench.BenchError(f"There is nothing to measure: {error.text}.") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise bench.BenchError(f"There is nothing to measure: {params['url']} does not list models.") from error
    if params["model"] not in names:
        raise bench.BenchError(
            f"There is nothing to measure: {params['url']} serves {', '.join(names) or 'no model'}, "
            f"not {params['model']}."
        )


def check_host(params: dict[str, Any]) -> None:
    """The host has what it takes."""
    if not os.access(params["executable"], os.X_OK):
        raise bench.BenchError(f"There is no {params['executable']} here: run the playbook engine first.")
    if not os.path.isdir(params["tokenizer"]):
        raise bench.BenchError(f"There is no tokenizer at {params['tokenizer']}: run the playbook fetch first.")
    if params["user"]:
        try:
            pwd.getpwnam(params["user"])
        except KeyError:
            raise bench.BenchError(f"There is no account {params['user']} here (bench_user).") from None


def environment_of(params: dict[str, Any], home: str, key: str | None) -> dict[str, str]:
    """Made from nothing: proxies, tokens and the like of whoever runs this have no part in it."""
    made = {
        "PATH": f"{os.path.dirname(params['executable'])}:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "LANG": "C.UTF-8",
        "XDG_CACHE_HOME": f"{home}/cache",
        "XDG_CONFIG_HOME": f"{home}/config",
        "HF_HOME": f"{home}/huggingface",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        **{str(name): str(value) for name, value in params["environment"].items()},
    }
    if key:
        made["OPENAI_API_KEY"] = key
    return made


def machine() -> dict[str, Any]:
    """What a report says of the host."""
    processor = ""
    memory = 0
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", stream.read(), re.MULTILINE)
            processor = found.group(1).strip() if found else ""
        with open("/proc/meminfo", encoding="utf-8") as stream:
            found = re.search(r"^MemTotal:\s*(\d+)", stream.read(), re.MULTILINE)
            memory = round(int(found.group(1)) / 2**20) if found else 0
    except OSError:
        pass
    return {"processor": processor, "processors": os.cpu_count() or 0, "memory_gib": memory}


def hide(path: str, key: str | None) -> None:
    """Take the key out of what a command printed, should it ever be there."""
    if not key:
        return
    with open(path, "rb") as stream:
        said = stream.read()
    if key.encode() in said:
        with open(path, "wb") as stream:
            stream.write(said.replace(key.encode(), b"***"))


def last_lines(text: str, count: int = 3) -> str:
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    return " / ".join(lines[-count:])[-600:] or "nothing"


def run_once(params: dict[str, Any], run: dict[str, Any], key: str | None, tell: Tell) -> dict[str, Any]:
    """One run: its result, judged, stands in the directory of results."""
    directory, workload, label = params["directory"], run["about"], run["label"]
    out = os.path.join(directory, "work", "out")
    prompts = run["prompts"] or int(bench.complete(workload)["prompts"])
    began, started = time.monotonic(), utc_now()
    told = 0.0

    def look(text: str) -> None:
        nonlocal told
        if time.monotonic() - told < 1:
            return
        told = time.monotonic()
        done = bench.progress(text)
        what = f"{done[0]} of {done[1]} requests" if done else "the command starts and makes prompts"
        tell(f"{label}: {what}, {duration(told - began)}")

    home = os.path.join(directory, "work", "home")
    log = os.path.join(directory, "results", run["file"].replace(".json", ".log"))
    environment = environment_of(params, home, key)
    child = Child(run["command"], environment=environment, user=params["user"], folder=home, log=log, mark=bench.BEGUN)
    try:
        code = child.watch(params["timeout"], look)
    finally:
        child.end()
        hide(log, key)
    said = bench.redact(last_lines(child.text()), key)
    if code is None:
        raise bench.BenchError(
            f"{label} was ended after {params['timeout']} s (bench_timeout). Its last words: {said}. "
            f"Its output is {log}."
        )
    path = os.path.join(out, run["file"])
    try:
        # Whoever owns the file cannot make this read another one.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as stream:
            text = stream.read()
    except OSError:
        raise bench.BenchError(
            f"{label} ended with status {code} and without a result. Its last words: {said}. Its output is {log}."
        ) from None
    if key and key in text:
        text = bench.redact(text, key)
    try:
        result = json.loads(text)
    except ValueError:
        result = None
    warnings = bench.judge(result, workload, prompts, run["file"])
    os.unlink(path)
    with open(os.path.join(directory, "results", run["file"]), "w", encoding="utf-8") as stream:
        json.dump(bench.strip(result), stream)
    return {
        **{name: run[name] for name in ("workload", "repetition", "seed", "file", "command")},
        "started": started,
        "seconds": round(time.monotonic() - began, 1),
        "figures": bench.figures(result, workload),
        "warnings": warnings if run["repetition"] else [],
    }


def commands_of(params: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs in their order, each with its command."""
    by_name = {workload["name"]: workload for workload in params["workloads"]}
    runs = bench.plan(params["workloads"], params["repetitions"], params["warmup_prompts"], params["seed"])
    for run in runs:
        run["about"] = by_name[run["workload"]]
        which = f"run {run['repetition']} of {params['repetitions']}" if run["repetition"] else "warm-up"
        run["label"] = f"workload '{run['workload']}', {which}"
        given = bench.words(
            run["about"],
            url=params["url"],
            model=params["model"],
            tokenizer=params["tokenizer"],
            trust_remote_code=params["trust_remote_code"],
            seed=run["seed"],
            folder=os.path.join(params["directory"], "work", "out"),
            file=run["file"],
            prompts=run["prompts"],
        )
        run["command"] = [params["executable"], *given]
    return runs


def measure(params: dict[str, Any], key: str | None, tell: Tell) -> dict[str, Any]:
    """All runs; the module's result, with warnings as C(_warnings)."""
    directory = params["directory"]
    work = os.path.join(directory, "work")
    try:
        for name in ("work", "results"):
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
        make_dirs(os.path.join(directory, "results"))
        for folder in (work, os.path.join(work, "home"), os.path.join(work, "out")):
            os.mkdir(folder, 0o700)
            if params["user"] and os.geteuid() == 0:
                entry = pwd.getpwnam(params["user"])
                os.chown(folder, entry.pw_uid, entry.pw_gid)
        done = []
        for run in commands_of(params):
            tell(f"{run['label']}: begins")
            done.append(run_once(params, run, key, tell))
    except bench.BenchError as error:
        return {"failed": True, "msg": str(error)}
    except OSError as error:
        return {"failed": True, "msg": f"{error.filename or directory}: {error.strerror or error}."}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {**planned(params), "runs": [run for run in done if run["repetition"]], "_warnings": warnings_of(done)}


def warnings_of(runs: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(warning for run in runs for warning in run.pop("warnings")))


def planned(params: dict[str, Any]) -> dict[str, Any]:
    """What is known before anything is measured."""
    return {
        "changed": False,
        "commands": [run["command"] for run in commands_of(params)],
        "result_dir": os.path.join(params["directory"], "results"),
        "workloads": [{"name": workload["name"], **bench.identity(workload)} for workload in params["workloads"]],
        "machine": machine(),
        "seed": params["seed"],
    }


def job_of(params: dict[str, Any]) -> Job:
    """The measurement's name: the same for the same options."""
    name = digest_of({key: value for key, value in params.items() if key not in _MANNER})[:12]
    return Job(params["directory"], f"bench-{name}", "Run again to measure anew.")


def alone(job: Job) -> None:
    """Two measurements at a time would measure each other."""
    if not os.path.isdir(job.directory):
        return
    for name in sorted(os.listdir(job.directory)):
        path = os.path.join(job.directory, name)
        if name.endswith(".lock") and path != job.lock:
            pid = holder_of(path)
            if pid is not None:
                state = (read_json(path[: -len(".lock")] + ".json") or {}).get("state", "")
                raise bench.BenchError(
                    f"Process {pid} measures other workloads on this host: {state or 'it says nothing'}. Wait for "
                    f"it, or end it with: kill {pid}"
                )


def stop_on_signals() -> None:
    def handler(number: int, _frame: Any) -> None:
        raise bench.BenchError(f"Stopped by {signal.Signals(number).name}; nothing was measured to the end.")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def follow(params: dict[str, Any], key: str | None) -> dict[str, Any]:
    """The result of the measurement in the background, or how far it is when the time for this look is over."""
    progress = params["_progress"] or {}
    job = job_of(params)
    try:
        if progress.get("run"):
            run = again(job, progress["run"])
        else:
            alone(job)
            if running(job) is None:
                check_server(params, key)

            def background(tell: Tell) -> dict[str, Any]:
                stop_on_signals()
                return measure(params, key, tell)

            run = start(job, background)
        status = run.follow(float(progress.get("slice", 0)) if progress else _FOREVER)
    except (bench.BenchError, BackgroundError) as error:
        return {"failed": True, "msg": str(error)}
    if status is not None:
        return status["result"]
    text = run.state() or "begins"
    return {"changed": False, "_running": {"run": run.ident, "text": text, "attached": run.attached, "pid": run.pid}}


def problem_of(params: dict[str, Any]) -> str | None:
    found = bench.errors(params)
    if not os.path.isabs(params["directory"]):
        found.append(f"directory must be an absolute path, not {params['directory']!r}.")
    return " ".join(found) or None


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "executable": {"type": "path", "required": True},
            "url": {"type": "str", "required": True},
            "api_key_file": {"type": "path", "no_log": False},
            "model": {"type": "str", "required": True},
            "tokenizer": {"type": "path", "required": True, "no_log": False},
            "trust_remote_code": {"type": "bool", "default": False},
            "workloads": {"type": "list", "elements": "dict", "required": True},
            "repetitions": {"type": "int", "default": 1},
            "warmup_prompts": {"type": "int", "default": 0},
            "seed": {"type": "int", "required": True},
            "environment": {"type": "dict", "default": {}},
            "user": {"type": "str"},
            "directory": {"type": "path", "required": True},
            "timeout": {"type": "int", "default": 7200},
            "_progress": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    params = module.params
    problem = problem_of(params)
    if problem:
        module.fail_json(msg=problem)
    try:
        if not (params["_progress"] or {}).get("run"):
            check_host(params)
        key = read_key(None, params["api_key_file"])
        if module.check_mode:
            check_server(params, key)
    except (bench.BenchError, ApiError, ValueError) as error:
        text = error.text if isinstance(error, ApiError) else str(error)
        if module.check_mode:
            module.warn(text)
        else:
            module.fail_json(msg=text)
    if module.check_mode:
        module.exit_json(runs=[], **planned(params))
    result = follow(params, key)
    for warning in result.pop("_warnings", []):
        module.warn(warning)
    if result.get("failed"):
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
