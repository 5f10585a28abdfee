# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's hub, told to misbehave, and the module on a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
INVENTORY = ROOT / "inventory" / "lab" / "hosts.yml"
SCENARIO = "/srv/scenario-checkpoint"

os.environ.setdefault("ANSIBLE_CONFIG", str(ROOT / "ansible.cfg"))
os.environ.setdefault("ANSIBLE_COLLECTIONS_PATH", str(ROOT / ".collections"))


class Hub:
    """The hub as the lab's own machine reaches it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def _call(self, method: str, path: str, data: dict[str, Any] | None = None) -> Any:
        body = json.dumps(data).encode() if data is not None else None
        request = urllib.request.Request(f"{self.endpoint}/_lab/{path}", data=body, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.endpoint + path, timeout=10) as answer:
            return json.load(answer)

    def fault(self, kind: str, **options: Any) -> None:
        self._call("POST", "faults", {"kind": kind, **options})

    def behave(self) -> None:
        self._call("DELETE", "faults")

    def forget(self) -> None:
        self._call("DELETE", "log")

    def requests(self, where: str, path: str | None = None) -> list[dict[str, Any]]:
        log = self._call("GET", "log")["requests"]
        return [line for line in log if line["where"] == where and path in (None, line["path"])]

    def sent(self) -> dict[str, int]:
        """Bytes of each file that left the hub."""
        total: dict[str, int] = {}
        for where in ("cdn", "resolve"):
            for line in self.requests(where):
                total[line["path"]] = total.get(line["path"], 0) + line["bytes"]
        return total

    def sizes(self, variables: dict[str, Any]) -> dict[str, int]:
        """All files of the revision."""
        tree = f"{variables['checkpoint_repository']}/tree/{variables['checkpoint_revision']}?recursive=true"
        return {item["path"]: item["size"] for item in self.get(f"/api/models/{tree}") if item["type"] == "file"}


PLAY = """
- hosts: kimi_k3
  gather_facts: false
  any_errors_fatal: true
  tasks:
    - ansible.builtin.import_role: {name: baremetal.kimi_k3.checkpoint}
"""


class Play:
    """The role on both hosts, by the command line that a person would use."""

    root = ROOT

    def __init__(self, folder: Path, hosts: list[Any]) -> None:
        self.hosts = hosts
        self.variables: dict[str, Any] = {}
        self.file = folder / "play.yml"
        self.file.write_text(PLAY)

    def command(self, *arguments: str, **variables: Any) -> list[str]:
        values = {
            "checkpoint_scope": "all",
            "checkpoint_layers": 6,
            "checkpoint_pipeline_layers": [4, 2],
            **self.variables,
            **variables,
        }
        return [
            *(sys.executable, "-m", "ansible", "playbook", "-i", str(INVENTORY), str(self.file)),
            *("-e", json.dumps(values), *arguments),
        ]

    def run(self, *arguments: str, **variables: Any) -> str:
        done = subprocess.run(
            self.command(*arguments, **variables),
            cwd=ROOT,
            env={**os.environ, "ANSIBLE_FORCE_COLOR": "0", "ANSIBLE_NOCOLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class Destination:
    """One directory on one host, and the module that fills it."""

    def __init__(self, host: Any, variables: dict[str, Any], path: str) -> None:
        self.host = host
        self.path = path
        self.private = f"{path}/.kimi-k3"
        self.options = {
            "repository": variables["checkpoint_repository"],
            "revision": variables["checkpoint_revision"],
            "endpoint": variables["checkpoint_endpoint"],
            "dest": path,
            "timeout": 5,
            "retries": 2,
        }

    def hold(self, check: bool = False, **changes: Any) -> dict[str, Any]:
        """The module's result, also when it failed."""
        arguments = json.dumps({**self.options, **changes})
        try:
            result = self.host.ansible("baremetal.kimi_k3.hf_checkpoint", arguments, check=check)
        except self.host.ansible.AnsibleException as error:
            result = error.result
        # Not every ansible-core says "failed" in the file that testinfra reads.
        return {"failed": "plan_digest" not in result, **result}

    def names(self) -> set[str]:
        """Files under their final names."""
        found = self.host.run(f"cd {self.path} && find . -name .kimi-k3 -prune -o -type f -printf '%P\\n'")
        return set(found.stdout.split()) - {"checkpoint.json"}

    def read(self, name: str) -> Any:
        """A JSON file of the private directory; nothing while it is not there."""
        text = self.host.run(f"cat {self.private}/{name}").stdout
        return json.loads(text) if text else None

    def until(self, condition: Callable[[], Any], seconds: float = 60) -> None:
        """Wait for something on the host."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.1)

    def wrong(self) -> list[str]:
        """Files whose digest, computed by other means, is not that of the listing."""
        names = sorted(self.names() - {"model.safetensors.index.json"})
        if not names:
            return []
        loop = 'for name; do printf "%s %s %s\\n" "$(sha256sum <"$name" | cut -c-64)" "$(blob "$name")" "$name"; done'
        blob = '(printf "blob %s\\0" "$(stat -c %s "$1")"; cat "$1") | sha1sum | cut -c-40'
        script = f"cd {self.path}; blob() {{ {blob}; }}; set -- {' '.join(names)}; {loop}"
        found = {line[106:]: line.split()[:2] for line in self.host.check_output(script).splitlines()}
        assert set(found) == set(names)
        listed = {item["path"]: item for item in self.read("listing.json")["files"]}
        return [name for name in names if not {listed[name]["sha256"], listed[name]["blob"]} & set(found[name])]


@pytest.fixture(scope="session")
def variables() -> dict[str, Any]:
    return yaml.safe_load(INVENTORY.read_text(encoding="utf-8"))["kimi_k3"]["vars"]


@pytest.fixture(scope="session")
def identities() -> dict[str, str]:
    """What each host says that must be equal on all."""
    return {}


@pytest.fixture
def hub(variables: dict[str, Any]) -> Iterator[Hub]:
    hub = Hub(variables["checkpoint_endpoint"])
    hub.behave()
    hub.forget()
    yield hub
    hub.behave()


@pytest.fixture
def both(tmp_path: Path, host: Any) -> Play:
    """The role, on both hosts at once."""
    names = ("rank0", "rank1")
    return Play(tmp_path, [host.get_host(f"ansible://{name}", ansible_inventory=str(INVENTORY)) for name in names])


@pytest.fixture
def empty(host: Any, variables: dict[str, Any]) -> Iterator[Destination]:
    """A destination with nothing in it."""
    path = f"{SCENARIO}/faults"
    host.check_output(f"rm -rf {path}")
    yield Destination(host, variables, path)
    host.check_output(f"rm -rf {path}")


@pytest.fixture
def converged(host: Any, variables: dict[str, Any]) -> Destination:
    """What the role has made."""
    name = variables["checkpoint_repository"].replace("/", "--")
    return Destination(host, variables, f"{SCENARIO}/{name}/{variables['checkpoint_revision']}")
