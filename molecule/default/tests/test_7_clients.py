# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The clients that people use, against a replica that asks for a key: the packages openai and anthropic, and curl."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
import urllib.error
import urllib.request

import anthropic
import openai
import pytest
from replica import ROOT, playbook

MESSAGES = [{"role": "user", "content": "Who owns the layers?"}]
TOKENS = 12
# The package anthropic has no such argument any more; the server still takes it.
GREEDY = {"temperature": 0}
# Whatever proxy this machine has, the lab is not behind it.
DIRECT = {**os.environ, "NO_PROXY": "*", "no_proxy": "*"}


class Installed:
    """What playbooks/clients.yml has put into two folders on this machine."""

    def __init__(self, folder, key):
        self.files, self.programs = folder / "kimi-k3", folder / "bin"
        self.key = key
        self.words = ("-e", json.dumps({"client_dir": str(self.files), "client_bin_dir": str(self.programs)}))

    def play(self, *words):
        """How many changes the playbook made, or would make."""
        output = playbook("playbooks/clients.yml", "--diff", *self.words, *words)
        assert self.key not in output
        return int(re.search(r"^localhost .*changed=(\d+)", output, re.MULTILINE)[1])

    def variables(self, name):
        spec = importlib.util.spec_from_file_location("client", ROOT / "roles" / "client" / "files" / "client.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.parse_environment((self.files / name).read_text(encoding="utf-8"))

    def run(self, name, *words, **more):
        command = [self.programs / f"kimi-k3-{name}", *words]
        return subprocess.run(command, env={**DIRECT, **more}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", autouse=True)
def direct():
    """The packages ask the environment for a proxy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "*")
        patch.setenv("no_proxy", "*")
        yield


@pytest.fixture(scope="module")
def installed(replica, api_key, tmp_path_factory):
    replica.wait_serving()
    result = Installed(tmp_path_factory.mktemp("clients"), api_key)
    assert result.play("--check") > 0
    assert not result.files.exists()
    assert result.play() > 0
    return result


@pytest.fixture(scope="module")
def chat(installed):
    own = installed.variables("code.env")
    return openai.OpenAI(base_url=own["OPENAI_BASE_URL"], api_key=own["OPENAI_API_KEY"], max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def messages(installed):
    own = installed.variables("claude.env")
    return anthropic.Anthropic(
        base_url=own["ANTHROPIC_BASE_URL"], auth_token=own["ANTHROPIC_AUTH_TOKEN"], max_retries=0, timeout=120
    )


@pytest.fixture(scope="module")
def expected(chat):
    """What the model says to MESSAGES at temperature 0."""
    answer = chat.chat.completions.create(model="kimi-k3", messages=MESSAGES, max_tokens=TOKENS, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == TOKENS
    assert answer.choices[0].message.content
    return answer


def test_a_second_run_changes_nothing(installed):
    assert installed.play() == 0


def test_the_key_is_rank_0s_and_its_owners_alone(installed, replica, api_key):
    assert replica.ranks[0].run("cat /etc/kimi-k3/api.key").strip() == api_key
    assert installed.variables("claude.env")["ANTHROPIC_AUTH_TOKEN"] == api_key
    assert installed.variables("code.env")["OPENAI_API_KEY"] == api_key
    holders = [path for path in installed.files.rglob("*") if path.is_file() and api_key in path.read_text()]
    assert sorted(path.name for path in holders) == ["claude.env", "code.env", "curl.conf"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in holders} == {0o600}


def test_models(chat):
    [model] = chat.models.list().data
    assert model.id == "kimi-k3"
    assert model.max_model_len == 512


def test_a_chat_that_is_streamed_says_the_same(chat, expected):
    stream = chat.chat.completions.create(
        model="kimi-k3",
        messages=MESSAGES,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == expected.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 1
    assert chunks[-1].usage.completion_tokens == TOKENS


def test_a_message_says_the_same(messages, expected):
    answer = messages.messages.create(model="kimi-k3", messages=MESSAGES, max_tokens=TOKENS, extra_body=GREEDY)
    assert "".join(block.text for block in answer.content) == expected.choices[0].message.content
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == TOKENS


def test_a_message_that_is_streamed_says_the_same(messages, expected):
    with messages.messages.stream(model="kimi-k3", messages=MESSAGES, max_tokens=TOKENS, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == expected.choices[0].message.content
    assert len(pieces) > 1
    assert final.stop_reason == "max_tokens"


def test_tokens_are_counted_as_they_are_used(messages, expected):
    counted = messages.messages.count_tokens(model="kimi-k3", messages=MESSAGES)
    assert counted.input_tokens == expected.usage.prompt_tokens > 1
    longer = messages.messages.count_tokens(model="kimi-k3", messages=MESSAGES, system="Be brief.")
    assert longer.input_tokens > counted.input_tokens


def test_a_wrong_key_is_refused(replica, chat, messages):
    with pytest.raises(openai.AuthenticationError):
        chat.with_options(api_key="wrong").models.list()
    wrong = anthropic.Anthropic(base_url=replica.url, auth_token="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(model="kimi-k3", messages=MESSAGES, max_tokens=1)
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.count_tokens(model="kimi-k3", messages=MESSAGES)


def test_the_right_key_in_the_wrong_header_is_refused(replica, api_key):
    """Why the role sets ANTHROPIC_AUTH_TOKEN: with ANTHROPIC_API_KEY Claude Code sends the key as x-api-key."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    statuses = []
    for header in ({"x-api-key": api_key}, {"Authorization": f"Bearer {api_key}"}):
        try:
            with opener.open(urllib.request.Request(f"{replica.url}/v1/models", headers=header), timeout=60) as answer:
                statuses.append(answer.status)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
    assert statuses == [401, 200]


def test_curl(installed):
    run = installed.run("curl", "/v1/models", "--fail")
    assert run.returncode == 0, run.stderr
    assert [model["id"] for model in json.loads(run.stdout)["data"]] == ["kimi-k3"]
    body = json.dumps({"model": "kimi-k3", "prompt": "Hello", "max_tokens": 2})
    run = installed.run("curl", "/v1/completions", "--fail", "--json", body)
    assert json.loads(run.stdout)["usage"]["completion_tokens"] == 2
    plain = ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}"]
    url = installed.variables("claude.env")["ANTHROPIC_BASE_URL"] + "/v1/models"
    assert subprocess.run([*plain, url], env=DIRECT, capture_output=True, text=True, check=True).stdout == "401"


@pytest.mark.parametrize("name", ["openai_chat.py", "anthropic_messages.py"])
def test_the_examples_run(installed, expected, name):
    foreign = {"ANTHROPIC_API_KEY": "not-this-one", "OPENAI_API_KEY": "not-this-one", "MAX_TOKENS": "4"}
    run = installed.run("run", sys.executable, str(installed.files / "examples" / name), "Who owns it?", **foreign)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert installed.key not in run.stdout + run.stderr


def test_removal(installed):
    assert installed.play("-e", "client_state=absent") == 2
    assert not installed.files.exists()
    assert list(installed.programs.iterdir()) == []
    assert installed.play("-e", "client_state=absent") == 0
