# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Environments that break, locks that differ, builds that fail."""

from __future__ import annotations

import json
import re

import pytest
from replica import ROOT, Replica, playbook

CONVERGE = "molecule/vllm/converge.yml"
VENV = "/opt/scenario-vllm/venv"
LOCKS = ROOT / ".cache" / "scenario-vllm"


@pytest.fixture(scope="module")
def ranks():
    return Replica().ranks


def targets(ranks):
    return [rank.run(f"readlink {VENV}").strip() for rank in ranks]


@pytest.fixture(autouse=True)
def mended(ranks):
    yield
    playbook(CONVERGE)


def test_broken_environment_is_rebuilt_beside_the_one_in_use(ranks):
    before = targets(ranks)
    ranks[0].run(f"systemd-run --unit=scenario-vllm-user {before[0]}/bin/python -c 'import time; time.sleep(3600)'")
    try:
        ranks[0].run(f"rm {VENV}/lib/python3*/site-packages/idna/core.py")
        told = playbook(CONVERGE, "--check", "--diff")
        assert "is broken: lib/python3.11/site-packages/idna/core.py is missing" in told
        assert targets(ranks) == before
        playbook(CONVERGE)
        assert targets(ranks) == [f"{before[0]}-1", before[1]]
        # The one in use was neither mended nor removed.
        ranks[0].run(f"test -e {before[0]}/bin/python && ! test -e {before[0]}/lib/python3*/site-packages/idna/core.py")
        assert "changed=0" in playbook(CONVERGE)
    finally:
        ranks[0].run("systemctl stop scenario-vllm-user")


def test_other_lock_on_one_host_is_refused_and_named(ranks, tmp_path):
    before = targets(ranks)
    other = tmp_path / "other.yml"
    other.write_text(
        f"vllm_lock: \"{{{{ '{LOCKS}/other.lock' if inventory_hostname == 'rank1' else '{LOCKS}/small.lock' }}}}\"\n"
    )
    told = " ".join(playbook(CONVERGE, "-e", f"@{other}", expect=2).split())
    assert "rank1 would get another engine than rank0" in told
    assert targets(ranks) == before


def test_build_that_fails_leaves_the_old_one_and_names_the_package(ranks):
    before = targets(ranks)
    told = playbook(CONVERGE, "-e", json.dumps({"vllm_lock": f"{LOCKS}/wrong.lock"}), expect=2)
    for name in ("rank0", "rank1"):
        assert f"[{name}]: FAILED" in told
    for installer in ("uv", "pip"):
        assert re.search(rf"could not be installed by {installer}: idna==\S+ is not the file that the lock pins", told)
    assert targets(ranks) == before
    for rank in ranks:
        assert "0.32.0" in rank.run(
            f"{VENV}/bin/python -c \"import importlib.metadata as m; print(m.version('vllm'))\""
        )
        assert rank.run("ls -A /opt/scenario-vllm").split() == ["venv", "venvs"]


def test_lock_that_is_right_everywhere_is_swapped_in_and_back(ranks):
    before = targets(ranks)
    playbook(CONVERGE, "-e", json.dumps({"vllm_lock": f"{LOCKS}/other.lock"}))
    there = targets(ranks)
    assert there[0] == there[1]
    assert there[0] not in before
    playbook(CONVERGE)
    assert targets(ranks) == before


def test_directory_that_others_made_is_refused(ranks):
    ranks[1].run("mkdir -p /opt/scenario-vllm/theirs/bin")
    told = " ".join(playbook(CONVERGE, "-e", "vllm_venv=/opt/scenario-vllm/theirs", expect=2).split())
    assert "/opt/scenario-vllm/theirs is a directory that was not made by this module" in told
    ranks[1].run("test -d /opt/scenario-vllm/theirs/bin")
    for rank in ranks:
        rank.run("rm -rf /opt/scenario-vllm/theirs /opt/scenario-vllm/theirss")
