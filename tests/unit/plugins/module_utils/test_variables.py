# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever is written behind a variable of any role: one sentence that names it, or a value that its kind allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import variables

ROOT = Path(__file__).resolve().parents[4]
ROLES = ["cuda", "fabric", "vllm", "checkpoint", "preflight", "serve"]


def options_of(role: str) -> dict[str, Any]:
    text = (ROOT / "roles" / role / "meta" / "argument_specs.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["argument_specs"]["main"]["options"]


OPTIONS = [(name, option) for role in ROLES for name, option in options_of(role).items()]


def test_unknown_variables_are_named_with_what_was_meant():
    names = ["serve_rank", "serve_modle", "ansible_host", "serve_zzzzzz", "vllm_lokc", "__serve_x"]
    assert variables.unknown_variables(names, "serve", ["serve_rank", "serve_model"]) == [
        "'serve_modle' is no variable of role serve: did you mean serve_model?",
        "'serve_zzzzzz' is no variable of role serve: see the README of role serve.",
    ]


@pytest.mark.parametrize("role", ROLES)
def test_the_defaults_of_a_role_fit_what_it_declares(role):
    for name, option in options_of(role).items():
        if "default" in option and "{{" not in str(option["default"]):
            assert variables.value_error(name, option, option["default"]) is None


WRONG: dict[str, list[Any]] = {
    "int": ["x", "", "1.5", 1.5, True, [], {}, -2, "-2", 10**18, "٣", "1 2", float("nan")],
    "float": ["x", "", True, [], {}, -2, float("inf"), float("nan"), "1e3"],
    "bool": ["maybe", "", 2, [], {}],
    "list": ["", "a,b", 5, {}, True],
    "dict": ["", "a=b", 5, [], True],
    "str": [[], {}, True, "two\nlines", "nul\0", "escape\x1b[2J", "line\u2028separator"],
    "path": [[], {}, True, "relative", "/up/../etc", "/a b", "/a\n", "/a%n", "/a$HOME", "/a'b", '/a"b', "/a\\b", "~/x"],
}


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=[name for name, _option in OPTIONS])
def test_every_variable_refuses_what_is_not_of_its_kind(name, option):
    kind = "choice" if option.get("choices") else option.get("type", "str")
    for value in WRONG.get(kind, ["none of them", [], {}] if kind == "choice" else []):
        if value == "" and option.get("default") == "":
            continue
        if value == -2 and isinstance(option.get("default"), int) and option["default"] < 0:
            continue
        sentence = variables.value_error(name, option, value)
        assert sentence is not None, value
        assert sentence.startswith(name)
        assert sentence.endswith(".")
        assert sentence.isprintable()
    nothing = variables.value_error(name, option, None)
    assert (nothing is None) == ("default" not in option)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ({"type": "int"}, "8"),
        ({"type": "int"}, 0),
        ({"type": "int", "default": -1}, -1),
        ({"type": "float"}, "0.5"),
        ({"type": "bool"}, "yes"),
        ({"type": "bool"}, False),
        ({"type": "str"}, 580),
        ({"type": "str"}, "ünï $x 100%"),
        ({"type": "path", "default": ""}, ""),
        ({"type": "path"}, "/srv/ünï-1.2_x"),
        ({"type": "list", "elements": "int"}, ["47", 46]),
        ({"type": "list", "elements": "int"}, []),
        ({"type": "dict"}, {"a": None}),
        ({"type": "raw"}, True),
    ],
)
def test_what_means_the_same_is_taken(option, value):
    assert variables.value_error("x", {"default": "x", **option}, value) is None


@pytest.mark.parametrize(
    ("name", "option", "value", "sentence"),
    [
        ("serve_layers", {"type": "int"}, "x", "serve_layers is 'x': it must be a whole number from 0."),
        ("a_port", {"type": "int"}, 70000, "a_port is '70000': it must be a TCP port, 1 to 65535."),
        (
            "a_ports",
            {"type": "list", "elements": "int"},
            [0],
            "a_ports is '[0]': each of its items must be a TCP port, 1 to 65535.",
        ),
        (
            "a_timeout",
            {"type": "int"},
            10**12,
            "a_timeout is '1000000000000': it must be a whole number from 0 to 1000000000.",
        ),
        ("a", {"type": "list", "elements": "str"}, "b", "a is 'b': it must be a list of texts."),
        (
            "a",
            {"type": "list", "elements": "str"},
            [None],
            "a is '[None]': each of its items must be text (in quotes).",
        ),
        ("a", {"choices": ["auto", "no"]}, True, "a is 'True': it must be auto or no."),
        ("a", {"type": "dict", "default": {}}, None, "a is set to nothing: give it a dictionary, or remove it."),
    ],
)
def test_the_sentence_says_what_is_wanted(name, option, value, sentence):
    assert variables.value_error(name, option, value) == sentence


def test_code_has_lines_and_a_path_of_the_controller_may_be_relative():
    assert variables.value_error("x", {"type": "str"}, "import a\n\timport b\n", lines=True) is None
    assert variables.value_error("x", {"type": "str"}, "a\0", lines=True)
    assert variables.value_error("x", {"type": "path"}, "keys/my key.asc", local=True) is None


@pytest.mark.parametrize("kind", ["str", "list", "dict", "int"])
@pytest.mark.parametrize("value", ["secret\nx", ["secret\n"], {"secret": 1}])
def test_no_sentence_shows_a_secret(kind, value):
    sentence = variables.value_error("x", {"type": kind, "elements": "str", "no_log": True, "default": ""}, value)
    assert sentence is None or "secret" not in sentence
