# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every check finds its defect on a host that is right otherwise, and says the sentence that the operator reads."""

from __future__ import annotations

import copy
import errno
import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import preflight, preflight_look
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.host_look import Look

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "tests" / "fixtures"))

import fake_node as fake

XML = ROOT / "tests" / "fixtures" / "h200-vm" / "nvidia-smi-q.xml"
PACKAGES = {
    "nvidia-open": "580.159.04-1",
    "nvidia-fabricmanager": "580.159.04-1",
    "libnvidia-nscq": "580.159.04-1",
    "libnvsdm": "580.159.04-1",
    "nvlsm": "2025.10.11-1",
    "datacenter-gpu-manager-4-cuda13": "1:4.4.0-1",
}
ASKED = {
    "mode": "infiniband",
    "min_rate": 400,
    "rails": [],
    "unit": "kimi-k3.service",
    "venv": None,
    "checkpoint": None,
    "read_rate": False,
    "dcgm_level": 0,
    "port": 29502,
    "ports": [8000, 29500, 29501],
}
HCA = "=" + ",".join(f"mlx5_{number}:1" for number in range(4, 12))
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}


def expectations():
    """The defaults of the role, under the names that the filter reads."""
    defaults = yaml.safe_load((ROOT / "roles" / "preflight" / "defaults" / "main.yml").read_text())
    found = {name.removeprefix("preflight_expect_"): value for name, value in defaults.items() if "_expect_" in name}
    more = {"ports": [8000, 29500, 29501], "args": {"disable-custom-all-reduce": True}, "environment": ENVIRONMENT}
    return {**found, **more, "waivers": {}, "severities": {}}


def answers(node):
    """Runs the node's commands without starting them."""

    def run_command(words, **_how):
        if Path(words[0]).name == "timeout":
            words = words[3:]
        if not words[0].startswith(str(node.base)):
            return 1, "", "a command of this machine, not of the node"
        known = json.loads((node.base / "state" / f"{Path(words[0]).name}.json").read_text())
        asked = " ".join(words[1:])
        starts = [start for start in sorted(known, key=len, reverse=True) if start and asked.startswith(start)]
        if asked in known:
            return 0, known[asked], ""
        return (0, known[starts[0]], "") if starts else (2, "", "unknown arguments")

    return run_command


def observe(base, hcas=None, asked=None, **settings):
    files = {"/etc/kimi-k3/fabric.env": f'NCCL_IB_HCA="{HCA}"\n', **settings.pop("files", {})}
    node = fake.Node(base, XML, hcas, **{"packages": PACKAGES, "held": list(PACKAGES), "files": files, **settings})
    where = node.arguments
    look = Look(answers(node), where["sys_root"], where["proc_root"], where["command_path"], where["root"])
    facts = preflight_look.gather(look, {**ASKED, **(asked or {})})
    # What this machine is comes from itself, and is set to what a host that is right would say.
    facts["host"].update(
        name="gpu-a", os="ubuntu 24.04", kernel="6.8.0-60-generic", cpus=224, memory_mib=2800 * 1024, numa_nodes=2,
        clocksource="tsc", synchronized=True,
    )  # fmt: skip
    facts["resolution"] = {"name": "gpu-a", "addresses": ["10.0.0.11"], "error": None}
    facts["route"] = {"address": "10.0.0.11", "interface": "eno1"}
    facts["rdma"]["interfaces"]["eno1"] = {"mtu": 9000, "state": "up", "speed": 100000, "infiniband": False}
    facts["shm"] = {"size_mib": 1 << 20, "free_mib": 1 << 20, "stale": [], "error": None}
    facts["storage"] = {
        "path": "/srv/kimi-k3", "mount": "/srv", "type": "ext4", "device": "md0", "free_gib": 5000, "size_gib": 9000,
        "inodes_free": 10**6, "read_mb_s": 6000, "error": None,
    }  # fmt: skip
    facts["unit"] = {"loaded": True, "active": False, "running": False, "memlock": "infinity", "cgroup": None}
    facts["engine"] = {
        "lock_digest": "1" * 64, "versions": {"vllm": "0.32.0", "torch": "2.13.0+cu130"}, "nvcc": "/x", "cubins": False,
        "flashinfer": "0.6.1", "flashinfer_parts": {}, "ninja": True,
    }  # fmt: skip
    facts["checkpoint"] = {
        "statement": {"revision": "f" * 40, "identity_digest": "2" * 64},
        "files": 50,
        "missing": [],
        "short": [],
    }
    facts["sysctls"] = {
        "net.ipv4.ip_local_port_range": "32768 60999",
        "net.ipv4.ip_local_reserved_ports": "29500-29502",
    }
    peer = {"name": "gpu-b", "address": "10.0.0.12", "reached": True, "error": None, "offset": 0.001, "closed": {}}
    facts["meeting"] = {
        "problem": None,
        "busy": [],
        "absent": [],
        "peers": [{**peer, "round_trip": 0.0002, "busy": []}],
    }
    return facts


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return observe(tmp_path_factory.mktemp("right") / "node")


def judge(hosts, expected=None):
    expected = expected or {name: expectations() for name in hosts}
    return preflight.verdict(hosts, expected)


def found(result):
    return {(row["check"], row["host"]) for row in result["rows"]}


def test_a_clean_pair_has_nothing_to_say(right):
    result = judge({"gpu-a": right, "gpu-b": right})
    assert preflight.lines(result) == [f"{len(preflight.CHECKS)} checks on 2 hosts: all is well."]
    assert (result["failed"], result["warned"], result["rows"], result["skipped"]) == (0, 0, [], [])


def test_a_host_declared_without_gpus_and_rails(tmp_path):
    facts = observe(tmp_path / "node", [], gpus=0, driver=None, modules=[], packages=None, services={})
    expected = {**expectations(), "gpus": 0, "rails": 0}
    result = judge({"a": facts}, {"a": expected})
    assert result["rows"] == []
    assert "gpu-count" in result["performed"]
    assert {"ecc", "nvlink", "rail-pcie"} <= set(result["skipped"])


def edited(old, new, gpu=3):
    return {"edit_xml": [(gpu, old, new)]}


def hcas(index, **changes):
    found = fake.adapters()
    found[index].update(changes)
    return found


def rows_block(name, value):
    return edited(f"<{name}>No</{name}>", f"<{name}>{value}</{name}>")


PROCESS = (
    "<processes><process_info><pid>4711</pid><type>C</type><process_name>python3</process_name>"
    "<used_memory>90000 MiB</used_memory></process_info></processes>"
)
CLOSED = {"flavour": "proprietary"}
XID = ["NVRM: Xid (PCI:0000:15:0b): 79, pid=1, GPU has fallen off the bus."]
SXID = ["nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"]

# What a host's tools and trees say: check, settings of the tree, words of the sentence.
TREES = [
    ("gpu-count", {"gpus": 7}, "gpu-a has 7 GPUs that the driver can use and 7 on its PCI bus, 8 are expected."),
    ("gpu-model", {"gpu_name": "NVIDIA H100"}, "of gpu-a is NVIDIA H100, expected is B200."),
    ("gpu-model", {"memory": "81559 MiB"}, "has 81559 MiB of memory."),
    ("driver-version", {"driver": "570.148.08"}, "gpu-a runs driver 570.148.08: CUDA 13 needs 580 or newer"),
    ("driver-flavour", CLOSED, "has the proprietary kernel modules, which do not start a Blackwell GPU"),
    ("driver-flavour", {"kernel": ["NVRM: GPU 0000:15:0b.0: RmInitAdapter failed! (0x22:0x56:894)"]}, "did not start"),
    (
        "companions",
        {"packages": {**PACKAGES, "nvidia-fabricmanager": "590.48.01-1"}},
        "nvidia-fabricmanager of gpu-a is",
    ),
    ("companions", {"packages": {**PACKAGES, "libnvidia-nscq-570": "570.1.1-1"}}, "is 570.1.1, but its driver is 580"),
    ("fabric-manager", {"services": {}}, "gpu-a has no Fabric Manager: without it CUDA ends with error 802."),
    ("fabric-manager", {"services": {"nvidia-fabricmanager.service": "failed"}}, "Fabric Manager of gpu-a is failed"),
    ("nvlsm", {"packages": {k: v for k, v in PACKAGES.items() if k != "nvlsm"}}, "NV_WARN_NOTHING_TO_DO"),
    ("nvlsm", {"modules": ["nvidia", "mlx5_core", "mlx5_ib", "ib_uverbs"]}, "ib_umad is not loaded on gpu-a"),
    ("fabric-state", {"fabric_state": "In Progress", "fabric_status": "N/A"}, "is In Progress / None: CUDA would end"),
    ("fabric-state", {"fabric_status": "Insufficient Resources"}, "Completed / Insufficient Resources"),
    (
        "fabric-health",
        edited("<bandwidth>N/A</bandwidth>", "<bandwidth>Degraded</bandwidth>"),
        "The fabric of GPU 3 on gpu-a says bandwidth: Degraded.",
    ),
    (
        "fabric-health",
        edited("<route_unhealthy>N/A", "<route_unhealthy>True"),
        "The fabric of GPU 3 on gpu-a says route unhealthy: True.",
    ),
    (
        "fabric-health",
        edited("<partition_assigned>N/A", "<partition_assigned>False"),
        "says partition assigned: False.",
    ),
    (
        "nvlsm",
        {"hcas": [{**hca, "cap_mask": "0xa751ec48"} for hca in fake.adapters()]},
        "Every NVSwitch management port of gpu-a has its subnet manager disabled.",
    ),
    ("fabric-health", edited("<cliqueId>N/A", "<cliqueId>7"), "The GPUs of gpu-a are in 2 NVLink cliques"),
    ("fabric-mode", {"files": {"/usr/share/nvidia/nvswitch/fabricmanager.cfg": "FABRIC_MODE=1\n"}}, "is in mode 1"),
    ("imex", {"services": {**fake.DEFAULTS["services"], "nvidia-imex.service": "active"}}, "nvidia-imex runs on gpu-a"),
    ("persistence", edited("<persistence_mode>Enabled", "<persistence_mode>Disabled"), "is off on GPU 3 of gpu-a."),
    ("mig", edited("<current_mig>Disabled", "<current_mig>Enabled"), "GPU 3 of gpu-a is divided by MIG."),
    ("mig", edited("<compute_mode>Default", "<compute_mode>Prohibited"), "has compute mode Prohibited."),
    ("ecc", edited("<current_ecc>Enabled", "<current_ecc>Disabled"), "ECC of GPU 3 of gpu-a is off."),
    (
        "ecc",
        edited(
            "<dram_uncorrectable>0</dram_uncorrectable>\n\t\t\t</volatile>",
            "<dram_uncorrectable>2</dram_uncorrectable>\n\t\t\t</volatile>",
        ),
        "GPU 3 of gpu-a has 2 uncorrectable memory errors since boot.",
    ),
    ("ecc", rows_block("sram_threshold_exceeded", "Yes"), "exceeded its threshold of SRAM errors: replace it."),
    ("ecc", rows_block("channel_repair_pending", "Yes"), "has a memory repair pending."),
    ("ecc", rows_block("unrepairable_memory", "Yes"), "has memory that cannot be repaired."),
    ("remapped-rows", rows_block("remapped_row_pending", "Yes"), "has a row remapping pending: reset it."),
    ("remapped-rows", rows_block("remapped_row_failure", "Yes"), "could not remap a broken row: replace it."),
    (
        "recovery",
        edited("<gpu_recovery_action>None", "<gpu_recovery_action>Drain and Reset"),
        "GPU 3 of gpu-a asks for: Drain and Reset.",
    ),
    ("xid", {"kernel": XID}, "gpu-a had Xid 79 on 0000:15:0b.0 1 times since boot"),
    ("sxid", {"kernel": SXID}, "gpu-a had SXid 20034"),
    (
        "clocks",
        edited(
            "<clocks_event_reason_hw_power_brake_slowdown>Not Active",
            "<clocks_event_reason_hw_power_brake_slowdown>Active",
        ),
        "GPU 3 of gpu-a is slowed down: hw power brake slowdown.",
    ),
    (
        "gpu-processes",
        edited("<processes>\n\t\t</processes>", PROCESS),
        "Process 4711 (python3) holds 90000 MiB of GPU 3",
    ),
    ("gpu-memory", edited("<used>0 MiB</used>", "<used>70000 MiB</used>"), "has 70000 MiB in use and no process"),
    (
        "dcgm",
        {
            "packages": {
                **{k: v for k, v in PACKAGES.items() if "gpu-manager" not in k},
                "datacenter-gpu-manager": "1:3.3",
            }
        },
        "has datacenter-gpu-manager, whose diagnosis fails with driver 580.159.04.",
    ),
    ("nvlink", {"nvlinks": 17}, "has 17 NVLinks up, 18 are expected."),
    ("gpu-pcie", edited("<current_link_width>16x", "<current_link_width>8x"), "GPU 3 of gpu-a has 8 PCIe lanes of 16."),
    ("hmm", {"kernel": ["nvidia_uvm: request_free_mem_region() err -34"]}, "CUDA will not start on gpu-a"),
    (
        "cuda-compat",
        {"files": {"/etc/ld.so.conf.d/x.conf": "/usr/local/cuda-13.0/compat\n"}},
        "compatibility libraries come before the driver's on gpu-a",
    ),
    ("nouveau", {"modules": [*fake.DEFAULTS["modules"], "nouveau"]}, "nouveau is loaded on gpu-a"),
    (
        "secure-boot",
        {
            "driver": None,
            "installed_driver": "580.159.04",
            "kernel": ["Loading of module with unavailable key is rejected"],
        },
        "rejects the driver's module: Loading of module with unavailable key is rejected",
    ),
    (
        "secure-boot",
        {
            "driver": None,
            "installed_driver": "580.159.04",
            "kernel": ["PKCS#7 signature not signed with a trusted key"],
        },
        "rejects the driver's module",
    ),
    ("pending-reboot", {"files": {"/run/reboot-required": ""}}, "gpu-a wants to be rebooted: packages ask for it."),
    ("pending-reboot", {"installed_driver": "580.200.01"}, "driver 580.159.04 runs, 580.200.01 is installed."),
    (
        "pending-reboot",
        {"files": {"/boot/vmlinuz-99.9.0-1-generic": "", "/lib/modules/99.9.0-1-generic/modules.dep": ""}},
        "for which there is no module of the driver.",
    ),
    (
        "apt-pins",
        {"packages": {**PACKAGES, "unattended-upgrades": "2.9"}, "held": []},
        "unattended-upgrades may move the driver of gpu-a while it serves: libnvidia-nscq, libnvsdm, "
        "nvidia-fabricmanager and 2 more is not excluded or held.",
    ),
    (
        "apt-pins",
        {
            "files": {
                "/etc/apt/preferences.d/lambda": "Package: *\nPin: origin x\nPin-Priority: 1001\n",
                "/etc/apt/preferences.d/nvidia": "Package: nvidia-*\nPin: version 580*\nPin-Priority: 1000\n",
            }
        },
        "/etc/apt/preferences.d/lambda on gpu-a pins every package at 1001 and outranks NVIDIA's pin.",
    ),
    (
        "rails",
        {"hcas": hcas(7, rate="200 Gb/sec (2X NDR)")},
        "A rail of gpu-a is broken: mlx5_7 port 1 runs at 200 Gb/s",
    ),
    ("rails", {"hcas": hcas(7, state="1: DOWN", phys_state="3: Disabled")}, "mlx5_7 port 1 is DOWN / Disabled"),
    ("rails", {"hcas": hcas(7, sm_lid="0x0")}, "mlx5_7 port 1 has no subnet manager"),
    ("rails", {"hcas": fake.adapters()[:-1]}, "gpu-a has 7 rails, 8 are expected (4 nvswitch-management)."),
    ("rail-pcie", {"hcas": hcas(7, width="8", width_max="16")}, "mlx5_7 of gpu-a has 8 PCIe lanes of 16."),
    ("link-errors", {"hcas": hcas(7, counters={"link_downed": 400})}, "mlx5_7 of gpu-a has counted link_downed 400."),
    ("rdma-modules", {"modules": ["nvidia", "mlx5_core", "ib_umad", "ib_uverbs"]}, "mlx5_ib is not loaded on gpu-a."),
    (
        "gpudirect",
        {"kernel": ["nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client"]},
        "nvidia_peermem of gpu-a was built against another ib_core",
    ),
    (
        "gpudirect",
        {"files": {"/etc/kimi-k3/fabric.env": 'NCCL_DMABUF_ENABLE="0"\n'}},
        "NCCL_DMABUF_ENABLE=0 on gpu-a, and nvidia_peermem is not loaded.",
    ),
    ("acs", {"acs": ["0000:15:01.0"]}, "1 PCIe bridges of gpu-a send traffic between GPU and adapter up to the root"),
    (
        "nccl-hca",
        {"files": {"/etc/kimi-k3/fabric.env": 'NCCL_IB_HCA="mlx5_1"\n'}},
        "NCCL_IB_HCA of gpu-a is 'mlx5_1' (/etc/kimi-k3/fabric.env): it takes mlx5_1 port 1 manages the NVSwitches",
    ),
    ("environment", {"files": {"/etc/environment": "NCCL_P2P_DISABLE=1\n"}}, "it turns NVLink off."),
    ("environment", {"files": {"/etc/kimi-k3/fabric.env": "NCCL_P2P_DISABLE=1\n"}}, "it turns NVLink off."),
    (
        "environment",
        {"files": {"/etc/kimi-k3/fabric.env": "CUDA_VISIBLE_DEVICES=0\n"}},
        "it hides GPUs from the replica.",
    ),
    (
        "environment",
        {"files": {"/etc/kimi-k3/fabric.env": "CUDA_VISIBLE_DEVICES=\n"}},
        "it hides GPUs from the replica.",
    ),
    ("environment", {"files": {"/etc/kimi-k3/fabric.env": "NCCL_PROTO=0\n"}}, "it belongs to a measurement."),
    ("environment", {"files": {"/etc/kimi-k3/fabric.env": "NCCL_DEBUG=INFO\n"}}, "it floods the log."),
    ("environment", {"files": {"/etc/environment": "NCCL_IGNORE_NET_MISMATCH=1\n"}}, "silent hang"),
    ("environment", {"files": {"/etc/environment": "ARCH=x86\n"}}, "building kernel modules fails with it."),
    (
        "environment",
        {"files": {"/etc/kimi-k3/fabric.env": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"}},
        "expandable segments fail with pipeline parallelism.",
    ),
    ("environment", {"files": {"/etc/kimi-k3/fabric.env": "GLOO_SOCKET_IFNAME=^lo\n"}}, "Gloo takes a plain name"),
    ("environment", {"files": {"/etc/kimi-k3/fabric.env": "NCCL_SOCKET_IFNAME=eth9\n"}}, "has no such interface."),
    ("nccl-conf", {"files": {"/etc/nccl.conf": "NCCL_IB_DISABLE=1\n"}}, "/etc/nccl.conf of gpu-a changes NCCL for"),
]


@pytest.mark.parametrize(("check", "settings", "sentence"), TREES, ids=[f"{n}-{one[0]}" for n, one in enumerate(TREES)])
def test_what_tools_and_trees_say(tmp_path, right, check, settings, sentence):
    facts = observe(tmp_path / "node", **settings)
    result = judge({"gpu-a": facts, "gpu-b": right})
    texts = [row["text"] for row in result["rows"] if row["check"] == check]
    assert any(sentence in text for text in texts), (texts, result["rows"])
    row = next(row for row in result["rows"] if row["check"] == check)
    assert row["host"] == "gpu-a"
    assert row["remedy"]


def put(path, value):
    """A change of one place in the facts."""

    def change(facts):
        *folders, name = path.split("/")
        for folder in folders:
            facts = facts[int(folder) if isinstance(facts, list) else folder]
        facts[name] = value

    return change


OFFLINE = {"name": "gpu-b", "address": "10.0.0.12", "reached": False, "error": "no answer", "offset": None}
FACTS = [
    ("smi", put("gpu/smi/problem", "nvidia-smi exited 18: Driver/library version mismatch"), "cannot be asked"),
    (
        "cuda-version",
        put("engine/versions", {"vllm": "0.40.0", "torch": "2.14.0+cu140"}),
        "The driver of gpu-a knows CUDA 13.0, the engine needs 14.0.",
    ),
    (
        "fabric-health",
        put("gpu/gpus/3/fabric/health", {"new_entry": "Odd"}),
        "The fabric of GPU 3 on gpu-a says new entry: Odd.",
    ),
    ("nccl-hca", put("environment", {}), "NCCL_IB_HCA is not set on gpu-a: NCCL takes every active port"),
    ("cpu-memory", put("host/nvme", -1), "gpu-a has -1 NVMe drives, 0 are expected."),
    (
        "checkpoint",
        put("checkpoint/short", ["model-00001.safetensors"]),
        "1 files of the checkpoint on gpu-a have another size than was proven: model-00001.safetensors.",
    ),
    (
        "checkpoint-disk",
        put("storage/error", "Stale file handle"),
        "/srv/kimi-k3 of gpu-a cannot be read: Stale file handle.",
    ),
    ("engine", put("engine/ninja", False), "has nvcc, but no ninja"),
    (
        "engine",
        put("engine/flashinfer_parts", {"flashinfer-cubin": "0.6.0"}),
        "FlashInfer of gpu-a is 0.6.1, but its compiled kernels are flashinfer-cubin 0.6.0",
    ),
    (
        "route",
        put("route/address", "fe80::1"),
        "gpu-a reaches its peer from the link-local address fe80::1: Gloo times out over it.",
    ),
    (
        "ports",
        put("meeting/problem", "this host cannot listen on 10.0.0.11 port 29502: Permission denied"),
        "gpu-a: this host cannot listen on 10.0.0.11 port 29502: Permission denied.",
    ),
    (
        "link-errors",
        put("rdma/devices/11/ports/0/counters", {"port_xmit_discards": 5000}),
        "of gpu-a has counted port_xmit_discards 5000.",
    ),
    ("cuda-version", put("gpu/smi/cuda", "12.8"), "The driver of gpu-a knows CUDA 12.8, the engine needs 13.0."),
    ("temperature", put("gpu/gpus/3/temperature_margin_c", 4), "GPU 3 of gpu-a is 4 degrees below its slowdown"),
    ("temperature", put("gpu/gpus/3/power_limit_w", 500.0), "The power limit of GPU 3 of gpu-a is 500 W"),
    ("dcgm", put("dcgm", {"level": 1, "rc": 226, "failed": ["Memory Fail"]}), "DCGM's diagnosis of level 1 failed"),
    (
        "nvlink-errors",
        put("gpu/nvlink/3/errors", {"Replay Errors": 9}),
        "NVLinks of GPU 3 on gpu-a have counted Replay",
    ),
    ("nvlink", put("gpu/nvlink/3/rates", [26.562]), "An NVLink of GPU 3 on gpu-a runs at 26.562 GB/s."),
    ("gpudirect", put("host/kernel", "5.4.0-200-generic"), "has neither dma-buf (open driver, kernel 5.12)"),
    ("acs", put("host/iommu/types", {"DMA-FQ": 40}), "The IOMMU of gpu-a translates (DMA-FQ)"),
    ("pkey", put("rdma/devices/11/ports/0/pkeys", ["0x8001"]), "is 0x8001, not the default one."),
    ("cpu-memory", put("host/memory_mib", 512 * 1024), "gpu-a has 512 GiB of memory, 1000 are expected."),
    ("checkpoint-disk", put("storage/type", "tmpfs"), "/srv/kimi-k3 of gpu-a lies on a tmpfs"),
    ("checkpoint-disk", put("storage/inodes_free", 12), "has 12 inodes free."),
    ("checkpoint-read-rate", put("storage/read_mb_s", 120), "/srv of gpu-a reads 120 MB/s, 1000 are expected."),
    ("checkpoint", put("checkpoint", None), "gpu-a has no proven checkpoint yet."),
    (
        "checkpoint",
        put("checkpoint/missing", ["model-00001.safetensors"]),
        "1 files of the checkpoint are gone on gpu-a",
    ),
    ("engine", put("engine", None), "gpu-a has no engine yet."),
    ("engine", put("engine/nvcc", None), "has FlashInfer, but neither nvcc nor its compiled kernels"),
    ("clock-sync", put("host/synchronized", False), "Nothing keeps the clock of gpu-a right."),
    ("clock-sync", put("host/clocksource", "hpet"), "takes its time from hpet"),
    ("hostname", put("resolution/addresses", ["127.0.1.1"]), "leads to 127.0.1.1: Gloo would connect its peers to"),
    ("route", put("route/error", "This host has no route to its peer."), "gpu-a: This host has no route to its peer."),
    ("route", put("route/interface", None), "No interface of gpu-a has the address 10.0.0.11."),
    ("route", put("rdma/interfaces/eno1/mtu", 1280), "eno1 of gpu-a has MTU 1280, 1500 is expected."),
    ("memlock", put("unit/memlock", "8388608"), "The unit on gpu-a may lock 8388608 bytes"),
    ("shm", put("shm/free_mib", 64), "has 64 MiB free, 16384 are needed"),
    ("sysctl", put("sysctls/net.ipv4.ip_local_port_range", "1024 65000"), "may hand out 8000"),
    ("sysctl", put("sysctls/net.ipv4.ip_local_port_range", "40000 41000"), "has 1001 ports to hand out"),
    ("ports", put("meeting/peers", [OFFLINE | {"closed": {}}]), "gpu-a does not reach gpu-b at 10.0.0.12: no answer."),
    ("ports", put("meeting/peers/0/closed", {"29501": "no answer"}), "but not every port of it: 29501: no answer."),
    ("ports-taken", put("meeting/busy", [8000]), "Something else listens on 8000 of gpu-a"),
    ("clock-offset", put("meeting/peers/0/offset", -73.2), "The clock of gpu-b is -73.200 s off from that of gpu-a."),
]


@pytest.mark.parametrize(("check", "change", "sentence"), FACTS, ids=[f"{n}-{one[0]}" for n, one in enumerate(FACTS)])
def test_what_the_host_is(right, check, change, sentence):
    facts = copy.deepcopy(right)
    change(facts)
    result = judge({"gpu-a": facts, "gpu-b": right})
    texts = [row["text"] for row in result["rows"] if row["check"] == check and row["host"] == "gpu-a"]
    assert any(sentence in text for text in texts), (texts, result["rows"])


ACROSS = [
    (
        "driver-equal",
        put("gpu/driver/running", "580.200.01"),
        "The driver differs between the hosts: gpu-a has 580.200.01",
    ),
    ("vbios-equal", put("gpu/gpus/3/vbios", "97.00"), "The VBIOS differs between the hosts"),
    ("firmware-equal", put("rdma/verdict/rails/3/firmware", "28.99.1"), "The firmware of the rails differs"),
    ("rails-equal", put("rdma/verdict/rails/0/device", "mlx5_9"), "The order of the rails differs between the hosts"),
    ("system-equal", put("host/kernel", "6.8.0-99-generic"), "The kernel differs between the hosts"),
    ("mtu-equal", put("rdma/interfaces/eno1/mtu", 1500), "The MTU differs: gpu-a has 1500"),
    ("engine-equal", put("engine/lock_digest", "3" * 64), "The engine lock differs between the hosts"),
    ("engine-equal", put("engine/versions", {"vllm": "0.31.0"}), "The version of vllm differs between the hosts"),
    ("checkpoint-equal", put("checkpoint/statement", {"revision": "e" * 40}), "The revision of the checkpoint differs"),
]


@pytest.mark.parametrize(("check", "change", "sentence"), ACROSS, ids=[f"{n}-{one[0]}" for n, one in enumerate(ACROSS)])
def test_what_differs_between_hosts(right, check, change, sentence):
    facts = copy.deepcopy(right)
    change(facts)
    rows = [row for row in judge({"gpu-a": facts, "gpu-b": right})["rows"] if row["check"] == check]
    assert rows
    assert rows[0]["host"] == "all hosts"
    assert sentence.split(" differs")[0] in rows[0]["text"]
    assert "differs between the hosts" in rows[0]["text"]


OFF = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
FUSED = {"compilation-config": {"pass_config": {"fuse_allreduce_rms": True}}}
LAUNCH = [
    ("0.27.1", {}, {"VLLM_ALLREDUCE_USE_FLASHINFER": "1"}, "FlashInfer's all-reduce hangs between hosts"),
    ("0.27.1", {}, {"VLLM_ALLREDUCE_USE_FLASHINFER": True}, "VLLM_ALLREDUCE_USE_FLASHINFER is on"),
    ("0.29.0", {}, {"VLLM_ALLREDUCE_USE_FLASHINFER": None}, "vLLM 0.29.0 turns it on unless told otherwise."),
    ("0.27.1", {}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "the first request of a pipeline ends in an IndexError"),
    (
        "0.27.0",
        {},
        {"VLLM_USE_V2_MODEL_RUNNER": None},
        "VLLM_USE_V2_MODEL_RUNNER not set is on for K3 with vLLM 0.27.0",
    ),
    ("0.32.0", {"disable-custom-all-reduce": False}, {}, "a start can hang on two hosts with 8 B200"),
    ("0.32.0", {"gpu-memory-utilization": 0.95}, {}, "a B200 ran out of memory at its first warm-up"),
    ("0.30.0", {"speculative-config": {"a": 1}}, {}, "speculative decoding with a pipeline is refused"),
    ("0.32.0", FUSED, {}, "fuse_allreduce_rms hung at autotuning and graph capture"),
    ("0.32.0", {}, {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": 60}, "a step that compiles kernels takes longer"),
    ("0.32.0", {"kv-offloading-size": 100}, {}, "crashed in a pipeline (batched memcpy)"),
    ("0.32.0", {"kv-transfer-config": {"kv_connector": "OffloadingConnector"}}, {}, "crashed in a pipeline"),
]
NO_FAULT = [
    ("0.28.0", {}, {"VLLM_ALLREDUCE_USE_FLASHINFER": None, "VLLM_USE_V2_MODEL_RUNNER": None}),
    ("0.32.0", {}, {"VLLM_USE_V2_MODEL_RUNNER": None, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1800"}),
    (
        "0.32.0",
        {"compilation-config": '{"pass_config": {"fuse_allreduce_rms": false}}'},
        {"VLLM_ALLREDUCE_USE_FLASHINFER": None},
    ),
    ("", {}, {"VLLM_ALLREDUCE_USE_FLASHINFER": None, "VLLM_USE_V2_MODEL_RUNNER": "1"}),
]


def launched(right, version, args, environment):
    facts = copy.deepcopy(right)
    facts["engine"]["versions"] = {"vllm": version}
    args = {"disable-custom-all-reduce": True, **args}
    expected = {**expectations(), "args": args, "environment": {**OFF, **environment}}
    return [row["text"] for row in judge({"gpu-a": facts}, {"gpu-a": expected})["rows"] if row["check"] == "launch"]


@pytest.mark.parametrize(("version", "args", "environment", "sentence"), LAUNCH)
def test_launch_arguments_that_are_known_to_fail(right, version, args, environment, sentence):
    texts = launched(right, version, args, environment)
    assert len(texts) == 1
    assert sentence in texts[0]


@pytest.mark.parametrize(("version", "args", "environment"), NO_FAULT)
def test_launch_arguments_that_no_release_is_known_to_fail_with(right, version, args, environment):
    assert launched(right, version, args, environment) == []


def test_between_hosts_alone_there_is_no_nvlink_to_miss(right):
    facts = copy.deepcopy(right)
    facts["meeting"]["peers"] = []
    assert launched(facts, "0.32.0", FUSED, {"VLLM_ALLREDUCE_USE_FLASHINFER": "1"}) == []


def test_roce_rails_with_link_local_gids_alone(tmp_path, right):
    gids = [("fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2")]
    rails = [fake.rail(n, f"rocep{n}s0", link_layer="Ethernet", sm_lid="0x0", gids=gids) for n in range(8)]
    facts = observe(tmp_path / "node", rails, {"mode": "roce"})
    expected = {**expectations(), "rail_mode": "roce"}
    texts = [row["text"] for row in judge({"gpu-a": facts}, {"gpu-a": expected})["rows"] if row["check"] == "gid"]
    assert texts[0] == "rocep0s0 of gpu-a has no RoCE v2 GID with an IPv4 address, only link-local ones."
    assert len(texts) == 8


def test_every_check_has_a_test():
    tested = {one[0] for one in [*TREES, *FACTS, *ACROSS]} | {"launch", "gid"}
    assert tested == set(preflight.CHECKS)


def test_ten_defects_at_once(tmp_path, right):
    """All of them in one run, each on the host that has it, with its remedy; nothing about the host that is right."""
    process = [(1, "<processes>\n\t\t</processes>", PROCESS), (2, "<current_ecc>Enabled", "<current_ecc>Disabled")]
    facts = observe(
        tmp_path / "node",
        hcas(7, rate="200 Gb/sec (2X NDR)"),
        edit_xml=process,
        fabric_state="In Progress",
        kernel=XID,
        packages={**PACKAGES, "nvidia-fabricmanager": "590.48.01-1"},
        files={
            "/etc/nccl.conf": "NCCL_DEBUG=INFO\n",
            "/etc/kimi-k3/fabric.env": f'NCCL_IB_HCA="{HCA.replace("mlx5_7:1,", "")}"\nNCCL_IB_DISABLE="1"\n',
        },
    )
    put("resolution/addresses", ["127.0.1.1"])(facts)
    put("unit/memlock", "8388608")(facts)
    result = judge({"gpu-a": right, "gpu-b": facts})
    assert {check for check, host in found(result) if host == "gpu-b"} == {
        "rails", "gpu-processes", "ecc", "fabric-state", "xid", "companions", "nccl-conf", "environment", "hostname",
        "memlock",
    }  # fmt: skip
    assert not [row for row in result["rows"] if row["host"] == "gpu-a"]
    assert all(row["remedy"] for row in result["rows"])
    told = preflight.lines(result)
    assert told[-1] == f"{len(preflight.CHECKS)} checks on 2 hosts: {result['failed']} failed, 2 warnings."
    assert result["failed"] >= 8
    assert sum(line.startswith("       remedy: ") for line in told) == len(result["rows"])


def test_a_replica_that_serves_is_no_defect(tmp_path, right):
    edit = [(None, "<processes>\n\t\t</processes>", PROCESS), (None, "<used>0 MiB</used>", "<used>170000 MiB</used>")]
    facts = observe(tmp_path / "node", edit_xml=edit)
    facts["unit"].update(active=True, running=True)
    facts["meeting"]["busy"] = [8000, 29500]
    for process in facts["processes"]:
        process["own"] = True
    assert judge({"gpu-a": facts, "gpu-b": right})["rows"] == []


def test_processes_are_told_apart_by_their_control_group(tmp_path):
    edit = [(0, "<processes>\n\t\t</processes>", PROCESS)]
    node = fake.Node(tmp_path / "node", XML, edit_xml=edit)
    node.put("proc/4711/cgroup", "0::/system.slice/kimi-k3.service/engine\n")
    where = node.arguments
    look = Look(answers(node), where["sys_root"], where["proc_root"], where["command_path"], where["root"])
    gpus = preflight_look.gpu_look.smi_answer(look)[0]["gpus"]
    assert preflight_look.processes(look, gpus, "/system.slice/kimi-k3.service")[0]["own"] is True
    assert preflight_look.processes(look, gpus, "/system.slice/kimi-k3")[0]["own"] is False
    assert preflight_look.processes(look, gpus, None)[0]["own"] is False


def test_a_guest_needs_no_fabric_manager_of_its_own(tmp_path):
    facts = observe(tmp_path / "node", services={}, virtualization="kvm", acs=["0000:15:01.0"])
    assert judge({"gpu-a": facts})["rows"] == []


def test_waivers_severities_and_what_is_no_check(right):
    facts = copy.deepcopy(right)
    put("unit/memlock", "8388608")(facts)
    put("host/synchronized", False)(facts)
    expected = expectations()
    expected["waivers"] = {"memlock": "root starts it by hand"}
    expected["severities"] = {"clock-sync": "fail", "no-such": "warn"}
    result = judge({"gpu-a": facts}, {"gpu-a": expected})
    assert {row["check"]: row["status"] for row in result["rows"]} == {"memlock": "waived", "clock-sync": "fail"}
    assert (result["failed"], result["waived"], result["unknown"]) == (1, 1, ["no-such"])
    told = preflight.lines(result)
    assert "       waived: root starts it by hand" in told
    assert told[-1].endswith("1 failed, 1 waived.")


def test_the_mount_below_which_a_path_lies():
    mounts = (
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:40 / /var/lib rw - tmpfs tmpfs rw\n"
        "31 22 9:0 / /srv rw - xfs /dev/md0 rw\n32 22 9:0 / /srv-other rw - ext4 /dev/sdc rw\n"
    )
    assert preflight_look.mount_of("/var/lib/models", mounts)["type"] == "tmpfs"
    assert preflight_look.mount_of("/srv/kimi-k3", mounts) == {"point": "/srv", "type": "xfs", "device": "/dev/md0"}
    assert preflight_look.mount_of("/home", mounts)["point"] == "/"


def test_reserved_ports():
    assert preflight.reserved_ports("8000,29500-29502") == {8000, 29500, 29501, 29502}
    assert preflight.reserved_ports("") == set()


def test_only_environment_that_a_check_knows_is_read(tmp_path):
    text = "HF_TOKEN=hf_secret\nNCCL_DEBUG=INFO\nVLLM_API_KEY=secret\nhttps_proxy=http://user:secret@proxy\n"
    facts = observe(tmp_path / "node", files={"/etc/environment": text})
    assert facts["environment"]["/etc/environment"] == {"NCCL_DEBUG": "INFO"}
    assert "secret" not in json.dumps(facts)


def at(node):
    where = node.arguments
    return Look(answers(node), where["sys_root"], where["proc_root"], where["command_path"], where["root"])


def rows_of(facts, expected, check):
    rows = judge({"gpu-a": facts}, {"gpu-a": expected})["rows"]
    return [(row["status"], row["text"]) for row in rows if row["check"] == check]


def test_what_was_rendered_before_holds_nobody_up(tmp_path):
    """Set with a waiver, then both taken out: the file is rewritten after this, and only what it will be counts."""
    stale = 'NCCL_DEBUG="INFO"\nVLLM_ALLREDUCE_USE_FLASHINFER="1"\n'
    facts = observe(tmp_path / "node", files={"/etc/kimi-k3/serve.env": stale})
    assert facts["environment"]["/etc/kimi-k3/serve.env"]["NCCL_DEBUG"] == "INFO"
    assert judge({"gpu-a": facts})["rows"] == []


def test_nothing_in_serve_environment_takes_out_what_role_fabric_wrote(tmp_path):
    written = f'NCCL_IB_HCA="{HCA}"\nNCCL_DEBUG="INFO"\n'
    facts = observe(tmp_path / "node", files={"/etc/kimi-k3/fabric.env": written})
    assert rows_of(facts, expectations(), "environment") == [
        ("fail", "NCCL_DEBUG=INFO is set on gpu-a (/etc/kimi-k3/fabric.env): it floods the log.")
    ]
    expected = {**expectations(), "environment": {**ENVIRONMENT, "NCCL_DEBUG": None}}
    assert rows_of(facts, expected, "environment") == []
    expected["environment"]["NCCL_DEBUG"] = "TRACE"
    assert [text for _status, text in rows_of(facts, expected, "environment")] == [
        "NCCL_DEBUG=TRACE is set on gpu-a (serve_environment): it floods the log."
    ]


def test_what_is_set_for_everybody_reaches_no_service(tmp_path):
    lines = "NCCL_P2P_DISABLE=1\nARCH=x86\nNCCL_IB_HCA=mlx5_1\nVLLM_ALLREDUCE_USE_FLASHINFER=1\n"
    result = judge({"gpu-a": observe(tmp_path / "node", files={"/etc/environment": lines})})
    assert {(row["check"], row["status"]) for row in result["rows"]} == {("environment", "warn")}
    assert len(result["rows"]) == 2


@pytest.mark.parametrize("value", ["0,1,2,3,4,5,6,7", "7,6,5,4,3,2,1,0", ",".join(f"GPU-{n}" for n in range(8))])
def test_all_gpus_named_hide_none(right, value):
    expected = {**expectations(), "environment": {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": value}}
    assert rows_of(copy.deepcopy(right), expected, "environment") == []


def test_switches_that_are_off_do_nothing(right):
    off = dict.fromkeys(preflight.FORBIDDEN_SWITCHES, "0")
    assert rows_of(copy.deepcopy(right), {**expectations(), "environment": {**ENVIRONMENT, **off}}, "environment") == []


def test_before_anything_is_installed_nobody_can_have_named_the_rails(right):
    facts = copy.deepcopy(right)
    facts["environment"] = {}
    assert rows_of(facts, {**expectations(), "installed": False}, "nccl-hca") == []
    facts["environment"] = {"/etc/kimi-k3/fabric.env": {}}
    assert len(rows_of(facts, {**expectations(), "installed": False}, "nccl-hca")) == 1


def test_a_fabric_that_says_in_every_entry_that_it_is_healthy(right):
    facts = copy.deepcopy(right)
    facts["gpu"]["gpus"][3]["fabric"]["health"] = {
        "summary": "Healthy", "bandwidth": "Full", "route_recovery_in_progress": "False", "route_unhealthy": "False",
        "access_timeout_recovery": "False", "incorrect_configuration": "None", "partition_assigned": "True",
        "an_entry_of_tomorrow": "No",
    }  # fmt: skip
    assert rows_of(facts, expectations(), "fabric-health") == []
    facts["gpu"]["gpus"][3]["fabric"]["health"]["an_entry_of_tomorrow"] = "Yes"
    assert [status for status, _text in rows_of(facts, expectations(), "fabric-health")] == ["warn"]


def test_one_management_port_with_a_subnet_manager_is_enough(tmp_path):
    ports = fake.adapters()
    for port in ports[:3]:
        port["cap_mask"] = "0xa751ec48"
    facts = observe(tmp_path / "node", ports)
    assert [port["sm_disabled"] for device in facts["rdma"]["devices"] for port in device["ports"]][:4] == [
        True, True, True, False,
    ]  # fmt: skip
    assert rows_of(facts, expectations(), "nvlsm") == []


@pytest.mark.parametrize(
    ("held", "excluded", "told"),
    [
        (["nvidia-fabricmanager"], [], "libnvidia-nscq, libnvsdm, nvidia-open and 1 more"),
        ([], ["^nvidia-fabricmanager"], "libnvidia-nscq, libnvsdm, nvidia-open and 1 more"),
        ([], ["nvidia-", "libnvidia-", "libnv"], "nvlsm is not"),
        (["nvlsm"], ["^nvidia-", "^lib(nvidia|nvsdm)"], None),
        (list(PACKAGES), [], None),
        ([], ["(", ".*"], None),
    ],
)
def test_all_of_the_driver_must_be_held_or_excluded(tmp_path, held, excluded, told):
    packages = {**PACKAGES, "unattended-upgrades": "2.9"}
    facts = observe(tmp_path / "node", packages=packages, held=held, excluded=excluded)
    texts = [text for _status, text in rows_of(facts, expectations(), "apt-pins")]
    assert len(texts) == (told is not None)
    assert told is None or told in texts[0]


def test_secure_boot_and_a_module_that_was_built_on_the_host(right, tmp_path):
    facts = copy.deepcopy(right)
    facts["gpu"]["driver"].update(running=None, dkms=True)
    assert rows_of(facts, expectations(), "secure-boot") == []
    facts["secure_boot"] = True
    ((status, text),) = rows_of(facts, expectations(), "secure-boot")
    assert status == "fail"
    assert text.startswith("Secure Boot is on at gpu-a, and its driver's module was built there")
    # A driver that runs was accepted, whatever the log says of another module.
    facts["gpu"]["driver"]["running"] = "580.159.04"
    facts["module_rejected"] = "Loading of unsigned module is rejected"
    assert rows_of(facts, expectations(), "secure-boot") == []
    node = fake.Node(tmp_path / "node", XML)
    assert preflight_look.secure_boot(at(node)) is None
    for byte, on in ((b"\x01", True), (b"\x00", False)):
        node.put(f"sys/{preflight_look.SECURE_BOOT}", b"\x06\0\0\0" + byte)
        assert preflight_look.secure_boot(at(node)) is on


def test_the_kernels_words_for_a_module_that_it_refuses(tmp_path):
    for number, line in enumerate(
        [
            "Loading of unsigned module is rejected",
            "Loading of module with unsupported crypto is rejected",
            "Lockdown: modprobe: unsigned module loading is restricted; see man kernel_lockdown.7",
            "PKCS#7 signature not signed with a trusted key",
        ]
    ):
        node = fake.Node(tmp_path / f"node{number}", XML, kernel=["usb 1-1: new device", line])
        assert preflight_look.module_rejected(at(node)) == line
    # Told of a module that is loaded all the same.
    tainted = "nvidia: module verification failed: signature and/or required key missing - tainting kernel"
    assert preflight_look.module_rejected(at(fake.Node(tmp_path / "node", XML, kernel=[tainted]))) is None


def test_a_module_beside_a_deep_folder_is_found(tmp_path):
    """The walk goes into folders in any order: a deep one that comes first must not end it."""
    node = fake.Node(tmp_path / "node", XML)
    base = node.base / "root/lib/modules/9.9.9"
    (base / "/".join("abcdefghij")).mkdir(parents=True)
    (base / "updates/dkms").mkdir(parents=True)
    assert not preflight_look.module_of(at(node), "9.9.9")
    for folder in ("updates/dkms", "a/updates"):
        file = base / folder / "nvidia.ko.zst"
        file.parent.mkdir(exist_ok=True)
        file.touch()
        assert preflight_look.module_of(at(node), "9.9.9")
        file.unlink()


SHOW = "show --property LoadState,ActiveState,SubState,LimitMEMLOCK,ControlGroup -- kimi-k3.service"


@pytest.mark.parametrize(
    ("active", "sub", "running"),
    [
        ("active", "running", True),
        ("activating", "start", True),
        ("activating", "auto-restart", False),
        ("activating", "auto-restart-queued", False),
        ("inactive", "dead", False),
    ],
)
def test_a_unit_between_two_attempts_runs_nothing(tmp_path, active, sub, running):
    node = fake.Node(tmp_path / "node", XML)
    node.command(
        "systemctl", {SHOW: f"LoadState=loaded\nActiveState={active}\nSubState={sub}\nLimitMEMLOCK=infinity\n"}
    )
    seen = preflight_look.unit(at(node), "kimi-k3.service")
    assert (seen["active"], seen["running"]) == (active != "inactive", running)


def test_a_taken_port_is_told_while_the_unit_restarts_in_vain(right):
    facts = copy.deepcopy(right)
    facts["meeting"]["busy"] = [29500]
    facts["unit"].update(active=True, running=False)
    assert rows_of(facts, expectations(), "ports-taken") == [
        ("fail", "Something else listens on 29500 of gpu-a, and the replica does not run.")
    ]


def test_a_port_that_another_has_taken_is_told_beside_a_replica_that_runs(right):
    facts = copy.deepcopy(right)
    facts["unit"].update(active=True, running=True)
    facts["meeting"]["busy"] = [8000, 29500]
    facts["listeners"] = {"8000": False, "29500": True}
    assert rows_of(facts, expectations(), "ports-taken") == [
        ("fail", "Something else listens on 8000 of gpu-a, and is not the replica.")
    ]


def test_who_listens_is_told_by_the_control_group(tmp_path):
    node = fake.Node(tmp_path / "node", XML)
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: {}:{:04X} 00000000:0000 {} 00000000:00000000 00:00000000 00000000     0        0 {} 1 x 100 0 0 10 0\n"
    rows = [("0100007F", 8000, "0A", 11), ("0100007F", 29500, "0A", 12), ("0100007F", 29501, "01", 13)]
    node.put("proc/self/net/tcp", head + "".join(row.format(*one) for one in rows))
    node.put("proc/self/net/tcp6", head + row.format("0" * 32, 8000, "0A", 14))
    own = "/system.slice/kimi-k3.service"
    assert preflight_look.listeners(at(node), [8000, 29500, 29501], own) == {}
    node.put(f"sys/fs/cgroup{own}/engine/cgroup.procs", "4711\n")
    (node.base / "proc/4711/fd").mkdir(parents=True)
    for number, inode in ((3, 11), (4, 12), (5, 99)):
        (node.base / f"proc/4711/fd/{number}").symlink_to(f"socket:[{inode}]")
    assert preflight_look.listeners(at(node), [8000, 29500, 29501], own) == {"8000": False, "29500": True}
    assert preflight_look.listeners(at(node), [8000], None) == {}


def shards(folder, monkeypatch):
    monkeypatch.setattr(preflight_look, "READ_LIMIT", 4096)
    (folder / "model-00001.safetensors").write_bytes(bytes(8192))
    return folder


def test_the_rate_of_a_read(tmp_path, monkeypatch):
    look = at(fake.Node(tmp_path / "node", XML))
    assert preflight_look.storage(look, str(tmp_path / "not/yet"), measure=True)["read_mb_s"] is None
    seen = preflight_look.storage(look, str(shards(tmp_path, monkeypatch)), measure=True)
    assert seen["read_mb_s"] >= 0
    assert seen["error"] is None


@pytest.mark.parametrize(("call", "number"), [("read", errno.EIO), ("statvfs", errno.ESTALE), ("scandir", errno.EIO)])
def test_a_disk_that_cannot_be_read_is_a_finding(tmp_path, monkeypatch, right, call, number):
    def fails(*_args):
        raise OSError(number, os.strerror(number))

    look = at(fake.Node(tmp_path / "node", XML))
    folder = str(shards(tmp_path, monkeypatch))
    with monkeypatch.context() as broken:
        broken.setattr(preflight_look.os, call, fails)
        seen = preflight_look.storage(look, folder, measure=True)
    facts = {**copy.deepcopy(right), "storage": seen}
    assert rows_of(facts, expectations(), "checkpoint-disk")[0] == (
        "fail", f"{folder} of gpu-a cannot be read: {os.strerror(number)}.",
    )  # fmt: skip


def test_files_that_are_gone_and_files_of_another_size(tmp_path):
    names = [f"model-{number}.safetensors" for number in range(3)]
    (tmp_path / "checkpoint.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(names))}))
    (tmp_path / ".kimi-k3").mkdir()
    receipts = {names[0]: {"size": 5}, names[1]: {"size": 5}}
    (tmp_path / ".kimi-k3/receipts.json").write_text(json.dumps({"schema": 1, "files": receipts}))
    (tmp_path / names[0]).write_text("short")
    (tmp_path / names[1]).write_text("cut")
    seen = preflight_look.checkpoint(str(tmp_path))
    assert (seen["missing"], seen["short"]) == ([names[2]], [names[1]])


def test_parts_of_flashinfer_are_read_with_their_versions(tmp_path):
    look = at(fake.Node(tmp_path / "node", XML))
    site = tmp_path / "venv/lib/python3.12/site-packages"
    for name in ("flashinfer_python-0.6.1", "flashinfer_cubin-0.6.1", "flashinfer_jit_cache-0.6.1+cu130", "ninja-1.13"):
        (site / f"{name}.dist-info").mkdir(parents=True)
    (tmp_path / "venv/engine.json").write_text("{}")
    seen = preflight_look.engine(look, str(tmp_path / "venv"))
    assert (seen["flashinfer"], seen["cubins"], seen["ninja"]) == ("0.6.1", True, True)
    assert seen["flashinfer_parts"] == {"flashinfer-cubin": "0.6.1", "flashinfer-jit-cache": "0.6.1"}


def test_the_diagnosis(tmp_path):
    table = "| Deployment      | Pass |\n| Memory          | Fail - GPU 3 |\n"
    node = fake.Node(tmp_path / "node", XML)
    assert preflight_look.diagnose(at(node), 0, busy=False) is None
    assert preflight_look.diagnose(at(node), 1, busy=True) is None
    absent = preflight_look.diagnose(Look(lambda *_a, **_k: (1, "", ""), path="/nonexistent"), 1, busy=False)
    assert absent["failed"] == ["there is no dcgmi on this host"]
    node.command("dcgmi", {"diag --run 1": table})
    assert preflight_look.diagnose(at(node), 1, busy=False) == {"level": 1, "rc": 0, "failed": ["Memory Fail - GPU 3"]}
    # A level that the tool does not know.
    assert preflight_look.diagnose(at(node), 2, busy=False)["rc"] == 2
