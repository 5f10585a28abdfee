# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Take secrets out of texts that are meant for other people's eyes: pure functions.

Two ways, one after the other. What is known to be a secret, such as the content of a key file, is removed wherever it
stands, also as JSON, URLs and base64 write it. What looks like one is removed by its form: values of variables, flags
and keys with such names, bearer tokens, tokens with a known beginning, passwords in URLs, private keys. Rather too much
than too little: a path that is called a key is removed as well.
"""

from __future__ import annotations

import base64
import json
import re
import typing as t
import urllib.parse

REMOVED = "<removed>"
# Shorter ones would be found in every other word.
SHORTEST = 4
# From this length on a secret is removed inside of words too.
LONG = 8

# How a secret's name ends. What comes before it is not looked at, or long lines would take for ever.
_WORD = (
    r"(?:api[_-]?keys?|access[_-]?keys?(?:[_-]?id)?|secret[_-]?keys?|private[_-]?keys?|signing[_-]?keys?"
    r"|passwords?|passwd|passphrase|secrets?|credentials?|authorization|cookie|signature"
    # Tokens of a vocabulary are no secrets.
    r"|(?<!bos[_-])(?<!eos[_-])(?<!pad[_-])(?<!unk[_-])(?<!sep[_-])(?<!cls[_-])(?<!mask[_-])(?<!stop[_-])token)"
)
_NAME = rf"[A-Za-z0-9_.\-]{{0,60}}?{_WORD}"
_VALUE = (
    r'"(?:[^"\\]|\\.)*"'
    r"|'(?:[^'\\]|\\.)*'"
    r'|\\+"(?:[^"\\])*\\+"'
    r"|\[[^\]\n]*\]|\{[^{}\n]*\}"
    r"|[^\s,;\"'{}\[\])&][^\s,;\"'}\])&]*"
)
# Lines without any of these cannot hold what the expressions below look for.
_HINT = re.compile(
    r"key|token|secret|passw|passphrase|credential|auth|bearer|cookie|signature|://|hf_|sk-|gh[pousr]_|glpat-|github_pat_"
    r"|AKIA|xox|eyJ|nvapi-",
    re.IGNORECASE,
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
# key: |, with what is indented below it.
_BLOCK = re.compile(
    rf"^(?P<indent>[ \t]*)(?P<head>(?:- )?{_NAME}\s*:\s*[|>][+-]?\s*\n)(?P<body>(?:(?P=indent)[ \t]+.*(?:\n|\Z))+)",
    re.IGNORECASE | re.MULTILINE,
)
_BLOCK_START = re.compile(r":\s*[|>][+-]?[ \t]*$", re.MULTILINE)
# A whole line NAME=a value with spaces, or name: a value with spaces.
_LINE = re.compile(
    rf"^(?P<head>\s*(?:-\s+)?(?:export\s+|Environment=[\"']?)?{_NAME}\s*(?:=|:\s)\s*)"
    r"(?P<value>(?!(?:null|none|true|false)\b)[^\s\"'\\{\[|>].*)$",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"(?P<head>(?:proxy-)?authorization\\*[\"']?\s*[:=,]\s*\\*[\"']?)(?P<value>(?:[A-Za-z]+\s+)?[^\s\"'\\,}]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?P<head>\bbearer\s+)(?P<value>(?!tokens?\b|auth)[A-Za-z0-9._~+/=\-]{4,})", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?P<head>{_WORD}\\*[\"']?\s*(?:=>|[=:])\s*)(?P<value>{_VALUE})", re.IGNORECASE)
# Words of a command line, parted by blanks, by NUL, or as a list in JSON or Python.
_FLAG = re.compile(
    rf"(?P<head>(?<![A-Za-z0-9_-])--?{_NAME}(?:[\"']\s*,\s*|\s+|\0))(?P<value>(?![\"']?--)(?:{_VALUE}))", re.IGNORECASE
)
_KNOWN = re.compile(
    r"(?P<head>)(?P<value>(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_\-]{8,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_\-]{16,}|AKIA[0-9A-Z]{12,}|xox[abprs]-[A-Za-z0-9\-]{8,}"
    r"|nvapi-[A-Za-z0-9_\-]{16,}|eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*))"
)
_LOGIN = re.compile(r"(?P<head>://)(?P<value>[^/\s@\"'<>]+)(?=@)")
_IN_LINE = (_HEADER, _BEARER, _LINE, _ASSIGNED, _FLAG, _KNOWN, _LOGIN)
# What stands for nothing.
_NOTHING = frozenset({"", "null", "none", "true", "false", "~", "{}", "[]"})


def forms(secret: str) -> list[str]:
    """A secret as other notations write it."""
    quoted = secret.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
    return [
        secret,
        json.dumps(secret)[1:-1],
        quoted,
        urllib.parse.quote(secret, safe=""),
        urllib.parse.quote_plus(secret),
        base64.b64encode(secret.encode()).decode(),
        base64.urlsafe_b64encode(secret.encode()).decode(),
    ]


def _patterns(secrets: t.Iterable[str]) -> list[re.Pattern[str]]:
    found = {form for secret in secrets for form in forms(str(secret).strip()) if len(form) >= SHORTEST}
    long = sorted((form for form in found if len(form) >= LONG), key=len, reverse=True)
    short = sorted((form for form in found if len(form) < LONG), key=len, reverse=True)
    patterns = []
    if long:
        patterns.append(re.compile("|".join(map(re.escape, long))))
    if short:
        patterns.append(re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, short))})(?![\w-])"))
    return patterns


def _bare(value: str) -> str:
    """A value without its quotes."""
    text = value.strip()
    match = re.fullmatch(r"\\*([\"'])(.*?)\\*\1", text, re.DOTALL)
    return match[2] if match else text


class _Counter:
    """Replaces the value of a match, keeps its quotes, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, match: re.Match[str]) -> str:
        value = match["value"]
        bare = _bare(value)
        if bare.lower() in _NOTHING or bare.startswith(REMOVED) or bare.endswith(REMOVED):
            return match[0]
        self.count += 1
        start = value.index(bare)
        return match["head"] + value[:start] + REMOVED + value[start + len(bare) :]


def redact(text: str, secrets: t.Iterable[str] = ()) -> tuple[str, int]:
    """The text without secrets, and how many were taken out. C(secrets) are known ones."""
    count = 0
    for pattern in _patterns(secrets):
        text, times = pattern.subn(REMOVED, text)
        count += times
    text, times = _PRIVATE_KEY.subn(REMOVED, text)
    count += times
    if _BLOCK_START.search(text):
        text, times = _BLOCK.subn(lambda match: f"{match['indent']}{match['head']}{match['indent']}  {REMOVED}\n", text)
        count += times
    counter = _Counter()
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if _HINT.search(line):
            for pattern in _IN_LINE:
                line = pattern.sub(counter, line)  # noqa: PLW2901 - one expression after the other
            lines[number] = line
    return "\n".join(lines), count + counter.count


def harvest(text: str) -> set[str]:
    """Values of an environment or configuration file that look like secrets, to be removed from all other texts too."""
    found = set()
    for line in text.split("\n"):
        for pattern in (_LINE, _ASSIGNED, _FLAG):
            for match in pattern.finditer(line):
                value = re.sub(r"\\(.)", r"\1", _bare(match["value"]))
                # A word or a path is not worth taking out of every sentence.
                if len(value) >= LONG and re.search(r"\d", value) and not value.startswith(("/", "$", "{", "<")):
                    found.add(value)
    return found
