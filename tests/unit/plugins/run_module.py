# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a module of the collection in a process of its own, as on a host, and returns what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
STARTER = """
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
arguments = json.load(sys.stdin)
module = importlib.import_module("ansible_collections.baremetal.kimi_k3.plugins.modules." + sys.argv[1])
with patch_module_args(arguments):
    module.main()
"""


def run_module(name: str, arguments: dict[str, Any], check_mode: bool = False) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".collections"), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [sys.executable, "-c", STARTER, name],
        input=json.dumps({**arguments, "_ansible_check_mode": check_mode}),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if not run.stdout.strip():
        raise AssertionError(run.stderr)
    return json.loads(run.stdout)
