# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role writes, and who may read it."""

from __future__ import annotations

import json

import pytest

testinfra_hosts = ["ansible://kimi_k3"]
KEY = "a-key-that-nobody-may-see"


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/etc/systemd/system/scenario-serve.service", 0o644),
        ("/usr/local/lib/scenario-serve/rank_agent.py", 0o755),
        ("/etc/scenario-serve/rank.json", 0o644),
        ("/etc/scenario-serve/serve.env", 0o644),
        ("/etc/scenario-serve/digest", 0o644),
        ("/etc/scenario-serve/group.secret", 0o600),
        ("/etc/scenario-serve/api.key", 0o600),
    ],
)
def test_files_belong_to_root(host, path, mode):
    file = host.file(path)
    assert (file.user, file.group, file.mode) == ("root", "root", mode)


def test_the_account_cannot_log_in(host):
    user = host.user("scenario-serve")
    assert user.shell == "/usr/sbin/nologin"
    assert user.uid < 1000


def test_the_agent_says_which_files_it_was_started_with(host):
    status = json.loads(host.file("/run/scenario-serve/status.json").content_string)
    assert status["configuration"] == host.file("/etc/scenario-serve/digest").content_string.strip()


def test_no_secret_is_told_anywhere(host):
    secret = host.file("/etc/scenario-serve/group.secret").content_string.strip()
    assert len(secret) >= 32
    told = [
        host.run("journalctl --no-pager").stdout,
        host.run("systemctl show scenario-serve").stdout,
        host.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout,
        host.run(
            "cat /run/scenario-serve/status.json /etc/scenario-serve/rank.json /etc/scenario-serve/serve.env"
        ).stdout,
    ]
    assert all(told)
    for place in told:
        assert secret not in place
        assert KEY not in place
