# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role leaves on the hosts."""

from __future__ import annotations

import json

import pytest

testinfra_hosts = ["ansible://kimi_k3"]

INDEX = "model.safetensors.index.json"


@pytest.fixture
def rank(host):
    return int(host.ansible.get_variables()["serve_rank"])


def test_every_file_has_the_digest_of_the_listing(converged):
    assert converged.names()
    assert converged.wrong() == []


def test_each_host_holds_its_stage_and_says_so(converged, rank):
    index = json.loads(converged.host.file(f"{converged.path}/{INDEX}").content_string)
    pristine = converged.read(INDEX)
    held = {name for name in converged.names() if name.endswith(".safetensors")}
    assert set(index["weight_map"].values()) == held
    assert held < set(pristine["weight_map"].values())
    layers = {int(name.split(".")[2]) for name in index["weight_map"] if name.startswith("model.layers.")}
    assert layers >= set([range(4), range(4, 6)][rank])
    summary = json.loads(converged.host.file(f"{converged.path}/checkpoint.json").content_string)
    assert summary["scope"] == "stage"
    assert summary["stages"] == [rank]
    assert summary["pipeline_layers"] == [4, 2]
    assert summary["files"] == len(converged.names()) - 1


def test_everybody_may_read_and_nobody_but_root_write(converged):
    found = converged.host.check_output(f"find {converged.path} -printf '%U %m %y\\n' | sort -u").splitlines()
    assert set(found) == {"0 755 d", "0 644 f"}


def test_nothing_is_left_on_the_way(converged):
    assert converged.host.run(f"find {converged.private}/parts {converged.private}/bad -type f").stdout == ""
    assert converged.read("progress.json")["state"] == "done"


def test_another_run_asks_the_hub_nothing(converged, hub, rank):
    result = converged.hold(scope="stage", pipeline_layers=[4, 2], stages=[rank], layers=6, language_model_only=True)
    assert not result["changed"]
    assert result["verified"].startswith("receipt (hashed ")
    address = converged.host.ansible.get_variables()["ansible_host"]
    assert [line for line in hub.requests("tree") + hub.requests("resolve") if line["client"] == address] == []


def test_all_hosts_hold_the_same_checkpoint(converged, rank, identities):
    summary = json.loads(converged.host.file(f"{converged.path}/checkpoint.json").content_string)
    identities[rank] = summary["identity_digest"]
    assert len(set(identities.values())) == 1
