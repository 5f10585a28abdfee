# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of the modules that talk to the model's HTTP interface."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  url:
    description:
      - Address of the interface, such as V(http://127.0.0.1:8000).
      - A trailing V(/v1) is accepted and means the same.
      - Must not carry a user name or password. Use O(api_key) or O(api_key_file).
    type: str
    required: true
  api_key:
    description:
      - Key sent as bearer token.
      - Mutually exclusive with O(api_key_file), which keeps the key out of playbooks and command lines.
    type: str
  api_key_file:
    description:
      - File with the key, on the host that runs the module.
      - White space around the key is dropped.
    type: path
  validate_certs:
    description:
      - Whether the certificate of an C(https) address must be valid.
    type: bool
    default: true
  ca_path:
    description:
      - PEM file with the certificate authorities to trust, on the host that runs the module.
    type: path
  use_proxy:
    description:
      - Whether the proxy variables of the environment (E(http_proxy), E(https_proxy), E(no_proxy)) are followed.
      - They are not by default. The interface lies on the host itself or on a private network,
        and a proxy meant for the outside would hide what is wrong with it.
    type: bool
    default: false
  request_timeout:
    description:
      - Seconds that one request may stay without an answer.
    type: float
    default: 10
"""
