# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The main process of a rank's unit: meets the other ranks, runs vLLM as its child, and ends and restarts it with them.

vLLM does not notice a dead peer: rank 0 answers C(/health) with 200 while every completion hangs, a rank restarted
alone waits in its rendezvous for ever, and after an engine error rank 0 exits with status 0. So the agents, one per
host, agree on what runs, start it together, prove with tokens that it lives, and end it together.

Rank 0 is the head: it listens, the others (workers) connect. All decisions are taken in one coroutine, which handles
one event after the other; links, the child and the probe only put events into its queue.

Exit status: 0 after SIGTERM, 1 when the group ended (systemd starts the agent again), 78 when starting again would not
help: the ranks differ, the configuration is wrong, or too many failures. Standard library only, Python 3.10 or newer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import errno
import hashlib
import hmac
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

VERSION = "1.0.0"
PROTOCOL = 1

EXIT_STOPPED, EXIT_ENDED, EXIT_REFUSED = 0, 1, 78

# The largest line a peer may send, in bytes; an identity map takes a few thousand.
LINE_LIMIT = 1 << 20
# Seconds a connection may take to prove itself, and how many of one address may try at once.
HANDSHAKE_TIMEOUT = 10.0
HANDSHAKES_AT_ONCE = 8
# Seconds a broken group's engine gets to end by itself; an orderly stop gives it timeouts.stop.
BROKEN_GRACE = 2.0
# Seconds to wait for killed processes to be gone, and for GPUs to be free of them.
GONE_TIMEOUT = 30.0
# Errors of a connection that say nothing of the peer's process: the network is silent.
SILENT_ERRORS = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})
# Counters that grow with every step of the engine; gauges go stale in a wedged one and prove nothing.
STEP_COUNTERS = ("vllm:iteration_tokens_total_count", "vllm:generation_tokens_total", "vllm:prompt_tokens_total")
# What a request comes to that gets no answer in HTTP.
NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
# What the agent got from systemd for itself alone.
OWN_ENVIRONMENT = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "CREDENTIALS_DIRECTORY", "SYSTEMD_EXEC_PID")
# Programs that compile kernels. While one runs below an engine, no step is made, and nothing is wedged.
COMPILERS = frozenset(
    ["ninja", "nvcc", "cicc", "ptxas", "fatbinary", "nvlink", "cc1plus", "c++", "g++", "gcc", "cc", "ld", "hipcc"]
)
LOADING = re.compile(rb"Loading safetensors checkpoint shards:\s+(\d+)% Completed")
PR_SET_CHILD_SUBREAPER = 36


class ConfigError(Exception):
    """The configuration cannot be used; the message is one sentence for the operator."""


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


@dataclass(frozen=True)
class Host:
    """One host of the replica."""

    rank: int
    name: str
    address: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"


@dataclass(frozen=True)
class Timeouts:
    """Seconds."""

    peer: float = 10
    orphan: float = 60
    heartbeat: float = 2
    probe_interval: float = 60
    probe: float = 60
    stop: float = 30
    start: float = 3600


@dataclass(frozen=True)
class Config:
    """What the role writes into rank.json."""

    group: str
    rank: int
    world_size: int
    hosts: tuple[Host, ...]
    agent_port: int
    argv: tuple[str, ...]
    identity: dict[str, str]
    engine_receipt: str
    checkpoint_statement: str
    api_url: str
    api_model: str
    timeouts: Timeouts
    restart_limit: int
    restart_window: float
    gpu_wait: bool

    @property
    def own(self) -> Host:
        return self.hosts[self.rank]

    @property
    def head(self) -> Host:
        return self.hosts[0]

    @property
    def program(self) -> Path:
        """The engine's program behind the link of its environment, which may be turned to another one at any time."""
        program = Path(self.argv[0])
        return program.parent.resolve() / program.name if "/" in self.argv[0] else program

    def agreed(self, program: Path) -> dict[str, str]:
        """What must be equal on every rank. What the disk holds counts, not what it held when the role was there.

        Raises ConfigError when the disk does not say what it holds.
        """
        own = {"protocol": str(PROTOCOL), "group": self.group, "world_size": str(self.world_size)}
        agreed = {**self.identity, **own}
        if self.engine_receipt:
            agreed = {key: value for key, value in agreed.items() if not key.startswith("engine.")}
            agreed |= engine_identity(program.parent.parent / Path(self.engine_receipt).name)
        if self.checkpoint_statement:
            agreed["checkpoint"] = checkpoint_identity(Path(self.checkpoint_statement))
        return agreed


def engine_identity(receipt: Path) -> dict[str, str]:
    """Versions and lock of an environment, from the receipt that the role vllm leaves in it. Raises ConfigError."""
    try:
        document = json.loads(receipt.read_text(encoding="utf-8"))
        versions = {f"engine.{name}": str(version) for name, version in document["versions"].items()}
        return {**versions, "engine.lock": str(document["lock_digest"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"no engine is installed here, run the playbook engine ({receipt}: {error})") from error


def checkpoint_identity(statement: Path) -> str:
    """What stands for plan and bytes of a checkpoint, from the statement beside its files. Raises ConfigError."""
    try:
        return str(json.loads(statement.read_text(encoding="utf-8"))["identity_digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the checkpoint here is not proven, run the playbook fetch ({statement}: {error})"
        ) from error


def parse_timeouts(document: dict[str, Any]) -> Timeouts:
    known = vars(Timeouts())
    for name, value in document.items():
        if name not in known:
            raise ConfigError(f"timeouts.{name} is not known to this agent")
        # the comparison is false for what is not a number too
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"timeouts.{name} is {value}, it must be more than 0 seconds")
    return Timeouts(**{name: float(value) for name, value in document.items()})


# Where a value of another kind could be taken for something, such as a text for its letters.
CONFIG_KINDS = {
    **{"rank": int, "world_size": int, "agent_port": int, "restart_limit": int},
    **{"hosts": list, "argv": list, "identity": dict, "api": dict, "timeouts": dict, "gpu_wait": bool},
    **{"engine_receipt": str, "checkpoint_statement": str},
}


def parse_config(document: Any) -> Config:
    """Raises ConfigError naming the key that is wrong."""
    if not isinstance(document, dict):
        raise ConfigError("it is not a JSON object")
    for key, kind in CONFIG_KINDS.items():
        if key in document and (not isinstance(document[key], kind) or (kind is int and document[key] is True)):
            raise ConfigError(f"{key} is {json.dumps(document[key])}, which has the wrong form")
    try:
        if document["schema"] != 1:
            raise ConfigError(f"schema is {document['schema']}, this agent knows 1")
        hosts = tuple(Host(int(h["rank"]), str(h["name"]), str(h["address"])) for h in document["hosts"])
        config = Config(
            group=str(document["group"]),
            rank=int(document["rank"]),
            world_size=int(document["world_size"]),
            hosts=hosts,
            agent_port=int(document["agent_port"]),
            argv=tuple(str(word) for word in document["argv"]),
            identity={str(key): str(value) for key, value in document["identity"].items()},
            engine_receipt=document["engine_receipt"],
            checkpoint_statement=document["checkpoint_statement"],
            api_url=str(document["api"]["url"]).rstrip("/"),
            api_model=str(document["api"]["model"]),
            timeouts=parse_timeouts(document["timeouts"]),
            restart_limit=int(document["restart_limit"]),
            restart_window=float(document["restart_window"]),
            gpu_wait=bool(document["gpu_wait"]),
        )
    except KeyError as error:
        raise ConfigError(f"{error.args[0]} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"a value has the wrong form ({error})") from error
    if [host.rank for host in hosts] != list(range(config.world_size)):
        raise ConfigError(f"hosts must list the ranks 0 to {config.world_size - 1} in order")
    if not 0 <= config.rank < config.world_size:
        raise ConfigError(f"rank is {config.rank} in a group of {config.world_size}")
    if not config.argv:
        raise ConfigError("argv is empty")
    if not 0 < config.agent_port < 1 << 16:
        raise ConfigError(f"agent_port is {config.agent_port}")
    if not config.api_url.startswith(("http://", "https://")):
        raise ConfigError(f"api.url is {config.api_url}, it must begin with http:// or https://")
    if config.timeouts.heartbeat >= config.timeouts.peer:
        raise ConfigError("timeouts.heartbeat must be shorter than timeouts.peer")
    return config


def load_config(path: str) -> Config:
    """Raises ConfigError with the path in its message."""
    try:
        return parse_config(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; it is written by the role serve, run its playbook again") from error


# ---------------------------------------------------------------------------------------------------------------------
# Pure functions


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def differences(own: Host, mine: dict[str, str], other: Host, theirs: dict[str, str]) -> list[str]:
    """Per key that is not equal one phrase with both values and both hosts."""
    phrases = []
    for key in sorted({*mine, *theirs}):
        if mine.get(key) != theirs.get(key):
            left, right = mine.get(key, "nothing"), theirs.get(key, "nothing")
            phrases.append(f"{key} is {left} on {own} and {right} on {other}")
    return phrases


def step_count(metrics: str) -> float:
    """The sum of the counters that grow with each engine step, from a Prometheus exposition."""
    total = 0.0
    for line in metrics.splitlines():
        if line.startswith(STEP_COUNTERS):
            name = re.split(r"[{ ]", line, maxsplit=1)[0]
            if name in STEP_COUNTERS:
                with contextlib.suppress(ValueError, IndexError):
                    total += float(line.rsplit("}", 1)[-1].split()[0 if "}" in line else 1])
    return total


def recent(times: list[float], at: float, window: float) -> list[float]:
    """The times that lie within the window before C(at); times from the future (a clock set back) do not count."""
    return [moment for moment in times if at - window <= moment <= at]


def proof(secret: bytes, purpose: str, *parts: str) -> str:
    """HMAC-SHA256 over purpose and parts, each with its length, as hexadecimal digits."""
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (purpose, *parts):
        data = part.encode()
        mac.update(len(data).to_bytes(4, "big") + data)
    return mac.hexdigest()


def exit_text(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """By rename: a reader sees the old content or the new."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def parents() -> dict[int, int]:
    """Parent of every process; zombies are left out, since they only wait to be reaped."""
    result = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{entry.name}/stat").read_text(encoding="utf-8", errors="replace")
                state, parent = fields.rsplit(")", 1)[1].split()[:2]
                if state not in "ZX":
                    result[int(entry.name)] = int(parent)
    return result


def descendants(root: int) -> set[int]:
    """All living processes below C(root). The agent is a subreaper, so what the engine orphans stays below it."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    left = [root]
    while left:
        for pid in children.get(left.pop(), []):
            if pid not in found:
                found.add(pid)
                left.append(pid)
    return found


def compiling(root: int) -> bool:
    """Whether a compiler runs below C(root)."""
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip() in COMPILERS:
                return True
    return False


def become_subreaper() -> None:
    """Orphans of the engine become children of this process instead of PID 1's."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(keep: int | None) -> None:
    """Collect what has ended below this process, except the child itself, whose status its own waiter collects."""
    own = os.getpid()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) != keep:
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{entry.name}/stat").read_text(encoding="utf-8", errors="replace")
                state, parent = fields.rsplit(")", 1)[1].split()[:2]
                if state == "Z" and int(parent) == own:
                    os.waitpid(int(entry.name), os.WNOHANG)


def gpu_processes() -> set[int]:
    """Process ids that hold a GPU, empty where there is no nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return set()
    command = [tool, "--query-compute-apps=pid", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return {int(line) for line in run.stdout.split() if line.isdecimal()}
    return set()


class Child:
    """The engine: one process, its output passed through, its end reported."""

    def __init__(
        self, argv: list[str], environment: dict[str, str], loop: asyncio.AbstractEventLoop, events: Events
    ) -> None:
        words = list(argv)
        # An agent that is killed takes the engine with it at once; systemd cleans up only what is left then.
        tool = shutil.which("setpriv")
        if tool:
            words = [tool, "--pdeathsig", "KILL", "--", *words]
        self._loop, self._events = loop, events
        self.ended = False
        self.process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._pump, daemon=True).start()
        threading.Thread(target=self._wait, daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _tell(self, kind: str, value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._events.put, kind, self, value)

    def _pump(self) -> None:
        """Pass the output on. A thread, so that a slow journal delays the engine's output and never the agent."""
        source = self.process.stdout.fileno()
        tail, told = b"", None
        while True:
            try:
                data = os.read(source, 1 << 16)
            except OSError:
                return
            if not data:
                return
            # Progress bars overwrite their line; in a journal each of them is a line.
            shown = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            with contextlib.suppress(OSError):
                while shown:
                    shown = shown[os.write(1, shown) :]
            found = LOADING.findall(tail + data)
            tail = data[-200:]
            if found and found[-1] != told:
                told = found[-1]
                self._tell("loading", int(told))

    def _wait(self) -> None:
        status = self.process.wait()
        self.ended = True
        self._tell("child", status)


# ---------------------------------------------------------------------------------------------------------------------
# Links between agents


class LinkError(Exception):
    """The other side does not follow the protocol, or does not know the secret."""


class Events:
    """The queue of the one coroutine that decides."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, Any, Any]] = asyncio.Queue()

    def put(self, kind: str, source: Any = None, value: Any = None) -> None:
        self._queue.put_nowait((kind, source, value))

    async def get(self, timeout: float) -> tuple[str, Any, Any] | None:
        """The next event, None when there is none in time."""
        try:
            return await asyncio.wait_for(self._queue.get(), max(timeout, 0.001))
        except asyncio.TimeoutError:
            return None


@dataclass(eq=False)
class Link:
    """A connection whose other side has proven the secret; every line carries a number and a proof."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: bytes
    own_side: str
    sent: int = 0
    received: int = 0
    superseded: bool = False
    task: asyncio.Task | None = None

    @property
    def peer(self) -> str:
        return str((self.writer.get_extra_info("peername") or ["?"])[0])

    def send(self, **message: Any) -> None:
        """Queue a message; a connection that is gone or full says so to the listening side, not here."""
        body = json.dumps(message, separators=(",", ":"))
        mac = proof(self.key, self.own_side, str(self.sent), body)
        self.sent += 1
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(f"{mac} {body}\n".encode())

    async def receive(self) -> dict[str, Any]:
        """The next message. Raises LinkError, EOFError for a closed connection, OSError for a broken one."""
        try:
            line = await self.reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            raise EOFError from error
        except asyncio.LimitOverrunError as error:
            raise LinkError("a message is too long") from error
        mac, _space, body = line.rstrip(b"\n").partition(b" ")
        other = "worker" if self.own_side == "head" else "head"
        expected = proof(self.key, other, str(self.received), body.decode("utf-8", "replace"))
        if not hmac.compare_digest(mac, expected.encode()):
            raise LinkError("a message is not proven")
        self.received += 1
        message = json.loads(body)
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise LinkError("a message has no type")
        return message

    async def listen(self, events: Events) -> None:
        """Put what comes into the queue until the connection ends, and then how it ended."""
        try:
            while True:
                events.put("message", self, await self.receive())
        except EOFError:
            events.put("closed", self, "connection closed")
        except (LinkError, ValueError) as error:
            events.put("closed", self, str(error))
        except OSError as error:
            if error.errno in SILENT_ERRORS:
                events.put("lost", self, os.strerror(error.errno or 0))
            else:
                events.put("closed", self, f"connection broken ({error})")

    def close(self) -> None:
        """Close without waiting; what was queued is still sent."""
        self.superseded = True
        if self.task:
            self.task.cancel()
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.close()


async def plain(reader: asyncio.StreamReader) -> dict[str, Any]:
    """One line of the handshake. Raises LinkError."""
    try:
        message = json.loads(await reader.readuntil(b"\n"))
    except asyncio.IncompleteReadError as error:
        raise LinkError("the connection was closed before it was proven") from error
    except (asyncio.LimitOverrunError, ValueError, RecursionError) as error:
        raise LinkError("this is not a rank agent") from error
    if not isinstance(message, dict):
        raise LinkError("this is not a rank agent")
    return message


def check_hello(message: dict[str, Any]) -> None:
    """Raises LinkError."""
    right = message["type"] == "hello" and isinstance(message.get("identity"), dict)
    if not right or not all(isinstance(message.get(key), int) for key in ("rank", "generation")):
        raise LinkError("it does not greet as a rank agent")


def put_plain(writer: asyncio.StreamWriter, **message: Any) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


def set_options(writer: asyncio.StreamWriter) -> None:
    """No delay for small messages; the kernel shall keep trying through a long silence, which is no death."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)


async def prove_to_worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Link:
    """The head's side: challenge, check the answer, answer the other's challenge."""
    nonce = secrets.token_hex(32)
    put_plain(writer, protocol=PROTOCOL, nonce=nonce)
    answer = await plain(reader)
    other = str(answer.get("nonce", ""))
    if len(other) != len(nonce) or not hmac.compare_digest(
        proof(secret, "worker", nonce, other).encode(), str(answer.get("proof", "")).encode()
    ):
        put_plain(writer, refused="the group secret is not that of rank 0")
        with contextlib.suppress(OSError):
            await writer.drain()
        raise LinkError("does not know the group secret")
    put_plain(writer, proof=proof(secret, "head", nonce, other))
    return Link(reader, writer, proof(secret, "session", nonce, other).encode(), "head")


async def prove_to_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Link:
    """The worker's side."""
    challenge = await plain(reader)
    nonce = str(challenge.get("nonce", ""))
    own = secrets.token_hex(32)
    if len(nonce) != len(own):
        raise LinkError("this is not a rank agent")
    put_plain(writer, nonce=own, proof=proof(secret, "worker", nonce, own))
    answer = await plain(reader)
    if "refused" in answer:
        raise LinkError(str(answer["refused"])[:200])
    if not hmac.compare_digest(proof(secret, "head", nonce, own).encode(), str(answer.get("proof", "")).encode()):
        raise LinkError("rank 0 does not know the group secret")
    return Link(reader, writer, proof(secret, "session", nonce, own).encode(), "worker")


# ---------------------------------------------------------------------------------------------------------------------
# The engine's API, as seen by the probe


@dataclass(frozen=True)
class Answer:
    """What a request came to: C(ok), or the words for why not."""

    ok: bool
    text: str
    answered: bool = True


class Api:
    """Requests to the engine of rank 0. They block, and are run in threads."""

    def __init__(self, url: str, model: str, key: str | None) -> None:
        self._url, self._model, self._key = url, model, key
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _request(self, path: str, timeout: float, body: dict[str, Any] | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._url + path, data, headers)  # noqa: S310 - the role writes http only
        with self._opener.open(request, timeout=timeout) as answer:
            return answer.read(1 << 22)

    def healthy(self, timeout: float) -> bool:
        try:
            self._request("/health", timeout)
        except NO_ANSWER:
            return False
        return True

    def steps(self, timeout: float) -> float | None:
        """Engine steps and tokens so far, None when the engine does not say."""
        try:
            return step_count(self._request("/metrics", timeout).decode("utf-8", "replace"))
        except NO_ANSWER:
            return None

    def token(self, timeout: float) -> Answer:
        """Ask for one token, which only comes through all ranks."""
        body = {"model": self._model, "prompt": "Hi", "max_tokens": 1, "temperature": 0}
        try:
            choices = json.loads(self._request("/v1/completions", timeout, body))["choices"]
            return Answer(bool(choices), "a token came" if choices else "the answer has no choices")
        except urllib.error.HTTPError as error:
            return Answer(False, f"the API answers a completion with HTTP {error.code}")
        except NO_ANSWER as error:
            reason = getattr(error, "reason", error)
            refused = isinstance(reason, ConnectionRefusedError)
            return Answer(
                False, "the API refuses connections" if refused else f"no answer ({reason})", answered=refused
            )
        except (KeyError, TypeError):
            return Answer(False, "the API's answer is not that of a completion")


class Prober:
    """Proves life on rank 0: the first token, then one when the engine is idle or a peer is suspected.

    Puts C(token) into the queue for each token, C(wedged) when a probe stays unanswered for C(timeouts.probe) while no
    engine step is made in that time.
    """

    def __init__(self, api: Api, timeouts: Timeouts, events: Events) -> None:
        self._api, self._timeouts, self._events = api, timeouts, events
        self._wanted = asyncio.Event()

    def ask_now(self) -> None:
        self._wanted.set()

    async def run(self) -> None:
        await self._first()
        times = self._timeouts
        pause = min(max(times.probe_interval / 4, 0.05), 15.0)
        steps, moved = await self._steps(), time.monotonic()
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), pause)
            asked = self._wanted.is_set()
            if not asked:
                seen = await self._steps()
                if seen is not None and seen != steps:
                    steps, moved = seen, time.monotonic()
                if time.monotonic() - moved < times.probe_interval:
                    continue
            self._wanted.clear()
            await self._probe()
            steps, moved = await self._steps(), time.monotonic()

    async def _first(self) -> None:
        """Wait for loading, then for the first token, which may compile kernels for minutes: only start limits it."""
        pause = min(1.0, self._timeouts.probe_interval)
        while True:
            if await asyncio.to_thread(self._api.healthy, 5.0):
                self._events.put("loading", None, 100)
                answer = await asyncio.to_thread(self._api.token, self._timeouts.start)
                if answer.ok:
                    self._events.put("token")
                    return
                self._events.put("note", None, answer.text)
            await asyncio.sleep(pause)

    async def _steps(self) -> float | None:
        return await asyncio.to_thread(self._api.steps, min(self._timeouts.probe, 5.0))

    async def _probe(self) -> None:
        """One proof. What is refused is asked again within the same time, since an engine may be restarting a part."""
        limit = self._timeouts.probe
        begin, before = time.monotonic(), await self._steps()
        text = "no answer"
        while True:
            left = begin + limit - time.monotonic()
            if left <= 0:
                break
            if before is None:
                before = await self._steps()
            answer = await asyncio.to_thread(self._api.token, left)
            if answer.ok:
                self._events.put("token")
                return
            text = answer.text
            await asyncio.sleep(min(1.0, limit / 10))
        after = await self._steps()
        if before is not None and after is not None and after != before:
            self._events.put("busy")
            return
        self._events.put("wedged", None, f"{text} within {limit:g} s and no engine step in that time")


# ---------------------------------------------------------------------------------------------------------------------
# What systemd and people are told


class Teller:
    """The status file and the messages to systemd."""

    def __init__(self, config: Config, path: Path, configuration: str) -> None:
        self._path = path
        self._last_extended = 0.0
        self.ready = False
        self._ready_told = False
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = int(os.environ.get("WATCHDOG_USEC", "0") or 0) / 2e6
        self._last_watchdog = 0.0
        self.document: dict[str, Any] = {
            "schema": 1,
            "group": config.group,
            "rank": config.rank,
            "world_size": config.world_size,
            "state": "waiting",
            "text": "",
            "generation": 0,
            "since": now(),
            "started": now(),
            "pid": os.getpid(),
            "child_pid": None,
            "configuration": configuration,
            "argv": list(config.argv),
            "peers": [],
            "last_failure": self._previous_failure(config),
            "failures": 0,
        }
        self._written = ""

    def _previous_failure(self, config: Config) -> Any:
        """The last failure outlives the agent that saw it."""
        try:
            before = json.loads(self._path.read_text(encoding="utf-8"))
            alike = before["group"] == config.group and before["rank"] == config.rank
            return before["last_failure"] if alike else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def notify(self, *lines: str) -> bool:
        """False when systemd could not take it, as while it reloads and its queue is full."""
        if self._address:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                    sock.setblocking(False)
                    sock.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return False
        return True

    def tell(self, **changes: Any) -> None:
        """Change the status; the file is written and systemd told when it differs from before."""
        state, text = self.document["state"], self.document["text"]
        if changes.get("state", state) != state:
            changes["since"] = now()
        self.document.update(changes)
        if (self.document["state"], self.document["text"]) != (state, text):
            print(f"rank agent: {self.document['state']}: {self.document['text']}", flush=True)
            self.notify(f"STATUS={self.document['text']}")
        written = json.dumps(self.document, indent=1) + "\n"
        if written != self._written:
            # A full or read-only /run must not end a group that serves.
            with contextlib.suppress(OSError):
                write_atomic(self._path, written)
                self._written = written

    def tick(self) -> None:
        """To be called often: the watchdog, and more time to start as long as starting is going on."""
        at = time.monotonic()
        if self._watchdog and at - self._last_watchdog >= self._watchdog / 2:
            self._last_watchdog = at
            self.notify("WATCHDOG=1")
        if self.ready and not self._ready_told:
            self.say_ready()
        if not self.ready and at - self._last_extended >= 10:
            self._last_extended = at
            self.notify("EXTEND_TIMEOUT_USEC=120000000")

    def say_ready(self) -> None:
        """Once, but until systemd has it: without it the unit is never active."""
        self.ready = True
        if not self._ready_told:
            self._ready_told = self.notify("READY=1", f"STATUS={self.document['text']}")


# ---------------------------------------------------------------------------------------------------------------------
# The agents


class End(Exception):  # noqa: N818 - not an error: it carries the decision that the agent ends
    """The agent ends. C(status) is its exit status, C(cause) the words."""

    def __init__(self, status: int, state: str, cause: str, *, failure: bool = True) -> None:
        super().__init__(cause)
        self.status, self.state, self.cause, self.failure = status, state, cause, failure


class Store:
    """What outlives the agent on this host: generation number and times of failures."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "rank_agent.json"
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            self.generation = int(document["generation"])
            self.failures = [float(moment) for moment in document["failures"]]
        except (OSError, ValueError, KeyError, TypeError):
            self.generation, self.failures = 0, []

    def save(self) -> None:
        write_atomic(self._path, json.dumps({"generation": self.generation, "failures": self.failures}) + "\n")


@dataclass(eq=False)
class Session:
    """What rank 0 knows of a worker, or a worker of rank 0."""

    host: Host
    instance: str
    link: Link | None
    heard: float = field(default_factory=time.monotonic)
    heard_at: str = field(default_factory=now)
    started: bool = False
    compiling: bool = False

    def hear(self) -> None:
        self.heard, self.heard_at = time.monotonic(), now()

    @property
    def silence(self) -> float:
        return time.monotonic() - self.heard


class Agent:
    """What head and worker have in common: the child, the queue, the end."""

    def __init__(self, config: Config, secret: bytes, key: str | None, teller: Teller, store: Store) -> None:
        self.config, self.secret, self.key = config, secret, key
        self.teller, self.store = teller, store
        self.events = Events()
        self.instance = secrets.token_hex(16)
        self.child: Child | None = None
        self.generation = store.generation
        # From here on some rank may run its engine, and whatever is lost ends the generation.
        self.committed = False
        self.serving = False
        self.started_at = 0.0
        self.tasks: set[asyncio.Task] = set()
        # The environment that this rank told the others of is the one it starts, wherever its link points by then.
        self.program = config.program
        self.told: dict[str, str] = {}
        # Not told yet: the first status is one with words.
        teller.document["generation"] = self.generation

    # To be filled by head and worker

    # Whether each sign of life says if kernels are compiled here; rank 0 looks for itself when it asks.
    watches_compiler = False

    def begin(self) -> None:
        raise NotImplementedError

    def handle(self, kind: str, source: Any, value: Any) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError

    def peers(self) -> list[Session]:
        raise NotImplementedError

    # In common

    def identify(self) -> dict[str, str]:
        """What this rank would start now, or what it runs. Raises ConfigError."""
        if not self.committed:
            self.program = self.config.program
            self.told = self.config.agreed(self.program)
        return self.told

    def links(self) -> list[Link]:
        return [session.link for session in self.peers() if session.link]

    def spawn(self, coroutine: Any) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task) -> None:
        """A task that broke would leave the group unwatched."""
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.events.put("broken", None, repr(task.exception()))

    async def run(self) -> int:
        """Until the end; gives the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.events.put, "signal")
        beat, next_beat = self.config.timeouts.heartbeat, 0.0
        last = time.monotonic()
        try:
            self.begin()
            while True:
                self.teller.tick()
                at = time.monotonic()
                if at - last > self.config.timeouts.peer / 2:
                    # This process stood still; what the others said meanwhile is still to be read.
                    for session in self.peers():
                        session.heard += at - last
                last = at
                if at >= next_beat:
                    next_beat = at + beat
                    for link in self.links():
                        link.send(type="beat", compiling=self.watches_compiler and compiling(os.getpid()))
                self.tick()
                event = await self.events.get(min(beat / 2, 0.5))
                if event is not None:
                    self._handle(*event)
        except End as end:
            return await self._end(end)

    def _handle(self, kind: str, source: Any, value: Any) -> None:
        if kind == "signal":
            raise self._stopped()
        if kind == "broken":
            raise End(EXIT_ENDED, "restarting", f"{self.config.own}: the agent failed: {value}")
        if kind == "child":
            if source is self.child:
                raise End(EXIT_ENDED, "restarting", f"{self.config.own}: the engine {exit_text(value)}")
            return
        if kind == "loading":
            if self.child and not self.serving:
                text = "loaded, waiting for the first token" if value >= 100 else f"loading shards {value} %"
                self.teller.tell(text=f"{text}, generation {self.generation}")
            return
        self.handle(kind, source, value)

    def start_child(self) -> None:
        """Raises End when the engine cannot be started at all."""
        self.committed, self.started_at = True, time.monotonic()
        environment = {name: value for name, value in os.environ.items() if name not in OWN_ENVIRONMENT}
        if self.key:
            environment["VLLM_API_KEY"] = self.key
        argv = [str(self.program), *self.config.argv[1:]]
        print(f"rank agent: generation {self.generation}: {' '.join(argv)}", flush=True)
        try:
            # seen from here, since what stands between (setpriv) only knows an exit status for it
            if not shutil.which(argv[0]):
                raise FileNotFoundError(errno.ENOENT, "there is no such program", argv[0])
            self.child = Child(argv, environment, asyncio.get_running_loop(), self.events)
        except OSError as error:
            raise End(EXIT_ENDED, "restarting", f"{self.config.own}: the engine cannot be started: {error}") from error
        self.teller.tell(
            state="starting",
            text=f"starting generation {self.generation}",
            generation=self.generation,
            child_pid=self.child.pid,
        )

    def serve(self) -> None:
        self.serving = True
        self.teller.tell(state="serving", text=f"serving, generation {self.generation}")
        self.teller.say_ready()

    def check_start_time(self) -> None:
        limit = self.config.timeouts.start
        if self.committed and not self.serving and time.monotonic() - self.started_at > limit:
            raise End(EXIT_ENDED, "restarting", f"{self.config.own}: no token came within {limit:g} s of the start")

    def farewell(self, end: End) -> None:
        """Tell the others why, before the connections close."""
        kind = {"stopped": "stopping", "mismatch": "mismatch", "given_up": "given_up"}.get(end.state, "end")
        for link in self.links():
            link.send(type=kind, cause=end.cause, failures=self.teller.document["failures"])

    def judge(self, end: End) -> End:
        """What a failure comes to; only rank 0 counts."""
        return end

    def patience(self) -> float:
        """Seconds to wait for what rank 0 makes of a failure that was found here."""
        return 0.0

    def verdict(self, link: Any, message: dict[str, Any]) -> End | None:
        """What rank 0 makes of it, None when this is no message of that kind."""
        del link, message
        return None

    def forget_failures(self) -> None:
        """Where an operator's hand was in it, the count begins anew."""
        self.store.failures = []
        self.teller.tell(failures=0)
        with contextlib.suppress(OSError):
            self.store.save()

    def _stopped(self) -> End:
        self.teller.notify("STOPPING=1")
        self.forget_failures()
        return End(EXIT_STOPPED, "stopped", "stopped by SIGTERM", failure=False)

    async def _last_words(self, end: End) -> End:
        """What comes in while the engine ends can change what the end is: rank 0 gives up, or the unit is stopped."""
        limit = time.monotonic() + (self.patience() if end.failure else 0.0)
        while event := await self.events.get(limit - time.monotonic()):
            kind, source, value = event
            if kind == "signal" and end.status == EXIT_ENDED:
                return self._stopped()
            if kind in ("closed", "lost"):
                limit = 0.0
            found = self.verdict(source, value) if kind == "message" else None
            if found and end.status == EXIT_ENDED:
                end, limit = found, 0.0
        return end

    async def _end(self, end: End) -> int:
        if end.failure:
            self.teller.tell(last_failure={"when": now(), "generation": self.generation, "cause": end.cause})
        if self.committed and end.failure:
            end = self.judge(end)
        ran = self.committed
        self.farewell(end)
        text = f"ending generation {self.generation}: {end.cause}" if ran else end.cause
        self.teller.tell(state="stopping" if end.state == "stopped" else end.state, text=text)
        orderly = end.state == "stopped"
        await self._end_child(self.config.timeouts.stop if orderly else min(self.config.timeouts.stop, BROKEN_GRACE))
        end = await self._last_words(end)
        for link in self.links():
            link.close()
        for task in list(self.tasks):
            task.cancel()
        self.teller.tell(state=end.state, text=end.cause, child_pid=None, peers=[])
        return end.status

    async def _end_child(self, grace: float) -> None:
        """Ask, wait, kill, and wait until nothing of the engine is left, on the GPUs neither."""
        if self.child is None:
            return
        own, child = os.getpid(), self.child
        known = descendants(own)
        if not child.ended:
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)
            await self._until(lambda: child.ended, grace)
        # What the engine itself leaves behind nobody ends: a moment, and it is killed.
        await self._until(lambda: not descendants(own), min(grace, 1.0))
        end = time.monotonic() + GONE_TIMEOUT
        while (left := descendants(own)) and time.monotonic() < end:
            known |= left
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            reap_orphans(child.pid)
            self.teller.tick()
            await asyncio.sleep(0.05)
        reap_orphans(child.pid)
        if self.config.gpu_wait and shutil.which("nvidia-smi"):
            end = time.monotonic() + GONE_TIMEOUT
            while known & await asyncio.to_thread(gpu_processes) and time.monotonic() < end:
                self.teller.tick()
                await asyncio.sleep(0.5)

    async def _until(self, condition: Any, limit: float) -> None:
        end = time.monotonic() + limit
        while not condition() and time.monotonic() < end:
            reap_orphans(self.child.pid if self.child else None)
            self.teller.tick()
            await asyncio.sleep(0.05)


class Head(Agent):
    """Rank 0: listens, compares, starts, probes, and counts failures."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sessions: dict[int, Session] = {}
        self.server: asyncio.Server | None = None
        self.handshakes: dict[str, int] = {}
        self.prober: Prober | None = None
        self.suspected: dict[int, float] = {}
        self.refusals: dict[str, float] = {}
        self.lacking = False  # whether engine or checkpoint of this host are not there
        self.store.failures = recent(self.store.failures, time.time(), self.config.restart_window)
        self.teller.document["failures"] = len(self.store.failures)

    def begin(self) -> None:
        self._show_waiting()
        self.spawn(self._listen())

    def peers(self) -> list[Session]:
        return list(self.sessions.values())

    async def _listen(self) -> None:
        """Bind, again and again: at boot the address may come later than the agent."""
        own, port = self.config.head.address, self.config.agent_port
        while self.server is None:
            try:
                self.server = await asyncio.start_server(self._accept, own, port, limit=LINE_LIMIT)
            except OSError as error:
                self.events.put("note", None, f"cannot listen on {own} port {port} ({error.strerror})")
                await asyncio.sleep(1)
        self.events.put("listening")

    def farewell(self, end: End) -> None:
        # Who comes back while this agent ends shall find nobody, and not wait for an answer.
        if self.server:
            self.server.close()
        super().farewell(end)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Who connects proves the secret within a time, or is dropped; nobody can hold up the others."""
        peer = str((writer.get_extra_info("peername") or ["?"])[0])
        if self.handshakes.get(peer, 0) >= HANDSHAKES_AT_ONCE:
            writer.close()
            return
        self.handshakes[peer] = self.handshakes.get(peer, 0) + 1
        try:
            set_options(writer)
            link = await asyncio.wait_for(prove_to_worker(reader, writer, self.secret), HANDSHAKE_TIMEOUT)
            hello = await asyncio.wait_for(link.receive(), HANDSHAKE_TIMEOUT)
            check_hello(hello)
        except (LinkError, OSError, EOFError, ValueError, asyncio.TimeoutError) as error:
            self._log_refusal(peer, str(error) or "said nothing in time")
            writer.close()
        else:
            self.events.put("hello", link, hello)
        finally:
            self.handshakes[peer] -= 1
            if not self.handshakes[peer]:
                del self.handshakes[peer]

    def _log_refusal(self, peer: str, why: str) -> None:
        """Once a minute per address: a scanner must not fill the journal."""
        at = time.monotonic()
        if at - self.refusals.get(peer, -60.0) >= 60:
            if len(self.refusals) > 1000:
                self.refusals.clear()
            self.refusals[peer] = at
            print(f"rank agent: a connection from {peer} was refused: {why}", flush=True)

    def handle(self, kind: str, source: Any, value: Any) -> None:
        if kind == "hello":
            self._greet(source, value)
        elif kind == "listening" and not self.committed:
            self._show_waiting()
        elif kind == "message":
            self._hear(source, value)
        elif kind in ("closed", "lost"):
            self._part(kind, source, value)
        elif kind == "token":
            if not self.serving:
                for link in self.links():
                    link.send(type="serving", generation=self.generation)
            if not self.suspected:
                self.serve()
            else:
                self._show_suspicion("a token came through, the group lives")
        elif kind == "wedged":
            if not compiling(os.getpid()) and not any(map(self._compiles, self.sessions.values())):
                raise End(EXIT_ENDED, "restarting", f"{self.config.own}: the engine is wedged: {value}")
            self.teller.tell(text=f"compiling kernels, generation {self.generation}")
            if self.prober:
                self.prober.ask_now()
        elif kind == "note":
            self.teller.tell(text=f"{value}, generation {self.generation}" if self.child else value)

    def _compiles(self, session: Session) -> bool:
        # What a worker said before it went silent excuses nothing any more.
        return session.compiling and session.silence < self.config.timeouts.peer

    def _host(self, rank: Any) -> Host | None:
        return self.config.hosts[rank] if isinstance(rank, int) and 0 < rank < self.config.world_size else None

    def _greet(self, link: Link, hello: dict[str, Any]) -> None:
        theirs = {str(key): str(value) for key, value in hello["identity"].items()}
        rank = hello["rank"]
        known = self._host(rank)
        told = Host(rank, str(hello.get("name"))[:100], str(hello.get("address"))[:100])
        # Who has no place here is turned away whatever runs on it: a host that was replaced still knows the secret.
        if known is None:
            self._refuse(link, told, f"there is no rank {rank}")
            return
        if told != known:
            here = f"rank {rank} is {known.name} at {known.address} in the configuration of rank 0"
            self._refuse(link, told, f"{here}, and {told.name} at {told.address} in that of the host itself")
            return
        before = self.told
        try:
            found = differences(self.config.own, self.identify(), told, theirs)
        except ConfigError as error:
            self._refuse(link, told, f"on {self.config.own} {error}")
            self._show_waiting()
            return
        if self.told != before:
            # Who was compared with something else is to come again.
            for session in list(self.sessions.values()):
                self._lose(session, "")
        if found and not self.committed:
            text = f"the ranks differ, none is started: {'; '.join(found)}"
            link.send(type="mismatch", cause=text)
            link.close()
            raise End(EXIT_REFUSED, "mismatch", text)
        if found:
            self._refuse(link, told, f"this group runs with something else: {'; '.join(found)}")
            return
        session = self.sessions.get(known.rank)
        if session and session.instance == hello.get("instance"):
            # The same agent found its way back after a silence: nothing of it has died.
            # It closes the old connection itself, once it knows that this one is taken.
            if session.link:
                session.link.superseded = True
            session.link = link
        elif session and session.link and session.silence < self.config.timeouts.peer:
            self._refuse(link, told, f"rank {rank} is held by the agent at {session.link.peer}, which is alive")
            return
        else:
            if self.committed:
                raise End(EXIT_ENDED, "restarting", f"{known}: its agent came back anew")
            if session and session.link:
                session.link.close()
            session = self.sessions[known.rank] = Session(known, str(hello.get("instance")), link)
        session.hear()
        if not self.committed:
            # The number grows also after rank 0 was installed anew.
            self.generation = max(self.generation, hello["generation"])
        link.task = self.spawn(link.listen(self.events))
        link.send(
            type="welcome",
            generation=self.generation if self.committed else 0,
            serving=self.serving,
            failures=len(self.store.failures),
        )
        if self.committed and not session.started:
            # The word to start, or that it was done, was lost with the connection before.
            link.send(type="start", generation=self.generation)
        elif not self.committed and len(self.sessions) == self.config.world_size - 1:
            self._start()
        elif not self.committed:
            self._show_waiting()

    def _refuse(self, link: Link, told: Host, why: str) -> None:
        self._log_refusal(f"{told.name} at {link.peer}", why)
        link.send(type="refused", cause=why)
        link.close()

    def _start(self) -> None:
        """Workers first, this rank when all have said that they started."""
        self.committed, self.started_at = True, time.monotonic()
        self.generation += 1
        self.store.generation = self.generation
        try:
            self.store.save()
        except OSError as error:
            raise End(EXIT_REFUSED, "given_up", f"the generation number cannot be kept: {error}") from error
        for session in self.sessions.values():
            session.started = False
            if session.link:
                session.link.send(type="start", generation=self.generation)
        if not self.sessions:
            self._start_own()

    def _start_own(self) -> None:
        self.start_child()
        api = Api(self.config.api_url, self.config.api_model, self.key)
        self.prober = Prober(api, self.config.timeouts, self.events)
        self.spawn(self.prober.run())

    def _session(self, link: Link) -> Session | None:
        return next((session for session in self.sessions.values() if session.link is link), None)

    def _hear(self, link: Link, message: dict[str, Any]) -> None:
        session = self._session(link)
        if session is None:
            return
        session.hear()
        kind, cause = message["type"], str(message.get("cause", ""))[:1000]
        if kind == "beat":
            session.compiling = message.get("compiling") is True
        elif kind == "started" and message.get("generation") == self.generation:
            session.started = True
            if not self.child and all(other.started for other in self.sessions.values()):
                self._start_own()
        elif kind == "stopping":
            self.forget_failures()
            self._lose(session, f"{session.host} was stopped", failure=False)
        elif kind == "end":
            self._lose(session, cause)

    def _part(self, kind: str, link: Link, how: str) -> None:
        session = self._session(link)
        if session is None or link.superseded:
            link.close()
            return
        if kind == "lost":
            session.link = None
            return
        self._lose(session, f"{session.host}: {how}")

    def _lose(self, session: Session, cause: str, *, failure: bool = True) -> None:
        """A worker has ended: with a group this is the group's end, before it only means waiting on."""
        if self.committed:
            raise End(EXIT_ENDED, "restarting", cause, failure=failure)
        if session.link:
            session.link.close()
        del self.sessions[session.host.rank]
        self._show_waiting()

    def tick(self) -> None:
        self.check_start_time()
        if self.lacking and not self.committed:
            self._show_waiting()
        limit = self.config.timeouts.peer
        for session in list(self.sessions.values()):
            silent = session.silence > limit
            if silent and not self.committed:
                self._lose(session, f"{session.host}: silent for {session.silence:.0f} s")
            elif silent and not self.serving and session.silence > self.config.timeouts.orphan:
                raise End(
                    EXIT_ENDED, "restarting", f"{session.host}: silent for {session.silence:.0f} s while starting"
                )
            elif silent and self.serving and session.host.rank not in self.suspected:
                self.suspected[session.host.rank] = time.monotonic()
                self._show_suspicion("asking the engine for a token")
                if self.prober:
                    self.prober.ask_now()
            elif not silent and session.host.rank in self.suspected:
                del self.suspected[session.host.rank]
                if not self.suspected:
                    self.serve()
        if self.suspected and self.prober:
            # As long as a peer is silent the proof is repeated, not only asked for once.
            oldest = min(self.suspected.values())
            if time.monotonic() - oldest > self.config.timeouts.probe:
                self.suspected = dict.fromkeys(self.suspected, time.monotonic())
                self.prober.ask_now()
        self._show_peers()

    def _show_suspicion(self, text: str) -> None:
        silent = ", ".join(str(self.config.hosts[rank]) for rank in sorted(self.suspected))
        self.teller.tell(state="suspect", text=f"{silent} silent; {text}")

    def _show_waiting(self) -> None:
        try:
            self.config.agreed(self.config.program)
            self.lacking = False
        except ConfigError as error:
            self.lacking = True
            self.teller.tell(state="waiting", text=str(error))
            return
        absent = [host for host in self.config.hosts[1:] if host.rank not in self.sessions]
        if absent:
            text = "waiting for " + ", ".join(f"{host} at {host.address}" for host in absent)
            self.teller.tell(state="waiting", text=text)
        elif self.config.world_size == 1 and not self.committed:
            self.identify()
            self._start()

    def _show_peers(self) -> None:
        peers = []
        for host in self.config.hosts[1:]:
            session = self.sessions.get(host.rank)
            silent = session is None or session.link is None or session.silence > self.config.timeouts.peer
            state = "absent" if session is None else "silent" if silent else "connected"
            peers.append(peer_entry(host, state, session))
        self.teller.tell(peers=peers)

    def judge(self, end: End) -> End:
        if end.state in ("mismatch", "given_up"):
            return end
        at = time.time()
        self.store.failures = [*recent(self.store.failures, at, self.config.restart_window), at]
        count = len(self.store.failures)
        if count >= self.config.restart_limit:
            self.store.failures = []
            text = f"given up after {count} failures within {self.config.restart_window:g} s; the last: {end.cause}"
            end = End(EXIT_REFUSED, "given_up", text)
        with contextlib.suppress(OSError):
            self.store.save()
        self.teller.tell(failures=count)
        return end


def peer_entry(host: Host, state: str, session: Session | None) -> dict[str, Any]:
    heard = session.heard_at if session else None
    return {"rank": host.rank, "name": host.name, "address": host.address, "state": state, "last_heard": heard}


class Worker(Agent):
    """Every other rank: connects to rank 0 and does as it says."""

    watches_compiler = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.session: Session | None = None
        self.connecting: asyncio.Task | None = None
        self.silent_told = False
        self.judged = False

    def begin(self) -> None:
        self._show_waiting("")
        self._connect()

    def peers(self) -> list[Session]:
        return [self.session] if self.session else []

    def _connect(self) -> None:
        if self.connecting is None or self.connecting.done():
            self.connecting = self.spawn(self._dial())

    async def _dial(self) -> None:
        """Connect and greet, again and again with a growing pause, until rank 0 takes us."""
        pause = 0.1
        head = self.config.head
        while True:
            writer = None
            try:
                identity = self.identify()
                reader, writer = await asyncio.wait_for(
                    asyncio.open_connection(head.address, self.config.agent_port, limit=LINE_LIMIT), HANDSHAKE_TIMEOUT
                )
                set_options(writer)
                link = await asyncio.wait_for(prove_to_head(reader, writer, self.secret), HANDSHAKE_TIMEOUT)
                link.send(
                    type="hello",
                    rank=self.config.rank,
                    name=self.config.own.name,
                    address=self.config.own.address,
                    instance=self.instance,
                    generation=self.generation,
                    identity=identity,
                )
                answer = await asyncio.wait_for(link.receive(), HANDSHAKE_TIMEOUT)
            except ConfigError as error:
                self.events.put("note", None, str(error))
            except (LinkError, OSError, EOFError, ValueError, asyncio.TimeoutError) as error:
                if writer:
                    writer.close()
                self.events.put("note", None, self._reason(error))
            else:
                if answer["type"] != "refused":
                    self.events.put("answer", link, answer)
                    return
                link.close()
                self.events.put("note", None, f"rank 0 refuses this host: {answer.get('cause')}")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 2.0)

    def _reason(self, error: BaseException) -> str:
        head = f"{self.config.head} at {self.config.head.address}"
        if isinstance(error, LinkError):
            return f"{head}: {error}"
        # Until rank 0 is up this is what waiting looks like.
        return f"waiting for {head}"

    def handle(self, kind: str, source: Any, value: Any) -> None:
        if kind == "answer":
            self._welcome(source, value)
        elif kind == "message":
            self._hear(source, value)
        elif kind in ("closed", "lost"):
            self._part(kind, source, value)
        elif kind == "note" and not self.child:
            self._show_waiting(value)

    def _welcome(self, link: Link, answer: dict[str, Any]) -> None:
        if answer["type"] == "mismatch":
            link.close()
            raise End(EXIT_REFUSED, "mismatch", str(answer.get("cause")))
        if answer["type"] != "welcome":
            link.close()
            self._connect()
            return
        if self.child and answer.get("generation") != self.generation:
            link.close()
            raise End(EXIT_ENDED, "restarting", f"{self.config.head}: its agent came back anew")
        if self.session and self.session.link:
            self.session.link.close()
        self.session = Session(self.config.head, "", link)
        self._show_failures(answer)
        self.silent_told = False
        link.task = self.spawn(link.listen(self.events))
        if not self.child:
            self._show_waiting("rank 0 is there, waiting for the others")
        elif self.serving or answer.get("serving"):
            self.serve()

    def _hear(self, link: Link, message: dict[str, Any]) -> None:
        if self.session is None or self.session.link is not link:
            return
        self.session.hear()
        kind, cause = message["type"], str(message.get("cause", ""))[:2000]
        if kind == "start":
            if self.child and message["generation"] != self.generation:
                raise End(EXIT_ENDED, "restarting", f"{self.config.head} started another generation")
            if not self.child:
                self._still_the_same()
                self.generation = int(message["generation"])
                self.store.generation = self.generation
                with contextlib.suppress(OSError):
                    self.store.save()
                self.start_child()
            link.send(type="started", generation=self.generation)
        elif kind == "serving" and self.child:
            self.serve()
        elif kind == "stopping":
            self._lose(f"{self.config.head} was stopped", failure=False)
        elif end := self.verdict(link, message):
            self.judged = True
            if end.status == EXIT_REFUSED:
                raise end
            self._lose(cause)

    def _still_the_same(self) -> None:
        """Raises End when this rank would not start what it greeted rank 0 with."""
        told = self.told
        with contextlib.suppress(ConfigError):
            if self.identify() == told:
                return
        text = f"{self.config.own}: its engine or checkpoint was exchanged while the others were waited for"
        raise End(EXIT_ENDED, "restarting", text)

    def patience(self) -> float:
        session, limit = self.session, self.config.timeouts.peer
        heard = session is not None and session.link is not None and session.silence < limit
        return limit if heard and not self.judged else 0.0

    def verdict(self, link: Any, message: dict[str, Any]) -> End | None:
        kind, cause = message["type"], str(message.get("cause", ""))[:2000]
        if self.session is None or self.session.link is not link or kind not in ("end", "mismatch", "given_up"):
            return None
        self._show_failures(message)
        return End(EXIT_ENDED, "restarting", cause) if kind == "end" else End(EXIT_REFUSED, kind, cause)

    def _show_failures(self, message: dict[str, Any]) -> None:
        """Rank 0 counts, and every rank shows it."""
        if isinstance(message.get("failures"), int):
            self.teller.tell(failures=message["failures"])

    def _part(self, kind: str, link: Link, how: str) -> None:
        if self.session is None or self.session.link is not link or link.superseded:
            return
        # Nothing more comes over it: no verdict of rank 0 is left to wait for.
        self.session.link = None
        if kind == "lost":
            self._connect()
            return
        link.close()
        self._lose(f"{self.config.head}: {how}")

    def _lose(self, cause: str, *, failure: bool = True) -> None:
        if self.child:
            raise End(EXIT_ENDED, "restarting", cause, failure=failure)
        if self.session and self.session.link:
            self.session.link.close()
        self.session = None
        self._show_waiting("")
        self._connect()

    def tick(self) -> None:
        self.check_start_time()
        session, limits = self.session, self.config.timeouts
        if session is not None and session.silence > limits.peer:
            if not self.child:
                self._lose("silent")
            elif session.silence > limits.orphan:
                raise End(EXIT_ENDED, "restarting", f"{self.config.head}: not heard for {session.silence:.0f} s")
            else:
                # The old connection stays open until a new one is proven: closing it would tell rank 0 that we died.
                self._connect()
                if not self.silent_told:
                    self.silent_told = True
                    self.teller.tell(state="suspect", text=f"{self.config.head} silent; trying to reach it")
        elif session is not None and self.silent_told and self.child:
            self.silent_told = False
            if self.serving:
                self.serve()
            else:
                self.teller.tell(state="starting", text=f"starting generation {self.generation}")
        self._show_peers()

    def _show_peers(self) -> None:
        session = self.session
        silent = session is None or session.link is None or session.silence > self.config.timeouts.peer
        state = "absent" if session is None else "silent" if silent else "connected"
        self.teller.tell(peers=[peer_entry(self.config.head, state, session)])

    def _show_waiting(self, text: str) -> None:
        head = self.config.head
        self.teller.tell(state="waiting", text=text or f"waiting for {head} at {head.address}")


# ---------------------------------------------------------------------------------------------------------------------
# Start


def read_credential(name: str) -> str | None:
    """A secret that systemd handed over, without surrounding white space; None when there is none."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    if not folder:
        return None
    try:
        return Path(folder, name).read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the credential {name} cannot be read: {error}") from error


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Runs one rank of a vLLM replica and keeps it together with the others."
    )
    parser.add_argument("--config", required=True, help="rank.json as the role serve writes it")
    parser.add_argument("--digest-file", help="file whose text the status shows as configuration")
    parser.add_argument("--status", default="/run/kimi-k3/status.json", help="status file to write")
    parser.add_argument("--state-dir", default="/var/lib/kimi-k3", help="directory that outlives restarts")
    parser.add_argument("--check", action="store_true", help="only say whether the configuration can be used")
    parser.add_argument("--version", action="version", version=VERSION)
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    try:
        config = load_config(options.config)
        if options.check:
            return EXIT_STOPPED
        secret, key = read_credential("group-secret"), read_credential("api-key")
    except ConfigError as error:
        print(f"rank agent: {error}.", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    if not secret:
        text = "the credential group-secret is missing: the unit must load it"
        print(f"rank agent: {text}.", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    configuration = ""
    if options.digest_file:
        with contextlib.suppress(OSError):
            configuration = Path(options.digest_file).read_text(encoding="utf-8").strip()
    become_subreaper()
    teller = Teller(config, Path(options.status), configuration)
    store = Store(Path(options.state_dir))
    kind = Head if config.rank == 0 else Worker

    async def run() -> int:
        agent = kind(config, secret.encode(), key, teller, store)
        status = await agent.run()
        # At once, from inside: a thread that waits for an answer of the API must not hold up the end.
        sys.stdout.flush()
        os._exit(status)

    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
