# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the module wait_for_model in pieces, and tell between them how far it is."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()

#: Seconds between two lines of a host.
SLICE = 10


class ActionModule(ActionBase):
    """Progress lines for a long wait; the module alone decides what it means."""

    _supports_check_mode = True
    _supports_async = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        if self._task.async_val:
            # Nobody reads lines of a background job: one piece.
            result.update(self._execute_module(task_vars=task_vars, wrap_async=True))
            return result

        host = (task_vars or {}).get("inventory_hostname", self._task.delegate_to or "host")
        began = time.monotonic()
        attempts = 0
        while True:
            args = dict(self._task.args)
            args["_progress"] = {"slice": SLICE, "waited": time.monotonic() - began, "attempts": attempts}
            piece = self._execute_module(module_args=args, task_vars=task_vars)
            if not piece.pop("_waiting", False):
                break
            attempts = piece["attempts"]
            display.display(f"{host}: waiting: {piece.get('msg', '')}", color="bright gray")
        invocation = piece.get("invocation")
        if isinstance(invocation, dict) and isinstance(invocation.get("module_args"), dict):
            invocation["module_args"].pop("_progress", None)
        result.update(piece)
        self._remove_tmp_path(self._connection._shell.tmpdir)
        return result
