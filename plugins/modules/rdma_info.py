# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: rdma_info
short_description: Which RDMA ports a host has, and which of them are rails
version_added: "1.0.0"
description:
  - Reads in one execution every RDMA device and port from sysfs, the network interfaces, PCIe Access Control Services
    and the IOMMU, and gives a verdict over every port.
  - A port is a rail when it is of the wanted link layer, up, on a subnet, fast enough, and behind the same PCIe
    switch as a GPU. Ports that manage NVSwitch look the same and are told apart by C(SW_MNG) in their vital product
    data.
  - A port that would be a rail but for its state or rate is V(broken), any other is V(rejected), each with a sentence.
  - A host without RDMA is an answer, not an error.
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
    description:
      - Names of the devices that are the rails, each with a port behind a colon or without. It wins over the rule.
      - What the rule has against a chosen port is told in RV(verdict.warnings).
    type: list
    elements: str
    default: []
  peer:
    description: Name or address of another host; the interface of the route to it is returned.
    type: str
  address:
    description: An address of this host. When given, the interface that carries it is returned instead of the route's.
    type: str
  files:
    description: Text files whose content is returned, so that a role can compare without another execution.
    type: list
    elements: path
    default: []
  sysctls:
    description: Kernel parameters to read.
    type: list
    elements: str
    default: []
  packages:
    description: Packages to ask the package manager for.
    type: list
    elements: str
    default: []
  wait:
    description: Seconds to wait at most until the host has as many rails as O(wait_for). Ports of modules that were
      just loaded come up by and by.
    type: float
    default: 0
  wait_for:
    description: How many rails to wait for.
    type: int
    default: 0
seealso:
  - module: baremetal.kimi_k3.gpu_info
  - plugin: baremetal.kimi_k3.nccl_hca
    plugin_type: filter
notes:
  - It was tested on trees built from public output of a DGX B200 and on hosts without RDMA. It was never run on
    InfiniBand.
"""

EXAMPLES = r"""
- name: Find the rails
  baremetal.kimi_k3.rdma_info:
    min_rate: 400
  register: rdma

- name: Say what each port is
  ansible.builtin.debug:
    msg: "{{ rdma.verdict.ports | map(attribute='text') }}"
"""

RETURN = r"""
devices:
  description: Every RDMA device by PCI address, with firmware, NUMA node, PCIe link, vital product data and ports.
  returned: success
  type: list
  elements: dict
verdict:
  description: The judgement over the ports.
  returned: success
  type: dict
  contains:
    ports:
      description: Every port with its verdict, the reason and a sentence.
      type: list
      elements: dict
      sample: [{"device": "mlx5_4", "port": 1, "verdict": "rail", "reason": null, "text": "mlx5_4 port 1 is a rail."}]
    rails:
      description: The ports that are rails, by PCI address.
      type: list
      elements: dict
    broken:
      description: The ports that would be rails but for their state or rate.
      type: list
      elements: dict
    nccl_ib_hca:
      description: The value of E(NCCL_IB_HCA) that names the rails and nothing else; V(none) without rails.
      type: str
      sample: "=mlx5_4:1,mlx5_5:1"
    warnings:
      description: What the rule has against the ports of O(rails).
      type: list
      elements: str
route:
  description: Address and interface of this host towards the peer; V(none) when neither O(peer) nor O(address) is
    given.
  returned: success
  type: dict
interfaces:
  description: Network interfaces by name, with MTU, state and speed.
  returned: success
  type: dict
virtualization:
  description: Kind of virtual machine, V(none) on metal.
  returned: success
  type: str
modules:
  description: Which of the kernel modules that matter are loaded.
  returned: success
  type: list
  elements: str
acs:
  description: PCIe bridges that send traffic between devices up to the root.
  returned: success
  type: list
  elements: str
iommu:
  description: Whether an IOMMU translates, the types of its groups, and the words of the kernel's command line about
    it.
  returned: success
  type: dict
stack:
  description: Whose RDMA stack the host has.
  returned: success
  type: dict
  sample: {"kind": "inbox", "ofed": null, "mlx5_core": null}
files:
  description: Content of O(files) by path; V(none) for one that is not there.
  returned: success
  type: dict
loaded:
  description: Every kernel module that is loaded or built in.
  returned: success
  type: list
  elements: str
packages:
  description: Versions of O(packages) by name; one that is not installed is left out.
  returned: success
  type: dict
sysctls:
  description: Values of O(sysctls) by name; V(none) for one that the kernel does not know.
  returned: success
  type: dict
"""

import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import gpu_facts, gpu_look, rdma_facts, rdma_look
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.host_look import Look
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.route import RouteError, route_to


def route(module: AnsibleModule, look: Look) -> dict[str, t.Any] | None:
    try:
        return route_to(
            module.params["peer"], module.params["address"], lambda: look.output("ip", "-json", "address", "show")
        )
    except RouteError as error:
        module.fail_json(msg=str(error))


def sysctl(look: Look, name: str) -> str | None:
    value = look.text(look.proc("sys", *name.split(".")))
    return None if value is None else " ".join(value.split())


def loaded(look: Look) -> list[str]:
    """Modules by the names that the kernel gives them; a built-in one has a folder in sysfs, too."""
    lines = (look.text(look.proc("modules"), 1 << 22) or "").splitlines()
    return sorted({line.split()[0] for line in lines if line.strip()} | set(look.names(look.sys("module"))))


def installed(look: Look, names: list[str]) -> dict[str, str]:
    """Versions of packages; dpkg-query exits 1 when it does not know one of them."""
    if not names:
        return {}
    words = ["--show", "--showformat=${db:Status-Abbrev}\\t${Package}\\t${Version}\\t${Architecture}\\n", *names]
    answer = look.run("dpkg-query", *words)
    packages = gpu_facts.parse_packages(answer[1]) if answer else {}
    return {name: entry["version"] for name, entry in packages.items()}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "str", "choices": ["infiniband", "roce"], "default": "infiniband"},
            "min_rate": {"type": "float", "default": 400},
            "rails": {"type": "list", "elements": "str", "default": []},
            "peer": {"type": "str"},
            "address": {"type": "str"},
            "files": {"type": "list", "elements": "path", "default": []},
            "sysctls": {"type": "list", "elements": "str", "default": []},
            "packages": {"type": "list", "elements": "str", "default": []},
            "wait": {"type": "float", "default": 0},
            "wait_for": {"type": "int", "default": 0},
            "sys_root": {"type": "path", "default": "/sys"},
            "proc_root": {"type": "path", "default": "/proc"},
            "root": {"type": "path", "default": "/"},
            "command_path": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    asked = module.params
    look = Look(module.run_command, asked["sys_root"], asked["proc_root"], asked["command_path"], asked["root"])
    virtual = rdma_look.virtualization(look)
    gpus = gpu_look.pci_gpus(look)
    deadline = time.monotonic() + asked["wait"]
    while True:
        devices = rdma_look.gather(look)
        try:
            verdict = rdma_facts.judge(
                devices,
                gpus,
                mode=asked["mode"],
                min_rate=asked["min_rate"],
                virtual=virtual not in (None, "none"),
                chosen=asked["rails"],
            )
        except ValueError as error:
            module.fail_json(msg=f"These ports cannot be given to NCCL: {error}")
        if len(verdict["rails"]) >= asked["wait_for"] or time.monotonic() >= deadline:
            break
        time.sleep(0.5)
    module.exit_json(
        changed=False,
        devices=devices,
        verdict=verdict,
        route=route(module, look),
        interfaces=rdma_look.interfaces(look),
        virtualization=virtual,
        modules=gpu_look.loaded_modules(look),
        loaded=loaded(look),
        packages=installed(look, asked["packages"]),
        acs=rdma_look.acs_enabled(look),
        iommu=rdma_look.iommu(look),
        stack=rdma_look.stack(look),
        files={path: look.raw_text(path) for path in asked["files"]},
        sysctls={name: sysctl(look, name) for name in asked["sysctls"]},
    )


if __name__ == "__main__":
    main()
