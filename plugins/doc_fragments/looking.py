# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of the modules that look at a host."""

from __future__ import annotations


class ModuleDocFragment:
    # Where to look: another place than the running system for tests and rescued disks.
    DOCUMENTATION = r"""
options:
  sys_root:
    description: The directory to read instead of C(/sys).
    type: path
    default: /sys
  proc_root:
    description: The directory to read instead of C(/proc).
    type: path
    default: /proc
  root:
    description: The directory to read files such as C(/etc/apt/preferences) below.
    type: path
    default: /
  command_path:
    description: Directories, parted by colons, to look for commands in before the usual ones.
    type: str
    default: ''
"""
