# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Benchmarks of the checkpoint code against what users have now: prints tables, writes JSON.

    run.py                   what `make bench` runs: 8 files of 512 MiB, three rounds
    run.py --smoke           small files, one round: whether everything works and every digest is right, never how fast
    run.py fetch verify      only some sections (fetch, verify, plan, uplink)
    run.py --place /dev/shm  somewhere else, as memory instead of a disk

All contenders of a section take turns (A B C A B C) against one server on this machine, which is a process of its own.
huggingface_hub is installed into .cache/benchmarks-venv; curl, aria2, openssl and nginx by apt when they are missing
and this is no smoke run. What could not be had is named, and left out.

Processor time and memory are the client's only. Ratios are medians over the rounds of contender by hf_checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "tools"), str(ROOT / ".collections")]

import k3_index
import peers
import uplink
from measure import CommandError, Cost, chill, own_network, settle, warm
from peers import OURS, Contender, Repository

REPOSITORY = "lab/benchmark"
SECTIONS = ["fetch", "verify", "plan", "uplink"]
GIB = 1 << 30
CACHED = "one MiB, again and again"


class Report:
    """Lines for a person, values for a program."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.markdown: list[str] = []

    def say(self, text: str = "") -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def table(self, title: str, head: list[str], rows: list[list[str]]) -> None:
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        self.say(f"\n{title}")
        self.markdown += ["", f"{title[0].upper()}{title[1:]}:", "", f"| {' | '.join(head)} |"]
        self.markdown += [f"| --- |{' ---: |' * (len(head) - 1)}", *(f"| {' | '.join(row)} |" for row in rows)]
        for row in [head, ["-" * width for width in widths], *rows]:
            cells = [
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            self.say("  ".join(cells))

    def target(
        self, section: str, what: str, value: float, least: float | None = None, most: float | None = None
    ) -> None:
        if self.values["smoke"]:
            return
        met = (least is None or value >= least) and (most is None or value <= most)
        limit = f"at least {least}" if least is not None else f"at most {most}"
        self.values[section].setdefault("targets", []).append(
            {"what": what, "value": round(value, 3), "limit": limit, "met": met}
        )
        self.say(f"  {'met   ' if met else 'MISSED'}  {what}: {value:.2f} ({limit})")


# The repository


def write_shard(path: Path, size: int, seed: int) -> str:
    """A safetensors file of SIZE bytes of noise; its SHA-256."""
    header = json.dumps(
        {f"model.layers.{seed}.weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    ).encode()
    digest = hashlib.sha256()
    with path.open("wb") as stream:
        for piece in [struct.pack("<Q", len(header)) + header, *[1 << 20] * (size >> 20)]:
            data = os.urandom(piece) if isinstance(piece, int) else piece
            digest.update(data)
            stream.write(data)
        os.fsync(stream.fileno())
    return digest.hexdigest()


def make_repository(root: Path, files: int, size: int) -> tuple[str, dict[str, str]]:
    """Files of noise, their index and a configuration; the commit and the digests of the large ones."""
    commit = hashlib.sha1(os.urandom(16), usedforsecurity=False).hexdigest()
    folder = root / REPOSITORY / commit
    folder.mkdir(parents=True)
    names = [f"model-{number + 1:05d}-of-{files:05d}.safetensors" for number in range(files)]
    digests = {name: write_shard(folder / name, size, number) for number, name in enumerate(names)}
    weights = {f"model.layers.{number}.weight": name for number, name in enumerate(names)}
    index = {"metadata": {"total_size": files * size}, "weight_map": weights}
    (folder / k3_index.INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return commit, digests


@contextlib.contextmanager
def process(*words: str | Path) -> Iterator[str]:
    """A server beside this process: its first line, and its end afterwards."""
    child = subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        if not line:
            raise CommandError(f"{words[0]} does not start")
        yield line
    finally:
        child.terminate()
        child.wait()


def request(url: str, method: str = "GET") -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
        return json.load(answer)


def ceiling(what: str, *words: str | Path) -> dict[str, float]:
    made = subprocess.run(
        [sys.executable, str(HERE / "ceiling.py"), what, *map(str, words)], capture_output=True, check=True
    )
    return json.loads(made.stdout)


def present(contenders: list[Contender], absent: dict[str, str]) -> list[Contender]:
    return [contender for contender in contenders if not any(need in absent for need in contender.needs)]


# The sections


def compare(report: Report, section: str, title: str, costs: dict[str, list[Cost]], total: int) -> None:
    """Table, medians and ratios of one section."""
    rows, summary = [], {}
    ours = costs[OURS]
    for name, mine in costs.items():
        ratio = statistics.median(a.lasting / b.lasting for a, b in zip(mine, ours, strict=True))
        unsynced = statistics.median(a.wall / b.wall for a, b in zip(mine, ours, strict=True))
        cpu = statistics.median(a.cpu / b.cpu for a, b in zip(mine, ours, strict=True))
        # What others do on this machine only ever adds time: the best rounds say more about a busy one.
        best, best_of_ours = (min(cost.lasting for cost in rounds) for rounds in (mine, ours))
        median = Cost(*(statistics.median(getattr(cost, key) for cost in mine) for key in ("wall", "cpu")))
        median.peak = max(cost.peak for cost in mine)
        median.synced = statistics.median(cost.synced for cost in mine)
        summary[name] = {
            "rounds": [cost.as_dict() for cost in mine],
            "median": median.as_dict(),
            "best_s": round(best, 3),
            "ratio": round(ratio, 3),
            "ratio_of_best": round(best / best_of_ours, 3),
            "ratio_until_exit": round(unsynced, 3),
            "cpu_ratio": round(cpu, 3),
        }
        rows.append(
            [
                name,
                f"{median.wall:.2f}",
                f"{median.lasting:.2f}",
                f"{ratio:.2f}",
                f"{best:.2f}",
                f"{best / best_of_ours:.2f}",
                f"{median.cpu:.2f}",
                f"{cpu:.2f}",
                f"{median.peak / 2**20:.0f}",
            ]
        )
    report.values[section] = {"bytes": total, "contenders": summary}
    head = ["", "exit s", "on disk s", "÷ ours", "best s", "÷ ours", "CPU s", "÷ ours", "peak MiB"]
    report.table(f"{title}: {total / 1e9:.2f} GB, medians of {len(costs[OURS])}", head, rows)


def ratio_of(report: Report, section: str, name: str, key: str = "ratio") -> float | None:
    found = report.values[section]["contenders"].get(name)
    return found[key] if found else None


def bench_fetch(
    report: Report, repository: Repository, contenders: list[Contender], hashers: list[Contender], rounds: int
) -> Path:
    """Fetch and prove; the first fetch of ours stays for the next section."""
    source = sorted((repository.work / "hub" / REPOSITORY / repository.commit).glob("*.safetensors"))
    total = sum(path.stat().st_size for path in source)
    costs: dict[str, list[Cost]] = {contender.name: [] for contender in contenders}
    hashing: dict[str, list[float]] = {hasher.name: [] for hasher in hashers} | {CACHED: []}
    kept = repository.work / "kept"
    for round_number in range(rounds):
        for contender in contenders:
            dest = repository.work / "dest"
            dest.mkdir()
            warm(source)
            cost = contender.action(repository, dest)
            held = [dest / name for name in repository.digests]
            cost.synced = settle([*held, dest])
            if [path.stat().st_size for path in held] != [path.stat().st_size for path in source]:
                raise CommandError(f"{contender.name} left files of other sizes")
            costs[contender.name].append(cost)
            report.say(f"  round {round_number + 1}, {contender.name}: {cost.wall:.2f} s")
            if contender.name == OURS:
                check_fetched(repository, total)
            if contender.name == OURS and not kept.exists():
                dest.rename(kept)
            else:
                shutil.rmtree(dest)
        for hasher in hashers:
            warm(source)
            hashing[hasher.name].append(hasher.action(repository, source[0].parent).cpu)
        hashing[CACHED].append(ceiling("hash", total)["cpu_s"])
    compare(report, "fetch", "fetch and prove", costs, total)
    report.values["fetch"]["hashing_alone_cpu_s"] = hashing
    ours = report.values["fetch"]["contenders"][OURS]["median"]
    against = ratio_of(report, "fetch", "hf download + hf cache verify")
    if against:
        report.target("fetch", "hf download + hf cache verify ÷ ours", against, least=4)
    # With OpenSSL's assembly instead of the program that everybody names, two tools in a row come much nearer.
    usual = [name for name in costs if name not in (OURS, peers.FAST_BY_HAND)]
    for what, names in (("fastest of the others", usual), (peers.FAST_BY_HAND, [peers.FAST_BY_HAND])):
        ratios = [ratio for name in names if (ratio := ratio_of(report, "fetch", name))]
        if ratios:
            report.target("fetch", f"{what} ÷ ours", min(ratios), least=2.5)
    # No file is hashed as fast as one piece that never leaves the processor's cache, which is the limit of what it can.
    for name, alone in hashing.items():
        share = statistics.median(cost.cpu / max(spent, 1e-3) for cost, spent in zip(costs[OURS], alone, strict=True))
        report.target("fetch", f"CPU ÷ hashing alone ({name})", share, most=1.5)
    report.target("fetch", "peak MiB", ours["peak_bytes"] / 2**20, most=64)
    return kept


def check_fetched(repository: Repository, total: int) -> None:
    """Counts and digests of what the module says it did."""
    result = repository.results[-1]
    entries = len(repository.digests) + 1  # the index is not counted
    if (len(result["fetch"]), result["resumed_bytes"]) != (entries, 0) or result["fetched_bytes"] < total:
        raise CommandError(f"hf_checkpoint did not fetch {entries} files of {total} bytes: {result}")
    if result["verified"] != "sha256":
        raise CommandError(f"hf_checkpoint proved its files by {result['verified']}, not sha256")


def bench_verify(report: Report, repository: Repository, contenders: list[Contender], rounds: int, dest: Path) -> None:
    """Prove what is there, from memory and from the disk."""
    held = [dest / name for name in repository.digests]
    total = sum(path.stat().st_size for path in held)
    for section, title, ready in (
        ("verify_warm", "full verification, files in memory", warm),
        ("verify_cold", "full verification, files on the disk", chill),
    ):
        costs: dict[str, list[Cost]] = {contender.name: [] for contender in contenders}
        ceilings = []
        for _round in range(rounds):
            for contender in contenders:
                ready(held)
                costs[contender.name].append(contender.action(repository, dest))
                if contender.name == OURS:
                    check_verified(repository)
                    # At once: a disk is not as fast at one minute as at the next.
                    chill(held)
                    ceilings.append((ceiling("hash", total), ceiling("read", *held)))
        compare(report, section, title, costs, total)
        values = report.values[section]
        # A ceiling that something else has pressed down is none: the best of the rounds, on both sides.
        hashing, reading = (max(pair[side]["bytes"] / pair[side]["wall_s"] for pair in ceilings) for side in (0, 1))
        values["ceilings"] = [{"hash": pair[0], "read": pair[1]} for pair in ceilings]
        values["hashing_bytes_s"], values["reading_bytes_s"] = hashing, reading
        report.say(
            f"  ceilings: hashing {CACHED}, on all cores {hashing / 1e9:.2f} GB/s, "
            f"reading past the page cache {reading / 1e9:.2f} GB/s"
        )
        limit = hashing if section == "verify_warm" else min(hashing, reading)
        share = total / min(cost.wall for cost in costs[OURS]) / limit
        what = f"hashing {CACHED}, on all cores" if section == "verify_warm" else "the lower ceiling"
        report.target(section, f"rate ÷ {what}", share, least=0.95)


def check_verified(repository: Repository) -> None:
    result = repository.results[-1]
    if result["changed"] or result["fetch"] or len(result["hashed"]) != len(repository.digests) + 1:
        raise CommandError(f"hf_checkpoint did not hash all files and fetch none: {result}")


def bench_plan(report: Report, work: Path, rounds: int) -> None:
    """Plans and receipts at Kimi K3's size."""
    with process(ROOT / "tests" / "tools" / "k3_hub.py", work / "k3") as line:
        endpoint = line.split()[1]
        repository = Repository(endpoint, k3_index.REPOSITORY, k3_index.REVISION, {}, work)
        dest = work / "k3" / "checkpoint"
        stage = {"scope": "stage", "pipeline_layers": [47, 46], "stages": [0], "language_model_only": True}
        steps = [
            ("plan of stage 0, headers of its 48 shards", stage, True),
            ("receipts of stage 0", stage, False),
            ("plan of all, headers of 96 shards", {"scope": "all"}, True),
            ("receipts of all 96 shards", {"scope": "all"}, False),
        ]
        costs: dict[str, list[Cost]] = {name: [] for name, _options, _plans in steps}
        for _round in range(rounds):
            for name, options, plans in steps:
                if plans:
                    for path in [dest / "checkpoint.json", dest / k3_index.INDEX_NAME, *dest.glob(".kimi-k3/*.json")]:
                        if path.name != "receipts.json":
                            path.unlink(missing_ok=True)
                request(f"{endpoint}/_lab/log", "DELETE")
                costs[name].append(peers.module(repository, dest, **options))
                check_planned(repository, options, plans, request(f"{endpoint}/_lab/log")["requests"])
    rows, values = [], {}
    for name, mine in costs.items():
        wall, cpu = (statistics.median(getattr(cost, key) for cost in mine) for key in ("wall", "cpu"))
        peak = max(cost.peak for cost in mine)
        values[name] = {"rounds": [cost.as_dict() for cost in mine], "wall_s": wall, "cpu_s": cpu, "peak_bytes": peak}
        rows.append([name, f"{wall:.2f}", f"{cpu:.2f}", f"{peak / 2**20:.0f}"])
    report.values["plan"] = {"tensors": k3_index.TENSORS, "steps": values}
    title = f"Kimi K3's size ({k3_index.TENSORS:,} tensors, 1.56 TB), start of the interpreter included"
    report.table(title, ["", "wall s", "CPU s", "peak MiB"], rows)
    report.target("plan", "plan of stage 0, s", values[steps[0][0]]["wall_s"], most=5)
    report.target("plan", "plan of stage 0, GiB", values[steps[0][0]]["peak_bytes"] / GIB, most=1)
    report.target("plan", "receipts of all 96 shards, s", values[steps[3][0]]["wall_s"], most=1)


def check_planned(repository: Repository, options: dict[str, Any], plans: bool, requests: list[Any]) -> None:
    result = repository.results[-1]
    shards = 48 if options["scope"] == "stage" else 96
    if sum(name.endswith(".safetensors") for name in result["plan"]["weight_files"]) != shards or result["hashed"]:
        raise CommandError(f"hf_checkpoint planned something else than {shards} shards: {result}")
    if shards == 48 and abs(result["bytes"] / 1e9 - 783.9) > 0.1:
        raise CommandError(f"stage 0 has {result['bytes']} bytes")
    if shards == 96 and result["plan"]["tensors"] != k3_index.TENSORS:
        raise CommandError(f"the plan has {result['plan']['tensors']} tensors")
    if not plans and (requests or result["changed"]):
        raise CommandError(f"by its receipts hf_checkpoint still asked the hub {len(requests)} times: {result}")


def machine(place: Path) -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": peers.CORES,
        "memory_bytes": memory,
        "kernel": platform.release(),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        "openssl_of_python": ssl.OPENSSL_VERSION,
        "file_system": filesystem(place),
    }


def filesystem(place: Path) -> str:
    from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import filesystem_of  # noqa: PLC0415

    return filesystem_of(str(place))[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all when none is named"
    )
    parser.add_argument("--smoke", action="store_true", help="small files, one round")
    parser.add_argument("--rounds", type=int, help="how often each contender has its turn")
    parser.add_argument("--files", type=int, default=8, help="how many files")
    parser.add_argument("--size", type=int, help="MiB of each file")
    parser.add_argument(
        "--place",
        type=Path,
        default=Path("/var/tmp"),  # noqa: S108 - a folder of its own is made there
        help="where the files go, for the time of the run",
    )
    parser.add_argument("--json", type=Path, default=ROOT / ".cache" / "benchmarks.json", help="where the values go")
    parser.add_argument("--markdown", type=Path, help="where the tables go, for the documentation")
    options = parser.parse_args()
    sections = options.sections or SECTIONS
    if set(sections) - set(SECTIONS):
        parser.error(f"sections are {', '.join(SECTIONS)}")
    rounds = options.rounds or (1 if options.smoke else 3)
    size = (options.size or (4 if options.smoke else 512)) << 20
    report = Report()
    absent = peers.prepare(packages=not options.smoke)
    report.values |= {
        "schema": 1,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "smoke": options.smoke,
        "machine": {**machine(options.place), "congestion_control": own_network()},
        "versions": peers.versions(),
        "absent": absent,
    }
    for program, reason in absent.items():
        report.say(f"absent: {program}, {reason}; what needs it is left out")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kimi-k3-bench-", dir=options.place) as name:
        work = Path(name)
        work.chmod(0o755)
        if {"fetch", "verify"} & set(sections):
            commit, digests = make_repository(work / "hub", options.files, size)
            (work / "state").mkdir()
            with process(HERE / "server.py", work / "hub", work / "state") as line:
                address = json.loads(line)
                report.values["bytes_by"] = address["bytes_by"]
                repository = Repository(address["endpoint"], REPOSITORY, commit, digests, work)
                # The hub hashes its files at the first question: not on anybody's time.
                request(f"{repository.endpoint}/api/models/{REPOSITORY}/tree/{commit}?recursive=true")
                fetchers = peers.FETCH if "fetch" in sections else [peers.FETCH[0]]
                hashers = present([peers.HASHING], absent)
                dest = bench_fetch(report, repository, present(fetchers, absent), hashers, rounds)
                if "verify" in sections:
                    bench_verify(report, repository, present(peers.VERIFY, absent), rounds, dest)
        if "plan" in sections:
            bench_plan(report, work, rounds)
        if "uplink" in sections:
            shared = work / "shared"
            piece = min(size, 32 << 20)
            commit, _digests = make_repository(shared / "hub", options.files, piece)
            report.values["uplink"] = uplink.bench(
                report.say, shared, (REPOSITORY, commit), rounds=rounds, seconds=1 if options.smoke else 5
            )
    report.values["seconds"] = round(time.monotonic() - began)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report.values, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text("\n".join(report.markdown) + "\n", encoding="utf-8")
    report.say(f"\nwritten: {options.json}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CommandError as failure:
        sys.exit(f"FAILED: {failure}")
