# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command lines that fetch and verify a repository: this collection's and those users have now."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.baremetal.kimi_k3.plugins.modules.hf_checkpoint import ARGUMENT_SPEC
from measure import CommandError, Cost, run

ROOT = Path(__file__).resolve().parents[2]
HF_ENVIRONMENT = ROOT / ".cache" / "benchmarks-venv"
CORES = len(os.sched_getaffinity(0))
CONNECTIONS = 8
OURS = "hf_checkpoint"
FAST_BY_HAND = "curl --parallel + openssl dgst"
_PACKAGES = {"curl": "curl", "aria2c": "aria2", "nginx": "nginx-light", "openssl": "openssl"}


@dataclass
class Repository:
    """What is fetched, from where, and the digests it must have."""

    endpoint: str
    name: str
    commit: str
    digests: dict[str, str]  # of the files that are measured
    work: Path
    results: list[dict[str, Any]] = field(default_factory=list)  # of this collection's module

    def url(self, path: str) -> str:
        return f"{self.endpoint}/{self.name}/resolve/{self.commit}/{path}"

    def list_of(self, name: str, lines: list[str]) -> Path:
        path = self.work / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path


Action = Callable[[Repository, Path], Cost]


@dataclass
class Contender:
    """One way to do it, and the programs it needs."""

    name: str
    needs: tuple[str, ...]
    action: Action


def find(program: str) -> str | None:
    if program == "hf":
        path = HF_ENVIRONMENT / "bin" / "hf"
        return str(path) if path.exists() else None
    return shutil.which(program) or shutil.which(program, path="/usr/sbin")


def prepare(packages: bool) -> dict[str, str]:
    """Have the peers where that is possible; of those that are absent, why."""
    absent: dict[str, str] = {}
    sys.path.insert(0, str(ROOT / "tests" / "tools"))
    import bootstrap  # noqa: PLC0415

    try:
        bootstrap.environment(HF_ENVIRONMENT, Path(__file__).with_name("requirements.txt"))
    except (subprocess.CalledProcessError, OSError) as error:
        absent["hf"] = f"its environment could not be made ({error})"
    missing = [package for program, package in _PACKAGES.items() if find(program) is None]
    if packages and missing and os.geteuid() == 0 and shutil.which("apt-get"):
        words = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *missing]
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(words, check=False, env=quiet, stdout=subprocess.DEVNULL)
    for program in ("hf", *_PACKAGES, "sha256sum", "xargs"):
        if find(program) is None:
            absent.setdefault(program, "not installed")
    return absent


def versions() -> dict[str, str]:
    """What each program says it is."""
    told = {"python": sys.version.split()[0]}
    for program, words in {
        "hf": ["version"],
        "curl": ["--version"],
        "aria2c": ["--version"],
        "openssl": ["version"],
        "sha256sum": ["--version"],
        "nginx": ["-v"],
    }.items():
        path = find(program)
        if path:
            made = subprocess.run([path, *words], capture_output=True, text=True, check=False, env=hf_environment(None))
            found = re.search(r"\d+\.\d+(\.\d+)?", made.stdout + made.stderr)
            told[program] = found[0] if found else "unknown"
    return told


def attached() -> dict[str, Any]:
    """Options that keep the work in the process that is measured."""
    return {"detach": False} if "detach" in ARGUMENT_SPEC else {}


def module(repository: Repository, dest: Path, **options: Any) -> Cost:
    """This collection's module, as a host runs it."""
    values = {
        "repository": repository.name,
        "revision": repository.commit,
        "dest": str(dest),
        "endpoint": repository.endpoint,
        "connections": CONNECTIONS,
        "allow_tmpfs": True,
        **attached(),
        **options,
    }
    arguments = repository.work / "arguments.json"
    arguments.write_text(json.dumps({"ANSIBLE_MODULE_ARGS": values}), encoding="utf-8")
    output = repository.work / "hf_checkpoint.out"
    cost = run(
        sys.executable,
        ROOT / "plugins" / "modules" / "hf_checkpoint.py",
        arguments,
        cwd=repository.work,
        env={"PYTHONPATH": str(ROOT / ".collections")},
        parallel=CORES + 1,
        output=output,
    )
    text = output.read_text(encoding="utf-8")
    repository.results.append(json.loads(text[text.index("{") :]))
    return cost


def hf_environment(repository: Repository | None) -> dict[str, str]:
    base = {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "NO_COLOR": "1"}
    base["HF_HUB_DISABLE_UPDATE_CHECK"] = base["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if repository is None:
        return base
    return {**base, "HF_ENDPOINT": repository.endpoint, "HF_HOME": str(repository.work / "hf-home")}


def hf_download(repository: Repository, dest: Path) -> Cost:
    words = ["download", repository.name, "--revision", repository.commit, "--local-dir", str(dest)]
    return command(repository, "hf", *words, "--max-workers", str(CONNECTIONS))


def hf_verify(repository: Repository, dest: Path) -> Cost:
    words = ["cache", "verify", repository.name, "--revision", repository.commit, "--local-dir", str(dest)]
    return command(repository, "hf", *words)


def curl(repository: Repository, dest: Path) -> Cost:
    lines = [f'url = "{repository.url(path)}"\noutput = "{dest / path}"' for path in repository.digests]
    config = repository.list_of("curl.conf", lines)
    words = ["--parallel", "--parallel-max", str(CONNECTIONS), "--location", "--fail", "--silent", "--show-error"]
    return command(repository, "curl", *words, "--config", str(config))


def aria2(repository: Repository, dest: Path) -> Cost:
    lines = [
        f"{repository.url(path)}\n  out={path}\n  dir={dest}\n  checksum=sha-256={digest}"
        for path, digest in repository.digests.items()
    ]
    words = ["--quiet", "--no-conf", "--file-allocation=none", "--max-concurrent-downloads=4"]
    words += ["--max-connection-per-server=8", "--split=8", f"--input-file={repository.list_of('aria2.txt', lines)}"]
    return command(repository, "aria2c", *words)


def sha256sum(repository: Repository, dest: Path) -> Cost:
    sums = repository.work / "sums"
    sums.mkdir(exist_ok=True)
    for path, digest in repository.digests.items():
        (sums / f"{path}.sum").write_text(f"{digest}  {dest / path}\n", encoding="utf-8")
    names = repository.list_of("sums.txt", [str(sums / f"{path}.sum") for path in repository.digests])
    words = ["-a", str(names), "-P", str(CORES), "-n", "1", "sha256sum", "--check", "--quiet"]
    return command(repository, "xargs", *words, parallel=CORES + 1)


def openssl(repository: Repository, dest: Path) -> Cost:
    names = repository.list_of("names.txt", [str(dest / path) for path in repository.digests])
    words = ["-a", str(names), "-P", str(CORES), "-n", "1", "openssl", "dgst", "-sha256", "-r"]
    cost = command(repository, "xargs", *words, parallel=CORES + 1)
    told = dict(line.split(" *")[::-1] for line in (repository.work / "xargs.out").read_text().splitlines())
    if told != {str(dest / path): digest for path, digest in repository.digests.items()}:
        raise CommandError(f"openssl dgst tells other digests: {told}")
    return cost


def command(repository: Repository, program: str, *words: str, parallel: int = 1) -> Cost:
    return run(
        find(program) or program,
        *words,
        cwd=repository.work,
        env=hf_environment(repository),
        parallel=parallel,
        output=repository.work / f"{Path(program).name}.out",
    )


def then(*actions: Action) -> Action:
    def both(repository: Repository, dest: Path) -> Cost:
        return sum((action(repository, dest) for action in actions), Cost())

    return both


FETCH = [
    Contender(OURS, (), module),
    Contender("hf download + hf cache verify", ("hf",), then(hf_download, hf_verify)),
    Contender("hf download + sha256sum", ("hf", "sha256sum", "xargs"), then(hf_download, sha256sum)),
    Contender("aria2c with checksum", ("aria2c",), aria2),
    Contender("curl --parallel + sha256sum", ("curl", "sha256sum", "xargs"), then(curl, sha256sum)),
    Contender(FAST_BY_HAND, ("curl", "openssl", "xargs"), then(curl, openssl)),
]
# The fastest program that does nothing but hash files.
HASHING = Contender("openssl dgst, xargs -P", ("openssl", "xargs"), openssl)
VERIFY = [
    Contender(OURS, (), lambda repository, dest: module(repository, dest, verify="full")),
    Contender("sha256sum, xargs -P", ("sha256sum", "xargs"), sha256sum),
    HASHING,
    Contender("hf cache verify", ("hf",), hf_verify),
]
