# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rule for rails, on trees as tests/fixtures/fake_node.py builds them from public output; it names the sources."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import gpu_look, rdma_facts, rdma_look
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.host_look import Look

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
sys.path.insert(0, str(FIXTURES))

import fake_node as fake

XML = FIXTURES / "h200-vm" / "nvidia-smi-q.xml"
RAILS = [f"mlx5_{number}" for number in range(4, 12)]


@pytest.fixture
def judge(tmp_path):
    def run(hcas=None, *, virtual=False, mode="infiniband", chosen=(), gpus=8, min_rate=400):
        node = fake.Node(tmp_path / "node", XML, hcas, gpus=gpus, tools=False)
        look = Look(lambda *_a, **_k: (1, "", ""), node.arguments["sys_root"], node.arguments["proc_root"])
        devices = rdma_look.gather(look)
        return rdma_facts.judge(
            devices, gpu_look.pci_gpus(look), mode=mode, min_rate=min_rate, virtual=virtual, chosen=chosen
        )

    return run


def names(ports):
    return [port["device"] for port in ports]


def reasons(verdict):
    return {port["device"]: port["reason"] for port in verdict["ports"] if port["reason"]}


def test_management_ports_first(judge):
    verdict = judge()
    assert names(verdict["rails"]) == RAILS
    assert reasons(verdict) == {f"mlx5_{number}": "nvswitch-management" for number in range(4)}
    assert verdict["nccl_ib_hca"] == "=" + ",".join(f"{name}:1" for name in RAILS)
    assert verdict["broken"] == []


def test_management_ports_in_the_middle(judge):
    order = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_8", "mlx5_9", "mlx5_10", "mlx5_11"]
    hcas = [fake.rail(number, name) for number, name in enumerate(order)]
    hcas += [fake.management(function, f"mlx5_{4 + function}") for function in range(4)]
    verdict = judge(hcas)
    assert names(verdict["rails"]) == order
    assert len(reasons(verdict)) == 4


def test_functions_of_the_bridge_that_carry_no_mark(judge):
    """Of four functions two carry the mark; the other two manage the same NVSwitches."""
    hcas = [fake.management(n, f"mlx5_{n}", marked=n < 2) for n in range(4)] + [
        fake.rail(n, f"mlx5_{4 + n}") for n in range(8)
    ]
    verdict = judge(hcas)
    assert names(verdict["rails"]) == RAILS
    assert set(reasons(verdict).values()) == {"nvswitch-management"}


def test_vpd_that_cannot_be_read(judge):
    hcas = [{**hca, "vpd": None} for hca in fake.adapters()]
    verdict = judge(hcas)
    assert names(verdict["rails"]) == RAILS
    assert {reasons(verdict)[f"mlx5_{n}"] for n in range(4)} == {"nvswitch-management"}


def test_storage_adapters_at_full_rate(judge):
    verdict = judge([*fake.adapters(), fake.storage(0, "mlx5_12"), fake.storage(1, "mlx5_13")])
    assert names(verdict["rails"]) == RAILS
    assert reasons(verdict)["mlx5_12"] == "far-from-gpus"
    assert verdict["broken"] == []


def test_names_of_predictable_naming(judge):
    named = [f"ibp{root}s0" for root in ("21", "38", "55", "72", "151", "167", "183", "199")]
    verdict = judge([fake.management(0, "ibp5s0f0"), *[fake.rail(n, name) for n, name in enumerate(named)]])
    assert names(verdict["rails"]) == named
    assert verdict["nccl_ib_hca"].startswith("=ibp21s0:1,")


def test_names_of_azure(judge):
    verdict = judge([fake.rail(n, f"mlx5_ib{n}") for n in range(8)])
    assert names(verdict["rails"]) == [f"mlx5_ib{n}" for n in range(8)]


def test_mlx5_1_beside_mlx5_10(judge):
    order = ["mlx5_1", "mlx5_10", "mlx5_11", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6"]
    value = judge([fake.rail(n, name) for n, name in enumerate(order)])["nccl_ib_hca"]
    assert rdma_facts.matches(value, "mlx5_1", 1)
    assert not rdma_facts.matches(value, "mlx5_12", 1)
    # What the equals sign is for.
    assert rdma_facts.matches("mlx5_1", "mlx5_12", 1)
    assert not rdma_facts.matches("=mlx5_1", "mlx5_12", 1)
    assert not rdma_facts.matches("^=mlx5_1", "mlx5_1", 1)
    assert rdma_facts.matches("^=mlx5_1", "mlx5_2", 1)
    assert not rdma_facts.matches("=mlx5_1:2", "mlx5_1", 1)


def changed(index, **changes):
    hcas = fake.adapters()
    hcas[index].update(changes)
    return hcas


@pytest.mark.parametrize(
    ("changes", "reason", "sentence"),
    [
        ({"rate": "200 Gb/sec (2X NDR)"}, "slow", "mlx5_7 port 1 runs at 200 Gb/s, a rail must have 400."),
        (
            {"state": "1: DOWN", "phys_state": "2: Polling"},
            "down",
            "mlx5_7 port 1 is DOWN / Polling, a rail must be ACTIVE / LinkUp.",
        ),
        (
            {"state": "2: INIT"},
            "down",
            "mlx5_7 port 1 is INIT / LinkUp, a rail must be ACTIVE / LinkUp.",
        ),
        ({"sm_lid": "0x0"}, "not-on-subnet", "mlx5_7 port 1 has no subnet manager (sm_lid 0)."),
    ],
)
def test_a_rail_that_fell_over_is_broken_not_forgotten(judge, changes, reason, sentence):
    verdict = judge(changed(7, **changes))
    assert names(verdict["rails"]) == [name for name in RAILS if name != "mlx5_7"]
    (port,) = verdict["broken"]
    assert (port["device"], port["reason"], port["text"]) == ("mlx5_7", reason, sentence)


def test_a_slow_port_far_from_gpus_is_nobodys_loss(judge):
    hcas = [*fake.adapters(), fake.storage(0, "mlx5_12", rate="100 Gb/sec (4X EDR)", sm_lid="0x0")]
    assert judge(hcas)["broken"] == []


def test_virtual_functions(judge):
    verdict = judge([*fake.adapters(), fake.rail(0, "mlx5_12", vf=True)])
    assert reasons(verdict)["mlx5_12"] == "virtual-function"


def test_roce_and_a_bond(judge):
    gids = [
        ("fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2"),
        ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
    ]
    hcas = [fake.rail(n, f"rocep{n}s0", link_layer="Ethernet", sm_lid="0x0", lid="0x0", gids=gids) for n in range(8)]
    assert judge(hcas)["rails"] == []
    assert set(reasons(judge(hcas)).values()) == {"other-link-layer"}
    assert len(judge(hcas, mode="roce")["rails"]) == 8
    bond = fake.storage(0, "mlx5_bond_0", link_layer="Ethernet")
    member = fake.storage(1, "mlx5_12", link_layer="Ethernet", netdev="ens1np0", bond_member=True)
    verdict = judge([*hcas, bond, member], mode="roce")
    assert reasons(verdict) == {"mlx5_bond_0": "far-from-gpus", "mlx5_12": "bond-member"}


def test_the_gid_that_a_routed_fabric_needs(tmp_path):
    gids = [
        ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1"),
        ("fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2"),
        ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1"),
        ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
    ]
    node = fake.Node(tmp_path / "node", XML, [fake.rail(0, "mlx5_0", link_layer="Ethernet", gids=gids)], tools=False)
    look = Look(lambda *_a, **_k: (1, "", ""), node.arguments["sys_root"], node.arguments["proc_root"])
    port = rdma_look.gather(look)[0]["ports"][0]
    assert rdma_facts.roce_gid_index(port) == 3
    assert [gid["kind"] for gid in port["gids"]] == ["link-local", "link-local", "ipv4", "ipv4"]
    port["gids"] = port["gids"][:2]
    assert rdma_facts.roce_gid_index(port) is None


def test_a_guest_whose_bus_is_flat(judge):
    hcas = [{**fake.rail(n, f"mlx5_{n}"), "path": ["pci0000:00", f"0000:00:{8 + n:02x}.0"]} for n in range(8)]
    assert judge(hcas)["rails"] == []
    assert len(judge(hcas, virtual=True)["rails"]) == 8


def test_a_host_without_rdma(judge):
    assert judge([]) == {"ports": [], "rails": [], "broken": [], "nccl_ib_hca": None, "warnings": []}


def test_rails_are_ordered_by_bus_not_by_name(judge):
    verdict = judge([fake.rail(n, f"mlx5_{7 - n}") for n in range(8)])
    assert names(verdict["rails"]) == [f"mlx5_{7 - n}" for n in range(8)]


def test_the_choice_of_the_operator_wins_and_is_still_checked(judge):
    verdict = judge(chosen=["mlx5_5", "mlx5_4:1", "mlx5_0", "mlx5_99"])
    assert verdict["nccl_ib_hca"] == "=mlx5_5:1,mlx5_4:1,mlx5_0:1"
    assert verdict["warnings"] == [
        "'mlx5_0' is chosen as a rail, but mlx5_0 port 1 manages the NVSwitches and carries no traffic between hosts.",
        "'mlx5_99' is chosen as a rail, but this host has no such port.",
    ]
    assert reasons(verdict)["mlx5_6"] == "not-chosen"


def test_what_is_wrong_with_a_value_that_somebody_set(judge):
    verdict = judge()
    assert rdma_facts.hca_errors(verdict["nccl_ib_hca"], verdict) == []
    errors = rdma_facts.hca_errors("mlx5_1", verdict)
    assert errors[0] == "it takes mlx5_1 port 1 manages the NVSwitches and carries no traffic between hosts."
    assert errors[-1].startswith("it leaves out mlx5_4, mlx5_5")


def test_more_rails_than_nccl_takes():
    with pytest.raises(ValueError, match="33 rails are more than the 32"):
        rdma_facts.nccl_hca([{"device": f"mlx5_{n}", "port": 1} for n in range(33)])


@pytest.mark.parametrize(
    ("one", "two", "word"),
    [
        (["pci0:0", "a", "b", "c", "x"], ["pci0:0", "a", "b", "d", "y"], "PIX"),
        (["pci0:0", "a", "b", "c", "x"], ["pci0:0", "a", "b", "d", "e", "f", "y"], "PXB"),
        (["pci0:0", "a", "x"], ["pci0:0", "b", "y"], "PHB"),
        (["pci0:0", "x"], ["pci1:0", "y"], "NODE"),
    ],
)
def test_distances(one, two, word):
    assert rdma_facts.distance(one, two, 0, 0) == word
    assert rdma_facts.distance(["pci0:0"], ["pci1:0"], 0, 1) == "SYS"
    assert rdma_facts.distance(["pci0:0"], ["pci1:0"], -1, -1) == "SYS"


def test_vital_product_data():
    read = rdma_facts.parse_vpd(fake.vpd(fake.PRODUCT, fake.MARK))
    assert read == {
        "readable": True,
        "product": fake.PRODUCT,
        "part": "692-9X760-00SE-S00",
        "sw_mng": True,
    }
    assert rdma_facts.parse_vpd(b"")["product"] is None
    assert rdma_facts.parse_vpd(None)["readable"] is False


def test_access_control_services_are_read_from_configuration_space(tmp_path):
    node = fake.Node(tmp_path / "node", XML, acs=["0000:15:01.0"], tools=False)
    look = Look(lambda *_a, **_k: (1, "", ""), node.arguments["sys_root"], node.arguments["proc_root"])
    assert rdma_look.acs_enabled(look) == ["0000:15:01.0"]
    assert rdma_look.acs_control(b"\xff" * 4096) is None
    assert rdma_look.acs_control(b"short") is None
