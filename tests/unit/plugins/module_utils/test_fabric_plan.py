# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What role fabric decides, and the script that clears Access Control Services."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import fabric_plan, launch, rdma_facts, rdma_look
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.gpu_look import pci_gpus
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.host_look import Look

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "tests" / "fixtures"))

import fake_node as fake

XML = ROOT / "tests" / "fixtures" / "h200-vm" / "nvidia-smi-q.xml"
SETTINGS = {
    "rail_count": 8,
    "mode": "infiniband",
    "gpudirect": "auto",
    "roce_gid": "leave",
    "environment": {},
    "environment_file": "/etc/kimi-k3/fabric.env",
    "packages": ["rdma-core"],
    "reserve_ports": [29500, 29501, 29502, 8000],
    "sysctls": {},
    "memlock": True,
    "acs": "observe",
    "iommu": "observe",
}


@pytest.fixture
def look(tmp_path):
    def run(hcas=None, mode="infiniband", **changes):
        node = fake.Node(tmp_path / "node", XML, hcas, tools=False)
        at = Look(lambda *_a, **_k: (1, "", ""), node.arguments["sys_root"], node.arguments["proc_root"])
        devices = rdma_look.gather(at)
        return {
            "devices": devices,
            "verdict": rdma_facts.judge(devices, pci_gpus(at), mode=mode),
            "route": {"address": "10.0.0.11", "interface": "eno1"},
            "files": {},
            "sysctls": {"net.ipv4.ip_local_reserved_ports": "5000"},
            "loaded": ["mlx5_core", "mlx5_ib"],
            "packages": {},
            "stack": {"kind": "inbox"},
            "virtualization": "none",
            "acs": [],
            "iommu": {"active": False, "types": {}},
            **changes,
        }

    return run


def planned(look, **changes):
    return fabric_plan.plan({**SETTINGS, **changes}, look)


def test_a_fresh_host(look):
    plan = planned(look())
    assert plan["environment"] == {
        "NCCL_IB_HCA": "=" + ",".join(f"mlx5_{n}:1" for n in range(4, 12)),
        "NCCL_SOCKET_IFNAME": "=eno1",
        "GLOO_SOCKET_IFNAME": "eno1",
    }
    assert plan["modules"] == ["ib_umad", "ib_uverbs", "rdma_cm", "rdma_ucm"]
    assert plan["packages"] == ["rdma-core"]
    assert plan["sysctls"] == {"net.ipv4.ip_local_reserved_ports": "5000,8000,29500-29502"}
    files = {file["path"]: file["content"] for file in plan["files"]}
    assert launch.parse_environment_file(files["/etc/kimi-k3/fabric.env"]) == plan["environment"]
    modules = [line for line in files[fabric_plan.MODULES_FILE].splitlines() if not line.startswith("#")]
    assert modules[0] == "ib_umad"


def test_a_host_that_is_right_has_nothing_to_do(look):
    first = planned(look())
    files = {file["path"]: file["content"] for file in first["files"]}
    again = look(
        files=files,
        sysctls=first["sysctls"],
        loaded=list(fabric_plan.MODULES),
        packages={"rdma-core": "50"},
    )
    plan = planned(again)
    assert (plan["files"], plan["modules"], plan["sysctls"], plan["packages"]) == ([], [], {}, [])


def test_a_host_without_rails(look):
    plan = planned(look([]), rail_count=0)
    assert "NCCL_IB_HCA" not in plan["environment"]
    assert (plan["modules"], plan["packages"], plan["told"]) == ([], [], [])


def test_what_the_operator_set_wins_and_none_leaves_out(look):
    plan = planned(look(), environment={"NCCL_IB_HCA": None, "NCCL_DEBUG": "WARN"})
    assert "NCCL_IB_HCA" not in plan["environment"]
    assert plan["environment"]["NCCL_DEBUG"] == "WARN"


def test_peermem(look):
    plan = planned(look(loaded=["mlx5_core", "nvidia"]), gpudirect="peermem")
    assert plan["environment"]["NCCL_DMABUF_ENABLE"] == "0"
    assert "nvidia_peermem" in plan["modules"]
    assert plan["later"] == []


def test_peermem_waits_for_a_driver_and_is_kept_for_the_next_boot(look):
    """Role cuda comes after this one: on a fresh host there is nothing that it could be loaded into."""
    plan = planned(look(), gpudirect="peermem")
    assert "nvidia_peermem" not in plan["modules"]
    assert plan["later"] == ["nvidia_peermem"]
    files = {file["path"]: file["content"] for file in plan["files"]}
    assert "nvidia_peermem" in files[fabric_plan.MODULES_FILE].splitlines()


def test_every_kernel_parameter_is_written_with_its_reason(look):
    plan = planned(look(), sysctls={"net.ipv4.ip_local_port_range": "20000 60999", "vm.max_map_count": 262144})
    content = next(file["content"] for file in plan["files"] if file["path"] == fabric_plan.SYSCTL_FILE)
    lines = content.splitlines()[1:]
    assert [line.split(" = ")[0] for line in lines[1::2]] == [
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "vm.max_map_count",
    ]
    assert lines[0] == "# NCCL, Gloo and ZMQ take hundreds of ports that the kernel chooses out of these."
    assert all(line.startswith("# ") for line in lines[::2])


def test_the_iommu_passes_through_on_request_alone(look):
    translates = {"active": True, "types": {"DMA-FQ": 40}, "cmdline": []}
    there = look(iommu=translates)
    assert not any(file["path"] == fabric_plan.GRUB_FILE for file in planned(there)["files"])
    assert any("set fabric_iommu to passthrough" in line for line in planned(there)["told"])
    plan = planned(there, iommu="passthrough")
    (content,) = [file["content"] for file in plan["files"] if file["path"] == fabric_plan.GRUB_FILE]
    assert content.splitlines()[-1] == 'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT iommu=pt"'
    assert "The IOMMU translates: reboot." in plan["told"]
    # Before and after the reboot there is nothing more to do, and a host that never translated has nothing at all.
    for iommu in (translates, {"active": True, "types": {"identity": 40}, "cmdline": ["iommu=pt"]}):
        again = planned({**there, "iommu": iommu, "files": {fabric_plan.GRUB_FILE: content}}, iommu="passthrough")
        assert not any(file["path"] == fabric_plan.GRUB_FILE for file in again["files"])
    assert not any(file["path"] == fabric_plan.GRUB_FILE for file in planned(look(), iommu="passthrough")["files"])


def test_booleans_are_written_as_numbers(look):
    assert planned(look(), environment={"NCCL_IB_DISABLE": False})["environment"]["NCCL_IB_DISABLE"] == "0"


def roce(gids):
    return [fake.rail(n, f"rocep{n}s0", link_layer="Ethernet", sm_lid="0x0", gids=gids) for n in range(8)]


def test_the_gid_of_roce_rails_is_pinned_on_request(look):
    local = ("fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2")
    mapped = ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")
    there = look(roce([local, local, mapped, mapped]), mode="roce")
    assert planned(there, mode="roce")["environment"].get("NCCL_IB_GID_INDEX") is None
    assert planned(there, mode="roce", roce_gid="pin")["environment"]["NCCL_IB_GID_INDEX"] == "2"
    with pytest.raises(fabric_plan.FabricError, match="no RoCE v2 GID with an IPv4 address at one index"):
        planned(look(roce([local]), mode="roce"), mode="roce", roce_gid="pin")


def test_what_the_operator_is_told(look):
    hcas = fake.adapters()
    hcas[7]["rate"] = "200 Gb/sec (2X NDR)"
    told = planned(look(hcas, files={"/etc/nccl.conf": ""}, acs=["0000:15:01.0"]))["told"]
    assert told[0].startswith("Rails: mlx5_4, mlx5_5, mlx5_6, mlx5_8")
    assert "Broken: mlx5_7 port 1 runs at 200 Gb/s, a rail must have 400." in told
    assert any(line.startswith("/etc/nccl.conf is there") for line in told)
    assert any("set fabric_acs to disable" in line for line in told)
    assert not any("fabric_acs" in line for line in planned(look(acs=["x"], virtualization="kvm"))["told"])


def test_reserved_ports_are_written_as_the_kernel_writes_them():
    assert fabric_plan.reserved("29500-29501,7", [29502]) == "7,29500-29502"
    assert fabric_plan.reserved(None, [8000]) == "8000"


def test_the_script_clears_what_the_look_sees(tmp_path):
    node = fake.Node(tmp_path / "node", XML, acs=["0000:15:01.0", "0000:26:01.0"], tools=False)
    look = Look(lambda *_a, **_k: (1, "", ""), node.arguments["sys_root"], node.arguments["proc_root"])
    assert rdma_look.acs_enabled(look) == ["0000:15:01.0", "0000:26:01.0"]
    script = ROOT / "roles" / "fabric" / "files" / "clear_acs.py"
    words = [sys.executable, script, "--sys", node.arguments["sys_root"]]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "2 bridges cleared"
    assert rdma_look.acs_enabled(look) == []
    again = subprocess.run(words, capture_output=True, text=True, check=True)
    assert again.stdout == "0 bridges cleared\n"
