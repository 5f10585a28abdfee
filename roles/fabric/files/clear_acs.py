# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Clears the control register of Access Control Services on every PCIe bridge.

With it set, traffic between a GPU and the adapter behind the same switch goes up to the root and back. It is set anew
at each boot. In a virtual machine it must stay, which is for the role to know.
"""

from __future__ import annotations

import argparse
import struct
import sys
from pathlib import Path

ACS_CAPABILITY, ACS_CONTROL = 0x000D, 6


def control_offset(config: bytes) -> int | None:
    """Where the control register is in a device's configuration space, None where there is none."""
    offset, seen = 0x100, set()
    while 0x100 <= offset <= len(config) - 8 and offset not in seen:
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == ACS_CAPABILITY:
            return offset + ACS_CONTROL
        offset = header >> 20
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sys", type=Path, default=Path("/sys"))
    options = parser.parse_args()
    cleared = 0
    for device in sorted((options.sys / "bus/pci/devices").glob("*")):
        if not (device / "class").read_text().startswith("0x0604"):
            continue
        with (device / "config").open("r+b", buffering=0) as config:
            offset = control_offset(config.read(4096))
            if offset is None:
                continue
            config.seek(offset)
            if config.read(2) != b"\0\0":
                config.seek(offset)
                config.write(b"\0\0")
                cleared += 1
                print(f"cleared {device.name}")
    print(f"{cleared} bridges cleared")
    return 0


if __name__ == "__main__":
    sys.exit(main())
