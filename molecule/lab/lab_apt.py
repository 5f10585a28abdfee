# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the hosts' Debian comes from.

``KIMI_K3_LAB_MIRROR`` wins. On a Debian machine the mirrors of its own apt sources serve, without third-party
repositories that lie beside them, and whatever its release: the suites are renamed. Elsewhere, and if the own sources
do not lead to a root, ``mmdebstrap`` takes its built-in default, Debian's own mirror.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CODENAME = "bookworm"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True)
class Source:
    """One repository of apt."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""


def parse_sources(text: str) -> Iterator[Source]:
    """The enabled binary repositories of a deb822 file (``*.sources``)."""
    without_comments = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n[ \t]*\n", without_comments):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1] in {" ", "\t"} and name:
                fields[name] += "\n" + line.strip()
            elif ":" in line:
                name, _rest, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        enabled = fields.get("enabled", "yes").lower() not in {"no", "false", "0", "off"}
        if enabled and "deb" in fields.get("types", "").split():
            lists = (tuple(fields.get(key, "").split()) for key in ("uris", "suites", "components"))
            yield Source(*lists, signed_by=fields.get("signed-by", ""))


def parse_list(text: str) -> Iterator[Source]:
    """The binary repositories of a one-line file (``*.list``)."""
    for line in text.splitlines():
        match = re.fullmatch(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#]*)(?:#.*)?", line)
        if match:
            options, uri, suite, components = match.groups()
            signed = re.search(r"signed-by=(\S+)", options or "", re.IGNORECASE)
            yield Source((uri,), (suite,), tuple(components.split()), signed[1] if signed else "")


def read_sources(etc: Path) -> list[Source]:
    """What apt would read below ``/etc/apt``."""
    files = [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]
    found: list[Source] = []
    for file in files:
        if file.is_file():
            if file.suffix == ".list":
                found += parse_list(file.read_text(errors="replace"))
            elif file.suffix == ".sources":
                found += parse_sources(file.read_text(errors="replace"))
    return found


def debian_sources(sources: list[Source], codename: str, root: Path = Path("/")) -> str:
    """The Debian repositories among them as a deb822 file for the hosts; empty if there are none.

    Third-party repositories use other suites, other components or other keys; one that has none of these marks fails
    the signature check, since Debian's key is demanded of all.
    """
    suites = {codename: CODENAME, f"{codename}-updates": f"{CODENAME}-updates"}
    suites[f"{codename}-security"] = f"{CODENAME}-security"
    stanzas: list[str] = []
    for source in sources:
        foreign = source.signed_by and "debian-archive" not in source.signed_by and "BEGIN PGP" not in source.signed_by
        wanted = [suites[suite] for suite in source.suites if suite in suites]
        uris = [plain for uri in source.uris for plain in _plain_uris(uri, root)]
        if foreign or "main" not in source.components or not wanted or not uris:
            continue
        stanza = (
            f"Types: deb\nURIs: {' '.join(uris)}\nSuites: {' '.join(wanted)}\nComponents: main\nSigned-By: {KEYRING}\n"
        )
        if stanza not in stanzas:
            stanzas.append(stanza)
    complete = any(re.search(rf"^Suites:.*\b{CODENAME}(?![-\w])", stanza, re.MULTILINE) for stanza in stanzas)
    return "\n".join(stanzas) if complete else ""


def _plain_uris(uri: str, root: Path) -> list[str]:
    """URIs that a host can use too: a list of mirrors in a file of this machine is read here."""
    if uri.startswith("mirror+file:"):
        file = root / uri.removeprefix("mirror+file:").lstrip("/")
        lines = file.read_text().split("\n") if file.is_file() else []
        first = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
        return first[:1]
    return [uri] if uri.startswith(("http://", "https://")) else []


def os_release(text: str) -> dict[str, str]:
    """The fields of ``/etc/os-release``."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {name.strip(): value.strip().strip("\"'") for name, value in pairs}


def choose_sources(mirror: str | None, release: Mapping[str, str], etc: Path, root: Path = Path("/")) -> list[str]:
    """Texts for mmdebstrap's standard input, to be tried in turn; an empty one stands for its own default."""
    if mirror:
        return [f"Types: deb\nURIs: {mirror}\nSuites: {CODENAME}\nComponents: main\nSigned-By: {KEYRING}\n"]
    own = ""
    if release.get("ID") == "debian":
        own = debian_sources(read_sources(etc), release.get("VERSION_CODENAME", ""), root)
    return [own, ""] if own else [""]
