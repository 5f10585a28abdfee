# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Commands of a broken host print anything, die, hang or do not start: the look at it goes on or ends in words."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import host_look

sys.path.insert(0, str(Path(__file__).parents[1]))
from run_module import run_module

COMMANDS = [
    *("nvidia-smi", "nvcc", "dcgmi", "modinfo", "ofed_info", "dpkg-query", "apt-cache", "apt-mark", "apt-config"),
    *("systemctl", "systemd-detect-virt", "timedatectl", "journalctl", "dmesg", "ip"),
]
PROGRAMS = {
    "binary": "#!/usr/bin/env python3\nimport sys\nsys.stdout.buffer.write(bytes(range(256)) * 40)\n",
    "nul": "#!/bin/sh\nprintf 'a\\000b, \\377\\n'\n",
    "numbers": "#!/bin/sh\necho 5; echo 0,1; echo ' , , '\n",
    "empty list of oddities": '#!/bin/sh\necho \'[1, {"addr_info": 5}, {"addr_info": [7]}]\'\n',
    "lines": "#!/bin/sh\nyes 'a: b, c d' | head -n 60000\n",
    "killed": "#!/bin/sh\nkill -9 $$\n",
    "fails": "#!/bin/sh\necho some error >&2\nexit 3\n",
    "no program": "neither script nor binary\n",
    "no interpreter": "#!/nonexistent/sh\n",
}
MODULES = {
    "gpu_info": {},
    "rdma_info": {"address": "127.0.0.1"},
    "preflight_info": {"address": "127.0.0.1", "name": "a", "group": "g"},
}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_whatever_commands_do_there_is_an_answer_in_words(tmp_path, module, program):
    for name in COMMANDS:
        (tmp_path / name).write_text(PROGRAMS[program])
        (tmp_path / name).chmod(0o755)
    result = run_module(module, {**MODULES[module], "command_path": str(tmp_path), "root": str(tmp_path)})
    if result.get("failed"):
        assert result["msg"].startswith("'ip -json address show' cannot be read")
    assert len(json.dumps(result)) < 1 << 20


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path):
    from ansible.module_utils.basic import AnsibleModule  # noqa: PLC0415
    from ansible.module_utils.testing import patch_module_args  # noqa: PLC0415

    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\ntrap '' TERM\nsleep 600\nsleep 600\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    with patch_module_args({}):
        look = host_look.Look(AnsibleModule({}).run_command, path=str(tmp_path))
    began = time.monotonic()
    answer = look.run("nvidia-smi", seconds=1)
    assert answer is not None
    assert answer[0] != 0
    assert "did not end within 1 seconds" in answer[2]
    assert time.monotonic() - began < host_look.DEADLINE
