# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Several rank agents on one machine: real processes on loopback addresses, under what systemd would be to them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import typing as t
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
AGENT = ROOT / "roles/serve/files/rank_agent.py"
ENGINE = Path(__file__).resolve().with_name("fake_engine.py")
# The agents and engines can run on another interpreter than the tests, such as the oldest one that hosts may have.
# Resolved, since the first line of a script cannot name a path with spaces, such as that of a checkout.
PYTHON = str(Path(os.environ.get("RANK_AGENT_PYTHON", sys.executable)).resolve())
SECRET = "the-secret-of-this-group-0123456789"
API_KEY = "the-key-of-this-api-9876543210"
CEILING = 20.0
POLL = 0.02
MARK = "AGENT_LAB"
TIMEOUTS = {"heartbeat": 0.1, "peer": 0.6, "orphan": 3, "probe_interval": 0.5, "probe": 1, "stop": 1, "start": 20}


def wait_for(condition: t.Callable[[], t.Any], what: str, ceiling: float = CEILING) -> t.Any:
    """The first true value of condition; what was waited for is the message when it never came."""
    end = time.monotonic() + ceiling
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not in {ceiling:g} s: {what}")
        time.sleep(POLL)


def marked(mark: str) -> dict[int, str]:
    """Processes whose environment carries the mark, as pid: command line. What is dead already is not among them."""
    found = {}
    needle = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(item == needle or item.startswith(needle + b".") for item in _words(folder / "environ")):
                found[int(folder.name)] = b" ".join(_words(folder / "cmdline")).decode(errors="replace")
        except OSError:
            continue
    return found


def _words(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\0")


def end_marked(mark: str) -> None:
    while pids := marked(mark):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


class Notifications:
    """The datagram socket that systemd listens on; every line with the moment it came and who sent it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[tuple[float, int, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                data, ancillary, _rest, _rest = self._socket.recvmsg(65536, 256)
            except OSError:
                return
            if not data:
                return
            sender = next((struct.unpack("3i", body[:12])[0] for _rest, _rest, body in ancillary), 0)
            now = time.monotonic()
            self.lines += [(now, sender, line) for line in data.decode().splitlines()]

    def texts(self, prefix: str = "") -> list[str]:
        return [line for _rest, _rest, line in list(self.lines) if line.startswith(prefix)]

    def senders(self) -> set[int]:
        return {sender for _rest, sender, _rest in list(self.lines)}

    def close(self) -> None:
        # a blocked recvmsg does not wake up from close() alone
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Relay:
    """The network between a worker and rank 0: it can be cut, and heal with or without its connections.

    A cut network says nothing: no connection is refused, closed or reset. With spoil set, one byte arrives as another;
    with cut_before set, the network is cut for good right before the first data that holds these bytes.
    """

    def __init__(self, address: tuple[str, int], target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(address)
        self._open = threading.Event()
        self._open.set()
        self.spoil = False
        self.cut_before: bytes | None = None
        self._dead: list[socket.socket] = []
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _rest = self._listener.accept()
            except OSError:
                return
            self._open.wait()
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self._pairs.append((near, far))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(one, other), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._open.wait()
                if self.cut_before and self.cut_before in data:
                    self.cut_before = None
                    self.cut(for_good=True)
                if source in self._dead:
                    return
                if self.spoil:
                    self.spoil = False
                    data = bytes([data[0] ^ 1]) + data[1:]
                target.sendall(data)
            self._open.wait()
            if source not in self._dead:
                target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def cut(self, *, for_good: bool = False) -> None:
        """Nothing goes through until heal(); for good: and what is connected now never goes through again."""
        if for_good:
            self._dead += [each for pair in self._pairs for each in pair]
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._open.set()
        for pair in self._pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()


class Agent:
    """One host: an agent, its files, and what systemd does for it."""

    def __init__(self, lab: Lab, rank: int, name: str, address: str) -> None:
        self.lab, self.rank, self.name, self.address = lab, rank, name, address
        self.folder = lab.folder / name
        self.control = self.folder / "control"
        self.credentials = self.folder / "credentials"
        self.state_dir = self.folder / "state"
        self.config_path = self.folder / "rank.json"
        self.digest_path = self.folder / "digest"
        self.status_path = self.folder / "run" / "status.json"
        self.output_path = self.folder / "output"
        for folder in (self.control, self.credentials, self.state_dir, self.status_path.parent):
            folder.mkdir(parents=True)
        self.mark = f"{lab.mark}.{name}"
        self.environment: dict[str, str] = {}
        self.notifications = Notifications(lab.sockets / name)
        self.process: subprocess.Popen[bytes] | None = None
        self.exits: list[int] = []
        self.leftovers: list[dict[int, str]] = []
        self.supervised = False
        self.cleaned = True
        self._watch: threading.Thread | None = None
        self.statement_path = self.folder / "checkpoint.json"
        self.venv = lab.venv
        self.digest_path.write_text("d" * 64 + "\n", encoding="utf-8")
        self.state_checkpoint("2" * 64)
        self.secret(SECRET)

    # Files

    def secret(self, text: str) -> None:
        self._credential("group-secret", text)

    def api_key(self, text: str) -> None:
        self._credential("api-key", text)

    def state_checkpoint(self, identity: str) -> None:
        """What role checkpoint leaves beside the files."""
        self.statement_path.write_text(json.dumps({"identity_digest": identity}), encoding="utf-8")

    def own_venv(self, folder: Path) -> None:
        """Turn this host's own link to an environment; named in its command from the next configure() on."""
        self.venv = self.folder / "venv"
        link = self.folder / "venv.new"
        link.symlink_to(folder)
        link.rename(self.venv)

    def _credential(self, name: str, text: str) -> None:
        path = self.credentials / name
        path.write_text(text + "\n", encoding="utf-8")
        path.chmod(0o400)

    def configure(self, **changes: t.Any) -> None:
        configuration = self.lab.configuration(self)
        timeouts = changes.pop("timeouts", {})
        configuration.update(changes)
        configuration["timeouts"].update(timeouts)
        self.config_path.write_text(json.dumps(configuration), encoding="utf-8")

    @property
    def configuration(self) -> dict[str, t.Any]:
        return json.loads(self.config_path.read_text(encoding="utf-8"))

    def steer(self, name: str, text: str = "") -> None:
        path = self.control / name
        whole = path.with_suffix(".new")  # read while half written, an exit status would be an empty file
        whole.write_text(text, encoding="utf-8")
        whole.rename(path)

    def unsteer(self, name: str) -> None:
        (self.control / name).unlink(missing_ok=True)

    # Processes

    @property
    def command(self) -> list[str]:
        return [
            # without any package: the standard library has to do
            *(PYTHON, "-I", "-S"),
            str(AGENT),
            *("--config", str(self.config_path), "--digest-file", str(self.digest_path)),
            *("--status", str(self.status_path), "--state-dir", str(self.state_dir)),
        ]

    @property
    def surroundings(self) -> dict[str, str]:
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return {
            **environment,
            "PYTHONUNBUFFERED": "1",
            "CREDENTIALS_DIRECTORY": str(self.credentials),
            "NOTIFY_SOCKET": str(self.notifications.path),
            "FAKE_CONTROL": str(self.control),
            MARK: self.mark,
            **self.environment,
        }

    def start(self, supervised: bool = False) -> Agent:
        self.supervised = supervised
        self._watch = threading.Thread(target=self._supervise, daemon=True)
        started = threading.Event()
        self._started = started
        self._watch.start()
        started.wait()
        return self

    def _supervise(self) -> None:
        """Restart=always, RestartPreventExitStatus=78, KillMode=control-group, RestartSec=0.1."""
        while True:
            with self.output_path.open("ab") as output:
                self.process = subprocess.Popen(
                    self.command, env=self.surroundings, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            self._started.set()
            status = self.process.wait()
            left = marked(self.mark)
            if self.cleaned:
                end_marked(self.mark)
            self.leftovers.append(left)
            self.exits.append(status)
            if not self.supervised or status == 78:
                return
            time.sleep(0.1)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self._watch is not None and self._watch.is_alive()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> int:
        """`systemctl stop`: SIGTERM, and no restart."""
        self.supervised = False
        self.signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        """The exit status of an agent that is not restarted."""
        wait_for(lambda: not self.alive, f"{self.name} ends")
        return self.exits[-1]

    def children(self) -> dict[int, str]:
        """All processes of this host's unit but the agent."""
        return {pid: text for pid, text in marked(self.mark).items() if pid != self.pid}

    def engine(self) -> int:
        """Pid of the engine's main process, once the status tells it."""
        return wait_for(lambda: self.status().get("child_pid"), f"{self.name} has an engine")

    # What it tells

    def status(self) -> dict[str, t.Any]:
        try:
            text = self.status_path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        return json.loads(text)

    @property
    def state(self) -> str:
        return self.status().get("state", "")

    def output(self) -> str:
        return self.output_path.read_text(encoding="utf-8", errors="replace") if self.output_path.exists() else ""

    def reaches(self, state: str, generation: int | None = None) -> dict[str, t.Any]:
        def there() -> dict[str, t.Any] | None:
            status = self.status()
            right = status.get("state") == state and status.get("pid") == self.pid
            return status if right and generation in (None, status["generation"]) else None

        what = f"{self.name} is {state}" + ("" if generation is None else f" in generation {generation}")
        return wait_for(there, what)


class Lab:
    """The group. Addresses are its own part of 127/8, so that labs beside this one are not in the way."""

    def __init__(self, folder: Path, size: int = 2) -> None:
        self.folder = folder
        self.size = size
        self.mark = f"{os.getpid()}-{random.randrange(1 << 32):08x}"
        # the path of a socket may have 107 characters, which a test's folder can exceed
        self.sockets = Path(tempfile.mkdtemp(prefix="k3-"))
        self.network = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        self.agent_port, self.master_port, self.api_port = self._ports(3)
        self.venv = folder / "venv"
        self.install_engine("a")
        self.agents: list[Agent] = []
        self.relays: list[Relay] = []
        self.hosts = [
            {"rank": rank, "name": f"rank{rank}", "address": f"{self.network}.{rank + 1}"} for rank in range(size)
        ]
        for host in self.hosts:
            agent = self.add(host["rank"], host["name"], host["address"])
            agent.configure()

    def __getitem__(self, rank: int) -> Agent:
        return self.agents[rank]

    def __iter__(self) -> t.Iterator[Agent]:
        return iter(self.agents)

    def add(self, rank: int, name: str, address: str) -> Agent:
        agent = Agent(self, rank, name, address)
        self.agents.append(agent)
        return agent

    def _ports(self, number: int) -> list[int]:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _rest in range(number)]
            for each in sockets:
                each.bind((f"{self.network}.1", 0))
            return [each.getsockname()[1] for each in sockets]

    def engine_folder(self, name: str, lock: str = "1" * 64, torch: str = "2.13.0") -> Path:
        """An engine in an environment of its own, with the receipt of the role vllm."""
        folder = self.folder / "venvs" / name
        (folder / "bin").mkdir(parents=True)
        program = folder / "bin" / "vllm"
        # as an installer does: the interpreter by its path
        program.write_text(f"#!{PYTHON} -IS\n{ENGINE.read_text(encoding='utf-8')}", encoding="utf-8")
        program.chmod(0o755)
        receipt = {"lock_digest": lock, "versions": {"vllm": "0.32.0", "torch": torch}}
        (folder / "engine.json").write_text(json.dumps(receipt), encoding="utf-8")
        return folder

    def install_engine(self, name: str, lock: str = "1" * 64) -> None:
        """Another engine for all, by the symlink that the commands name."""
        link = self.folder / f"venv.{name}"
        link.symlink_to(self.engine_folder(name, lock))
        link.rename(self.venv)

    def configuration(self, agent: Agent) -> dict[str, t.Any]:
        return {
            "schema": 1,
            "group": "kimi-k3",
            "rank": agent.rank,
            "world_size": self.size,
            "hosts": self.hosts,
            "agent_port": self.agent_port,
            "argv": self.argv(agent),
            "identity": {
                "engine.vllm": "0.32.0",
                "engine.torch": "2.13.0",
                "engine.lock": "1" * 64,
                "checkpoint": "2" * 64,
                "argument.--max-model-len": "512",
                "environment.VLLM_USE_V2_MODEL_RUNNER": "0",
            },
            "engine_receipt": f"{agent.venv}/engine.json",
            "checkpoint_statement": str(agent.statement_path),
            "api": {"url": f"http://{self.network}.1:{self.api_port}", "model": "kimi-k3"},
            "timeouts": dict(TIMEOUTS),
            "restart_limit": 5,
            "restart_window": 3600,
            "gpu_wait": False,
        }

    def argv(self, agent: Agent) -> list[str]:
        words = [
            *(str(agent.venv / "bin" / "vllm"), "serve", "/srv/model"),
            *("--served-model-name", "kimi-k3", "--max-model-len", "512"),
            *("--nnodes", str(self.size), "--node-rank", str(agent.rank)),
            *("--master-addr", f"{self.network}.1", "--master-port", str(self.master_port)),
        ]
        return words + (["--headless"] if agent.rank else ["--host", f"{self.network}.1", "--port", str(self.api_port)])

    def start(self, supervised: bool = False) -> Lab:
        for agent in self.agents:
            agent.start(supervised)
        return self

    def serve(self, generation: int | None = None) -> Lab:
        for agent in self.agents:
            agent.reaches("serving", generation)
        return self

    def reaches(self, state: str, generation: int | None = None) -> None:
        for agent in self.agents:
            agent.reaches(state, generation)

    def relay(self, rank: int) -> Relay:
        """Put a network between this rank and rank 0 that the test can cut; before the start."""
        address = f"{self.network}.{100 + rank}"
        self.relays.append(Relay((address, self.agent_port), (self.hosts[0]["address"], self.agent_port)))
        hosts = [{**self.hosts[0], "address": address}, *self.hosts[1:]]
        self.agents[rank].configure(**{**self.agents[rank].configuration, "hosts": hosts})
        return self.relays[-1]

    # The API

    def request(self, method: str, path: str, body: t.Any = None, key: str = "", timeout: float = 5) -> tuple[int, str]:
        connection = http.client.HTTPConnection(f"{self.network}.1", self.api_port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            if key:
                headers["Authorization"] = f"Bearer {key}"
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def complete(self, key: str = "", tokens: int = 3) -> list[int]:
        """A completion that went through all ranks."""
        body = {"model": "kimi-k3", "prompt": "one two", "max_tokens": tokens}
        status, text = self.request("POST", "/v1/completions", body, key)
        assert status == 200, text
        return json.loads(text)["choices"][0]["token_ids"]

    def healthy(self) -> bool:
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False

    def metric(self, name: str) -> float:
        try:
            _rest, text = self.request("GET", "/metrics")
        except OSError:
            return -1.0
        values = [line.split()[-1] for line in text.splitlines() if line.startswith(name + "{")]
        return float(values[0]) if values else -1.0

    # The end

    def close(self) -> None:
        for agent in self.agents:
            agent.supervised = False
        end_marked(self.mark)
        # A supervisor that had seen its agent end may have started the next one meanwhile.
        for agent in self.agents:
            while agent.alive:
                agent._watch.join(POLL)
                end_marked(self.mark)
        for agent in self.agents:
            agent.notifications.close()
        for relay in self.relays:
            relay.close()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def report(self) -> str:
        """All that there is to know of a test that failed."""
        parts = []
        for agent in self.agents:
            status = agent.status_path.read_text(encoding="utf-8") if agent.status_path.exists() else "none"
            parts += [
                f"=== {agent.name}: exits {agent.exits}, left over {agent.leftovers}",
                f"status: {status.strip()}",
                f"notified: {[line for line in agent.notifications.texts() if line != 'WATCHDOG=1']}",
                agent.output(),
            ]
        return "\n".join(parts)
