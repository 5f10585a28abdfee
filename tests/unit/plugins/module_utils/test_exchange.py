# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two hosts, here two directories and two ports, and what each byte costs."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import checkpoint_job
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import exchange as module
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_job import ensure
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.exchange import GRANTED, HERE, TAKEN, Exchange, Peer
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.fetch import FetchError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import Entry

TOKEN = "between us"
HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL", 0.05)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def side(port: int) -> Callable[..., Exchange]:
    """One side of an exchange, by its number."""

    def function(
        number: int,
        *,
        token: str = TOKEN,
        timeout: float = 20,
        stop: threading.Event | None = None,
        first: bool | None = None,
        peer: str | None = None,
    ) -> Exchange:
        stop = stop or threading.Event()
        other = Peer(f"http://{peer or HOSTS[1 - number]}:{port}", token, timeout=5, stop=stop)
        first = number == 0 if first is None else first
        return Exchange(other, address=HOSTS[number], port=port, token=token, first=first, timeout=timeout, stop=stop)

    return function


class Pair:
    """Two destinations that fetch at the same time."""

    def __init__(self, world: Any, side: Callable[..., Exchange]) -> None:
        self.world, self.side = world, side
        self.dests = [world.dest.with_name(f"host{number}") for number in (0, 1)]
        self.outcomes: list[Any] = [None, None]

    def one(self, number: int, timeout: float = 20, **changes: Any) -> None:
        request = self.world.request(dest=str(self.dests[number]), **changes)
        request.exchange = self.side(number, timeout=timeout, stop=request.stop)
        try:
            self.outcomes[number] = ensure(request)
        except Exception as error:  # noqa: BLE001
            self.outcomes[number] = error

    def both(self, *changes: dict[str, Any], **common: Any) -> None:
        threads = [
            threading.Thread(target=self.one, args=(number,), kwargs={**common, **(changes[number] if changes else {})})
            for number in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def held(self, number: int) -> dict[str, bytes]:
        self.world.dest = self.dests[number]
        return self.world.held()


@pytest.fixture
def pair(world: Any, side: Callable[..., Exchange]) -> Pair:
    return Pair(world, side)


def test_each_byte_comes_from_outside_once(world: Any, pair: Pair) -> None:
    pair.both()
    for number in (0, 1):
        assert pair.outcomes[number].changed
        assert pair.held(number) == world.files
        assert pair.outcomes[number].warnings == []
    assert world.hub.bytes_sent() == sum(map(len, world.files.values())) + tree_bytes(world)
    for path in world.files:
        assert world.hub.bytes_sent(path) == len(world.files[path]), path
    assert sum(outcome.peer_bytes for outcome in pair.outcomes) >= sum(
        len(data) for path, data in world.files.items() if path.endswith(".safetensors")
    )


def tree_bytes(world: Any) -> int:
    return sum(request.bytes for request in world.hub.seen("tree"))


def test_stages_that_have_one_file_in_common(world: Any, pair: Pair) -> None:
    common = {"scope": "stage", "pipeline_layers": [3, 1]}
    pair.both({"stages": [0]}, {"stages": [1]}, **common)
    for path, data in world.files.items():
        assert world.hub.bytes_sent(path) == len(data), path
    assert "model-00001-of-00005.safetensors" not in pair.held(1)
    assert pair.outcomes[0].plan.identity_digest == pair.outcomes[1].plan.identity_digest


def test_a_host_that_has_all_gives_it(world: Any, pair: Pair) -> None:
    world.run(dest=str(pair.dests[0]))
    world.hub.clear_log()
    pair.both()
    assert not pair.outcomes[0].changed
    assert pair.held(1) == world.files
    assert world.hub.bytes_sent("model-*") == 0
    receipts = json.loads((pair.dests[1] / ".kimi-k3" / "receipts.json").read_text())["files"]
    assert receipts["model-00001-of-00005.safetensors"]["source"] == "peer 127.0.0.1"


def test_alone_it_fetches_all(world: Any, pair: Pair) -> None:
    pair.one(1, timeout=0.2)
    assert pair.outcomes[1].changed
    assert pair.held(1) == world.files


def test_a_peer_that_gives_wrong_bytes_is_no_harm(world: Any, pair: Pair) -> None:
    world.run(dest=str(pair.dests[0]))
    path = pair.dests[0] / "model-00002-of-00005.safetensors"
    receipts = pair.dests[0] / ".kimi-k3" / "receipts.json"
    path.write_bytes(b"x" * path.stat().st_size)
    stored = json.loads(receipts.read_text())
    stats = path.stat()
    stored["files"][path.name].update(
        mtime_ns=stats.st_mtime_ns, ctime_ns=stats.st_ctime_ns, ino=stats.st_ino, blocks=stats.st_blocks
    )
    receipts.write_text(json.dumps(stored))
    world.hub.clear_log()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_job, "check_file", lambda *_: 1)
        pair.both()
    assert pair.held(1) == world.files
    assert world.hub.bytes_sent("model-*") == stats.st_size


def test_a_peer_that_dies_leaves_its_share_to_the_other(world: Any, pair: Pair) -> None:
    last = "model-00005-of-00005.safetensors"
    world.hub.fault("missing", path=last, on="resolve", times=1)
    world.hub.fault("trickle", path="model-00001*", on="cdn", rate=150_000)
    pair.both(timeout=1)
    failed = [number for number in (0, 1) if isinstance(pair.outcomes[number], FetchError)]
    assert len(failed) == 1
    other = 1 - failed[0]
    assert not isinstance(pair.outcomes[other], Exception)
    assert pair.held(other) == world.files


def test_a_port_that_is_taken_is_warned_of(world: Any, pair: Pair, port: int) -> None:
    with socket.socket() as other:
        other.bind((HOSTS[0], port))
        other.listen()
        pair.one(0, timeout=0.2)
    assert pair.held(0) == world.files
    (warning,) = pair.outcomes[0].warnings
    assert f"127.0.0.1 port {port} cannot be listened on" in warning


def test_a_host_that_cannot_be_reached_keeps_nobody_waiting(world: Any, pair: Pair, port: int) -> None:
    """Its port is taken, or behind a firewall: it asks and takes, but can give nothing."""
    with socket.socket() as other:
        other.bind((HOSTS[0], port))
        other.listen()
        pair.both(timeout=1.5)
    for number in (0, 1):
        assert not isinstance(pair.outcomes[number], Exception), pair.outcomes[number]
        assert pair.held(number) == world.files
    assert len(pair.outcomes[0].warnings) == 1


@pytest.mark.parametrize("first", [True, False])
def test_two_that_think_the_same_of_their_order_agree(
    world: Any, pair: Pair, side: Callable[..., Exchange], first: bool
) -> None:
    pair.side = lambda number, **options: side(number, first=first, **options)
    pair.both()
    for number in (0, 1):
        assert pair.held(number) == world.files
    for path, data in world.files.items():
        assert world.hub.bytes_sent(path) == len(data), path


def test_a_host_that_is_its_own_peer_fetches_all(
    world: Any, pair: Pair, side: Callable[..., Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GREETING", 0.2)
    pair.side = lambda number, **options: side(number, peer=HOSTS[number], **options)
    pair.one(0, timeout=0.5)
    assert pair.held(0) == world.files
    assert pair.outcomes[0].peer_bytes == 0


def test_a_claim_that_nobody_speaks_of_is_forgotten(
    side: Callable[..., Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FORGET", 0.3)
    (entry,) = entries(1)
    with side(0) as first, side(1) as second:
        second.ready([])
        # It was granted, and who asked has thought better of it.
        assert second.answer(module.key_of(entry)) == GRANTED
        assert second.taken(entry)
        while second.taken(entry):
            assert second.claim(entry) == TAKEN
        first.ready([])
        assert second.claim(entry) == GRANTED


def test_a_peer_that_ends_in_the_middle_of_a_file(world: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run(dest=str(pair.dests[0]))
    world.hub.clear_log()
    name = "model-00002-of-00005.safetensors"
    real = module._Handler._file
    cut = threading.Event()

    def file(self: Any, exchange: Exchange, path: str) -> None:
        if path.endswith(name) and not cut.is_set():
            cut.set()
            data = Path(path).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[:200_000])
            self.close_connection = True
            monkeypatch.setattr(module._Handler, "_file", lambda handler, *_: handler._plain(404))
        else:
            real(self, exchange, path)

    monkeypatch.setattr(module._Handler, "_file", file)
    pair.both(options={"connections": 1})
    assert cut.is_set()
    assert pair.held(1) == world.files
    assert world.hub.bytes_sent(name) == len(world.files[name]) - 200_000, "the rest came from outside"


# Who may ask


def test_a_link_local_address_keeps_its_interface(
    side: Callable[..., Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("fe80::1", 29551, 0, 3)
    bound = []
    answer = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", where)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_options: answer)
    monkeypatch.setattr(module._Server, "server_bind", lambda server: bound.append(server.server_address))
    monkeypatch.setattr(module._Server, "server_activate", lambda _server: None)
    module._Server(("fe80::1%eth0", 29551), side(0)).server_close()
    assert bound == [where]


def test_not_more_connections_than_can_be_needed(
    side: Callable[..., Exchange], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_CONNECTIONS", 3)
    with side(0), ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection((HOSTS[0], port), timeout=0.5)) for _number in range(5)]
        refused = 0
        for connection in idle:
            try:
                refused += connection.recv(1) == b""
            except TimeoutError:
                continue
        assert refused == 2


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic eA==", "Bearer "])
@pytest.mark.parametrize(("method", "path"), [("GET", "/state"), ("GET", "/file/x"), ("POST", "/claim"), ("GET", "/")])
def test_strangers_get_nothing(
    side: Callable[..., Exchange], port: int, authorization: str | None, method: str, path: str
) -> None:
    with side(0):
        connection = http.client.HTTPConnection(HOSTS[0], port, timeout=5)
        headers = {"Authorization": authorization} if authorization else {}
        connection.request(method, path, body=b'{"key": "x"}' if method == "POST" else None, headers=headers)
        answer = connection.getresponse()
        assert answer.status == 401
        assert answer.read() == b""
        connection.close()


def test_only_what_was_offered_can_be_had(side: Callable[..., Exchange], port: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    entry = Entry("file", 10, "a" * 64)
    with side(0) as exchange:
        exchange.offer(entry, str(tmp_path / "file"))

        def get(path: str, **headers: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection(HOSTS[0], port, timeout=5)
            connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}", **headers})
            answer = connection.getresponse()
            try:
                return answer.status, answer.read()
            finally:
                connection.close()

        assert get(f"/file/{module.key_of(entry)}") == (200, b"0123456789")
        assert get(f"/file/{module.key_of(entry)}", Range="bytes=7-") == (206, b"789")
        assert get(f"/file/{module.key_of(entry)}", Range="bytes=10-") == (416, b"")
        for path in ("/file/", "/file/../file", f"/file/{tmp_path}/file", "/etc/passwd", "/file//etc/passwd"):
            assert get(path)[0] == 404
        (tmp_path / "file").unlink()
        assert get(f"/file/{module.key_of(entry)}")[0] == 404


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"no json", b'{"key": "' + b"x" * 5000 + b'"}'])
def test_nonsense_is_refused(side: Callable[..., Exchange], port: int, body: bytes) -> None:
    with side(0):
        connection = http.client.HTTPConnection(HOSTS[0], port, timeout=5)
        connection.request("POST", "/claim", body=body, headers={"Authorization": f"Bearer {TOKEN}"})
        assert connection.getresponse().status == 400
        connection.close()


def test_nothing_listens_afterwards(side: Callable[..., Exchange], port: int) -> None:
    with side(0):
        socket.create_connection((HOSTS[0], port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOSTS[0], port), timeout=5)


# Claims


def entries(count: int) -> list[Entry]:
    return [Entry(str(number), 1, f"{number:064x}") for number in range(count)]


def test_claims_of_both_at_once_are_granted_to_one(side: Callable[..., Exchange]) -> None:
    wanted = entries(60)
    answers: list[dict[str, str]] = [{}, {}]
    with ExitStack() as stack:
        sides = [stack.enter_context(side(number)) for number in (0, 1)]
        for one in sides:
            one.ready([])
        barrier = threading.Barrier(2)

        def ask(number: int) -> None:
            for entry in wanted:
                barrier.wait()
                answers[number][entry.path] = sides[number].claim(entry)

        threads = [threading.Thread(target=ask, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for entry in wanted:
        assert sorted(answer[entry.path] for answer in answers) == [GRANTED, TAKEN]


def test_what_a_claim_is_answered(side: Callable[..., Exchange], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    mine, offered, free, found = entries(4)
    with side(0) as first, side(1) as second:
        second.ready([])
        assert first.claim(mine) == GRANTED
        assert first.claim(mine) == GRANTED, "and so it is when asked again"
        assert second.claim(free) == TAKEN, "the first one does not know yet what it has"
        assert not second.taken(free)
        assert second.claim(mine, early=True) == TAKEN
        first.ready([found])
        assert second.claim(mine) == TAKEN
        assert second.taken(mine)
        assert second.claim(found) == TAKEN
        first.offer(offered, str(tmp_path / "file"))
        assert second.claim(offered) == HERE
        assert second.claim(free) == GRANTED
        assert first.claim(free) == TAKEN


def test_nobody_there_means_granted(side: Callable[..., Exchange]) -> None:
    with side(0) as first:
        assert first.claim(entries(1)[0]) == TAKEN, "it may be about to come"
    with side(0, timeout=0) as first:
        assert {first.claim(entry) for entry in entries(3)} == {GRANTED}


def test_a_peer_with_another_token_is_nobody(side: Callable[..., Exchange]) -> None:
    with side(0, timeout=0) as first, side(1, token="of another run"):
        assert first.claim(entries(1)[0]) == GRANTED


def test_two_that_are_done_part_at_once(side: Callable[..., Exchange], monkeypatch: pytest.MonkeyPatch) -> None:
    # Without ever asking each other how they are.
    monkeypatch.setattr(module, "_POLL", 3600)
    ended = []

    def one(number: int, exchange: Exchange) -> None:
        exchange.finish()
        ended.append(number)

    with side(0, timeout=3600) as first, side(1, timeout=3600) as second:
        threads = [threading.Thread(target=one, args=pair) for pair in ((0, first), (1, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(ended) == [0, 1]
