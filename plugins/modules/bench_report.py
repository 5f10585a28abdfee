# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: bench_report
short_description: Write what was measured as a record, as Markdown and as one HTML page
version_added: "1.0.0"
description:
  - Writes C(bench.json), C(report.md) and C(report.html) into the folder of one benchmark, whose C(runs) holds the
    results as C(vllm bench serve) wrote them.
  - The page is one file with its style and its plots inside; it loads nothing and runs no script.
  - Runs on the controller, with the Python of C(ansible-playbook), where matplotlib draws the plots.
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
  folder:
    description:
      - Folder of the benchmark.
    type: path
    required: true
  about:
    description:
      - What the record says of the whole, such as C(name), C(started), C(model), C(host) and C(replica).
      - Without it, O(hosts) and O(measured), the reports are made anew from the C(bench.json) that is there.
    type: dict
  hosts:
    description:
      - By host a dictionary with C(number), its rank, and with C(rank), C(gpu) and C(rdma), the results of
        M(baremetal.kimi_k3.rank_info), M(baremetal.kimi_k3.gpu_info) and M(baremetal.kimi_k3.rdma_info).
    type: dict
  measured:
    description:
      - The result of M(baremetal.kimi_k3.bench_serve).
    type: dict
  plots:
    description:
      - Whether plots are drawn.
    type: bool
    default: true
"""
EXAMPLES = r"""
- name: Make the reports of a folder anew
  baremetal.kimi_k3.bench_report:
    folder: results/20261201T040506Z-kimi-k3
  delegate_to: localhost
"""
RETURN = r"""
folder:
  description: The folder, as an absolute path.
  returned: success
  type: str
files:
  description: The files that differ from what was there.
  returned: success
  type: list
  elements: str
lines:
  description: The figures, for a terminal.
  returned: success
  type: list
  elements: str
"""

import json
import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import bench_report
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.bench import LATENCIES, BenchError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.bench_files import RECORD, read_file, write_changed


def pooled(folder: str, document: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Latencies of all runs of each workload."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in document["runs"]:
        result = read_file(os.path.join(folder, "runs", run["file"]))
        own = found.setdefault(run["workload"], {name: [] for name in LATENCIES})
        for name, more in bench_report.samples(result).items():
            own[name] += more
    return found


def make(params: dict[str, Any], check: bool) -> dict[str, Any]:
    folder = os.path.abspath(params["folder"])
    record = os.path.join(folder, RECORD)
    files: dict[str, bytes] = {}
    if params["measured"] is not None:
        document = bench_report.record(params["about"], params["hosts"], params["measured"])
        files[record] = json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"
        # What was measured must not be lost for the sake of how it is shown.
        changed = write_changed(files, check)
    else:
        document, changed = read_file(record), []
    bench_report.read_record(document, record)
    plots = bench_report.draw(document, pooled(folder, document)) if params["plots"] else []
    blocks = bench_report.report(document, plots)
    reports = {
        os.path.join(folder, "report.md"): bench_report.markdown(blocks).encode(),
        os.path.join(folder, "report.html"): bench_report.page(bench_report.titled(document), blocks).encode(),
    }
    changed += write_changed(reports, check)
    return {"changed": bool(changed), "folder": folder, "files": changed, "lines": bench_report.lines_of(document)}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "folder": {"type": "path", "required": True},
            "about": {"type": "dict"},
            "hosts": {"type": "dict"},
            "measured": {"type": "dict"},
            "plots": {"type": "bool", "default": True},
        },
        required_together=[("about", "hosts", "measured")],
        supports_check_mode=True,
    )
    try:
        result = make(module.params, module.check_mode)
    except BenchError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename or module.params['folder']}: {error.strerror or error}.")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
