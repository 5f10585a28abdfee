# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ways bytes may come: over HTTPS with an authority of one's own, and in chunks."""

from __future__ import annotations

import random
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.fetch import FetchError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import Hub, HubError, TransientError

SHARD = "model-00002-of-00005.safetensors"
BIG = "big.bin"
SIZE = (12 << 20) + 4097

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-sha256"]
_LEAF = """
basicConstraints = CA:FALSE
keyUsage = digitalSignature
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = IP:127.0.0.1
"""


class Authority:
    """A certificate authority of one's own, and one server that it vouches for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "ca.pem"
        folder.mkdir()
        (folder / "leaf.cnf").write_text(_LEAF)
        usage = ["-addext", "keyUsage = critical, keyCertSign"]
        self._openssl(
            "req", "-x509", *_KEY, *usage, "-days", "2", "-subj", "/CN=own", "-keyout", "ca.key", "-out", "ca.pem"
        )
        self._openssl("req", *_KEY, "-subj", "/CN=hub", "-keyout", "hub.key", "-out", "hub.csr")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "leaf.cnf"]
        self._openssl("x509", "-req", "-in", "hub.csr", *signed, "-out", "hub.pem")

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)

    @property
    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "hub.pem", self.folder / "hub.key")
        return context


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> list[Authority]:
    folder = tmp_path_factory.mktemp("authorities")
    return [Authority(folder / name) for name in ("own", "other")]


@pytest.fixture
def secure(world: Any, authorities: list[Authority]) -> Iterator[Any]:
    """The world, with its hub behind TLS and a large file in it."""
    from lab_hub import Hub as Server  # noqa: PLC0415

    world.publish({**world.files, BIG: random.Random(3).randbytes(SIZE)})
    with Server(world.root, tls=authorities[0].context) as hub:
        world.hub = hub
        yield world


def trusting(authority: Authority, **options: Any) -> dict[str, Any]:
    return {"client": {"ca_path": str(authority.path), **options}}


def test_large_and_small_files_arrive_right_over_tls(secure: Any, authorities: list[Authority]) -> None:
    assert secure.hub.endpoint.startswith("https:")
    assert secure.hub.cdn.startswith("https:")
    secure.hub.fault("cut", path=BIG, on="cdn", after=5_000_000)
    secure.hub.fault("reset", path=SHARD, on="cdn", after=100_000)
    outcome = secure.run(**trusting(authorities[0]))
    assert secure.held() == secure.files
    assert outcome.verified == "sha256"
    assert [request.range for request in secure.hub.seen("cdn", BIG)] == [None, "bytes=5000000-"]


@pytest.mark.parametrize("chosen", [None, 1])
def test_another_authority_is_not_trusted(secure: Any, authorities: list[Authority], chosen: int | None) -> None:
    trust = {} if chosen is None else trusting(authorities[chosen])
    with pytest.raises(
        HubError, match=r"^The certificate of https://127\.0\.0\.1.* is not trusted .*: set ca_path to "
    ):
        secure.run(**trust)
    assert secure.hub.log == []
    assert secure.held() == {}


def test_a_read_over_tls_that_waits_can_be_ended(secure: Any, authorities: list[Authority]) -> None:
    secure.hub.fault("stall", path=BIG, on="cdn", after=1 << 20)
    client = Hub(secure.hub.endpoint, "lab/tiny", secure.commit, ca_path=str(authorities[0].path), timeout=600)
    body = client.open(next(entry for entry in client.listing() if entry.path == BIG), 0)
    received, waits, ended = [0], threading.Event(), []

    def read() -> None:
        buffer = memoryview(bytearray(1 << 16))
        try:
            while count := body.readinto1(buffer):
                received[0] += count
                if received[0] >= 1 << 20:
                    waits.set()
            ended.append("the end")
        except TransientError as error:
            ended.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert waits.wait(30)
    body.abort()
    thread.join(30)
    assert ended
    assert received == [1 << 20]
    body.close()


def test_one_file_that_cannot_be_had_ends_the_others_over_tls(secure: Any, authorities: list[Authority]) -> None:
    secure.hub.fault("stall", path=BIG, on="cdn", after=1 << 20)
    secure.hub.fault("missing", path="tiktoken.model", on="resolve", times=None)
    failures: list[str] = []

    def run() -> None:
        try:
            secure.run(**trusting(authorities[0], timeout=600))
        except FetchError as error:
            failures.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert [failure.partition(":")[0] for failure in failures] == ["tiktoken.model"]


@pytest.mark.parametrize("over_tls", [False, True])
def test_bodies_in_chunks_arrive_right(request: Any, authorities: list[Authority], over_tls: bool) -> None:
    world = request.getfixturevalue("secure" if over_tls else "world")
    world.hub.fault("chunked", path=SHARD, on="cdn", after=100_000)
    world.hub.fault("chunked", times=None)
    world.run(**(trusting(authorities[0]) if over_tls else {}))
    assert world.held() == world.files
    assert [request.range for request in world.hub.seen("cdn", SHARD)] == [None, "bytes=100000-"]
    assert world.hub.bytes_sent(SHARD, "cdn") == len(world.files[SHARD])
    assert {request.fault for request in world.hub.seen("cdn")} == {"chunked"}


def test_a_body_in_chunks_that_is_too_long_or_too_short_is_none(world: Any) -> None:
    data = world.files[SHARD]
    path = world.root / "lab/tiny" / world.commit / SHARD
    client = world.request().hub
    entry = next(entry for entry in client.listing() if entry.path == SHARD)
    world.hub.fault("chunked", path=SHARD, on="cdn", times=None)
    world.hub.entry("lab/tiny", world.commit, SHARD)
    for changed in (data[:-1], data + b"x"):
        path.write_bytes(changed)
        with pytest.raises(HubError, match=r"closed after|sent more than"):
            client.read(entry)
    path.write_bytes(data)
    assert client.read(entry)[0] == data
