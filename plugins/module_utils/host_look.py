# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Looking at a host through roots and a command path that can be another's: a fixture tree, a rescued disk."""

from __future__ import annotations

import os
import shutil
import time
import typing as t

#: Seconds that a command may take; nvidia-smi needs half a minute on a host whose driver nobody keeps loaded.
DEADLINE = 120

RunCommand = t.Callable[..., "tuple[int, str, str]"]


class Look:
    """Reads below its roots and runs commands of its path; what is not there is None or empty, never an error."""

    def __init__(
        self, run_command: RunCommand, sys_root: str = "/sys", proc_root: str = "/proc", path: str = "", root: str = "/"
    ) -> None:
        self._run = run_command
        self.sys_root = sys_root.rstrip("/") or "/"
        self.proc_root = proc_root.rstrip("/") or "/"
        self.root = root.rstrip("/")
        usual = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
        self.path = f"{path}:{usual}" if path else usual

    def sys(self, *parts: str) -> str:
        return os.path.join(self.sys_root, *parts)

    def proc(self, *parts: str) -> str:
        return os.path.join(self.proc_root, *parts)

    def host(self, path: str) -> str:
        """A path of the host below the root."""
        return f"{self.root}{path}"

    @staticmethod
    def raw(path: str, limit: int = 1 << 20) -> bytes | None:
        """The bytes of a file; None when it is not there or refuses to be read."""
        try:
            with open(path, "rb") as file:
                return file.read(limit)
        except OSError:
            return None

    def text(self, path: str, limit: int = 1 << 20) -> str | None:
        content = self.raw(path, limit)
        return None if content is None else content.decode("utf-8", "replace").strip("\n")

    def raw_text(self, path: str) -> str | None:
        """The content of a text file to the byte, its last line break included."""
        content = self.raw(path)
        return None if content is None else content.decode("utf-8", "replace")

    @staticmethod
    def names(path: str) -> list[str]:
        """The sorted names in a folder, empty when there is none."""
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def program(self, name: str) -> str | None:
        return shutil.which(name, path=self.path)

    def run(self, name: str, *words: str, seconds: int = DEADLINE) -> tuple[int, str, str] | None:
        """Exit status, output and errors of a command; None when the host does not have it.

        One that does not start has the status 126, one that does not end in time 124.
        """
        program = self.program(name)
        if program is None:
            return None
        guard = shutil.which("timeout", path="/usr/bin:/bin")
        # A driver that hangs must not hang the look at it: whoever asks would wait for ever, and never see why.
        before = [guard, "--kill-after=5", str(seconds)] if guard else []
        began = time.monotonic()
        try:
            rc, out, err = self._run(
                [*before, program, *words], environ_update={"LC_ALL": "C", "PATH": self.path}, handle_exceptions=False
            )
        except (OSError, ValueError) as error:
            return 126, "", f"it does not start: {error}"
        if guard and rc in (124, 137, -9) and time.monotonic() - began >= seconds:
            rc, err = 124, f"it did not end within {seconds} seconds. {err}"
        return rc, out.replace("\0", ""), err.replace("\0", "")

    def output(self, name: str, *words: str) -> str:
        """The output of a command that succeeded, else nothing."""
        answer = self.run(name, *words)
        return answer[1] if answer and answer[0] == 0 else ""

    def word(self, name: str, *words: str) -> str:
        """The first line of such an output: the answer of a command that gives one."""
        return first_line(self.output(name, *words))


def first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300].strip()
