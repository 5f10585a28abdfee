# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import base64
import json
import time

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.redact import REMOVED, forms, harvest, redact

# No vendor's form, so that only the place it stands in tells.
S = "Zq7/pLANTED+42x"

PLANTED = [
    f"VLLM_API_KEY={S}",
    f'HF_TOKEN="{S}"',
    f"export AWS_SECRET_ACCESS_KEY='{S}'",
    f"export MY_PASSWORD={S} with {S} blanks",
    f'Environment="HF_TOKEN={S}"',
    f"Environment=HF_TOKEN={S}",
    f"  api_key: {S}",
    f'- hub_token: "{S}"',
    f"password: >-\n    {S}\n    {S}\nnext: 1",
    f"  client_secret: |\n    {S}\n",
    json.dumps({"hf_token": S, "depth": {"apiKey": S}}),
    json.dumps({"nested": json.dumps({"api_key": S})}),
    str({"serve_api_key": S}),
    json.dumps({"serve_group_secret": S}, indent=2),
    f"Authorization: Bearer {S}",
    f"authorization: Basic {S}",
    f"-H 'Authorization: Bearer {S}' http://host/v1/models",
    f"'authorization': 'Bearer {S}'",
    f'{{"Authorization": "token {S}"}}',
    f"(b'authorization', b'Bearer {S}')",
    f"Bearer {S}",
    f"x-api-key: {S}",
    f"X-Api-Key={S}",
    f"Set-Cookie: {S}",
    f"vllm serve --api-key {S} --port 8000",
    f"vllm serve --api-key={S}",
    f"['vllm', 'serve', '--api-key', '{S}']",
    f'"--hf-token", "{S}"',
    f"serve\0--api-key\0{S}\0--port",
    f"args: api_key='{S}', port=8000",
    f"api_key=['{S}']",
    f"api_keys: ['first', '{S}']",
    f"'credentials': {{'user': 'me', 'word': '{S}'}}",
    f"https://user:{S.replace('/', '-')}@hub.example/path",
    f"GET /resolve?X-Amz-Signature={S}&x=1",
    f"?token={S}",
    f"key => secret => {S}",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{S}\n{S}\n-----END OPENSSH PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\n{S}\ncut off",
    f"2026-12-01T05:00:00 host vllm[1]: INFO non-default args: {{'api_key': '{S}', 'model': '/srv'}}",
]


@pytest.mark.parametrize("text", PLANTED)
def test_a_secret_is_known_by_its_place(text):
    told, count = redact(text)
    assert S not in told
    assert S.replace("/", "-") not in told
    assert "pLANTED" not in told
    assert REMOVED in told
    assert count >= 1
    assert redact(told)[0] == told


@pytest.mark.parametrize(
    "token",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789",
        "sk-ant-api03-abcdefghij_klmnop",
        "ghp_abcdefghijklmnopqrst0123",
        "github_pat_11ABCDEFG0abcdefghij",
        "glpat-abcdefghijklmnopqrst",
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-1234567890-abcdef",
        "nvapi-abcdefghijklmnopqrstuv",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    ],
)
@pytest.mark.parametrize("around", ["{}", "fetching with {}.", '["{}"]', "x={}", "https://host/{}/file"])
def test_a_token_is_known_by_its_form(token, around):
    told, count = redact(around.format(token))
    assert token not in told
    assert count == 1
    assert told == around.format(REMOVED)


@pytest.mark.parametrize("secret", [S, 'say "a" $b `c` \\d', "ümlaut and blank", "short1", "abcd"])
def test_a_known_secret_is_found_in_every_notation(secret):
    for form in forms(secret):
        told, count = redact(f"the request ({form}) failed", [f"{secret}\n"])
        assert told == f"the request ({REMOVED}) failed", form
        assert count == 1


def test_a_known_secret_is_found_inside_of_words_and_a_short_one_is_not():
    assert redact(f"path/{S}x", [S])[0] == f"path/{REMOVED}x"
    assert redact("abcdefg abcd", ["abcd"])[0] == f"abcdefg {REMOVED}"
    assert redact("a b", ["", " ", "a", "ab"]) == ("a b", 0)


def test_the_longer_of_two_secrets_is_removed_whole():
    assert redact("keykeykey-and-more", ["keykeykey", "keykeykey-and-more"])[0] == REMOVED


@pytest.mark.parametrize(
    "text",
    [
        "Avg prompt throughput: 12.5 tokens/s, Avg generation throughput: 8.0 tokens/s",
        "--max-num-batched-tokens 8192 --max-model-len 49152 --tokenizer /srv/model",
        '"eos_token": "<|end|>", "max_tokens": 16',
        "serve_api_key: null",
        "api_key=None, ssl_keyfile=None",
        'api_key: ""',
        "http://10.0.0.11:8000/v1/models",
        "tcp://10.0.0.11:29501",
        "Failed to authenticate: the bearer token is missing",
        "kv_cache_dtype=fp8 keyword: value monkey=3 turkey: x",
        "Traceback (most recent call last):",
        "KeyError: 'layers'",
        "me@example.org wrote",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact(text) == (text, 0)


def test_the_rest_of_a_line_stays():
    told, _count = redact(f"vllm serve --api-key {S} --port 8000")
    assert told == f"vllm serve --api-key {REMOVED} --port 8000"
    assert redact(f'{{"api_key": "{S}", "port": 8000}}')[0] == f'{{"api_key": "{REMOVED}", "port": 8000}}'
    assert redact(f'HF_TOKEN="{S}"\nPORT=1')[0] == f'HF_TOKEN="{REMOVED}"\nPORT=1'
    assert json.loads(redact(json.dumps({"token": S, "n": [1]}))[0]) == {"token": REMOVED, "n": [1]}
    assert redact(f"https://me:{S.replace('/', '-')}@hub/x")[0] == f"https://{REMOVED}@hub/x"


def test_harvest_finds_values_that_are_worth_removing_everywhere():
    text = f'HF_TOKEN="{S}"\nVLLM_API_KEY="with \\"quotes\\" 1"\nX_SECRET=word\nLoadCredential=api-key:/etc/k/api.key\n'
    assert harvest(text) == {S, 'with "quotes" 1'}


def test_base64_of_a_known_secret():
    encoded = base64.b64encode(S.encode()).decode()
    assert encoded not in redact(f"payload {encoded}", [S])[0]


def test_long_lines_and_many_lines_take_no_time_to_speak_of():
    """No expression may go back and forth over what it has seen; a minute is far from what this takes."""
    began = time.monotonic()
    redact(
        "a_key-" * 50_000 + "token" * 20_000 + "\n" + "INFO tokens per second: 12.5, cache usage: 3 %\n" * 50_000, [S]
    )
    assert time.monotonic() - began < 60
