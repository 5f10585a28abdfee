# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whose turn it is to be rebooted, on this machine as both hosts.

Ansible's module refuses to reboot what it reaches without a connection, the controller: here that is a host that did
not come back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[4]
REFUSED = "would reboot the control node"


def play(tmp_path, **changes):
    host = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": sys.executable,
        "__cuda_plan": {"reboot": "driver 570.1 runs and 580.1 is installed"},
        "__cuda_observed": {"gpus": [], "modules": []},
        "cuda_reboot": "when_needed",
    }
    inventory = {"all": {"hosts": {"gpu-a": {**host, **changes}, "gpu-b": host}}}
    (tmp_path / "hosts.json").write_text(json.dumps(inventory))
    role = {"name": "baremetal.kimi_k3.cuda", "tasks_from": "reboot.yml"}
    tasks = [
        {"name": "Fail where it is asked for", "ansible.builtin.fail": {}, "when": "broken | default(false)"},
        {"name": "Reboot", "ansible.builtin.import_role": role},
    ]
    plays = [{"name": "Reboot", "hosts": "all", "gather_facts": False, "tasks": tasks}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False))
    run = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", tmp_path / "hosts.json", tmp_path / "play.yml"],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_FORCE_COLOR": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2, run.stdout + run.stderr
    return " ".join((run.stdout + run.stderr).split())


def test_a_host_that_does_not_come_back_keeps_the_next_one_up(tmp_path):
    output = play(tmp_path)
    assert output.count(f"msg: Running ansible.builtin.reboot with local connection {REFUSED}") == 1, output
    assert "must be rebooted (driver 570.1 runs and 580.1 is installed), but gpu-" in output
    assert "failed in this run or cannot be reached: it is not rebooted too." in output


def test_a_host_that_failed_before_keeps_the_next_one_up(tmp_path):
    output = play(tmp_path, broken=True)
    assert "gpu-b must be rebooted (driver 570.1 runs and 580.1 is installed), but gpu-a failed in this run" in output
    assert REFUSED not in output
