# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role on this machine, and what its commands start: programs that say what they were started with."""

from __future__ import annotations

import http.server
import json
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
KEY = 'sk-$weird "key" with `all` \\ that quoting needs'
TELLER = """#!{python}
import json, os, sys
json.dump({{"argv": sys.argv, "environment": dict(os.environ)}}, open({out!r}, "w"))
"""


class World:
    """An inventory with a key on rank 0, a home of one's own, and programs that tell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        self.key_file = folder / "api.key"
        self.key_file.write_text(f"{KEY}\n")
        self.told = folder / "told.json"
        self.programs = folder / "programs"
        self.programs.mkdir()
        for name in ("claude", "ncode", "anything"):
            path = self.programs / name
            path.write_text(TELLER.format(python=sys.executable, out=str(self.told)))
            path.chmod(0o755)
        self.variables: dict = {"client_api_key_file": str(self.key_file)}
        self.output = ""

    @property
    def files(self) -> Path:
        return self.home / ".config" / "kimi-k3"

    def play(self, *words: str, ok: bool = True, inventory: dict | None = None) -> str:
        local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "ansible_become": False}
        hosts = {
            "gpu-b": {**local, "serve_rank": 1, "ansible_host": "192.0.2.12"},
            "gpu-a": {**local, "serve_rank": 0, "ansible_host": "192.0.2.11", "serve_api_port": 8123},
        }
        document = {"all": {"vars": self.variables}, "kimi_k3": {"hosts": hosts}} if inventory is None else inventory
        path = self.folder / "inventory.json"
        path.write_text(json.dumps(document))
        run = subprocess.run(
            [Path(sys.executable).parent / "ansible-playbook", "-i", path, "playbooks/clients.yml", *words],
            cwd=ROOT,
            env={
                **os.environ,
                "HOME": str(self.home),
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_FORCE_COLOR": "0",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        self.output = run.stdout + run.stderr
        assert (run.returncode == 0) == ok, self.output
        assert KEY not in self.output
        assert "Traceback" not in self.output
        return " ".join(self.output.split())

    def changed(self) -> int:
        return int(re.search(r"^localhost .*changed=(\d+)", self.output, re.MULTILINE)[1])

    def start(self, name: str, *arguments: str, **more: str) -> subprocess.CompletedProcess:
        path = f"{self.programs}:{os.environ['PATH']}"
        return subprocess.run(
            [self.home / ".local" / "bin" / f"kimi-k3-{name}", *arguments],
            env={"PATH": path, "HOME": str(self.home), **more},
            capture_output=True,
            text=True,
            check=False,
        )

    def tell(self, name: str, *arguments: str, **more: str) -> dict:
        run = self.start(name, *arguments, **more)
        assert run.returncode == 0, run.stderr
        return json.loads(self.told.read_text())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def installed(world):
    world.play("--check", "--diff")
    assert world.changed() > 0
    assert not world.files.exists()
    assert not (world.home / ".local").exists()
    world.play("--diff")
    assert world.changed() > 0
    return world


def test_only_the_user_can_read_the_key(installed):
    holders = [path for path in installed.files.rglob("*") if path.is_file() and "sk-" in path.read_text()]
    assert sorted(path.name for path in holders) == ["claude.env", "code.env", "curl.conf"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in holders} == {0o600}
    assert stat.S_IMODE(installed.files.stat().st_mode) == 0o700


def test_a_second_run_changes_nothing(installed):
    installed.play()
    assert installed.changed() == 0


def test_a_changed_key_is_not_shown(installed):
    installed.key_file.write_text("another-key-nobody-may-see\n")
    installed.play("--check", "--diff")
    assert installed.changed() == 1
    assert "another-key-nobody-may-see" not in installed.output
    installed.key_file.write_text(f"{KEY}\n")


def test_claude_code_talks_to_rank_0_with_a_bearer_token(installed):
    told = installed.tell("claude", "-p", "two words", ANTHROPIC_API_KEY="sk-ant-mine", CLAUDE_CODE_USE_BEDROCK="1")
    assert told["argv"][1:] == ["-p", "two words"]
    got = told["environment"]
    expected = {
        "ANTHROPIC_BASE_URL": "http://192.0.2.11:8123",
        "ANTHROPIC_AUTH_TOKEN": KEY,
        **{
            f"ANTHROPIC_{name}MODEL": "kimi-k3"
            for name in ("", *(f"DEFAULT_{n}_" for n in ("OPUS", "SONNET", "HAIKU")))
        },
        "CLAUDE_CODE_SUBAGENT_MODEL": "kimi-k3",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
        "DISABLE_TELEMETRY": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ENABLE_PROMPT_CACHING_1H": "1",
    }
    assert {name: got.get(name) for name in expected} == expected
    # Either of them would lead away from the replica, or to 401.
    assert "ANTHROPIC_API_KEY" not in got
    assert "CLAUDE_CODE_USE_BEDROCK" not in got
    assert "OPENAI_API_KEY" not in got


def test_code_and_any_program(installed):
    expected = {"OPENAI_BASE_URL": "http://192.0.2.11:8123/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": "kimi-k3"}
    for told in (installed.tell("code", "--print", "x"), installed.tell("run", "anything", "--print", "x")):
        assert told["argv"][1:] == ["--print", "x"]
        assert {name: told["environment"].get(name) for name in expected} == expected
    assert told["environment"]["ANTHROPIC_AUTH_TOKEN"] == KEY


def test_the_environment_file_means_the_same_to_a_shell(installed):
    script = f'set -a; . {installed.files}/code.env; printf %s "$OPENAI_API_KEY"'
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == KEY


def test_what_is_missing_is_one_sentence(installed):
    (installed.programs / "ncode").rename(installed.programs / "away")
    run = installed.start("code")
    (installed.programs / "away").rename(installed.programs / "ncode")
    assert run.returncode == 1
    assert "kimi-k3-code: there is no program 'ncode' in PATH" in run.stderr
    assert "Traceback" not in run.stderr
    assert "must be a path of the API" in installed.start("curl").stderr
    assert "name a program" in installed.start("run").stderr


def test_curl_sends_the_key_and_shows_it_to_nobody(installed):
    seen = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.update(path=self.path, token=self.headers["Authorization"])
            # Whatever runs as curl at this moment has the key in no argument.
            words = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
            seen["argv"] = [text for text in words if b"sk-$weird" in text]
            seen["curl"] = [text for text in words if b"curl.conf" in text]
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = installed.files / "client.json"
    before = settings.read_text()
    settings.write_text(before.replace("http://192.0.2.11:8123", f"http://127.0.0.1:{server.server_port}"))
    try:
        run = installed.start("curl", "/v1/models?x=1", "--fail", no_proxy="*")
    finally:
        settings.write_text(before)
        server.shutdown()
    assert (run.returncode, run.stdout, run.stderr) == (0, "ok", "")
    assert seen["path"] == "/v1/models?x=1"
    assert seen["token"] == f"Bearer {KEY}"
    assert seen["argv"] == []
    assert len(seen["curl"]) == 1


def test_removal_leaves_nothing_and_is_idempotent(installed):
    other = installed.home / ".local" / "bin" / "other"
    other.write_text("")
    installed.variables["client_state"] = "absent"
    installed.play("--check")
    assert installed.changed() == 2
    assert installed.files.exists()
    installed.play()
    assert not installed.files.exists()
    assert [path.name for path in other.parent.iterdir()] == ["other"]
    installed.play()
    assert installed.changed() == 0


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"client_dir": "~"}, "the directory's last part that name"),
        ({"client_group": "nobody"}, "No host of group 'nobody' (client_group) has serve_rank 0"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, variables, sentence):
    other = World(tmp_path)
    other.variables.update(variables)
    assert sentence in other.play(ok=False)
    assert list(other.home.iterdir()) in ([], [other.home / ".ansible"])
