# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make .venv with the pinned tools, on the newest Python of this machine that can carry them.

Runs on any Python from 3.8, before anything is installed. A second run with the same requirements does nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST, NEWEST = (3, 11), (3, 14)
PROBE = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"


def candidates() -> list[str]:
    """Interpreters to try, newest first: those on PATH, those of pyenv, and the one that runs this."""
    found = []
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        found.append(shutil.which(f"python3.{minor}"))
        home = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
        found.extend(str(path) for path in sorted(home.glob(f"3.{minor}.*/bin/python3"), reverse=True))
    return [path for path in [*found, sys.executable] if path]


def version(python: str) -> tuple[int, ...] | None:
    """The version of an interpreter that can make virtual environments, None for one that cannot."""
    try:
        run = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=False, cwd="/")
    except OSError:
        return None
    return tuple(int(part) for part in run.stdout.split(".")) if run.returncode == 0 else None


def choose(wanted: tuple[int, int] | None = None) -> str:
    """The newest usable interpreter, or one that is not newer than C(wanted)."""
    for python in candidates():
        found = version(python)
        if found and OLDEST <= found <= (wanted or NEWEST):
            return python
    sys.exit(
        f"No Python {OLDEST[0]}.{OLDEST[1]} or newer with venv and ensurepip was found: "
        "install it (Debian, Ubuntu: apt-get install python3-venv)."
    )


def environment(folder: Path, requirements: Path, wanted: tuple[int, int] | None = None) -> None:
    """Make the environment unless it stands and was made from these very requirements."""
    included = [ROOT / "requirements.txt", ROOT / "requirements-bench.txt"]
    text = b"".join(path.read_bytes() for path in [requirements, *included])
    stamp, mark = folder / "requirements.sha256", hashlib.sha256(text).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == mark:
        return
    python = choose(wanted)
    print(f"making {folder.name} with {python}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True, cwd=ROOT)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--requirement", str(requirements)], check=True, cwd=ROOT)
    stamp.write_text(mark, encoding="utf-8")


def main() -> None:
    environment(ROOT / ".venv", ROOT / "requirements-test.txt")


if __name__ == "__main__":
    main()
