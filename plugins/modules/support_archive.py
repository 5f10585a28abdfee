# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: support_archive
short_description: Make one archive of what the hosts told for support
version_added: "1.0.0"
description:
  - Writes what M(baremetal.kimi_k3.support_bundle) returned for several hosts, together with reports and texts of the
    controller, into one compressed archive that only its owner can read.
  - Secrets are taken out once more, also of what comes from the controller.
  - A host that told nothing is named in the archive's C(MANIFEST.txt) with the reason.
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
extends_documentation_fragment:
  - baremetal.kimi_k3.attributes
  - baremetal.kimi_k3.attributes.actiongroup
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details:
      - The archive is compressed.
  idempotent:
    support: none
    details:
      - Each archive is a record of its time.
options:
  path:
    description: The archive to write, such as V(/tmp/kimi-k3-logs-20261201T050000Z.tar.gz).
    type: path
    required: true
  hosts:
    description: One entry per host. C(host) is its name; C(told) what the task that gathered registered for it.
    type: list
    elements: dict
    required: true
  texts:
    description: Further files of the archive, content by name.
    type: dict
    default: {}
  reports:
    description: A directory of JSON reports; the newest of each kind are taken. One that is not there is no error.
    type: path
  keep:
    description: How many reports of each kind.
    type: int
    default: 3
  secrets:
    description: Secrets known to the controller.
    type: list
    elements: str
    default: []
seealso:
  - module: baremetal.kimi_k3.support_bundle
"""

EXAMPLES = r"""
- name: Write the archive
  baremetal.kimi_k3.support_archive:
    path: /tmp/kimi-k3-logs.tar.gz
    hosts:
      - host: "{{ inventory_hostname }}"
        told: "{{ told }}"
  delegate_to: localhost
"""

RETURN = r"""
path:
  description: The archive.
  returned: success
  type: str
size:
  description: Its bytes; 0 in check mode.
  returned: success
  type: int
files:
  description: How many files are in it.
  returned: success
  type: int
silent:
  description: Hosts of which there is nothing in it.
  returned: success
  type: list
  elements: str
removed:
  description: How many secrets were taken out, on the hosts and here.
  returned: success
  type: int
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import support


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "hosts": {"type": "list", "elements": "dict", "required": True},
            "texts": {"type": "dict", "default": {}},
            "reports": {"type": "path"},
            "keep": {"type": "int", "default": 3},
            "secrets": {"type": "list", "elements": "str", "default": [], "no_log": True},
        },
        supports_check_mode=True,
    )
    asked = module.params
    path = os.path.abspath(asked["path"])
    bundle = support.Bundle(os.path.basename(path).split(".tar")[0], asked["secrets"])
    silent = [str(part["host"]) for part in asked["hosts"] if not bundle.host(part)]
    for name, text in asked["texts"].items():
        bundle.add(f"controller/{name}", str(text))
    for report in support.newest(asked["reports"], asked["keep"]) if asked["reports"] else []:
        try:
            with open(report, encoding="utf-8", errors="replace") as file:
                bundle.add(f"controller/reports/{os.path.basename(report)}", file.read())
        except OSError as error:
            bundle.lines.append(f"report {report} cannot be read: {error}")
    size = 0
    if not module.check_mode:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            size = bundle.write(path)
        except OSError as error:
            module.fail_json(msg=f"The archive {path} cannot be written: {error}.")
    module.exit_json(
        changed=True, path=path, size=size, files=len(bundle.texts) + 1, silent=silent, removed=bundle.removed
    )


if __name__ == "__main__":
    main()
