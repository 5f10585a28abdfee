# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inventory of the lab. The roles see nothing of the lab but this.

The engine's settings are those with which vLLM's CPU build starts soonest: on two cores a start is nearly all importing
of Python modules, and compiling would double it. ``mode`` 1 with ``TORCHDYNAMO_DISABLE`` compiles nothing, and unlike
``--enforce-eager`` (mode 0) it still makes a trial run, without which a second pipeline stage dies at its first token.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import lab_checkpoint
import lab_wheelhouse

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from lab_settings import Settings

PIPELINE_LAYERS = [4, 2]

SERVE_ARGS = {
    "trust-remote-code": True,
    # Where AMX is advertised and not usable, bfloat16 dies of an illegal instruction.
    "dtype": "float32",
    "max-model-len": 512,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 512,
    "kv-cache-memory-bytes": 64 << 20,
    "compilation-config": {"mode": 1, "cudagraph_mode": "NONE"},
    "seed": 0,
}
SERVE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
# What the lab's hosts are: containers on a small machine, without GPUs and InfiniBand.
NO_GPUS = {
    "cuda_manage_driver": False,
    "fabric_rail_count": 0,
    # Over gloo and a bridge of this machine: that it runs and adds up, not how fast.
    "fabric_test_sizes": [65536, 1048576],
    "fabric_test_gates": {},
    "preflight_expect_gpus": 0,
    "preflight_expect_rails": 0,
    "preflight_expect_cpus": 1,
    "preflight_expect_memory_gib": 4,
    "preflight_expect_numa_nodes": 1,
    "preflight_expect_shm_mib": 64,
    "preflight_expect_checkpoint_gib": 1,
    "preflight_expect_read_mb_s": 0,
    # The clock is that of the machine outside, and so is whatever keeps it right.
    "preflight_expect_clock_sync": False,
}
SSH_ARGS = (
    "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o ConnectTimeout=10 "
    # A host whose power was cut takes its shared connection along, and does not say so.
    "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
)


def inventory(settings: Settings, revision: str) -> dict[str, Any]:
    """The inventory as data."""
    variables = {
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(settings.key),
        "ansible_ssh_common_args": SSH_ARGS,
        "ansible_python_interpreter": "/usr/bin/python3",
        "serve_tensor_parallel_size": 1,
        "serve_pipeline_parallel_size": len(PIPELINE_LAYERS),
        "serve_layers": lab_checkpoint.LAYERS,
        "serve_pipeline_layers": PIPELINE_LAYERS,
        "serve_profile": "none",
        "serve_args": SERVE_ARGS,
        "serve_environment": SERVE_ENVIRONMENT,
        "serve_wait_timeout": 600,
        # A hung rank is found soon enough to watch, and breaking a rank again and again is what the lab is for.
        "serve_probe_interval": 10,
        "serve_probe_timeout": 20,
        "serve_restart_limit": 100,
        "checkpoint_endpoint": settings.endpoint,
        "checkpoint_repository": lab_checkpoint.REPOSITORY,
        "checkpoint_revision": revision,
        "checkpoint_scope": "stage",
        "checkpoint_layers": lab_checkpoint.LAYERS,
        **NO_GPUS,
        "vllm_lock": str(lab_wheelhouse.ENGINE_LOCK),
        "vllm_wheelhouse": "/srv/wheelhouse",
        "vllm_system_packages": [],
    }
    hosts = {host.name: {"ansible_host": host.address, "serve_rank": host.rank} for host in settings.hosts}
    return {"kimi_k3": {"hosts": hosts, "vars": variables}}


def to_yaml(value: Any, indent: int = 0) -> str:
    """A nested dictionary as YAML: keys a line each, everything else as JSON, which YAML contains."""
    lines = []
    for key, item in value.items():
        start = f"{'  ' * indent}{key}:"
        if isinstance(item, dict) and item:
            lines.append(f"{start}\n{to_yaml(item, indent + 1)}")
        else:
            lines.append(f"{start} {json.dumps(item)}\n")
    return "".join(lines)


def write(settings: Settings, revision: str) -> Path:
    """Write the inventory, and leave a file alone that is right."""
    text = "---\n# Written by molecule/lab/lab.py up; changes are lost.\n" + to_yaml(inventory(settings, revision))
    file = settings.inventory / "hosts.yml"
    if not file.is_file() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{file.name}.new")
        new.write_text(text)
        new.rename(file)
    return file


def remove(settings: Settings) -> None:
    """Remove the inventory, and its folder if nothing else is in it."""
    (settings.inventory / "hosts.yml").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        settings.inventory.rmdir()
