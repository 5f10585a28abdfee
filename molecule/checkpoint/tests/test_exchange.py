# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two hosts that need the same files, counted where the bytes come from; and runs that outlive their controller."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

testinfra_hosts = ["ansible://rank0"]

SCENARIO = "/srv/scenario-checkpoint"
PORT = 29551


@pytest.fixture
def play(both):
    def clean():
        for each in both.hosts:
            each.check_output(f"rm -rf {SCENARIO}/both")

    clean()
    both.variables = {"checkpoint_root": f"{SCENARIO}/both"}
    yield both
    clean()


def wrong(play, variables):
    """Files whose digests are not those of the listing, on both hosts."""
    name = variables["checkpoint_repository"].replace("/", "--")
    path = f"{SCENARIO}/both/{name}/{variables['checkpoint_revision']}"
    found = []
    for each in play.hosts:
        listed = json.loads(each.check_output(f"cat {path}/.kimi-k3/listing.json"))["files"]
        for item in listed:
            if item["sha256"]:
                digest = each.check_output(f"sha256sum '{path}/{item['path']}'").split()[0]
                found += [item["path"]] if digest != item["sha256"] else []
    return found


def test_each_byte_crosses_the_uplink_once(play, hub, variables):
    union = hub.sizes(variables)
    hub.forget()
    output = play.run()
    assert hub.sent() == union, "1.0 times the union of what both need"
    assert wrong(play, variables) == []
    for each in play.hosts:
        assert f":{PORT} " not in each.check_output("cat /proc/net/tcp /proc/net/tcp6") + each.run("ss -ltn").stdout
    hub.forget()
    output = play.run()
    assert "changed=1" not in output
    assert hub.sent() == {}


def test_without_exchange_it_crosses_twice(play, hub, variables):
    union = hub.sizes(variables)
    hub.forget()
    play.run(checkpoint_exchange="never")
    assert hub.sent() == {path: 2 * size for path, size in union.items()}


def test_a_host_that_lost_its_disk_takes_all_from_the_other(play, hub, variables):
    play.run()
    play.hosts[1].check_output(f"rm -rf {SCENARIO}/both")
    hub.forget()
    play.run()
    assert {path for path in hub.sent() if path.endswith(".safetensors")} == set()
    assert wrong(play, variables) == []


def test_the_controller_dies_and_the_next_run_attaches(play, hub, variables):
    shard = "model-00003-of-00016.safetensors"
    hub.fault("stall", path=shard, on="cdn", after=100_000, seconds=20)
    command = play.command("--limit", "rank0", checkpoint_exchange="never")
    with subprocess.Popen(command, cwd=play.root, stdout=subprocess.DEVNULL, start_new_session=True) as controller:
        deadline = time.monotonic() + 60
        while not hub.requests("cdn", shard):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(controller.pid, signal.SIGKILL)
    output = play.run("--limit", "rank0", checkpoint_exchange="never")
    assert "rank0: attached to process " in output
    assert len(hub.requests("cdn", shard)) == 1, "the connection of the first run was never broken"
    assert "rank0" in output
    assert "changed=1" in output


def test_check_mode_says_how_long_it_would_take(play, hub, variables):
    union = hub.sizes(variables)
    output = play.run("--check", checkpoint_assumed_rate=1_000_000)
    for name in ("rank0", "rank1"):
        (line,) = [line for line in output.splitlines() if line.startswith(f"{name}: would fetch ")]
        assert f"{len(union) - 1} of {len(union) - 1} files" in line
        assert line.endswith("at 1.0 MB/s")
    for each in play.hosts:
        assert not each.file(f"{SCENARIO}/both").exists
