# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: preflight_info
short_description: Everything of a host that a start of the replica depends on
version_added: "1.0.0"
description:
  - Reads in one execution what M(baremetal.kimi_k3.gpu_info) and M(baremetal.kimi_k3.rdma_info) read, and besides the
    operating system, the way to the peers, the disk and content of the checkpoint, the engine, shared memory, limits,
    environment, pending reboots, and who uses the GPUs.
  - Run on all hosts of a replica at the same time, each host also connects to each other, in both directions, to the
    replica's ports as far as these are free, and measures the difference of the clocks on the way.
  - It judges nothing but RDMA ports. P(baremetal.kimi_k3.preflight_verdict#filter) judges what it returns.
  - It reads no secrets. While the replica serves it reads no shard and diagnoses no GPU.
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
extends_documentation_fragment:
  - baremetal.kimi_k3.attributes
  - baremetal.kimi_k3.attributes.info
  - baremetal.kimi_k3.attributes.actiongroup
  - baremetal.kimi_k3.looking
options:
  mode:
    description: The kind of fabric the rails are.
    type: str
    choices: [infiniband, roce]
    default: infiniband
  min_rate:
    description: Gigabits per second below which a port is no rail.
    type: float
    default: 400
  rails:
    description: Names of the devices that are the rails; empty finds them.
    type: list
    elements: str
    default: []
  unit:
    description: The systemd unit of the replica.
    type: str
    default: kimi-k3.service
  venv:
    description: The virtual environment of the engine.
    type: path
  checkpoint:
    description: The directory of the checkpoint.
    type: path
  read_rate:
    description: Whether to read from the checkpoint for up to two seconds to see how fast that is.
    type: bool
    default: false
  dcgm_level:
    description: Level of C(dcgmi diag) to run while the replica does not serve; 0 for none.
    type: int
    default: 0
  peer:
    description: Name or address of another host; the interface of the route to it is returned.
    type: str
  address:
    description: An address of this host. When given, the interface that carries it is returned instead of the route's.
    type: str
  name:
    description: The name under which the peers know this host. Needed for O(peers).
    type: str
  group:
    description: A word that hosts of one replica share, so that those of two do not answer each other.
    type: str
    default: kimi_k3
  peers:
    description: The other hosts of the replica, which run this module at the same time.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: The name under which the peer knows itself.
        type: str
        required: true
      address:
        description: The address at which it is reached.
        type: str
        required: true
  port:
    description: The port on which the hosts meet.
    type: int
    default: 29502
  ports:
    description: Further ports to connect to. One that something else listens on is left alone and told.
    type: list
    elements: int
    default: []
  meet_timeout:
    description: Seconds to wait for the peers at most.
    type: float
    default: 20
seealso:
  - plugin: baremetal.kimi_k3.preflight_verdict
    plugin_type: filter
notes:
  - It was run on two H200 in a virtual machine and on hosts without GPUs. It was never run on a B200 or on InfiniBand.
"""

EXAMPLES = r"""
- name: Look at the host
  baremetal.kimi_k3.preflight_info:
    checkpoint: /srv/kimi-k3/checkpoint
  register: observed

- name: Say how much room there is
  ansible.builtin.debug:
    msg: "{{ observed.storage.free_gib }} GiB on {{ observed.storage.type }}"
"""

RETURN = r"""
gpu:
  description: What M(baremetal.kimi_k3.gpu_info) returns.
  returned: success
  type: dict
rdma:
  description: Devices, verdict, interfaces, Access Control Services and stack as M(baremetal.kimi_k3.rdma_info)
    returns.
  returned: success
  type: dict
virtualization:
  description: Kind of virtual machine, V(none) on metal.
  returned: success
  type: str
host:
  description: Name, operating system, kernel, processors, memory, NUMA nodes, NVMe drives, clock, IOMMU.
  returned: success
  type: dict
resolution:
  description: What the host's own name resolves to.
  returned: success
  type: dict
route:
  description: Address and interface towards the peer, V(none) when neither O(peer) nor O(address) is given.
  returned: success
  type: dict
meeting:
  description: What came of connecting to O(peers), with ports that are open, closed and busy, and the clocks'
    difference.
  returned: success
  type: dict
storage:
  description: File system that holds the checkpoint, its room, the rate of a cold read, and why it cannot be read.
  returned: success
  type: dict
shm:
  description: Size and free room of shared memory, and what earlier runs left there.
  returned: success
  type: dict
unit:
  description: State of the unit, whether processes of it run, and its limit of locked memory.
  returned: success
  type: dict
processes:
  description: Processes on GPUs, each with its control group and whether it is the replica's own.
  returned: success
  type: list
  elements: dict
listeners:
  description: Of the ports that something listens on, whether it is a process of the unit's control group; empty when
    that cannot be told.
  returned: success
  type: dict
module_rejected:
  description: The kernel's line about a module that it refuses, since boot.
  returned: success
  type: str
secure_boot:
  description: Whether Secure Boot is on, V(none) on a machine without EFI.
  returned: success
  type: bool
reboot:
  description: Why the host wants to be rebooted.
  returned: success
  type: dict
nouveau:
  description: Whether nouveau is loaded.
  returned: success
  type: bool
engine:
  description: Lock and versions of the engine, and whether it can compile kernels; V(none) without one.
  returned: success
  type: dict
checkpoint:
  description: What the checkpoint states of itself, and which of its files are gone or have another size than was
    proven; V(none) without one.
  returned: success
  type: dict
environment:
  description: Variables that checks know, by environment file.
  returned: success
  type: dict
nccl_files:
  description: System-wide settings of NCCL, by file.
  returned: success
  type: dict
fabric_mode:
  description: Mode of the Fabric Manager, V(none) without its configuration.
  returned: success
  type: str
sysctls:
  description: Kernel parameters that matter.
  returned: success
  type: dict
dcgm:
  description: The verdict of DCGM's diagnosis, V(none) when none was run.
  returned: success
  type: dict
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import preflight_look, preflight_peers
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.host_look import Look
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.route import RouteError, route_to


def route(look: Look, asked: t.Mapping[str, t.Any]) -> dict[str, t.Any] | None:
    """Address and interface towards the peer; a route that is not there is for the verdict to tell."""
    try:
        found = route_to(asked["peer"], asked["address"], lambda: look.output("ip", "-json", "address", "show"))
    except RouteError as problem:
        return {"address": asked["address"], "interface": None, "error": str(problem)}
    return found and {**found, "error": None}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "str", "choices": ["infiniband", "roce"], "default": "infiniband"},
            "min_rate": {"type": "float", "default": 400},
            "rails": {"type": "list", "elements": "str", "default": []},
            "unit": {"type": "str", "default": "kimi-k3.service"},
            "venv": {"type": "path"},
            "checkpoint": {"type": "path"},
            "read_rate": {"type": "bool", "default": False},
            "dcgm_level": {"type": "int", "default": 0},
            "peer": {"type": "str"},
            "address": {"type": "str"},
            "name": {"type": "str"},
            "group": {"type": "str", "default": "kimi_k3"},
            "peers": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"type": "str", "required": True},
                    "address": {"type": "str", "required": True},
                },
            },
            "port": {"type": "int", "default": 29502},
            "ports": {"type": "list", "elements": "int", "default": []},
            "meet_timeout": {"type": "float", "default": 20},
            "sys_root": {"type": "path", "default": "/sys"},
            "proc_root": {"type": "path", "default": "/proc"},
            "root": {"type": "path", "default": "/"},
            "command_path": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    asked = module.params
    if asked["peers"] and not asked["name"]:
        module.fail_json(msg="'peers' is given without 'name': say under which name the peers know this host.")
    look = Look(module.run_command, asked["sys_root"], asked["proc_root"], asked["command_path"], asked["root"])
    way = route(look, asked)
    meeting: dict[str, t.Any] = {"problem": None, "busy": [], "peers": [], "absent": []}
    # First of all, while the hosts' executions still are beside each other.
    if asked["peers"] and way and way["address"]:
        meeting = preflight_peers.meet(
            asked["name"],
            way["address"],
            asked["peers"],
            port=asked["port"],
            others=asked["ports"],
            group=asked["group"],
            timeout=asked["meet_timeout"],
        )
    module.exit_json(changed=False, route=way, meeting=meeting, **preflight_look.gather(look, asked))


if __name__ == "__main__":
    main()
