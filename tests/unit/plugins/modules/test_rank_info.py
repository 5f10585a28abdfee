# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.modules import rank_info


def test_properties_keep_equal_signs_and_read_numbers():
    text = "LoadState=loaded\nActiveState=active\nMainPID=42\nNRestarts=\nExecMainStartTimestamp=Mon a=b\n"
    assert rank_info.parse_properties(text) == {
        "load_state": "loaded",
        "active_state": "active",
        "sub_state": None,
        "result": None,
        "main_pid": 42,
        "started": "Mon a=b",
        "restarts": 0,
    }


def test_documents(tmp_path):
    path = tmp_path / "engine.json"
    assert rank_info.read_json(str(path)) is None
    assert rank_info.read_json(str(path / "below")) is None
    path.write_text('{"a": 1}')
    assert rank_info.read_json(str(path)) == {"a": 1}
    assert rank_info.read_json(str(path / "below")) is None
    path.write_text("[1]")
    with pytest.raises(ValueError, match="no JSON object"):
        rank_info.read_json(str(path))
    path.write_text("{")
    with pytest.raises(ValueError):
        rank_info.read_json(str(path))
