# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Show what the ranks of a replica do, on the controller alone; documented in modules/replica_status.py."""

from __future__ import annotations

import json
import os
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import replica_status

display = Display()

ARGUMENTS = {
    "ranks": {"type": "list", "elements": "dict", "required": True},
    "format": {"type": "str", "choices": ["screen", "json", "none"], "default": "screen"},
    "file": {"type": "path"},
    "enforce": {"type": "bool", "default": True},
}


def write(path: str, text: str) -> None:
    """By rename: who watches the file reads the old content or the new."""
    target = Path(path).expanduser().absolute()
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), 0o644)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class ActionModule(ActionBase):
    """One screen, or one line of JSON; fails when a rank does not serve."""

    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        _validation, asked = self.validate_argument_spec(argument_spec=ARGUMENTS)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        told = replica_status.document(asked["ranks"], now)
        lines = replica_status.screen(told)
        if asked["format"] == "json":
            display.display(json.dumps(told, default=str))
        elif asked["format"] == "screen":
            display.display("\n".join(["", *lines, ""]))
        if asked["file"]:
            try:
                write(asked["file"], json.dumps(told, indent=1, default=str) + "\n")
            except OSError as error:
                raise AnsibleActionFail(
                    f"The status cannot be written to '{asked['file']}' (status_file): {error}."
                ) from error
        result.update(changed=False, ready=told["ready"], document=told, lines=lines)
        if asked["enforce"] and not told["ready"]:
            result.update(failed=True, msg=replica_status.verdict(told))
        return result
