# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What `make demo` does: boot the lab, deploy onto it with site.yml, and say how to talk to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = ROOT / "inventory" / "lab" / "hosts.yml"

FAREWELL = """
The model answers. Talk to it:

  curl -s {url}/v1/models
  curl -s {url}/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "prompt": "Hello", "max_tokens": 8, "temperature": 0}}'

Look at it, break it, mend it (a second run of site.yml changes nothing):

  .venv/bin/ansible-playbook -i inventory/lab playbooks/status.yml
  .venv/bin/ansible-playbook -i inventory/lab playbooks/restart.yml --limit rank1
  ssh -i {key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null root@{peer} systemctl kill -s KILL kimi-k3
  .venv/bin/ansible-playbook -i inventory/lab site.yml

Power it off with `make down`; remove all of it with `make clean`.
The model is a tiny one with random weights: what it says means nothing, where it says it does.
"""


def main() -> int:
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    for command in (
        [sys.executable, str(ROOT / "molecule" / "lab" / "lab.py"), "up"],
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(INVENTORY.parent), "site.yml"],
    ):
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0:
            print(f"'{' '.join(command)}' failed; what it says above is why. `make demo` again goes on from there.")
            return 1
    group = yaml.safe_load(INVENTORY.read_text(encoding="utf-8"))["kimi_k3"]
    hosts = sorted(group["hosts"].values(), key=lambda host: host["serve_rank"])
    first, last = ({**group.get("vars", {}), **host} for host in (hosts[0], hosts[-1]))
    port = first.get("serve_api_port", 8000)
    print(
        FAREWELL.format(
            url=f"http://{first['ansible_host']}:{port}",
            model=first.get("serve_model_name", "kimi-k3"),
            key=first["ansible_ssh_private_key_file"],
            peer=last["ansible_host"],
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
