# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A hub that lists Kimi K3 at its real size and has its index and small files, and a directory that seems to hold it.

    k3_hub.py DIR       make DIR/hub and DIR/checkpoint, serve the hub, and tell its address

The shards are holes behind real headers, so nobody can fetch or hash them; planning, the check of headers, and receipts
never do.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "molecule" / "lab"), str(ROOT / "tests" / "tools"), str(ROOT / ".collections")]

import k3_index
import lab_hub
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import Receipts


class K3Hub(lab_hub.Hub):
    """The lab's hub with a listing that is given, and not hashed from files."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.folder = Path(root) / k3_index.REPOSITORY / k3_index.REVISION
        self.listing = k3_index.write_files(self.folder)
        self._by_path = {
            item["path"]: lab_hub.Entry(
                item["path"], item["size"], item.get("lfs", {}).get("oid", ""), item["oid"], "lfs" in item
            )
            for item in self.listing
        }
        suffixes = (*lab_hub.LFS_SUFFIXES, k3_index.INDEX_NAME)
        super().__init__(root, lfs_suffixes=suffixes, **options)

    def entries(self, repository: str, commit: str) -> list[lab_hub.Entry]:
        return list(self._by_path.values())

    def entry(self, repository: str, commit: str, path: str) -> lab_hub.Entry:
        if path not in self._by_path:
            raise FileNotFoundError(path)
        return self._by_path[path]


def pretend(hub: K3Hub, dest: Path, shards: Iterable[int] = range(1, k3_index.SHARDS + 1)) -> None:
    """Put shards into DEST, and receipts as if they had been hashed."""
    (dest / ".kimi-k3").mkdir(parents=True, exist_ok=True)
    receipts = Receipts(str(dest / ".kimi-k3" / "receipts.json"), k3_index.REVISION)
    for number in shards:
        path = dest / k3_index.shard_name(number)
        if not path.exists():
            k3_index.write_shard(dest, number)
        digest = SimpleNamespace(sha256=k3_index.shard_digest(number), blob=None)
        receipts.put(path.name, path.stat(), digest, hub.endpoint)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    options = parser.parse_args(arguments)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with K3Hub(options.directory / "hub") as hub:
        pretend(hub, options.directory / "checkpoint")
        sys.stdout.write(f"hub {hub.endpoint} cdn {hub.cdn}\n")
        sys.stdout.flush()
        ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
