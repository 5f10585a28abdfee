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


def test_ports_that_came_with_their_module_are_in_the_first_environment(replica):
    """What the first run wrote is what the second would: the group is not restarted for a rail that was there."""
    for rank in replica.ranks:
        rank.run(
            f"mv {BASE}/node/sys/class/infiniband {BASE}/node/infiniband; "
            f"sed -i '/^mlx5_ib /d' {BASE}/node/proc/modules; rm {BASE}/fabric.env"
        )
    playbook(CONVERGE)
    for rank in replica.ranks:
        assert 'NCCL_IB_HCA="=mlx5_4:1,' in rank.run(f"cat {BASE}/fabric.env")
    again = playbook(CONVERGE)
    assert re.findall(r"^rank\d .*changed=(\d+)", again, re.MULTILINE) == ["0", "0"]


def test_peermem_is_kept_for_a_driver_that_is_still_to_come(replica):
    playbook(CONVERGE, "-e", "fabric_gpudirect=peermem")
    for rank in replica.ranks:
        assert "nvidia_peermem" in rank.run("cat /etc/modules-load.d/kimi-k3-fabric.conf").splitlines()
        assert "nvidia_peermem" not in rank.run(f"cat {BASE}/node/proc/modules")
        assert 'NCCL_DMABUF_ENABLE="0"' in rank.run(f"cat {BASE}/fabric.env")
    playbook(CONVERGE)


def test_the_iommu_passes_through_from_the_next_boot_on(replica):
    """A group that translates, as on a host booted without iommu=pt; GRUB is a stand-in."""
    rank = replica.ranks[1]
    group = f"{BASE}/node/sys/kernel/iommu_groups/7"
    unit = f"mkdir -p {group} {BASE}/node/sys/class/iommu/dmar0; echo DMA-FQ > {group}/type"
    try:
        rank.run(unit)
        failed = playbook(CONVERGE, "-e", "fabric_iommu=passthrough", expect=2)
        assert "but update-grub failed on rank1" in " ".join(failed.split())
        assert not rank.run("ls /etc/default/grub.d/60-kimi-k3-fabric.cfg", check=False)
        rank.run(f"printf '#!/bin/sh\necho called >> {BASE}/grub\n' > {BASE}/node/bin/update-grub")
        rank.run(f"chmod +x {BASE}/node/bin/update-grub")
        output = playbook(CONVERGE, "-e", "fabric_iommu=passthrough")
        assert "The IOMMU translates: reboot." in " ".join(output.split())
        assert "iommu=pt" in rank.run("cat /etc/default/grub.d/60-kimi-k3-fabric.cfg")
        again = playbook(CONVERGE, "-e", "fabric_iommu=passthrough")
        assert re.findall(r"^rank\d .*changed=(\d+)", again, re.MULTILINE) == ["0", "0"]
        assert rank.run(f"cat {BASE}/grub") == "called\n"
    finally:
        rank.run(f"rm -r {BASE}/node/sys/kernel {BASE}/node/sys/class/iommu/dmar0", check=False)
        rank.run("rm -f /etc/default/grub.d/60-kimi-k3-fabric.cfg", check=False)


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
    # Asked for the first time, what would be done can be looked at: there is no unit yet to be started.
    playbook(CONVERGE, "-e", "fabric_acs=disable", "--check", "--diff")
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
        ("fabric_iommu=off", "value of fabric_iommu must be one of: observe, passthrough"),
        ("fabric_acs=off", "value of fabric_acs must be one of: observe, disable"),
        ("fabric_ofed=doca", "set fabric_doca_repository to the address of its apt repository"),
        ("fabric_rial_count=8", "'fabric_rial_count' is no variable of role fabric: did you mean fabric_rail_count?"),
    ],
)
def test_a_mistake_is_one_sentence(replica, variable, sentence):
    output = " ".join(playbook(CONVERGE, "-e", variable, expect=2).split())
    assert sentence in output
