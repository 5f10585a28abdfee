# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action plugin runs the module in pieces and adds lines, nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.action import wait_for_model


@pytest.fixture
def action(monkeypatch):
    """An action whose module gives prepared results."""
    lines = []
    monkeypatch.setattr(wait_for_model.display, "display", lambda text, **_options: lines.append(text))
    monkeypatch.setattr(wait_for_model.ActionBase, "run", lambda *_args, **_options: {})
    plugin = wait_for_model.ActionModule.__new__(wait_for_model.ActionModule)
    plugin._task = SimpleNamespace(
        args={"url": "http://127.0.0.1:8000", "model": "kimi-k3"}, async_val=0, delegate_to=None
    )
    plugin._connection = SimpleNamespace(_shell=SimpleNamespace(tmpdir=None))
    plugin._remove_tmp_path = lambda _path: None
    plugin.calls = []
    plugin.lines = lines
    plugin.pieces = []

    def execute(**options):
        plugin.calls.append(options)
        return plugin.pieces.pop(0)

    plugin._execute_module = execute
    return plugin


def test_pieces_until_the_end(action):
    action.pieces = [
        {"_waiting": True, "attempts": 4, "msg": "connection refused", "changed": False},
        {"_waiting": True, "attempts": 9, "msg": "HTTP 503", "changed": False},
        {"attempts": 10, "ready": True, "invocation": {"module_args": {"url": "u", "_progress": {}}}},
    ]
    result = action.run(task_vars={"inventory_hostname": "rank0"})
    assert result == {"attempts": 10, "ready": True, "invocation": {"module_args": {"url": "u"}}}
    assert action.lines == ["rank0: waiting: connection refused", "rank0: waiting: HTTP 503"]
    sent = [call["module_args"]["_progress"] for call in action.calls]
    assert [piece["attempts"] for piece in sent] == [0, 4, 9]
    assert all(piece["slice"] == wait_for_model.SLICE for piece in sent)
    assert action._task.args == {"url": "http://127.0.0.1:8000", "model": "kimi-k3"}


def test_failure_is_passed_on_without_a_line(action):
    action.pieces = [{"failed": True, "msg": "no"}]
    assert action.run(task_vars={}) == {"failed": True, "msg": "no"}
    assert action.lines == []


def test_background_job_is_one_piece(action):
    action._task.async_val = 60
    action.pieces = [{"ansible_job_id": "1", "started": 1}]
    assert action.run(task_vars={}) == {"ansible_job_id": "1", "started": 1}
    assert action.calls == [{"task_vars": {}, "wrap_async": True}]
