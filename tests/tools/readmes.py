# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The roles' READMEs, made from their argument specs and the page docs/roles/<role>.md; and the check for drift.

readmes.py            says what is out of date or does not agree, exit status 1
readmes.py --write    writes the READMEs
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import typing as t
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def plain(text: str) -> str:
    """Ansible's mark-up as Markdown."""
    text = re.sub(r"P\(baremetal\.kimi_k3\.(\w+)#role\)", r"[\1](../\1/README.md)", text)
    text = re.sub(r"P\(([\w.]+)#\w+\)", r"`\1`", text)
    text = re.sub(r"\b(?:O|V|RV|E|C|M)\(([^()]*(?:\([^()]*\))?[^()]*)\)", r"`\1`", text)
    return " ".join(text.split())


def sentence_list(value: str | list[str]) -> str:
    return " ".join(plain(part) for part in ([value] if isinstance(value, str) else value))


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def rows(options: dict[str, t.Any], prefix: str = "") -> list[str]:
    """Table rows of options, those of dictionaries below them."""
    lines = []
    for name, option in options.items():
        kind = option["type"] + (f" of {option['elements']}" if "elements" in option else "")
        if "choices" in option:
            kind += ": " + ", ".join(f"`{choice}`" for choice in option["choices"])
        default = option.get("default")
        told = (
            "" if default is None else f"`{default if isinstance(default, str) and default else json.dumps(default)}`"
        )
        if option.get("required"):
            told = "required"
        lines.append(f"| `{prefix}{name}` | {kind} | {cell(told)} | {cell(sentence_list(option['description']))} |")
        lines.extend(rows(option.get("options", {}), f"{prefix}{name}."))
    return lines


def readme(role: Path) -> str:
    specs = yaml.safe_load((role / "meta" / "argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]
    main = specs["main"]
    page = ROOT / "docs" / "roles" / f"{role.name}.md"
    parts = [
        f"<!-- Made by `make readmes` from meta/argument_specs.yml and docs/roles/{role.name}.md: edit those. -->",
        f"# Role {role.name}",
        f"{plain(main['short_description'])}.",
        *[
            plain(text)
            for text in ([main["description"]] if isinstance(main["description"], str) else main["description"])
        ],
    ]
    if page.is_file():
        parts.append(page.read_text(encoding="utf-8").strip().replace("<!-- checks -->", checks_table().strip()))
    parts.append("## Variables")
    table = ["| Variable | Type | Default | Meaning |", "|---|---|---|---|", *rows(main["options"])]
    parts.append("\n".join(table))
    others = [f"- `{name}`: {plain(spec['short_description'])}." for name, spec in specs.items() if name != "main"]
    if others:
        parts += ["## Other entry points (`tasks_from`)", "\n".join(others)]
    return "\n\n".join(parts) + "\n"


def checks_table() -> str:
    """The checks of role preflight, from the code that performs them."""
    sys.path.insert(0, str(ROOT / ".collections"))
    module = importlib.import_module("ansible_collections.baremetal.kimi_k3.plugins.module_utils.preflight")
    return module.table()


def disagreements(role: Path) -> list[str]:
    """Where defaults/main.yml and the argument spec do not say the same."""
    defaults = yaml.safe_load((role / "defaults" / "main.yml").read_text(encoding="utf-8")) or {}
    specs = yaml.safe_load((role / "meta" / "argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]
    options = specs["main"]["options"]
    found = [f"{role.name}: {name} is in defaults/main.yml only" for name in defaults if name not in options]
    for name, option in options.items():
        if not name.startswith(f"{role.name}_"):
            found.append(f"{role.name}: {name} lacks the role's prefix")
        if "default" not in option:
            if name in defaults:
                found.append(f"{role.name}: {name} has a default, which the spec does not tell")
        elif name not in defaults:
            found.append(f"{role.name}: {name} has a default in the spec only")
        elif option["default"] != defaults[name] and not option.get("no_log"):
            found.append(
                f"{role.name}: {name} is {defaults[name]!r} by default, but the spec says {option['default']!r}"
            )
    return found


def main() -> int:
    roles = sorted(path for path in (ROOT / "roles").iterdir() if (path / "meta" / "argument_specs.yml").is_file())
    found = []
    for role in roles:
        found += disagreements(role)
        target, text = role / "README.md", readme(role)
        if "--write" in sys.argv[1:]:
            target.write_text(text, encoding="utf-8")
        elif not target.is_file() or target.read_text(encoding="utf-8") != text:
            found.append(f"{target.relative_to(ROOT)} is out of date: run `make readmes`")
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
