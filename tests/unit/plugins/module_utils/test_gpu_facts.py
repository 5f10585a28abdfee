# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsers of what NVIDIA's tools print; tests/fixtures/h200-vm is real output of driver 580."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import gpu_facts as facts

REAL = Path(__file__).resolve().parents[3] / "fixtures" / "h200-vm"


def real(name: str) -> str:
    return (REAL / name).read_text(encoding="utf-8")


def test_the_real_output_of_an_h200():
    smi = facts.parse_smi(real("nvidia-smi-q.xml"))
    assert (smi["driver"], smi["cuda"], len(smi["gpus"])) == ("580.159.04", "13.0", 1)
    gpu = smi["gpus"][0]
    assert gpu["name"] == "NVIDIA H200"
    assert gpu["bus"] == "0000:00:06.0"
    assert gpu["vbios"] == "96.00.A5.00.1A"
    assert gpu["persistence"] is True
    assert gpu["mig"] is False
    assert gpu["recovery_action"] == "None"
    assert (gpu["memory_total_mib"], gpu["memory_used_mib"]) == (143771, 0)
    assert gpu["ecc"] == {
        "enabled": True,
        "pending": True,
        "volatile_uncorrectable": 0,
        "aggregate_uncorrectable": 0,
        "sram_threshold_exceeded": False,
        "repair_pending": False,
        "unrepairable": False,
    }
    assert gpu["remapped_rows"]["pending"] is False
    assert gpu["remapped_rows"]["failure"] is False
    assert gpu["clocks"] == {"sm_mhz": 1980, "max_sm_mhz": 1980, "reasons": ["gpu_idle"]}
    assert (gpu["pcie"]["generation"], gpu["pcie"]["width"]) == (5, 16)
    assert gpu["power_w"] == 128.71
    # The guest sees no fabric: N/A is no state, and no health.
    assert gpu["fabric"] == {"state": None, "status": None, "clique": None, "cluster": None, "health": {}}
    assert gpu["processes"] == []


def test_a_process_and_a_fabric_are_read():
    text = real("nvidia-smi-q.xml").replace(
        "<processes>\n\t\t</processes>",
        "<processes><process_info><gpu_instance_id>N/A</gpu_instance_id><pid>4711</pid><type>C</type>"
        "<process_name>/opt/kimi-k3/venv/bin/python3</process_name><used_memory>131072 MiB</used_memory>"
        "</process_info></processes>",
    )
    text = text.replace("<state>N/A</state>", "<state>Completed</state>").replace(
        "<incorrect_configuration>N/A", "<incorrect_configuration>Insufficient Nvlinks"
    )
    gpu = facts.parse_smi(text)["gpus"][0]
    assert gpu["processes"] == [
        {"pid": 4711, "type": "C", "name": "/opt/kimi-k3/venv/bin/python3", "memory_mib": 131072}
    ]
    assert gpu["fabric"]["state"] == "Completed"
    assert gpu["fabric"]["health"] == {"incorrect_configuration": "Insufficient Nvlinks"}


@pytest.mark.parametrize("text", ["", "No devices were found\n", "<nvidia_smi_log><gpu>"])
def test_what_is_no_answer_is_told_as_such(text):
    with pytest.raises(facts.SmiError):
        facts.parse_smi(text)


def test_the_flavour_of_a_running_driver():
    assert facts.parse_driver_version(real("version.txt")) == {"version": "580.159.04", "flavour": "open"}
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.148.08  Thu May  8 03:27:05 UTC 2025\n"
    assert facts.parse_driver_version(closed) == {"version": "570.148.08", "flavour": "proprietary"}
    assert facts.parse_driver_version("") == {"version": None, "flavour": None}


@pytest.mark.parametrize(("text", "flavour"), [("Dual MIT/GPL\n", "open"), ("NVIDIA\n", "proprietary"), ("", None)])
def test_the_flavour_of_a_module_on_disk(text, flavour):
    assert facts.flavour_of_license(text) == flavour


def test_buses_are_written_as_sysfs_writes_them():
    assert facts.normalise_bus("00000000:1B:00.0") == "0000:1b:00.0"
    assert facts.normalise_bus("1B:00.0") == "0000:1b:00.0"


NVLINK = """GPU 0: NVIDIA B200 (UUID: GPU-00000000-0000-0000-0000-000000000001)
\t Link 0: 53.125 GB/s
\t Link 1: 53.125 GB/s
\t Link 2: <inactive>
GPU 1: NVIDIA B200 (UUID: GPU-00000000-0000-0000-0000-000000000002)
\t Link 0: 53.125 GB/s
"""
ERRORS = """GPU 0: NVIDIA B200 (UUID: GPU-00000000-0000-0000-0000-000000000001)
\t Link 0: Replay Errors: 0
\t Link 0: Recovery Errors: 3
\t Link 1: Recovery Errors: 1
\t Link 1: CRC Errors: 0
GPU 1: NVIDIA B200 (UUID: GPU-00000000-0000-0000-0000-000000000002)
\t Link 0: Replay Errors: 0
"""


def test_nvlinks_and_their_errors():
    assert facts.parse_nvlink_status(NVLINK) == [
        {"index": 0, "up": 2, "inactive": [2], "rates": [53.125]},
        {"index": 1, "up": 1, "inactive": [], "rates": [53.125]},
    ]
    assert facts.parse_nvlink_status(real("nvlink.txt")) == []
    assert facts.parse_nvlink_errors(ERRORS) == {0: {"Recovery Errors": 4}, 1: {}}


# The names that drivers have for NVLink 5 since 595, with the counts of a healthy link after its start.
HEALTHY = """GPU 0: NVIDIA B200 (UUID: GPU-00000000-0000-0000-0000-000000000001)
\t Link 0: Tx packets: 1064
\t Link 0: Malformed packet Errors: 0
\t Link 0: Rx Errors: 0
\t Link 0: Tx discards: 0
\t Link 0: Link recovery successful events: 0
\t Link 0: Link recovery failed events: 0
\t Link 0: Total link recovery events: 0
\t Link 0: Effective Errors: 0
\t Link 0: Effective BER: 15e-255
\t Link 0: Raw Errors Lane 0: 82
\t Link 0: Raw BER Total: 1037
\t Link 0: FEC Errors - 0: 36140749276
\t Link 0: FEC Errors - 1: 12
\t Link 0: FEC Errors - 3: 0
\t Link 0: Symbol Errors: 0
"""


def test_what_counts_on_a_healthy_nvlink_is_no_error():
    assert facts.parse_nvlink_errors(HEALTHY) == {0: {}}


@pytest.mark.parametrize(
    "name",
    [
        "Link recovery failed events",
        "Link recovery successful events",
        "Effective Errors",
        "Symbol Errors",
        "Rx Errors",
        "Tx discards",
        "FEC Errors - 3",
    ],
)
def test_what_is_an_error_of_an_nvlink_is_counted(name):
    assert facts.parse_nvlink_errors(HEALTHY.replace(f"{name}: 0\n", f"{name}: 2\n")) == {0: {name: 2}}


def test_the_matrix_of_topo_with_and_without_escapes():
    assert facts.parse_topology(real("topo.txt")) == {"GPU0": {"GPU0": "X"}}
    text = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tPIX\tNODE\t0-15\nGPU1\tNV18\t X \tNODE\tPXB\t0-15\n"
        "NIC0\tPIX\tNODE\t X \tNODE\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
    )
    assert facts.parse_topology(text)["GPU0"] == {"GPU0": "X", "GPU1": "NV18", "NIC0": "PIX", "NIC1": "NODE"}
    assert facts.parse_topology(text)["NIC0"]["GPU1"] == "NODE"


def test_xids_are_counted_by_code_and_gpu():
    log = facts.parse_kernel_log(
        [
            "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:43:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
            "NVRM: GPU 0000:1b:00.0: RmInitAdapter failed! (0x22:0x56:894)",
            "nvidia_uvm: request_free_mem_region() failed, err -34",
            "unrelated",
        ]
    )
    assert [(event["code"], event["bus"], event["count"]) for event in log["xid"]] == [
        (79, "0000:1b:00.0", 2),
        (154, "0000:43:00.0", 1),
    ]
    assert [(event["code"], event["bus"]) for event in log["sxid"]] == [(12028, "0000:05:00.0")]
    assert "RmInitAdapter failed" in log["rm_init_adapter"]
    assert "err -34" in log["hmm"]
    assert log["module_rejected"] is None


def test_packages_that_are_installed_and_no_others():
    text = (
        "ii \tnvidia-fabricmanager\t580.159.04-1\tamd64\n"
        "hi \tlibnvidia-nscq\t580.159.04-1\tamd64\n"
        "rc \tnvidia-imex-570\t570.1-1\tamd64\n"
        "un \tnvlsm\t\t\n"
    )
    packages = facts.parse_packages(text)
    assert sorted(packages) == ["libnvidia-nscq", "nvidia-fabricmanager"]
    assert facts.companions_of(packages) == {
        "fabricmanager": {"package": "nvidia-fabricmanager", "version": "580.159.04-1"},
        "nscq": {"package": "libnvidia-nscq", "version": "580.159.04-1"},
    }


POLICY = """nvidia-open:
  Installed: 580.159.04-1
  Candidate: 590.48.01-1
  Version table:
     590.48.01-1 500
        500 https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64  Packages
 *** 580.159.04-1 100
        500 https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64  Packages
        100 /var/lib/dpkg/status
nvlsm:
  Installed: (none)
  Candidate: 2025.03.1-1
  Version table:
     2025.03.1-1 500
        500 http://archive.lambdalabs.com/ubuntu noble/main amd64 Packages
"""


def test_the_policy_of_apt_tells_origins():
    policy = facts.parse_policy(POLICY)
    assert policy["nvidia-open"]["candidate"] == "590.48.01-1"
    here = policy["nvidia-open"]["versions"]["580.159.04-1"]["origins"]
    assert facts.origin_kind(here) == "nvidia"
    assert policy["nvlsm"]["installed"] is None
    assert facts.origin_kind(policy["nvlsm"]["versions"]["2025.03.1-1"]["origins"]) == "lambda"
    assert facts.origin_kind(["http://archive.ubuntu.com/ubuntu"]) == "ubuntu"
    assert facts.origin_kind(["http://debian.org/debian"]) == "debian"
    assert facts.origin_kind(["file:/srv/repo"]) == "other"
    assert facts.origin_kind([]) is None


def test_sources_of_apt():
    lines = (
        "# deb http://commented.example /\n"
        "deb [arch=amd64 signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] https://nvidia.example/x86_64/ /\n"
        "deb-src http://debian.example/debian bookworm main\n"
        "deb http://debian.example/debian bookworm main contrib\n"
    )
    assert facts.parse_source_lines(lines) == [
        {
            "url": "https://nvidia.example/x86_64/",
            "suites": ["/"],
            "signed_by": "/usr/share/keyrings/cuda-archive-keyring.gpg",
        },
        {"url": "http://debian.example/debian", "suites": ["bookworm"], "signed_by": None},
    ]
    stanzas = (
        "# first\nTypes: deb deb-src\nURIs: http://a.example\n http://b.example\nSuites: x y\nComponents: main\n"
        "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abcd\n\n"
        "Types: deb\nURIs: http://off.example\nSuites: /\nEnabled: no\n\nTypes: deb-src\nURIs: http://s\nSuites: /\n\n"
        "types: deb\nuris: file:/srv/c\nsuites: /\nsigned-by: /k.asc\n"
    )
    assert facts.parse_source_stanzas(stanzas) == [
        {"url": "http://a.example", "suites": ["x", "y"], "signed_by": "embedded"},
        {"url": "http://b.example", "suites": ["x", "y"], "signed_by": "embedded"},
        {"url": "file:/srv/c", "suites": ["/"], "signed_by": "/k.asc"},
    ]


def test_versions():
    assert facts.release_of("1:580.126.09-1ubuntu1") == (580, 126, 9)
    assert facts.release_of(None) == ()
    assert facts.upstream_of("580.126.09-0ubuntu0.24.04.1") == "580.126.09"
    assert facts.release_of("580.95.05") < facts.release_of("580.126.09")


PAIR = REAL.parent / "h200-pair"


def pair(name: str) -> str:
    return (PAIR / name).read_text(encoding="utf-8")


def test_the_real_output_of_two_h200_with_a_fabric():
    smi = facts.parse_smi(pair("nvidia-smi-q.xml"))
    assert [gpu["bus"] for gpu in smi["gpus"]] == ["0000:00:06.0", "0000:00:07.0"]
    for gpu in smi["gpus"]:
        assert (gpu["fabric"]["state"], gpu["fabric"]["status"]) == ("Completed", "Success")
        assert gpu["fabric"]["health"] == {}
    assert [gpu["pcie"]["replays"] for gpu in smi["gpus"]] == [0, 4]
    links = facts.parse_nvlink_status(pair("nvlink-status.txt"))
    assert links == [{"index": index, "up": 18, "inactive": [], "rates": [26.562]} for index in (0, 1)]
    assert facts.parse_nvlink_errors(pair("nvlink-errors.txt")) == {0: {}, 1: {}}
    assert facts.parse_topology(pair("topo.txt"))["GPU0"]["GPU1"] == "NV18"
    log = facts.parse_kernel_log(pair("kernel.txt").splitlines())
    assert (log["xid"], log["sxid"], log["rm_init_adapter"]) == ([], [], None)
