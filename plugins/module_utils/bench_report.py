# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What was measured, as a record, as a report, and against other records: all but `draw` are pure functions, no I/O.

A report is a list of blocks, from which both Markdown and HTML are made, so that they cannot disagree.
"""

from __future__ import annotations

import base64
import html
import io
import math
import shlex
import statistics
import typing as t

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.bench import LATENCIES, BenchError

SCHEMA = 1
NO_MATPLOTLIB = (
    "Plots need matplotlib in the Python that runs ansible-playbook, and it is not there: install it with pip install "
    "-r requirements-bench.txt, or set bench_plots to false."
)
#: Figure, title, and whether more of it is better.
METRICS: dict[str, tuple[str, bool]] = {
    "output_throughput": ("Generation, tok/s", True),
    "per_user_throughput": ("Per user, tok/s", True),
    "total_token_throughput": ("Total, tok/s", True),
    **{
        f"{kind}_{name}_ms": (f"{title} {'mean' if kind == 'mean' else 'P99'}, ms", False)
        for name, title in LATENCIES.items()
        for kind in ("mean", "p99")
    },
}
#: Below this many runs on a side a difference says little.
ENOUGH = 3
# Student's t for 95 % on both sides, by degrees of freedom from 1; beyond, the normal distribution is near enough.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL = 1.96
_POINTS = 400

#: One piece of a report: its kind and what the kind needs.
Block = tuple[str, t.Any]


# The record


def hardware(gpu: t.Mapping[str, t.Any], rdma: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """Of what C(gpu_info) and C(rdma_info) say, what a reader of the report asks for."""
    names: dict[str, int] = {}
    for one in gpu.get("gpus") or []:
        name = str(one.get("name"))
        names[name] = names.get(name, 0) + 1
    smi = gpu.get("smi") or {}
    verdict = rdma.get("verdict") or {}
    rails = verdict.get("rails") or []
    return {
        "gpus": names,
        "driver": smi.get("driver"),
        "cuda": smi.get("cuda"),
        "system": gpu.get("system") or {},
        "rails": [f"{rail.get('device')}:{rail.get('port')}" for rail in rails],
        "rail_rates": sorted({rail["rate"] for rail in rails if rail.get("rate")}),
        "rdma_stack": rdma.get("stack") or {},
        "virtualization": rdma.get("virtualization"),
    }


def host_record(facts: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """One host: what served there, started how, from which checkpoint, on what."""
    seen = facts.get("rank") or {}
    status = seen.get("status") or {}
    engine = seen.get("engine") or {}
    return {
        "rank": facts.get("number"),
        "state": status.get("state"),
        "generation": status.get("generation"),
        "versions": engine.get("versions") or {},
        "lock": engine.get("lock_digest"),
        "command": [str(word) for word in status.get("argv") or []],
        "configuration": status.get("configuration"),
        "checkpoint": seen.get("checkpoint"),
        "fabric": seen.get("fabric"),
        "hardware": hardware(facts.get("gpu") or {}, facts.get("rdma") or {}),
    }


def record(
    about: t.Mapping[str, t.Any], hosts: t.Mapping[str, t.Any], measured: t.Mapping[str, t.Any]
) -> dict[str, t.Any]:
    """The content of C(bench.json)."""
    kept = ("workload", "repetition", "seed", "file", "command", "started", "seconds", "figures")
    return {
        "schema": SCHEMA,
        **about,
        "seed": measured["seed"],
        "workloads": measured["workloads"],
        "runs": [{key: run[key] for key in kept} for run in measured["runs"]],
        "warnings": list(measured.get("warnings") or []),
        "machine": measured["machine"],
        "hosts": {name: host_record(facts) for name, facts in hosts.items()},
    }


def read_record(document: t.Any, where: str) -> dict[str, t.Any]:
    """A record that can be worked with."""
    if not isinstance(document, dict) or "schema" not in document:
        raise BenchError(f"{where} is no record of a benchmark.")
    if document["schema"] != SCHEMA:
        raise BenchError(f"{where} has schema {document['schema']}, and this release of the collection knows {SCHEMA}.")
    missing = [key for key in ("name", "workloads", "runs", "hosts") if key not in document]
    if missing:
        raise BenchError(f"{where} is incomplete: it has no {', '.join(missing)}.")
    if not document["runs"]:
        raise BenchError(f"{where} has no run.")
    return document


# Figures


def values(document: t.Mapping[str, t.Any], workload: str, metric: str) -> list[float]:
    """A figure of every run of a workload."""
    return [float(run["figures"][metric]) for run in document["runs"] if run["workload"] == workload]


def spread(numbers: t.Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation; no deviation of a single run."""
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None


def number(value: float) -> str:
    """Three digits or so, as figures of this kind deserve."""
    size = abs(value)
    return (
        f"{value:,.0f}"
        if size >= 1000
        else f"{value:.0f}"
        if size >= 100
        else f"{value:.1f}"
        if size >= 10
        else f"{value:.2f}"
    )


def told(numbers: t.Sequence[float]) -> str:
    mean, deviation = spread(numbers)
    return number(mean) if deviation is None else f"{number(mean)} ± {number(deviation)}"


def student(freedom: float) -> float:
    whole = max(1, math.floor(freedom))
    return _STUDENT[whole - 1] if whole <= len(_STUDENT) else _NORMAL + 2.4 / whole


def noise(one: t.Sequence[float], other: t.Sequence[float]) -> float | None:
    """Half of the 95 % confidence interval of the difference of means (Welch); nothing when a side has one run."""
    if min(len(one), len(other)) < 2:
        return None
    parts = [(statistics.variance(side) / len(side), len(side) - 1) for side in (one, other)]
    total = sum(part for part, _freedom in parts)
    if not total:
        return 0.0
    freedom = total**2 / sum(part**2 / freedom for part, freedom in parts)
    return student(freedom) * math.sqrt(total)


# Blocks


def markdown(blocks: t.Iterable[Block]) -> str:
    lines: list[str] = []
    for kind, what in blocks:
        if kind == "title":
            lines += [f"# {what}", ""]
        elif kind == "heading":
            lines += [f"## {what}", ""]
        elif kind == "text":
            lines += [_mark(what), ""]
        elif kind == "warning":
            lines += [f"> **{_mark(what)}**", ""]
        elif kind == "code":
            lines += ["```sh", what, "```", ""]
        elif kind == "table":
            head, rows = what
            lines += ["| " + " | ".join(_mark(cell) for cell in head) + " |"]
            lines += ["| " + " | ".join(["---"] + ["---:"] * (len(head) - 1)) + " |"]
            lines += ["| " + " | ".join(_mark(cell) for cell in row) + " |" for row in rows]
            lines += [""]
        elif kind == "plot":
            # Pictures are in the HTML page alone, which needs no file beside it.
            lines += [f"*{what[0]}: in the page beside this file.*", ""]
    return "\n".join(lines).rstrip() + "\n"


def _mark(text: str) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:#1c2330;background:#fff;margin:0 auto;
max-width:1080px;padding:32px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 8px}
h2{font-size:18px;margin:36px 0 10px;padding-bottom:4px;border-bottom:1px solid #dde2ea}
p{margin:8px 0}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;margin:12px 0;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px;border-bottom:1px solid #e6eaf0;text-align:right;vertical-align:top}
th{font-weight:600;color:#4a5568;background:#f5f7fa;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
td{overflow-wrap:anywhere}
tr:last-child td{border-bottom:2px solid #dde2ea}
pre{background:#f5f7fa;border:1px solid #e6eaf0;border-radius:6px;padding:12px 14px;white-space:pre-wrap;
overflow-wrap:anywhere;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.warning{background:#fff6e0;border-left:4px solid #d99a00;padding:8px 14px;border-radius:0 6px 6px 0}
.better{color:#11733a;font-weight:600}.worse{color:#b3261e;font-weight:600}
figure{margin:16px 0}img{max-width:100%;height:auto}
"""


def page(title: str, blocks: t.Iterable[Block]) -> str:
    """One file that needs no other, and runs nothing."""
    body: list[str] = []
    for kind, what in blocks:
        if kind == "title":
            body.append(f"<h1>{html.escape(what)}</h1>")
        elif kind == "heading":
            body.append(f"<h2>{html.escape(what)}</h2>")
        elif kind == "text":
            body.append(f"<p>{html.escape(what)}</p>")
        elif kind == "warning":
            body.append(f'<p class="warning">{html.escape(what)}</p>')
        elif kind == "code":
            body.append(f"<pre>{html.escape(what)}</pre>")
        elif kind == "table":
            head, rows = what
            cells = "".join(f"<th>{html.escape(str(cell))}</th>" for cell in head)
            lines = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
            body.append(f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>')
        elif kind == "plot":
            name, picture = what
            data = base64.b64encode(picture).decode()
            body.append(f'<figure><img alt="{html.escape(name)}" src="data:image/svg+xml;base64,{data}"></figure>')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _cell(cell: t.Any) -> str:
    text = str(cell)
    kind = f' class="{text}"' if text in ("better", "worse") else ""
    return f"<td{kind}>{html.escape(text)}</td>"


# The report


def shape(workload: t.Mapping[str, t.Any]) -> str:
    """A workload in words."""
    lengths = (
        f"{workload['input_len']} in / {workload['output_len']} out"
        if workload["input_len"] and workload["output_len"]
        else "lengths of the data"
    )
    at_once = f"{workload['concurrency']} at a time" if int(workload["concurrency"]) else "all at a time"
    pace = "" if str(workload["rate"]) == "inf" else f", {workload['rate']} requests/s"
    return f"{workload['dataset']}, {lengths}, {workload['prompts']} prompts, {at_once}{pace}"


def titled(document: t.Mapping[str, t.Any]) -> str:
    return f"{document.get('model') or 'Model'}: {document['name']}"


def report(document: t.Mapping[str, t.Any], plots: t.Iterable[tuple[str, bytes]]) -> list[Block]:
    """The whole report of one folder."""
    several = any(run["repetition"] > 1 for run in document["runs"])
    blocks: list[Block] = [("title", titled(document)), ("text", _lead(document))]
    blocks += [("warning", text) for text in document["warnings"]]
    measured = [
        workload for workload in document["workloads"] if values(document, workload["name"], "output_throughput")
    ]
    blocks += [
        ("heading", "Throughput"),
        (
            "table",
            (
                ["Workload", "Concurrency", "Generation, tok/s", "Per user, tok/s", "Total, tok/s", "Requests/s"],
                [
                    [
                        workload["name"],
                        str(workload["concurrency"] or "all"),
                        *(
                            told(values(document, workload["name"], metric))
                            for metric in (
                                "output_throughput",
                                "per_user_throughput",
                                "total_token_throughput",
                                "request_throughput",
                            )
                        ),
                    ]
                    for workload in measured
                ],
            ),
        ),
        ("heading", "Latency (mean / P99 in ms)"),
        (
            "table",
            (
                ["Workload", *LATENCIES.values()],
                [
                    [
                        workload["name"],
                        *(
                            " / ".join(
                                number(spread(values(document, workload["name"], f"{kind}_{name}_ms"))[0])
                                for kind in ("mean", "p99")
                            )
                            for name in LATENCIES
                        ),
                    ]
                    for workload in measured
                ],
            ),
        ),
        (
            "text",
            "Per user is generation divided by concurrency. TTFT is the time to the first token, ITL that between two "
            "pieces of an answer, TPOT the time per token after the first, E2E that of a whole request, "
            "each as the client saw it."
            + (" Figures are means over the runs; ± is their standard deviation." if several else ""),
        ),
    ]
    blocks += [("plot", plot) for plot in plots]
    return [*blocks, *_workloads(document), *_runs(document), *_hosts(document)]


def _lead(document: t.Mapping[str, t.Any]) -> str:
    hosts = document["hosts"].values()
    gpus: dict[str, int] = {}
    for host in hosts:
        for name, count in host["hardware"]["gpus"].items():
            gpus[name] = gpus.get(name, 0) + count
    what = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
    version = next((host["versions"].get("vllm") for host in hosts if host["versions"].get("vllm")), "unknown")
    replica = document.get("replica") or {}
    return (
        f"Measured {document.get('started', '')} on {len(document['hosts'])} hosts ({what}) with vLLM {version}, "
        f"TP={replica.get('tensor_parallel')} within a host and PP={replica.get('pipeline_parallel')} over the hosts, "
        f"from {document.get('host')}."
    )


def _workloads(document: t.Mapping[str, t.Any]) -> list[Block]:
    blocks: list[Block] = [("heading", "Workloads and commands")]
    for workload in document["workloads"]:
        blocks.append(("text", f"{workload['name']}: {shape(workload)}."))
        first = next((run for run in document["runs"] if run["workload"] == workload["name"]), None)
        if first:
            blocks.append(("code", command_text(first["command"])))
    if len(document["runs"]) > len(document["workloads"]):
        blocks.append(
            ("text", "Further runs differ in seed and file alone: equal prompts would come from the prefix cache.")
        )
    return blocks


def command_text(command: t.Sequence[str]) -> str:
    """A command with an option a line."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n  ".join(shlex.join(line) for line in lines)


def _runs(document: t.Mapping[str, t.Any]) -> list[Block]:
    head = ["Run", "Started", "Seed", "Requests", "Duration, s", "Generation, tok/s", "TTFT mean, ms", "ITL mean, ms"]
    rows = []
    for run in document["runs"]:
        figures = run["figures"]
        rows.append(
            [
                f"{run['workload']} {run['repetition']}",
                run["started"],
                str(run["seed"]),
                str(int(figures["completed"])),
                *(number(figures[key]) for key in ("duration", "output_throughput", "mean_ttft_ms", "mean_itl_ms")),
            ]
        )
    return [("heading", "Runs"), ("table", (head, rows))]


def _hosts(document: t.Mapping[str, t.Any]) -> list[Block]:
    hosts = sorted(document["hosts"].items(), key=lambda item: (item[1]["rank"] is None, item[1]["rank"], item[0]))
    rows = [["Rank", *(str(host["rank"]) for _name, host in hosts)]]
    for title, tell in _ABOUT_HOSTS:
        cells = [tell(host) for _name, host in hosts]
        if any(cells):
            rows.append([title, *(cell or "none" for cell in cells)])
    blocks: list[Block] = [("heading", "Hosts"), ("table", (["", *(name for name, _host in hosts)], rows))]
    machine = document.get("machine") or {}
    if machine.get("processor"):
        blocks.append(
            (
                "text",
                f"{document.get('host')}, which measured: {machine['processors']} processors ({machine['processor']}), "
                f"{machine['memory_gib']} GiB of memory.",
            )
        )
    for name, host in hosts:
        if host["command"]:
            blocks += [("text", f"{name} serves with:"), ("code", command_text(host["command"]))]
    return blocks


def _pairs(mapping: t.Mapping[str, t.Any] | None, between: str = " ") -> str:
    return ", ".join(f"{key}{between}{value}" for key, value in sorted((mapping or {}).items()) if value)


def _checkpoint(host: t.Mapping[str, t.Any]) -> str:
    held = host["checkpoint"] or {}
    return _pairs({key: held.get(key) for key in ("repository", "revision", "scope", "identity_digest")})


_ABOUT_HOSTS: tuple[tuple[str, t.Callable[[t.Mapping[str, t.Any]], str]], ...] = (
    ("GPUs", lambda host: ", ".join(f"{count} x {name}" for name, count in host["hardware"]["gpus"].items())),
    ("Driver", lambda host: _pairs({"driver": host["hardware"]["driver"], "CUDA": host["hardware"]["cuda"]})),
    ("System", lambda host: _pairs(host["hardware"]["system"])),
    ("Rails", lambda host: ", ".join(host["hardware"]["rails"])),
    ("NCCL and Gloo", lambda host: _pairs(host["fabric"], "=")),
    ("Versions", lambda host: _pairs(host["versions"])),
    ("Engine's lock", lambda host: host["lock"] or ""),
    ("Checkpoint", _checkpoint),
    ("Configuration", lambda host: host["configuration"] or ""),
)


# The comparison


def facts_of(document: t.Mapping[str, t.Any]) -> dict[str, str]:
    """What may explain a difference, by rank and not by name, so that two pairs of hosts can be compared."""
    found = {f"replica {key}": str(value) for key, value in (document.get("replica") or {}).items() if key != "group"}
    found["host that measures"] = _pairs(document.get("machine"))
    for host in document["hosts"].values():
        place = f"rank {host['rank']}"
        for title, tell in _ABOUT_HOSTS:
            if title != "Configuration":
                found[f"{place}: {title}"] = tell(host)
        found[f"{place}: command"] = shlex.join(host["command"])
    return found


def differing(one: t.Mapping[str, t.Any], other: t.Mapping[str, t.Any]) -> list[tuple[str, str, str]]:
    """Facts that are not the same; of commands only the words that differ."""
    mine, theirs = facts_of(one), facts_of(other)
    rows = []
    for key in dict.fromkeys([*mine, *theirs]):
        left, right = mine.get(key, ""), theirs.get(key, "")
        if left == right:
            continue
        if key.endswith(": command"):
            left, right = _only(left, right), _only(right, left)
            if not left and not right:
                left = right = "the same options in another order"
        rows.append((key, left or "none", right or "none"))
    return rows


def _options(command: str) -> list[str]:
    lines: list[list[str]] = [[]]
    for word in shlex.split(command):
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(line) for line in lines if line]


def _only(mine: str, theirs: str) -> str:
    others = _options(theirs)
    return " ".join(option for option in _options(mine) if option not in others)


def workload_differences(one: t.Mapping[str, t.Any], other: t.Mapping[str, t.Any]) -> list[str]:
    """Why two workloads of one name cannot be compared; empty when they can."""
    keys = [key for key in dict.fromkeys([*one, *other]) if key != "name" and one.get(key) != other.get(key)]
    return [f"{key} is {one.get(key)} and {other.get(key)}" for key in keys]


def compare(one: t.Mapping[str, t.Any], other: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """Each workload of both: rows of figures, or why there are none. Raises when nothing can be compared."""
    mine = {workload["name"]: workload for workload in one["workloads"]}
    theirs = {workload["name"]: workload for workload in other["workloads"]}
    found: list[dict[str, t.Any]] = []
    for name in dict.fromkeys([*mine, *theirs]):
        if name not in mine or name not in theirs:
            where = one["name"] if name in mine else other["name"]
            found.append({"workload": name, "reason": f"only {where} has it", "rows": [], "few": False})
            continue
        reasons = workload_differences(mine[name], theirs[name])
        if reasons:
            found.append({"workload": name, "reason": "; ".join(reasons), "rows": [], "few": False})
            continue
        rows = [compare_figures(values(one, name, key), values(other, name, key), key) for key in METRICS]
        few = min(rows[0]["runs"]) < ENOUGH
        found.append({"workload": name, "reason": "", "rows": rows, "few": few})
    if all(entry["reason"] for entry in found):
        why = "; ".join(f"'{entry['workload']}': {entry['reason']}" for entry in found)
        raise BenchError(f"{one['name']} and {other['name']} have no workload in common that can be compared: {why}.")
    return found


def compare_figures(one: t.Sequence[float], other: t.Sequence[float], metric: str) -> dict[str, t.Any]:
    """A figure on both sides: difference and noise in percent of the first, and what to think of it."""
    title, more = METRICS[metric]
    mine, theirs = statistics.fmean(one), statistics.fmean(other)
    band = noise(one, other)
    percent = (theirs - mine) / mine * 100 if mine else None
    width = band / mine * 100 if mine and band is not None else None
    if percent is None:
        verdict = "no base"
    elif width is None:
        verdict = "noise unknown"
    elif abs(percent) <= width:
        verdict = "within noise"
    else:
        verdict = "better" if (percent > 0) == more else "worse"
    return {
        "metric": metric,
        "title": title,
        "one": told(one),
        "other": told(other),
        "percent": percent,
        "noise": width,
        "verdict": verdict,
        "runs": (len(one), len(other)),
    }


def comparison(documents: t.Sequence[t.Mapping[str, t.Any]]) -> list[Block]:
    """The whole page: every further record against the first."""
    first = documents[0]
    blocks: list[Block] = [("title", "Comparison of benchmarks")]
    for other in documents[1:]:
        blocks += _comparison_of_two(first, other)
    blocks.append(
        (
            "text",
            "The difference is that of the means, in percent of the first. Its noise is half of the 95 % confidence "
            "interval of that difference (Welch), from the repetitions of both; below it, it may be chance. "
            "Of twenty figures that do not differ at all, one is above it.",
        )
    )
    return blocks


def _comparison_of_two(one: t.Mapping[str, t.Any], other: t.Mapping[str, t.Any]) -> list[Block]:
    blocks: list[Block] = [
        ("heading", f"{one['name']} → {other['name']}"),
        ("text", f"Measured {one.get('started', '')} and {other.get('started', '')}."),
    ]
    for entry in compare(one, other):
        name = entry["workload"]
        if entry["reason"]:
            blocks.append(("warning", f"Workload {name} is not compared: {entry['reason']}."))
            continue
        runs = entry["rows"][0]["runs"]
        blocks.append(("text", f"Workload {name}, {runs[0]} and {runs[1]} runs:"))
        if entry["few"]:
            blocks.append(("warning", few_runs(min(runs))))
        rows = [
            [row["title"], row["one"], row["other"], signed(row["percent"]), plus_minus(row["noise"]), row["verdict"]]
            for row in entry["rows"]
        ]
        blocks.append(("table", (["", one["name"], other["name"], "Difference", "Noise", "Verdict"], rows)))
    rest = differing(one, other)
    if rest:
        blocks += [
            ("text", "What else differs:"),
            ("table", (["", one["name"], other["name"]], [list(row) for row in rest])),
        ]
    else:
        blocks.append(("text", "Versions, commands, checkpoint, fabric and hardware are the same."))
    return blocks


def signed(percent: float | None) -> str:
    return "" if percent is None else f"{percent:+.1f} %"


def plus_minus(percent: float | None) -> str:
    return "unknown" if percent is None else f"± {percent:.1f} %"


def compared_lines(documents: t.Sequence[t.Mapping[str, t.Any]]) -> list[str]:
    """The comparison for a terminal."""
    lines = []
    for other in documents[1:]:
        lines.append(f"{documents[0]['name']} → {other['name']}")
        for entry in compare(documents[0], other):
            if entry["reason"]:
                lines.append(f"{entry['workload']} is not compared: {entry['reason']}")
                continue
            lines += [
                f"{entry['workload']}: {row['title']}: {row['one']} → {row['other']} "
                f"({signed(row['percent'])}, noise {plus_minus(row['noise'])}): {row['verdict']}"
                for row in entry["rows"]
            ]
            if entry["few"]:
                lines.append(f"{entry['workload']}: {few_runs(min(entry['rows'][0]['runs']))}")
    return lines


def few_runs(runs: int) -> str:
    """What to think of so few repetitions."""
    what = (
        "One run says nothing about noise: no difference here can be told from chance."
        if runs < 2
        else f"With fewer than {ENOUGH} runs on a side the noise is hardly known: only large differences stand out."
    )
    return f"{what} Measure with bench_repetitions of {ENOUGH} or more."


def lines_of(document: t.Mapping[str, t.Any]) -> list[str]:
    """The report for a terminal."""
    lines = list(document["warnings"])
    for workload in document["workloads"]:
        name = workload["name"]
        figures = [f"{METRICS[key][0]} {told(values(document, name, key))}" for key in list(METRICS)[:3]]
        latencies = [
            f"{title} {number(spread(values(document, name, f'mean_{key}_ms'))[0])}"
            f" / {number(spread(values(document, name, f'p99_{key}_ms'))[0])}"
            for key, title in LATENCIES.items()
        ]
        lines.append(f"{name} ({shape(workload)}): {'; '.join(figures)}; mean / P99 in ms: {', '.join(latencies)}")
    return lines


# Plots


def series(document: t.Mapping[str, t.Any]) -> list[tuple[str, list[tuple[int, str]]]]:
    """Workloads that differ in concurrency and number of prompts alone, as lines: label, (concurrency, workload)."""
    lines: dict[str, list[tuple[int, str]]] = {}
    for workload in document["workloads"]:
        if not int(workload["concurrency"]):
            continue
        alike = {key: value for key, value in workload.items() if key not in ("name", "concurrency", "prompts")}
        lines.setdefault(str(sorted(alike.items(), key=str)), []).append(
            (int(workload["concurrency"]), workload["name"])
        )
    named = []
    for points in lines.values():
        workload = next(one for one in document["workloads"] if one["name"] == points[0][1])
        label = ", ".join(shape(workload).split(", ")[:2])
        named.append((label, sorted(points)))
    return named


def samples(result: t.Mapping[str, t.Any]) -> dict[str, list[float]]:
    """Latencies of one run in milliseconds, those of requests and, for ITL, of pieces of answers."""
    first, gaps, whole = result.get("ttfts") or [], result.get("itls") or [], result.get("latencies") or []
    lengths = result.get("output_lens") or []
    if not whole:
        whole = [start + sum(rest) for start, rest in zip(first, gaps, strict=False)]
    return {
        "ttft": [1000 * value for value in first],
        "itl": [1000 * value for rest in gaps for value in rest],
        "tpot": [
            1000 * (end - start) / (length - 1)
            for end, start, length in zip(whole, first, lengths, strict=False)
            if length and length > 1
        ],
        "e2el": [1000 * value for value in whole],
    }


def shares(numbers: t.Iterable[float], points: int = _POINTS) -> tuple[list[float], list[float]]:
    """The cumulative distribution, thinned out: values, and the share of all that is not above each."""
    ordered = sorted(numbers)
    if not ordered:
        return [], []
    count = len(ordered)
    # Both ends are kept whatever is thinned out: the tail is what people look for.
    places = sorted(
        {round(step * (count - 1) / min(points, count)) for step in range(min(points, count) + 1)} | {0, count - 1}
    )
    return [ordered[place] for place in places], [(place + 1) / count for place in places]


def draw(
    document: t.Mapping[str, t.Any], pooled: t.Mapping[str, t.Mapping[str, t.Sequence[float]]]
) -> list[tuple[str, bytes]]:
    """The plots as SVG, each with its name; C(pooled) is C(samples) by workload."""
    try:
        import matplotlib as mpl  # noqa: PLC0415
    except ImportError:
        raise BenchError(NO_MATPLOTLIB) from None
    mpl.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    # The same figures make the same file.
    plt.rcParams.update(
        {"svg.hashsalt": "kimi-k3", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    plots = []
    lines = [(label, points) for label, points in series(document) if len(points) > 1]
    if lines:
        figure, axes = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
        for label, points in lines:
            for axis, metrics in zip(
                axes, (("output_throughput", "total_token_throughput"), ("per_user_throughput",)), strict=False
            ):
                for metric, style in zip(metrics, ("-", "--"), strict=False):
                    seen = [spread(values(document, name, metric)) for _users, name in points]
                    axis.errorbar(
                        [users for users, _name in points],
                        [mean for mean, _deviation in seen],
                        yerr=[deviation or 0 for _mean, deviation in seen],
                        fmt=f"o{style}",
                        capsize=3,
                        label=f"{METRICS[metric][0].partition(',')[0]}: {label}",
                    )
        for axis in axes:
            axis.set_xscale("log", base=2)
            ticks = sorted({users for _label, points in lines for users, _name in points})
            axis.set_xticks(ticks, [str(users) for users in ticks])
            axis.set_xlabel("Concurrent requests")
            axis.set_ylabel("tok/s")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8, frameon=False)
        figure.suptitle("Throughput against concurrency")
        plots.append(("Throughput against concurrency", _svg(plt, figure)))
    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7), layout="constrained")
    for axis, (key, title) in zip(axes.flat, LATENCIES.items(), strict=False):
        for workload in document["workloads"]:
            found, part = shares(pooled.get(workload["name"], {}).get(key, ()))
            if found:
                axis.plot(found, [100 * value for value in part], label=workload["name"])
        drawn = [value for line in axis.get_lines() for value in line.get_xdata()]
        if drawn and min(drawn) > 0 and max(drawn) > 20 * min(drawn):
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _place: f"{value:g}"))
            axis.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
        axis.axhline(99, color="#888", linewidth=0.8, linestyle=":")
        axis.set_title(title)
        axis.set_xlabel("ms")
        axis.set_ylabel(f"% of {'pieces' if key == 'itl' else 'requests'}")
        axis.set_ylim(0, 101)
        axis.grid(alpha=0.3)
        if drawn:
            axis.legend(fontsize=8, frameon=False, loc="lower right")
    figure.suptitle("Latency: share of all that took no longer")
    plots.append(("Distribution of latencies", _svg(plt, figure)))
    return plots


def _svg(plt: t.Any, figure: t.Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return stream.getvalue()
