# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What role fabric leaves on real hosts whose ports are those of a tree."""

from __future__ import annotations

import re

import pytest
from replica import playbook

CONVERGE = "molecule/fabric/converge.yml"
BASE = "/srv/scenario-fabric"


@pytest.fixture(params=[0, 1])
def rank(replica, request):
    return replica.ranks[request.param]


def test_the_environment_names_the_rails_and_the_interface(rank):
    text = rank.run(f"cat {BASE}/fabric.env")
    assert 'NCCL_IB_HCA="=' + ",".join(f"mlx5_{n}:1" for n in range(4, 12)) + '"' in text
    interface = rank.run("ip -o route get 198.18.255.1 | sed 's/.* dev \\([^ ]*\\).*/\\1/'").strip()
    assert f'GLOO_SOCKET_IFNAME="{interface}"' in text
    assert f'NCCL_SOCKET_IFNAME="={interface}"' in text


def test_modules_are_loaded_now_and_at_boot(rank):
    loaded = rank.run(f"cut -d' ' -f1 {BASE}/node/proc/modules").split()
    kept = rank.run("grep -v '^#' /etc/modules-load.d/kimi-k3-fabric.conf").split()
    assert kept[0] == "ib_umad"
    assert set(kept) <= set(loaded)


def test_the_tools_are_there(rank):
    assert "ok installed" in rank.run("dpkg-query --show --showformat='${Status}' ibverbs-utils")


def test_a_host_that_is_right_costs_one_execution(replica):
    output = playbook(CONVERGE, "-vvv")
    assert len(re.findall(r"^<[^>]+> SSH: EXEC", output, re.MULTILINE)) == 2
    assert re.findall(r"^rank\d .*changed=(\d+) .*failed=(\d+)", output, re.MULTILINE) == [("0", "0"), ("0", "0")]


def test_a_rail_that_falls_over_is_told_and_left_out(replica):
    rank = replica.ranks[1]
    port = f"{BASE}/node/sys/class/infiniband/mlx5_7/ports/1"
    rank.run(f"echo '1: DOWN' > {port}/state")
    output = playbook(CONVERGE, "--diff")
    assert "Broken: mlx5_7 port 1 is DOWN / LinkUp, a rail must be ACTIVE / LinkUp." in " ".join(output.split())
    assert "mlx5_7" not in rank.run(f"cat {BASE}/fabric.env")
    rank.run(f"echo '4: ACTIVE' > {port}/state")
    playbook(CONVERGE)
    assert "mlx5_7" in rank.run(f"cat {BASE}/fabric.env")


def test_access_control_services_are_cleared_by_a_unit_on_request(replica):
    output = playbook(CONVERGE, "-e", "fabric_acs=disable")
    assert "failed=1" not in output
    for rank in replica.ranks:
        assert rank.run("systemctl is-enabled kimi-k3-acs").strip() == "enabled"
        assert rank.run("systemctl is-active kimi-k3-acs").strip() == "active"
        assert "bridges cleared" in rank.run("journalctl -u kimi-k3-acs --no-pager")
    again = playbook(CONVERGE, "-e", "fabric_acs=disable")
    assert re.findall(r"^rank\d .*changed=(\d+)", again, re.MULTILINE) == ["0", "0"]


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("fabric_acs=off", "value of fabric_acs must be one of: observe, disable"),
        ("fabric_ofed=doca", "set fabric_doca_repository to the address of its apt repository"),
        ("fabric_rial_count=8", "'fabric_rial_count' is no variable of role fabric: did you mean fabric_rail_count?"),
    ],
)
def test_a_mistake_is_one_sentence(replica, variable, sentence):
    output = " ".join(playbook(CONVERGE, "-e", variable, expect=2).split())
    assert sentence in output
