# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small checkpoint, a hub that serves it, and runs against both."""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "molecule" / "lab"))

REPOSITORY = "lab/tiny"
LAYERS = 4
SHARD = 300_000


def safetensors(tensors: dict[str, bytes]) -> bytes:
    """A safetensors file of bytes."""
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00005.safetensors"


def tiny_files() -> dict[str, bytes]:
    """Four layers in a file each, and the rest in a fifth; small files with names that need care."""
    numbers = random.Random(7)
    weights: dict[str, dict[str, bytes]] = {}
    for layer in range(LAYERS):
        weights[shard(layer + 1)] = {
            f"model.layers.{layer}.mlp.{part}.weight": numbers.randbytes(SHARD // 2) for part in ("up", "down")
        }
    weights[shard(5)] = {
        name: numbers.randbytes(5000) for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    }
    index = {
        "metadata": {"total_size": sum(len(data) for tensors in weights.values() for data in tensors.values())},
        "weight_map": {name: file for file, tensors in weights.items() for name in tensors},
    }
    return {
        **{file: safetensors(tensors) for file, tensors in weights.items()},
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": b'{"tie_word_embeddings": false}',
        "tokenizer/a name with spaces.json": b'{"a": 1}',
        "empty.txt": b"",
        "tiktoken.model": b"large by its suffix only",
    }


@dataclass
class World:
    """A repository, its hub, and a directory to fetch into."""

    hub: Any
    root: Path
    files: dict[str, bytes]
    commit: str
    dest: Path
    defaults: dict[str, Any] = field(default_factory=dict)

    def publish(self, files: dict[str, bytes]) -> None:
        """Serve other files, under a new commit."""
        from lab_hub import make_repo  # noqa: PLC0415

        self.files = files
        self.commit = make_repo(self.root, REPOSITORY, files)

    def request(self, **changes: Any) -> Any:
        from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_job import Request  # noqa: PLC0415
        from ansible_collections.baremetal.kimi_k3.plugins.module_utils.fetch import Options  # noqa: PLC0415
        from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import Hub  # noqa: PLC0415

        options = {"retries": 3, "backoff": 0.01, "connections": 4, "flush_seconds": 0.05}
        options.update(changes.pop("options", {}))
        stop = threading.Event()
        client = {"retries": options["retries"], "backoff": options["backoff"], "timeout": 5, "stop": stop}
        client.update(changes.pop("client", {}))
        values = {
            "repository": REPOSITORY,
            "revision": self.commit,
            "dest": str(self.dest),
            "scope": "all",
            "pipeline_layers": [],
            "stages": [],
            "language_model_only": True,
            "allow_tmpfs": True,
            "options": Options(**options),
            "stop": stop,
            **self.defaults,
            **changes,
        }
        if "hub" not in values:
            values["hub"] = Hub(self.hub.endpoint, values["repository"], values["revision"], **client)
        return Request(**values)

    def run(self, **changes: Any) -> Any:
        from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_job import ensure  # noqa: PLC0415

        return ensure(self.request(**changes))

    def stage(self, number: int, **changes: Any) -> Any:
        return self.run(**{"scope": "stage", "pipeline_layers": [3, 1], "stages": [number], **changes})

    def held(self) -> dict[str, bytes]:
        """Files under their final names."""
        own = (".kimi-k3", "checkpoint.json")
        paths = [path for path in self.dest.rglob("*") if path.is_file()] if self.dest.exists() else []
        names = {path.relative_to(self.dest).as_posix(): path for path in paths}
        return {name: path.read_bytes() for name, path in names.items() if name.split("/")[0] not in own}

    def own(self, name: str) -> Path:
        return self.dest / ".kimi-k3" / name

    def summary(self) -> dict[str, Any]:
        return json.loads((self.dest / "checkpoint.json").read_text())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from lab_hub import Hub, make_repo  # noqa: PLC0415

    # No test here pulls the plug, and waiting for the disk is most of the time.
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda _descriptor: None)
    root = tmp_path / "repositories"
    files = tiny_files()
    commit = make_repo(root, REPOSITORY, files)
    with Hub(root) as hub:
        yield World(hub, root, files, commit, tmp_path / "srv" / "checkpoint")
