# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a command in a control group; with ``--child`` watch it, and start it again when it ends with a given status.

``lab_supervise.py --enter GROUP -- COMMAND``: move into the group and become the command.
``lab_supervise.py --enter GROUP --child GROUP2 --again 133 -- COMMAND``: move into the first group, run the command in
the second one, again and again as long as it ends with status 133.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path


def enter(group: Path) -> None:
    """Move this process into a control group, which is made if need be."""
    group.mkdir(parents=True, exist_ok=True)
    (group / "cgroup.procs").write_text(str(os.getpid()))


def run_in(group: Path, argv: list[str]) -> int:
    """Run a command in a control group and give its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            enter(group)
            os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
        finally:
            os._exit(127)
    _rest, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def end_left_overs(group: Path) -> None:
    """End what a host has left behind, which would be in the way of the next one."""
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + 10
    while "populated 1" in (group / "cgroup.events").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)


def main(arguments: list[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description="Run a command in a control group.")
    parser.add_argument("--enter", type=Path, required=True)
    parser.add_argument("--child", type=Path)
    parser.add_argument("--again", type=int)
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args(arguments)
    enter(options.enter)
    if options.child is None:
        os.execvp(options.argv[0], options.argv)  # noqa: S606 - no shell is wanted
    while True:
        status = run_in(options.child, options.argv)
        if options.again is None or status != options.again:
            return status if status >= 0 else 128 - status
        end_left_overs(options.child)


if __name__ == "__main__":
    sys.exit(main())
