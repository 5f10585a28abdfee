# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Variables that contradict each other are refused on the controller, each with one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]
PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: baremetal.kimi_k3.checkpoint, tasks_from: validate.yml}
"""

# A host for each case, so that one run does for all.
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "defaults": ({}, None),
    "second-stage": ({"checkpoint_stages": [1]}, None),
    "text-numbers": ({"checkpoint_stages": ["1"], "checkpoint_layers": "93"}, None),
    "whole": ({"checkpoint_scope": "all", "checkpoint_layers": 6, "checkpoint_pipeline_layers": []}, None),
    "misspelt": ({"checkpoint_conections": 4}, "did you mean checkpoint_connections?"),
    "branch": ({"checkpoint_revision": "main"}, "checkpoint_revision is 'main': it must be the 40 hexadecimal digits"),
    "short": ({"checkpoint_revision": "f831ab6"}, "checkpoint_revision is 'f831ab6'"),
    "repository": ({"checkpoint_repository": "../x"}, "checkpoint_repository is '../x'"),
    "scope": ({"checkpoint_scope": "half"}, "checkpoint_scope is 'half': it must be stage or all."),
    "rolling": ({"checkpoint_verify": "rolling", "checkpoint_source": "present", "checkpoint_endpoint": ""}, None),
    "source": ({"checkpoint_source": "torrent"}, "checkpoint_source is 'torrent': it must be hub or present."),
    "mirror": ({"checkpoint_mirrors": ["http://m", "ftp://m"]}, "checkpoint_mirrors must be a list of http or https"),
    "exchange": ({"checkpoint_exchange": "yes"}, "checkpoint_exchange is 'yes': it must be auto, always or never."),
    "port": ({"checkpoint_exchange_port": 0}, "checkpoint_exchange_port is '0': it must be a TCP port"),
    "shared": ({"checkpoint_shared": True, "checkpoint_stages": [1]}, None),
    "shared-exchange": (
        {"checkpoint_shared": True, "checkpoint_exchange": "always"},
        "checkpoint_shared needs checkpoint_exchange auto or never (it is 'always')",
    ),
    "shared-keep": (
        {"checkpoint_shared": True, "checkpoint_keep_revisions": 2},
        "checkpoint_keep_revisions 0 (it is 2), since a host cannot see which revisions the others use",
    ),
    "verify": ({"checkpoint_verify": "never"}, "checkpoint_verify is 'never'"),
    "relative": ({"checkpoint_root": "srv"}, "it must be an absolute path"),
    "upwards": ({"checkpoint_path": "/srv/../etc"}, "it must be an absolute path"),
    "password": ({"checkpoint_endpoint": "https://me:secret@hub"}, "checkpoint_endpoint must be an http or https URL"),
    "sum": ({"checkpoint_layers": 6}, "sum to checkpoint_layers, which is 6."),
    "zero": ({"checkpoint_pipeline_layers": [93, 0]}, "must be whole numbers above 0"),
    "empty": ({"checkpoint_pipeline_layers": []}, "must be whole numbers above 0"),
    "stage": ({"checkpoint_stages": [2]}, "stages are counted from 0 to 1."),
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("validate")
    (folder / "play.yml").write_text(PLAYBOOK)
    hosts = {name: variables for name, (variables, _message) in CASES.items()}
    (folder / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
    command = [sys.executable, "-m", "ansible", "playbook", "-i", str(folder / "hosts.json"), str(folder / "play.yml")]
    environment = os.environ | {
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        "ANSIBLE_CALLBACK_FORMAT_PRETTY": "0",
        # A host of this play cannot be reached: nothing here may try.
        "ANSIBLE_REMOTE_PORT": "9",
        "ANSIBLE_TIMEOUT": "1",
    }
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert "unreachable=0" in done.stdout, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("case", list(CASES))
def test_what_is_refused_and_why(output: str, case: str) -> None:
    message = CASES[case][1]
    (line,) = [line for line in output.splitlines() if line.startswith(f"fatal: [{case}]")] or [None]
    if message is None:
        assert line is None
        return
    assert line is not None
    told = json.loads(line.partition("=> ")[2] or "{}")["msg"]
    assert message in told
    assert "secret" not in told
