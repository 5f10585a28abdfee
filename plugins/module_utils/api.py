# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Talk to the model's HTTP interface, and say in words at which rung a request failed."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import socket
import ssl
import urllib.error
from typing import Any
from urllib.parse import urlsplit

from ansible.module_utils.urls import open_url

#: No answer of the interface is near this; it bounds the memory a wrong server can take.
BODY_LIMIT = 32 * 1024 * 1024


class ApiError(Exception):
    """A request failed. `fatal` means that waiting cannot heal it."""

    def __init__(self, rung: str, text: str, fatal: bool = False, status: int | None = None) -> None:
        super().__init__(text)
        self.rung = rung
        self.text = text
        self.fatal = fatal
        self.status = status


def api_argument_spec() -> dict[str, dict[str, Any]]:
    """Options of the documentation fragment `api`."""
    return {
        "url": {"type": "str", "required": True},
        "api_key": {"type": "str", "no_log": True},
        "api_key_file": {"type": "path", "no_log": False},
        "validate_certs": {"type": "bool", "default": True},
        "ca_path": {"type": "path"},
        "use_proxy": {"type": "bool", "default": False},
        "request_timeout": {"type": "float", "default": 10},
    }


def base_url(url: str) -> str:
    """Give the address without trailing slash and `/v1`; raise ValueError in words."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"url: {url!r} is not an address: {exc}") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "url: a user name or password does not belong into the address, where logs would show it;"
            " give the key by api_key_file or api_key"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url: {url!r} is not an address; it must look like http://127.0.0.1:8000")
    if parts.query or parts.fragment:
        raise ValueError(f"url: {url!r} must end with the port or a path, without '?' and '#'")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    netloc = host if port is None else f"{host}:{port}"
    path = parts.path.rstrip("/")
    if path == "/v1" or path.endswith("/v1"):
        path = path[: -len("/v1")].rstrip("/")
    return f"{parts.scheme}://{netloc}{path}"


def read_key(key: str | None, path: str | None) -> str | None:
    """Give the bearer token; raise ApiError (rung `key`) in words that never show it."""
    origin = "api_key"
    if path:
        origin = f"api_key_file {path}"
        try:
            with open(path, encoding="utf-8") as file:
                key = file.read(65536)
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "not text"
            raise ApiError("key", f"the API key cannot be read: {path}: {reason}", fatal=True) from None
    if key is None:
        return None
    key = key.strip()
    if not key:
        raise ApiError("key", f"{origin} is empty; leave the option out if the server needs no key", fatal=True)
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ApiError("key", f"{origin} holds white space or characters that cannot stand in a header", fatal=True)
    return key


def error_text(body: bytes, limit: int = 300) -> str:
    """Give the human part of an error body: vLLM's and FastAPI's JSON forms, else its first words."""
    text = body[: 64 * 1024].decode("utf-8", "replace")
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if isinstance(data, dict):
        inner = data.get("error", data)
        if isinstance(inner, dict):
            inner = inner.get("message", inner.get("detail", inner))
        text = inner if isinstance(inner, str) else json.dumps(inner)
    else:
        text = re.sub(r"<[^>]*>", " ", text)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def classify(exc: BaseException, url: str, seconds: float) -> ApiError:
    """Turn what a request raised into the rung at which it failed."""
    parts = urlsplit(url)
    place = parts.netloc
    reason: Any = exc
    while isinstance(reason, urllib.error.URLError) and isinstance(reason.reason, BaseException):
        reason = reason.reason
    if isinstance(reason, socket.gaierror):
        return ApiError("resolve", f"the name {parts.hostname} does not resolve ({reason.strerror or reason})")
    if isinstance(reason, ssl.SSLCertVerificationError):
        why = reason.verify_message or str(reason)
        return ApiError(
            "tls",
            f"the certificate of {place} is not valid: {why}; name its authority with ca_path,"
            " use the host name that the certificate bears, or set validate_certs to false",
            fatal=True,
        )
    if isinstance(reason, ssl.SSLError):
        why = (reason.reason or str(reason)).replace("_", " ").lower()
        hint = "; it may speak plain http" if "wrong version" in why or "record layer" in why else ""
        return ApiError("tls", f"no TLS session with {place}: {why}{hint}")
    if isinstance(reason, FileNotFoundError):
        return ApiError("tls", f"ca_path does not exist: {reason.filename or ''}".rstrip(": "), fatal=True)
    connected = not isinstance(exc, urllib.error.URLError)  # urllib wraps what goes wrong before the request is sent
    if isinstance(reason, (TimeoutError, socket.timeout)):
        if connected:
            return ApiError("http", f"{place} takes the connection but does not answer within {seconds:g} s")
        return ApiError("connect", f"no connection to {place} within {seconds:g} s")
    if isinstance(reason, http.client.RemoteDisconnected):
        return ApiError("http", f"{place} closed the connection without an answer")
    if isinstance(reason, http.client.HTTPException):
        return ApiError("http", f"{place} does not answer in HTTP ({type(reason).__name__}: {reason})")
    if isinstance(reason, OSError):
        if reason.errno == errno.ECONNREFUSED:
            return ApiError("connect", f"connection refused by {place}: nothing listens there")
        if connected:
            return ApiError("http", f"the connection to {place} broke before the answer: {reason.strerror or reason}")
        return ApiError("connect", f"no connection to {place}: {reason.strerror or reason}")
    return ApiError("http", f"{place}: {reason}")


class Api:
    """The interface at one address."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        validate_certs: bool = True,
        ca_path: str | None = None,
        use_proxy: bool = False,
        request_timeout: float = 10,
    ) -> None:
        self.base = base_url(url)
        self.key = key
        self.validate_certs = validate_certs
        self.ca_path = ca_path
        self.use_proxy = use_proxy
        self.request_timeout = request_timeout

    def request(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """GET the path, or POST the body to it, and give the JSON of the answer."""
        url = self.base + path
        seconds = self.request_timeout if timeout is None else timeout
        headers = {"Accept": "application/json"}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        if self.ca_path and not os.path.exists(self.ca_path):
            raise ApiError("tls", f"ca_path does not exist: {self.ca_path}", fatal=True)
        try:
            # Redirects are reported, not followed: the key must not reach a host that nobody named.
            with open_url(
                url,
                data=data,
                headers=headers,
                method="POST" if data else "GET",
                use_proxy=self.use_proxy,
                timeout=seconds,
                validate_certs=self.validate_certs,
                ca_path=self.ca_path,
                http_agent="baremetal.kimi_k3",
                follow_redirects="none",
                use_netrc=False,
            ) as answer:
                raw = answer.read(BODY_LIMIT)
        except urllib.error.HTTPError as exc:
            raise self._refused(exc, url) from None
        except (OSError, http.client.HTTPException, ValueError) as exc:
            raise classify(exc, url, seconds) from None
        try:
            return json.loads(raw)
        except ValueError:
            raise ApiError("json", f"{url} answers, but not with JSON: {error_text(raw, 80)!r}") from None

    def _refused(self, exc: urllib.error.HTTPError, url: str) -> ApiError:
        try:
            body = exc.read(64 * 1024)
        except (OSError, http.client.HTTPException, ValueError):
            body = b""
        if exc.code in (401, 403):
            why = (
                "the server refuses the API key: it is not the one the server was started with"
                if self.key
                else "the server wants an API key and none was given"
            )
            text = f"HTTP {exc.code} from {url}: {why}; set api_key_file or api_key"
            return ApiError("http", text, fatal=True, status=exc.code)
        if 300 <= exc.code < 400:
            target = exc.headers.get("Location", "another address") if exc.headers else "another address"
            return ApiError(
                "http", f"HTTP {exc.code} from {url}: it points to {target}, which url must name", status=exc.code
            )
        said = error_text(body)
        return ApiError("http", f"HTTP {exc.code} from {url}" + (f": {said}" if said else ""), status=exc.code)
