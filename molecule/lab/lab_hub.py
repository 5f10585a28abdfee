# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A model hub for tests: answers as the Hugging Face Hub does, and misbehaves on request.

Standard library only. It serves a folder ``ROOT/<owner>/<name>/<commit>/...`` (``refs/main`` beside the commits holds
the commit that the branch points to) on two ports: the *hub* (listing, redirects, small files) and the *CDN* (the big
files, behind signed URLs that expire). Two ports make two origins, so a token that follows a redirect is seen.

In a test (put ``molecule/lab`` on ``sys.path`` first)::

    from lab_hub import Hub, make_repo

    def test_fetch(tmp_path):
        commit = make_repo(tmp_path, "lab/tiny", {"config.json": b"{}", "model-00001-of-00002.safetensors": data})
        with Hub(tmp_path) as hub:                        # ports are free ones; hub.endpoint, hub.cdn are the URLs
            hub.fault("reset", path="*-00001-*", after=1000)              # once; times=None means always
            hub.fault("throttled", path="*", on="resolve", times=2, seconds=1)
            ... fetch from hub.endpoint ...
            assert hub.count("resolve", "*-00001-*") == 2
            assert not hub.seen("cdn", authorization=True)                # no token reached the CDN
            assert hub.bytes_sent("*-00001-*") == len(data)               # body bytes that went out, all requests

``Hub(root, page_size=..., url_lifetime=..., tokens={"lab/tiny": "secret"}, relative_redirects=True)``: entries of a
tree page, seconds a CDN URL is valid, tokens of gated repositories, and whether small files are answered by a relative
redirect or at once; ``tls=CONTEXT``: over HTTPS, by an ``ssl.SSLContext`` that has a certificate.
``hub.expire_urls()`` makes every CDN URL given out so far invalid.

Faults (``hub.fault(kind, path="*", on="any", times=1, skip=0, **options)``): the first fault whose place and path
pattern match and that is not used up is applied; ``skip`` lets that many matching requests pass first. ``on`` is
``revision``, ``tree``, ``resolve`` (hub), ``cdn``, or ``any``: the place where a body would be sent for body faults,
every place for the others. The path of ``revision`` and ``tree`` requests is the repository's name.

================ ===============================================================================================
kind             what happens (options, with their defaults)
================ ===============================================================================================
``status``       answer ``status=500`` with ``headers={}``, ``body=""``
``missing``      404, ``X-Error-Code: EntryNotFound``
``unauthorized`` 401, ``X-Error-Code: GatedRepo``
``gated``        403, ``X-Error-Code: GatedRepo``
``throttled``    429 with ``Retry-After: seconds=1`` and ``RateLimit`` (``retry_after=False``: only the latter)
``unavailable``  503, ``Retry-After`` only if ``seconds`` is given
``loop``         302 to the same URL, for ever
``drop``         connection reset before any answer
``reset``        connection reset after ``after=0`` body bytes
``cut``          orderly close after ``after=0`` body bytes of a longer announced body
``stall``        silence for ``seconds=3600`` after ``after=0`` body bytes, then the rest
``trickle``      the body at ``rate=1024`` bytes per second
``short``        a body of only ``length=0`` bytes that is announced as complete, status 200 or 206
``long``         ``extra=1`` bytes more than the file has, announced so
``corrupt``      the byte at offset ``at=0`` of the file is flipped (only in requests that cover it)
``ignore_range`` the whole file with status 200 where a range was asked
``wrong_range``  206 whose Content-Range starts at another offset than was asked
``chunked``      the body in chunks of ``size=10000`` bytes with no length announced, closed in the middle of a chunk
                 after ``after`` bytes if that is given
``expire``       reset after ``after=0`` body bytes, and all CDN URLs given out so far are invalid from then on
================ ===============================================================================================

The same from outside the process, on the hub's port: ``POST /_lab/faults`` with ``{"kind": ..., "path": ..., ...}``,
``GET /_lab/faults``, ``DELETE /_lab/faults``, ``GET /_lab/log`` (``requests``, and ``paths`` with counts and bytes),
``DELETE /_lab/log``, ``POST /_lab/expire``.

As a program: ``python3 lab_hub.py --root DIR [--host H] [--port P] [--cdn-port P]``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import hashlib
import hmac
import json
import secrets
import signal
import socket
import socketserver
import struct
import termios
import threading
import time
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Mapping

LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".model")
CHUNK = 1 << 20
BODY_FAULTS = frozenset(
    {"reset", "cut", "stall", "trickle", "short", "long", "corrupt", "ignore_range", "wrong_range", "chunked", "expire"}
)
PLAIN_FAULTS = frozenset({"status", "missing", "unauthorized", "gated", "throttled", "unavailable", "loop", "drop"})


@dataclass
class Fault:
    """One way to misbehave, and when."""

    kind: str
    path: str = "*"
    on: str = "any"
    times: int | None = 1
    skip: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in BODY_FAULTS | PLAIN_FAULTS:
            raise ValueError(f"unknown kind of fault: {self.kind}")
        if self.on not in {"any", "revision", "tree", "resolve", "cdn"}:
            raise ValueError(f"unknown place of a fault: {self.on}")


@dataclass
class Request:
    """One line of the log. ``path`` is the file's path in the repository, or the repository's name for the API."""

    where: str
    method: str
    repository: str
    path: str
    range: str | None
    authorization: bool
    client: str
    status: int = 0
    bytes: int = 0
    fault: str | None = None
    aborted: bool = False


class Entry(NamedTuple):
    """A file of a repository."""

    path: str
    size: int
    sha256: str
    git_oid: str
    lfs: bool


def git_blob_oid(data: bytes) -> str:
    """The name git gives to a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    """The small file that stands in git for a large one."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def tree_revision(folder: Path) -> str:
    """A commit name that follows from the paths and bytes under a folder, and from nothing else."""
    digest = hashlib.sha1(usedforsecurity=False)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def make_repo(root: Path, name: str, files: Mapping[str, bytes]) -> str:
    """Write a repository of these files below ``root``, point ``main`` to it and return its commit."""
    digest = hashlib.sha1(usedforsecurity=False)
    for path, data in sorted(files.items()):
        digest.update(f"{path}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    commit = digest.hexdigest()
    for path, data in files.items():
        target = root / name / commit / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    refs = root / name / "refs"
    refs.mkdir(parents=True, exist_ok=True)
    (refs / "main").write_text(commit + "\n")
    return commit


class Hub:
    """The two servers, their faults and their log. A context manager; also ``start()`` and ``stop()``."""

    def __init__(
        self,
        root: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        cdn_port: int = 0,
        page_size: int = 1000,
        url_lifetime: float = 3600,
        tokens: Mapping[str, str] | None = None,
        lfs_suffixes: Iterable[str] = LFS_SUFFIXES,
        relative_redirects: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.root = Path(root)
        self.page_size = page_size
        self.url_lifetime = url_lifetime
        self.tokens = dict(tokens or {})
        self.lfs_suffixes = tuple(lfs_suffixes)
        self.relative_redirects = relative_redirects
        self.stopping = threading.Event()
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.sockets: set[socket.socket] = set()
        self._key = secrets.token_bytes(32)
        self._epoch = 0
        self._digests: dict[Path, tuple[tuple[int, int, int], str, str]] = {}
        self._servers = [_Server((host, port), _HubHandler, self), _Server((host, cdn_port), _CdnHandler, self)]
        self._threads: list[threading.Thread] = []
        if tls:
            for server in self._servers:
                # The greeting is left to the thread of the connection.
                server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        scheme = "https" if tls else "http"
        self.endpoint, self.cdn = (f"{scheme}://{host}:{server.server_address[1]}" for server in self._servers)

    # Life

    def start(self) -> Hub:
        """Begin to answer."""
        for server in self._servers:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def stop(self) -> None:
        """End: close the ports and every open connection, as a server that dies."""
        self.stopping.set()
        for server in self._servers:
            if self._threads:
                server.shutdown()
            server.server_close()
        with self.lock:
            left = list(self.sockets)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def __enter__(self) -> Hub:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Faults and log

    def fault(
        self, kind: str, path: str = "*", on: str = "any", times: int | None = 1, skip: int = 0, **options: Any
    ) -> Fault:
        """Add a fault; see the module's text."""
        fault = Fault(kind, path, on, times, skip, options)
        with self.lock:
            self.faults.append(fault)
        return fault

    def clear_faults(self) -> None:
        """Behave from now on."""
        with self.lock:
            self.faults.clear()

    def take_fault(self, where: str, path: str, *, body: bool) -> Fault | None:
        """The fault that applies to this request, used up by one."""
        with self.lock:
            for fault in self.faults:
                if fault.times == 0 or fault.on not in {"any", where} or not fnmatch.fnmatch(path, fault.path):
                    continue
                if fault.kind in BODY_FAULTS and not body:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None

    def seen(self, where: str = "*", path: str = "*", **fields: Any) -> list[Request]:
        """Requests of the log that match, for example ``seen("cdn", "*.safetensors", status=206)``."""
        with self.lock:
            return [
                request
                for request in self.log
                if fnmatch.fnmatch(request.where, where)
                and fnmatch.fnmatch(request.path, path)
                and all(getattr(request, name) == value for name, value in fields.items())
            ]

    def count(self, where: str = "*", path: str = "*", **fields: Any) -> int:
        """How many requests of the log match."""
        return len(self.seen(where, path, **fields))

    def bytes_sent(self, path: str = "*", where: str = "*") -> int:
        """How many body bytes went out for the files that match."""
        return sum(request.bytes for request in self.seen(where, path))

    def clear_log(self) -> None:
        """Forget the requests so far."""
        with self.lock:
            self.log.clear()

    # Repositories

    def commit_of(self, repository: str, revision: str) -> str | None:
        """The commit that a branch, tag or commit names."""
        base = self._inside(repository)
        if base is None:
            return None
        ref = self._inside(f"{repository}/refs/{revision}")
        if ref is not None and ref.is_file():
            revision = ref.read_text().strip()
        commit = self._inside(f"{repository}/{revision}")
        plain = "/" not in revision and revision != "refs"
        return revision if plain and commit is not None and commit.is_dir() else None

    def entries(self, repository: str, commit: str) -> list[Entry]:
        """The files of a commit, by path."""
        folder = self.root / repository / commit
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        return [self.entry(repository, commit, p.relative_to(folder).as_posix()) for p in files]

    def entry(self, repository: str, commit: str, path: str) -> Entry:
        """One file of a commit; FileNotFoundError if it has none of that name."""
        file = self._inside(f"{repository}/{commit}/{path}")
        if file is None or not file.is_file():
            raise FileNotFoundError(path)
        status = file.stat()
        stamp = (status.st_size, status.st_mtime_ns, status.st_ino)
        with self.lock:
            known = self._digests.get(file)
        if known is None or known[0] != stamp:
            with file.open("rb") as stream:
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            lfs = path.endswith(self.lfs_suffixes)
            oid = git_blob_oid(lfs_pointer(sha256, status.st_size) if lfs else file.read_bytes())
            known = (stamp, sha256, oid)
            with self.lock:
                self._digests[file] = known
        return Entry(path, status.st_size, known[1], known[2], path.endswith(self.lfs_suffixes))

    def _inside(self, relative: str) -> Path | None:
        """A path below the root, None for one that would leave it."""
        if any(part in {"", ".", ".."} for part in relative.split("/")):
            return None
        return self.root / relative

    # Signed URLs

    def sign(self, repository: str, commit: str, entry: Entry) -> str:
        """A CDN URL for a file, valid for ``url_lifetime`` seconds."""
        expires = f"{time.time() + self.url_lifetime:.3f}"
        with self.lock:
            epoch = self._epoch
        resource = f"/{repository}/{commit}/{entry.path}"
        signature = self._signature(resource, expires, epoch)
        return f"{self.cdn}{quote(resource)}?Expires={expires}&Epoch={epoch}&Signature={signature}"

    def signature_fault(self, resource: str, query: Mapping[str, list[str]]) -> str | None:
        """Why the CDN refuses a URL, None if it accepts it."""
        expires, epoch, signature = (query.get(name, [""])[0] for name in ("Expires", "Epoch", "Signature"))
        try:
            good = self._signature(resource, expires, int(epoch))
            late = float(expires) < time.time()
        except ValueError:
            return "SignatureDoesNotMatch"
        if not hmac.compare_digest(good, signature):
            return "SignatureDoesNotMatch"
        with self.lock:
            return "Request has expired" if late or int(epoch) < self._epoch else None

    def expire_urls(self) -> None:
        """Make every CDN URL given out so far invalid."""
        with self.lock:
            self._epoch += 1

    def _signature(self, resource: str, expires: str, epoch: int) -> str:
        return hmac.new(self._key, f"{resource}\n{expires}\n{epoch}".encode(), hashlib.sha256).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], hub: Hub) -> None:
        self.hub = hub
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without asking a name server who this machine is, as HTTPServer does: that may hang."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news; the log of requests says what it got."""


class _Abort(Exception):  # noqa: N818 - it ends a connection, it reports nothing
    """Drop the connection without a word more."""


class _Handler(BaseHTTPRequestHandler):
    """What both servers share: the log, faults, and sending of files."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        with self.hub.lock:
            self.hub.sockets.add(self.request)

    def finish(self) -> None:
        with self.hub.lock:
            self.hub.sockets.discard(self.request)
        with contextlib.suppress(OSError):
            super().finish()

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def log_message(self, format: str, *args: Any) -> None:
        """The hub keeps its own log."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else b""
        self.resource = unquote(url.path)
        self.query = parse_qs(url.query)
        self.entry_of_log = Request(
            where="other",
            method=self.command,
            repository="",
            path=self.resource,
            range=self.headers.get("Range"),
            authorization="Authorization" in self.headers,
            client="{}:{}".format(*self.client_address[:2]),
        )
        try:
            self.route()
        except (_Abort, ConnectionError, TimeoutError):
            self.entry_of_log.aborted = True
            self.close_connection = True

    def route(self) -> None:
        raise NotImplementedError

    def begin(self, where: str, repository: str, path: str) -> None:
        """Note a request of the hub's proper interface in the log."""
        self.entry_of_log.where, self.entry_of_log.repository, self.entry_of_log.path = where, repository, path
        with self.hub.lock:
            self.hub.log.append(self.entry_of_log)

    # Sending

    def head(self, status: int, headers: Mapping[str, str], length: int | None) -> None:
        self.entry_of_log.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def text(self, status: int, body: str = "", headers: Mapping[str, str] | None = None) -> None:
        data = body.encode()
        self._whole(status, data, {"Content-Type": "text/plain; charset=utf-8", **(headers or {})})

    def json(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self._whole(200, data, {"Content-Type": "application/json; charset=utf-8", **(headers or {})})

    def error(self, status: int, code: str, message: str) -> None:
        self.text(status, message, {"X-Error-Code": code, "X-Error-Message": message})

    def _whole(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.head(status, headers, len(data))
        if self.command != "HEAD" and data:
            self.wfile.write(data)

    def write(self, data: bytes) -> None:
        """Send a piece of a file's body, and count it."""
        self.entry_of_log.bytes += len(data)
        self.wfile.write(data)

    def reset(self) -> None:
        """Close so that the other side sees a reset, not an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        raise _Abort

    def plain_fault(self, fault: Fault | None) -> bool:
        """Answer by a fault that needs no file; False if there is none."""
        if fault is None:
            return False
        self.entry_of_log.fault = fault.kind
        options = fault.options
        seconds = options.get("seconds")
        if fault.kind == "status":
            self.text(options.get("status", 500), options.get("body", ""), options.get("headers"))
        elif fault.kind == "missing":
            self.error(404, "EntryNotFound", "Entry not found")
        elif fault.kind == "unauthorized":
            self.error(401, "GatedRepo", "Access to this model is restricted: you must be authenticated to access it.")
        elif fault.kind == "gated":
            self.error(403, "GatedRepo", "Access to this model is restricted: you are not in the authorized list.")
        elif fault.kind == "throttled":
            wait = 1 if seconds is None else seconds
            headers = {
                "RateLimit": f'"resolvers";r=0;t={wait}',
                "RateLimit-Policy": '"fixed window";"resolvers";q=3000;w=300',
            }
            if options.get("retry_after", True):
                headers["Retry-After"] = str(wait)
            self.text(429, "Too many requests", headers)
        elif fault.kind == "unavailable":
            self.text(503, "Service unavailable", {} if seconds is None else {"Retry-After": str(seconds)})
        elif fault.kind == "loop":
            self.text(302, "", {"Location": self.path})
        elif fault.kind == "drop":
            self.reset()
        else:
            return False
        return True

    def requested_range(self, size: int) -> tuple[int, int] | None:
        """First and last+1 byte of a single range, None if none is asked; IndexError if the file has no such bytes."""
        asked = self.headers.get("Range", "")
        if not asked.startswith("bytes=") or "," in asked:
            return None
        first, dash, last = asked.removeprefix("bytes=").partition("-")
        if not dash or not (first or last) or not (first + last).isdigit():
            return None
        begin, end = (int(first), int(last) + 1 if last else size) if first else (max(0, size - int(last)), size)
        if begin >= size or end <= begin:
            raise IndexError
        return begin, min(end, size)

    def send_file(self, entry: Entry, file: Path, headers: Mapping[str, str], fault: Fault | None) -> None:
        """Send a file or a range of it, by the fault if there is one."""
        kind = fault.kind if fault else ""
        options = fault.options if fault else {}
        self.entry_of_log.fault = kind or None
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
        try:
            span = None if kind == "ignore_range" else self.requested_range(entry.size)
        except IndexError:
            self.text(416, "", {"Content-Range": f"bytes */{entry.size}"})
            return
        if_range = self.headers.get("If-Range")
        if if_range is not None and if_range != headers.get("ETag"):
            span = None
        begin, end = span or (0, entry.size)
        length = end - begin
        announced = length
        if kind == "short":
            announced = length = min(length, options.get("length", 0))
        elif kind == "long":
            announced = length + options.get("extra", 1)
        if span is not None:
            shift = 1 if kind == "wrong_range" else 0
            headers["Content-Range"] = f"bytes {begin + shift}-{begin + length - 1 + shift}/{entry.size}"
        self.head(206 if span is not None else 200, headers, None if kind == "chunked" else announced)
        if self.command == "HEAD":
            return
        with file.open("rb") as stream:
            self._body(stream, begin, length, kind, options)

    def _body(self, stream: Any, begin: int, length: int, kind: str, options: Mapping[str, Any]) -> None:
        if kind == "corrupt":
            self._corrupt(stream, begin, length, options.get("at", 0))
        elif kind == "trickle":
            self._trickle(stream, begin, length, options.get("rate", 1024))
        elif kind == "chunked":
            self._chunks(stream, begin, length, options.get("size", 10_000), options.get("after"))
        elif kind in {"reset", "cut", "stall", "expire"}:
            after = min(length, options.get("after", 0))
            self._copy(stream, begin, after)
            if kind == "expire":
                self.hub.expire_urls()
            if kind in {"reset", "expire"}:
                self._drain_then_reset()
            if kind == "cut":
                raise _Abort
            if self.hub.stopping.wait(options.get("seconds", 3600)):
                raise _Abort
            self._copy(stream, begin + after, length - after)
        else:
            self._copy(stream, begin, length)
            if kind == "long":
                self.write(b"\0" * options.get("extra", 1))

    def _copy(self, stream: Any, begin: int, length: int) -> None:
        self.wfile.flush()
        if length <= 0:
            return
        # Counted beforehand: who has read the last byte may look at the count at once.
        self.entry_of_log.bytes += length
        sent = 0
        try:
            sent = self.connection.sendfile(stream, begin, length)
        finally:
            if sent != length:
                self.entry_of_log.bytes -= begin + length - stream.tell()

    def _corrupt(self, stream: Any, begin: int, length: int, at: int) -> None:
        if not begin <= at < begin + length:
            self._copy(stream, begin, length)
            return
        self._copy(stream, begin, at - begin)
        stream.seek(at)
        self.write(bytes([stream.read(1)[0] ^ 0xFF]))
        self._copy(stream, at + 1, begin + length - at - 1)

    def _trickle(self, stream: Any, begin: int, length: int, rate: int) -> None:
        step = max(1, rate // 10)
        for offset in range(begin, begin + length, step):
            self._copy(stream, offset, min(step, begin + length - offset))
            if self.hub.stopping.wait(step / rate):
                raise _Abort

    def _chunks(self, stream: Any, begin: int, length: int, size: int, after: int | None) -> None:
        stream.seek(begin)
        left = length if after is None else min(length, after)
        for offset in range(0, length, size):
            announced = min(size, length - offset)
            self.wfile.write(b"%x\r\n" % announced)
            data = stream.read(min(announced, left))
            left -= len(data)
            self.write(data)
            if len(data) < announced:
                raise _Abort
            self.wfile.write(b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _drain_then_reset(self) -> None:
        """Reset once the other side has the bytes: a reset makes the kernel throw away what is still on its way."""
        deadline = time.monotonic() + 5
        while _unsent(self.connection) and time.monotonic() < deadline and not self.hub.stopping.wait(0.005):
            pass
        self.reset()


def _unsent(connection: socket.socket) -> int:
    """Bytes that the other side has not acknowledged."""
    return struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]


class _HubHandler(_Handler):
    """Listing, redirects, small files, and the control interface."""

    def route(self) -> None:
        parts = self.resource.strip("/").split("/")
        if parts[0] == "_lab":
            self._control(parts[1:])
        elif parts[:2] == ["api", "models"] and len(parts) >= 6 and parts[4] in {"revision", "tree"}:
            self._api(parts[4], "/".join(parts[2:4]), parts[5], "/".join(parts[6:]))
        elif parts[:3] == ["api", "resolve-cache", "models"] and len(parts) >= 7:
            self._small("/".join(parts[3:5]), parts[5], "/".join(parts[6:]))
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.begin("other", "", self.resource)
            self.error(404, "NotFound", "Not found")

    def _allowed(self, repository: str, revision: str) -> str | None:
        """The commit, or None after an error was answered."""
        token = self.hub.tokens.get(repository)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            status = 403 if given else 401
            self.error(status, "GatedRepo", f"Access to model {repository} is restricted.")
            return None
        folder = self.hub.root / repository
        if not folder.is_dir():
            self.error(401 if not given else 404, "RepoNotFound", "Repository not found")
            return None
        commit = self.hub.commit_of(repository, revision)
        if commit is None:
            self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _api(self, what: str, repository: str, revision: str, folder: str) -> None:
        self.begin(what, repository, repository)
        if self.plain_fault(self.hub.take_fault(what, repository, body=False)):
            return
        commit = self._allowed(repository, revision)
        if commit is None:
            return
        if what == "revision":
            siblings = [{"rfilename": entry.path} for entry in self.hub.entries(repository, commit)]
            self.json({"id": repository, "modelId": repository, "sha": commit, "siblings": siblings, "gated": False})
            return
        recursive = self.query.get("recursive", ["false"])[0].lower() in {"true", "1"}
        listing = _listing(self.hub.entries(repository, commit), folder, recursive=recursive)
        size = min(self.hub.page_size, int(self.query.get("limit", [self.hub.page_size])[0]))
        begin = int(self.query.get("cursor", ["0"])[0])
        headers = {}
        if begin + size < len(listing):
            query = "&".join(
                [f"{name}={quote(value)}" for name, (value, *_rest) in self.query.items() if name != "cursor"]
                + [f"cursor={begin + size}"]
            )
            headers["Link"] = f'<{self.hub.endpoint}{urlsplit(self.path).path}?{query}>; rel="next"'
        self.json(listing[begin : begin + size], headers)

    def _resolve(self, repository: str, revision: str, path: str) -> None:
        self.begin("resolve", repository, path)
        lfs = path.endswith(self.hub.lfs_suffixes)
        at_once = not lfs and not self.hub.relative_redirects
        fault = self.hub.take_fault("resolve", path, body=at_once)
        if self.plain_fault(fault):
            return
        found = self._find(repository, revision, path)
        if found is None:
            return
        commit, entry = found
        headers = {"X-Repo-Commit": commit}
        if lfs:
            headers.update(
                {
                    "X-Linked-Etag": f'"{entry.sha256}"',
                    "X-Linked-Size": str(entry.size),
                    "ETag": f'"{entry.git_oid}"',
                    "Location": self.hub.sign(repository, commit, entry),
                }
            )
            self.text(302, "Found. Redirecting", headers)
        elif at_once:
            headers["ETag"] = f'"{entry.git_oid}"'
            self.send_file(entry, self.hub.root / repository / commit / path, headers, fault)
        else:
            headers["X-Linked-Etag"] = headers["ETag"] = f'"{entry.git_oid}"'
            headers["X-Linked-Size"] = str(entry.size)
            headers["Location"] = quote(f"/api/resolve-cache/models/{repository}/{commit}/{path}")
            self.text(307, "Temporary Redirect", headers)

    def _small(self, repository: str, commit: str, path: str) -> None:
        self.begin("resolve", repository, path)
        found = self._find(repository, commit, path)
        if found is not None:
            headers = {"X-Repo-Commit": commit, "ETag": f'"{found[1].git_oid}"'}
            fault = self.hub.take_fault("resolve", path, body=True)
            if not self.plain_fault(fault):
                self.send_file(found[1], self.hub.root / repository / commit / path, headers, fault)

    def _find(self, repository: str, revision: str, path: str) -> tuple[str, Entry] | None:
        commit = self._allowed(repository, revision)
        if commit is None:
            return None
        try:
            return commit, self.hub.entry(repository, commit, path)
        except FileNotFoundError:
            self.error(404, "EntryNotFound", "Entry not found")
            return None

    def _control(self, parts: list[str]) -> None:
        hub = self.hub
        match self.command, parts:
            case "POST", ["faults"]:
                try:
                    options = json.loads(self.body)
                    named = {name: options.pop(name) for name in ("path", "on", "times", "skip") if name in options}
                    fault = hub.fault(options.pop("kind"), **named, **options)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    self.text(400, f"not a fault: {error}")
                    return
                self.json(asdict(fault))
            case "GET", ["faults"]:
                with hub.lock:
                    faults = [asdict(fault) for fault in hub.faults]
                self.json(faults)
            case "DELETE", ["faults"]:
                hub.clear_faults()
                self.json([])
            case "GET", ["log"]:
                with hub.lock:
                    requests = [asdict(request) for request in hub.log]
                paths: dict[str, dict[str, int]] = {}
                for request in requests:
                    sums = paths.setdefault(request["path"], {"requests": 0, "bytes": 0})
                    sums["requests"] += 1
                    sums["bytes"] += request["bytes"]
                self.json({"requests": requests, "paths": paths})
            case "DELETE", ["log"]:
                hub.clear_log()
                self.json([])
            case "POST", ["expire"]:
                hub.expire_urls()
                self.json([])
            case _:
                self.text(404, "no such control")


class _CdnHandler(_Handler):
    """The big files, for who has a signed URL."""

    def route(self) -> None:
        parts = self.resource.strip("/").split("/")
        if len(parts) < 4:
            self.begin("cdn", "", self.resource)
            self.text(404)
            return
        repository, commit, path = "/".join(parts[:2]), parts[2], "/".join(parts[3:])
        self.begin("cdn", repository, path)
        fault = self.hub.take_fault("cdn", path, body=True)
        if self.plain_fault(fault):
            return
        refusal = self.hub.signature_fault(self.resource, self.query)
        if self.command not in {"GET", "HEAD"}:
            refusal = "MethodNotAllowed"
        if refusal is not None:
            body = f"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>{refusal}</Message></Error>"
            self.text(403, body, {"Content-Type": "application/xml"})
            return
        try:
            entry = self.hub.entry(repository, commit, path)
        except FileNotFoundError:
            self.text(404)
            return
        file = self.hub.root / repository / commit / path
        self.send_file(entry, file, {"ETag": f'"{entry.sha256}"'}, fault)


def _listing(entries: list[Entry], folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    """The answer of the tree call: folders and files below a folder."""
    prefix = f"{folder}/" if folder else ""
    result: list[dict[str, Any]] = []
    folders: set[str] = set()
    for entry in entries:
        if not entry.path.startswith(prefix):
            continue
        names = entry.path.removeprefix(prefix).split("/")
        for depth in range(1, len(names)):
            name = prefix + "/".join(names[:depth])
            if name not in folders and (recursive or depth == 1):
                folders.add(name)
                oid = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
                result.append({"type": "directory", "oid": oid, "size": 0, "path": name})
        if len(names) > 1 and not recursive:
            continue
        item: dict[str, Any] = {"type": "file", "oid": entry.git_oid, "size": entry.size, "path": entry.path}
        if entry.lfs:
            pointer = len(lfs_pointer(entry.sha256, entry.size))
            item["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": pointer}
        result.append(item)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to end."""
    parser = argparse.ArgumentParser(description="Serve a folder as the Hugging Face Hub would.")
    parser.add_argument("--root", type=Path, required=True, help="folder with <owner>/<name>/<commit>/")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--cdn-port", type=int, default=8081)
    parser.add_argument("--url-lifetime", type=float, default=3600)
    options = parser.parse_args(arguments)
    hub = Hub(
        options.root,
        host=options.host,
        port=options.port,
        cdn_port=options.cdn_port,
        url_lifetime=options.url_lifetime,
    )
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with hub:
        print(f"hub {hub.endpoint} cdn {hub.cdn}", flush=True)
        ended.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
