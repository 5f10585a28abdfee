# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hub answers as the real one, and misbehaves as told."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import time
import urllib.error
import urllib.request

import pytest
from lab_hub import Hub, git_blob_oid, make_repo

SHARD = random.Random(3).randbytes(300_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": SHARD,
    "model-00002-of-00002.safetensors": SHARD[::-1],
    "sub/folder/notes.txt": b"notes",
}
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def commit(tmp_path):
    return make_repo(tmp_path, "lab/tiny", FILES)


@pytest.fixture
def hub(tmp_path, commit):
    with Hub(tmp_path) as running:
        yield running


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args):
        return None


def get(url, redirect=True, method="GET", data=None, **headers):
    """Status, headers and body; a body that ends early is an error of http.client."""
    opener = urllib.request.build_opener(*([] if redirect else [_NoRedirect]))
    request = urllib.request.Request(url, headers=headers, method=method, data=data)
    try:
        with opener.open(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def shard_url(hub, commit, path=FIRST):
    return f"{hub.endpoint}/lab/tiny/resolve/{commit}/{path}"


def test_a_branch_names_a_commit(hub, commit):
    status, _rest, body = get(f"{hub.endpoint}/api/models/lab/tiny/revision/main")
    assert status == 200
    assert json.loads(body)["sha"] == commit
    assert {item["rfilename"] for item in json.loads(body)["siblings"]} == set(FILES)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("api/models/lab/tiny/revision/" + "0" * 40, 404, "RevisionNotFound"),
        ("api/models/lab/tiny/tree/refs", 404, "RevisionNotFound"),
        ("api/models/lab/none/revision/main", 401, "RepoNotFound"),
        ("lab/tiny/resolve/main/absent.json", 404, "EntryNotFound"),
        ("lab/tiny/resolve/main/../../refs/main", 404, "EntryNotFound"),
        ("api/agent-harnesses", 404, "NotFound"),
    ],
)
def test_what_is_not_there(hub, path, status, code):
    got, headers, _rest = get(f"{hub.endpoint}/{path}")
    assert (got, headers["X-Error-Code"]) == (status, code)


def test_the_tree_has_digests(hub, commit):
    _rest, headers, body = get(f"{hub.endpoint}/api/models/lab/tiny/tree/{commit}?recursive=true&expand=false")
    items = {item["path"]: item for item in json.loads(body)}
    assert headers["Link"] is None
    assert items["sub"]["type"] == items["sub/folder"]["type"] == "directory"
    assert items["config.json"]["oid"] == git_blob_oid(FILES["config.json"])
    assert "lfs" not in items["config.json"]
    assert items[FIRST]["lfs"]["oid"] == hashlib.sha256(SHARD).hexdigest()
    assert items[FIRST]["lfs"]["size"] == items[FIRST]["size"] == len(SHARD)


def test_the_tree_without_recursion_and_below_a_folder(hub, commit):
    _rest, _rest, top = get(f"{hub.endpoint}/api/models/lab/tiny/tree/{commit}")
    assert {item["path"] for item in json.loads(top)} == {"config.json", "sub", *list(FILES)[1:3]}
    _rest, _rest, below = get(f"{hub.endpoint}/api/models/lab/tiny/tree/{commit}/sub?recursive=true")
    assert [item["path"] for item in json.loads(below)] == ["sub/folder", "sub/folder/notes.txt"]


def test_the_tree_is_paged(tmp_path, commit):
    with Hub(tmp_path, page_size=2) as hub:
        url = f"{hub.endpoint}/api/models/lab/tiny/tree/{commit}?recursive=true"
        paths = []
        while url:
            _rest, headers, body = get(url)
            paths += [item["path"] for item in json.loads(body)]
            link = headers["Link"]
            url = link[1 : link.index(">")] if link else None
        assert paths == ["config.json", *list(FILES)[1:3], "sub", "sub/folder", "sub/folder/notes.txt"]
        assert hub.count("tree") == 3


def test_a_shard_lies_on_the_cdn(hub, commit):
    status, headers, _rest = get(shard_url(hub, commit), redirect=False, method="HEAD")
    assert status == 302
    assert headers["X-Repo-Commit"] == commit
    assert headers["X-Linked-Etag"] == f'"{hashlib.sha256(SHARD).hexdigest()}"'
    assert headers["X-Linked-Size"] == str(len(SHARD))
    assert headers["Location"].startswith(hub.cdn)
    status, _rest, body = get(headers["Location"])
    assert (status, body) == (200, SHARD)
    assert hub.bytes_sent(FIRST) == len(SHARD)
    assert hub.bytes_sent(FIRST, where="resolve") == 0


@pytest.mark.parametrize("relative", [False, True])
def test_a_small_file(tmp_path, commit, relative):
    with Hub(tmp_path, relative_redirects=relative) as hub:
        status, headers, body = get(shard_url(hub, commit, "config.json"))
        assert (status, body) == (200, FILES["config.json"])
        assert headers["ETag"] == f'"{git_blob_oid(body)}"'
        assert hub.count("resolve") == (2 if relative else 1)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("bytes=0-9", (206, SHARD[:10], "bytes 0-9/300000")),
        ("bytes=299990-", (206, SHARD[-10:], "bytes 299990-299999/300000")),
        ("bytes=-5", (206, SHARD[-5:], "bytes 299995-299999/300000")),
        ("bytes=299999-400000", (206, SHARD[-1:], "bytes 299999-299999/300000")),
        ("bytes=300000-", (416, b"", "bytes */300000")),
        ("bytes=0-1,5-6", (200, SHARD, None)),
        ("lines=1-2", (200, SHARD, None)),
    ],
)
def test_ranges(hub, commit, asked, expected):
    status, headers, body = get(shard_url(hub, commit), Range=asked)
    assert (status, body, headers["Content-Range"]) == expected


def test_a_range_of_another_file_version_is_not_given(hub, commit):
    etag = f'"{hashlib.sha256(SHARD).hexdigest()}"'
    assert get(shard_url(hub, commit), **{"Range": "bytes=5-", "If-Range": etag})[0] == 206
    assert get(shard_url(hub, commit), **{"Range": "bytes=5-", "If-Range": '"x"'})[0] == 200


def test_a_token_that_follows_the_redirect_is_seen(hub, commit):
    get(shard_url(hub, commit), Authorization="Bearer t")
    assert hub.count("resolve", authorization=True) == 1
    assert hub.count("cdn", authorization=True) == 1


@pytest.mark.parametrize(("token", "status"), [(None, 401), ("wrong", 403), ("right", 200)])
def test_gated(tmp_path, commit, token, status):
    with Hub(tmp_path, tokens={"lab/tiny": "right"}) as hub:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        assert get(shard_url(hub, commit, "config.json"), **headers)[0] == status
        assert get(f"{hub.endpoint}/api/models/lab/tiny/revision/main", **headers)[0] == status


def test_a_url_of_the_cdn_expires(tmp_path, commit):
    with Hub(tmp_path, url_lifetime=-1) as hub:
        assert get(shard_url(hub, commit))[0] == 403
        assert get(f"{hub.cdn}/lab/tiny/{commit}/{FIRST}")[0] == 403


def test_statuses(hub, commit):
    url = shard_url(hub, commit)
    hub.fault("missing", path=FIRST, on="resolve")
    hub.fault("unauthorized", path=FIRST)
    hub.fault("gated", path=FIRST)
    hub.fault("throttled", path=FIRST, seconds=7)
    hub.fault("throttled", path=FIRST, seconds=8, retry_after=False)
    hub.fault("unavailable", path=FIRST)
    hub.fault("status", path=FIRST, on="cdn", status=502, headers={"X-Word": "w"}, body="bad gateway")
    seen = [get(url) for _rest in range(8)]
    assert [status for status, _rest, _rest in seen] == [404, 401, 403, 429, 429, 503, 502, 200]
    assert [headers["X-Error-Code"] for _rest, headers, _rest in seen[:3]] == [
        "EntryNotFound",
        "GatedRepo",
        "GatedRepo",
    ]
    assert seen[3][1]["Retry-After"] == "7"
    assert seen[4][1]["Retry-After"] is None
    assert seen[4][1]["RateLimit"] == '"resolvers";r=0;t=8'
    assert seen[5][1]["Retry-After"] is None
    assert (seen[6][1]["X-Word"], seen[6][2]) == ("w", b"bad gateway")
    assert seen[7][2] == SHARD


def test_faults_are_counted_skipped_and_matched(hub, commit):
    hub.fault("unavailable", path="*-00001-*", on="cdn", times=2, skip=1)
    hub.fault("unavailable", path="config.json", times=None)
    assert [get(shard_url(hub, commit))[0] for _rest in range(4)] == [200, 503, 503, 200]
    assert get(shard_url(hub, commit, "model-00002-of-00002.safetensors"))[0] == 200
    assert [get(shard_url(hub, commit, "config.json"))[0] for _rest in range(3)] == [503] * 3
    hub.clear_faults()
    assert get(shard_url(hub, commit, "config.json"))[0] == 200


@pytest.mark.parametrize("bad", [("boil", "any"), ("reset", "moon")])
def test_unknown_faults_are_refused(hub, bad):
    with pytest.raises(ValueError, match="unknown"):
        hub.fault(bad[0], on=bad[1])


def test_a_loop(hub, commit):
    hub.fault("loop", path=FIRST, on="resolve", times=None)
    assert get(shard_url(hub, commit))[0] == 302
    assert hub.count("resolve", FIRST, fault="loop") > 3


def read_all(hub, url):
    """The bytes that come before the connection ends, and how it ends."""
    _rest, headers, _rest = get(url, redirect=False)
    with urllib.request.urlopen(headers["Location"], timeout=10) as answer:
        got = b""
        try:
            while piece := answer.read1(65536):
                got += piece
        except ConnectionResetError:
            return got, "reset"
    return got, "end"


@pytest.mark.parametrize(("kind", "end"), [("reset", "reset"), ("cut", "end"), ("expire", "reset")])
def test_a_body_that_breaks_off(hub, commit, kind, end):
    hub.fault(kind, path=FIRST, after=123_456)
    assert read_all(hub, shard_url(hub, commit)) == (SHARD[:123_456], end)
    assert hub.seen("cdn")[0].bytes == 123_456
    assert read_all(hub, shard_url(hub, commit)) == (SHARD, "end")


def test_expire_spoils_the_urls_given_out(hub, commit):
    _rest, headers, _rest = get(shard_url(hub, commit), redirect=False)
    assert get(headers["Location"])[0] == 200
    hub.expire_urls()
    assert get(headers["Location"])[0] == 403
    assert get(shard_url(hub, commit))[0] == 200


def test_drop(hub, commit):
    hub.fault("drop", path=FIRST, on="resolve")
    with pytest.raises((ConnectionResetError, urllib.error.URLError, http.client.RemoteDisconnected)):
        get(shard_url(hub, commit))
    assert get(shard_url(hub, commit))[0] == 200


@pytest.mark.parametrize(
    ("fault", "asked", "expected"),
    [
        ({"kind": "short", "length": 7}, None, (200, SHARD[:7])),
        ({"kind": "short", "length": 7}, "bytes=10-", (206, SHARD[10:17])),
        ({"kind": "long", "extra": 2}, None, (200, SHARD + b"\0\0")),
        ({"kind": "corrupt", "at": 9}, None, (200, SHARD[:9] + bytes([SHARD[9] ^ 255]) + SHARD[10:])),
        ({"kind": "corrupt", "at": 9}, "bytes=100-", (206, SHARD[100:])),
        ({"kind": "corrupt", "at": 101}, "bytes=100-102", (206, bytes([SHARD[100], SHARD[101] ^ 255, SHARD[102]]))),
        ({"kind": "ignore_range"}, "bytes=100-", (200, SHARD)),
        ({"kind": "trickle", "rate": 50_000_000}, None, (200, SHARD)),
        ({"kind": "stall", "after": 5, "seconds": 0}, None, (200, SHARD)),
    ],
)
def test_bodies_that_are_wrong(hub, commit, fault, asked, expected):
    hub.fault(**fault, path=FIRST)
    status, _rest, body = get(shard_url(hub, commit), **({"Range": asked} if asked else {}))
    assert (status, body) == expected
    assert hub.seen("cdn")[0].fault == fault["kind"]
    assert get(shard_url(hub, commit))[2] == SHARD


def test_a_wrong_range(hub, commit):
    hub.fault("wrong_range")
    _rest, headers, body = get(shard_url(hub, commit), Range="bytes=4-7")
    assert (headers["Content-Range"], body) == ("bytes 5-8/300000", SHARD[4:8])


def test_a_hub_ends_although_a_client_hangs(tmp_path, commit):
    hub = Hub(tmp_path).start()
    hub.fault("stall", path=FIRST, after=10)
    with urllib.request.urlopen(shard_url(hub, commit), timeout=10) as answer:
        assert answer.read(10) == SHARD[:10]
        begin = time.monotonic()
        hub.stop()
        assert time.monotonic() - begin < 5
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            answer.read()
    with pytest.raises(urllib.error.URLError):
        get(shard_url(hub, commit))


def test_control_from_outside(hub, commit):
    fault = json.dumps({"kind": "status", "status": 418, "path": FIRST, "times": 1}).encode()
    assert get(f"{hub.endpoint}/_lab/faults", method="POST", data=fault)[0] == 200
    assert json.loads(get(f"{hub.endpoint}/_lab/faults")[2])[0]["kind"] == "status"
    assert get(shard_url(hub, commit))[0] == 418
    assert get(shard_url(hub, commit))[0] == 200
    log = json.loads(get(f"{hub.endpoint}/_lab/log")[2])
    assert log["paths"][FIRST] == {"requests": 3, "bytes": len(SHARD)}
    assert [request["status"] for request in log["requests"]] == [418, 302, 200]
    get(f"{hub.endpoint}/_lab/log", method="DELETE")
    assert json.loads(get(f"{hub.endpoint}/_lab/log")[2])["requests"] == []
    hub.fault("missing", times=None)
    get(f"{hub.endpoint}/_lab/faults", method="DELETE")
    assert get(shard_url(hub, commit))[0] == 200
    _rest, headers, _rest = get(shard_url(hub, commit), redirect=False)
    get(f"{hub.endpoint}/_lab/expire", method="POST", data=b"")
    assert get(headers["Location"])[0] == 403


@pytest.mark.parametrize("data", [b"nonsense", b"{}", b"[]", b'{"kind": "boil"}', b'{"kind": "drop", "on": "moon"}'])
def test_control_refuses_nonsense(hub, data):
    assert get(f"{hub.endpoint}/_lab/faults", method="POST", data=data)[0] == 400
