# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rank agent as real processes: groups of two and three on loopback, with an engine that fails as vLLM does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[4] / "roles/serve/files")]

import rank_agent
from agent_lab import API_KEY, SECRET, Agent, Lab, marked, wait_for

FIELDS = {
    *("schema", "group", "rank", "world_size", "state", "text", "generation", "since", "started", "pid", "child_pid"),
    *("configuration", "argv", "peers", "last_failure", "failures"),
}


@pytest.fixture
def labs(tmp_path):
    """Makes groups, and ends every process of theirs whatever happened; pytest shows their report on failure."""
    made: list[Lab] = []

    def make(size: int = 2) -> Lab:
        made.append(Lab(tmp_path / f"lab{len(made)}", size))
        return made[-1]

    yield make
    for lab in made:
        lab.close()
        print(lab.report())


@pytest.fixture
def lab(labs):
    return labs()


def configured(lab: Lab, **changes) -> Lab:
    for agent in lab:
        agent.configure(**changes)
    return lab


def down(agent: Agent, statuses: tuple[int, ...] = (1,)) -> None:
    """The first run of an agent is over, in order: with this status, and with nothing left that systemd had to kill."""
    wait_for(lambda: agent.exits, f"{agent.name} ends")
    assert agent.exits[0] in statuses
    assert agent.leftovers[0] == {}


# What needs no process


def test_steps_are_counted_over_all_engines_and_kinds():
    text = (
        "# TYPE vllm:generation_tokens_total counter\n"
        'vllm:generation_tokens_total{engine="0",model_name="a } b"} 3.0\n'
        'vllm:generation_tokens_total{engine="1",model_name="x"} 4.0 1700000000\n'
        'vllm:iteration_tokens_total_count{engine="0"} 1.5e+01\n'
        'vllm:iteration_tokens_total_sum{engine="0"} 1000.0\n'
        'vllm:iteration_tokens_total_bucket{engine="0",le="1"} 1000.0\n'
        'vllm:num_requests_running{engine="0"} 1000.0\n'
        "vllm:prompt_tokens_total 100\n"
        "vllm:generation_tokens_total_more 1000\n"
    )
    assert rank_agent.step_count(text) == 122
    assert rank_agent.step_count("") == 0


def test_differences_name_key_values_and_hosts():
    one, two = rank_agent.Host(0, "alpha", "a"), rank_agent.Host(1, "beta", "b")
    phrases = rank_agent.differences(one, {"same": "1", "a": "x", "gone": "y"}, two, {"same": "1", "a": "z", "new": ""})
    assert len(phrases) == 3
    assert all("rank 0 (alpha)" in phrase and "rank 1 (beta)" in phrase for phrase in phrases)
    assert [phrase.split()[0] for phrase in phrases] == ["a", "gone", "new"]


def test_a_clock_that_was_set_back_leaves_no_failures_behind():
    assert rank_agent.recent([10.0, 95.0, 100.0, 500.0], 100.0, 10.0) == [95.0, 100.0]


def test_a_proof_is_of_its_parts_and_not_of_their_joint_text():
    secret = b"s"
    assert rank_agent.proof(secret, "a", "bc") != rank_agent.proof(secret, "ab", "c")
    assert rank_agent.proof(secret, "a", "b") != rank_agent.proof(b"t", "a", "b")
    assert rank_agent.proof(secret, "a", "b") == rank_agent.proof(secret, "a", "b")


def test_a_written_file_is_whole_or_the_one_before(tmp_path):
    path = tmp_path / "status.json"
    rank_agent.write_atomic(path, "before")
    with pytest.raises(UnicodeEncodeError):
        rank_agent.write_atomic(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "before"
    assert list(tmp_path.iterdir()) == [path]


# Coming together


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_meet_in_any_order(lab, first):
    early, late = lab[first], lab[1 - first]
    early.start()
    status = early.reaches("waiting")
    assert late.name in status["text"]
    assert late.address in status["text"]
    assert status["child_pid"] is None
    assert early.children() == {}
    late.start()
    lab.serve(1)
    assert len(lab.complete()) == 3


def test_three_ranks_serve_and_end_together(labs):
    lab = labs(3)
    lab[2].start()
    lab[0].start()
    assert "rank1" in lab[0].reaches("waiting")["text"]
    assert lab[2].children() == {}
    lab[1].start()
    lab.serve(1)
    lab.complete()
    lab[2].steer("exit", "1")
    for agent in lab:
        down(agent)


def test_workers_start_before_rank_0(lab):
    lab[1].steer("slow_start", "0")
    lab.start().serve()
    ages = [Path(f"/proc/{agent.engine()}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split() for agent in lab]
    # field 22, start time since boot
    assert int(ages[1][19]) <= int(ages[0][19])


def test_a_group_of_one(labs):
    lab = labs(1).start().serve(1)
    lab.complete()
    assert lab[0].status()["peers"] == []
    lab[0].steer("hang")
    down(lab[0])


def test_nothing_starts_while_one_of_three_is_silent(labs):
    lab = labs(3)
    configured(lab, timeouts={"orphan": 1})
    for agent in (lab[0], lab[2]):
        agent.start(supervised=True)
    wait_for(lambda: "rank 0 is there" in lab[2].status().get("text", ""), "rank2 is known")
    os.kill(lab[2].pid, signal.SIGSTOP)
    lab[1].start(supervised=True)
    # it met rank1 while it still took rank2 for present, or found rank2 silent before
    wait_for(lambda: "rank 2" in json.dumps([lab[0].status()["last_failure"], lab[0].status()["text"]]), "it is missed")
    assert not (lab[0].control / "pids").exists()
    os.kill(lab[2].pid, signal.SIGCONT)
    lab.serve()
    lab.complete()


# Differences


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {"identity": {"argument.--max-model-len": "1024"}},
            ["argument.--max-model-len", "512", "1024"],
            id="value",
        ),
        pytest.param(
            {"identity": {"environment.VLLM_USE_V2_MODEL_RUNNER": None}},
            ["environment.VLLM_USE_V2_MODEL_RUNNER", "0"],
            id="missing-on-rank1",
        ),
        pytest.param(
            {"identity": {"argument.--enable-prefix-caching": "true"}},
            ["argument.--enable-prefix-caching", "true"],
            id="missing-on-rank0",
        ),
        pytest.param({"group": "other-group"}, ["group", "kimi-k3", "other-group"], id="group"),
        pytest.param({"world_size": 3}, ["world_size", "2", "3"], id="world-size"),
    ],
)
def test_ranks_that_differ_stay_down_and_say_how(lab, changes, words):
    configuration = lab[1].configuration
    identity = configuration["identity"]
    for key, value in changes.pop("identity", {}).items():
        if value is None:
            del identity[key]
        else:
            identity[key] = value
    if "world_size" in changes:
        third = {"rank": 2, "name": "rank2", "address": f"{lab.network}.3"}
        changes["hosts"] = [*configuration["hosts"], third]
    lab[1].configure(identity=identity, **changes)
    lab.start(supervised=True)
    for agent in lab:
        assert agent.ended() == 78
        assert agent.exits == [78]
        status = agent.status()
        assert status["state"] == "mismatch"
        for word in [*words, "rank0", "rank1"]:
            assert word in status["text"]
            assert word in agent.output()
        assert status["generation"] == 0
        assert status["child_pid"] is None
        assert not (agent.control / "pids").exists()


def test_every_difference_is_named(lab):
    lab[1].own_venv(lab.engine_folder("b", torch="2.12.0"))
    lab[1].state_checkpoint("3" * 64)
    lab[1].configure()
    lab.start()
    for agent in lab:
        assert agent.ended() == 78
        for word in ("engine.torch", "2.13.0", "2.12.0", "checkpoint", "2" * 64, "3" * 64):
            assert word in agent.output()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            lambda lab: lab[1].own_venv(lab.engine_folder("b", "9" * 64)), ["engine.lock", "9" * 64], id="engine"
        ),
        pytest.param(lambda lab: lab[1].state_checkpoint("3" * 64), ["checkpoint", "3" * 64], id="checkpoint"),
    ],
)
def test_what_changed_on_one_host_since_the_role_was_there_keeps_the_group_down(lab, change, words):
    """An engine or a checkpoint is exchanged under a running group; the next failure would start unlike ranks."""
    lab[1].own_venv(lab.engine_folder("own"))
    lab[1].configure()
    lab.start(supervised=True).serve(1)
    change(lab)
    lab.complete()
    assert [agent.exits for agent in lab] == [[], []]
    lab[0].steer("exit", "1")
    for agent in lab:
        assert agent.ended() == 78
        assert agent.exits == [1, 78]
        assert agent.state == "mismatch"
        for word in [*words, "rank0", "rank1"]:
            assert word in agent.status()["text"]


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
@pytest.mark.parametrize("playbook", ["engine", "fetch"])
def test_what_is_not_proven_any_more_is_waited_for(lab, ranks, playbook):
    """A file was found wrong, and is fetched anew: the statement is gone until then, and so is the group."""
    for agent in lab:
        agent.own_venv(lab.engine_folder(agent.name))
        agent.configure()
    paths = [lab[rank].statement_path if playbook == "fetch" else lab[rank].venv / "engine.json" for rank in ranks]
    lab.start(supervised=True).serve(1)
    for path in paths:
        path.rename(path.with_suffix(".aside"))
    lab.complete()
    lab[0].steer("exit", "1")
    for rank in ranks:
        wait_for(lambda r=rank: f"run the playbook {playbook}" in lab[r].status().get("text", ""), "it says what to do")
        assert lab[rank].state == "waiting"
    assert lab[0].status()["generation"] == lab[1].status()["generation"] == 1
    for path in paths:
        path.with_suffix(".aside").rename(path)
    lab.serve(2)
    assert [agent.exits for agent in lab] == [[1], [1]]


def test_a_group_of_one_waits_for_its_checkpoint(labs):
    lab = labs(1)
    path = lab[0].statement_path
    path.rename(path.with_suffix(".aside"))
    lab.start()
    wait_for(lambda: "run the playbook fetch" in lab[0].status().get("text", ""), "it says what to do")
    assert lab[0].children() == {}
    path.with_suffix(".aside").rename(path)
    lab.serve(1)


def test_an_engine_that_is_exchanged_while_ranks_wait_is_not_started_by_halves(labs):
    lab = labs(3)
    lab[0].start(supervised=True)
    lab[1].start(supervised=True)
    wait_for(lambda: "rank 0 is there" in lab[1].status().get("text", ""), "rank1 is known")
    lab.install_engine("b")
    lab[2].start(supervised=True)
    lab.serve()
    program = str(lab.folder / "venvs" / "b" / "bin" / "vllm")
    for agent in lab:
        assert all(program in command for command in agent.children().values())


def test_a_cut_heals_though_an_engine_was_exchanged_meanwhile(lab):
    configured(lab, timeouts={"orphan": 30})
    relay = lab.relay(1)
    lab.start().serve(1)
    lab[0].state_checkpoint("3" * 64)
    lab.install_engine("b", "9" * 64)
    relay.cut(for_good=True)
    lab.reaches("suspect")
    relay.heal()
    lab.serve(1)
    assert [agent.exits for agent in lab] == [[], []]


def test_what_changed_on_all_hosts_alike_is_started(lab):
    lab.start(supervised=True).serve(1)
    for agent in lab:
        agent.state_checkpoint("3" * 64)
    lab[0].steer("exit", "1")
    lab.serve(2)


def test_a_wrong_secret_gets_nowhere_and_is_no_trouble(lab):
    lab[1].secret("not-the-secret-of-this-group")
    lab.start()
    wait_for(lambda: "secret" in lab[1].status().get("text", "") or "secret" in lab[1].output(), "rank1 says so")
    wait_for(lambda: "secret" in lab[0].output(), "rank0 says so")
    assert lab[0].state == "waiting"
    assert lab[0].children() == lab[1].children() == {}
    if lab[1].alive:
        lab[1].stop()
    lab[1].secret(SECRET)
    lab[1].start()
    lab.serve(1)
    lab.complete()
    assert lab[0].exits == []


def test_an_empty_secret_is_none(lab):
    lab[0].secret("")
    lab[0].start()
    assert lab[0].ended() == 78
    assert "group-secret" in lab[0].output()


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        pytest.param(1, "twin", id="name"),
        pytest.param(1, "rank1", id="address"),
        pytest.param(2, "rank2", id="rank"),
    ],
)
@pytest.mark.parametrize("identity", [None, {"engine.lock": "0" * 64, "argument.--max-model-len": "256"}])
def test_a_host_that_has_no_place_here_is_no_trouble(lab, rank, name, identity):
    """A host that was replaced comes back, with the secret and with whatever ran on it then, and comes first."""
    twin = lab.add(rank, "twin", f"{lab.network}.9")
    own = {"rank": rank, "name": name, "address": twin.address}
    hosts = [*lab.hosts[:rank], own]
    twin.configure(hosts=hosts, world_size=len(hosts), **({"identity": identity} if identity else {}))
    lab[0].start()
    twin.start()
    wait_for(lambda: "refuses this host" in twin.status().get("text", ""), "the twin is told")
    assert f"{name} at {twin.address}" in lab[0].output() or "there is no rank 2" in twin.status()["text"]
    assert lab[0].exits == []
    lab[1].start()
    for agent in lab.agents[:2]:
        agent.reaches("serving", 1)
    lab.complete()
    assert twin.children() == {}


def test_a_credential_that_cannot_be_read(lab):
    (lab[0].credentials / "api-key").mkdir()
    lab[0].start()
    assert lab[0].ended() == 78
    assert "api-key" in lab[0].output()
    assert "Traceback" not in lab[0].output()


def test_two_hosts_with_one_rank(lab):
    twin = lab.add(1, "twin", f"{lab.network}.9")
    twin.configure()  # the very configuration of rank1, as after its files were copied
    lab[0].start()
    lab[1].start()
    lab[0].reaches("serving", 1)
    lab[1].reaches("serving", 1)
    twin.start()
    wait_for(lambda: "held by" in twin.status().get("text", ""), "the twin is told")
    assert "rank 1 is held by" in lab[0].output()
    assert twin.children() == {}
    lab.complete()
    assert lab[0].exits == lab[1].exits == []


# Ending together


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_exits_ends_the_group(lab, rank, status):
    for agent in lab:
        agent.environment["FAKE_STUBBORN"] = "1"
    lab.start().serve()
    assert all(len(agent.children()) == 2 for agent in lab)
    lab[rank].steer("exit", str(status))
    for agent in lab:
        down(agent)
        failure = agent.status()["last_failure"]
        assert f"rank{rank}" in failure["cause"] or agent.rank == rank
        assert failure["generation"] == 1
        assert agent.status()["failures"] == 1
        assert agent.status()["child_pid"] is None
        assert agent.status()["state"] == "restarting"
    assert str(status) in lab[rank].status()["last_failure"]["cause"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_that_is_killed_ends_the_group(lab, rank):
    lab.start(supervised=True).serve(1)
    other = lab[1 - rank]
    lab[rank].signal(signal.SIGKILL)
    down(other)
    assert other.exits[0] == 1
    lab.serve(2)
    lab.complete()
    assert f"rank{rank}" in other.status()["last_failure"]["cause"]


def test_no_verdict_is_waited_for_from_a_rank_0_that_is_gone(lab):
    configured(lab, timeouts={"peer": 3600, "orphan": 3600, "probe_interval": 3600}).start().serve(1)
    lab[0].signal(signal.SIGKILL)
    down(lab[1])
    assert lab[1].status()["last_failure"]["cause"] == "rank 0 (rank0): connection closed"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_sends_the_others_back_to_waiting(lab, rank):
    lab.start(supervised=True).serve(1)
    stopped, other = lab[rank], lab[1 - rank]
    assert stopped.stop() == 0
    status = stopped.status()
    assert (status["state"], status["failures"], status["child_pid"]) == ("stopped", 0, None)
    assert stopped.leftovers == [{}]
    assert "STOPPING=1" in stopped.notifications.texts()
    down(other)
    other.reaches("waiting")
    wait_for(lambda: stopped.name in other.status()["text"], "it says whom it waits for")
    assert other.children() == {}
    stopped.start(supervised=True)
    lab.serve(2)
    lab.complete()


def test_a_stop_before_the_group_is_there(lab):
    lab[0].start().reaches("waiting")
    assert lab[0].stop() == 0
    assert lab[0].state == "stopped"


def test_a_stop_while_the_engine_loads(lab):
    lab[0].steer("slow_start", "60")
    lab.start(supervised=True)
    lab.reaches("starting")
    engine = lab[0].engine()
    assert lab[0].stop() == 0
    assert engine not in marked(lab.mark)
    assert lab[0].name in lab[1].reaches("waiting")["text"]


def test_the_group_comes_back_with_the_next_generation(lab):
    lab.start(supervised=True).serve(1)
    lab[1].steer("exit", "0")
    lab.serve(2)
    lab.complete()
    lab[0].steer("exit", "1")
    lab.serve(3)
    lab.complete()
    for agent in lab:
        assert agent.exits == [1, 1]
        assert agent.leftovers == [{}, {}]
        assert agent.status()["failures"] == 2


def test_the_generation_outlives_the_agents(lab):
    lab.start().serve(1)
    for agent in lab:
        agent.supervised = False
    lab[1].stop()
    lab[0].ended()
    lab.start().serve(2)
    lab[0].stop()
    lab[1].ended()
    # one host has lost its state: the number still only grows
    for path in lab[0].state_dir.iterdir():
        path.unlink()
    lab.start().serve(3)


def test_a_worker_of_a_session_of_its_own_does_not_stay(lab):
    for agent in lab:
        agent.environment.update(FAKE_STUBBORN="1", FAKE_DETACHED="1")
    lab.start().serve()
    lab[0].steer("exit", "1")
    for agent in lab:
        down(agent)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_ignores_sigterm_is_killed(lab, rank):
    lab[rank].environment["FAKE_DEAF"] = "1"
    configured(lab, timeouts={"stop": 0.5}).start().serve()
    lab[1 - rank].steer("exit", "1")
    for agent in lab:
        down(agent)
    lab.start().serve(2)
    assert lab[rank].stop() == 0
    assert lab[rank].leftovers[1] == {}


def test_a_stop_while_the_group_ends_is_a_stop(lab):
    """systemd is told that it was asked for: the unit is inactive then, and not failed."""
    lab[0].environment["FAKE_DEAF"] = "1"
    configured(lab, timeouts={"stop": 2}).start().serve()
    lab[1].steer("exit", "1")
    lab[0].reaches("restarting")
    lab[0].supervised = False
    assert lab[0].stop() == 0
    assert lab[0].state == "stopped"
    assert lab[0].status()["failures"] == 0
    assert lab[0].status()["last_failure"]["cause"]


def test_an_engine_does_not_outlive_its_agent(lab):
    """Not even until systemd cleans up."""
    lab.start().serve()
    lab[1].cleaned = False
    engine = lab[1].engine()
    lab[1].signal(signal.SIGKILL)
    wait_for(lambda: engine not in lab[1].children(), "the engine is gone")


def test_the_end_waits_until_the_gpus_are_free(lab):
    """A driver frees them later than the process is gone; an engine that starts before that finds no memory."""
    tools = lab.folder / "tools"
    tools.mkdir()
    program = tools / "nvidia-smi"
    program.write_text('#!/bin/sh\necho asked >> "$FAKE_CONTROL/asked"\ncat "$FAKE_CONTROL/gpu"\n', encoding="utf-8")
    program.chmod(0o755)
    lab[0].environment["PATH"] = f"{tools}:{os.environ['PATH']}"
    lab[0].configure(gpu_wait=True)
    lab.start().serve()
    # of another unit's process nothing is waited for
    engine = lab[0].engine()
    lab[0].steer("gpu", f"{os.getpid()}\n{engine}\n")
    lab[1].steer("exit", "1")
    down(lab[1])
    asked = lab[0].control / "asked"
    wait_for(lambda: asked.exists() and len(asked.read_text(encoding="utf-8").splitlines()) >= 2, "it looks again")
    assert engine not in lab[0].children()
    assert lab[0].exits == []
    lab[0].steer("gpu", f"{os.getpid()}\n")
    down(lab[0])


def test_the_end_does_not_wait_for_the_api(labs):
    """A request that hangs, with hours left until its timeout, is no reason to stay."""
    lab = labs(1)
    configured(lab, timeouts={"start": 3600})
    with socket.create_server((lab[0].address, 0)) as api:
        configuration = lab[0].configuration
        configuration["api"]["url"] = f"http://{lab[0].address}:{api.getsockname()[1]}"
        lab[0].configure(**configuration)
        lab[0].start()
        connection, _rest = api.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.close()
        connection, _rest = api.accept()
        assert b"/v1/completions" in connection.recv(65536)
        assert lab[0].stop() == 0
        connection.close()


# Silence, hangs, load


def test_a_silent_peer_is_suspected_and_not_killed(lab):
    configured(lab, timeouts={"orphan": 30}).start().serve(1)
    engines = [agent.engine() for agent in lab]
    os.kill(lab[1].pid, signal.SIGSTOP)
    assert "rank 1 (rank1)" in lab[0].reaches("suspect")["text"]
    wait_for(lambda: lab[0].status()["peers"][0]["state"] == "silent", "it says who is silent")
    # probes go on coming through: several of them, and nobody ends
    before = lab.metric("vllm:generation_tokens_total")
    wait_for(lambda: lab.metric("vllm:generation_tokens_total") >= before + 3, "probes come through")
    assert lab[0].state == "suspect"
    lab.complete()
    os.kill(lab[1].pid, signal.SIGCONT)
    lab.serve(1)
    assert [agent.engine() for agent in lab] == engines
    assert [agent.exits for agent in lab] == [[], []]


def test_a_suspicion_asks_for_a_token_at_once(lab):
    configured(lab, timeouts={"orphan": 30, "probe_interval": 3600, "probe": 3600}).start().serve(1)
    before = lab.metric("vllm:generation_tokens_total")
    os.kill(lab[1].pid, signal.SIGSTOP)
    wait_for(lambda: lab.metric("vllm:generation_tokens_total") > before, "a token is asked for")
    wait_for(lambda: "token came" in lab[0].status()["text"], "it says so")
    assert lab[0].state == "suspect"


def test_a_silent_peer_with_a_wedged_engine_is_found(lab):
    """Also where the next regular probe is far away."""
    configured(lab, timeouts={"orphan": 30, "probe_interval": 3600}).start().serve(1)
    os.kill(lab[1].engine(), signal.SIGSTOP)
    os.kill(lab[1].pid, signal.SIGSTOP)
    down(lab[0])
    assert "wedged" in lab[0].status()["last_failure"]["cause"]
    os.kill(lab[1].pid, signal.SIGCONT)
    down(lab[1])


def test_a_rank_that_stood_still_itself_suspects_nobody(lab):
    """Longer than the orphan's time, and all that the others said meanwhile is still to be read."""
    configured(lab, timeouts={"orphan": 1}).start().serve(1)
    engines = [agent.engine() for agent in lab]
    for agent in reversed(lab.agents[1:]):
        os.kill(agent.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    lab[0].reaches("suspect")
    wait_for(lambda: time.monotonic() - stopped > 2, "longer than the orphan's time")
    os.kill(lab[1].pid, signal.SIGCONT)
    lab.serve(1)
    assert [agent.engine() for agent in lab] == engines
    assert [agent.exits for agent in lab] == [[], []]


@pytest.mark.parametrize("for_good", [False, True])
def test_a_cut_between_the_agents_heals(lab, for_good):
    """The engines' own network works on, as InfiniBand does when the management network is cut."""
    configured(lab, timeouts={"orphan": 30})
    relay = lab.relay(1)
    lab.start().serve(1)
    engines = [agent.engine() for agent in lab]
    relay.cut(for_good=for_good)
    lab.reaches("suspect")
    tokens = lab.metric("vllm:generation_tokens_total")
    wait_for(lambda: lab.metric("vllm:generation_tokens_total") > tokens, "probes come through")
    relay.heal()
    lab.serve(1)
    for agent in lab:
        wait_for(lambda a=agent: a.status()["peers"][0]["state"] == "connected", f"{agent.name} hears the other")
    assert [agent.engine() for agent in lab] == engines
    assert [agent.exits for agent in lab] == [[], []]
    # and the new connection is as good as the first one
    lab[1].steer("exit", "1")
    for agent in lab:
        down(agent)
    assert "rank 1" in lab[0].status()["last_failure"]["cause"]


@pytest.mark.parametrize("word", [b'"type":"start"', b'"type":"started"'])
def test_a_word_that_is_lost_at_the_start_is_said_again(lab, word):
    configured(lab, timeouts={"orphan": 30})
    relay = lab.relay(1)
    relay.cut_before = word
    lab.start()
    wait_for(lambda: relay.cut_before is None, "the word is on its way")
    if word == b'"type":"started"':
        lab[1].reaches("suspect")
    else:
        wait_for(lambda: "waiting for rank 0" in lab[1].status()["text"], "the worker misses rank 0")
    relay.heal()
    lab.serve(1)
    lab.complete()
    assert [agent.exits for agent in lab] == [[], []]


def test_a_cut_that_stays_ends_the_worker(lab):
    configured(lab, timeouts={"orphan": 1})
    relay = lab.relay(1)
    lab.start(supervised=True).serve(1)
    relay.cut(for_good=True)
    down(lab[1])
    assert "rank 0" in lab[1].status()["last_failure"]["cause"]
    # rank 0 has no word of it, but asks for tokens, and none comes
    down(lab[0])
    relay.heal()
    lab.serve(2)
    lab.complete()


def test_rank_0_that_stood_still_is_found_again(lab):
    """Shorter than the orphan's time: the worker looks for it, and takes up with it again."""
    configured(lab, timeouts={"orphan": 30}).start().serve(1)
    engines = [agent.engine() for agent in lab]
    os.kill(lab[0].pid, signal.SIGSTOP)
    lab[1].reaches("suspect")
    os.kill(lab[0].pid, signal.SIGCONT)
    lab.serve(1)
    assert [agent.engine() for agent in lab] == engines
    assert [agent.exits for agent in lab] == [[], []]


def test_a_wedged_engine_is_found_while_idle(lab):
    lab.start(supervised=True).serve(1)
    lab[0].steer("hang")
    down(lab[0])
    down(lab[1])
    lab[0].unsteer("hang")
    lab.serve(2)
    lab.complete()
    for agent in lab:
        assert "wedged" in agent.status()["last_failure"]["cause"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_compiles_is_not_wedged(lab, tmp_path, rank):
    """The first request of a new shape can compile for longer than any probe waits, on either rank."""
    compiler = tmp_path / "ninja"
    compiler.symlink_to(shutil.which("sleep"))
    lab[rank].environment["FAKE_COMPILER"] = str(compiler)
    lab.start(supervised=True).serve(1)
    lab[0].steer("hang")
    wait_for(lambda: "compiling kernels" in lab[0].status()["text"], "the probe is excused")
    assert lab[0].state == "serving"
    subprocess.run(["pkill", "-f", str(compiler)], check=True)
    for agent in lab:
        down(agent)
    assert "wedged" in lab[0].status()["last_failure"]["cause"]


def test_a_compiler_that_nobody_has_seen_for_long_is_no_excuse(lab, tmp_path):
    """The worker's host loses power right after it said that kernels are compiled there."""
    compiler = tmp_path / "ninja"
    compiler.symlink_to(shutil.which("sleep"))
    lab[1].environment["FAKE_COMPILER"] = str(compiler)
    lab.start().serve(1)
    lab[0].steer("hang")
    wait_for(lambda: "compiling kernels" in lab[0].status()["text"], "the probe is excused")
    os.kill(lab[1].pid, signal.SIGSTOP)
    down(lab[0])
    assert "wedged" in lab[0].status()["last_failure"]["cause"]
    os.kill(lab[1].pid, signal.SIGCONT)


class Unanswered:
    """An API that gives no token, and whose first words on its steps are lost."""

    def __init__(self, *steps):
        self.told = list(steps)

    def steps(self, _timeout):
        return self.told.pop(0) if len(self.told) > 1 else self.told[0]

    def token(self, _timeout):
        return rank_agent.Answer(False, "no answer")


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [((None, 5.0, 6.0), "busy"), ((None, 5.0, 5.0), "wedged"), ((5.0, 6.0), "busy"), ((5.0, None), "wedged")],
)
def test_a_busy_engine_is_not_taken_for_wedged_because_a_question_was_lost(steps, verdict):
    async def judge():
        events = rank_agent.Events()
        prober = rank_agent.Prober(Unanswered(*steps), rank_agent.Timeouts(probe=0.1), events)
        await prober._probe()
        return (await events.get(1))[0]

    assert asyncio.run(judge()) == verdict


def test_a_stopped_worker_engine_is_found(lab):
    lab.start(supervised=True).serve(1)
    os.kill(lab[1].engine(), signal.SIGSTOP)
    for agent in lab:
        down(agent)
    lab.serve(2)
    lab.complete()


def test_a_killed_worker_process_is_found(lab):
    """The engine's main process on the worker is gone without a word: its agent sees the end of its child."""
    lab.start(supervised=True).serve(1)
    os.kill(lab[1].engine(), signal.SIGKILL)
    for agent in lab:
        down(agent)
    lab.serve(2)
    lab.complete()


def test_a_busy_engine_is_never_killed(lab):
    configured(lab, timeouts={"probe": 0.3, "probe_interval": 0.2}).start().serve(1)
    engines = [agent.engine() for agent in lab]
    lab[0].steer("busy")
    start = time.monotonic()
    before = lab.metric("vllm:iteration_tokens_total_count")
    # a step every 20 ms at the fastest: many times the probe's timeout
    wait_for(lambda: lab.metric("vllm:iteration_tokens_total_count") >= before + 100, "the engine works")
    assert time.monotonic() - start > 5 * 0.3
    assert [agent.state for agent in lab] == ["serving", "serving"]
    # neither when it is asked for a token that then has to wait
    os.kill(lab[1].pid, signal.SIGSTOP)
    lab[0].reaches("suspect")
    wait_for(lambda: lab.metric("vllm:num_requests_running") >= 3, "it was asked more than once")
    os.kill(lab[1].pid, signal.SIGCONT)
    lab.serve(1)
    assert [agent.engine() for agent in lab] == engines
    assert [agent.exits for agent in lab] == [[], []]
    lab[0].unsteer("busy")
    lab.complete()
    os.kill(engines[1], signal.SIGSTOP)  # and one that worked until now is not trusted for ever
    for agent in lab:
        down(agent)


def test_a_busy_engine_is_not_probed(lab):
    """Work that moves is proof enough; a probe then is one more request in the queue."""
    configured(lab, timeouts={"probe_interval": 0.3}).start().serve(1)
    lab[0].steer("busy")
    before = lab.metric("vllm:iteration_tokens_total_count")
    wait_for(lambda: lab.metric("vllm:iteration_tokens_total_count") >= before + 60, "the engine works")
    # at most the one that was on its way
    assert lab.metric("vllm:num_requests_running") <= 1


def test_an_engine_that_answers_errors_ends(lab):
    lab.start(supervised=True).serve(1)
    lab[0].steer("error")
    for agent in lab:
        down(agent)
    lab[0].unsteer("error")
    lab.serve(2)
    assert "500" in lab[0].status()["last_failure"]["cause"]


def test_an_api_that_answers_garbage_is_asked_again(lab):
    lab[0].steer("garbage")
    lab.start()
    wait_for(lambda: lab[0].output().count("POST /v1/completions") >= 2 or lab[0].exits, "it asks again")
    assert lab[0].exits == []
    lab[0].unsteer("garbage")
    lab.serve(1)


def test_a_worker_without_rank_0_ends_itself(lab):
    configured(lab, timeouts={"orphan": 1}).start(supervised=True).serve(1)
    os.kill(lab[0].pid, signal.SIGSTOP)
    lab[1].reaches("suspect")
    down(lab[1])
    assert "rank 0" in lab[1].status()["last_failure"]["cause"]
    lab[1].reaches("waiting")
    assert lab[1].children() == {}
    os.kill(lab[0].pid, signal.SIGCONT)
    lab.serve(2)
    lab.complete()


def test_a_slow_load_is_waited_for(lab):
    configured(lab, timeouts={"probe": 0.3, "probe_interval": 0.2, "orphan": 1})
    lab[0].steer("slow_start", "2.5")
    lab.start()
    wait_for(lambda: "41" in lab[0].status().get("text", ""), "rank0 tells how far the load is")
    lab.serve(1)
    assert [agent.exits for agent in lab] == [[], []]


def test_a_load_without_end_is_ended(lab):
    configured(lab, timeouts={"start": 1})
    lab[0].steer("slow_start", "600")
    lab.start()
    for agent in lab:
        down(agent)
    assert "start" in lab[0].status()["last_failure"]["cause"]


# Giving up


@pytest.mark.parametrize("rank", [0, 1])
def test_a_child_that_dies_at_once_is_not_started_for_ever(lab, rank):
    configured(lab, restart_limit=3)
    lab[rank].steer("exit", "3 always")
    lab.start(supervised=True)
    for agent in lab:
        assert agent.ended() == 78
        status = agent.status()
        assert (status["state"], status["failures"]) == ("given_up", 3)
        assert agent.exits == [1, 1, 78]
        assert agent.leftovers == [{}, {}, {}]
        assert "3 failures" in status["text"]
        assert f"rank{rank}" in status["text"]
        assert "status 3" in status["text"]
        assert status["last_failure"]["cause"].endswith(f"rank {rank} (rank{rank}): the engine exited with status 3")
    # the count begins anew, for the operator who mended what was wrong
    lab[rank].unsteer("exit")
    lab.start(supervised=True).serve(4)
    assert [agent.status()["failures"] for agent in lab] == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_orderly_stop_clears_the_count(lab, rank):
    configured(lab, restart_limit=2)
    lab.start(supervised=True).serve(1)
    lab[1].steer("exit", "1")
    lab.serve(2)
    assert [agent.status()["failures"] for agent in lab] == [1, 1]
    lab[rank].stop()
    lab[rank].start(supervised=True)
    lab.serve(3)
    assert [agent.status()["failures"] for agent in lab] == [0, 0]
    lab[1].steer("exit", "1")
    lab.serve(4)
    assert [agent.status()["failures"] for agent in lab] == [1, 1]


def test_a_generation_that_cannot_be_kept_is_not_begun(lab):
    lab[0].state_dir.rmdir()
    lab[0].state_dir.write_text("no folder", encoding="utf-8")
    lab.start()
    for agent in lab:
        assert agent.ended() == 78
        assert agent.state == "given_up"
        assert "generation" in agent.status()["text"]
        assert not (agent.control / "pids").exists()


def test_failures_outside_the_window_are_forgotten(lab):
    configured(lab, restart_limit=2, restart_window=0.2)
    lab.start(supervised=True).serve(1)
    for generation in (2, 3):
        lab[0].steer("exit", "1")
        lab.serve(generation)


# Strangers


RUBBISH = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\xff\xfe\n",
    b"\0" * 1000 + b"\n",
    b"[" * 500_000 + b"\n",
    b"{}\n",
    b"[]\n",
    b'"x"\n',
    b'{"type": "beat"}\n',
    b'{"nonce": "\\ud800", "proof": 1}\n',
    b'{"nonce": "' + b"a" * 64 + b'", "proof": "\xc3\xa4"}\n',
    b'{"nonce": "' + b"\\ud800" * 64 + b'", "proof": null}\n',
)


def is_dropped(address: tuple[str, int], rubbish: bytes) -> None:
    """Who answers the challenge with this is disconnected at once."""
    with socket.create_connection(address, timeout=20) as client, client.makefile("rb") as heard:
        assert b"nonce" in heard.readline()
        client.sendall(rubbish)
        with contextlib.suppress(ConnectionResetError):
            assert len(heard.read()) < 200


def test_strangers_on_the_port_are_no_trouble(lab):
    lab[0].start()
    address = (lab[0].address, lab.agent_port)
    wait_for(lambda: listens(address), "rank0 listens")
    # more than may try at once, from another address than rank1
    other = (f"{lab.network}.200", 0)
    silent = [socket.create_connection(address, source_address=other) for _rest in range(20)]
    slow = socket.create_connection(address)
    slow.sendall(b'{"type"')
    for rubbish in RUBBISH:
        is_dropped(address, rubbish)
    with socket.create_connection(address) as client:
        client.settimeout(10)
        try:
            while True:  # more than any message: the agent closes, and does not keep it all
                client.sendall(b"x" * 65536)
        except (BrokenPipeError, ConnectionResetError):
            pass
    lab[1].start()
    lab.serve(1)
    for rubbish in RUBBISH:
        is_dropped(address, rubbish)
    lab.complete()
    assert [agent.exits for agent in lab] == [[], []]
    assert [agent.state for agent in lab] == ["serving", "serving"]
    for client in (*silent, slow):
        client.close()
    # what is closed by then is every connection but rank1's
    wait_for(lambda: connections(lab[0].pid, lab.agent_port) == 1, "the strangers' connections are closed")
    assert "Traceback" not in lab[0].output()


def listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address).close()
    except ConnectionRefusedError:
        return False
    return True


def connections(pid: int, port: int) -> int:
    """Established connections to a port of a process, from /proc/net/tcp."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(str(path.readlink()))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return sum(
        row[3] in ("01", "08") and row[1].endswith(f":{port:04X}") and f"socket:[{row[9]}]" in inodes for row in rows
    )


def test_a_rank_0_that_does_not_know_the_secret_is_not_obeyed(lab):
    """Nor does it learn anything: what the worker says of itself comes after the proof."""
    address = (lab[0].address, lab.agent_port)
    with socket.create_server(address) as impostor:
        lab[1].start()
        connection, _rest = impostor.accept()
        with connection, connection.makefile("rb") as heard:
            connection.sendall(json.dumps({"protocol": 1, "nonce": "a" * 64}).encode() + b"\n")
            first = json.loads(heard.readline())
            start = json.dumps({"type": "start", "generation": 9})
            connection.sendall(json.dumps({"proof": first["proof"]}).encode() + f"\n{'0' * 64} {start}\n".encode())
            assert heard.read() == b""
        wait_for(lambda: "secret" in lab[1].status().get("text", ""), "it says why")
        assert lab[1].children() == {}
        assert lab[1].exits == []
    lab[0].start()
    lab.serve(1)


def test_a_message_that_was_changed_on_its_way_counts_as_a_break(lab):
    relay = lab.relay(1)
    lab.start(supervised=True).serve(1)
    relay.spoil = True
    for agent in lab:
        down(agent)
    lab.serve(2)
    assert "proven" in lab[0].output() + lab[1].output()
    lab.complete()


# Telling


def test_ready_means_that_a_token_came_through(lab):
    lab[0].steer("hang")
    lab.start()
    wait_for(lab.healthy, "the API is up")
    wait_for(lambda: lab.metric("vllm:num_requests_running") >= 1, "rank0 asks for a token")
    for agent in lab:
        assert agent.state == "starting"
        assert "READY=1" not in agent.notifications.texts()
    lab[0].unsteer("hang")
    lab.serve()
    for agent in lab:
        wait_for(lambda a=agent: "READY=1" in a.notifications.texts(), f"{agent.name} is ready")
        assert agent.notifications.texts("READY=").count("READY=1") == 1
        assert agent.notifications.senders() == {agent.pid}
        wait_for(lambda a=agent: any("generation 1" in s for s in a.notifications.texts("STATUS=")), "it says so")
    ready = [next(when for when, _rest, line in agent.notifications.lines if line == "READY=1") for agent in lab]
    assert ready[0] <= ready[1] + 0.5


def test_what_systemd_hears(lab):
    for agent in lab:
        agent.environment["WATCHDOG_USEC"] = "400000"
    lab[0].start()
    wait_for(lambda: any("rank 1" in line for line in lab[0].notifications.texts("STATUS=")), "whom it waits for")
    # waiting for a peer is not a start that hangs: the unit lives on without being ready
    wait_for(lambda: len(lab[0].notifications.texts("WATCHDOG=1")) > 3, "it lives")
    lab[1].start()
    lab.serve()
    for agent in lab:
        seen = len(agent.notifications.texts("WATCHDOG=1"))
        wait_for(lambda a=agent, n=seen: len(a.notifications.texts("WATCHDOG=1")) > n + 3, f"{agent.name} lives")
    assert lab[1].stop() == 0
    assert "STOPPING=1" in lab[1].notifications.texts()
    down(lab[0])


def test_ready_is_said_again_when_systemd_could_not_take_it(lab):
    """As while it reloads: without the message the unit would never become active."""
    path = lab.sockets / "full"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler,
    ):
        listener.bind(str(path))
        listener.settimeout(10)
        filler.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                filler.sendto(b"X=1", str(path))
        lab[1].environment["NOTIFY_SOCKET"] = str(path)
        lab.start().serve()
        while b"READY=1" not in listener.recv(65536):
            pass


def test_an_abstract_notification_socket(lab):
    name = f"\0{lab.mark}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name)
        listener.settimeout(10)
        lab[0].environment["NOTIFY_SOCKET"] = f"@{lab.mark}"
        lab[0].start()
        assert b"=" in listener.recv(65536)


def test_the_status_file(lab):
    lab.start()
    wait_for(lambda: lab[0].status().get("state") == "serving", "it serves")
    lab.serve(1)
    status = lab[0].status()
    assert set(status) >= FIELDS
    assert status["schema"] == 1
    assert (status["group"], status["rank"], status["world_size"]) == ("kimi-k3", 0, 2)
    assert status["pid"] == lab[0].pid
    assert status["configuration"] == "d" * 64
    assert status["argv"][1:] == lab.argv(lab[0])[1:]
    assert status["last_failure"] is None
    assert status["failures"] == 0
    (peer,) = status["peers"]
    assert (peer["rank"], peer["name"], peer["address"]) == (1, "rank1", lab[1].address)
    assert peer["state"] == "connected"
    for moment in (status["since"], status["started"], peer["last_heard"]):
        assert time.strptime(moment[:19], "%Y-%m-%dT%H:%M:%S")
        assert moment.endswith(("Z", "+00:00"))
    (peer,) = lab[1].status()["peers"]
    assert (peer["rank"], peer["name"], peer["state"]) == (0, "rank0", "connected")
    assert lab[0].status_path.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in lab[0].status_path.parent.iterdir()] == ["status.json"]
    assert len(lab[0].children()) == 2
    assert status["child_pid"] in lab[0].children()


def test_last_heard_moves(lab):
    lab.start().serve()
    first = lab[0].status()["peers"][0]["last_heard"]
    wait_for(lambda: lab[0].status()["peers"][0]["last_heard"] != first, "the status is kept fresh")


def test_secrets_stay_secret(lab):
    for agent in lab:
        agent.api_key(API_KEY)
    lab.start(supervised=True).serve(1)
    assert lab.request("GET", "/v1/models")[0] == 401
    assert lab.complete(key=API_KEY)
    before = lab.metric("vllm:generation_tokens_total")
    wait_for(lambda: lab.metric("vllm:generation_tokens_total") > before, "the probe has the key")
    lab[1].steer("exit", "1")
    lab.serve(2)
    for agent in lab:
        texts = [agent.status_path.read_text(encoding="utf-8"), agent.output(), *agent.notifications.texts()]
        texts += marked(agent.mark).values()
        texts += [path.read_text(encoding="utf-8") for path in agent.state_dir.rglob("*") if path.is_file()]
        for secret in (SECRET, API_KEY):
            assert not any(secret in text for text in texts)
        # nor is the secret of the group the engine's
        for pid in agent.children():
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert SECRET.encode() not in environment
            # Not within the assertion, which would print the environment.
            given = f"VLLM_API_KEY={API_KEY}".encode() in environment
            assert given
            assert b"NOTIFY_SOCKET" not in environment


def test_a_wrong_api_key_is_told(lab):
    """The engine has a key that the agent does not know, as when it comes from the environment file."""
    lab[0].environment["VLLM_API_KEY"] = API_KEY
    lab.start()
    wait_for(lambda: "401" in lab[0].status().get("text", ""), "it says so")


def test_the_engine_is_the_one_that_the_link_named_at_the_start(lab):
    lab.start(supervised=True).serve(1)
    first = str(lab.folder / "venvs" / "a" / "bin" / "vllm")
    for agent in lab:
        assert all(first in command for command in agent.children().values())
    lab.install_engine("b")
    lab.complete()
    for agent in lab:
        assert all(first in command for command in agent.children().values())
    lab[0].steer("exit", "1")
    lab.serve(2)
    second = str(lab.folder / "venvs" / "b" / "bin" / "vllm")
    for agent in lab:
        assert all(second in command for command in agent.children().values())


def test_the_engines_output_is_passed_on(lab):
    lab.start().serve()
    assert "Application startup complete." in lab[0].output()
    assert "100% Completed | 16/16" in lab[0].output()


# Configuration


def run(agent: Agent, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*agent.command, *more], env=agent.surroundings, capture_output=True, text=True, timeout=20, check=False
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        pytest.param(None, "rank.json", id="absent"),
        pytest.param("", "rank.json", id="empty"),
        pytest.param("{", "rank.json", id="broken"),
        pytest.param("[]", "rank.json", id="list"),
        pytest.param({"schema": 2}, "schema", id="schema"),
        pytest.param({"rank": None}, "rank", id="no-rank"),
        pytest.param({"rank": 2}, "rank", id="rank-beyond"),
        pytest.param({"rank": "0"}, "rank", id="rank-text"),
        pytest.param({"world_size": 3}, "ranks 0 to 2", id="world-size"),
        pytest.param({"hosts": [{"rank": 0, "name": "a", "address": "127.0.0.1"}] * 2}, "hosts", id="hosts-twice"),
        pytest.param({"argv": []}, "argv", id="no-argv"),
        pytest.param({"argv": "vllm serve"}, "argv", id="argv-text"),
        pytest.param({"identity": ["a"]}, "identity", id="identity"),
        pytest.param({"agent_port": 0}, "agent_port", id="port"),
        pytest.param({"timeouts": {"peer": -1}}, "peer", id="timeout"),
        pytest.param({"timeouts": {"peer": "soon"}}, "peer", id="timeout-text"),
        pytest.param({"timeouts": {"patience": 1}}, "patience", id="timeout-unknown"),
        pytest.param({"timeouts": {"peer": 1, "heartbeat": 2}}, "heartbeat", id="heartbeat-too-slow"),
        pytest.param({"api": {"url": "ftp://x", "model": "m"}}, "api", id="api"),
    ],
)
def test_a_bad_configuration_is_one_sentence(lab, text, word):
    agent = lab[0]
    if text is None:
        agent.config_path.unlink()
    elif isinstance(text, str):
        agent.config_path.write_text(text, encoding="utf-8")
    else:
        agent.config_path.write_text(json.dumps({**agent.configuration, **text}), encoding="utf-8")
    result = run(agent)
    assert result.returncode == 78
    lines = [line for line in (result.stdout + result.stderr).splitlines() if line]
    assert len(lines) == 1
    assert word in lines[0]
    assert "Traceback" not in lines[0]


def test_a_command_that_is_not_there(lab):
    program = lab.engine_folder("emptied") / "bin" / "vllm"
    program.unlink()
    lab[0].own_venv(program.parents[1])
    lab[0].configure()
    lab.start()
    for agent in lab:
        down(agent)
        assert str(program) in agent.status()["last_failure"]["cause"]


def test_check_tells_what_the_agent_would_find(lab):
    result = run(lab[0], "--check")
    assert (result.returncode, "Traceback" in result.stderr) == (0, False)
    lab[0].config_path.write_text("{", encoding="utf-8")
    result = run(lab[0], "--check")
    assert result.returncode == 78
    assert not lab[0].status_path.exists()


def test_the_port_is_taken(lab):
    with socket.create_server((lab[0].address, lab.agent_port)):
        lab[0].start()
        wait_for(lambda: str(lab.agent_port) in lab[0].output(), "it names the port")
        assert lab[0].children() == {}
        assert "cannot listen" in lab[0].status()["text"]
    wait_for(lambda: "waiting for rank 1" in lab[0].status()["text"], "it says what it waits for now")
