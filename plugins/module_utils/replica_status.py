# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the ranks of a replica do, from what rank_info saw of each host: a document for programs, a screen for people.

Pure functions. Whatever a host said, or did not say, becomes a row; nothing here raises for an odd value.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import textwrap
import typing as t

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.launch import RANK_FLAGS

SCHEMA = 1
WIDTH = 80
# What all ranks of a replica must have in common, and how it is called.
COMMON = {
    "version": "vLLM",
    "lock": "the engine's lock",
    "arguments": "the arguments",
    "checkpoint_identity": "the checkpoint",
}


def arguments_digest(argv: t.Sequence[t.Any]) -> str | None:
    """A digest over the flags that must be equal on all ranks: not the program, the model's path and a rank's own."""
    words: list[str] = []
    skipping = False
    for word in map(str, list(argv)[3:]):
        if word.startswith("--"):
            skipping = word[2:].split("=", 1)[0] in RANK_FLAGS
        if not skipping:
            words.append(word)
    if not words:
        return None
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def _dict(value: t.Any) -> dict[str, t.Any]:
    return value if isinstance(value, dict) else {}


def _list(value: t.Any) -> list[t.Any]:
    return value if isinstance(value, list) else []


def plain(value: t.Any) -> str:
    """One line of printable characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())


def rails(fabric: t.Any) -> list[str] | None:
    """The rails that NCCL is given; None when role fabric has written nothing, empty when it found none."""
    if not isinstance(fabric, dict):
        return None
    return [name for name in str(fabric.get("NCCL_IB_HCA") or "").lstrip("=").split(",") if name]


def rank_row(rank: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """One host. C(rank): C(host), C(group), C(rank), and C(observed) as the task with rank_info registered it."""
    observed = _dict(rank.get("observed"))
    unit, status = _dict(observed.get("unit")), _dict(observed.get("status"))
    engine, checkpoint = _dict(observed.get("engine")), _dict(observed.get("checkpoint"))
    active = unit.get("active_state")
    ready = active == "active" and status.get("state") == "serving"
    problem = None
    if observed.get("unreachable"):
        state, problem = "unreachable", plain(observed.get("msg") or "no connection")
    elif not unit:
        state = "unknown"
        problem = plain(observed.get("msg") or "the host was left before it could be asked")
    elif unit.get("load_state") != "loaded" and not status:
        state = "not deployed"
    elif not status:
        state = plain(active or "unknown")
    elif status.get("state") == "serving" and not ready:
        # The status file outlives its agent.
        state = plain(active or "unknown")
        problem = f"its agent was serving when it last wrote its status, but the unit is {state}"
    else:
        state = plain(status.get("state") or "unknown")
    argv = _list(status.get("argv"))
    own = status if status else {}
    return {
        "host": str(rank.get("host")),
        "group": str(rank.get("group")),
        "rank": rank.get("rank"),
        "ready": ready,
        "state": state,
        "says": plain(own.get("text") or "") or None,
        "problem": problem,
        "generation": own.get("generation"),
        "since": own.get("since"),
        "unit": {name: unit.get(name) for name in ("active_state", "sub_state", "result", "restarts", "started")},
        "version": _dict(engine.get("versions")).get("vllm"),
        "versions": _dict(engine.get("versions")),
        "lock": engine.get("lock_digest"),
        "arguments": arguments_digest(argv),
        "configuration": own.get("configuration"),
        "command": shlex.join(map(str, argv)) or None,
        "checkpoint": {
            name: checkpoint.get(name) for name in ("repository", "revision", "scope", "stages", "bytes", "files")
        }
        if checkpoint
        else None,
        "checkpoint_identity": checkpoint.get("identity_digest"),
        "rails": rails(observed.get("fabric")),
        "last_failure": own.get("last_failure"),
    }


def name_of(row: t.Mapping[str, t.Any]) -> str:
    return f"rank {row['rank']} ({row['host']})"


def _order(row: t.Mapping[str, t.Any]) -> tuple[str, int, str]:
    rank = str(row["rank"])
    return row["group"], int(rank) if rank.isdigit() else 1 << 30, row["host"]


def _notes(rows: t.Sequence[t.Mapping[str, t.Any]]) -> list[str]:
    notes = []
    for row in rows:
        if row["problem"]:
            notes.append(f"{name_of(row)}: {row['problem']}")
        elif not row["ready"] and row["says"]:
            notes.append(f"{name_of(row)}: {row['says']}")
    for group in sorted({row["group"] for row in rows}):
        own = [row for row in rows if row["group"] == group]
        for key, words in COMMON.items():
            values = {str(row[key]) for row in own if row[key] is not None}
            if len(values) > 1:
                told = ", ".join(f"{name_of(row)} has {str(row[key])[:12]}" for row in own if row[key] is not None)
                notes.append(f"not the same on all hosts of {group}: {words} ({told})")
        generations = {str(row["generation"]) for row in own if row["ready"]}
        if len(generations) > 1:
            notes.append(f"the ranks of {group} serve different generations: {', '.join(sorted(generations))}")
    return notes


def document(ranks: t.Iterable[t.Mapping[str, t.Any]], time: str) -> dict[str, t.Any]:
    """What a program wants to know."""
    rows = sorted((rank_row(rank) for rank in ranks), key=_order)
    serving = [row for row in rows if row["ready"]]
    return {
        "schema": SCHEMA,
        "time": time,
        "ready": bool(rows) and len(serving) == len(rows),
        "ranks": len(rows),
        "ready_ranks": len(serving),
        "groups": {
            group: all(row["ready"] for row in rows if row["group"] == group)
            for group in sorted({row["group"] for row in rows})
        },
        "rows": rows,
        "notes": _notes(rows),
    }


def verdict(told: t.Mapping[str, t.Any]) -> str:
    """One sentence that says whether it serves, and if not, which rank does not."""
    groups = ", ".join(told["groups"]) or "no group"
    if told["ready"]:
        generations = sorted({str(row["generation"]) for row in told["rows"]})
        return f"READY: all {told['ranks']} ranks of {groups} serve, generation {', '.join(generations)}."
    away = "; ".join(f"{name_of(row)} is {row['state']}" for row in told["rows"] if not row["ready"])
    return f"NOT READY: {told['ready_ranks']} of {told['ranks']} ranks of {groups} serve. {away or 'Nobody was asked'}."


def cut(value: t.Any, width: int) -> str:
    """Exactly so wide; what is cut ends in two dots."""
    text = "-" if value is None or value == "" else plain(value)
    return text.ljust(width) if len(text) <= width else text[: width - 2] + ".."


def _held(row: t.Mapping[str, t.Any]) -> str | None:
    checkpoint = row["checkpoint"]
    if not checkpoint:
        return None
    words = [f"{checkpoint['repository']}@{str(checkpoint['revision'])[:8]}"]
    stages = ",".join(str(stage) for stage in _list(checkpoint["stages"]))
    words.append(f"stage {stages}" if checkpoint["scope"] == "stage" and stages else str(checkpoint["scope"]))
    if isinstance(checkpoint["bytes"], int):
        words.append(f"{checkpoint['bytes'] / 1e9:.1f} GB")
    return " ".join(words)


def _rails(row: t.Mapping[str, t.Any]) -> str | None:
    if row["rails"] is None:
        return None
    return str(len(row["rails"])) if row["rails"] else "none"


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(plain(f"{head} {text}"), WIDTH, initial_indent="  ", subsequent_indent="     ")


def screen(told: t.Mapping[str, t.Any]) -> list[str]:
    """Lines of at most 80 columns."""
    rows = told["rows"]
    lines = textwrap.wrap(verdict(told), WIDTH)
    if rows:
        lines += ["", f"RANK {cut('HOST', 22)} {cut('STATE', 12)} {cut('GEN', 5)} {cut('SINCE', 20)} VLLM"]
        for row in rows:
            place = f"{cut(row['rank'], 4)} {cut(row['host'], 22)} {cut(row['state'], 12)}"
            lines.append(
                f"{place} {cut(row['generation'], 5)} {cut(row['since'], 20)} {cut(row['version'], 12)}".rstrip()
            )
        lines += ["", f"RANK {cut('ARGUMENTS', 12)} {cut('CHECKPOINT', 55)} RAILS"]
        for row in rows:
            digest = row["arguments"] and row["arguments"][:12]
            lines.append(
                f"{cut(row['rank'], 4)} {cut(digest, 12)} {cut(_held(row), 55)} {cut(_rails(row), 6)}".rstrip()
            )
    failures = [row for row in rows if row["last_failure"]]
    if failures:
        lines += ["", "LAST FAILURE"]
        for row in failures:
            failure = _dict(row["last_failure"]) or {"cause": row["last_failure"]}
            when = f"{failure.get('when', '-')}, generation {failure.get('generation', '-')}:"
            lines += _wrapped(f"rank {row['rank']}, {when}", str(failure.get("cause", "-")))
    if told["notes"]:
        lines += ["", "NOTES"]
        for note in told["notes"]:
            lines += _wrapped("", note)
    return lines
