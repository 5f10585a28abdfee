# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starts a client of the model with the environment that it needs; the name it is called by says which.

    ...-claude [ARGUMENT ...]   Claude Code
    ...-code [ARGUMENT ...]     noumena's code
    ...-curl PATH [ARGUMENT ...]  curl on a path of the API, such as /v1/models
    ...-run PROGRAM [ARGUMENT ...]  any program, with the variables of both kinds of client

The key is read from files beside this one and handed on in the environment of the one process, or for curl in a file
that curl reads: it is in nobody's arguments. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

# Set by a user for the vendors' own services, these would win over what is set here.
FOREIGN = {
    "claude.env": (
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_CUSTOM_HEADERS",
        "CLAUDE_CODE_OAUTH_TOKEN",
        "CLAUDE_CODE_USE_BEDROCK",
        "CLAUDE_CODE_USE_FOUNDRY",
        "CLAUDE_CODE_USE_VERTEX",
    ),
    "code.env": ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID"),
}
FILES = {"claude": ("claude.env",), "code": ("code.env",), "curl": (), "run": ("claude.env", "code.env")}


class ClientError(Exception):
    """One sentence for the user."""


def parse_environment(text: str) -> dict[str, str]:
    """An environment file as the role writes it: NAME="value" with backslashes before what a shell would expand."""
    found = {}
    for line in text.splitlines():
        match = re.match(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"$', line.strip())
        if match:
            found[match[1]] = re.sub(r"\\(.)", r"\1", match[2])
    return found


def environment(folder: Path, kind: str, current: dict[str, str]) -> dict[str, str]:
    """The current environment without what points elsewhere, with what points to the model."""
    result = dict(current)
    for name in FILES[kind]:
        for foreign in FOREIGN[name]:
            result.pop(foreign, None)
        result.update(parse_environment((folder / name).read_text(encoding="utf-8")))
    return result


def command(folder: Path, kind: str, arguments: list[str]) -> list[str]:
    """The words to execute."""
    settings = json.loads((folder / "client.json").read_text(encoding="utf-8"))
    if kind == "curl":
        if not arguments or not arguments[0].startswith("/"):
            raise ClientError("the first argument must be a path of the API, such as /v1/models")
        url = settings["url"] + arguments[0]
        return ["curl", "--config", str(folder / "curl.conf"), "--no-progress-meter", *arguments[1:], url]
    if kind == "run":
        if not arguments:
            raise ClientError("name a program to run")
        return arguments
    return [settings["commands"][kind], *arguments]


def kind_of(name: str) -> str:
    """What a command is by its name: the last part of kimi-k3-claude."""
    kind = name.rsplit("-", 1)[-1]
    if kind not in FILES:
        raise ClientError(f"call it by a name that ends in one of -{', -'.join(FILES)}")
    return kind


def start(name: str, arguments: list[str]) -> NoReturn:
    folder = Path(__file__).resolve().parent
    kind = kind_of(name)
    try:
        words = command(folder, kind, arguments)
        variables = environment(folder, kind, dict(os.environ))
    except (OSError, ValueError, KeyError) as error:
        raise ClientError(f"{folder} cannot be used ({error}): run the playbook clients again") from error
    try:
        os.execvpe(words[0], words, variables)  # noqa: S606 - no shell is wanted
    except FileNotFoundError as error:
        raise ClientError(f"there is no program '{words[0]}' in PATH: install it, or set client_*_command") from error
    except OSError as error:
        raise ClientError(f"'{words[0]}' cannot be started: {error}") from error


if __name__ == "__main__":
    try:
        start(Path(sys.argv[0]).name, sys.argv[1:])
    except ClientError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}.")
