# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the deployment left on the hosts."""

from __future__ import annotations

import json

import pytest

testinfra_hosts = ["ansible://kimi_k3"]


@pytest.fixture
def rank(host):
    return int(host.ansible.get_variables()["serve_rank"])


def test_the_unit_runs_and_starts_at_boot(host):
    unit = host.service("kimi-k3.service")
    assert unit.is_running, host.run("journalctl -u kimi-k3 -n 100 --no-pager").stdout
    assert unit.is_enabled


def test_the_unit_has_the_limits_and_the_restart_policy(host):
    properties = host.service("kimi-k3.service").systemd_properties
    expected = {
        "Type": "notify",
        "User": "kimi-k3",
        "LimitMEMLOCK": "infinity",
        "LimitNOFILE": "1048576",
        "Restart": "always",
        "RestartPreventExitStatus": "78",
        "KillMode": "control-group",
        "NoNewPrivileges": "yes",
        "ProtectHome": "yes",
    }
    assert {name: properties[name] for name in expected} == expected
    assert properties["NRestarts"] == "0"


def test_the_agent_is_the_main_process_and_vllm_its_child(host, rank):
    pid = host.service("kimi-k3.service").systemd_properties["MainPID"]
    assert "rank_agent.py" in host.file(f"/proc/{pid}/cmdline").content_string
    status = json.loads(host.file("/run/kimi-k3/status.json").content_string)
    assert status["state"] == "serving"
    assert status["rank"] == rank
    child = host.file(f"/proc/{status['child_pid']}/cmdline").content_string.split("\0")
    assert "serve" in child
    assert ("--headless" in child) == (rank == 1)
    assert child[child.index("--node-rank") + 1] == str(rank)
    assert child[child.index("--pipeline-parallel-size") + 1] == "2"


def test_the_ports_listen_where_they_should(host, rank):
    address = host.ansible.get_variables()["ansible_host"]
    assert host.socket("tcp://0.0.0.0:8000").is_listening == (rank == 0)
    assert host.socket(f"tcp://{address}:29500").is_listening == (rank == 0)


def test_each_host_holds_only_its_stage(host, rank):
    folder = json.loads(host.file("/etc/kimi-k3/rank.json").content_string)["argv"][2]
    statement = json.loads(host.file(f"{folder}/checkpoint.json").content_string)
    assert statement["scope"] == "stage"
    assert statement["stages"] == [rank]
    index = json.loads(host.file(f"{folder}/model.safetensors.index.json").content_string)
    there = {name.rsplit("/", 1)[-1] for name in host.run(f"ls {folder}/*.safetensors").stdout.split()}
    assert set(index["weight_map"].values()) == there
    pristine = json.loads(host.file(f"{folder}/.kimi-k3/model.safetensors.index.json").content_string)
    assert there < set(pristine["weight_map"].values())


@pytest.mark.parametrize("path", ["/etc/kimi-k3/group.secret"])
def test_secrets_are_roots_alone(host, path):
    file = host.file(path)
    assert (file.user, file.mode) == ("root", 0o600)


def test_no_secret_is_told_anywhere(host):
    secret = host.file("/etc/kimi-k3/group.secret").content_string.strip()
    assert len(secret) >= 32
    pid = host.service("kimi-k3.service").systemd_properties["MainPID"]
    places = [
        host.run("journalctl -u kimi-k3 --no-pager").stdout,
        host.run("systemctl show kimi-k3").stdout,
        host.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout,
        host.file(f"/proc/{pid}/environ").content_string,
        host.run(
            "cat /run/kimi-k3/status.json /etc/kimi-k3/rank.json /etc/kimi-k3/serve.env /etc/kimi-k3/digest"
        ).stdout,
    ]
    assert all(places)
    assert not [place for place in places if secret in place]
