# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role leaves on a host."""

from __future__ import annotations

import json
import re

testinfra_hosts = ["ansible://kimi_k3"]

VENV = "/opt/scenario-vllm/venv"


def receipt(host):
    return json.loads(host.file(f"{VENV}/engine.json").content_string)


def test_link_to_an_environment_named_after_its_lock(host):
    link = host.file(VENV)
    assert link.is_symlink
    assert re.fullmatch(r"/opt/scenario-vllm/venvs/[0-9a-f]{12}", link.linked_to)
    assert link.linked_to.endswith(receipt(host)["lock_digest"][:12])


def test_receipt_tells_what_is_installed(host):
    told = receipt(host)
    assert told["schema"] == 1
    assert set(told["packages"]) == {"vllm", "h11", "idna", "sniffio"}
    assert told["versions"]["vllm"] == told["packages"]["vllm"]
    assert told["versions"]["torch"] is None
    assert told["python"].startswith("3.")
    assert told["created"].endswith("+00:00")
    name = host.run("hostname").stdout.strip()
    assert told["installer"] == {"rank0": "uv", "rank1": "pip"}[name]


def test_both_hosts_have_the_same_whatever_installed_it(host):
    peers = [
        host.get_host(f"ansible://{name}", ansible_inventory=host.backend.ansible_inventory)
        for name in ("rank0", "rank1")
    ]
    digests = {receipt(peer)[key] for peer in peers for key in ("lock_digest", "packages_digest")}
    assert len(digests) == 2


def test_another_user_can_run_it(host):
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    ran = host.run(f'setpriv --reuid=65534 --regid=65534 --clear-groups {VENV}/bin/python -c "{code}"')
    assert ran.rc == 0, ran.stderr
    assert ran.stdout.strip() == receipt(host)["versions"]["vllm"]


def test_nothing_is_left_behind(host):
    assert host.run("ls -A /opt/scenario-vllm").stdout.split() == ["venv", "venvs"]
    assert sorted(host.run("ls -A /opt/scenario-vllm/venvs").stdout.split()) == [
        ".lock",
        receipt(host)["lock_digest"][:12],
    ]


def test_byte_code_is_there_before_the_first_start(host):
    assert host.run(f"find {VENV}/lib/ -path '*idna/__pycache__/core*.pyc'").stdout
