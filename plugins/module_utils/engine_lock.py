# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read a lock: requirements text in which every package is pinned and carries hashes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

#: Packages whose versions decide whether two ranks can work together.
KEY_PACKAGES = ("vllm", "torch", "nvidia-nccl-cu13", "flashinfer-python")

#: Options that say where packages come from. They may stand in a lock and are no part of its identity: the hashes are.
SOURCE_OPTIONS = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--no-index", "--trusted-host")

_REQUIREMENT = re.compile(
    r"""
    (?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)
    \s*(?:\[(?P<extras>[^\]]*)\])?
    \s*(?:==\s*(?P<version>[^\s;,=<>!~*]+)|@\s*(?P<url>[^\s;]+))
    \s*(?:;\s*(?P<marker>.*))?
    """,
    re.VERBOSE,
)
_HASH = re.compile(r"\s--hash[=\s]\s*(\S+)")
_HASH_VALUE = re.compile(r"sha256:[0-9a-f]{64}|sha384:[0-9a-f]{96}|sha512:[0-9a-f]{128}")


def canonical_name(name: str) -> str:
    """Give a package's name in the one spelling in which names compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version_key(version: str) -> tuple[str, ...]:
    """Give a version in the one form in which versions compare: metadata may say 1.0-beta2 where a lock says 1.0b2."""
    words = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc", "rev": "post", "r": "post"}
    public, plus, local = version.lower().lstrip("v").partition("+")
    parts = [str(int(part)) if part.isdigit() else words.get(part, part) for part in re.findall(r"\d+|[a-z]+", public)]
    release = next((index for index, part in enumerate(parts) if not part.isdigit()), len(parts))
    end = release
    while end > 1 and parts[end - 1] == "0":
        end -= 1
    return (*parts[:end], *parts[release:], plus, *re.split(r"[._-]", local))


@dataclass(frozen=True)
class Requirement:
    """One pinned package."""

    name: str
    version: str | None
    url: str | None
    extras: str
    marker: str
    hashes: tuple[str, ...]

    def canonical(self) -> str:
        """Give the line in the one form in which locks compare."""
        extras = f"[{self.extras}]" if self.extras else ""
        pin = f"=={self.version}" if self.version else f" @ {self.url}"
        marker = f" ; {self.marker}" if self.marker else ""
        hashes = "".join(f" --hash={value}" for value in self.hashes)
        return f"{self.name}{extras}{pin}{marker}{hashes}"


@dataclass
class Lock:
    """What a lock says, and what is wrong with it."""

    requirements: list[Requirement] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Give the canonical text: no comments, no sources, one sorted line for each package."""
        return "".join(f"{line}\n" for line in sorted(entry.canonical() for entry in self.requirements))

    def digest(self) -> str:
        """Give the identity of the lock."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def versions(self, name: str) -> list[str]:
        """Give the versions pinned for a package; several when markers tell them apart."""
        wanted = canonical_name(name)
        return sorted({entry.version or entry.url or "" for entry in self.requirements if entry.name == wanted})


def logical_lines(text: str) -> list[tuple[int, str]]:
    """Join continued lines and drop comments; give each with the number of its first line."""
    lines: list[tuple[int, str]] = []
    start, joined = 0, ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).rstrip()
        if not joined:
            start = number
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        joined = (joined + line).strip()
        if joined:
            lines.append((start, joined))
        joined = ""
    if joined.strip():
        lines.append((start, joined.strip()))
    return lines


def parse_lock(text: str, distribution: str | None = None) -> Lock:
    """Read a lock. `distribution` is a package it must pin."""
    lock = Lock()
    seen: dict[tuple[str, str], int] = {}
    for number, line in logical_lines(text):
        if line.startswith("-"):
            if re.split(r"[\s=]", line, maxsplit=1)[0] in SOURCE_OPTIONS:
                lock.sources.append(line)
            else:
                lock.problems.append(
                    f"line {number}: {line.split()[0]} cannot stand in a lock, which is one whole file"
                )
            continue
        hashes = tuple(sorted(_HASH.findall(line)))
        body = _HASH.sub("", line).strip()
        match = _REQUIREMENT.fullmatch(body)
        if not match:
            lock.problems.append(f"line {number}: {body.split()[0]} is not pinned to one version by ==")
            continue
        entry = Requirement(
            name=canonical_name(match["name"]),
            version=match["version"],
            url=match["url"],
            extras=",".join(sorted(part.strip() for part in (match["extras"] or "").split(",") if part.strip())),
            marker=" ".join((match["marker"] or "").split()),
            hashes=hashes,
        )
        if not hashes:
            lock.problems.append(f"line {number}: {entry.name} has no --hash")
        elif not all(_HASH_VALUE.fullmatch(value) for value in hashes):
            lock.problems.append(f"line {number}: {entry.name} has a --hash that is not sha256:<64 hex digits>")
        key = (entry.name, entry.marker)
        if key in seen:
            lock.problems.append(f"line {number}: {entry.name} is pinned a second time, first in line {seen[key]}")
        seen.setdefault(key, number)
        lock.requirements.append(entry)
    if not lock.requirements and not lock.problems:
        lock.problems.append("it pins no package")
    elif distribution and not lock.versions(distribution):
        lock.problems.append(f"it does not pin {distribution}")
    return lock


def bare_lock(distribution: str, version: str) -> Lock:
    """Give the stand-in for a lock when only a version was asked for."""
    return Lock([Requirement(canonical_name(distribution), version, None, "", "", ())])


def compare_installed(lock: Lock, installed: dict[str, str]) -> list[str]:
    """Say how what is installed differs from what the lock pins."""
    pins: dict[str, list[Requirement]] = {}
    for entry in lock.requirements:
        pins.setdefault(entry.name, []).append(entry)
    problems = []
    for name, entries in sorted(pins.items()):
        versions = [entry.version for entry in entries]
        if name not in installed:
            # A package with a marker may rightly be absent on this machine.
            if not all(entry.marker for entry in entries):
                problems.append(f"{name} is not installed")
        elif None not in versions and version_key(installed[name]) not in [version_key(str(v)) for v in versions]:
            problems.append(f"{name} is {installed[name]}, pinned {' or '.join(str(v) for v in versions)}")
    strangers = sorted(name for name in installed if name not in pins)
    return problems + [f"{name} {installed[name]} is not in the lock" for name in strangers]


def packages_digest(installed: dict[str, str]) -> str:
    """Give the identity of a set of installed packages."""
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(installed.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
