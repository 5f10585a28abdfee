# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module on trees: what the rule for rails says of them is tested with the rule."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from run_module import run_module

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
sys.path.insert(0, str(FIXTURES))

import fake_node as fake


@pytest.fixture
def node(tmp_path):
    return fake.Node(tmp_path / "node", FIXTURES / "h200-vm" / "nvidia-smi-q.xml")


def test_ports_that_come_up_by_and_by_are_waited_for(node):
    ports, later = node.base / "sys/class/infiniband", node.base / "later"
    ports.rename(later)
    timer = threading.Timer(0.7, later.rename, [ports])
    timer.start()
    result = run_module("rdma_info", {**node.arguments, "wait": 30, "wait_for": 8})
    timer.join()
    assert len(result["verdict"]["rails"]) == 8


def test_what_does_not_come_up_is_an_answer_too(node):
    result = run_module("rdma_info", {**node.arguments, "wait": 0.1, "wait_for": 9})
    assert len(result["verdict"]["rails"]) == 8
