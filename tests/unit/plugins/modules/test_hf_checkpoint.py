# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import HubError
from ansible_collections.baremetal.kimi_k3.plugins.modules import hf_checkpoint as module

ROOT = Path(__file__).resolve().parents[4]
COMMIT = "f831ab66814297da540d832a5235f8e904f29d06"

EXCHANGE = {"address": "10.0.0.1", "peer": "10.0.0.2", "token": "between us", "first": True}

# The module in a process of its own, so that signals can be sent to it.
CHILD = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from ansible.module_utils.testing import patch_module_args
from ansible_collections.baremetal.kimi_k3.plugins.modules import hf_checkpoint
with patch_module_args(json.loads(sys.argv[2])):
    hf_checkpoint.main()
"""


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The module sets handlers for its process, which here is that of all tests."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def options(world: Any, **changes: Any) -> dict[str, Any]:
    return {
        "repository": "lab/tiny",
        "revision": world.commit,
        "dest": str(world.dest),
        "endpoint": world.hub.endpoint,
        "allow_tmpfs": True,
        "timeout": 5,
        "retries": 0,
        "lock_timeout": 0,
        **changes,
    }


@pytest.fixture
def run(world: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the module and returns what it prints."""

    def function(check: bool = False, **changes: Any) -> dict[str, Any]:
        arguments = options(world, **changes) | {"_ansible_check_mode": check, "_ansible_diff": True}
        with patch_module_args(arguments), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return function


def test_returns_what_it_documents(world: Any, run: Any) -> None:
    documented = {
        name: value for name, value in yaml.safe_load(module.RETURN).items() if value["returned"] == "success"
    }
    result = run(scope="stage", pipeline_layers=[3, 1], stages=[0], layers=4)
    assert result["changed"]
    assert set(documented) <= set(result)
    assert set(result["plan"]) == set(documented["plan"]["contains"])
    assert result["path"] == str(world.dest)
    assert result["files"] == len(result["fetch"])
    assert result["bytes"] == sum(len(world.files[name]) for name in result["fetch"])
    assert result["plan"]["layers"] == [[0, 2]]
    assert result["diff"]["before"] == ""
    assert "model-00003-of-00005.safetensors" in result["diff"]["after"]
    again = run(scope="stage", pipeline_layers=[3, 1], stages=[0], layers=4)
    assert not again["changed"]
    assert again["diff"]["before"] == again["diff"]["after"] == result["diff"]["after"]


def test_documents_its_options(world: Any) -> None:
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    assert set(documented) == set(module.ARGUMENT_SPEC)
    for name, spec in module.ARGUMENT_SPEC.items():
        for key in ("type", "default", "choices", "elements"):
            assert documented[name].get(key) == spec.get(key), name


def test_check_mode_writes_nothing(world: Any, run: Any) -> None:
    result = run(check=True)
    assert result["changed"]
    assert result["fetched_bytes"] == sum(map(len, world.files.values()))
    assert result["estimated_seconds"] == 1
    assert run(check=True, assumed_rate=100_000)["estimated_seconds"] == -(-result["fetched_bytes"] // 100_000)
    assert not world.dest.exists()


def test_present_asks_nobody(world: Any, run: Any) -> None:
    run()
    world.hub.clear_log()
    result = run(source="present", verify="full")
    assert not result["changed"]
    assert result["verified"] == "sha256"
    (world.dest / "config.json").unlink()
    result = run(source="present", mirrors=[world.hub.endpoint])
    assert result["failed"]
    assert "config.json is absent" in result["msg"]
    assert world.hub.log == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"revision": "main"}, "revision must be the 40 hexadecimal digits of a commit, not 'main'"),
        ({"revision": COMMIT[:39]}, "revision must be"),
        ({"revision": COMMIT.upper()}, "revision must be"),
        ({"repository": "../etc"}, "repository must be a name"),
        ({"repository": "a/b/c"}, "repository must be a name"),
        ({"repository": "a b"}, "repository must be a name"),
        ({"dest": "srv"}, "dest must be an absolute path"),
        ({"connections": 0}, "connections must be 1 or more, not 0"),
        ({"timeout": -1}, "timeout must be 1 or more, not -1"),
        ({"endpoint": "hub.example"}, "endpoint must be an http or https URL"),
        ({"scope": "stage"}, "scope is stage but all of the following are missing: pipeline_layers"),
        ({"scope": "stage", "pipeline_layers": [3, 1], "layers": 5}, "sum to 4, but the model has 5 layers"),
        ({"scope": "stage", "pipeline_layers": [3, 1], "stages": [2]}, "there are 2 pipeline stages"),
        ({"scope": "stage", "pipeline_layers": [47, 46]}, "the index lacks 4, 5"),
        (
            {"token_file": "/nonexistent/token"},
            "token_file /nonexistent/token cannot be read (No such file or directory)",
        ),
        ({"ca_path": "/nonexistent/ca.pem"}, "ca_path /nonexistent/ca.pem cannot be used"),
        ({"dest": "/proc/self/checkpoint"}, "/proc/self/checkpoint"),
        ({"shared": True, "keep_revisions": 2}, "keep_revisions must be 0 with shared"),
        ({"shared": True, "shared_timeout": 0}, "shared_timeout must be 1 or more, not 0"),
        ({"shared": True, "exchange": EXCHANGE}, "set one of the two"),
        (
            {"shared": True, "scope": "stage", "pipeline_layers": [3, 1], "stages": [1]},
            "stages must be empty with shared, not [1]",
        ),
        ({"exchange": {**EXCHANGE, "address": "0.0.0.0"}}, "exchange.address must be the address of one host"),
        ({"exchange": {**EXCHANGE, "address": ""}}, "exchange.address must be the address of one host"),
        ({"exchange": {**EXCHANGE, "peer": "[::]"}}, "exchange.peer must be the address of one host"),
        ({"exchange": {**EXCHANGE, "peer": "10.0.0.1"}}, "a host cannot exchange with itself"),
        ({"exchange": {**EXCHANGE, "port": 0}}, "exchange.port must be a TCP port"),
        ({"exchange": {**EXCHANGE, "token": ""}}, "exchange.token must be printable ASCII and not empty"),
        ({"exchange": {**EXCHANGE, "timeout": 0}}, "exchange.timeout must be 1 or more, not 0"),
    ],
)
def test_says_what_is_wrong(run: Any, changes: dict[str, Any], message: str) -> None:
    result = run(**changes)
    assert result["failed"]
    assert message in result["msg"]
    assert result["msg"].count("\n") == 0


def test_the_token_is_read_from_its_file_and_told_to_nobody(world: Any, run: Any, tmp_path: Path) -> None:
    world.hub.tokens["lab/tiny"] = "hf_right"
    token = tmp_path / "token"
    token.write_text("hf_right\n")
    token.chmod(0o600)
    result = run(token_file=str(token))
    assert world.held() == world.files
    assert not result.get("warnings")
    assert not world.hub.seen("cdn", authorization=True)
    written = [path for path in world.dest.rglob("*") if path.is_file() and b"hf_right" in path.read_bytes()]
    assert written == []
    assert "hf_right" not in json.dumps(result)


def test_a_careless_token_file_is_warned_of(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(" hf_x\n\n")
    token.chmod(0o644)
    value, warnings = module.read_token(str(token))
    assert value == "hf_x"
    assert len(warnings) == 2
    token.write_text("")
    with pytest.raises(HubError, match=r"token_file .* is of no use: it is empty"):
        module.read_token(str(token))
    token.write_bytes(b"\xff\xfe")
    with pytest.raises(HubError, match=r"token_file .* cannot be read"):
        module.read_token(str(token))


def test_the_endpoint_follows_the_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {name: spec.get("default") for name, spec in module.ARGUMENT_SPEC.items()}
    params |= {"repository": "a/b", "revision": COMMIT, "dest": "/srv"}
    stop = threading.Event()
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert module.request_of(params, False, None, stop).hub.endpoint == "https://huggingface.co"
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    assert module.request_of(params, False, None, stop).hub.endpoint == "https://mirror.example"
    params["endpoint"] = "http://10.0.0.1:8080"
    assert module.request_of(params, False, None, stop).hub.endpoint == "http://10.0.0.1:8080"


@pytest.mark.parametrize(
    "error", [OSError(errno.EROFS, "Read-only file system"), OSError(errno.EACCES, "Permission denied")]
)
@pytest.mark.parametrize("there", [False, True])
def test_a_place_one_may_not_write_to(
    world: Any, run: Any, monkeypatch: pytest.MonkeyPatch, error: OSError, there: bool
) -> None:
    if there:
        world.own("").mkdir(parents=True)
    real_open, real_mkdir = os.open, os.mkdir

    def refuse(path: Any) -> None:
        if str(path).startswith(str(world.dest.parent)):
            raise OSError(error.errno, error.strerror, str(path))

    def open_(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            refuse(path)
        return real_open(path, flags, mode, **options)

    def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
        refuse(path)
        real_mkdir(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_)
        patch.setattr(os, "mkdir", mkdir)
        result = run()
    assert result["failed"]
    assert result["msg"].startswith(str(world.dest.parent))
    assert result["msg"].endswith(f": {error.strerror}.")
    assert world.hub.log == []


def received(world: Any) -> int:
    progress = world.own("progress.json")
    return json.loads(progress.read_text())["bytes_fetched"] if progress.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_told_to_end_it_keeps_what_it_has(world: Any, number: signal.Signals) -> None:
    name = "model-00001-of-00005.safetensors"
    world.hub.fault("stall", path=name, on="cdn", after=200_000)
    arguments = json.dumps(options(world, connections=1, timeout=1))
    command = [sys.executable, "-c", CHILD, json.dumps(sys.path), arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 30
        while received(world) < 200_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(number)
        output, _errors = child.communicate(timeout=30)
    result = json.loads(output)
    assert result["failed"]
    assert f"Stopped by {number.name}; what has been fetched is kept" in result["msg"]
    world.hub.clear_log()
    world.run()
    assert world.held() == world.files
    assert world.hub.bytes_sent(name, "cdn") < len(world.files[name])


def test_by_ansible_itself(world: Any) -> None:
    environment = os.environ | {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"), "ANSIBLE_NOCOLOR": "1"}
    command = [sys.executable, "-m", "ansible", "adhoc", "localhost", "-m", "baremetal.kimi_k3.hf_checkpoint"]
    for word, check in (("CHANGED", True), ("CHANGED", False), ("SUCCESS", False)):
        done = subprocess.run(
            [*command, "-a", json.dumps(options(world)), *(["--check"] if check else [])],
            env=environment,
            cwd=world.root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"localhost | {word}" in done.stdout, done.stdout + done.stderr
        assert world.dest.exists() is not check
    assert world.held() == world.files


# In the background


def begin(world: Any, run: str | None = None, seconds: float = 0.2, **changes: Any) -> dict[str, Any]:
    """The module as the action plugin calls it, in a process of its own."""
    arguments = json.dumps(options(world, _progress={"slice": seconds, "run": run}, **changes))
    command = [sys.executable, "-c", CHILD, json.dumps(sys.path), arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return json.loads(done.stdout)


def test_the_fetch_goes_on_without_who_began_it_and_the_next_run_attaches(world: Any) -> None:
    name = "model-00001-of-00005.safetensors"
    world.hub.fault("stall", path=name, on="cdn", after=200_000, seconds=4)
    first = begin(world)
    assert not first["_running"]["attached"]
    second = begin(world)
    assert second["_running"]["attached"]
    assert second["_running"]["run"] == first["_running"]["run"]
    assert second["_running"]["pid"] == json.loads(world.own("progress.json").read_text())["pid"]
    assert second["_running"]["text"].startswith("fetching ")
    last = begin(world, first["_running"]["run"], 60)
    assert last["changed"]
    assert set(last) >= {"files", "verified", "plan"}
    assert world.held() == world.files
    assert world.hub.count("cdn", name) == 1
    # With nothing to do there is no run to follow.
    again = begin(world)
    assert not again["changed"]
    assert "_running" not in again


def test_other_work_in_the_same_place_waits_and_says_for_whom(world: Any) -> None:
    world.hub.fault("stall", path="model-00001*", on="cdn", after=200_000, seconds=4)
    first = begin(world)
    waits = begin(world, verify="full", seconds=1, lock_timeout=60)
    assert waits["_running"]["text"].startswith("waiting for another run on ")
    assert f"(process {first['_running']['pid']}, since " in waits["_running"]["text"]
    assert begin(world, first["_running"]["run"], 60)["changed"]
    result = begin(world, waits["_running"]["run"], 60, verify="full", lock_timeout=60)
    assert not result["changed"]
    assert result["verified"] == "sha256"


def test_hosts_that_share_a_directory_follow_each_their_own_work(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"dest": str(world.dest), "repository": "lab/tiny", "shared": True}
    name = module.job_of(params).name
    assert module.job_of({**params, "detach": False}).name == name
    monkeypatch.setattr(module, "host_id", lambda: "other")
    assert module.job_of(params).name != name


def test_a_failure_in_the_background_is_a_failure(world: Any) -> None:
    world.hub.fault("missing", path="config.json", on="resolve", times=None)
    result = begin(world, seconds=60)
    assert result["failed"]
    assert "HTTP 404" in result["msg"]


def test_killed_in_the_background(world: Any) -> None:
    world.hub.fault("stall", path="model-00001*", on="cdn", after=200_000, seconds=4)
    running = begin(world)["_running"]
    os.kill(running["pid"], signal.SIGKILL)
    result = begin(world, running["run"], 30)
    assert result["failed"]
    assert "ended without a word" in result["msg"]
    world.hub.clear_faults()
    assert begin(world, seconds=60)["changed"]
    assert world.held() == world.files


def test_told_to_end_in_the_background(world: Any) -> None:
    world.hub.fault("stall", path="model-00001*", on="cdn", after=200_000, seconds=30)
    running = begin(world)["_running"]
    os.kill(running["pid"], signal.SIGTERM)
    result = begin(world, running["run"], 30)
    assert result["failed"]
    assert "Stopped by SIGTERM" in result["msg"]


def test_a_place_that_will_not_do_is_refused_in_front(world: Any) -> None:
    result = begin(world, dest="/dev/shm/checkpoint", allow_tmpfs=False)  # noqa: S108
    assert result["failed"]
    assert "is on tmpfs" in result["msg"]
