# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action plugin follows the run and adds lines, nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.action import hf_checkpoint


@pytest.fixture
def action(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An action whose module gives prepared results."""
    lines: list[str] = []
    monkeypatch.setattr(hf_checkpoint.display, "display", lambda text, **_options: lines.append(text))
    monkeypatch.setattr(hf_checkpoint.ActionBase, "run", lambda *_args, **_options: {})
    monkeypatch.setattr(hf_checkpoint, "_TERMINAL", False)
    plugin = hf_checkpoint.ActionModule.__new__(hf_checkpoint.ActionModule)
    plugin._task = SimpleNamespace(args={"dest": "/srv/x"}, async_val=0, delegate_to=None)
    plugin._connection = SimpleNamespace(_shell=SimpleNamespace(tmpdir=None))
    plugin._remove_tmp_path = lambda _path: None
    plugin.calls, plugin.lines, plugin.pieces = [], lines, []

    def execute(**options: Any) -> dict[str, Any]:
        plugin.calls.append(options)
        return plugin.pieces.pop(0)

    plugin._execute_module = execute
    return plugin


def going(text: str, attached: bool = False) -> dict[str, Any]:
    return {"changed": False, "_running": {"run": "r1", "text": text, "attached": attached, "pid": 7}}


def test_follows_to_the_end(action: Any) -> None:
    action.pieces = [
        going("fetching 1 GB"),
        going("fetching 2 GB", attached=True),
        {"changed": True, "invocation": {"module_args": {"dest": "/srv/x", "_progress": {}}}},
    ]
    result = action.run(task_vars={"inventory_hostname": "rank0"})
    assert result == {"changed": True, "invocation": {"module_args": {"dest": "/srv/x"}}}
    assert action.lines == ["rank0: fetching 1 GB", "rank0: fetching 2 GB"]
    sent = [call["module_args"]["_progress"] for call in action.calls]
    assert sent == [{"slice": 10, "run": None}, {"slice": 10, "run": "r1"}, {"slice": 10, "run": "r1"}]
    assert action._task.args == {"dest": "/srv/x"}


def test_nothing_to_do_is_one_call_without_a_line(action: Any) -> None:
    action.pieces = [{"changed": False, "files": 70}]
    assert action.run(task_vars={}) == {"changed": False, "files": 70}
    assert action.lines == []
    assert len(action.calls) == 1


def test_says_whose_work_it_follows(action: Any) -> None:
    action.pieces = [going("fetching 1 GB", attached=True), {"failed": True, "msg": "no"}]
    assert action.run(task_vars={"inventory_hostname": "rank1"}) == {"failed": True, "msg": "no"}
    assert action.lines == ["rank1: attached to process 7, which is at it already: fetching 1 GB"]


def test_live_for_who_watches(action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_checkpoint, "_TERMINAL", True)
    action.pieces = [{"changed": False}]
    action.run(task_vars={})
    assert action.calls[0]["module_args"]["_progress"]["slice"] == 2


def test_check_mode_says_what_would_be_fetched_and_how_long(action: Any) -> None:
    action.pieces = [
        {
            "changed": True,
            "fetch": ["a"] * 70,
            "files": 71,
            "fetched_bytes": 783_900_000_000,
            "estimated_seconds": 2613,
            "assumed_rate": 300_000_000,
        }
    ]
    action.pieces.append({**action.pieces[0], "shared": True})
    line = "rank0: would fetch 70 of 71 files, 783.9 GB, in 44 min at 300.0 MB/s"
    action.run(task_vars={"inventory_hostname": "rank0"})
    action.run(task_vars={"inventory_hostname": "rank0"})
    assert action.lines == [line, f"{line}, once for all hosts that share the directory"]


def test_background_job_is_one_piece(action: Any) -> None:
    action._task.async_val = 60
    action.pieces = [{"ansible_job_id": "1", "started": 1}]
    assert action.run(task_vars={}) == {"ansible_job_id": "1", "started": 1}
    assert action.calls == [{"task_vars": {}, "wrap_async": True}]
