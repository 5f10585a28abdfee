# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans at Kimi K3's real size: 497,220 tensors in 96 files of 1.56 TB, all of it holes."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import checkpoint_plan as planning
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_job import Outcome, Request, ensure
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import Hub
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.safetensors_header import StructureError, check_file

ROOT = Path(__file__).parents[4]
sys.path.insert(0, str(ROOT / "tests" / "tools"))

import k3_hub
import k3_index

VISION_BYTES = 894_717_952
VISION_TENSORS = 168
# A process of its own, so that its memory is that of a run and of nothing else.
RUN = """
import json, os, re, sys, threading, time
from pathlib import Path
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_job import Request, ensure
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.fetch import Options
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import Hub

# As many threads as on the hosts that this is for.
os.sched_getaffinity = lambda _process: set(range(128))
values = json.loads(sys.argv[1])
hub = Hub(values.pop("endpoint"), values["repository"], values["revision"], stop=threading.Event())
options = Options(connections=32, max_connections=32)
outcome = ensure(Request(hub=hub, options=options, **values))
plan = outcome.plan
peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
size = sum(entry.size for entry in plan.entries if entry.path.endswith(".safetensors"))
print(json.dumps({"summary": plan.summary, "bytes": size, "peak": peak, "cpu": time.process_time(),
    "fetch": outcome.fetch, "hashed": outcome.hashed, "verified": outcome.verified}))
"""
# Processor time, which what others do on the machine hardly changes.
PLAN_CPU, RECEIPTS_CPU = 5, 1
PEAK = 256 << 20


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[k3_hub.K3Hub]:
    with k3_hub.K3Hub(tmp_path_factory.mktemp("k3")) as started:
        yield started


@pytest.fixture(scope="module")
def weights(hub: k3_hub.K3Hub) -> dict[str, str]:
    return planning.weight_map_of(json.loads((hub.folder / k3_index.INDEX_NAME).read_bytes()))


@pytest.fixture
def dest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)
    return tmp_path / "checkpoint"


_plans: dict[str, planning.Selection] = {}


def plan(weights: dict[str, str], stage: int, **changes: Any) -> planning.Selection:
    options = {"pipeline_layers": [47, 46], "layers": 93, "language_model_only": True, **changes}
    key = json.dumps([stage, options])
    if key not in _plans:
        _plans[key] = planning.select(weights, stages=[stage], **options)
    return _plans[key]


def data_size(selection: planning.Selection) -> int:
    numbers = {k3_index.shard_name(number): number for number in range(1, k3_index.SHARDS + 1)}
    return sum(k3_index.data_size(numbers[file]) for file in selection.files)


def values_of(dest: Path, stage: int, **changes: Any) -> dict[str, Any]:
    return {
        "repository": k3_index.REPOSITORY,
        "revision": k3_index.REVISION,
        "dest": str(dest),
        "scope": "stage",
        "pipeline_layers": [47, 46],
        "stages": [stage],
        "layers": 93,
        "language_model_only": True,
        "allow_tmpfs": True,
        **changes,
    }


def apart(hub: k3_hub.K3Hub, what: str, values: dict[str, Any]) -> dict[str, Any]:
    """A run in a process of its own, and what it tells of itself, start of the interpreter included."""
    words = [sys.executable, "-c", RUN, json.dumps({"endpoint": hub.endpoint, **values})]
    environment = {"PYTHONPATH": str(ROOT / ".collections")}
    told = json.loads(subprocess.run(words, stdout=subprocess.PIPE, env=environment, check=True).stdout)
    print(f"{what}: {told['peak'] / 2**20:.0f} MiB, {told['cpu']:.1f} s of CPU")
    return told


def run(hub: k3_hub.K3Hub, dest: Path, stage: int, **changes: Any) -> Outcome:
    client = Hub(hub.endpoint, k3_index.REPOSITORY, k3_index.REVISION, retries=1, stop=threading.Event())
    return ensure(Request(hub=client, **values_of(dest, stage, **changes)))


def shards_of(outcome: Outcome) -> list[int]:
    return sorted(int(path[6:11]) for path in outcome.fetch if path.endswith(".safetensors"))


def weight_bytes(outcome: Outcome) -> int:
    return sum(entry.size for entry in outcome.plan.entries if entry.path.endswith(".safetensors"))


def break_header(path: Path, name: str, entry: dict[str, Any] | None) -> None:
    """Change or remove a tensor in a shard's header, whose length stays."""
    with path.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        if entry is None:
            del header[name]
        else:
            header[name] = entry
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= length
        stream.seek(8)
        stream.write(text.ljust(length))


def test_the_stand_in_is_as_large_as_the_model(hub: k3_hub.K3Hub, weights: dict[str, str]) -> None:
    assert len(weights) == k3_index.TENSORS
    assert sum(k3_index.data_size(number) for number in range(1, 97)) == k3_index.TOTAL_SIZE
    assert (hub.folder / k3_index.INDEX_NAME).stat().st_size == 59_764_096
    assert len(hub.listing) == 119
    assert len(set(weights.values())) == 96
    assert len(k3_index.MLA_LAYERS) == 24
    sizes = [round(k3_index.data_size(number) / 1e9, 3) for number in (1, 2, 4, 94, 95, 96)]
    assert sizes == [2.341, 16.990, 16.567, 4.698, 0.092, 0.802]


@pytest.mark.parametrize(("stage", "gigabytes", "files"), [(0, 783.9, 48), (1, 780.7, 47)])
def test_a_stage_is_planned_in_little_memory_and_time(
    hub: k3_hub.K3Hub, dest: Path, stage: int, gigabytes: float, files: int
) -> None:
    k3_hub.pretend(hub, dest, [*(range(1, 48) if stage == 0 else range(48, 94)), 94])
    told = apart(hub, f"plan of stage {stage}", values_of(dest, stage))
    assert told["peak"] < PEAK
    assert told["cpu"] < PLAN_CPU
    assert abs(told["bytes"] / 1e9 - gigabytes) < 0.1
    assert len(told["summary"]["weight_files"]) == files
    assert told["summary"]["vision_tensors"] == 0
    assert told["summary"]["unplaced"] == []
    assert {path.name for path in dest.glob("*.safetensors")} == set(told["summary"]["weight_files"])
    told = apart(hub, f"receipts of stage {stage}", values_of(dest, stage))
    assert told["verified"].startswith("receipt")
    assert told["cpu"] < RECEIPTS_CPU
    assert told["peak"] < PEAK / 4


def test_all_is_planned_in_little_time_and_proven_by_receipts_in_less(hub: k3_hub.K3Hub, dest: Path) -> None:
    k3_hub.pretend(hub, dest)
    values = values_of(dest, 0, scope="all", stages=[])
    told = apart(hub, "plan of all", values)
    assert told["cpu"] < PLAN_CPU
    assert len(told["summary"]["weight_files"]) == k3_index.SHARDS
    told = apart(hub, "receipts of all", values)
    assert told["verified"].startswith("receipt")
    assert told["cpu"] < RECEIPTS_CPU


@pytest.fixture
def hollow(hub: k3_hub.K3Hub, weights: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Shards with all their tensors and hardly any numbers, so that they can be fetched and hashed."""
    names: dict[str, list[str]] = {}
    for name, file in weights.items():
        names.setdefault(file, []).append(name)
    padding, nothing = {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]}, [0, 0]
    known, paths = dict(hub._by_path), []
    for file in sorted(names):
        tensors = {name: {"dtype": "U8", "shape": [0], "data_offsets": nothing} for name in names[file]}
        text = json.dumps({**tensors, "padding": padding}).encode()
        data = len(text).to_bytes(8, "little") + text + bytes(1 << 20)
        paths.append(hub.folder / file)
        paths[-1].write_bytes(data)
        known[file] = known[file]._replace(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(hub, "_by_path", known)
    yield paths
    for path in paths:
        path.unlink()


def test_fetching_and_hashing_take_little_memory_too(hub: k3_hub.K3Hub, dest: Path, hollow: list[Path]) -> None:
    dest.mkdir()
    for path in hollow[::2]:
        shutil.copy(path, dest)
    told = apart(hub, "fetch and hash", values_of(dest, 0, scope="all", stages=[], verify="full"))
    assert told["peak"] < PEAK
    assert {path.name for path in hollow[::2]} <= set(told["hashed"])
    assert {path.name for path in hollow[1::2]} <= set(told["fetch"])


def test_both_halves_together_are_the_language_model(weights: dict[str, str]) -> None:
    halves = [plan(weights, stage) for stage in (0, 1)]
    assert [round(data_size(half) / 1e9, 1) for half in halves] == [783.9, 780.7]
    names = [name for half in halves for held in half.tensors.values() for name in held]
    assert len(names) == len(set(names)) == k3_index.TENSORS - VISION_TENSORS
    assert set(halves[0].files) & set(halves[1].files) == {k3_index.shard_name(94)}
    assert halves[0].warnings == halves[1].warnings == []


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 784.8), (1, 781.6)])
def test_with_vision_the_plan_says_so_and_is_larger_by_the_tower(
    weights: dict[str, str], stage: int, gigabytes: float
) -> None:
    without, seeing = plan(weights, stage), plan(weights, stage, language_model_only=False)
    assert (without.vision_tensors, seeing.vision_tensors) == (0, VISION_TENSORS)
    assert seeing.summary()["language_model_only"] is False
    assert set(seeing.files) - set(without.files) == {k3_index.shard_name(95), k3_index.shard_name(96)}
    assert data_size(seeing) - data_size(without) == VISION_BYTES
    assert abs(data_size(seeing) / 1e9 - gigabytes) < 0.1


@pytest.mark.parametrize("counts", [[45, 48], [48, 45]])
def test_another_partition_moves_the_layers_between_and_no_other(weights: dict[str, str], counts: list[int]) -> None:
    moved = {k3_index.shard_name(layer + 1) for layer in range(min(47, counts[0]), max(47, counts[0]))}
    for stage in (0, 1):
        before, after = plan(weights, stage), plan(weights, stage, pipeline_layers=counts)
        assert set(before.files) ^ set(after.files) == moved
        kept = set(before.files) & set(after.files)
        assert all(before.tensors[file] == after.tensors[file] for file in kept)


def test_after_another_partition_a_host_lacks_only_what_moved_to_it(hub: k3_hub.K3Hub, dest: Path) -> None:
    k3_hub.pretend(hub, dest, range(48, 95))
    assert shards_of(run(hub, dest, 1, check=True)) == []
    moved = run(hub, dest, 1, pipeline_layers=[45, 48], check=True)
    assert shards_of(moved) == [46, 47]
    assert moved.hashed == []


@pytest.mark.parametrize("number", [1, 2, 4, 94, 95, 96])
def test_every_tensor_of_the_index_is_in_the_header_of_its_file(
    weights: dict[str, str], tmp_path: Path, number: int
) -> None:
    path = k3_index.write_shard(tmp_path, number)
    names = [name for name, file in weights.items() if file == path.name]
    assert names
    assert check_file(str(path), path.stat().st_size, names) == k3_index.data_size(number)


def test_a_stage_whose_file_lacks_a_tensor_is_refused(hub: k3_hub.K3Hub, dest: Path) -> None:
    dest.mkdir()
    name = "language_model.model.layers.91.block_sparse_moe.experts.895.w2.weight_scale"
    break_header(k3_index.write_shard(dest, 92), name, None)
    k3_hub.pretend(hub, dest, [92])
    with pytest.raises(StructureError, match=r"model-00092-of-000096\.safetensors .* lacks .*experts\.895\.w2"):
        run(hub, dest, 1)
    assert not (dest / "checkpoint.json").exists()


def test_a_stage_whose_header_gives_a_tensor_another_size_is_refused(hub: k3_hub.K3Hub, dest: Path) -> None:
    dest.mkdir()
    name = "language_model.model.layers.47.block_sparse_moe.experts.7.w1.weight_scale"
    path = k3_index.write_shard(dest, 48)
    break_header(path, name, {"dtype": "U8", "shape": [3072, 112], "data_offsets": [0, 1]})
    k3_hub.pretend(hub, dest, [48])
    with pytest.raises(StructureError, match=r"model-00048-.*w1\.weight_scale 1 bytes, but a shape of 344064"):
        run(hub, dest, 1)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_than_its_header_says_is_refused(tmp_path: Path, change: int) -> None:
    path = k3_index.write_shard(tmp_path, 96)
    size = path.stat().st_size + change
    with path.open("r+b") as stream:
        stream.truncate(size)
    with pytest.raises(StructureError, match=f"describes {size - change} bytes, the file has {size}"):
        check_file(str(path), size, [])
