# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ranks that differ never start, and say what differs on which host."""

from __future__ import annotations

import json

import pytest
from replica import playbook

CONVERGE = "molecule/serve/converge.yml"


@pytest.fixture(autouse=True)
def mended(replica):
    """Every test leaves the group serving."""
    replica.wait_serving()
    yield
    playbook(CONVERGE)
    replica.wait_serving()


def edit(rank, path, code):
    """Change a JSON document on a host by a line of Python that sees it as C(d)."""
    rank.run(f"python3 -c \"import json; p='{path}'; d=json.load(open(p)); {code}; json.dump(d, open(p, 'w'))\"")


RANK, RECEIPT, STATEMENT = (
    "/etc/scenario-serve/rank.json",
    "/opt/scenario-serve/venv/engine.json",
    "/srv/scenario-serve/checkpoint.json",
)


@pytest.mark.parametrize(
    ("key", "value", "path", "code"),
    [
        ("engine.vllm", "0.31.0", RECEIPT, "d['versions']['vllm'] = '0.31.0'"),
        ("argument.--max-model-len", "1024", RANK, "d['identity']['argument.--max-model-len'] = '1024'"),
        (
            *("environment.VLLM_PP_LAYER_PARTITION", "2,4", RANK),
            "d['identity']['environment.VLLM_PP_LAYER_PARTITION'] = '2,4'",
        ),
        ("checkpoint", "f" * 64, STATEMENT, f"d['identity_digest'] = '{'f' * 64}'"),
    ],
)
def test_ranks_that_differ_stay_down_and_say_why(replica, key, value, path, code):
    replica.ranks[1].run(f"cp -a {path} {path}.before")
    edit(replica.ranks[1], path, code)
    for rank in replica.ranks:
        rank.run("systemctl restart --no-block scenario-serve")
    try:
        replica.wait(
            "both units have failed", lambda: all(rank.property("ActiveState") == "failed" for rank in replica.ranks)
        )
    finally:
        replica.ranks[1].run(f"mv {path}.before {path}")
    for rank in replica.ranks:
        assert rank.property("ExecMainStatus") == "78"
        status = rank.status()
        assert status["state"] == "mismatch"
        for word in (key, value, "rank0", "rank1"):
            assert word in status["text"]
            assert word in rank.journal()
    # What failed is told by the playbooks as well, at once and not at the end of their patience.
    output = playbook("playbooks/status.yml", "-e", "@molecule/serve/vars/main.yml", expect=2)
    assert key in output


def test_the_controller_refuses_differing_hosts_before_it_touches_a_running_group(replica):
    pids = replica.pids()
    edit(replica.ranks[1], RECEIPT, "d['versions']['vllm'] = '0.31.0'")
    try:
        output = " ".join(playbook(CONVERGE, expect=2).split())
        assert "engine.vllm differs between the hosts: rank0 has" in output
        assert "rank1 has 0.31.0" in output
        assert replica.pids() == pids
    finally:
        edit(replica.ranks[1], RECEIPT, f"d['versions']['vllm'] = '{version(replica)}'")


def version(replica):
    return json.loads(replica.ranks[0].run(f"cat {RECEIPT}"))["versions"]["vllm"]


@pytest.mark.parametrize("path", [RECEIPT, STATEMENT])
def test_a_host_that_lacks_a_part_is_told_what_to_run(replica, path):
    pids = replica.pids()
    replica.ranks[1].run(f"mv {path} {path}.aside")
    try:
        output = " ".join(playbook(CONVERGE, expect=2).split())
        assert "run the playbook" in output
        assert replica.pids() == pids
    finally:
        replica.ranks[1].run(f"mv {path}.aside {path}")


def test_a_rank_without_the_secret_is_not_let_in(replica):
    replica.ranks[1].run("echo another-secret-altogether > /etc/scenario-serve/group.secret")
    before = replica.generation()
    replica.ranks[1].run("systemctl restart --no-block scenario-serve")
    replica.wait(
        "rank 1 says so", lambda: "secret" in replica.ranks[1].status().get("text", "") + replica.ranks[1].journal(20)
    )
    assert replica.generation() == before
    assert not replica.serving()
