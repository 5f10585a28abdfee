# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stands in for `vllm`: the same command line and the same ways to fail, without a model.

What it keeps of the original is what a supervisor meets: rank 0 waits for ever for the other ranks; a token goes
through every rank, so a dead or stopped rank lets completions hang while /health stays 200; a headless rank outlives
its master; a worker process can outlive a main process that crashed.

Files in the folder named by FAKE_CONTROL steer it while it runs:
  exit        an exit status: leave with it at once; the file is used up, unless the status is followed by " always"
  hang        completions do not answer
  busy        completions do not answer, but tokens go on being produced
  error       completions answer 500
  garbage     completions answer what is no HTTP
  slow_start  seconds that loading takes
FAKE_COMPILER: a program that runs below the engine for as long as it lives.
FAKE_STUBBORN=1: the worker process ignores SIGTERM and the end of its parent. FAKE_DETACHED=1: it leads a session of
its own. FAKE_DEAF=1: the main process ignores SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

VERSION = "0.32.0"
SWITCHES = ("--headless",)
SHORT = {"-n": "--nnodes", "-r": "--node-rank"}
TICK = 0.02


def parse(arguments: list[str]) -> dict[str, str]:
    """Flags in any form vLLM takes them: --a b, --a=b, a bare --a, -n 2. Unknown ones are kept and mean nothing."""
    options: dict[str, str] = {}
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if not word.startswith("-"):
            options.setdefault("model", word)
            continue
        name, equals, value = word.partition("=")
        name = SHORT.get(name, name)
        if (
            not equals
            and name not in SWITCHES
            and position < len(arguments)
            and not arguments[position].startswith("-")
        ):
            value = arguments[position]
            position += 1
        options[name] = value
    return options


class Control:
    """The files that steer this process."""

    def __init__(self) -> None:
        folder = os.environ.get("FAKE_CONTROL")
        self.folder = Path(folder) if folder else None

    def has(self, name: str) -> bool:
        return self.folder is not None and (self.folder / name).exists()

    def read(self, name: str) -> str:
        if self.folder is None:
            return ""
        try:
            return (self.folder / name).read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def note(self, role: str, pid: int) -> None:
        if self.folder is not None:
            with (self.folder / "pids").open("a", encoding="utf-8") as stream:
                stream.write(f"{role} {pid}\n")

    def exit_status(self) -> int | None:
        words = self.read("exit").split()
        if not words:
            return None
        if self.folder is not None and "always" not in words:
            (self.folder / "exit").unlink(missing_ok=True)
        return int(words[0])


CONTROL = Control()


def say(text: str, end: str = "\n", stream=None) -> None:
    print(text, end=end, file=stream or sys.stdout, flush=True)


def info(text: str) -> None:
    say(f"(EngineCore pid={os.getpid()}) INFO {time.strftime('%m-%d %H:%M:%S')} [fake_engine.py:1] {text}")


def start_worker() -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        CONTROL.note("worker", pid)
        return pid
    if os.environ.get("FAKE_DETACHED") == "1":
        os.setsid()
    stubborn = os.environ.get("FAKE_STUBBORN") == "1"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while stubborn or os.getppid() == parent:
        time.sleep(TICK)
    os._exit(0)


def load() -> None:
    """Weights come in with the progress bar that vLLM's loader draws."""
    for percent, shards in ((0, 0), (41, 7), (100, 16)):
        shown = f"Loading safetensors checkpoint shards: {percent:3d}% Completed | {shards}/16 [00:00<00:00, 99.1it/s]"
        say(f"\r{shown}", end="", stream=sys.stderr)
        if shards == 7:
            time.sleep(float(CONTROL.read("slow_start") or 0))
    say("", stream=sys.stderr)


class Pipeline:
    """The ranks behind rank 0, in order. A step is one token: it visits each of them."""

    def __init__(self, address: str, port: int, ranks: int) -> None:
        self.links: dict[int, socket.socket] = {}
        self.missing = ranks - 1
        self.busy = threading.Lock()
        self.listener = socket.create_server((address, port)) if self.missing else None

    def gather(self) -> None:
        while self.listener is not None and len(self.links) < self.missing:
            link, _rest = self.listener.accept()
            line = link.makefile("rb").readline()
            self.links[int(line)] = link

    def step(self) -> None:
        with self.busy:
            for rank in sorted(self.links):
                try:
                    self.links[rank].sendall(b"t")
                    answer = self.links[rank].recv(1)
                except OSError:
                    answer = b""
                while not answer:  # the peer is gone: nothing says so, the collective just never ends
                    time.sleep(3600)


class Counters:
    def __init__(self, model: str) -> None:
        self.model = model
        self.lock = threading.Lock()
        self.steps = self.prompt = self.generation = self.requests = 0

    def add(self, prompt: int, generation: int) -> None:
        with self.lock:
            self.steps += 1
            self.prompt += prompt
            self.generation += generation

    def text(self) -> str:
        label = f'{{engine="0",model_name="{self.model}"}}'
        total = self.prompt + self.generation
        rows = [
            ("vllm:num_requests_running", "gauge", [("", label, self.requests)]),
            ("vllm:num_requests_waiting", "gauge", [("", label, 0)]),
            ("vllm:kv_cache_usage_perc", "gauge", [("", label, 0.0)]),
            ("vllm:prompt_tokens_total", "counter", [("", label, self.prompt)]),
            ("vllm:generation_tokens_total", "counter", [("", label, self.generation)]),
            (
                "vllm:iteration_tokens_total",
                "histogram",
                [
                    ("_bucket", label.replace("}", ',le="+Inf"}'), self.steps),
                    ("_count", label, self.steps),
                    ("_sum", label, total),
                ],
            ),
        ]
        lines = []
        for name, kind, samples in rows:
            lines += [f"# HELP {name} As vLLM counts it.", f"# TYPE {name} {kind}"]
            lines += [f"{name}{suffix}{labels} {float(value)}" for suffix, labels, value in samples]
        return "\n".join(lines) + "\n"


def build_server(options: dict[str, str], pipeline: Pipeline, counters: Counters):
    # imported here only: a headless rank starts faster without it
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # noqa: PLC0415
    from socketserver import TCPServer  # noqa: PLC0415

    key = os.environ.get("VLLM_API_KEY", "")
    name = counters.model
    window = int(options.get("--max-model-len") or 4096)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def server_bind(self) -> None:  # without asking the resolver for this host's name
            TCPServer.server_bind(self)
            self.server_name, self.server_port = "localhost", self.server_address[1]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_arguments) -> None:
            say(f'INFO:     {self.client_address[0]}:{self.client_address[1]} - "{self.requestline}"')

        def answer(self, status: int, body: object, kind: str = "application/json") -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def refuse(self, status: int, message: str) -> None:
            self.answer(status, {"error": {"message": message, "type": "Error", "code": status}})

        def allowed(self) -> bool:
            if key and self.path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {key}":
                self.answer(401, {"error": "Unauthorized"})
                return False
            return True

        def do_GET(self) -> None:
            if not self.allowed():
                return
            if self.path == "/health":
                self.answer(200, "", "text/plain")
            elif self.path == "/version":
                self.answer(200, {"version": VERSION})
            elif self.path == "/metrics":
                self.answer(200, counters.text(), "text/plain; version=0.0.4; charset=utf-8")
            elif self.path == "/v1/models":
                card = {"id": name, "object": "model", "owned_by": "vllm", "max_model_len": window}
                self.answer(200, {"object": "list", "data": [card]})
            else:
                self.refuse(404, "Not Found")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if not self.allowed():
                return
            if self.path != "/v1/completions":
                self.refuse(404, "Not Found")
                return
            try:
                request = json.loads(body)
                prompt, wanted = request["prompt"], int(request.get("max_tokens") or 16)
            except (ValueError, KeyError, TypeError):
                self.refuse(400, "the request is not a completion")
                return
            if request.get("model", name) != name:
                self.refuse(404, f"The model `{request['model']}` does not exist.")
                return
            if CONTROL.has("error"):
                self.refuse(500, "EngineCore encountered an issue.")
                return
            if CONTROL.has("garbage"):
                self.log_request()
                self.wfile.write(b"nonsense\r\n\r\n")
                self.close_connection = True
                return
            counters.requests += 1
            while CONTROL.has("hang") or CONTROL.has("busy"):
                time.sleep(TICK)
            size = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
            seed = sum(prompt) if isinstance(prompt, list) else sum(str(prompt).encode())
            tokens = []
            for index in range(wanted):
                pipeline.step()
                counters.add(0 if index else size, 1)
                tokens.append((seed * 31 + index * 7) % 1000)
            counters.requests -= 1
            choice = {
                "index": 0,
                "text": "".join(f" {token}" for token in tokens),
                "token_ids": tokens,
                "finish_reason": "length",
            }
            usage = {"prompt_tokens": size, "completion_tokens": wanted, "total_tokens": size + wanted}
            self.answer(
                200,
                {"id": "cmpl-0", "object": "text_completion", "model": name, "choices": [choice], "usage": usage},
            )

    host = options.get("--host") or "0.0.0.0"
    server = Server((host, int(options.get("--port") or 8000)), Handler, bind_and_activate=False)
    server.server_bind()  # as vLLM: the port is taken at once, but nothing listens before the model is loaded
    return server


def lead(options: dict[str, str], pipeline: Pipeline, server, counters: Counters) -> None:
    pipeline.gather()
    load()
    server.server_activate()
    info("Application startup complete.")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        if CONTROL.has("busy"):
            pipeline.step()
            counters.add(0, 1)
        time.sleep(TICK)


def follow(options: dict[str, str]) -> None:
    address = (options.get("--master-addr") or "127.0.0.1", int(options.get("--master-port") or 29501))
    load()
    while True:
        try:
            link = socket.create_connection(address)
            break
        except OSError:
            time.sleep(TICK)
    link.sendall(f"{options.get('--node-rank') or 0}\n".encode())
    while True:
        try:
            token = link.recv(1)
            link.sendall(token)
        except OSError:
            token = b""
        while not token:  # the master is gone: a headless rank waits for it for ever
            time.sleep(3600)


def main() -> None:
    if "--version" in sys.argv[1:2]:
        say(VERSION)
        return
    if sys.argv[1:2] != ["serve"]:
        sys.exit(f"usage: {sys.argv[0]} serve MODEL [--flag value ...]")
    options = parse(sys.argv[2:])
    model = options.get("model") or options.get("--model") or "model"
    ranks = int(options.get("--nnodes") or 1)
    CONTROL.note("engine", os.getpid())
    info(f"vLLM API server version {VERSION}")
    status = CONTROL.exit_status()
    if status is not None:
        os._exit(status)
    worker = start_worker()
    if os.environ.get("FAKE_COMPILER"):
        os.spawnv(os.P_NOWAIT, os.environ["FAKE_COMPILER"], [os.environ["FAKE_COMPILER"], "1000"])

    def leave(_number, _frame) -> None:
        os.kill(worker, signal.SIGTERM)
        os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("FAKE_DEAF") == "1" else leave)
    signal.signal(signal.SIGINT, leave)
    if "--headless" in options:
        info(f"Launching vLLM (v{VERSION}) headless multiproc executor, with head node {options.get('--master-addr')}.")
        threading.Thread(target=follow, args=(options,), daemon=True).start()
    else:
        counters = Counters(options.get("--served-model-name") or model)
        pipeline = Pipeline(
            options.get("--master-addr") or "127.0.0.1", int(options.get("--master-port") or 29501), ranks
        )
        server = build_server(options, pipeline, counters)
        threading.Thread(target=lead, args=(options, pipeline, server, counters), daemon=True).start()
    while True:
        status = CONTROL.exit_status()
        if status is not None:
            os._exit(status)  # a crash: the worker process is left behind
        time.sleep(TICK)


if __name__ == "__main__":
    main()
