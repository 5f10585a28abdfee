# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the role on this machine, as two hosts with a directory and an address each, against a hub of its own."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "molecule" / "lab"))

PLAYBOOK = """
- hosts: all
  gather_facts: false
  any_errors_fatal: true
  tasks:
    - ansible.builtin.import_role: {name: baremetal.kimi_k3.checkpoint}
"""


class Hosts:
    """Two hosts and what a play does to them."""

    def __init__(self, folder: Path, hub: Any, commit: str, files: dict[str, bytes]) -> None:
        self.folder, self.hub, self.commit, self.files = folder, hub, commit, files
        self.variables: dict[str, Any] = {}
        self.shared = False
        self.address = "checkpoint_address"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def play(self, *arguments: str, ok: bool = True) -> str:
        hosts = {
            f"host{number}": {
                "checkpoint_root": f"{self.folder}/srv{1 if self.shared else number}",
                self.address: f"127.0.0.{number}",
            }
            for number in (1, 2)
        }
        common = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "checkpoint_repository": "lab/tiny",
            "checkpoint_revision": self.commit,
            "checkpoint_endpoint": self.hub.endpoint,
            "checkpoint_scope": "all",
            "checkpoint_allow_tmpfs": True,
            "checkpoint_exchange_port": self.port,
            **self.variables,
        }
        (self.folder / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts, "vars": common}}))
        (self.folder / "play.yml").write_text(PLAYBOOK)
        environment = os.environ | {
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCAL_TEMP": str(self.folder / "tmp"),
        }
        command = [sys.executable, "-m", "ansible", "playbook", "-i", "hosts.json", "play.yml", *arguments]
        done = subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is ok, done.stdout + done.stderr
        return done.stdout

    def held(self, number: int) -> dict[str, bytes]:
        dest = self.folder / f"srv{number}" / "lab--tiny" / self.commit
        paths = [path for path in dest.rglob("*") if path.is_file()]
        names = {path.relative_to(dest).as_posix(): path.read_bytes() for path in paths}
        return {name: data for name, data in names.items() if not name.startswith((".kimi-k3", "checkpoint.json"))}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    from lab_hub import Hub, make_repo  # noqa: PLC0415

    numbers = random.Random(3)
    files = {f"part-{number}.bin": numbers.randbytes(300_000) for number in range(6)} | {"config.json": b"{}"}
    commit = make_repo(tmp_path / "repositories", "lab/tiny", files)
    with Hub(tmp_path / "repositories") as hub:
        yield Hosts(tmp_path, hub, commit, files)
