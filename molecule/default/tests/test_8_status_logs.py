# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One screen of what the ranks do, and the support bundle: with all hosts, with a stopped rank, with a host down."""

from __future__ import annotations

import json
import re
import stat
import tarfile
import urllib.error
import urllib.request

import pytest
from replica import playbook, power

# Neither is a secret of this lab: only the names they stand under tell.
PLANTED = {"token": "planted-Query-1", "api_key": "planted-Query-2"}


def status(*words, expect=0):
    """The document, and what was printed."""
    output = playbook("playbooks/status.yml", *words, expect=expect)
    assert set(re.findall(r"changed=(\d+)", output)) == {"0"}
    return output


def document(expect=0):
    [line] = [line for line in status("-e", "status_format=json", expect=expect).splitlines() if line.startswith("{")]
    return json.loads(line)


@pytest.fixture
def bundle(tmp_path):
    """Makes a bundle and reads it: content by name, without the top folder."""

    def make(*words):
        output = playbook("playbooks/logs.yml", "-e", f"logs_dir={tmp_path}", *words)
        assert set(re.findall(r"changed=(\d+)", output)) == {"0"}
        [path] = tmp_path.glob("kimi-k3-logs-kimi_k3-*Z.tar.gz")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with tarfile.open(path) as opened:
            return {entry.name.split("/", 1)[1]: opened.extractfile(entry).read().decode() for entry in opened}

    return make


def test_a_healthy_replica_is_one_screen_and_exit_status_0(replica, api_key, tmp_path):
    replica.wait_serving()
    file = tmp_path / "status.json"
    output = status("-e", f"status_file={file}")
    generation = replica.generation()
    assert f"READY: all 2 ranks of kimi_k3 serve, generation {generation}." in output.splitlines()
    told = json.loads(file.read_text())
    assert told["ready"] is True
    for row, rank in zip(told["rows"], replica.ranks, strict=True):
        seen = rank.status()
        assert (row["host"], row["rank"], row["state"], row["ready"]) == (rank.name, rank.number, "serving", True)
        assert (row["generation"], row["since"]) == (generation, seen["since"])
        assert row["version"].startswith("0.32.0")
        assert row["configuration"] == rank.run("cat /etc/kimi-k3/digest").strip()
        assert row["checkpoint"]["repository"] == "lab/tiny-k3"
        assert row["rails"] == []
        assert "--pipeline-parallel-size 2" in row["command"]
    assert len({row["arguments"] for row in told["rows"]}) == 1
    assert document()["rows"] == told["rows"]
    assert api_key not in output


def test_a_rank_that_is_stopped_is_told_and_the_exit_status_tells(replica):
    before = replica.generation()
    replica.ranks[1].run("systemctl stop kimi-k3.service")
    told = document(expect=2)
    assert (told["ready"], told["groups"]) == (False, {"kimi_k3": False})
    assert told["rows"][1]["ready"] is False
    assert told["rows"][1]["unit"]["active_state"] == "inactive"
    output = status(expect=2)
    assert "ranks of kimi_k3 serve. " in output
    assert re.search(r"^1 +rank1 +(stopped|inactive) ", output, re.MULTILINE), output
    replica.ranks[1].run("systemctl start --no-block kimi-k3.service")
    replica.wait_serving(after=before)
    assert document()["ready"] is True


def test_a_bundle_has_what_helps_and_no_secret(replica, api_key, bundle):
    replica.wait_serving()
    query = "&".join(f"{name}={value}" for name, value in PLANTED.items())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    # The engine writes the line of each request into the journal, with whatever a client put there.
    with pytest.raises(urllib.error.HTTPError):
        opener.open(f"{replica.url}/v1/models?{query}&known={api_key}", timeout=60)
    head = replica.ranks[0]
    planted = [*PLANTED.values(), api_key]
    journal = f"journalctl -u {head.unit} --no-pager --since=-10min"
    replica.wait("the request is in the journal", lambda: all(word in head.run(journal) for word in planted), 60)
    secrets = [*planted, head.run("cat /etc/kimi-k3/group.secret").strip()]
    pids = replica.pids()
    content = bundle("-e", "logs_hours=2")
    assert replica.pids() == pids
    assert not [(name, word) for name, text in content.items() for word in secrets if word in text]
    for rank in replica.ranks:
        own = {name.split("/", 2)[2]: text for name, text in content.items() if name.startswith(f"hosts/{rank.name}/")}
        assert "rank agent: serving" in own["journal/kimi-k3.service.txt"]
        assert json.loads(own["config/rank.json"])["rank"] == rank.number
        assert "OMP_NUM_THREADS" in own["config/serve.env"]
        assert own["config/digest"].strip() == rank.run("cat /etc/kimi-k3/digest").strip()
        assert json.loads(own["status.json"])["state"] == "serving"
        assert json.loads(own["versions/engine.json"])["versions"]["vllm"].startswith("0.32.0")
        assert json.loads(own["checkpoint.json"])["repository"] == "lab/tiny-k3"
        assert "ExecStart=" in own["unit/cat.txt"]
        assert "ActiveState=active" in own["unit/show.txt"]
        assert "bookworm" in own["versions/os-release"]
    assert "/v1/models?token=<removed>" in content["hosts/rank0/journal/kimi-k3.service.txt"]
    assert "host rank0: " in content["MANIFEST.txt"]
    assert content["controller/status.txt"].startswith("READY: ")
    assert json.loads(content["controller/status.json"])["ready"] is True


def test_a_host_that_is_down_is_told_and_the_others_are_gathered(replica, bundle):
    before = replica.generation()
    power("stop", "rank1")
    try:
        told = document(expect=2)
        output = status(expect=2)
        content = bundle()
    finally:
        power("start", "rank1")
    assert [row["state"] == "unreachable" for row in told["rows"]] == [False, True]
    assert re.search(r"^1 +rank1 +unreachable ", output, re.MULTILINE), output
    assert "host rank1: 0 files\n  UNREACHABLE, nothing was gathered: " in content["MANIFEST.txt"]
    assert "hosts/rank0/journal/kimi-k3.service.txt" in content
    assert not [name for name in content if name.startswith("hosts/rank1/")]
    assert content["controller/status.txt"].startswith("NOT READY: ")
    replica.wait_serving(after=before)
    assert document()["ready"] is True
