# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lookup over module_utils/variables.py: reads the specification, evaluates the variables, gives the sentences."""

from __future__ import annotations

DOCUMENTATION = """
name: variable_errors
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
version_added: "1.0.0"
short_description: What is wrong with the variables of a role
description:
  - Compares the variables of this host with the argument specification of a role, the entry point C(main). Runs on the
    controller and touches no host.
  - Ansible ignores a misspelt variable silently, and does not look at types when a role is called by another of its
    files.
options:
  _terms:
    description: Files with argument specifications, each C(meta/argument_specs.yml) of a role.
    type: list
    elements: path
    required: true
  lines:
    description: Variables that may have several lines of text.
    type: list
    elements: str
    default: []
  local:
    description: Variables with a path on the controller, which may be relative.
    type: list
    elements: str
    default: []
  made:
    description: >-
      Variables whose default makes its value up. They are looked at only where they are plain text, because evaluating
      them would make the value.
    type: list
    elements: str
    default: []
notes:
  - Values of options with O(ignore:no_log) are in no sentence.
"""

EXAMPLES = """
- name: Fail with one sentence per mistake
  ansible.builtin.assert:
    that: mistakes | length == 0
    fail_msg: "{{ mistakes | join(' ') }}"
  vars:
    mistakes: "{{ query('baremetal.kimi_k3.variable_errors', role_path ~ '/meta/argument_specs.yml') }}"
"""

RETURN = """
_raw:
  description: One sentence per mistake.
  type: list
  elements: str
"""

from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleError
from ansible.module_utils.common.yaml import yaml_load
from ansible.plugins.lookup import LookupBase
from ansible.template import accept_lazy_markers
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import variables as judging


# Values are evaluated below this call, and ansible-core 2.19 would take an undefined step in one for a use here,
# though the value's own map(default=…) deals with it.
@accept_lazy_markers
class LookupModule(LookupBase):
    """What is wrong with the variables of a role."""

    def run(self, terms: list[str], variables: Any = None, **kwargs: Any) -> list[str]:
        self.set_options(var_options=variables, direct=kwargs)
        return [sentence for term in terms for sentence in self._judge(Path(term), variables or {})]

    def _judge(self, path: Path, variables: Any) -> list[str]:
        try:
            options = yaml_load(path.read_text(encoding="utf-8"))["argument_specs"]["main"]["options"]
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise AnsibleError(f"variable_errors: {path} is no argument specification of a role: {error}") from error
        sentences = judging.unknown_variables(variables, path.resolve().parent.parent.name, options)
        lines, local, made = (self.get_option(name) for name in ("lines", "local", "made"))
        for name, option in options.items():
            if name not in variables:
                continue
            raw = variables[name]
            if name in made and isinstance(raw, str) and "{{" in raw:
                continue
            try:
                value = self._templar.template(raw)
            except AnsibleError as error:
                sentences.append(f"{name} cannot be evaluated: {_reason(error, bool(option.get('no_log')))}")
                continue
            found = judging.value_error(name, option, value, lines=name in lines, local=name in local)
            if found:
                sentences.append(found)
        return sentences


def _reason(error: BaseException, secret: bool) -> str:
    if secret:
        return "a variable that it names is not set, or its template is wrong."
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()).rstrip(".") + "."
