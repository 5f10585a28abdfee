# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names, addresses and folders of a lab: everything follows from a few environment variables.

========================= ============================== ==========================================================
variable                  default                        meaning
========================= ============================== ==========================================================
``KIMI_K3_LAB_NAME``      ``kimi``                       labs on one machine differ in it; 1 to 6 letters or digits
``KIMI_K3_LAB_NET``       ``198.18.0``                   first three numbers of the lab's /24 network
``KIMI_K3_LAB_CACHE``     ``~/.cache/kimi-k3-lab``       downloads
``KIMI_K3_LAB_STATE``     ``/var/lib/kimi-k3-lab/NAME``  root file system, hosts, checkpoint, logs
``KIMI_K3_LAB_INVENTORY`` ``inventory/lab``              folder of this checkout that the inventory is written to
``KIMI_K3_LAB_MIRROR``    see ``lab_apt``                Debian mirror that the hosts' root comes from
========================= ============================== ==========================================================
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LAB = Path(__file__).resolve().parent
PROJECT = LAB.parents[1]
HUB_PORT = 8080
CDN_PORT = 8081
RANKS = 2


class LabError(Exception):
    """Something that the person at the keyboard has to know, in one sentence."""


@dataclass(frozen=True)
class Host:
    """One of the lab's machines."""

    name: str
    rank: int
    address: str
    machine: str  # its name on the machine outside, which several labs share


@dataclass(frozen=True)
class Settings:
    """What a lab is called and where it lives."""

    name: str
    net: str
    cache: Path
    state: Path
    inventory: Path = PROJECT / "inventory" / "lab"
    mirror: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the variables; LabError names the one that is wrong."""
        env = os.environ if environment is None else environment
        name = env.get("KIMI_K3_LAB_NAME") or "kimi"
        # Interface names have 15 characters at most: "vb-" + name + "-rank0".
        if not re.fullmatch(r"[a-z][a-z0-9]{0,5}", name):
            raise LabError(f"KIMI_K3_LAB_NAME is {name!r}: give 1 to 6 lower-case letters or digits, a letter first.")
        net = env.get("KIMI_K3_LAB_NET") or "198.18.0"
        try:
            ipaddress.IPv4Address(f"{net}.0")
        except ValueError:
            raise LabError(f"KIMI_K3_LAB_NET is {net!r}: give three numbers, such as 198.18.0.") from None
        cache = Path(env.get("KIMI_K3_LAB_CACHE") or "~/.cache/kimi-k3-lab").expanduser()
        state = Path(env.get("KIMI_K3_LAB_STATE") or f"/var/lib/kimi-k3-lab/{name}").expanduser()
        inventory = PROJECT / (env.get("KIMI_K3_LAB_INVENTORY") or "inventory/lab")
        for variable, path in (("CACHE", cache), ("STATE", state)):
            if not path.is_absolute():
                raise LabError(f"KIMI_K3_LAB_{variable} is {str(path)!r}: give an absolute path.")
        return cls(name, net, cache, state, inventory, env.get("KIMI_K3_LAB_MIRROR") or None)

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(
            Host(f"rank{rank}", rank, f"{self.net}.{11 + rank}", f"{self.name}-rank{rank}") for rank in range(RANKS)
        )

    def host(self, name: str) -> Host:
        """A host by its name."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise LabError(f"There is no host {name!r} in the lab; there are {', '.join(h.name for h in self.hosts)}.")

    @property
    def gateway(self) -> str:
        """The address of this machine on the lab's network."""
        return f"{self.net}.1"

    @property
    def bridge(self) -> str:
        return f"{self.name}-br"

    @property
    def table(self) -> str:
        """The nftables table of the lab."""
        return f"{self.name}_lab"

    @property
    def endpoint(self) -> str:
        """The URL of the hub."""
        return f"http://{self.gateway}:{HUB_PORT}"

    @property
    def lock_file(self) -> Path:
        """Held by the command that is changing the lab; outside of the state, which may be removed."""
        return Path(f"/run/lock/kimi-k3-lab-{self.name}")

    @property
    def key(self) -> Path:
        return self.state / "id"

    @property
    def base(self) -> Path:
        """The root file system under all hosts."""
        return self.state / "base"

    @property
    def wheels(self) -> Path:
        """Downloaded packages of all locks."""
        return self.cache / "wheels"

    @property
    def wheelhouse(self) -> Path:
        """The packages of the lock in force, and no others."""
        return self.state / "wheelhouse"

    @property
    def shared(self) -> Path:
        """A directory that all hosts see, as one on a shared file system."""
        return self.state / "shared"

    @property
    def hub_root(self) -> Path:
        return self.state / "hub"
