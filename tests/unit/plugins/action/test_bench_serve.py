# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A measurement is followed as a fetch is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.action import bench_serve, hf_checkpoint


def test_every_piece_is_a_line_and_the_last_one_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(hf_checkpoint.display, "display", lambda text, **_options: lines.append(text))
    monkeypatch.setattr(hf_checkpoint.ActionBase, "run", lambda *_args, **_options: {})
    monkeypatch.setattr(hf_checkpoint, "_TERMINAL", False)
    plugin = bench_serve.ActionModule.__new__(bench_serve.ActionModule)
    plugin._task = SimpleNamespace(args={"model": "kimi-k3"}, async_val=0, delegate_to=None)
    plugin._connection = SimpleNamespace(_shell=SimpleNamespace(tmpdir=None))
    plugin._remove_tmp_path = lambda _path: None
    texts = [
        "workload 'page', run 1 of 3: 12 of 512 requests, 10 s",
        "workload 'page', run 1 of 3: 30 of 512 requests, 20 s",
    ]
    pieces: list[dict[str, Any]] = [
        *({"_running": {"run": "r1", "text": text, "attached": False, "pid": 7}} for text in texts),
        {"changed": False, "runs": [], "invocation": {"module_args": {"model": "kimi-k3", "_progress": {}}}},
    ]
    plugin._execute_module = lambda **_options: pieces.pop(0)
    result = plugin.run(task_vars={"inventory_hostname": "gpu-a"})
    assert result == {"changed": False, "runs": [], "invocation": {"module_args": {"model": "kimi-k3"}}}
    assert lines == [f"gpu-a: {text}" for text in texts]
