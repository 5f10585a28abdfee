# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two halves of a support bundle: what a host tells of itself, and the archive that is made of it.

A host only reads. Its part travels as one word: base64 of compressed JSON, a name and a text per file.
"""

from __future__ import annotations

import base64
import glob
import gzip
import io
import json
import os
import re
import tarfile
import time
import typing as t

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.host_look import Look
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.redact import harvest, redact

# Seconds that one command may take: a broken driver can let nvidia-smi wait for ever.
PATIENCE = 60
KERNEL = re.compile(
    r"NVRM|Xid|nvidia|nvswitch|mlx5|infiniband|nvme|I/O error|EXT4-fs error|XFS|Out of memory|oom-kill|Killed process"
    r"|segfault|Hardware Error|MCE",
    re.IGNORECASE,
)
PACKAGES = re.compile(
    r"nvidia|cuda|nccl|cudnn|nvlsm|nscq|libnvsdm|dcgm|mlnx|doca|ofed|rdma|ibverbs|infiniband|linux-image"
)
# Files of a host that say what is installed and how it is set.
FILES = {
    "versions/os-release": "/etc/os-release",
    "config/nccl.conf": "/etc/nccl.conf",
    "config/modules-load.conf": "/etc/modules-load.d/kimi-k3-fabric.conf",
    "config/sysctl.conf": "/etc/sysctl.d/60-kimi-k3-fabric.conf",
}
# What commands say; one that a host does not have is left out.
COMMANDS = {
    "versions/kernel.txt": ["uname", "-a"],
    "versions/python.txt": ["python3", "--version"],
    "system/memory.txt": ["free", "-m"],
    "system/disks.txt": ["df", "-hT"],
    "system/addresses.txt": ["ip", "-brief", "address"],
    "system/uptime.txt": ["uptime"],
    # Names alone: arguments belong to whoever started them.
    "system/processes.txt": ["ps", "-eo", "pid,ppid,user,etime,rss,comm"],
    "gpu/nvidia-smi-q.txt": ["nvidia-smi", "-q"],
    "gpu/topology.txt": ["nvidia-smi", "topo", "-m"],
    "rdma/links.txt": ["rdma", "link", "show"],
    "rdma/ibstat.txt": ["ibstat"],
}


def tail(text: str, limit: int) -> str:
    """The end of a text, from the beginning of a line, at most so many characters."""
    if len(text) <= limit:
        return text
    kept = text[-limit:]
    kept = kept[kept.find("\n") + 1 :]
    return f"[the first {len(text) - len(kept)} characters are left out]\n{kept}"


class Gatherer:
    """Texts by the name they get in the archive, what was no file or command here, and what went wrong."""

    def __init__(self, look: Look, limit: int) -> None:
        self._look, self._limit = look, limit
        self.texts: dict[str, str] = {}
        self.problems: list[str] = []

    def file(self, name: str, path: str) -> None:
        content = self._look.raw(path, self._limit)
        if content is not None:
            self.texts[name] = content.decode("utf-8", "replace")
        elif os.path.exists(path):
            self.problems.append(f"{path} cannot be read")

    def command(self, name: str, words: t.Sequence[str]) -> str:
        """The output, errors included; empty where the host does not have the program."""
        answer = self._look.run(*words, seconds=PATIENCE)
        if answer is None:
            return ""
        rc, out, err = answer
        text = out + (f"\n[exit status {rc}]\n{err}" if rc else "")
        if rc == 124:
            self.problems.append(f"'{' '.join(words)}' did not end within {PATIENCE} s")
        if text.strip():
            self.texts[name] = tail(text, self._limit)
        return text

    def filtered(self, name: str, words: t.Sequence[str], wanted: re.Pattern[str]) -> bool:
        """Only the lines of a command that matter; whether it said anything at all."""
        text = self.command(name, words)
        self.texts.pop(name, None)
        lines = [line for line in text.splitlines() if wanted.search(line)]
        if lines:
            self.texts[name] = tail("\n".join(lines) + "\n", self._limit)
        return bool(text.strip())


def secrets_in(look: Look, patterns: t.Iterable[str]) -> list[str]:
    """The contents of key files, each also by its lines."""
    found: list[str] = []
    for pattern in patterns:
        for path in sorted(glob.glob(pattern)):
            text = look.text(path, 1 << 16) if os.path.isfile(path) else None
            if text and text.strip():
                found += [text.strip(), *(line.strip() for line in text.splitlines() if line.strip())]
    return found


def gather(look: Look, asked: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """One host's part. C(asked) are the options of the module support_bundle."""
    got = Gatherer(look, asked["limit_mib"] << 20)
    unit, folder = asked["unit"], asked["config_dir"]
    since = f"--since=-{asked['hours']}h"
    journal = ["journalctl", "--no-pager", "--quiet", "--output=short-iso", since, f"--lines={asked['lines']}"]
    for name in (unit, *asked["units"]):
        got.command(f"journal/{name}.txt", [*journal, "--unit", name])
    kernel = ["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet", "--output=short-iso"]
    if not got.filtered("journal/kernel.txt", kernel, KERNEL):
        got.filtered("journal/kernel.txt", ["dmesg", "--ctime"], KERNEL)
    got.command("unit/show.txt", ["systemctl", "show", "--no-pager", "--", unit])
    got.command("unit/cat.txt", ["systemctl", "cat", "--no-pager", "--", unit])
    for name in ("rank.json", "serve.env", "fabric.env", "digest"):
        got.file(f"config/{name}", os.path.join(folder, name))
    got.file("status.json", asked["status_file"])
    if asked["venv"]:
        got.file("versions/engine.json", os.path.join(asked["venv"], "engine.json"))
    if asked["checkpoint"]:
        got.file("checkpoint.json", os.path.join(asked["checkpoint"], "checkpoint.json"))
    got.file("versions/nvidia.txt", look.proc("driver", "nvidia", "version"))
    for name, path in FILES.items():
        got.file(name, look.host(path))
    for name, words in COMMANDS.items():
        got.command(name, words)
    got.filtered("versions/packages.txt", ["dpkg-query", "--show"], PACKAGES)
    known = [*asked["secrets"], *secrets_in(look, asked["secret_files"])]
    for name, text in got.texts.items():
        if name.startswith(("config/", "unit/")):
            known += harvest(text)
    removed = 0
    for name, text in got.texts.items():
        got.texts[name], count = redact(text, known)
        removed += count
    return {"texts": got.texts, "problems": got.problems, "removed": removed}


def pack(texts: t.Mapping[str, str]) -> str:
    return base64.b64encode(gzip.compress(json.dumps(texts).encode(), mtime=0)).decode()


def unpack(word: str) -> dict[str, str]:
    """Raises ValueError when it is not what C(pack) makes."""
    try:
        texts = json.loads(gzip.decompress(base64.b64decode(word, validate=True)))
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"the host's part is damaged ({error})") from error
    if not isinstance(texts, dict):
        raise ValueError("the host's part is damaged (no table of files)")  # noqa: TRY004 - the caller tells both alike
    return {str(name): str(text) for name, text in texts.items()}


def safe(name: str) -> str:
    """A path of an archive that stays below where it is unpacked."""
    parts = [re.sub(r"[^A-Za-z0-9._@+-]", "_", part) for part in name.split("/")]
    return "/".join(part for part in parts if part.strip("."))


def newest(folder: str, keep: int) -> list[str]:
    """The newest reports of each kind in a folder; the kind is what stands before the time in a name."""
    kinds: dict[str, list[str]] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.json"))):
        kinds.setdefault(re.sub(r"-?\d{8}T\d{6}Z.*$", "", os.path.basename(path)), []).append(path)
    return [path for paths in kinds.values() for path in paths[-keep:]]


class Bundle:
    """The files of the archive, each without secrets, and the page that says what is there and what is not."""

    def __init__(self, name: str, secrets: t.Sequence[str]) -> None:
        self.name, self._secrets = name, list(secrets)
        self.texts: dict[str, str] = {}
        self.lines: list[str] = []
        self.removed = 0

    def add(self, name: str, text: str) -> None:
        self.texts[safe(name)], count = redact(text, self._secrets)
        self.removed += count

    def host(self, part: t.Mapping[str, t.Any]) -> bool:
        """Take a host's part, or say why there is none."""
        name, told = str(part["host"]), part.get("told") or {}
        problems = [str(problem) for problem in told.get("problems") or []]
        texts: dict[str, str] = {}
        if told.get("archive"):
            try:
                texts = unpack(told["archive"])
            except ValueError as error:
                problems.append(str(error))
        elif told.get("unreachable"):
            problems.append(f"UNREACHABLE, nothing was gathered: {told.get('msg', 'no connection')}")
        else:
            problems.append(f"nothing was gathered: {told.get('msg') or 'the host was left before it could be asked'}")
        for path, text in texts.items():
            self.add(f"hosts/{name}/{path}", text)
        self.removed += int(told.get("removed") or 0)
        self.lines.append(f"host {name}: {len(texts)} files" + "".join(f"\n  {p}" for p in problems))
        return bool(texts)

    def manifest(self) -> str:
        text = "\n".join(
            [
                f"{self.name}: what was gathered for support. Nothing was changed on any host.",
                "",
                *self.lines,
                "",
                f"Secrets taken out: {self.removed}. Names, addresses and paths are in it: read what you hand on.",
                "",
                *sorted(self.texts),
                "",
            ]
        )
        return redact(text, self._secrets)[0]

    def write(self, path: str) -> int:
        """The archive, readable for its owner alone, by rename; its size."""
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}")
        now = int(time.time())
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
                for name, text in {"MANIFEST.txt": self.manifest(), **dict(sorted(self.texts.items()))}.items():
                    data = text.encode()
                    entry = tarfile.TarInfo(f"{self.name}/{name}")
                    entry.size, entry.mode, entry.mtime = len(data), 0o600, now
                    archive.addfile(entry, io.BytesIO(data))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        return os.path.getsize(path)
