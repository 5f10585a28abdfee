# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: support_bundle
short_description: What a host of the replica tells for support, without secrets
version_added: "1.0.0"
description:
  - Reads in one execution the journals of the units, the kernel's lines on GPUs, adapters and memory, the effective
    configuration, the status, versions, and what C(nvidia-smi -q) says. It changes nothing on the host.
  - Secrets are taken out on the host, before anything leaves it. The contents of key files are removed wherever they
    stand, and so is what looks like a secret by its name or form.
  - M(baremetal.kimi_k3.support_archive) makes an archive of what several hosts told.
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
extends_documentation_fragment:
  - baremetal.kimi_k3.attributes
  - baremetal.kimi_k3.attributes.info
  - baremetal.kimi_k3.attributes.actiongroup
  - baremetal.kimi_k3.looking
options:
  unit:
    description: The unit of the rank.
    type: str
    default: kimi-k3.service
  units:
    description: Further units whose journals are wanted.
    type: list
    elements: str
    default: [nvidia-fabricmanager.service, nvidia-persistenced.service]
  config_dir:
    description: Where the role P(baremetal.kimi_k3.serve#role) writes its files. Key files in it are not read out.
    type: path
    default: /etc/kimi-k3
  status_file:
    description: The status file that the rank agent writes.
    type: path
    default: /run/kimi-k3/status.json
  venv:
    description: The virtual environment of the engine; its C(engine.json) is taken.
    type: path
  checkpoint:
    description: The directory of the checkpoint; its C(checkpoint.json) is taken.
    type: path
  hours:
    description: How many hours of the journals are wanted.
    type: int
    default: 24
  lines:
    description: How many lines of a journal at most, the last ones.
    type: int
    default: 20000
  limit_mib:
    description: How much of one text at most, in MiB; the beginning is left out.
    type: int
    default: 8
  secret_files:
    description:
      - Patterns of files on the host whose contents are secrets. They are read to be removed from all that is told.
    type: list
    elements: str
    default:
      - /etc/kimi-k3/*.key
      - /etc/kimi-k3/*.secret
      - /root/.cache/huggingface/token
      - /root/.huggingface/token
      - /home/*/.cache/huggingface/token
      - /home/*/.huggingface/token
      - /var/lib/kimi-k3/huggingface/token
  secrets:
    description: Further secrets, known to the controller.
    type: list
    elements: str
    default: []
seealso:
  - module: baremetal.kimi_k3.support_archive
"""

EXAMPLES = r"""
- name: Gather
  baremetal.kimi_k3.support_bundle:
    venv: /opt/kimi-k3/venv
    hours: 2
  register: told
"""

RETURN = r"""
archive:
  description: The texts by their names, as compressed JSON in base64.
  returned: success
  type: str
names:
  description: Length in characters of each text.
  returned: success
  type: dict
  sample: {"journal/kimi-k3.service.txt": 102400, "config/rank.json": 2048}
problems:
  description: What was there and could not be read.
  returned: success
  type: list
  elements: str
removed:
  description: How many secrets were taken out.
  returned: success
  type: int
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import support
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.host_look import Look


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "default": "kimi-k3.service"},
            "units": {
                "type": "list",
                "elements": "str",
                "default": ["nvidia-fabricmanager.service", "nvidia-persistenced.service"],
            },
            "config_dir": {"type": "path", "default": "/etc/kimi-k3"},
            "status_file": {"type": "path", "default": "/run/kimi-k3/status.json"},
            "venv": {"type": "path"},
            "checkpoint": {"type": "path"},
            "hours": {"type": "int", "default": 24},
            "lines": {"type": "int", "default": 20000},
            "limit_mib": {"type": "int", "default": 8},
            "secret_files": {
                "type": "list",
                "elements": "str",
                "no_log": False,
                "default": [
                    "/etc/kimi-k3/*.key",
                    "/etc/kimi-k3/*.secret",
                    "/root/.cache/huggingface/token",
                    "/root/.huggingface/token",
                    "/home/*/.cache/huggingface/token",
                    "/home/*/.huggingface/token",
                    "/var/lib/kimi-k3/huggingface/token",
                ],
            },
            "secrets": {"type": "list", "elements": "str", "default": [], "no_log": True},
            "sys_root": {"type": "path", "default": "/sys"},
            "proc_root": {"type": "path", "default": "/proc"},
            "root": {"type": "path", "default": "/"},
            "command_path": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    asked = module.params
    for name in ("hours", "lines", "limit_mib"):
        if asked[name] < 1:
            module.fail_json(msg=f"{name} is {asked[name]}: it must be at least 1.")
    look = Look(module.run_command, asked["sys_root"], asked["proc_root"], asked["command_path"], asked["root"])
    told = support.gather(look, asked)
    module.exit_json(
        changed=False,
        archive=support.pack(told["texts"]),
        names={name: len(text) for name, text in sorted(told["texts"].items())},
        problems=told["problems"],
        removed=told["removed"],
    )


if __name__ == "__main__":
    main()
