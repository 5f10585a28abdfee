# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two hosts and one directory that both see, which here is a directory of the lab's machine mounted on both."""

from __future__ import annotations

import json
import subprocess
import time

import pytest

testinfra_hosts = ["ansible://rank0"]

SHARED = "/srv/shared/scenario-checkpoint"
SHARD = "model-00003-of-00016.safetensors"


class Shared:
    """The role on both hosts, which hold one directory."""

    def __init__(self, both, variables):
        both.variables = {"checkpoint_root": SHARED, "checkpoint_shared": True, "checkpoint_shared_timeout": 5}
        self.both, self.run, self.hosts = both, both.run, both.hosts
        name = variables["checkpoint_repository"].replace("/", "--")
        self.path = f"{SHARED}/{name}/{variables['checkpoint_revision']}"

    def wrong(self):
        """Files whose digests are not those of the listing, as each host sees them."""
        found = []
        for each in self.hosts:
            listed = json.loads(each.check_output(f"cat {self.path}/.kimi-k3/listing.json"))["files"]
            digests = {item["path"]: item["sha256"] for item in listed if item["sha256"]}
            lines = each.check_output(f"cd {self.path} && sha256sum {' '.join(sorted(digests))}").splitlines()
            found += [line.split()[1] for line in lines if line.split()[0] != digests[line.split()[1]]]
        return found

    def holder(self):
        """Who has the lease: its host and its process."""
        script = f"cd {self.path}/.kimi-k3 && cat holders/$(ls lease | cut -d. -f1)/holder.json"
        text = self.hosts[0].run(script).stdout
        return json.loads(text) if text else None

    def written(self):
        """Bytes of the slow shard that are in the holder's file."""
        journal = self.hosts[0].run(f"cat {self.path}/.kimi-k3/holders/*/parts/{SHARD}.*.journal").stdout.split()
        return int(journal[1]) if len(journal) == 3 else 0

    def clean(self):
        assert self.hosts[0].check_output(f"ls {self.path}/.kimi-k3/lease") == "free"
        left = f"find {self.path}/.kimi-k3/parts {self.path}/.kimi-k3/holders -mindepth 1"
        assert self.hosts[0].check_output(left) == ""

    def begin(self):
        return subprocess.Popen(
            self.both.command(), cwd=self.both.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@pytest.fixture
def play(both, variables):
    first, second = both.hosts
    first.check_output(f"rm -rf {SHARED} && mkdir {SHARED}")
    assert second.file(SHARED).exists, "both hosts see the same directory"
    yield Shared(both, variables)
    first.check_output(f"rm -rf {SHARED}")


def until(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return value


def test_one_fetches_for_both(play, hub, variables):
    union = hub.sizes(variables)
    hub.forget()
    output = play.run()
    assert hub.sent() == union
    assert output.count("changed=1") == 1
    assert play.wrong() == []
    play.clean()
    hub.forget()
    output = play.run()
    assert "changed=1" not in output
    assert hub.sent() == {}
    # Each host proves a part, or one of them all when it is done before the other one is there.
    assert "changed=1" not in play.run(checkpoint_verify="full")
    assert hub.sent() == {}


def test_one_index_serves_all_stages(play, hub, variables):
    play.run(checkpoint_scope="stage", checkpoint_stages=[1])
    index = json.loads(play.hosts[1].check_output(f"cat {play.path}/model.safetensors.index.json"))
    held = play.hosts[1].check_output(f"cd {play.path} && ls *.safetensors").split()
    assert set(index["weight_map"].values()) == set(held)
    summary = json.loads(play.hosts[1].check_output(f"cat {play.path}/checkpoint.json"))
    assert summary["stages"] == [0, 1]


def test_killed_while_it_holds_the_lease(play, hub, variables):
    hub.fault("trickle", path=SHARD, on="cdn", rate=40_000)
    with play.begin() as controller:
        until(lambda: play.written() > 60_000)
        holder = play.holder()
        number = int(holder["host"].removeprefix("rank"))
        play.hosts[number].check_output(f"kill -9 {holder['pid']}")
        # The other one takes over by itself, although the play has failed on this host.
        output, _errors = controller.communicate(timeout=300)
    assert "ended without a word" in output
    output = play.run()
    assert play.wrong() == []
    play.clean()
    size = hub.sizes(variables)[SHARD]
    assert hub.sent()[SHARD] < size + 60_000, "what was there was used"


def test_halted_while_it_holds_the_lease(play, hub, variables):
    hub.fault("trickle", path=SHARD, on="cdn", rate=40_000)
    with play.begin() as controller:
        until(lambda: play.written() > 60_000)
        holder = play.holder()
        number = int(holder["host"].removeprefix("rank"))
        halted, other = play.hosts[number], play.hosts[1 - number]
        halted.check_output(f"kill -STOP {holder['pid']}")
        until(lambda: other.file(f"{play.path}/checkpoint.json").exists)
        inodes = f"cd {play.path} && stat -c '%i %n' *.safetensors"
        before = other.check_output(inodes)
        halted.check_output(f"kill -CONT {holder['pid']}")
        output, _errors = controller.communicate(timeout=300)
    assert "another one has taken over the work" in " ".join(output.split())
    assert other.check_output(inodes) == before
    assert play.wrong() == []
    play.run()
    play.clean()
