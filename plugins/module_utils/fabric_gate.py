# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judging what the fabric test measured, against gates: pure functions, no I/O.

A gate has C(fail) and C(warn), the values below which a measurement is one or the other; 0 only records. The largest
message counts: an average mixes small ones in. The Ring figure is close to the sum of the adapters, while others can
hide lost rails.
"""

from __future__ import annotations

import typing as t

# Measurement, algorithm, and what it is called.
NAMES = {
    ("rail", ""): "one rail",
    ("all_reduce_host", "default"): "all-reduce within a host",
    ("all_reduce_host", "ring"): "all-reduce within a host, Ring",
    ("all_reduce_all", "default"): "all-reduce over all hosts",
    ("all_reduce_all", "ring"): "all-reduce over all hosts, Ring",
    ("send_recv", "default"): "send/recv of a pair",
    ("send_recv_at_once", "default"): "send/recv, all pairs at once",
    ("host_to_gpu", "default"): "memory of a host to its GPU",
    ("gpu_memory", "default"): "memory of a GPU, copied within it",
}


def gate_of(kind: str, algorithm: str) -> str:
    """The name under which a measurement is gated."""
    return f"{kind}_ring" if algorithm == "ring" else kind


GATES = frozenset(gate_of(*key) for key in NAMES)


def applies(kind: str, algorithm: str, shape: t.Mapping[str, t.Any]) -> bool:
    """Whether hosts of this shape have such a measurement at all."""
    hosts, local, nccl = int(shape["hosts"]), int(shape["local"]), shape["backend"] == "nccl"
    if algorithm == "ring" and not nccl:
        return False
    return {
        "rail": hosts > 1 and int(shape["rails"]) > 0,
        "all_reduce_host": local > 1,
        "all_reduce_all": hosts > 1,
        "send_recv": hosts > 1 or local > 1,
        "send_recv_at_once": hosts > 1,
        "host_to_gpu": nccl,
        "gpu_memory": nccl,
    }[kind]


def judge(
    results: t.Mapping[str, t.Mapping[str, t.Any]],
    gates: t.Mapping[str, t.Mapping[str, t.Any]],
    shape: t.Mapping[str, t.Any] | None = None,
) -> dict[str, t.Any]:
    """Rows with the slowest value of each measurement at its largest message, problems, and lines for a terminal.

    C(results) is what each host's test printed, by host; C(gates) is by measurement, C(all_reduce_all_ring) for Ring.
    With C(shape) (C(hosts), C(local) processes on each, C(backend), declared C(rails)) a gate whose measurement is
    missing is a problem, unless such hosts have none.
    """
    problems: list[str] = []
    values: dict[tuple[str, str], list[dict[str, t.Any]]] = {}
    for host, result in results.items():
        for rail in result["rails"]:
            if rail["error"]:
                problems.append(f"{host}: rail {rail['rail']} could not be measured: {rail['error']}")
            else:
                row = {"value": rail["gbit_s"], "where": f"{host} {rail['rail']}", "bytes": 0}
                values.setdefault(("rail", ""), []).append(row)
        for run in result["runs"]:
            problems += _run(host, run, values)
    rows: list[dict[str, t.Any]] = []
    skipped = []
    for key, name in NAMES.items():
        measured = values.get(key, [])
        gate = gates.get(gate_of(*key), {})
        if not measured:
            if shape and any(float(value) for value in gate.values()):
                if applies(*key, shape):
                    problems.append(f"{name}: not measured, though it has a gate ({gate_of(*key)}).")
                else:
                    skipped.append(f"SKIP {name}: not measured, hosts like these have none (gate {gate_of(*key)}).")
            continue
        largest = max(row["bytes"] for row in measured)
        counted = [row for row in measured if row["bytes"] == largest]
        worst = min(counted, key=lambda row: row["value"])
        best = max(counted, key=lambda row: row["value"])
        rows.append(
            {
                "measurement": name,
                "bytes": largest,
                "worst": worst["value"],
                "where": worst["where"],
                "best": best["value"],
                "unit": "Gb/s" if key[0] == "rail" else "GB/s",
                "gate": gate,
                "status": _status(worst["value"], gate),
                # One that is far behind its like is a straggler, whatever the gate says.
                "straggler": bool(len(counted) > 2 and worst["value"] < 0.75 * best["value"]),
            }
        )
    failed = len(problems) + sum(row["status"] == "fail" for row in rows)
    return {"rows": rows, "problems": problems, "failed": failed, "lines": [*_lines(rows, problems), *skipped]}


def _run(host: str, run: t.Mapping[str, t.Any], values: dict[tuple[str, str], list[dict[str, t.Any]]]) -> list[str]:
    problems = []
    for process in run["processes"]:
        if process["error"]:
            problems.append(f"{host}: rank {process['rank']} failed ({run['algorithm']}): {process['error']}")
        elif process.get("sum_is_right") is False:
            problems.append(f"{host}: the sum that rank {process['rank']} got is wrong ({run['algorithm']}).")
        elif process.get("received_is_right") is False:
            problems.append(f"{host}: rank {process['rank']} received other bytes than were sent.")
        for row in process["rows"]:
            where = f"{host} rank {process['rank']}"
            if "source" in row:
                where = f"rank {row['source']} to {row['target']}"
            entry = {"value": row["gb_s"], "where": where, "bytes": row["bytes"]}
            values.setdefault((row["kind"], row["algorithm"]), []).append(entry)
    told = run["network"]
    if told["sockets"] and not told["infiniband"] and run.get("expect_infiniband"):
        problems.append(f"{host}: NCCL goes through sockets, not InfiniBand ({run['algorithm']}): look at NCCL_IB_HCA.")
    return problems


def _status(value: float, gate: t.Mapping[str, t.Any]) -> str:
    if value < float(gate.get("fail", 0)):
        return "fail"
    return "warn" if value < float(gate.get("warn", 0)) else "ok"


def _lines(rows: t.Sequence[t.Mapping[str, t.Any]], problems: t.Sequence[str]) -> list[str]:
    lines = [f"FAIL {text}" for text in problems]
    for row in rows:
        size = f" at {row['bytes'] / 2**20:g} MiB" if row["bytes"] else ""
        gate = f", gate {row['gate']['fail']:g}" if float(row["gate"].get("fail", 0)) else ""
        text = f"{row['status'].upper():4} {row['measurement']}{size}: {row['worst']:g} {row['unit']} ({row['where']})"
        more = f", best {row['best']:g}" if row["best"] != row["worst"] else ""
        lines.append(f"{text}{more}{gate}{', STRAGGLER' if row['straggler'] else ''}")
    return lines
