# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Attributes that the modules of this collection have in common."""

from __future__ import annotations


class ModuleDocFragment:
    # What every module says of itself; each module adds its own support values.
    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Can run in C(check_mode) and tells what it would do without changing the host.
  diff_mode:
    description: Tells what has changed, or would change in C(check_mode), when run with C(--diff).
  idempotent:
    description: When run again with the same options and nothing else has changed, it changes nothing.
  platform:
    description: Operating systems the module runs on.
    platforms: linux
    support: full
"""

    # For modules that only read.
    INFO = r"""
options: {}
attributes:
  check_mode:
    support: full
    details:
      - This module only reads.
  diff_mode:
    support: N/A
    details:
      - This module does not modify state.
  idempotent:
    support: full
    details:
      - This module does not modify state.
"""

    ACTIONGROUP = r"""
options: {}
attributes:
  action_group:
    description: >-
      Use C(group/baremetal.kimi_k3.kimi_k3) in C(module_defaults) to set defaults for all modules of this collection.
    support: full
    membership:
      - baremetal.kimi_k3.kimi_k3
"""
