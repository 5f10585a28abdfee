# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A careful client of the Hugging Face Hub and of servers that answer like it."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import os
import random
import re
import socket
import ssl
import string
import threading
import time
import urllib.error
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from ansible.module_utils import urls
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import Digest, Entry, parse_tree
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import StoppedError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import human

DEFAULT_ENDPOINT = "https://huggingface.co"

_AGENT = "baremetal.kimi_k3"
_MAX_HOPS = 8
_MAX_PAGES = 10_000
_MAX_JSON = 256 << 20
_PIECE = 1 << 16
_MAX_WAIT = 900.0  # the Hub counts in windows of five minutes; a longer wait is an error to show
_MAX_BACKOFF = 60.0
_TLS_RECORDS = 16
_TLS_PATIENCE = 0.02
_NEXT_LINK = re.compile(r'<([^>]*)>\s*;[^,]*\brel="?next"?')
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_RATE_RESET = re.compile(r"(?:^|[;,\s])t=(\d+)")
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})

Result = TypeVar("Result")


class HubError(Exception):
    """The server did not give what was asked for; asking again cannot help."""


class TransientError(HubError):
    """Asking again may help."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class Body(Protocol):
    """The bytes of one answer, from a known offset on."""

    start: int

    def readinto1(self, buffer: memoryview) -> int: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Source(Protocol):
    """Where bytes of a file come from."""

    name: str
    near: bool  # not behind the line that a rate limit is for

    def open(self, entry: Entry, offset: int) -> Body: ...


class Nowhere:
    """The place to get bytes from when none is to be asked."""

    endpoint = name = "nowhere"
    near = True

    def listing(self) -> list[Entry]:
        raise HubError(
            "The listing of the revision is not here, and source is present, so nobody is asked: set listing_file."
        )

    def read(self, entry: Entry) -> tuple[bytes, Digest]:
        raise HubError(f"{entry.path} is not here, or not as listed, and source is present, so nobody is asked for it.")

    def open(self, entry: Entry, offset: int) -> Body:
        raise HubError(f"{entry.path} is not here from byte {offset} on, and source is present.")


class Backoff:
    """How often to try again, and how long to wait before: longer each time, never all at once."""

    def __init__(self, retries: int, base: float = 1.0, stop: threading.Event | None = None) -> None:
        self._retries = retries
        self._base = base
        self._stop = stop or threading.Event()
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def wait(self, error: TransientError) -> None:
        """Wait before the next try, or raise when there is none left."""
        self._failures += 1
        if self._failures > self._retries:
            raise HubError(f"{error} Tried {self._failures} times.") from error
        ceiling = min(_MAX_BACKOFF, self._base * 2 ** (self._failures - 1))
        delay = ceiling * (0.5 + random.random() / 2)  # noqa: S311  (spreads load, guards nothing)
        if error.wait is not None:
            if error.wait > _MAX_WAIT:
                raise HubError(f"{error} The server asks to wait {error.wait:.0f} s; run again later.") from error
            delay = max(error.wait, delay if error.wait > 0 else 0)
        if self._stop.wait(delay):
            raise StoppedError


class Floor:
    """A rate below which a connection is given up, measured again and again over some seconds."""

    def __init__(self, rate: int = 0, seconds: float = 30.0) -> None:
        self._rate = rate
        self._seconds = seconds
        self._received = 0
        self._waited = 0.0

    def took(self, what: str, count: int, waited: float) -> None:
        """So many bytes came, after so many seconds of waiting for them."""
        # Only that time counts: a slow disk or a limit of our own is not their fault.
        self._received += count
        self._waited += waited
        if not self._rate or self._waited < self._seconds:
            return
        rate = self._received / self._waited
        if rate < self._rate:
            raise TransientError(f"{what} came at {human(rate)}/s, below the floor of {human(self._rate)}/s.")
        self._received, self._waited = 0, 0.0


class Response:
    """An answer with status 200 or 206, length and range checked against what was asked."""

    def __init__(self, response: http.client.HTTPResponse, start: int) -> None:
        self._response = response
        self.start = start
        length = response.headers.get("Content-Length")
        self._left = int(length) if length and length.isdecimal() and not response.chunked else None
        self._slow: BaseException | None = None
        # One record of TLS is 16 KiB: too little to go through all of our bookkeeping for.
        self._pieces = _TLS_RECORDS if (response.url or "").startswith("https:") else 1

    def readinto1(self, buffer: memoryview) -> int:
        """Some bytes, as soon as there are any."""
        if self._slow is not None:
            raise self._slow
        if self._left is not None:
            buffer = buffer[: self._left]
        done = 0
        began = time.monotonic()
        try:
            for _piece in range(self._pieces):
                count = self._read(buffer[done:])
                done += count
                if not count or done == len(buffer) or time.monotonic() - began > _TLS_PATIENCE:
                    break
        except TransientError as error:
            if not done:
                raise
            self._slow = error  # told after what came before it
        if self._left is not None:
            self._left -= done
        return done

    def _read(self, buffer: memoryview) -> int:
        # The response's own methods would copy every byte once more; the stream below it reads right into the buffer.
        # Chunks only they understand.
        stream = self._response if self._response.chunked else self._response.fp
        if stream is None or not buffer:
            return 0
        try:
            return stream.readinto1(buffer)
        except TimeoutError as error:
            raise TransientError("The server stopped sending.") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TransientError(f"The connection broke ({_reason(error)}).") from error

    def abort(self) -> None:
        """Let a read that another thread is waiting in come back at once."""
        # A response that has ended by now has nothing below it any more.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            double = os.dup(self._response.fileno())
            with socket.socket(fileno=double) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._response.close()


class Hub:
    """One pinned revision of one repository."""

    near = False

    def __init__(
        self,
        endpoint: str,
        repository: str,
        revision: str,
        *,
        token: str | None = None,
        timeout: float = 30.0,
        retries: int = 8,
        backoff: float = 1.0,
        ca_path: str | None = None,
        stop: threading.Event | None = None,
        use_proxy: bool = True,
        min_rate: int = 0,
        min_rate_seconds: float = 30.0,
    ) -> None:
        self.endpoint = check_endpoint(endpoint)
        self.repository = repository
        self.revision = revision
        self.name = self.endpoint
        self._token = token
        self._timeout = timeout
        self._retries = retries
        self._base = backoff
        self._floor = min_rate, min_rate_seconds  # for what is read into memory
        self._session = _session(ca_path, use_proxy)
        self.stop = stop or threading.Event()
        self._pause_until = 0.0

    def backoff(self) -> Backoff:
        return Backoff(self._retries, self._base, self.stop)

    def listing(self) -> list[Entry]:
        """All files of the revision."""
        url: str | None = (
            f"{self.endpoint}/api/models/{quote(self.repository)}/tree/{self.revision}?recursive=true&expand=false"
        )
        items: list[Any] = []
        seen: set[str] = set()
        while url:
            seen.add(url)
            page, url = self._retry(lambda url=url: self._page(url))
            items.extend(page)
            if url in seen or len(seen) > _MAX_PAGES:
                raise HubError(f"{self.endpoint} lists {self.repository} in pages without end.")
        return parse_tree(items)

    def read(self, entry: Entry) -> tuple[bytes, Digest]:
        """A whole file in memory, proven."""

        def once() -> tuple[bytes, Digest]:
            body = self.open(entry, 0)
            try:
                data = _read_all(body, entry, Floor(*self._floor))
            finally:
                body.close()
            digest = Digest(entry)
            digest.update(data)
            if not digest.right:
                raise TransientError(wrong_digest(entry, digest, self.name))
            return data, digest

        return self._retry(once)

    def open(self, entry: Entry, offset: int) -> Response:
        """Bytes of a file from an offset on; C(start) of the result is 0 when the server does not do ranges."""
        url = f"{self.endpoint}/{quote(self.repository)}/resolve/{self.revision}/{quote(entry.path)}"
        return self.fetch(url, entry, offset)

    def fetch(self, url: str, entry: Entry, offset: int) -> Response:
        """Bytes of a file that is at a URL."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        response = self._request(url, headers, entry.path)
        try:
            start = _check_answer(response, entry, offset)
        except BaseException:
            response.close()
            raise
        return Response(response, start)

    def _page(self, url: str) -> tuple[list[Any], str | None]:
        response = self._request(url, {"Accept": "application/json"}, None)
        floor, data = Floor(*self._floor), bytearray()
        try:
            while len(data) < _MAX_JSON:
                began = time.monotonic()
                piece = response.read1(_PIECE)
                floor.took("The listing", len(piece), time.monotonic() - began)
                data += piece
                if not piece:
                    break
        except TimeoutError as error:
            raise TransientError("The server stopped sending the listing.") from error
        except (OSError, http.client.HTTPException) as error:
            raise TransientError(f"The listing broke off ({_reason(error)}).") from error
        finally:
            response.close()
        if response.length:
            raise TransientError(f"The listing broke off, {response.length} bytes before its end.")
        try:
            page = json.loads(data)
        except ValueError as error:
            raise TransientError(f"{_shown(url)} did not answer with JSON; is this endpoint a Hub?") from error
        if not isinstance(page, list):
            raise HubError(f"{_shown(url)} did not answer with a list; is this endpoint a Hub?")
        following = _NEXT_LINK.search(response.headers.get("Link") or "")
        return page, urljoin(url, following.group(1)) if following else None

    def _retry(self, action: Callable[[], Result]) -> Result:
        backoff = self.backoff()
        while True:
            try:
                return action()
            except TransientError as error:
                backoff.wait(error)

    def _request(self, url: str, headers: Mapping[str, str], path: str | None) -> http.client.HTTPResponse:
        """The answer after all redirects. The token goes to the endpoint's own origin and nowhere else."""
        pause = self._pause_until - time.monotonic()
        if pause > 0 and self.stop.wait(pause):
            raise StoppedError
        for hop in range(_MAX_HOPS):
            sent = {"Accept-Encoding": "identity", **headers}
            if self._token and _origin(url) == _origin(self.endpoint):
                sent["Authorization"] = f"Bearer {self._token}"
            try:
                return self._session.open("GET", url, headers=sent, timeout=self._timeout)
            except urllib.error.HTTPError as error:
                error.close()
                location = error.headers.get("Location")
                if not 300 <= error.code < 400 or not location:
                    raise self._refusal(error, url, hop, path) from error
                url = quote(urljoin(url, location), safe=string.punctuation)
                if urlsplit(url).scheme not in ("http", "https"):
                    raise HubError(f"{self.endpoint} redirects to {_shown(url)}, which is not HTTP.") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                if isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
                    raise HubError(
                        f"The certificate of {_shown(url)} is not trusted ({_reason(error)}): "
                        "set ca_path to the certificates of your own authority."
                    ) from error
                raise TransientError(f"{_shown(url)} cannot be reached ({_reason(error)}).") from error
        raise HubError(f"{self.endpoint} redirects without end for {path or 'the listing'}.")

    def _refusal(self, error: urllib.error.HTTPError, url: str, hop: int, path: str | None) -> HubError:
        what = f"{path} of {self.repository}" if path else f"{self.repository} at revision {self.revision}"
        status = f"HTTP {error.code}"
        code = error.headers.get("X-Error-Code")
        if code and re.fullmatch(r"\w{1,40}", code):
            status += f", {code}"
        if error.code == 429 or error.code in _TRANSIENT:
            wait = _asked_wait(error.headers)
            if error.code == 429 and wait is not None:
                # The limit is on the account or address, so every connection has to wait.
                self._pause_until = max(self._pause_until, time.monotonic() + min(wait, _MAX_WAIT))
            return TransientError(f"{_shown(url)} answered {status}.", wait)
        signed = hop and (_origin(url) != _origin(self.endpoint) or urlsplit(url).query)
        if signed and error.code in (401, 403, 404, 410):
            # A signed address that has run out: ask the endpoint for a new one.
            return TransientError(f"{_shown(url)} refused the address it was given for {what} ({status}).")
        if error.code in (401, 403):
            if self._token:
                advice = "the token was sent, but it may not read this repository; accept its terms, or use another"
            else:
                advice = "it is gated, private or absent; set token_file to a file with a token that may read it"
            return HubError(f"{self.endpoint} refused {what} ({status}): {advice}.")
        if error.code == 404 and path:
            return HubError(
                f"{self.endpoint} has no {what} ({status}), though its listing of revision {self.revision} names it."
            )
        if error.code == 404:
            return HubError(f"{self.endpoint} has no {what} ({status}): check repository, revision and endpoint.")
        return HubError(f"{_shown(url)} answered {status} for {what}.")


def _session(ca_path: str | None, use_proxy: bool) -> urls.Request:
    """What all requests have in common; reading the certificates once saves more time than it looks."""
    try:
        context = urls.make_context(cafile=ca_path)
    except OSError as error:
        raise HubError(f"ca_path {ca_path} cannot be used ({error.strerror or error}).") from error
    return urls.Request(
        context=context,
        http_agent=_AGENT,
        follow_redirects="none",
        unredirected_headers=["Authorization"],
        decompress=False,
        use_netrc=False,
        use_proxy=use_proxy,
    )


def check_endpoint(endpoint: str) -> str:
    """The endpoint without a slash at its end."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise HubError(f"endpoint must be an http or https URL such as {DEFAULT_ENDPOINT}, not {_shown(endpoint)!r}.")
    if parts.username is not None or parts.password is not None:
        raise HubError("endpoint must not hold a name or password: use token_file.")
    return endpoint.rstrip("/")


def wrong_digest(entry: Entry, digest: Digest, source: str) -> str:
    return f"{entry.path} from {source} has the digest {digest.found}, the listing says {entry.digest}."


def _check_answer(response: http.client.HTTPResponse, entry: Entry, offset: int) -> int:
    """Offset at which the body starts; an error when the answer is not about this file as listed."""
    length = response.headers.get("Content-Length")
    length = int(length) if length and length.isdecimal() else None
    if response.status == 206 and offset:
        match = _CONTENT_RANGE.fullmatch((response.headers.get("Content-Range") or "").strip())
        answered = tuple(map(int, match.groups())) if match else None
        if answered != (offset, entry.size - 1, entry.size):
            raise TransientError(
                f"The server answered bytes {offset} to {entry.size - 1} of {entry.path} with the range "
                f"{response.headers.get('Content-Range')!r}."
            )
    elif response.status == 200:
        offset = 0
    else:
        raise TransientError(f"The server answered with HTTP {response.status} for {entry.path}.")
    if length is not None and length != entry.size - offset:
        raise TransientError(
            f"The server announces {length} bytes of {entry.path} where the listing has {entry.size - offset}."
        )
    return offset


def _read_all(body: Body, entry: Entry, floor: Floor) -> bytes:
    """Exactly the promised number of bytes, and no more to come."""
    size = entry.size
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        began = time.monotonic()
        count = body.readinto1(view[done:])
        if not count:
            raise TransientError(f"The server closed after {done} of {size} bytes.")
        done += count
        floor.took(entry.path, count, time.monotonic() - began)
    if body.readinto1(memoryview(bytearray(1))):
        raise TransientError(f"The server sent more than the {size} bytes listed.")
    return bytes(data)


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds the server asks to wait, from Retry-After or the RateLimit header."""
    asked = (headers.get("Retry-After") or "").strip()
    if asked.isdecimal():
        return float(asked)
    if asked:
        with contextlib.suppress(ValueError, TypeError):
            return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
    match = _RATE_RESET.search(headers.get("RateLimit") or "")
    return float(match.group(1)) if match else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _shown(url: str) -> str:
    """A URL for messages: without its query, which may be a signature, and without credentials."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _reason(error: BaseException) -> str:
    inner = getattr(error, "reason", None)
    text = str(inner if inner is not None else error) or type(error).__name__
    return text.splitlines()[0]


def parse_token(text: str) -> tuple[str, str | None]:
    """The token in a token file, and a warning when the file has more around it than the newline of its line."""
    token = text.strip()
    if not token:
        raise HubError("it is empty")
    if re.search(r"[^\x21-\x7e]", token):
        raise HubError("it must hold one line with the token and nothing else")
    if text.removesuffix("\n").removesuffix("\r") != token:
        return token, "has white space around the token, which was left out"
    return token, None
