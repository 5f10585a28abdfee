# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Boxes for processes: whatever the lab starts can be found and ended by a name, also when all memory of it is lost.

Where systemd is PID 1 a box is a transient unit. Elsewhere it is a control group that is made by hand; a small
supervisor (``lab_supervise.py``) does what the unit's properties do: it starts a host again that asked for a reboot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lab_settings import LAB, LabError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REBOOT = 133  # the exit status of systemd-nspawn when the host inside asks for a reboot


class Boxes(Protocol):
    """What the lab asks of either way."""

    def run(self, box: str, argv: Sequence[str], stdin: str | None = None) -> int:
        """Run a command in a box to its end; output goes where this process' output goes."""

    def start(self, box: str, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """Start a command in a box and leave it there."""

    def alive(self, box: str) -> bool:
        """Whether a process is in the box."""

    def kill(self, box: str) -> None:
        """End every process of a box at once, and remove the box."""


def systemd_is_init(root: Path = Path("/")) -> bool:
    """Whether units can be started on this machine."""
    comm = root / "proc/1/comm"
    return (root / "run/systemd/system").is_dir() and comm.is_file() and comm.read_text().strip() == "systemd"


def cgroup2_mount(mountinfo: str) -> Path | None:
    """Where the unified control group hierarchy is mounted: on its own, or beside the old ones."""
    for line in mountinfo.splitlines():
        left, _rest, right = line.partition(" - ")
        if right.startswith("cgroup2 "):
            return Path(left.split()[4])
    return None


def find_boxes(lab: str) -> Boxes:
    """The way that this machine offers."""
    if systemd_is_init():
        return UnitBoxes(lab)
    mount = cgroup2_mount(Path("/proc/self/mountinfo").read_text())
    if mount is None:
        raise LabError(
            "The lab's hosts need the unified control group hierarchy, and no cgroup2 file system is mounted here; "
            "mount one with: mount -t cgroup2 none /sys/fs/cgroup"
        )
    return CgroupBoxes(mount / f"{lab}-lab")


class UnitBoxes:
    """Boxes that are transient units of systemd."""

    def __init__(self, lab: str) -> None:
        self.lab = lab

    def unit(self, box: str) -> str:
        return f"{self.lab}-lab-{box}"

    def run_argv(self, box: str, argv: Sequence[str]) -> list[str]:
        return ["systemd-run", "--quiet", "--scope", "--collect", f"--unit={self.unit(box)}", "--", *argv]

    def start_argv(self, box: str, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> list[str]:
        properties = [
            "Delegate=yes",
            "KillMode=mixed",
            "TasksMax=infinity",
            "LimitMEMLOCK=infinity",
            "OOMPolicy=continue",
            "StartLimitIntervalSec=0",
            f"RestartForceExitStatus={REBOOT}",
            f"SuccessExitStatus={REBOOT}",
            f"StandardOutput=append:{log}",
            f"StandardError=append:{log}",
        ]
        return [
            "systemd-run",
            "--quiet",
            "--collect",
            f"--unit={self.unit(box)}",
            *(f"--property={item}" for item in properties),
            *(f"--setenv={name}={value}" for name, value in environment.items()),
            "--",
            *argv,
        ]

    def run(self, box: str, argv: Sequence[str], stdin: str | None = None) -> int:
        self.kill(box)
        text = "" if stdin is None else stdin
        return subprocess.run(self.run_argv(box, argv), input=text, text=True, check=False).returncode

    def start(self, box: str, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        done = subprocess.run(self.start_argv(box, argv, log, environment), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LabError(f"systemd could not start {self.unit(box)}: {done.stderr.strip()}")

    def _units(self, box: str) -> list[str]:
        return [f"{self.unit(box)}.service", f"{self.unit(box)}.scope"]

    def alive(self, box: str) -> bool:
        return any(
            subprocess.run(["systemctl", "--quiet", "is-active", unit], check=False).returncode == 0
            for unit in self._units(box)
        )

    def kill(self, box: str) -> None:
        for unit in self._units(box):
            if not self._loaded(unit):
                continue
            subprocess.run(["systemctl", "kill", "--signal=SIGKILL", unit], capture_output=True, check=False)
            subprocess.run(["systemctl", "stop", unit], capture_output=True, check=False)
            subprocess.run(["systemctl", "reset-failed", unit], capture_output=True, check=False)

    @staticmethod
    def _loaded(unit: str) -> bool:
        shown = subprocess.run(
            ["systemctl", "show", "--property=LoadState", "--value", unit], capture_output=True, text=True, check=False
        )
        return shown.stdout.strip() == "loaded"


class CgroupBoxes:
    """Boxes that are control groups made by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _enter(self, box: str) -> Path:
        group = self.folder / box
        group.mkdir(parents=True, exist_ok=True)
        return group

    def run(self, box: str, argv: Sequence[str], stdin: str | None = None) -> int:
        self.kill(box)
        text = "" if stdin is None else stdin
        command = [sys.executable, str(LAB / "lab_supervise.py"), "--enter", str(self._enter(box)), "--", *argv]
        try:
            return subprocess.run(command, input=text, text=True, check=False).returncode
        finally:
            self.kill(box)

    def start(self, box: str, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        # The supervisor has a box of its own: it must outlive the host that it starts again.
        command = [
            sys.executable,
            str(LAB / "lab_supervise.py"),
            "--enter",
            str(self._enter(f"{box}-supervisor")),
            "--child",
            str(self._enter(box)),
            "--again",
            str(REBOOT),
            "--",
            *argv,
        ]
        with log.open("ab") as output:
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        deadline = time.monotonic() + 10
        while not self.alive(box) and time.monotonic() < deadline:
            time.sleep(0.01)

    def alive(self, box: str) -> bool:
        try:
            return "populated 1" in (self.folder / box / "cgroup.events").read_text()
        except OSError:
            return False

    def kill(self, box: str) -> None:
        for group in (self.folder / f"{box}-supervisor", self.folder / box):
            self._kill_group(group)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _kill_group(self, group: Path) -> None:
        deadline = time.monotonic() + 30
        while group.is_dir():
            if (group / "cgroup.kill").exists():
                (group / "cgroup.kill").write_text("1")
            else:
                _kill_members(group)
            for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            with contextlib.suppress(OSError):
                group.rmdir()
            if time.monotonic() > deadline:
                raise LabError(f"Processes in {group} cannot be ended; see {group}/cgroup.procs")
            if group.is_dir():
                time.sleep(0.02)


def _kill_members(group: Path) -> None:
    """For kernels before 5.14, which have no ``cgroup.kill``."""
    for file in [group / "cgroup.procs", *group.rglob("cgroup.procs")]:
        with contextlib.suppress(OSError):
            for pid in file.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
