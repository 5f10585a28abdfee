# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import hashlib
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import hub as module
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import (
    Backoff,
    Hub,
    HubError,
    TransientError,
    check_endpoint,
    parse_token,
)
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import Entry, ListingError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import StoppedError

SHARD = "model-00001-of-00005.safetensors"


@pytest.fixture
def client(world: Any) -> Hub:
    return Hub(world.hub.endpoint, "lab/tiny", world.commit, retries=3, backoff=0.001, timeout=5)


def entry_of(client: Hub, path: str) -> Entry:
    return next(entry for entry in client.listing() if entry.path == path)


def read(body: Any) -> bytes:
    data = bytearray()
    buffer = memoryview(bytearray(1 << 16))
    while count := body.readinto1(buffer):
        data += buffer[:count]
    body.close()
    return bytes(data)


# Listing


def test_the_listing_has_every_file_with_its_digest(world: Any, client: Hub) -> None:
    entries = {entry.path: entry for entry in client.listing()}
    assert set(entries) == set(world.files)
    data = world.files[SHARD]
    assert entries[SHARD] == Entry(SHARD, len(data), hashlib.sha256(data).hexdigest())
    assert entries["config.json"].sha256 is None
    assert len(entries["config.json"].blob or "") == 40


def test_a_listing_in_pages_is_followed(world: Any, client: Hub) -> None:
    world.hub.page_size = 3
    assert {entry.path for entry in client.listing()} == set(world.files)
    assert world.hub.count("tree") == 4


def test_a_busy_hub_is_asked_again(world: Any, client: Hub) -> None:
    for kind, options in (
        ("unavailable", {}),
        ("drop", {}),
        ("status", {"status": 500}),
        ("throttled", {"seconds": 0}),
    ):
        world.hub.fault(kind, on="tree", **options)
        assert client.listing()
    world.hub.fault("status", on="tree", status=502, times=None)
    with pytest.raises(HubError, match=r"HTTP 502\. Tried 4 times"):
        client.listing()


def test_a_listing_and_a_file_in_memory_that_trickle_are_left(world: Any) -> None:
    def slow(**options: Any) -> Hub:
        return Hub(world.hub.endpoint, "lab/tiny", world.commit, retries=0, timeout=5, **options)

    entry = entry_of(slow(), "config.json")
    world.hub.fault("trickle", path="config.json", rate=20, times=None)
    with pytest.raises(HubError, match=r"^config\.json came at .* below the floor of 1\.0 MB/s\. Tried 1 times"):
        slow(min_rate=1_000_000, min_rate_seconds=0.2).read(entry)
    assert slow(min_rate=1, min_rate_seconds=0.2).read(entry)[0] == world.files["config.json"]
    with pytest.raises(HubError, match=r"^The listing came at .* below the floor of 1\.00 TB/s"):
        slow(min_rate=10**12, min_rate_seconds=0).listing()


@pytest.mark.parametrize("keep", [0, 20])
def test_a_listing_that_breaks_off_is_asked_for_again(world: Any, client: Hub, keep: int) -> None:
    class Server(ThreadingHTTPServer):
        left = 1

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'[{"type": "file", "path": "a", "size": 0, "oid": "%s"}]' % (b"0" * 40)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:keep] if self.server.left else body)
            self.server.left = 0

        def log_message(self, *_: Any) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            hub = Hub(f"http://127.0.0.1:{server.server_port}", "a/b", "0" * 40, retries=0)
            with pytest.raises(HubError, match="The listing broke off"):
                hub.listing()
            assert [entry.path for entry in hub.listing()] == ["a"]
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"status": 200, "body": "<html>"}, "did not answer with JSON"),
        ({"status": 200, "body": "{}"}, "did not answer with a list"),
        ({"status": 200, "body": '[{"path": "../x"}]'}, "leaves the destination"),
        ({"status": 418}, "answered HTTP 418"),
        ({"status": 302, "headers": {"Location": "file:///etc/passwd"}}, "redirects to file:///etc/passwd"),
    ],
)
def test_what_is_no_hub_is_told(world: Any, client: Hub, options: dict[str, Any], message: str) -> None:
    world.hub.fault("status", on="tree", times=None, **options)
    with pytest.raises((HubError, ListingError), match=message):
        client.listing()


def test_pages_without_end_are_left(world: Any, client: Hub) -> None:
    link = f'<{world.hub.endpoint}/api/models/lab/tiny/tree/{world.commit}?cursor=0>; rel="next"'
    world.hub.fault("status", on="tree", times=None, status=200, body="[]", headers={"Link": link})
    with pytest.raises(HubError, match="pages without end"):
        client.listing()


def test_a_redirect_loop_is_left(world: Any, client: Hub) -> None:
    world.hub.fault("loop", on="tree", times=None)
    with pytest.raises(HubError, match="redirects without end"):
        client.listing()


def test_nobody_there() -> None:
    client = Hub("http://127.0.0.1:9", "a/b", "0" * 40, retries=1, backoff=0.001, timeout=1)
    with pytest.raises(
        HubError, match=r"http://127\.0\.0\.1:9/api/models/a/b/tree/0+ cannot be reached .*Tried 2 times"
    ):
        client.listing()


# Permission


def test_an_unknown_revision_is_named(world: Any) -> None:
    with pytest.raises(HubError, match=f"no lab/tiny at revision {'0' * 40} .*RevisionNotFound.*check repository"):
        Hub(world.hub.endpoint, "lab/tiny", "0" * 40).listing()
    assert len(world.hub.log) == 1


def test_a_gated_repository_needs_a_token(world: Any) -> None:
    world.hub.tokens["lab/tiny"] = "hf_right"
    arguments = (world.hub.endpoint, "lab/tiny", world.commit)
    with pytest.raises(HubError, match=r"401, GatedRepo\): it is gated, private or absent; set token_file"):
        Hub(*arguments).listing()
    with pytest.raises(HubError, match=r"403, GatedRepo.*the token was sent, but") as caught:
        Hub(*arguments, token="hf_wrong").listing()
    assert "hf_wrong" not in str(caught.value)
    assert len(world.hub.log) == 2
    assert Hub(*arguments, token="hf_right").listing()


def test_the_token_stays_with_the_endpoint(world: Any) -> None:
    world.hub.tokens["lab/tiny"] = "hf_right"
    world.hub.relative_redirects = True
    client = Hub(world.hub.endpoint, "lab/tiny", world.commit, token="hf_right")
    assert client.read(entry_of(client, "config.json"))[0] == world.files["config.json"]
    assert client.read(entry_of(client, SHARD))[0] == world.files[SHARD]
    assert world.hub.count("cdn") == 1
    assert not world.hub.seen("cdn", authorization=True)
    assert all(request.authorization for request in world.hub.seen("resolve"))


# Files


def test_ranges_are_strict(world: Any, client: Hub) -> None:
    entry, data = entry_of(client, SHARD), world.files[SHARD]
    body = client.open(entry, 1000)
    assert body.start == 1000
    assert read(body) == data[1000:]
    world.hub.fault("wrong_range", on="cdn")
    with pytest.raises(TransientError, match="with the range"):
        client.open(entry, 1000)
    world.hub.fault("ignore_range", on="cdn")
    body = client.open(entry, 1000)
    assert body.start == 0
    assert read(body) == data


@pytest.mark.parametrize(("kind", "options"), [("short", {"length": 10}), ("long", {})])
def test_an_announced_length_that_is_not_the_listed_one_is_refused(
    world: Any, client: Hub, kind: str, options: dict[str, Any]
) -> None:
    world.hub.fault(kind, on="cdn", **options)
    with pytest.raises(TransientError, match="The server announces"):
        client.open(entry_of(client, SHARD), 0)


def test_a_file_in_memory_is_proven(world: Any, client: Hub) -> None:
    entry = entry_of(client, "config.json")
    world.hub.fault("corrupt", path="config.json")
    world.hub.fault("cut", path="config.json", after=5)
    assert client.read(entry)[0] == world.files["config.json"]
    assert world.hub.count("resolve", "config.json") == 3
    world.hub.fault("corrupt", path="config.json", times=None)
    with pytest.raises(HubError, match=f"config.json from {world.hub.endpoint} has the digest git-blob:"):
        client.read(entry)


def test_an_absent_file_is_named_at_once(world: Any, client: Hub) -> None:
    world.hub.fault("missing", path=SHARD, times=None)
    with pytest.raises(
        HubError, match=f"no {SHARD} of lab/tiny .*though its listing of revision {world.commit} names it"
    ):
        client.open(entry_of(client, SHARD), 0)
    assert world.hub.count("resolve") == 1


def test_a_signed_address_that_ran_out_is_worth_another_try(world: Any, client: Hub) -> None:
    entry = entry_of(client, SHARD)
    world.hub.url_lifetime = -1
    with pytest.raises(TransientError, match="refused the address") as caught:
        client.open(entry, 0)
    assert "?" not in str(caught.value)


# Waiting


def test_waits_that_the_server_asks_for(world: Any, client: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(client.stop, "wait", lambda delay: asked.append(delay) and False)
    world.hub.fault("throttled", on="tree", seconds=7)
    world.hub.fault("throttled", on="tree", seconds=11, retry_after=False)
    world.hub.fault("status", on="tree", status=503, headers={"Retry-After": formatdate(time.time() + 30, usegmt=True)})
    client.listing()
    retries = [delay for delay in asked if delay in (7.0, 11.0)]
    assert retries == [7.0, 11.0]
    assert any(25 < delay <= 30 for delay in asked)


def test_one_connection_that_is_told_to_wait_makes_all_wait(world: Any, client: Hub, monkeypatch: Any) -> None:
    entry = entry_of(client, SHARD)
    world.hub.fault("throttled", on="resolve", seconds=40)
    with pytest.raises(TransientError):
        client.open(entry, 0)
    asked: list[float] = []
    monkeypatch.setattr(client.stop, "wait", lambda delay: asked.append(delay) and False)
    client.open(entry, 0).close()
    assert len(asked) == 1
    assert 30 < asked[0] <= 40


def test_a_wait_without_reason_is_an_error() -> None:
    with pytest.raises(HubError, match="asks to wait 86400 s"):
        Backoff(5).wait(TransientError("Busy.", 86400))


def test_waits_grow_and_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    waits: list[float] = []
    monkeypatch.setattr(stop, "wait", lambda delay: waits.append(delay) and False)
    backoff = Backoff(12, 1.0, stop)
    for _try in range(12):
        backoff.wait(TransientError("x"))
    for number, wait in enumerate(waits):
        assert min(60, 2**number) / 2 <= wait <= min(60, 2**number)
    with pytest.raises(HubError, match="Tried 13 times"):
        backoff.wait(TransientError("x"))
    backoff.reset()
    backoff.wait(TransientError("x"))


def test_a_wait_ends_when_the_run_does() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        Backoff(5, 60, stop).wait(TransientError("x"))


# Small things


@pytest.mark.parametrize(
    "endpoint", ["", "huggingface.co", "ftp://x", "https://", "https://me:secret@x", "https://x?token=secret"]
)
def test_endpoints_that_are_refused(endpoint: str) -> None:
    with pytest.raises(HubError) as caught:
        check_endpoint(endpoint)
    assert "secret" not in str(caught.value)


def test_endpoints_that_are_taken() -> None:
    assert check_endpoint("https://huggingface.co/") == "https://huggingface.co"
    assert check_endpoint("http://10.0.0.1:8080/mirror") == "http://10.0.0.1:8080/mirror"


def test_tokens() -> None:
    assert parse_token("hf_x\n") == ("hf_x", None)
    assert parse_token("hf_x") == ("hf_x", None)
    assert parse_token("hf_x\r\n") == ("hf_x", None)
    token, remark = parse_token(" hf_x\n\n")
    assert token == "hf_x"
    assert remark
    for text in ("", "\n", "a b", "a\nb", "hf_\u00fc"):
        with pytest.raises(HubError):
            parse_token(text)


def test_an_untrusted_certificate_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    def refuse(_session: Any, _method: str, url: str, **_options: Any) -> None:
        calls.append(url)
        raise module.urllib.error.URLError(module.ssl.SSLCertVerificationError("self-signed certificate"))

    monkeypatch.setattr(module.urls.Request, "open", refuse)
    with pytest.raises(HubError, match=r"certificate of https://hub.example/.* is not trusted .*set ca_path"):
        Hub("https://hub.example", "a/b", "0" * 40).listing()
    assert len(calls) == 1
    with pytest.raises(HubError, match=r"ca_path .* cannot be used"):
        Hub("https://hub.example", "a/b", "0" * 40, ca_path=str(tmp_path / "absent.pem"))
