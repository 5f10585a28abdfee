# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each fault is found, named, and leaves nothing wrong under a final name."""

from __future__ import annotations

import json
import threading

testinfra_hosts = ["ansible://rank0"]

SHARD = "model-00003-of-00016.safetensors"


def test_a_killed_fetch_goes_on_where_it_was(empty, hub):
    hub.fault("trickle", path=SHARD, on="cdn", rate=30_000)
    result = {}
    run = threading.Thread(target=lambda: result.update(empty.hold()))
    run.start()
    # The journal's second number says how much is written, its first how much is on the disk.
    journal = f"cat {empty.private}/parts/{SHARD}.*.journal"
    empty.until(lambda: int((empty.host.run(journal).stdout.split() or ["0", "0"])[1]) > 100_000)
    # The lock says which process it is.
    pid = empty.read("lock")["pid"]
    empty.host.check_output(f"kill -9 {pid}")
    run.join()
    assert SHARD not in empty.names()
    assert empty.wrong() == []
    before = {line["path"] for line in hub.requests("cdn")} - {SHARD}
    done = before & empty.names()
    hub.forget()
    result = empty.hold()
    assert result["changed"]
    assert result["resumed_bytes"] > 100_000
    assert empty.wrong() == []
    again = hub.requests("cdn")
    assert not done & {line["path"] for line in again}
    (request,) = hub.requests("cdn", SHARD)
    assert request["range"] is not None
    size = next(item["size"] for item in empty.read("listing.json")["files"] if item["path"] == SHARD)
    assert request["bytes"] <= size - 100_000


def test_a_flipped_byte_is_found_and_repaired(empty):
    assert empty.hold()["changed"]
    path = f"{empty.path}/{SHARD}"
    empty.host.check_output(
        f"touch -r {path} /tmp/stamp && printf 'x' | dd of={path} bs=1 seek=70000 conv=notrunc 2>/dev/null "
        f"&& touch -r /tmp/stamp {path}"
    )
    assert empty.wrong() == [SHARD]
    assert empty.hold(check=True)["fetch"] == [SHARD]
    result = empty.hold()
    assert result["changed"]
    assert result["replaced"] == [SHARD]
    assert empty.wrong() == []
    assert empty.host.run(f"ls {empty.private}/bad").stdout.startswith(SHARD)


def test_a_short_file_is_found_and_repaired(empty):
    empty.hold()
    empty.host.check_output(f"truncate -s 1000 {empty.path}/{SHARD}")
    result = empty.hold()
    assert result["replaced"] == [SHARD]
    assert empty.wrong() == []
    assert not empty.hold()["changed"]


def test_a_shard_that_the_hub_lacks_is_named(empty, hub):
    hub.fault("missing", path=SHARD, on="resolve", times=None)
    result = empty.hold()
    assert result["failed"]
    assert SHARD in result["msg"]
    assert "HTTP 404" in result["msg"]
    assert SHARD not in empty.names()
    assert empty.wrong() == []
    assert not empty.host.file(f"{empty.path}/checkpoint.json").exists


def test_wrong_bytes_are_named_with_both_digests(empty, hub):
    hub.fault("corrupt", path=SHARD, on="cdn", at=70_000, times=None)
    result = empty.hold()
    assert result["failed"]
    wanted = next(item for item in empty.read("listing.json")["files"] if item["path"] == SHARD)["sha256"]
    found = empty.host.check_output(f"sha256sum {empty.private}/bad/*").split()[0]
    assert f"sha256:{found}" in result["msg"]
    assert f"sha256:{wanted}" in result["msg"]
    assert SHARD not in empty.names()
    assert empty.wrong() == []


def test_an_index_that_names_what_the_listing_lacks(empty, hub, variables):
    assert empty.hold(check=True)["changed"]
    listing = [
        {"type": "file", "path": item["path"], "size": item["size"], "oid": item["oid"], "lfs": item.get("lfs")}
        for item in tree(hub, variables)
        if item["type"] == "file" and item["path"] != SHARD
    ]
    hub.fault("status", on="tree", status=200, body=json.dumps(listing))
    result = empty.hold()
    assert result["failed"]
    assert f"names {SHARD}" in result["msg"]
    assert empty.names() == set()


def tree(hub, variables):
    path = f"/api/models/{variables['checkpoint_repository']}/tree/{variables['checkpoint_revision']}?recursive=true"
    return hub.get(path)


def test_a_file_that_comes_short_is_not_taken(empty, hub):
    hub.fault("short", path=SHARD, on="cdn", length=1000, times=None)
    result = empty.hold()
    assert result["failed"]
    assert f"announces 1000 bytes of {SHARD}" in result["msg"]
    assert SHARD not in empty.names()
    assert empty.wrong() == []
    hub.behave()
    assert empty.hold()["changed"]
    assert empty.wrong() == []


def test_memory_is_refused(empty):
    result = empty.hold(dest="/dev/shm/checkpoint")  # noqa: S108
    assert result["failed"]
    assert "is on tmpfs (/dev/shm)" in result["msg"]
    assert not empty.host.file("/dev/shm/checkpoint").exists  # noqa: S108


def test_a_disk_that_is_too_small_and_then_made_larger(empty):
    host, path = empty.host, empty.path
    host.check_output(f"mkdir -p {path} && mount -t tmpfs -o size=1m none {path}")
    try:
        result = empty.hold(allow_tmpfs=True)
        assert result["failed"]
        assert "bytes are missing" in result["msg"]
        assert empty.names() == set()
        host.check_output(f"mount -o remount,ro {path}")
        assert "Read-only file system" in empty.hold(allow_tmpfs=True)["msg"]
        host.check_output(f"mount -o remount,rw,size=2g {path}")
        assert empty.hold(allow_tmpfs=True)["changed"]
        assert empty.wrong() == []
    finally:
        host.check_output(f"umount {path}")


def test_a_disk_that_fills_while_it_is_fetched_to(empty, hub):
    host, path = empty.host, empty.path
    host.check_output(f"mkdir -p {path} && mount -t tmpfs -o size=64m none {path}")
    result = {}
    try:
        # All of them, half a minute long: to fill the disk takes a moment of it, also on a busy machine.
        hub.fault("trickle", path="*.safetensors", on="cdn", times=None, rate=200_000)
        run = threading.Thread(target=lambda: result.update(empty.hold(allow_tmpfs=True, connections=1)))
        run.start()
        empty.until(lambda: host.file(f"{path}/model-00001-of-00016.safetensors").exists)
        # Somebody else takes all that is left.
        host.run(f"dd if=/dev/zero of={path}/other bs=1M 2>/dev/null")
        run.join()
        assert result["failed"]
        assert "no room left on the file system" in result["msg"]
        assert "Make room and run again" in result["msg"]
        host.check_output(f"rm {path}/other")
        assert empty.wrong() == []
        hub.behave()
        assert empty.hold(allow_tmpfs=True)["changed"]
        assert empty.wrong() == []
    finally:
        host.check_output(f"umount {path}")


def test_full_verification_without_fetching(empty):
    empty.hold()
    assert empty.hold(verify="full", source="present")["verified"] == "sha256"
    empty.host.check_output(f"printf 'x' | dd of={empty.path}/{SHARD} bs=1 seek=70000 conv=notrunc 2>/dev/null")
    result = empty.hold(verify="full", source="present")
    assert result["failed"]
    assert f"{SHARD} has the digest sha256:" in result["msg"]
    assert empty.wrong() == [SHARD]
    # Preflight and the role serve read this: nothing says any more that the directory is proven.
    summary = empty.host.file(f"{empty.path}/checkpoint.json")
    assert not summary.exists
    assert empty.hold()["replaced"] == [SHARD]
    assert summary.exists
    assert empty.wrong() == []
