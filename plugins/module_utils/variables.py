# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether what the inventory sets fits what a role declares: pure functions, no I/O.

A role called by its entry point C(main) has its types checked by Ansible, but not one called by a file of tasks, and
never whether a path is one or a port can be one. An operator would hear of it on the host, hours later.
"""

from __future__ import annotations

import difflib
import re
import typing as t

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.launch import printable

_KINDS = {
    "str": "text",
    "path": "a path",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "dict": "a dictionary",
}
_BOOLEANS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})
# Beyond it nothing in this collection is meant: above any number of bytes that is read, below what a unit can hold.
_LARGEST = 10**15
_LONGEST = 10**9
_TIMES = re.compile(r"_(timeout|interval|window|heartbeat|seconds)$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def unknown_variables(names: t.Iterable[str], role: str, known: t.Iterable[str]) -> list[str]:
    """Sentences for names that begin like the role's variables but are none: a role would silently ignore them."""
    public = sorted(known)
    sentences = []
    for name in sorted(set(names)):
        if not name.startswith(f"{role}_") or name in public:
            continue
        close = difflib.get_close_matches(name, public, n=1)
        hint = f"did you mean {close[0]}?" if close else f"see the README of role {role}."
        sentences.append(f"'{name}' is no variable of role {role}: {hint}")
    return sentences


def value_error(
    name: str, option: t.Mapping[str, t.Any], value: t.Any, lines: bool = False, local: bool = False
) -> str | None:
    """What is wrong with the value of a variable, as one sentence that does not show a secret; None when nothing is.

    C(option) is the variable in the argument specification, C(lines) allows text of several lines, C(local) a path that
    is not absolute, because it is one of the controller's.
    """
    kind = str(option.get("type", "str"))
    wanted = _wanted(kind, option)
    if value is None:
        # A variable without a default has a rule of its own.
        return f"{name} is set to nothing: give it {wanted}, or remove it." if "default" in option else None
    told = f"{name} is not what it must be" if option.get("no_log") else f"{name} is '{_short(value)}'"
    choices = option.get("choices")
    if choices:
        text = [str(choice) for choice in choices]
        return None if str(value) in text else f"{told}: it must be {', '.join(text[:-1])} or {text[-1]}."
    if kind == "list":
        if not isinstance(value, (list, tuple)):
            return f"{told}: it must be {wanted}."
        inner = {"type": option.get("elements", "raw"), "default": None, "no_log": option.get("no_log")}
        found = (
            _scalar_error(str(inner["type"]), item, name if name.endswith("_ports") else "", lines=lines, local=local)
            for item in value
        )
        what = next((sentence for sentence in found if sentence), None)
        return f"{told}: each of its items must be {what}." if what else None
    if kind == "dict":
        return None if isinstance(value, dict) else f"{told}: it must be {wanted}."
    empty = kind in ("str", "path") and value == "" and option.get("default") == ""
    low = option.get("default")
    floor = low if isinstance(low, (int, float)) and low < 0 else 0
    what = None if empty else _scalar_error(kind, value, name, floor=floor, lines=lines, local=local)
    return f"{told}: it must be {what}." if what else None


def _wanted(kind: str, option: t.Mapping[str, t.Any]) -> str:
    if kind != "list" or option.get("elements", "raw") not in _KINDS:
        return _KINDS.get(kind, "a value")
    return {"str": "a list of texts", "int": "a list of whole numbers"}.get(str(option["elements"]), "a list")


def _short(value: t.Any) -> str:
    text = printable(" ".join(str(value).split()))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _scalar_error(
    kind: str, value: t.Any, name: str, *, floor: float = 0, lines: bool = False, local: bool = False
) -> str | None:
    """What the value must be and is not."""
    if kind in ("int", "float"):
        number = _number(kind, value)
        if re.search(r"_ports?$", name):
            return None if number is not None and 0 < number < 65536 else "a TCP port, 1 to 65535"
        most = _LONGEST if _TIMES.search(name) else _LARGEST
        if number is not None and floor <= number <= most:
            return None
        return f"{_KINDS[kind]} from {floor:g}" + ("" if number is None or number < floor else f" to {most}")
    if kind == "bool":
        return None if str(value).strip().lower() in _BOOLEANS else "true or false"
    if kind not in ("str", "path"):
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return "text (in quotes)"
    text = str(value)
    if (_CONTROL.search(text.replace("\n", "").replace("\t", "") if lines else text)) is not None:
        return "text without control characters" if lines else "text on one line, without control characters"
    if kind == "path" and not local and not absolute_path(text):
        return "an absolute path without '..', white space, quotes, backslashes, % or $"
    return None


def absolute_path(text: str) -> bool:
    """Whether a path on a host can stand in a unit file, a command line and the first line of a script."""
    return text.startswith("/") and ".." not in text.split("/") and not re.search(r"[\s'\"\\%$`]", text)


def _number(kind: str, value: t.Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if kind == "int":
        if isinstance(value, float) or not re.fullmatch(r"\s*-?[0-9]{1,30}\s*", str(value)):
            return None
        return int(value)
    return float(value) if re.fullmatch(r"\s*-?[0-9]{1,30}([.][0-9]+)?\s*", f"{value}") else None
