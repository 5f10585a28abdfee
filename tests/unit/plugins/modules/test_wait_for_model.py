# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""wait_for_model against a real server on loopback, rung by rung."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import api as api_utils
from ansible_collections.baremetal.kimi_k3.plugins.modules import wait_for_model
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

MODELS = {
    "object": "list",
    "data": [{"id": "kimi-k3", "max_model_len": 49152}, {"id": "adapter", "max_model_len": None}],
}
COMPLETION = {
    "choices": [{"index": 0, "text": " Paris", "token_ids": [12366], "finish_reason": "length"}],
    "usage": {"prompt_tokens": 6, "completion_tokens": 1, "total_tokens": 7},
}


class Server:
    """An HTTP server whose answers a test sets: path -> (status, body) or a function of the handler giving that."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.answers = {
            "/v1/models": (200, MODELS),
            "/version": (200, {"version": "0.32.0"}),
            "/v1/completions": (200, COMPLETION),
        }
        self.requests: list[tuple[str, dict, dict | None]] = []
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def answer(self):
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                outer.requests.append((self.path, dict(self.headers), body))
                answer = outer.answers.get(self.path, (404, {"detail": "Not Found"}))
                if callable(answer):
                    answer = answer(self)
                if answer is None:
                    self.close_connection = True
                    return
                status, payload, *headers = answer
                raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def do_GET(self):
                self.answer()

            def do_POST(self):
                self.answer()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        if context:
            self.http.socket = context.wrap_socket(self.http.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self.http.server_address[1]
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.release.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server():
    running = Server()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "unit test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    chain = folder / "cert.pem"
    chain.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    private = folder / "key.pem"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return chain, private


@pytest.fixture
def tls_server(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    running = Server(context)
    yield running
    running.stop()


@pytest.fixture
def run(capsys):
    """Run the module as a host would, and give its result."""

    def call(check=False, **options):
        args = {"model": "kimi-k3", "timeout": 0, "request_timeout": 5, "_ansible_check_mode": check, **options}
        with patch_module_args(args), pytest.raises(SystemExit) as ended:
            wait_for_model.main()
        result = json.loads(capsys.readouterr().out)
        assert bool(ended.value.code) == bool(result.get("failed", False))
        return result

    return call


def test_all_rungs(server, run):
    result = run(url=server.url + "/v1/", max_model_len=49152)
    assert result["ready"] is True
    assert result["changed"] is False
    assert result["rung"] == "ready"
    assert result["attempts"] == 1
    assert result["url"] == server.url
    assert result["models"] == ["adapter", "kimi-k3"]
    assert result["max_model_len"] == 49152
    assert result["version"] == "0.32.0"
    assert result["completion"]["text"] == " Paris"
    assert result["completion"]["token_ids"] == [12366]
    assert result["completion"]["usage"]["completion_tokens"] == 1
    assert result["completion"]["latency"] >= 0
    path, _headers, body = server.requests[-1]
    assert path == "/v1/completions"
    assert body["max_tokens"] == 1
    assert body["temperature"] == 0
    assert "Authorization" not in server.requests[0][1]


def test_without_generation_nothing_is_generated(server, run):
    result = run(url=server.url, generate=False)
    assert result["ready"] is True
    assert "completion" not in result
    assert [path for path, _h, _b in server.requests] == ["/v1/models", "/version"]


def test_version_is_optional(server, run):
    server.answers["/version"] = (404, {"detail": "Not Found"})
    result = run(url=server.url)
    assert result["ready"] is True
    assert "version" not in result


def test_end_of_text_token_counts(server, run):
    server.answers["/v1/completions"] = (
        200,
        {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}},
    )
    assert run(url=server.url)["ready"] is True


def test_name_that_does_not_resolve(run):
    result = run(url="http://nothing.invalid:8000")
    assert result["failed"] is True
    assert result["ready"] is False
    assert result["rung"] == "resolve"
    assert "nothing.invalid does not resolve" in result["msg"]


def test_connection_refused(run):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = run(url=f"http://127.0.0.1:{port}")
    assert result["rung"] == "connect"
    assert f"connection refused by 127.0.0.1:{port}" in result["msg"]


def test_connection_in_no_time():
    error = api_utils.classify(api_utils.urllib.error.URLError(TimeoutError()), "http://192.0.2.1:8000/v1/models", 3)
    assert error.rung == "connect"
    assert error.text == "no connection to 192.0.2.1:8000 within 3 s"


def test_connects_but_never_answers(server, run):
    server.answers["/v1/models"] = lambda _handler: server.release.wait(30) and None
    result = run(url=server.url, request_timeout=1)
    assert result["rung"] == "http"
    assert "does not answer within 1 s" in result["msg"]


def test_connection_closed_without_an_answer(server, run):
    server.answers["/v1/models"] = lambda _handler: None
    result = run(url=server.url)
    assert result["rung"] == "http"
    assert "closed the connection without an answer" in result["msg"]


def test_not_http(run):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak():
            connection, _peer = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"SSH-2.0-x\r\n\r\n")

        threading.Thread(target=speak, daemon=True).start()
        result = run(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert result["rung"] == "http"
    assert "does not answer in HTTP" in result["msg"]


def test_tls_that_nobody_vouches_for_ends_at_once(tls_server, run):
    result = run(url=tls_server.url, timeout=600)
    assert result["rung"] == "tls"
    assert result["attempts"] == 1
    assert "ca_path" in result["msg"]


def test_tls_with_its_authority(tls_server, certificate, run):
    assert run(url=tls_server.url, ca_path=str(certificate[0]))["ready"] is True
    assert run(url=tls_server.url, validate_certs=False)["ready"] is True


def test_tls_without_the_authority_file(tls_server, tmp_path, run):
    result = run(url=tls_server.url, ca_path=str(tmp_path / "absent.pem"), timeout=600)
    assert result["rung"] == "tls"
    assert f"ca_path does not exist: {tmp_path / 'absent.pem'}" in result["msg"]


def test_tls_asked_of_a_plain_server(server, run):
    result = run(url=server.url.replace("http:", "https:"))
    assert result["rung"] == "tls"
    assert "may speak plain http" in result["msg"]


@pytest.mark.parametrize("status", [401, 403])
def test_key_missing_ends_at_once(server, run, status):
    server.answers["/v1/models"] = (status, {"error": "Unauthorized"})
    result = run(url=server.url, timeout=600)
    assert result["rung"] == "http"
    assert result["attempts"] == 1
    assert f"HTTP {status}" in result["msg"]
    assert "wants an API key and none was given; set api_key_file or api_key" in result["msg"]


def test_key_wrong_ends_at_once_and_is_not_shown(server, run):
    server.answers["/v1/models"] = (401, {"error": "Unauthorized"})
    result = run(url=server.url, api_key="do-not-show", timeout=600)
    assert "refuses the API key" in result["msg"]
    assert "do-not-show" not in json.dumps(result)
    assert server.requests[0][1]["Authorization"] == "Bearer do-not-show"


def test_key_from_a_file(server, run, tmp_path):
    file = tmp_path / "api.key"
    file.write_text("from-file\n")
    assert run(url=server.url, api_key_file=str(file))["ready"] is True
    assert {headers["Authorization"] for _p, headers, _b in server.requests} == {"Bearer from-file"}


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("\n", "is empty"), ("two words", "white space"), ("schlüssel", "header")],
)
def test_key_file_that_is_no_key(server, run, tmp_path, content, words):
    file = tmp_path / "api.key"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    result = run(url=server.url, api_key_file=str(file), timeout=600)
    assert result["rung"] == "key"
    assert words in result["msg"]
    assert str(file) in result["msg"]
    assert server.requests == []


def test_server_error_carries_its_words(server, run):
    server.answers["/v1/models"] = (503, {"error": {"message": "engine is loading", "code": 503}})
    result = run(url=server.url)
    assert result["rung"] == "http"
    assert "HTTP 503" in result["msg"]
    assert "engine is loading" in result["msg"]


def test_redirects_are_not_followed(server, run):
    server.answers["/v1/models"] = (302, b"", ("Location", "http://elsewhere.invalid/v1/models"))
    result = run(url=server.url, api_key="secret-thing")
    assert result["rung"] == "http"
    assert "points to http://elsewhere.invalid/v1/models" in result["msg"]


@pytest.mark.parametrize("body", [b"<html><body>It works!</body></html>", b"[]", b'{"data": 3}'])
def test_not_a_list_of_models(server, run, body):
    server.answers["/v1/models"] = (200, body)
    assert run(url=server.url)["rung"] == "json"


def test_absent_model_names_those_there(server, run):
    result = run(url=server.url, model="kimi-k2")
    assert result["rung"] == "model"
    assert "kimi-k2 is not served" in result["msg"]
    assert "it serves adapter, kimi-k3" in result["msg"]
    assert result["models"] == ["adapter", "kimi-k3"]


def test_no_model_at_all(server, run):
    server.answers["/v1/models"] = (200, {"data": []})
    assert "it serves no model" in run(url=server.url)["msg"]


def test_other_length(server, run):
    result = run(url=server.url, max_model_len=8192)
    assert result["rung"] == "max_model_len"
    assert "max_model_len 49152, expected 8192" in result["msg"]
    assert result["max_model_len"] == 49152
    assert "no length at all, expected 8192" in run(url=server.url, model="adapter", max_model_len=8192)["msg"]


def test_completion_refused_carries_its_words(server, run):
    server.answers["/v1/completions"] = (500, {"error": {"message": "EngineCore encountered an issue"}})
    result = run(url=server.url)
    assert result["rung"] == "generation"
    assert "HTTP 500" in result["msg"]
    assert "EngineCore encountered an issue" in result["msg"]


def test_wedged_group_gives_no_token(server, run):
    server.answers["/v1/completions"] = lambda _handler: server.release.wait(30) and None
    result = run(url=server.url, generation_timeout=1)
    assert result["rung"] == "generation"
    assert "no token within 1 s" in result["msg"]
    assert result["models"] == ["adapter", "kimi-k3"]


@pytest.mark.parametrize(
    "body", [{}, {"choices": []}, {"choices": [{"text": ""}]}, {"choices": [{"text": ""}], "usage": None}]
)
def test_completion_without_a_token(server, run, body):
    server.answers["/v1/completions"] = (200, body)
    assert run(url=server.url)["rung"] == "generation"


def test_waits_until_it_is_there(server, run):
    states = iter([(503, {}), (200, {"data": []}), (200, MODELS)])
    server.answers["/v1/models"] = lambda _handler: next(states)
    result = run(url=server.url, timeout=60, delay=0)
    assert result["ready"] is True
    assert result["attempts"] == 3


def test_fails_at_the_deadline_with_the_last_rung(server, run):
    server.answers["/v1/models"] = (200, {"data": []})
    result = run(url=server.url, timeout=0.5, delay=0.1)
    assert result["failed"] is True
    assert result["rung"] == "model"
    assert 1 < result["attempts"] <= 6
    assert "times in" in result["msg"]


def test_check_mode_never_fails_and_tries_once(run, monkeypatch):
    warnings = []
    monkeypatch.setattr(wait_for_model.AnsibleModule, "warn", lambda _module, text: warnings.append(text))
    result = run(check=True, url="http://nothing.invalid:8000", timeout=600)
    assert "failed" not in result
    assert result["ready"] is False
    assert result["rung"] == "resolve"
    assert result["attempts"] == 1
    assert warnings == [result["msg"]]


def test_check_mode_before_the_key_file_exists(server, run, tmp_path):
    result = run(check=True, url=server.url, api_key_file=str(tmp_path / "api.key"))
    assert "failed" not in result
    assert result["rung"] == "key"


def test_check_mode_on_a_serving_host(server, run):
    result = run(check=True, url=server.url)
    assert result["ready"] is True
    assert "msg" not in result


def test_piece_of_a_wait_reports(server, run):
    server.answers["/v1/models"] = (200, {"data": []})
    result = run(url=server.url, timeout=600, delay=0.1, _progress={"slice": 0.3, "waited": 20.0, "attempts": 7})
    assert "failed" not in result
    assert result["_waiting"] is True
    assert result["attempts"] > 7
    assert result["elapsed"] >= 20
    result = run(url=server.url, timeout=20, delay=0.1, _progress={"slice": 5, "waited": 20.0, "attempts": 7})
    assert result["failed"] is True
    assert "tried 8 times in 2" in result["msg"]


@pytest.mark.parametrize("state", ["mismatch", "given_up"])
def test_agent_that_has_ended_ends_the_wait(server, run, tmp_path, state):
    status = tmp_path / "status.json"
    text = "rank 1 (rank1) has engine.vllm 0.31.0, here 0.32.0"

    def answer(_handler):
        status.write_text(json.dumps({"state": state, "text": text}))
        os.utime(status, (time.time() + 60, time.time() + 60))
        return 503, {}

    server.answers["/v1/models"] = answer
    result = run(url=server.url, timeout=600, delay=0, status_file=str(status))
    assert result["failed"] is True
    assert result["attempts"] == 1
    assert text in result["msg"]
    assert result["agent"] == {"state": state, "text": text}


def test_status_left_over_from_an_earlier_start(server, run, tmp_path):
    status = tmp_path / "status.json"
    status.write_text(json.dumps({"state": "mismatch", "text": "old"}))
    os.utime(status, (1, 1))
    states = iter([(503, {}), (200, MODELS)])
    server.answers["/v1/models"] = lambda _handler: next(states)
    assert run(url=server.url, timeout=600, delay=0, status_file=str(status))["ready"] is True


def test_lost_states():
    gone = {"state": "mismatch", "text": ""}
    assert not wait_for_model.lost(None, 0, 100, 200)
    assert not wait_for_model.lost({"state": "waiting", "text": ""}, 150, 100, 200)
    assert wait_for_model.lost(gone, 150, 100, 151)
    assert not wait_for_model.lost(gone, 50, 100, 109)
    assert wait_for_model.lost(gone, 50, 100, 110)


def test_agent_words_are_added(run, tmp_path):
    status = tmp_path / "status.json"
    status.write_text(json.dumps({"state": "waiting", "text": "waiting for rank 1 (198.18.0.12)"}))
    result = run(url="http://nothing.invalid", status_file=str(status))
    assert result["msg"].endswith("; rank agent: waiting for rank 1 (198.18.0.12)")


@pytest.mark.parametrize("content", ["", "{", "[]", None])
def test_unreadable_status_is_ignored(server, run, tmp_path, content):
    status = tmp_path / "status.json"
    if content is not None:
        status.write_text(content)
    result = run(url=server.url, status_file=str(status))
    assert result["ready"] is True
    assert "agent" not in result


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:8000", "must look like"),
        ("ftp://host", "must look like"),
        ("http://", "must look like"),
        ("http://host:port", "is not an address"),
        ("http://user:hidden@host", "does not belong into the address"),
        ("http://host/?x=1", "without '?'"),
    ],
)
def test_addresses_that_are_none(run, url, words):
    result = run(url=url)
    assert result["failed"] is True
    assert words in result["msg"]
    assert "hidden" not in result["msg"]


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("https://example.org/models/v1/", "https://example.org/models"),
        ("http://[fd00::1]:8000/v1", "http://[fd00::1]:8000"),
    ],
)
def test_addresses(url, base):
    assert api_utils.base_url(url) == base


@pytest.mark.parametrize(
    "options", [{"timeout": -1}, {"delay": -1}, {"request_timeout": 0}, {"generation_timeout": 0}, {"max_tokens": 0}]
)
def test_numbers_that_make_no_sense(server, run, options):
    result = run(url=server.url, **options)
    assert result["failed"] is True
    assert next(iter(options)) in result["msg"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"object": "error", "message": "bad"}', "bad"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<h1>502</h1>\n<p>Bad Gateway</p>", "502 Bad Gateway"),
        (b"", ""),
        (b"x" * 400, "x" * 299 + "…"),
    ],
)
def test_words_of_an_error(body, text):
    assert api_utils.error_text(body) == text
