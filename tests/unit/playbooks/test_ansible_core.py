# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ansible-core that meta/runtime.yml promises: the one that is tested, and many plays end on it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# As in site.yml, a play on the controller before each play on the hosts.
PLAY = """\
- hosts: {hosts}
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.assert:
        that: true
"""


def test_the_oldest_one_promised_is_the_one_tested():
    promised = re.search(r'^requires_ansible: ">=([\d.]+)"$', (ROOT / "meta" / "runtime.yml").read_text(), re.M)
    tested = re.search(r"^ansible-core==([\d.]+)$", (ROOT / "requirements-oldest.txt").read_text(), re.M)
    assert promised.group(1) == tested.group(1)


def test_playbooks_of_many_plays_end_on_a_busy_machine(tmp_path):
    """2.19.0 to 2.19.3 lost about every second of these: a result that came twice ended the thread that takes them."""
    playbook = tmp_path / "plays.yml"
    playbook.write_text((PLAY.format(hosts="localhost") + PLAY.format(hosts="all")) * 40)
    words = ["ansible-playbook", "-i", "one,two,", str(playbook)]
    runs = [
        subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for number in range(2 * (os.cpu_count() or 1))
    ]
    try:
        outputs = [run.communicate(timeout=120)[0].decode() for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0] * len(runs), outputs
    assert all(len(re.findall("ok=40 ", output)) == 3 for output in outputs)
