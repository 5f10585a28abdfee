# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two hosts that need the same files fetch each of them once and give it to each other.

Both begin at opposite ends of the list. Before a host fetches a file from outside, it claims it from the other one,
which says whether it has it, is at it, or does not mind. Who cannot be reached does not mind: a host alone fetches all
of it by itself. Files go by their content, which is proven on arrival like any other; the token only keeps strangers
out. The server is part of the run and ends with it.

A host waits for another one only as long as it reaches it itself: one that is heard, but cannot be reached, as behind a
firewall, can neither give anything nor be asked how far it is.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import http.client
import json
import os
import re
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import Hub, HubError, Response
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import Digest, Entry
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import StoppedError

# What the other side says to a claim.
GRANTED, TAKEN, HERE = "granted", "taken", "here"
_LATER = "later"  # it does not know yet what it has

_POLL = 0.5
_CALL_TIMEOUT = 5.0
_IDLE_TIMEOUT = 60.0
_GREETING = 15.0
_MAX_BODY = 4096
_MAX_STATE = 16 << 20
_SENDFILE = 1 << 26
_MAX_CONNECTIONS = 256
_FORGET = 4 * _CALL_TIMEOUT  # a claim that the other side does not speak of for so long is none
_RUN = "X-Run"
_LIMIT = 12 * 3600.0  # seconds that a finished host stays for the other one, whatever that says
_RANGE = re.compile(r"bytes=(\d+)-")


def key_of(entry: Entry) -> str:
    """A name for the content of a file."""
    return f"{entry.digest}:{entry.size}"


class Peer(Hub):
    """The other host: files by their content, and what it says."""

    near = True

    def __init__(self, url: str, token: str, *, timeout: float = 30.0, stop: threading.Event) -> None:
        super().__init__(url, "", "", token=token, timeout=timeout, retries=0, stop=stop, use_proxy=False)
        self.name = f"peer {urlsplit(url).hostname}"
        self.run = secrets.token_hex(8)  # what tells this run from the other one's

    def open(self, entry: Entry, offset: int) -> Response:
        return self.fetch(f"{self.endpoint}/file/{key_of(entry)}", entry, offset)

    def call(self, path: str, value: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask or tell something; an OSError when there is no answer."""
        data = json.dumps(value).encode() if value is not None else None
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json", _RUN: self.run}
        try:
            response = self._session.open(
                "POST" if data is not None else "GET",
                f"{self.endpoint}{path}",
                data=data,
                headers=headers,
                timeout=_CALL_TIMEOUT,
            )
            try:
                answer = json.loads(response.read(_MAX_STATE))
            finally:
                response.close()
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(errno.EPROTO, f"{self.name} gave no sensible answer ({error})") from error
        if not isinstance(answer, dict):
            raise OSError(errno.EPROTO, f"{self.name} gave no sensible answer")
        return answer


class Exchange:
    """This host's side. It serves while the block runs."""

    def __init__(
        self,
        peer: Peer,
        *,
        address: str,
        port: int,
        token: str,
        first: bool,
        timeout: float,
        stop: threading.Event,
    ) -> None:
        self.peer = peer
        self.first = first
        self.warning: str | None = None
        self.sent_bytes = 0
        self._token = token
        self._address = (address, port)
        self._timeout = timeout
        self._stop = stop
        self._server: _Server | None = None
        self._lock = threading.Condition()
        self._here: dict[str, str] = {}  # content -> path
        self._claims: dict[str, bool] = {}  # content -> whether the other side has agreed
        self._theirs: dict[str, float] = {}  # what the other side is at, and when it last said so
        self._has: set[str] = set()  # what the other side has
        self._ready = self._finished = False
        self._their_end = False
        self._began = time.monotonic()
        self._heard: float | None = None  # when it last said anything
        self._reached = self._began  # when it last answered
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Exchange:
        # It may have waited long for another run in the same place.
        self._began = self._reached = time.monotonic()
        try:
            self._server = _Server(self._address, self)
        except OSError as error:
            host, port = self._address
            self.warning = (
                f"Files are not given to the peer: {host} port {port} cannot be listened on "
                f"({error.strerror or error}). Set the address to one of this host's own, or another port."
            )
        else:
            self._run(lambda server=self._server: server.serve_forever(poll_interval=0.1))
        self._run(self._watch)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._closed.set()
        if self._server:
            self._server.shutdown()
            self._server.end()
        for thread in self._threads:
            thread.join()

    def _run(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        self._threads.append(thread)

    # What this host has and takes

    def offer(self, entry: Entry, path: str) -> None:
        """A proven file for the other side to take."""
        with self._lock:
            self._here[key_of(entry)] = path
            self._claims.pop(key_of(entry), None)

    def ready(self, unproven: Iterable[Entry]) -> None:
        """From now on this host knows what it has; these files are here and are being proven."""
        with self._lock:
            self._ready = True
            self._claims.update((key_of(entry), True) for entry in unproven)

    def taken(self, entry: Entry) -> bool:
        """Whether the other side is known to be at it, so that there is no use in asking."""
        key = key_of(entry)
        with self._lock:
            return key in self._theirs and key not in self._has and not self._out_of_reach()

    def claim(self, entry: Entry, *, early: bool = False) -> str:
        """Whether to fetch this file from outside (granted), from the peer (here), or to wait (taken).

        What is needed early, before a host can know what it has, is not put off until it does.
        """
        key = key_of(entry)
        with self._lock:
            if self._claims.get(key):
                return GRANTED
            if self._out_of_reach():
                self._claims[key] = True
                return GRANTED
            if key in self._has:
                return HERE
            if key in self._theirs:
                return TAKEN
            # Ours before asking: when both ask at once, the first one's claim is the older one.
            self._claims[key] = False
        try:
            question = {"key": key, "early": early, "first": self.first}
            answer = self.peer.call("/claim", question).get("answer")
            self._reach()
        except OSError:
            # Both begin at about the same time: one that has not come yet is given a moment.
            late = self._heard is None and time.monotonic() - self._began < min(_GREETING, self._timeout)
            answer = _LATER if late else GRANTED
        with self._lock:
            if answer == GRANTED and key in self._claims:
                self._claims[key] = True
                return GRANTED
            self._claims.pop(key, None)
            if answer == HERE:
                self._has.add(key)
                return HERE
            if answer != _LATER:
                self._theirs[key] = time.monotonic()
            return TAKEN

    def read(self, entry: Entry, outside: Callable[[Entry], tuple[bytes, Digest]]) -> tuple[bytes, Digest]:
        """A small file in memory, from where it is to be had once."""
        while True:
            answer = self.claim(entry, early=True)
            if answer == GRANTED:
                return outside(entry)
            if answer == HERE:
                try:
                    return self.peer.read(entry)
                except HubError:
                    return outside(entry)
            if self._stop.wait(_POLL / 5):
                raise StoppedError

    def finish(self) -> None:
        """Stay until the other side needs nothing more, is gone, or never comes."""
        self._finished = True
        deadline = time.monotonic() + _LIMIT
        with contextlib.suppress(OSError):
            # Who is finished too may be gone as soon as it has heard this: its answer is the only one there will be.
            if self.peer.call("/finished", {}).get("finished"):
                self.end_of_peer()
        while not self._stop.is_set() and time.monotonic() < deadline:
            with self._lock:
                since = self._began if self._heard is None else self._heard
                if self._their_end or time.monotonic() - since >= self._timeout:
                    return
                self._lock.wait(_POLL / 2)
        if self._stop.is_set():
            raise StoppedError

    def waits_for(self) -> str:
        return f"done, and here for {self.peer.name} until it has what it needs"

    # What the other side says

    def answer(self, key: str, early: bool = False, first: bool | None = None, run: str = "") -> str:
        """The answer to a claim of the other side, which says whether it is the first one, and which run it is."""
        # Two that both are, or both are not, still have to agree.
        mine = self.first if first is not self.first else self.run < run
        with self._lock:
            if key in self._here:
                return HERE
            if not (self._ready or early):
                return _LATER
            agreed = self._claims.get(key)
            if agreed or (agreed is False and mine):
                return TAKEN
            # Both asked at once and it is not this one's turn: the claim is given up.
            self._claims.pop(key, None)
            self._theirs[key] = time.monotonic()
            return GRANTED

    def path_of(self, key: str) -> str | None:
        with self._lock:
            return self._here.get(key)

    def state(self) -> dict[str, Any]:
        with self._lock:
            return {
                "here": sorted(self._here),
                "at": sorted(key for key, agreed in self._claims.items() if agreed),
                "finished": self._finished,
            }

    @property
    def finished(self) -> bool:
        return self._finished

    def end_of_peer(self) -> None:
        with self._lock:
            self._their_end = True
            self._lock.notify_all()

    def sent(self, count: int) -> None:
        with self._lock:
            self.sent_bytes += count

    def _hear(self) -> None:
        with self._lock:
            self._heard = time.monotonic()

    heard = _hear

    def _reach(self) -> None:
        self._hear()
        with self._lock:
            self._reached = time.monotonic()

    def _out_of_reach(self) -> bool:
        return time.monotonic() - self._reached >= self._timeout

    @property
    def run(self) -> str:
        return self.peer.run

    def _watch(self) -> None:
        """Keep up with the other side."""
        while not self._closed.wait(_POLL):
            try:
                state = self.peer.call("/state")
                here, at = set(map(str, state["here"])), set(map(str, state["at"]))
            except (OSError, KeyError, TypeError):
                with self._lock:
                    if self._out_of_reach():
                        # Gone, or as good as gone: what it was at is free again.
                        self._theirs.clear()
                        self._has.clear()
                        self._lock.notify_all()
                continue
            self._reach()
            now = time.monotonic()
            with self._lock:
                self._has = here
                # A claim that it makes at this moment may be in neither of the two yet.
                said = {**self._theirs, **dict.fromkeys(at, now)}
                self._theirs = {key: when for key, when in said.items() if key not in here and now - when < _FORGET}
                self._their_end = self._their_end or bool(state.get("finished"))
                if self._their_end:
                    self._theirs.clear()
                self._lock.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], exchange: Exchange) -> None:
        self.exchange = exchange
        self._connections: set[socket.socket] = set()
        self._guard = threading.Lock()
        family, _type, _protocol, _name, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        # All of it: a link-local address is none without its interface.
        super().__init__(where, _Handler)

    def server_bind(self) -> None:
        # HTTPServer would ask a name server who this host is, which may hang.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def verify_request(self, *_: Any) -> bool:
        """Not more at once than the other host can need, whoever they are from."""
        with self._guard:
            return len(self._connections) < _MAX_CONNECTIONS

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that goes away is no news here."""

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._connections.discard(request)
        super().shutdown_request(request)

    def end(self) -> None:
        """Nothing stays open."""
        self.server_close()
        with self._guard:
            left = list(self._connections)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Answers the other host, and nobody else."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_TIMEOUT
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        exchange = self._allowed()
        if exchange is None:
            return
        if self.path == "/state":
            self._json(exchange.state())
        elif self.path.startswith("/file/"):
            path = exchange.path_of(self.path.removeprefix("/file/"))
            if path is None:
                self._plain(404)
            else:
                self._file(exchange, path)
        else:
            self._plain(404)

    def do_POST(self) -> None:
        exchange = self._allowed()
        if exchange is None:
            return
        length = self.headers.get("Content-Length") or ""
        if not length.isdecimal() or int(length) > _MAX_BODY:
            self._plain(400)
            return
        body = self.rfile.read(int(length))
        try:
            value = json.loads(body)
            if not isinstance(value, dict):
                self._plain(400)
            elif self.path == "/claim":
                early, first = bool(value.get("early")), value.get("first")
                run = self.headers.get(_RUN) or ""
                self._json({"answer": exchange.answer(str(value["key"]), early, first, run)})
            elif self.path == "/finished":
                exchange.end_of_peer()
                self._json({"finished": exchange.finished})
            else:
                self._plain(404)
        except (ValueError, KeyError, TypeError):
            self._plain(400)

    def _allowed(self) -> Exchange | None:
        exchange = self.server.exchange
        given = (self.headers.get("Authorization") or "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {exchange._token}".encode()):
            self._plain(401)
        elif self.headers.get(_RUN) == exchange.run:
            # Two names of one host: it would wait for itself.
            self._plain(421)
        else:
            exchange.heard()
            return exchange
        return None

    def _plain(self, status: int) -> None:
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()

    def _json(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, exchange: Exchange, path: str) -> None:
        try:
            stream = open(path, "rb")  # noqa: SIM115  (closed below, and its absence is an answer)
        except OSError:
            self._plain(404)
            return
        with stream:
            size = os.fstat(stream.fileno()).st_size
            match = _RANGE.fullmatch(self.headers.get("Range") or "")
            start = int(match.group(1)) if match else 0
            if start >= size > 0:
                self._plain(416)
                return
            self.send_response(206 if match else 200)
            self.send_header("Content-Length", str(size - start))
            if match:
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            self.end_headers()
            self.wfile.flush()
            while start < size:
                count = self.connection.sendfile(stream, start, min(_SENDFILE, size - start))
                if not count:
                    break
                # What was sent is not needed again here: leave the memory to others.
                os.posix_fadvise(stream.fileno(), start, count, os.POSIX_FADV_DONTNEED)
                start += count
                exchange.sent(count)
                exchange.heard()
