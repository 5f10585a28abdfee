# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measures the fabric with the torch that serves: run on all hosts at the same time, with the engine's Python.

Prints one line of JSON: what this host's processes measured. Bandwidth is in GB/s; of an all-reduce it is the bus
bandwidth, 2 (n-1)/n times bytes over time, of send/recv the bytes over the time of one direction. Rails are measured
in Gb/s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


def load_environment(paths: list[str], given: dict[str, Any]) -> None:
    """NCCL's and Gloo's variables as the service would have them: those of the files, over them the given ones.

    What a login has of its own (/etc/environment) is taken away, since no service has it. None leaves a variable out.
    """
    for name in [name for name in os.environ if re.match(r"(?:NCCL|GLOO)_", name)]:
        del os.environ[name]
    for path in paths:
        text = Path(path).read_text(encoding="utf-8") if Path(path).is_file() else ""
        for name, value in re.findall(r'(?m)^((?:NCCL|GLOO)_[A-Z0-9_]+)="?([^"\n]*)"?$', text):
            os.environ[name] = value
    for name, value in given.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(int(value)) if isinstance(value, bool) else str(value)


def timed(step: Any, settings: dict[str, Any], sync: Any) -> float:
    """Seconds that one step takes, the mean over the iterations after the first ones."""
    for _round in range(settings["warmup"]):
        step()
    sync()
    start = time.perf_counter()
    for _round in range(settings["iterations"]):
        step()
    sync()
    return (time.perf_counter() - start) / settings["iterations"]


def measure(local: int, settings: dict[str, Any], folder: str) -> None:
    """One process: its part of every measurement, into a file of its own."""
    result: dict[str, Any] = {"rank": settings["host"] * settings["local"] + local, "error": None, "rows": []}
    try:
        _measure(local, settings, result)
    except Exception as error:  # noqa: BLE001 - told to the controller, which judges
        # NCCL says what it was in general first, and what it was here last.
        told = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        last = told[told.index("Last error:") + 1 :] if "Last error:" in told else []
        result["error"] = f"{type(error).__name__}: {' '.join(last) or told[0]}"
        traceback.print_exc(file=sys.stderr)
    Path(folder, f"{local}.json").write_text(json.dumps(result), encoding="utf-8")


def _measure(local: int, settings: dict[str, Any], result: dict[str, Any]) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    cuda = settings["backend"] == "nccl"
    per_host, hosts = settings["local"], settings["hosts"]
    world, rank = per_host * hosts, result["rank"]
    if cuda:
        if torch.cuda.device_count() < per_host:
            raise RuntimeError(f"torch sees {torch.cuda.device_count()} GPUs, and {per_host} were declared")
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    result["torch"], result["nccl"] = torch.__version__, ".".join(map(str, torch.cuda.nccl.version())) if cuda else None
    dist.init_process_group(
        settings["backend"],
        init_method=f"tcp://{settings['master']}:{settings['port']}",
        world_size=world,
        rank=rank,
        timeout=timedelta(seconds=settings["timeout"]),
    )

    def sync() -> None:
        if cuda:
            torch.cuda.synchronize()

    def note(kind: str, size: int, seconds: float, factor: float, **more: Any) -> None:
        bandwidth = factor * size / seconds / 1e9
        result["rows"].append(
            {"kind": kind, "bytes": size, "gb_s": round(bandwidth, 3), "algorithm": algorithm, **more}
        )

    algorithm = os.environ.get("NCCL_ALGO", "default").lower()
    groups = [dist.new_group(list(range(host * per_host, (host + 1) * per_host))) for host in range(hosts)]
    own = groups[rank // per_host]
    for size in settings["sizes"]:
        data = torch.empty(size // 4, dtype=torch.float32, device=device)
        result["sum_is_right"] = result.get("sum_is_right", True) and summed(dist, data, rank, world)
        if per_host > 1:
            seconds = timed(partial(dist.all_reduce, data, group=own), settings, sync)
            note("all_reduce_host", size, seconds, 2 * (per_host - 1) / per_host)
        if hosts > 1:
            dist.barrier()
            seconds = timed(partial(dist.all_reduce, data), settings, sync)
            note("all_reduce_all", size, seconds, 2 * (world - 1) / world)
        if algorithm == "default":
            result["received_is_right"] = result.get("received_is_right", True) and pairs(
                dist, data, settings, rank, Clock(note, sync)
            )
        if cuda and algorithm == "default":
            source = torch.ones(size // 4, dtype=torch.float32, pin_memory=True)
            seconds = timed(partial(data.copy_, source, non_blocking=True), settings, sync)
            note("host_to_gpu", size, seconds, 1.0)
            copy = torch.empty_like(data)
            seconds = timed(partial(copy.copy_, data), settings, sync)
            # Every byte is read and written.
            note("gpu_memory", size, seconds, 2.0)
            del source, copy
    dist.destroy_process_group()


def summed(dist: Any, data: Any, rank: int, world: int) -> bool:
    """Whether every element of an all-reduce is the sum of what the ranks gave; leaves zeros, which never overflow."""
    data.fill_(float(rank + 1))
    dist.all_reduce(data)
    low, high = (float(value) for value in data.aminmax())
    data.zero_()
    return low == high == world * (world + 1) / 2


class Clock(NamedTuple):
    """How a measurement is taken down, and how one waits for the device."""

    note: Callable[..., None]
    sync: Callable[[], None]


def pairs(dist: Any, data: Any, settings: dict[str, Any], rank: int, clock: Clock) -> bool:
    """Send and receive between GPU n of a host and GPU n of the next, as pipeline stages do.

    Each pair alone, then all at once. On a single host the pairs are all GPUs of it, each with each. Returns whether
    what was received is what was sent.
    """
    right = True
    for kind, ways in turns(settings["local"], settings["hosts"]):
        dist.barrier()
        for source, target in ways:
            if rank == source:
                data.fill_(float(source + 1))
                timed(partial(dist.send, data, target), settings, clock.sync)
            elif rank == target:
                data.zero_()
                seconds = timed(partial(dist.recv, data, source), settings, clock.sync)
                low, high = (float(value) for value in data.aminmax())
                right = right and low == high == source + 1
                clock.note(kind, data.numel() * data.element_size(), seconds, 1.0, source=source, target=target)
    dist.barrier()
    data.zero_()
    return right


def turns(per_host: int, hosts: int) -> list[tuple[str, list[tuple[int, int]]]]:
    """Who sends to whom, turn by turn: (measurement, [(source, target)...]) in ranks."""
    if hosts == 1:
        return [
            ("send_recv", [(source, target)]) for source in range(per_host) for target in range(source + 1, per_host)
        ]
    alone = [("send_recv", [(source, source + per_host)]) for source in range((hosts - 1) * per_host)]
    first = [range(host * per_host, (host + 1) * per_host) for host in range(hosts - 1)]
    return [*alone, *(("send_recv_at_once", [(source, source + per_host) for source in ranks]) for ranks in first)]


def network(path: str) -> dict[str, Any]:
    """What NCCL says of its ways: over InfiniBand or sockets, and whether the adapters reach the GPUs' memory."""
    text = "".join(file.read_text(errors="replace") for file in Path(path).glob("nccl.*"))
    return {
        "infiniband": len(re.findall(r"via NET/IB", text)),
        "sockets": len(re.findall(r"via NET/Socket", text)),
        "gpudirect": len(re.findall(r"via NET/IB/\S*GDRDMA", text)),
    }


def torch_run(settings: dict[str, Any], algorithm: str | None) -> dict[str, Any]:
    """One run over all processes of this host."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if settings["backend"] == "nccl":
            environment.update(
                NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,GRAPH", NCCL_DEBUG_FILE=f"{folder}/nccl.%h.%p"
            )
            if algorithm:
                environment["NCCL_ALGO"] = algorithm
        words = [sys.executable, __file__, "--settings", json.dumps({**settings, "folder": folder})]
        processes = [
            subprocess.Popen([*words, "--process", str(local)], env=environment) for local in range(settings["local"])
        ]
        deadline = time.monotonic() + settings["run_timeout"]
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        results = []
        for local in range(settings["local"]):
            file = Path(folder, f"{local}.json")
            lost = {"rank": settings["host"] * settings["local"] + local, "rows": []}
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            seconds = settings["run_timeout"]
            results.append(json.loads(text) if text else {**lost, "error": f"no result within {seconds} s"})
        told = {"network": network(folder), "expect_infiniband": bool(settings["rails"]) and settings["hosts"] > 1}
        return {"algorithm": algorithm or "default", "processes": results, **told}


def rail_turns(hosts: int) -> list[tuple[int, int]]:
    """Which host connects over its rails to which: each to the next, neighbours that share a host not at the same time.

    A host takes part in at most one pair of even and one of odd number, and all go through them in this order.
    """
    return [(first, first + 1) for start in (0, 1) for first in range(start, hosts - 1, 2)]


def rail_runs(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """C(ib_write_bw) over each rail in turn, for every pair that this host is in: one listens, the other connects."""
    found = []
    for listening, connecting in rail_turns(settings["hosts"]):
        if settings["host"] in (listening, connecting):
            client = settings["host"] == connecting
            to = [settings["addresses"][listening]] if client else []
            for index, rail in enumerate(settings["rails"]):
                # The one that is to listen may still have all its rails of another pair before it.
                busy = len(settings["rails"]) * (settings["rail_seconds"] + 10) if listening and not index else 0
                row = rail_run(rail, index, to, {**settings, "rail_busy": busy})
                found.append({**row, "peer": listening if client else connecting})
    return found


def rail_run(rail: str, index: int, to: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """One rail, with the address of the host C(to) connect to, or none to listen."""
    name, _colon, port = rail.partition(":")
    words = ["ib_write_bw", "--ib-dev", name, "--ib-port", port or "1", "--port", str(settings["rail_port"] + index)]
    words += ["--report_gbits", "--duration", str(settings["rail_seconds"])]
    row: dict[str, Any] = {"rail": rail, "index": index, "gbit_s": None, "error": None}
    patience = settings.get("rail_patience", 60)
    deadline = time.monotonic() + patience / 2 + settings.get("rail_busy", 0)
    while True:
        try:
            done = subprocess.run([*words, *to], capture_output=True, text=True, timeout=patience, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return {**row, "error": str(error)}
        numbers = re.findall(r"(?m)^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", done.stdout)
        if numbers:
            return {**row, "gbit_s": float(numbers[-1])}
        told = " ".join((done.stderr or done.stdout).split())[-200:] or f"exit status {done.returncode}"
        # The one that connects may come before the one that listens.
        if not to or time.monotonic() > deadline:
            return {**row, "error": told}
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=json.loads)
    parser.add_argument("--process", type=int)
    options = parser.parse_args()
    settings = options.settings
    if options.process is not None:
        measure(options.process, settings, settings["folder"])
        return 0
    load_environment(settings["environment_files"], settings["environment"])
    result: dict[str, Any] = {"host": settings["host"], "name": settings["name"], "runs": [], "rails": []}
    if settings["rails"] and settings["hosts"] > 1:
        result["rails"] = rail_runs(settings)
    algorithms = [None, *(["Ring"] if settings["backend"] == "nccl" else [])]
    for index, algorithm in enumerate(algorithms):
        result["runs"].append(torch_run({**settings, "port": settings["port"] + index}, algorithm))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
