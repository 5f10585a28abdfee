# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbooks status and logs with one host that answers and has nothing, and one that refuses every connection."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
KEY = "a-key-that-nobody-may-see"


@pytest.fixture
def play(tmp_path):
    inventory = {
        "kimi_k3": {
            "hosts": {
                "gpu-a": {"serve_rank": 1, "ansible_connection": "local", "ansible_become": False},
                # The first of the play is the one that is away.
                "a-way": {"serve_rank": 0, "ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_connection": "ssh"},
            },
            "vars": {
                "ansible_python_interpreter": sys.executable,
                "serve_unit": "no-such-unit-here.service",
                "serve_api_key": KEY,
                "serve_unit_extra": {"PrivateTmp": "no"},
                "vllm_venv": str(tmp_path / "venv"),
                "checkpoint_path": str(tmp_path / "checkpoint"),
            },
        }
    }
    (tmp_path / "inventory.json").write_text(json.dumps(inventory))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "checkpoint.json").write_text(
        json.dumps({"repository": "lab/x", "revision": "0" * 40, "scope": "all", "says": f"Bearer {KEY}"})
    )

    def run(playbook, *words):
        return subprocess.run(
            [Path(sys.executable).parent / "ansible-playbook", "-i", tmp_path / "inventory.json", playbook, *words],
            cwd=ROOT,
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_FORCE_COLOR": "0"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_the_screen_is_shown_and_the_exit_status_tells(play):
    run = play("playbooks/status.yml")
    assert run.returncode == 2, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    start = lines.index("NOT READY: 0 of 2 ranks of kimi_k3 serve. rank 0 (a-way) is unreachable; rank 1")
    assert lines[start + 1] == "(gpu-a) is not deployed."
    assert lines[start + 4].split()[:3] == ["0", "a-way", "unreachable"]
    assert lines[start + 5].split()[:4] == ["1", "gpu-a", "not", "deployed"]
    assert "lab/x@00000000 all" in run.stdout
    assert "rank 0 (a-way): " in run.stdout
    assert "Traceback" not in run.stdout + run.stderr


def test_one_line_is_json_and_so_is_the_file(play, tmp_path):
    told = tmp_path / "status.json"
    run = play("playbooks/status.yml", "-e", "status_format=json", "-e", f"status_file={told}")
    assert run.returncode == 2, run.stdout + run.stderr
    found = [line for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 1
    assert json.loads(found[0]) == json.loads(told.read_text())
    document = json.loads(found[0])
    assert (document["ready"], document["ranks"], document["ready_ranks"]) == (False, 2, 0)
    assert [row["state"] for row in document["rows"]] == ["unreachable", "not deployed"]
    assert document["rows"][1]["checkpoint"]["repository"] == "lab/x"
    assert KEY not in run.stdout


def test_a_file_that_cannot_be_written_is_one_sentence(play, tmp_path):
    run = play("playbooks/status.yml", "-e", f"status_file={tmp_path}/nothing/status.json")
    assert run.returncode == 2
    output = " ".join((run.stdout + run.stderr).split())
    assert f"The status cannot be written to '{tmp_path}/nothing/status.json' (status_file)" in output


def test_a_bundle_is_made_without_the_host_that_is_away(play, tmp_path):
    run = play("playbooks/logs.yml", "-e", f"logs_dir={tmp_path}/out")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "nothing from a-way, its MANIFEST.txt says why" in " ".join(run.stdout.split())
    assert "changed=0" in run.stdout
    [path] = (tmp_path / "out").iterdir()
    assert path.name.startswith("kimi-k3-logs-kimi_k3-20")
    assert path.name.endswith("Z.tar.gz")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as opened:
        content = {entry.name.split("/", 1)[1]: opened.extractfile(entry).read().decode() for entry in opened}
    assert "host a-way: 0 files\n  UNREACHABLE, nothing was gathered: " in content["MANIFEST.txt"]
    assert "NOT READY" in content["controller/status.txt"]
    assert json.loads(content["controller/status.json"])["ready"] is False
    assert json.loads(content["hosts/gpu-a/checkpoint.json"])["says"] == "Bearer <removed>"
    assert not [name for name, text in content.items() if KEY in text]
