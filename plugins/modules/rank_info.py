# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: rank_info
short_description: What one host of the replica is and does
version_added: "1.0.0"
description:
  - Reads in one execution all that the role P(baremetal.kimi_k3.serve#role) and the status playbook need to know of
    a host.
  - It reports the route to a peer, the receipt of the engine, the identity of the checkpoint, the state of the
    systemd unit, and the status file of the rank agent.
  - What is not there is returned as V(none); only a path that cannot be read is an error.
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
attributes:
  check_mode:
    description: Can run in C(check_mode) and return the same facts without changing the host.
    support: full
  diff_mode:
    description: Would return what changed; this module changes nothing.
    support: none
  idempotent:
    description: Two runs in a row leave the host alike.
    support: full
  platform:
    description: Systems on which the module runs.
    support: full
    platforms: posix
options:
  peer:
    description:
      - Name or address of another host of the replica. The source address and the interface of the route to it are
        returned.
      - A route is looked up by connecting a UDP socket, which sends no packet.
    type: str
  address:
    description:
      - An address of this host. When given, the interface that carries it is returned instead of the route's.
    type: str
  venv:
    description: The virtual environment of the engine; its C(engine.json) is read.
    type: path
  checkpoint:
    description: The directory of the checkpoint; its C(checkpoint.json) is read.
    type: path
  fabric_file:
    description: The environment file that the role P(baremetal.kimi_k3.fabric#role) writes.
    type: path
  unit:
    description: The name of the systemd unit.
    type: str
    default: kimi-k3.service
  status_file:
    description: The status file that the rank agent writes.
    type: path
    default: /run/kimi-k3/status.json
seealso:
  - module: baremetal.kimi_k3.rank_service
"""

EXAMPLES = r"""
- name: See what a rank does
  baremetal.kimi_k3.rank_info:
  register: rank

- name: Say so
  ansible.builtin.debug:
    msg: "{{ rank.unit.active_state }}: {{ rank.status.text | default('no agent has run here') }}"
"""

RETURN = r"""
route:
  description: The way to the peer, V(none) when neither O(peer) nor O(address) is given.
  returned: success
  type: dict
  contains:
    address:
      description: This host's own address on that way.
      type: str
      sample: 10.0.0.11
    interface:
      description: The network interface that carries the address; V(none) when no interface does.
      type: str
      sample: eno1
engine:
  description: The receipt of the virtual environment, V(none) when there is none.
  returned: success
  type: dict
  sample: {"lock_digest": "9f2c", "versions": {"vllm": "0.32.0"}}
checkpoint:
  description: What the checkpoint directory states of itself, V(none) when there is none.
  returned: success
  type: dict
  sample: {"revision": "f831ab66814297da540d832a5235f8e904f29d06", "scope": "stage"}
fabric:
  description: The variables in O(fabric_file), V(none) when there is no such file.
  returned: success
  type: dict
  sample: {"NCCL_IB_HCA": "=mlx5_4:1,mlx5_5:1"}
unit:
  description: Properties of the unit as systemd tells them.
  returned: success
  type: dict
  contains:
    load_state:
      description: V(loaded), V(not-found), or another of systemd's load states; V(none) where systemd does not run.
      type: str
    active_state:
      description: V(active), V(activating), V(inactive), V(failed), or another of systemd's active states.
      type: str
    sub_state:
      description: The finer state.
      type: str
    result:
      description: How the last run of the unit ended.
      type: str
    main_pid:
      description: Process id of the rank agent, 0 when it does not run.
      type: int
    started:
      description: When the main process started, as systemd writes it.
      type: str
    restarts:
      description: How often systemd has restarted it by itself.
      type: int
status:
  description: The rank agent's status file, V(none) when there is none.
  returned: success
  type: dict
"""

import json
import os
import re
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.launch import parse_environment_file
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.route import RouteError, route_to

UNIT_PROPERTIES = {
    "load_state": "LoadState",
    "active_state": "ActiveState",
    "sub_state": "SubState",
    "result": "Result",
    "main_pid": "MainPID",
    "started": "ExecMainStartTimestamp",
    "restarts": "NRestarts",
}


def parse_properties(text: str) -> dict[str, t.Any]:
    """The output of C(systemctl show -p ...) under this module's names; numbers where they are numbers."""
    seen = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    result: dict[str, t.Any] = {name: seen.get(key) for name, key in UNIT_PROPERTIES.items()}
    for name in ("main_pid", "restarts"):
        result[name] = int(result[name]) if str(result[name] or "").isdigit() else 0
    return result


def read_json(path: str) -> dict[str, t.Any] | None:
    """A JSON object from a file, None when the file is not there. Raises ValueError when it is no object."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(content, dict):
        raise ValueError("no JSON object")  # noqa: TRY004 - the caller tells both alike
    return content


class Observation:
    """One look at the host; every method fails the module with a sentence of its own."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params

    def route(self) -> dict[str, t.Any] | None:
        try:
            return route_to(self.params["peer"], self.params["address"], self.links)
        except RouteError as error:
            self.module.fail_json(msg=str(error))

    def links(self) -> str:
        rc, out, err = self.module.run_command(["ip", "-json", "address", "show"])
        if rc != 0:
            self.module.fail_json(msg=f"'ip -json address show' failed: {err.strip()} (package iproute2).")
        return out

    def document(self, path: str | None, what: str) -> dict[str, t.Any] | None:
        if not path:
            return None
        try:
            return read_json(path)
        except (OSError, ValueError) as error:
            self.module.fail_json(msg=f"The {what} at {path} cannot be read ({error}): remove it or restore it.")

    def fabric(self, path: str | None) -> dict[str, str] | None:
        if not path:
            return None
        try:
            with open(path, encoding="utf-8") as file:
                return parse_environment_file(file.read())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            self.module.fail_json(
                msg=f"The environment of the fabric at {path} cannot be read ({error}): run the playbook prepare."
            )

    def unit(self) -> dict[str, t.Any]:
        name = self.params["unit"]
        if not re.fullmatch(r"[A-Za-z0-9:_.@\\-]+", name):
            self.module.fail_json(msg=f"'{name}' is no name of a systemd unit.")
        properties = ",".join(UNIT_PROPERTIES.values())
        rc, out, _err = self.module.run_command(["systemctl", "show", "--property", properties, "--", name])
        return parse_properties(out if rc == 0 else "")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "peer": {"type": "str"},
            "address": {"type": "str"},
            "venv": {"type": "path"},
            "checkpoint": {"type": "path"},
            "fabric_file": {"type": "path"},
            "unit": {"type": "str", "default": "kimi-k3.service"},
            "status_file": {"type": "path", "default": "/run/kimi-k3/status.json"},
        },
        supports_check_mode=True,
    )
    look = Observation(module)
    venv, checkpoint = module.params["venv"], module.params["checkpoint"]
    module.exit_json(
        changed=False,
        route=look.route(),
        engine=look.document(venv and os.path.join(venv, "engine.json"), "receipt of the engine"),
        checkpoint=look.document(checkpoint and os.path.join(checkpoint, "checkpoint.json"), "checkpoint statement"),
        fabric=look.fabric(module.params["fabric_file"]),
        unit=look.unit(),
        status=look.document(module.params["status_file"], "status of the rank agent"),
    )


if __name__ == "__main__":
    main()
