# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the module hf_checkpoint, and tell how far it is while it works."""

from __future__ import annotations

import sys
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import duration, human

display = Display()

# Asked when this is loaded, which is before a task gets a process of its own that has no terminal.
_TERMINAL = sys.stdout.isatty()

#: Seconds between two lines of a host, into a log and for somebody who watches.
SLICE, LIVE_SLICE = 10, 2


class ActionModule(ActionBase):
    """Progress lines for long work; the module alone decides what is done."""

    _supports_check_mode = True
    _supports_async = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        if self._task.async_val:
            # Nobody reads lines of a background job, and Ansible itself keeps it running.
            result.update(self._execute_module(task_vars=task_vars, wrap_async=True))
            return result

        host = (task_vars or {}).get("inventory_hostname", self._task.delegate_to or "host")
        run = None
        while True:
            args = {**self._task.args, "_progress": {"slice": LIVE_SLICE if _TERMINAL else SLICE, "run": run}}
            piece = self._execute_module(module_args=args, task_vars=task_vars)
            running = piece.pop("_running", None)
            if not running:
                break
            if running["attached"] and run is None:
                text = f"attached to process {running['pid']}, which is at it already: {running['text']}"
            else:
                text = running["text"]
            run = running["run"]
            display.display(f"{host}: {text}", color="bright gray")
        if "estimated_seconds" in piece and piece.get("fetched_bytes"):
            size, took = human(piece["fetched_bytes"]), duration(piece["estimated_seconds"])
            once = ", once for all hosts that share the directory" if piece.get("shared") else ""
            display.display(
                f"{host}: would fetch {len(piece['fetch'])} of {piece['files']} files, {size}, in {took} "
                f"at {human(piece['assumed_rate'])}/s{once}"
            )
        invocation = piece.get("invocation")
        if isinstance(invocation, dict) and isinstance(invocation.get("module_args"), dict):
            invocation["module_args"].pop("_progress", None)
        result.update(piece)
        self._remove_tmp_path(self._connection._shell.tmpdir)
        return result
