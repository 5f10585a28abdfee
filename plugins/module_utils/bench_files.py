# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of a benchmark on the controller."""

from __future__ import annotations

import json
import os
import typing as t

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.bench import BenchError
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.bench_report import read_record
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import make_dirs, write_atomic

RECORD = "bench.json"


def read_file(path: str) -> t.Any:
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except (FileNotFoundError, NotADirectoryError):
        raise BenchError(f"There is no {path}.") from None
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def read_folder(folder: str) -> dict[str, t.Any]:
    """The record of a benchmark."""
    path = os.path.join(folder, RECORD)
    return read_record(read_file(path), path)


def write_changed(files: t.Mapping[str, bytes], check: bool) -> list[str]:
    """Write what is not there yet; the paths of it."""
    changed = []
    for path, data in files.items():
        try:
            with open(path, "rb") as stream:
                if stream.read() == data:
                    continue
        except FileNotFoundError:
            pass
        changed.append(path)
        if not check:
            make_dirs(os.path.dirname(path))
            write_atomic(path, data)
    return changed
