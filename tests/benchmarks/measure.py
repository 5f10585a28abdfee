# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a command costs: seconds of the clock, seconds of the processors, memory."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_SECONDS = 0.02
_CLONE_NEWNET = 0x40000000
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB", re.MULTILINE)


class CommandError(Exception):
    """A command ended as it should not have."""


@dataclass
class Cost:
    """Of one command or of several in a row."""

    wall: float = 0.0
    cpu: float = 0.0
    peak: int = 0  # bytes resident
    synced: float = 0.0  # seconds until the bytes were on the disk as well

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.wall + other.wall,
            self.cpu + other.cpu,
            max(self.peak, other.peak),
            self.synced + other.synced,
        )

    @property
    def lasting(self) -> float:
        """Seconds until all is done and on the disk."""
        return self.wall + self.synced

    def as_dict(self) -> dict[str, float | int]:
        return {
            "wall_s": round(self.wall, 3),
            "sync_s": round(self.synced, 3),
            "cpu_s": round(self.cpu, 3),
            "peak_bytes": self.peak,
        }


class _Memory:
    """The highest resident size of a process and its children, the children's peaks added up.

    Asked of the kernel while they run: what wait4 tells counts the process that started the command as well.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peaks: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            self._look(self._pid)
            if self._ended.wait(_SAMPLE_SECONDS):
                return

    def _look(self, pid: int) -> None:
        base = Path("/proc") / str(pid)
        try:
            found = _PEAK.search((base / "status").read_text(encoding="utf-8"))
            children = (base / "task" / str(pid) / "children").read_text(encoding="utf-8").split()
        except OSError:
            return
        if found:
            self._peaks[pid] = int(found[1]) * 1024
        for child in children:
            self._look(int(child))

    def peak(self, parallel: int) -> int:
        """Of the largest processes, as many as run at one time."""
        self._ended.set()
        self._thread.join()
        return sum(sorted(self._peaks.values(), reverse=True)[:parallel])


def run(
    *words: str | Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    expect: int = 0,
    parallel: int = 1,
    output: Path,
) -> Cost:
    """Run a command to its end. PARALLEL is how many processes it has at work at one time."""
    command = [str(word) for word in words]
    environment = {**os.environ, **(env or {})}
    with output.open("wb") as stream:
        began = time.monotonic()
        child = subprocess.Popen(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        )
        memory = _Memory(child.pid)
        try:
            _pid, status, usage = os.wait4(child.pid, 0)
        except BaseException:
            child.kill()
            child.wait()
            raise
        wall = time.monotonic() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != expect:
        tail = output.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise CommandError(f"{' '.join(command)} exited {child.returncode}, not {expect}:\n{tail}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, memory.peak(parallel))


def own_network() -> str:
    """Go to a network of this process and its children alone, where that is allowed; the congestion control there.

    A server that paces its packets (BBR) does so by timers. On loopback their interrupts come on the client's
    processors and count as the client's time, which between two machines they never would.
    """
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        _CONGESTION.write_text("cubic", encoding="ascii")
    return _CONGESTION.read_text(encoding="ascii").strip()


def settle(paths: Sequence[Path]) -> float:
    """Seconds until what was written to these files is on the disk."""
    began = time.monotonic()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return time.monotonic() - began


def warm(paths: Sequence[Path]) -> None:
    """Have the files in memory."""
    buffer = memoryview(bytearray(1 << 20))
    for path in paths:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def chill(paths: Sequence[Path]) -> None:
    """Have the files on the disk alone."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def why_no_namespaces() -> str | None:
    """Why this machine cannot have hosts of its own behind a link of its own."""
    if os.geteuid() != 0:
        return "namespaces need root"
    absent = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    return f"{' and '.join(absent)} not installed" if absent else None
