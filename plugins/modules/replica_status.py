# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: replica_status
short_description: Show what the ranks of a replica do
version_added: "1.0.0"
description:
  - Prints one screen, or one line of JSON, of what M(baremetal.kimi_k3.rank_info) saw on the hosts, and fails when a
    rank does not serve. A host that could not be reached is a row like any other.
  - It runs on the controller alone and reaches no host.
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
extends_documentation_fragment:
  - baremetal.kimi_k3.attributes
  - baremetal.kimi_k3.attributes.info
  - baremetal.kimi_k3.attributes.actiongroup
options:
  ranks:
    description:
      - One entry per host. C(host), C(group) and C(rank) say which it is; C(observed) is what the task with
        M(baremetal.kimi_k3.rank_info) registered for it, also when it failed or the host was unreachable.
    type: list
    elements: dict
    required: true
  format:
    description:
      - V(screen) prints lines of at most 80 columns.
      - V(json) prints one line that begins with C({), the only such line in the output of C(ansible-playbook).
      - V(none) prints nothing.
    type: str
    choices: [screen, json, none]
    default: screen
  file:
    description:
      - A file on the controller to write the JSON to, whatever O(format) is. It is written also in check mode, since it
        is a record and not a state.
    type: path
  enforce:
    description: Whether the task fails when a rank does not serve.
    type: bool
    default: true
seealso:
  - module: baremetal.kimi_k3.rank_info
"""

EXAMPLES = r"""
- name: Look at this host
  baremetal.kimi_k3.rank_info:
  register: rank
  ignore_unreachable: true
  failed_when: false

- name: Tell
  baremetal.kimi_k3.replica_status:
    ranks:
      - host: "{{ inventory_hostname }}"
        group: kimi_k3
        rank: "{{ serve_rank }}"
        observed: "{{ rank }}"
    file: /run/replica.json
"""

RETURN = r"""
ready:
  description: Whether every rank serves.
  returned: always
  type: bool
lines:
  description: The screen.
  returned: always
  type: list
  elements: str
document:
  description: What is also printed as JSON.
  returned: always
  type: dict
  sample: {"schema": 1, "ready": true, "ranks": 2, "ready_ranks": 2, "groups": {"kimi_k3": true}, "notes": []}
  contains:
    schema:
      description: Changes when a key changes its meaning.
      type: int
    time:
      description: When the hosts were looked at, in UTC.
      type: str
    ready:
      description: Whether every rank serves.
      type: bool
    groups:
      description: The same for each replica.
      type: dict
    rows:
      description:
        - Per rank C(host), C(group), C(rank), C(ready), C(state), C(says), C(problem), C(generation), C(since),
          C(unit), C(version), C(versions), C(lock), C(arguments) (digest over the flags that must be equal),
          C(configuration) (digest over the files it was started with), C(command), C(checkpoint),
          C(checkpoint_identity), C(rails), C(last_failure).
        - C(state) is the rank agent's, or V(unreachable), V(unknown), V(not deployed), or systemd's word for a unit
          whose agent does not run.
      type: list
      elements: dict
    notes:
      description: What is wrong, and what differs between the ranks.
      type: list
      elements: str
"""
