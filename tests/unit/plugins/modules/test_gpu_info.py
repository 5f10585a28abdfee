# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The modules that look at a host, run as on a host, on trees of tests/fixtures/fake_node.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(ROOT / "tests" / "fixtures"), str(ROOT / "tests" / "unit" / "plugins")]

import fake_node as fake
from run_module import run_module

XML = ROOT / "tests" / "fixtures" / "h200-vm" / "nvidia-smi-q.xml"
EMPTY = {"sys_root": "/nothing", "proc_root": "/nothing", "root": "/nothing", "command_path": "/nothing"}


@pytest.fixture
def look(tmp_path):
    def run(module, hcas=None, arguments=None, **settings):
        node = fake.Node(tmp_path / "node", XML, hcas, **settings)
        return run_module(module, {**node.arguments, **(arguments or {})})

    return run


def test_eight_gpus_and_their_driver(look):
    packages = {"nvidia-fabricmanager": "580.159.04-1", "libnvidia-nscq": "580.159.04-1", "nvlsm": "2025.10.1-1"}
    answer = look("gpu_info", packages=packages, held=["nvidia-fabricmanager"], excluded=["^nvidia-"])
    assert answer["changed"] is False
    assert [gpu["name"] for gpu in answer["gpus"]] == ["NVIDIA B200"] * 8
    assert answer["gpus"][0]["bus"] == answer["pci"][0]["bus"] == "0000:15:0b.0"
    assert {gpu["fabric"]["state"] for gpu in answer["gpus"]} == {"Completed"}
    assert answer["driver"]["running"] == "580.159.04"
    assert answer["driver"]["running_flavour"] == answer["driver"]["installed_flavour"] == "open"
    assert answer["driver"]["dkms"] is True
    assert "ib_umad" in answer["modules"]
    assert answer["services"]["nvidia-fabricmanager.service"]["active"] == "active"
    assert "nvidia-imex.service" not in answer["services"]
    assert [gpu["up"] for gpu in answer["nvlink"]] == [18] * 8
    assert answer["packages"]["companions"]["fabricmanager"]["version"] == "580.159.04-1"
    assert answer["packages"]["origins"]["nvlsm"] == "nvidia"
    assert answer["packages"]["held"] == ["nvidia-fabricmanager"]
    assert answer["packages"]["unattended_exclusions"] == ["^nvidia-"]


def test_no_gpu_and_no_driver_is_an_answer(look):
    answer = look("gpu_info", [], gpus=0, driver=None, modules=[], packages=None)
    assert (answer["gpus"], answer["pci"], answer["nvlink"]) == ([], [], [])
    assert answer["driver"]["running"] is None
    assert answer["smi"]["problem"] == "there is no nvidia-smi on this host"


def test_gpus_on_the_bus_that_no_driver_has(look):
    answer = look("gpu_info", driver=None, kernel=["NVRM: GPU 0000:15:0b.0: RmInitAdapter failed! (0x22:0x56:894)"])
    assert len(answer["pci"]) == 8
    assert answer["gpus"] == []
    assert "RmInitAdapter failed" in answer["kernel_log"]["rm_init_adapter"]


def test_pins_and_compatibility_libraries(look):
    files = {
        "/etc/apt/preferences.d/lambda": "Package: *\nPin: origin archive.lambdalabs.com\nPin-Priority: 1001\n",
        "/etc/ld.so.conf.d/cuda-compat.conf": "# comment\n/usr/local/cuda-13.0/compat\n",
    }
    answer = look("gpu_info", files=files)
    assert answer["packages"]["preferences"] == [
        {
            "file": "/etc/apt/preferences.d/lambda",
            "package": "*",
            "pin": "origin archive.lambdalabs.com",
            "priority": "1001",
        }
    ]
    assert answer["cuda_compat"] == ["/etc/ld.so.conf.d/cuda-compat.conf: /usr/local/cuda-13.0/compat"]


def test_entries_of_apt_that_are_in_force(look):
    entry = "deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] https://nvidia.example/x86_64/ /\n"
    files = {
        "/etc/apt/sources.list.d/cuda-ubuntu2404-x86_64.list": entry,
        "/etc/apt/sources.list.d/cuda-ubuntu2204-x86_64.list.distUpgrade": entry,
        "/etc/apt/sources.list.d/ubuntu.sources": "Types: deb\nURIs: http://u.example\nSuites: noble\n",
    }
    assert [(one["file"], one["url"]) for one in look("gpu_info", files=files)["packages"]["sources"]] == [
        ("/etc/apt/sources.list.d/cuda-ubuntu2404-x86_64.list", "https://nvidia.example/x86_64/"),
        ("/etc/apt/sources.list.d/ubuntu.sources", "http://u.example"),
    ]


def test_rails_of_a_host(look):
    answer = look(
        "rdma_info",
        arguments={"address": "127.0.0.1", "sysctls": ["net.no.such"], "files": ["/nothing/at/all"]},
    )
    assert answer["verdict"]["nccl_ib_hca"] == "=" + ",".join(f"mlx5_{n}:1" for n in range(4, 12))
    assert answer["virtualization"] == "none"
    assert answer["iommu"]["cmdline"] == ["iommu=pt"]
    assert answer["stack"] == {"kind": "inbox", "ofed": None, "mlx5_core": "24.10-1"}
    assert answer["sysctls"] == {"net.no.such": None}
    assert answer["files"] == {"/nothing/at/all": None}
    assert answer["acs"] == []


def test_a_host_without_rdma_is_an_answer():
    answer = run_module("rdma_info", EMPTY)
    assert answer["devices"] == []
    assert answer["verdict"]["nccl_ib_hca"] is None
    assert answer["route"] is None


def test_more_rails_than_nccl_takes_is_one_sentence(look):
    chosen = [f"mlx5_{n}" for n in range(40)]
    hcas = [
        fake.storage(0, name, path=["pci0000:71", f"0000:71:{n:02x}.0"], netdev=None) for n, name in enumerate(chosen)
    ]
    answer = look("rdma_info", hcas, arguments={"rails": chosen})
    assert answer["failed"] is True
    assert answer["msg"] == "These ports cannot be given to NCCL: 40 rails are more than the 32 that NCCL takes."
