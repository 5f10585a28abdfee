# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for C(vllm bench serve) and a server, so that a measurement is over at once.

The stand-in is a script of the standard library that writes a result with the keys of vLLM 0.32. What it does besides
is said by the file C(behaviour.json) beside it: how many requests fail, which keys are missing, how long it takes.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
import typing as t
from pathlib import Path

KEY = "sesame-0123456789"

SCRIPT = """
import json, os, random, sys, time
from pathlib import Path
here = Path(__file__).parent
behaviour = json.loads((here / "behaviour.json").read_text())
words = sys.argv[1:]
value = lambda flag, default=None: words[words.index(flag) + 1] if flag in words else default
with open(here / "calls.jsonl", "a") as stream:
    stream.write(json.dumps({"words": words, "environment": dict(os.environ), "directory": os.getcwd()}) + chr(10))
print("Namespace of the command with " + os.environ.get("OPENAI_API_KEY", ""), flush=True)
if behaviour.get("crash"):
    print("ValueError: the tokenizer is not there", file=sys.stderr)
    sys.exit(1)
prompts, length = int(value("--num-prompts")), int(value("--output-len", 8))
seed = int(value("--seed"))
numbers = random.Random(seed)
print("Starting main benchmark run...", flush=True)
for done in range(prompts + 1):
    print(f"\\r {done}/{prompts} [00:00<00:00]", end="", file=sys.stderr, flush=True)
    if done == 1 and behaviour.get("wait_for"):
        while not (here / behaviour["wait_for"]).exists():
            time.sleep(0.02)
failed = behaviour.get("failed", 0)
key = os.environ.get("OPENAI_API_KEY", "")
ttfts = [0.01 + numbers.random() / 1000 for _ in range(prompts)]
itls = [[0.005 + numbers.random() / 1000 for _ in range(length - 1)] for _ in range(prompts)]
latencies = [first + sum(rest) for first, rest in zip(ttfts, itls)]
throughput = 100 + numbers.random()
result = {
    "date": "20261201-040506", "backend": value("--backend"), "model_id": value("--model"), "num_prompts": prompts,
    "duration": 1.5, "completed": prompts - failed, "failed": failed,
    "total_input_tokens": prompts * int(value("--input-len", 8)),
    "total_output_tokens": behaviour.get("tokens", prompts * length),
    "request_throughput": throughput / length, "request_goodput": None, "output_throughput": throughput,
    "total_token_throughput": 5 * throughput, "max_concurrent_requests": 3,
    "input_lens": [8] * prompts, "output_lens": [length] * prompts, "ttfts": ttfts, "itls": itls,
    "latencies": latencies,
    "generated_texts": ["what the model said"] * prompts,
    "errors": ["Traceback: key " + key + chr(10) + "ConnectionError: refused"] * failed,
    "note": "Bearer " + key,
}
for number, name in enumerate(("ttft", "itl", "tpot", "e2el")):
    for kind in ("mean", "median", "std", "p50", "p90", "p99"):
        result[f"{kind}_{name}_ms"] = 10.0 * (number + 1) + numbers.random()
for key in behaviour.get("missing", []):
    del result[key]
if not behaviour.get("silent"):
    text = json.dumps(result) if not behaviour.get("garbage") else "{"
    (Path(value("--result-dir")) / value("--result-filename")).write_text(text)
"""


class Engine:
    """The stand-in, what it shall do, and what it was called with."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.executable = folder / "vllm"
        self.executable.write_text(f"#!{sys.executable}\n{SCRIPT}")
        self.executable.chmod(0o755)
        self.behave()

    def behave(self, **behaviour: t.Any) -> None:
        (self.folder / "behaviour.json").write_text(json.dumps(behaviour))

    def calls(self) -> list[dict[str, t.Any]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Server:
    """Lists one model to who has the key."""

    def __init__(self, key: str | None = KEY) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_words: object) -> None:
                pass

            def do_GET(self) -> None:
                right = key is None or self.headers.get("Authorization") == f"Bearer {key}"
                body = json.dumps({"data": [{"id": "kimi-k3"}]} if right else {"error": "Unauthorized"}).encode()
                self.send_response(200 if right else 401)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Server:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
