# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_info
short_description: What a host's GPUs, their driver and its packages are
version_added: "1.0.0"
description:
  - Reads in one execution the GPUs as C(nvidia-smi -q -x) tells them, the driver that runs and the one that is
    installed, its packages with their origins, pins and holds, its companions, NVLink, and what the kernel's log says
    of Xids since boot.
  - A host without a GPU, without a driver or without a package manager is an answer, not an error. What a tool does not
    tell is V(none).
  - It needs only the Python standard library and root for the kernel's log.
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
extends_documentation_fragment:
  - baremetal.kimi_k3.attributes
  - baremetal.kimi_k3.attributes.info
  - baremetal.kimi_k3.attributes.actiongroup
  - baremetal.kimi_k3.looking
options:
  packages:
    description: Whether to ask the package manager.
    type: bool
    default: true
  ask:
    description: Further packages whose policy of apt is returned in RV(packages) below C(policy).
    type: list
    elements: str
    default: []
  kernel_log:
    description: Whether to read the kernel's log since boot.
    type: bool
    default: true
seealso:
  - module: baremetal.kimi_k3.rdma_info
  - module: baremetal.kimi_k3.preflight_info
notes:
  - Its parser was tried on the output of an H200 with driver 580 in a virtual machine. It was never run on a B200.
"""

EXAMPLES = r"""
- name: Look at the GPUs
  baremetal.kimi_k3.gpu_info:
  register: gpu

- name: Say how many there are, and which driver they have
  ansible.builtin.debug:
    msg: "{{ gpu.gpus | length }} GPUs, driver {{ gpu.driver.running }} ({{ gpu.driver.running_flavour }})"
"""

RETURN = r"""
gpus:
  description: The GPUs in the order of C(nvidia-smi), each with its name, bus, memory, ECC, remapped rows, recovery
    action, clocks, temperature, power, PCIe link, fabric and processes.
  returned: success
  type: list
  elements: dict
  sample: [{"index": 0, "name": "NVIDIA B200", "bus": "0000:1b:00.0", "fabric": {"state": "Completed"}}]
smi:
  description: Driver and CUDA release that C(nvidia-smi) states, and why it says nothing where it does not.
  returned: success
  type: dict
  sample: {"problem": null, "driver": "580.159.04", "cuda": "13.0"}
pci:
  description: NVIDIA's GPUs on the PCI bus, with or without a driver.
  returned: success
  type: list
  elements: dict
driver:
  description: The module that runs and the one on disk, each with its version and flavour, and how it came there.
  returned: success
  type: dict
  sample: {"running": "580.159.04", "running_flavour": "open", "installed": "580.159.04", "installed_flavour": "open"}
modules:
  description: Which of the kernel modules that matter are loaded.
  returned: success
  type: list
  elements: str
services:
  description: The units of the driver's family that systemd knows, by name.
  returned: success
  type: dict
nvlink:
  description: Per GPU the number of NVLinks that are up, those that are not, and error counters that are not zero.
  returned: success
  type: list
  elements: dict
kernel_log:
  description: Xid and SXid events since boot, and sentences of a driver that did not come up.
  returned: success
  type: dict
cuda_compat:
  description: Lines of the dynamic linker's configuration that put CUDA's compatibility libraries first.
  returned: success
  type: list
  elements: str
toolkit:
  description: Release of the CUDA toolkit's compiler, V(none) without one.
  returned: success
  type: str
system:
  description: Distribution, architecture, and kind of virtual machine.
  returned: success
  type: dict
packages:
  description: Installed packages of the driver's family with origins, candidates, holds, pins and companions; V(none)
    when O(packages=false).
  returned: success
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import gpu_look
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.host_look import Look


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "bool", "default": True},
            "ask": {"type": "list", "elements": "str", "default": []},
            "kernel_log": {"type": "bool", "default": True},
            "sys_root": {"type": "path", "default": "/sys"},
            "proc_root": {"type": "path", "default": "/proc"},
            "root": {"type": "path", "default": "/"},
            "command_path": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    asked = module.params
    look = Look(module.run_command, asked["sys_root"], asked["proc_root"], asked["command_path"], asked["root"])
    module.exit_json(changed=False, **gpu_look.gather(look, asked["packages"], asked["kernel_log"], asked["ask"]))


if __name__ == "__main__":
    main()
