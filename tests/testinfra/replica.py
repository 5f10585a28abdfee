# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A replica on the lab's hosts, as the tests see it: what each rank says, what the API answers, and faults to cause.

Commands go over SSH without a shared connection, because some of the faults cut connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import typing as t
import urllib.error
import urllib.request
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = ROOT / "inventory" / "lab" / "hosts.yml"
LAB = ROOT / "molecule" / "lab" / "lab.py"
# Longer than any start here takes; reached only when something is broken.
PATIENCE = 600


class Rank:
    """One host of the replica."""

    def __init__(self, name: str, variables: dict[str, t.Any], unit: str) -> None:
        self.name = name
        self.number = int(variables["serve_rank"])
        self.address = variables["ansible_host"]
        self.key = variables["ansible_ssh_private_key_file"]
        self.unit = unit

    def run(self, command: str, check: bool = True, timeout: float = PATIENCE) -> str:
        """Standard output of a shell command on the host."""
        words = ["ssh", "-i", self.key, "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        words += ["-o", "LogLevel=ERROR", "-o", "ConnectTimeout=5", "-o", "ControlPath=none", f"root@{self.address}"]
        run = subprocess.run([*words, command], capture_output=True, text=True, check=False, timeout=timeout)
        if check and run.returncode:
            raise AssertionError(f"{self.name}: '{command}' exited {run.returncode}: {run.stdout}{run.stderr}")
        return run.stdout

    def status(self) -> dict[str, t.Any]:
        """The status file, empty while there is none or the host is off."""
        text = self.run(f"cat /run/{self.unit.removesuffix('.service')}/status.json", check=False)
        return json.loads(text) if text else {}

    def property(self, name: str) -> str:
        return self.run(f"systemctl show -P {name} {self.unit}", check=False).strip()

    def journal(self, lines: int = 60) -> str:
        return self.run(f"journalctl -u {self.unit} -n {lines} --no-pager", check=False)


class Replica:
    """All hosts of the replica, rank 0 first."""

    def __init__(self, unit: str = "kimi-k3.service", port: int = 8000, model: str = "kimi-k3", key: str = "") -> None:
        group = yaml.safe_load(INVENTORY.read_text(encoding="utf-8"))["kimi_k3"]
        common = group.get("vars", {})
        ranks = [Rank(name, {**common, **(own or {})}, unit) for name, own in group["hosts"].items()]
        self.ranks = sorted(ranks, key=lambda rank: rank.number)
        self.url = f"http://{self.ranks[0].address}:{port}"
        self.model = model
        self.key = key
        # What a playbook needs on its command line to know the key.
        self.key_words: tuple[str, ...] = ()

    def complete(self, prompt: str = "Hello", tokens: int = 8, timeout: float = 60) -> list[int]:
        """Token ids of a greedy completion."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def generation(self) -> int:
        return self.ranks[0].status().get("generation", 0)

    def wait(self, what: str, condition: t.Callable[[], bool], patience: float = PATIENCE) -> None:
        """Return as soon as the condition holds; on time-out fail with what every rank last said."""
        end = time.monotonic() + patience
        while not condition():
            if time.monotonic() > end:
                told = "\n".join(f"{rank.name}: {rank.status()}\n{rank.journal()}" for rank in self.ranks)
                raise AssertionError(f"not within {patience} s: {what}\n{told}")
            time.sleep(1)

    def serving(self, after: int = 0) -> bool:
        """Whether every rank serves one and the same generation later than C(after)."""
        generations = set()
        for rank in self.ranks:
            status = rank.status()
            # Hosts that start their engines have better to do than to be asked when one is known not to serve.
            if status.get("state") != "serving":
                return False
            generations.add(status["generation"])
        return len(generations) == 1 and generations.pop() > after

    def wait_serving(self, after: int = 0) -> None:
        self.wait(f"every rank serves a generation after {after}", lambda: self.serving(after))

    def pids(self) -> list[tuple[str, str]]:
        """Main process and its start time of every rank."""
        return [(rank.property("MainPID"), rank.property("ExecMainStartTimestampMonotonic")) for rank in self.ranks]


def power(action: str, name: str) -> None:
    """Cut or restore the power of a host."""
    subprocess.run([sys.executable, str(LAB), "host", action, name], check=True, stdout=subprocess.DEVNULL)


def kill_child(rank: Rank) -> None:
    rank.run(f"kill -KILL {rank.status()['child_pid']}")


def kill_agent(rank: Rank) -> None:
    rank.run(f"kill -KILL {rank.property('MainPID')}")


def kill_unit(rank: Rank) -> None:
    rank.run(f"systemctl kill --signal=KILL --kill-whom=all {rank.unit}")


def restart_unit(rank: Rank) -> None:
    rank.run(f"systemctl restart --no-block {rank.unit}")


def cut_power(rank: Rank) -> None:
    power("stop", rank.name)
    power("start", rank.name)


FAULTS: dict[str, t.Callable[[Rank], None]] = {
    "child killed": kill_child,
    "agent killed": kill_agent,
    "whole unit killed": kill_unit,
    "unit restarted": restart_unit,
    "power cut": cut_power,
}


def _command(words: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """ansible-playbook from the checkout on the lab's inventory, without what molecule sets for its own runs."""
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(INVENTORY), *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    # Reports go below what PWD says, which only a shell keeps true.
    own = {"PWD": str(ROOT), "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_FORCE_COLOR": "0"}
    return command, {**environment, **own}


def playbook(*words: str, expect: int = 0) -> str:
    """Output of a playbook that ends with the expected status."""
    command, environment = _command(words)
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == expect, run.stdout[-8000:] + run.stderr[-4000:]
    return run.stdout + run.stderr


def interrupted_playbook(task: str, *words: str) -> None:
    """Run a playbook and press Ctrl-C when the named task begins, and again until it ends, as people do.

    ansible-core can miss the first one, and can hang for ever when a fork dies with its lock on the queue of results.
    """
    command, environment = _command(words)
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output = ""
    for line in run.stdout:
        output += line
        if task in line:
            break
    end = time.monotonic() + 30
    while run.poll() is None:
        os.killpg(run.pid, signal.SIGINT if time.monotonic() < end else signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(0.5)
    # A fork that was left behind holds the pipe open.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    output += run.communicate()[0]
    assert run.returncode != 0, f"the playbook ended before '{task}' could be interrupted: {output[-4000:]}"
