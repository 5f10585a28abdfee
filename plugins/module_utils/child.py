# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A command that takes long: its output as it comes, in a session of its own, ended with whoever started it."""

from __future__ import annotations

import ctypes
import os
import pwd
import selectors
import signal
import subprocess
import time
import typing as t

_TAIL = 64 * 1024
_TICK = 0.5
_GRACE = 5.0
_PR_SET_PDEATHSIG = 1


def shortened(output: bytes, mark: bytes) -> bytes:
    """The end of what was printed, and before it the mark, if that was printed at all."""
    if len(output) <= _TAIL:
        return output
    return (mark if mark in output else b"") + output[-_TAIL // 2 :]


def die_with_parent() -> None:
    """A command whose measurement was killed must not go on to disturb the next one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """One long command, watched until it ends; nothing of it is left behind.

    C(user) is the account to run it as, taken only by root; C(log) takes all that it prints, and C(mark) is a word
    that the shortened output goes on having.
    """

    def __init__(
        self,
        command: list[str],
        *,
        environment: dict[str, str],
        user: str | None,
        folder: str,
        log: str,
        mark: str = "",
    ) -> None:
        owner: dict[str, t.Any] = {}
        if user and os.geteuid() == 0:
            entry = pwd.getpwnam(user)
            owner = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        self.tail, self._mark = b"", mark.encode()
        self.log = open(log, "wb")  # noqa: SIM115  (closed with the child)
        # What Ansible offers in its place says nothing before the command has ended.
        self.process = subprocess.Popen(  # pylint: disable=ansible-bad-function
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (this process has no threads)
            **owner,
        )

    def text(self) -> str:
        return self.tail.decode("utf-8", "replace")

    def watch(self, seconds: float, look: t.Callable[[str], t.Any]) -> int | None:
        """The exit status; nothing when the time is over."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                if selector.select(_TICK):
                    piece = os.read(self.process.stdout.fileno(), 65536)
                    if not piece:
                        return self.process.wait()
                    self.log.write(piece)
                    self.log.flush()
                    self.tail = shortened(self.tail + piece, self._mark)
                elif self.process.poll() is not None:
                    return self.process.returncode
                look(self.text())
        return None

    def end(self) -> None:
        """End the whole session; the process itself may be gone, and others of it not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(_GRACE)
            except (ProcessLookupError, PermissionError):
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.stdout.close()
        self.log.close()
