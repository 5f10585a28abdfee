# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "testinfra"))

from replica import Replica, playbook


@pytest.fixture(scope="session")
def replica() -> Replica:
    return Replica()


@pytest.fixture(scope="session")
def mended():
    """At the end the group serves as the inventory has it, whatever a test left."""
    yield
    for name in ("serve", "verify"):
        playbook(f"playbooks/{name}.yml")


@pytest.fixture(scope="session")
def api_key(replica, mended, tmp_path_factory):
    """A key that the API asks for from here on, until the end of all tests."""
    key = f"lab/{secrets.token_urlsafe(24)}"
    file = tmp_path_factory.mktemp("key") / "key.json"
    file.touch(mode=0o600)
    file.write_text(json.dumps({"serve_api_key": key}), encoding="utf-8")
    for name in ("serve", "verify"):
        output = playbook(f"playbooks/{name}.yml", "--diff", "-e", f"@{file}")
        assert key not in output
    replica.key, replica.key_words = key, ("-e", f"@{file}")
    yield key
    replica.key, replica.key_words = "", ()
