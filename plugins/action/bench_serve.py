# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Follow the module bench_serve, and tell how far it is while it measures."""

from __future__ import annotations

from ansible_collections.baremetal.kimi_k3.plugins.action import hf_checkpoint


class ActionModule(hf_checkpoint.ActionModule):
    """Long work in the background is followed in one way, whatever the work is."""
