# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: bench_compare
short_description: Compare benchmarks, with the noise of every difference
version_added: "1.0.0"
description:
  - Compares each further folder of M(baremetal.kimi_k3.bench_report) with the first, and writes C(comparison.md) and
    C(comparison.html).
  - A difference comes with its noise, from the repetitions of both sides, and says so when there are too few of them.
  - Workloads of one name that are not the same are named and not compared. Nothing that can be compared is a failure.
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
extends_documentation_fragment:
  - baremetal.kimi_k3.attributes
  - baremetal.kimi_k3.attributes.actiongroup
attributes:
  check_mode:
    support: full
  diff_mode:
    support: N/A
    details:
      - The files are new ones, and long.
  idempotent:
    support: full
options:
  folders:
    description:
      - Two or more folders of benchmarks; the first is what the others are compared with.
    type: list
    elements: path
    required: true
  dest:
    description:
      - Folder to write into.
    type: path
    required: true
"""
EXAMPLES = r"""
- name: See what another profile brings
  baremetal.kimi_k3.bench_compare:
    folders:
      - results/20261201T040506Z-lambda
      - results/20261201T060708Z-recipe
    dest: results/lambda-recipe
  delegate_to: localhost
"""
RETURN = r"""
files:
  description: The files that differ from what was there.
  returned: success
  type: list
  elements: str
lines:
  description: Every difference, for a terminal.
  returned: success
  type: list
  elements: str
comparisons:
  description: For each further folder its name and, by workload, the figures with difference and noise in percent.
  returned: success
  type: list
  elements: dict
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import bench_report
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.bench import BenchError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.bench_files import read_folder, write_changed


def make(params: dict[str, Any], check: bool) -> dict[str, Any]:
    folders = [os.path.abspath(folder) for folder in params["folders"]]
    if len(folders) < 2:
        raise BenchError("bench_compare must name two folders or more: the first is what the others are compared with.")
    if len(set(folders)) < len(folders):
        raise BenchError("bench_compare names a folder twice: a benchmark does not differ from itself.")
    documents = [read_folder(folder) for folder in folders]
    # By the folder's name, since several measurements of one replica bear the same.
    documents = [
        {**document, "name": os.path.basename(folder)} for folder, document in zip(folders, documents, strict=True)
    ]
    blocks = bench_report.comparison(documents)
    dest = os.path.abspath(params["dest"])
    files = {
        os.path.join(dest, "comparison.md"): bench_report.markdown(blocks).encode(),
        os.path.join(dest, "comparison.html"): bench_report.page("Comparison of benchmarks", blocks).encode(),
    }
    changed = write_changed(files, check)
    return {
        "changed": bool(changed),
        "files": changed,
        "lines": bench_report.compared_lines(documents),
        "comparisons": [
            {"name": other["name"], "workloads": bench_report.compare(documents[0], other)} for other in documents[1:]
        ],
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "folders": {"type": "list", "elements": "path", "required": True},
            "dest": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    try:
        result = make(module.params, module.check_mode)
    except BenchError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename or module.params['dest']}: {error.strerror or error}.")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
