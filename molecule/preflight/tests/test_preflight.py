# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two hosts that are right, and the same with ten defects planted on one of them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from replica import ROOT, playbook

CONVERGE = "molecule/preflight/converge.yml"
BASE = "/srv/scenario-preflight"
REPORTS = ROOT / ".cache" / "scenario-preflight"
SETTINGS = yaml.safe_load((ROOT / "molecule/preflight/vars/main.yml").read_text(encoding="utf-8"))["scenario_node"]
PROCESS = (
    "<processes><process_info><pid>4711</pid><type>C</type><process_name>python3</process_name>"
    "<used_memory>90000 MiB</used_memory></process_info></processes>"
)


def node(rank, settings, hcas=None):
    """Make another tree on a host."""
    words = [f"--settings={json.dumps({**SETTINGS, **settings})}", f"--hcas={json.dumps(hcas or {})}"]
    rank.run(
        f"python3 {BASE}/fake_node.py {BASE}/node --xml={BASE}/nvidia-smi-q.xml " + " ".join(map(shlex.quote, words))
    )


def report() -> dict:
    newest = max(REPORTS.glob("preflight-*.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(Path(newest).read_text(encoding="utf-8"))


@pytest.fixture
def repaired(replica):
    """Hosts that are right, again after the test."""
    yield replica
    rank = replica.ranks[1]
    rank.run(
        f"umount {BASE}/checkpoint; rm -f /etc/nccl.conf /etc/systemd/system/scenario-preflight.service; "
        "systemctl daemon-reload; grep -v scenario-preflight /etc/hosts > /run/hosts && cat /run/hosts > /etc/hosts; "
        "nft delete table inet scenario",
        check=False,
    )
    node(rank, {})


def test_a_clean_pair_has_nothing_to_say(repaired):
    output = playbook(CONVERGE)
    assert re.search(r"\d+ checks on 2 hosts: all is well\.", output)
    found = report()
    assert (found["rows"], found["hosts"]) == ([], ["rank0", "rank1"])
    for host, peer in (("rank0", "rank1"), ("rank1", "rank0")):
        (meeting,) = found["observed"][host]["meeting"]["peers"]
        assert (meeting["name"], meeting["reached"], meeting["closed"]) == (peer, True, {})
        assert {8100, 29600, 29601} <= set(meeting["open"])
        assert abs(meeting["offset"]) < 5


def test_it_is_one_execution_per_host_and_changes_nothing(repaired):
    output = playbook(CONVERGE, "-vvv")
    assert len(re.findall(r"^<[^>]+> SSH: EXEC", output, re.MULTILINE)) == 2
    assert re.findall(r"^rank\d .*changed=(\d+) .*failed=(\d+)", output, re.MULTILINE) == [("0", "0"), ("0", "0")]


def plant(rank):
    """Ten defects on one host."""
    settings = {
        "edit_xml": [
            [1, "<processes>\n\t\t</processes>", PROCESS],
            [2, "<remapped_row_pending>No", "<remapped_row_pending>Yes"],
        ],
        "fabric_state": "In Progress",
        "kernel": ["NVRM: Xid (PCI:0000:15:0b): 79, pid=1, GPU has fallen off the bus."],
        "packages": {**SETTINGS["packages"], "nvidia-fabricmanager": "590.48.01-1"},
    }
    node(rank, settings, {"mlx5_7": {"rate": "200 Gb/sec (2X NDR)"}, "mlx5_9": {"width": "8", "width_max": "16"}})
    unit = "[Service]\nExecStart=/bin/true\nLimitMEMLOCK=8388608\n"
    rank.run(
        f"mount -t tmpfs -o size=16m none {BASE}/checkpoint; echo NCCL_IB_DISABLE=1 > /etc/nccl.conf; "
        f"printf {shlex.quote(unit)} > /etc/systemd/system/scenario-preflight.service; systemctl daemon-reload"
    )


EXPECTED = {
    "gpu-processes", "remapped-rows", "fabric-state", "xid", "companions", "rails", "rail-pcie", "checkpoint-disk",
    "nccl-conf", "memlock",
}  # fmt: skip


def test_ten_defects_are_found_in_one_run_with_remedies(repaired):
    plant(repaired.ranks[1])
    output = " ".join(playbook(CONVERGE, expect=2).split())
    rows = report()["rows"]
    assert {row["check"] for row in rows if row["host"] == "rank1"} == EXPECTED
    # The rail that one host lacks makes the two differ; nothing is said of the host that is right.
    assert {row["check"] for row in rows if row["host"] != "rank1"} == {"rails-equal"}
    assert all(row["remedy"] for row in rows)
    assert "The hosts are not fit to serve:" in output
    for row in rows:
        assert row["text"].split("'")[0][:60] in output


def test_waived_with_a_reason_that_is_told_and_nothing_stops(repaired):
    plant(repaired.ranks[1])
    reasons = dict.fromkeys([*EXPECTED, "rails-equal"], "the vendor comes tomorrow")
    output = playbook(CONVERGE, "-e", json.dumps({"preflight_waivers": reasons}))
    assert output.count("waived: the vendor comes tomorrow") >= len(EXPECTED)
    assert "failed" not in re.search(r"checks on 2 hosts: ([^\n']*)", output)[1]


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"preflight_waivers": {"no-such-check": "x"}}, "names no-such-check, which is no check"),
        ({"preflight_waivers": {"acs": " "}}, "must map the id of a check to the reason why it is waived"),
        ({"preflight_severities": {"acs": "ignore"}}, "must map the id of a check to fail or warn"),
        ({"preflight_port": 8100}, "the hosts meet on a port that the replica does not use"),
    ],
)
def test_a_mistake_is_one_sentence(repaired, variables, sentence):
    output = " ".join(playbook(CONVERGE, "-e", json.dumps(variables), expect=2).split())
    assert sentence in output


def test_a_name_that_leads_to_loopback_and_a_port_that_is_closed(repaired):
    rank = repaired.ranks[1]
    # The file is bound into the host: it is changed in place.
    mark = "# scenario-preflight"
    rank.run(
        f'(echo "127.0.1.1 $(hostname) {mark}"; grep -v "{mark}" /etc/hosts) > /run/hosts; cat /run/hosts > /etc/hosts'
    )
    rank.run("command -v nft || apt-get -qq -y install --no-install-recommends nftables")
    rank.run(
        "nft 'add table inet scenario; add chain inet scenario in { type filter hook input priority 0; }; "
        "add rule inet scenario in tcp dport 29601 reject with tcp reset'"
    )
    playbook(CONVERGE, expect=2)
    rows = {(row["check"], row["host"]): row["text"] for row in report()["rows"]}
    assert "leads to 127.0.1.1" in rows["hostname", "rank1"]
    assert "29601: refused (nothing listens there, or a firewall rejects it)" in rows["ports", "rank0"]
    assert ("ports", "rank1") not in rows


def test_something_that_sits_on_the_replicas_port(repaired):
    rank = repaired.ranks[0]
    rank.run("systemd-run --quiet --unit scenario-sits python3 -m http.server 8100")
    rank.run("until ss -ltn | grep -q :8100; do sleep 0.1; done")
    try:
        output = playbook(CONVERGE, expect=2)
    finally:
        rank.run("systemctl stop scenario-sits")
    assert "Something else listens on 8100 of rank0, and the replica does not run." in " ".join(output.split())
