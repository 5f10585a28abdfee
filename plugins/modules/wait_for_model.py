# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: wait_for_model
short_description: Wait until a model is served and prove it with a generated token
version_added: "1.0.0"
description:
  - Waits, with a deadline, until C(/v1/models) of an OpenAI-compatible server names the model
    and until one token has been generated.
  - Only a generated token proves that every rank of a replica works.
    C(/health) and C(/v1/models) go on answering when a rank is gone.
  - Climbs a ladder at every attempt and, when the deadline passes, names the rung that failed last.
    The rungs are listed at RV(rung).
  - What waiting cannot heal ends the wait at once. These are HTTP 401 and 403, an invalid certificate,
    an unreadable key file, and a state V(mismatch) or V(given_up) in O(status_file).
    Everything else, also an absent model, may be a server that is still coming up and fails at the deadline only.
  - In check mode there is one attempt and it never fails. What is missing becomes a warning,
    since a host that is yet to be set up serves nothing.
  - While it waits, at most one line per host in ten seconds tells the rung.
options:
  model:
    description:
      - Name under which the model must be served, as in C(--served-model-name).
    type: str
    required: true
  max_model_len:
    description:
      - Context length in tokens that the server must report for the model.
      - Not compared when omitted.
    type: int
  timeout:
    description:
      - Seconds until the wait fails.
      - V(0) makes one attempt.
    type: float
    default: 600
  delay:
    description:
      - Seconds between two attempts.
    type: float
    default: 2
  generate:
    description:
      - Whether a completion must be generated.
    type: bool
    default: true
  prompt:
    description:
      - Text to complete.
    type: str
    default: The capital of France is
  max_tokens:
    description:
      - Tokens to generate, at temperature 0.
    type: int
    default: 1
  generation_timeout:
    description:
      - Seconds that one completion may take. It does not outlast O(timeout), unless that is V(0).
      - The first completion of a fresh server may compile for minutes.
    type: float
    default: 120
  status_file:
    description:
      - Status file of the rank agent, on the host that runs the module, such as V(/run/kimi-k3/status.json).
      - Its words are added to messages, and its states V(mismatch) and V(given_up) end the wait.
      - A state that was written before the wait began may be left over from an earlier start.
        It ends the wait only when it still stands after ten seconds.
      - A file that is absent or cannot be read is ignored.
    type: path
  _progress:
    description:
      - For the action plugin of this module, which runs a long wait in pieces to tell between them how far it is.
      - Not to be set in playbooks.
    type: dict
extends_documentation_fragment:
  - baremetal.kimi_k3.api
  - baremetal.kimi_k3.attributes
  - baremetal.kimi_k3.attributes.info
  - baremetal.kimi_k3.attributes.actiongroup
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
"""

EXAMPLES = r"""
- name: Wait until rank 0 generates
  baremetal.kimi_k3.wait_for_model:
    url: http://127.0.0.1:8000
    model: kimi-k3
    max_model_len: 49152
    timeout: 3600
    status_file: /run/kimi-k3/status.json

- name: Ask once, through TLS and with a key
  baremetal.kimi_k3.wait_for_model:
    url: https://kimi.example.org
    model: kimi-k3
    api_key_file: /etc/kimi-k3/api.key
    ca_path: /etc/ssl/certs/site.pem
    timeout: 0

# On the command line:
# ansible rank0 -m baremetal.kimi_k3.wait_for_model -a 'url=http://127.0.0.1:8000 model=kimi-k3 timeout=0'
"""

RETURN = r"""
ready:
  description: Whether every rung was climbed.
  returned: always
  type: bool
  sample: true
rung:
  description:
    - V(ready), or the rung that failed last.
    - V(key) is a key file that cannot be read.
    - V(resolve) is a name that does not resolve.
    - V(connect) is a refused connection, or none in time.
    - V(tls) is a failed handshake or an invalid certificate.
    - V(http) is a status other than 200, or no answer in HTTP.
    - V(json) is an answer that is no JSON or no list of models.
    - V(model) is a model that is not among those served.
    - V(max_model_len) is another context length than expected.
    - V(generation) is a completion that failed or gave no token in time.
  returned: always
  type: str
  sample: ready
attempts:
  description: How often the ladder was climbed.
  returned: always
  type: int
  sample: 12
elapsed:
  description: Seconds waited.
  returned: always
  type: float
  sample: 61.2
url:
  description: Address that was asked, without C(/v1).
  returned: always
  type: str
  sample: http://127.0.0.1:8000
models:
  description: Names of the models served.
  returned: when the server gave its list
  type: list
  elements: str
  sample: [kimi-k3]
max_model_len:
  description: Context length in tokens that the server reports for the model.
  returned: when the model is served
  type: int
  sample: 49152
version:
  description: Version of the server, from C(/version).
  returned: when the model is served and the server tells
  type: str
  sample: 0.32.0
completion:
  description: What was generated.
  returned: when a completion succeeded
  type: dict
  contains:
    text:
      description: Generated text.
      type: str
      returned: always
      sample: " Paris"
    token_ids:
      description: Generated tokens.
      type: list
      elements: int
      returned: when the server tells
      sample: [12366]
    finish_reason:
      description: Why the generation ended.
      type: str
      returned: always
      sample: length
    latency:
      description: Seconds from request to answer.
      type: float
      returned: always
      sample: 0.21
    usage:
      description: Token counts as the server gives them.
      type: dict
      returned: when the server tells
      sample: {prompt_tokens: 6, completion_tokens: 1, total_tokens: 7}
agent:
  description: What the rank agent says.
  returned: when O(status_file) was read
  type: dict
  contains:
    state:
      description: State of the group as this host sees it.
      type: str
      returned: always
      sample: serving
    text:
      description: The state in words.
      type: str
      returned: always
      sample: serving, generation 3
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.api import Api, ApiError, api_argument_spec, read_key

#: States of the rank agent that no waiting heals.
LOST_STATES = ("mismatch", "given_up")
#: Seconds for which a lost state that is older than the wait may be left over from an earlier start.
LEFT_OVER = 10


def find_model(answer: Any, model: str, url: str) -> tuple[list[str], int | None]:
    """Give the names in a `/v1/models` answer and the model's length; raise ApiError when it is not among them."""
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        raise ApiError("json", f"{url}/v1/models answers with JSON that is no list of models")
    known = {entry["id"]: entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)}
    names = sorted(known)
    if model not in known:
        there = "it serves " + ", ".join(names) if names else "it serves no model"
        raise AbsentModelError(f"the model {model} is not served at {url}: {there}", names)
    length = known[model].get("max_model_len")
    return names, length if isinstance(length, int) else None


class AbsentModelError(ApiError):
    """The list of models lacks the one that was asked for."""

    def __init__(self, text: str, names: list[str]) -> None:
        super().__init__("model", text)
        self.names = names


def read_completion(answer: Any, latency: float) -> dict[str, Any]:
    """Give what a completion holds; raise ApiError unless it proves a token."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ApiError("generation", "the completion came back without a choice in it")
    choice = choices[0]
    usage = answer.get("usage") if isinstance(answer.get("usage"), dict) else {}
    text = choice.get("text") or ""
    found: dict[str, Any] = {
        "text": text,
        "finish_reason": choice.get("finish_reason"),
        "latency": round(latency, 3),
    }
    if isinstance(choice.get("token_ids"), list):
        found["token_ids"] = choice["token_ids"]
    if usage:
        found["usage"] = usage
    # An end-of-text token has no text but counts.
    if not (text or found.get("token_ids") or usage.get("completion_tokens")):
        raise ApiError("generation", "the completion came back without a token")
    return found


def read_status(path: str | None) -> tuple[dict[str, str] | None, float]:
    """Give state and text of the rank agent, and when they were written."""
    if not path:
        return None, 0.0
    try:
        with open(path, encoding="utf-8") as file:
            written = os.fstat(file.fileno()).st_mtime
            data = json.loads(file.read(1024 * 1024))
    except (OSError, ValueError):
        return None, 0.0
    if not isinstance(data, dict):
        return None, 0.0
    return {"state": str(data.get("state", "")), "text": str(data.get("text", ""))}, written


def lost(agent: dict[str, str] | None, written: float, began: float, now: float) -> bool:
    """Whether the rank agent has ended for good, and not before this wait began."""
    if agent is None or agent["state"] not in LOST_STATES:
        return False
    return written >= began or now - began >= LEFT_OVER


def agent_words(agent: dict[str, str] | None) -> str:
    """Give the rank agent's words for a message."""
    if agent is None:
        return ""
    state, text = agent["state"], agent["text"]
    return f"; rank agent: {text}" if text.startswith(state) else f"; rank agent: {state}: {text}"


class Ladder:
    """One attempt after the other, and what they saw."""

    def __init__(self, api: Api, params: dict[str, Any]) -> None:
        self.api = api
        self.params = params
        self.seen: dict[str, Any] = {}

    def climb(self, left: float) -> None:
        """Climb all rungs within `left` seconds, a second at least; raise ApiError at the one that fails."""
        self.seen = {}
        model = self.params["model"]
        try:
            names, length = find_model(self.api.request("/v1/models", timeout=self._bound(left)), model, self.api.base)
        except AbsentModelError as exc:
            self.seen["models"] = exc.names
            raise
        self.seen["models"] = names
        if length is not None:
            self.seen["max_model_len"] = length
        self._ask_version(left)
        wanted = self.params["max_model_len"]
        if wanted is not None and length != wanted:
            told = "no length at all" if length is None else f"{length}"
            raise ApiError(
                "max_model_len",
                f"the model {model} at {self.api.base} is served with max_model_len {told}, expected {wanted}",
            )
        if self.params["generate"]:
            self.seen["completion"] = self._generate(left)

    def _bound(self, left: float) -> float:
        return max(min(self.api.request_timeout, left), 1.0)

    def _ask_version(self, left: float) -> None:
        try:
            answer = self.api.request("/version", timeout=self._bound(left))
        except ApiError:
            return  # a gateway may hide it, and nothing depends on it
        if isinstance(answer, dict) and isinstance(answer.get("version"), str):
            self.seen["version"] = answer["version"]

    def _generate(self, left: float) -> dict[str, Any]:
        seconds = max(min(self.params["generation_timeout"], left), 1.0)
        body = {
            "model": self.params["model"],
            "prompt": self.params["prompt"],
            "max_tokens": self.params["max_tokens"],
            "temperature": 0,
            "return_token_ids": True,
        }
        began = time.monotonic()
        try:
            answer = self.api.request("/v1/completions", body, timeout=seconds)
        except ApiError as exc:
            if exc.fatal:
                raise
            spent = time.monotonic() - began
            if exc.status is None and spent >= seconds - 0.5:
                raise ApiError("generation", f"no token within {seconds:g} s from {self.api.base}") from None
            raise ApiError("generation", f"no token: {exc.text}") from None
        return read_completion(answer, time.monotonic() - began)


def wait(
    ladder: Ladder,
    params: dict[str, Any],
    *,
    waited: float,
    attempts: int,
    stop_after: float | None,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[ApiError | None, dict[str, Any]]:
    """Climb until it holds, cannot heal, or the time is over; `stop_after` gives a report in between."""
    start = now()
    began = time.time() - waited
    while True:
        attempts += 1
        failure: ApiError | None = None
        spent = now() - start
        try:
            ladder.climb(params["timeout"] - waited - spent if params["timeout"] else float("inf"))
        except ApiError as exc:
            failure = exc
        agent, written = read_status(params["status_file"])
        spent = now() - start
        result: dict[str, Any] = {"attempts": attempts, "elapsed": round(waited + spent, 1), "waiting": False}
        if agent is not None:
            result["agent"] = agent
        if failure is None or failure.fatal:
            return failure, result
        if lost(agent, written, began, time.time()):
            failure.fatal = True
            return failure, result
        pause = max(params["delay"], 0.1)
        if waited + spent + pause > params["timeout"]:
            return failure, result
        if stop_after is not None and spent + pause > stop_after:
            result["waiting"] = True
            return failure, result
        sleep(pause)


def message(failure: ApiError, result: dict[str, Any]) -> str:
    """Say what failed, for how long it was tried, and what the rank agent says."""
    agent = result.get("agent")
    if failure.fatal and agent is not None and agent["state"] in LOST_STATES:
        return (
            f"the group has ended and does not come back by itself: {agent['state']}: {agent['text']} ({failure.text})"
        )
    tried = "once" if result["attempts"] == 1 else f"{result['attempts']} times in {result['elapsed']:g} s"
    return f"{failure.text} (rung {failure.rung}, tried {tried}){agent_words(agent)}"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **api_argument_spec(),
            "model": {"type": "str", "required": True},
            "max_model_len": {"type": "int"},
            "timeout": {"type": "float", "default": 600},
            "delay": {"type": "float", "default": 2},
            "generate": {"type": "bool", "default": True},
            "prompt": {"type": "str", "default": "The capital of France is"},
            "max_tokens": {"type": "int", "default": 1, "no_log": False},
            "generation_timeout": {"type": "float", "default": 120},
            "status_file": {"type": "path"},
            # From the action plugin: {slice, waited, attempts} of a wait that is run in pieces.
            "_progress": {"type": "dict"},
        },
        mutually_exclusive=[("api_key", "api_key_file")],
        supports_check_mode=True,
    )
    params = module.params
    for name in ("timeout", "delay"):
        if params[name] < 0:
            module.fail_json(msg=f"{name}: must not be negative, is {params[name]:g}")
    for name in ("request_timeout", "generation_timeout", "max_tokens"):
        if params[name] <= 0:
            module.fail_json(msg=f"{name}: must be more than 0, is {params[name]:g}")
    if module.check_mode:
        params["timeout"] = 0.0
    progress = params["_progress"] or {}

    try:
        api = Api(
            params["url"],
            None,
            validate_certs=params["validate_certs"],
            ca_path=params["ca_path"],
            use_proxy=params["use_proxy"],
            request_timeout=params["request_timeout"],
        )
    except ValueError as exc:
        module.fail_json(msg=str(exc))
    ladder = Ladder(api, params)
    try:
        api.key = read_key(params["api_key"], params["api_key_file"])
    except ApiError as exc:
        failure: ApiError | None = exc
        result: dict[str, Any] = {"attempts": 0, "elapsed": 0.0, "waiting": False}
        text = exc.text
    else:
        failure, result = wait(
            ladder,
            params,
            waited=float(progress.get("waited", 0)),
            attempts=int(progress.get("attempts", 0)),
            stop_after=float(progress["slice"]) if "slice" in progress else None,
        )
        text = message(failure, result) if failure else ""

    waiting = result.pop("waiting")
    result.update(ladder.seen, url=api.base, ready=failure is None, rung=failure.rung if failure else "ready")
    if failure is None:
        module.exit_json(changed=False, **result)
    if waiting:
        module.exit_json(changed=False, msg=text, _waiting=True, **result)
    if module.check_mode:
        module.warn(text)
        module.exit_json(changed=False, msg=text, **result)
    module.fail_json(msg=text, **result)


if __name__ == "__main__":
    main()
