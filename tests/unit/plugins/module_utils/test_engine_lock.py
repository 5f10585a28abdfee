# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading a lock."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.filter import engine_lock as filters
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import engine_lock

A = "sha256:" + "a" * 64
B = "sha256:" + "b" * 64
LOCK = f"""\
# made by a tool
--index-url https://index.example/simple
vllm==0.32.0 \\
    --hash={B} \\
    --hash={A}
    # via -r in.txt
Torch==2.13.0+cpu ; sys_platform == 'linux' --hash={A}  # trailing
uvicorn[standard]==0.40.0 --hash={A}
"""


def test_reads_what_tools_write():
    lock = engine_lock.parse_lock(LOCK, "vllm")
    assert lock.problems == []
    assert lock.sources == ["--index-url https://index.example/simple"]
    assert lock.text() == (
        f"torch==2.13.0+cpu ; sys_platform == 'linux' --hash={A}\n"
        f"uvicorn[standard]==0.40.0 --hash={A}\n"
        f"vllm==0.32.0 --hash={A} --hash={B}\n"
    )
    assert lock.digest() == hashlib.sha256(lock.text().encode()).hexdigest()
    assert lock.versions("VLLM") == ["0.32.0"]
    assert lock.versions("absent") == []


def test_form_and_sources_do_not_count():
    other = f"""
uvicorn[ standard ] == 0.40.0 --hash={A}
vllm==0.32.0 --hash={A} --hash {B}
torch==2.13.0+cpu ;   sys_platform   ==  'linux' --hash={A}
--find-links /srv/wheelhouse
"""
    assert engine_lock.parse_lock(other).digest() == engine_lock.parse_lock(LOCK).digest()


@pytest.mark.parametrize("change", [("0.32.0", "0.32.1"), (A, "sha256:" + "c" * 64), ("linux", "darwin")])
def test_content_counts(change):
    assert engine_lock.parse_lock(LOCK.replace(*change)).digest() != engine_lock.parse_lock(LOCK).digest()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it pins no package"),
        ("# nothing\n", "it pins no package"),
        (f"six==1.17.0 --hash={A}", "it does not pin vllm"),
        ("vllm==0.32.0", "line 1: vllm has no --hash"),
        (f"\nvllm>=0.32 --hash={A}", "line 2: vllm>=0.32 is not pinned to one version by =="),
        (f"vllm==0.* --hash={A}", "line 1: vllm==0.* is not pinned"),
        (f"vllm --hash={A}", "line 1: vllm is not pinned"),
        ("vllm==0.32.0 --hash=md5:abc", "is not sha256:<64 hex digits>"),
        ("-r other.txt", "line 1: -r cannot stand in a lock"),
        ("-e .", "line 1: -e cannot stand in a lock"),
        (f"vllm==1 --hash={A}\nVLLM==2 --hash={A}", "line 2: vllm is pinned a second time, first in line 1"),
    ],
)
def test_what_cannot_be_installed_as_one_lock(text, words):
    assert words in "\n".join(engine_lock.parse_lock(text, "vllm").problems)


def test_markers_tell_two_pins_apart():
    lock = engine_lock.parse_lock(
        f"n==1 ; python_version < '3.12' --hash={A}\nn==2 ; python_version >= '3.12' --hash={A}"
    )
    assert lock.problems == []
    assert lock.versions("n") == ["1", "2"]


def test_direct_reference():
    lock = engine_lock.parse_lock(f"pkg @ https://files.example/pkg-1-py3-none-any.whl --hash={A}")
    assert lock.problems == []
    assert lock.versions("pkg") == ["https://files.example/pkg-1-py3-none-any.whl"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1.0", "1.0.0", True),
        ("1.0.0-beta2", "1.0b2", True),
        ("2025.01.05", "2025.1.5", True),
        ("2.13.0+cpu", "2.13.0+CPU", True),
        ("2.13.0+cpu", "2.13.0", False),
        ("2.13.0+cpu", "2.13.0+cu130", False),
        ("v1.2", "1.2", True),
        ("1.0.post1", "1.0-post1", True),
        ("1.0", "1.0.1", False),
        ("1.0rc1", "1.0", False),
        ("10", "1", False),
    ],
)
def test_versions_compare(one, other, same):
    assert (engine_lock.version_key(one) == engine_lock.version_key(other)) is same


def test_installed_against_lock():
    lock = engine_lock.parse_lock(
        f"a==1 --hash={A}\nb==2.0 --hash={A}\nwin==1 ; sys_platform == 'win32' --hash={A}\nc==3 --hash={A}"
    )
    assert engine_lock.compare_installed(lock, {"a": "1", "b": "2", "c": "3"}) == []
    assert engine_lock.compare_installed(lock, {"a": "1", "b": "2.1", "stranger": "9"}) == [
        "b is 2.1, pinned 2.0",
        "c is not installed",
        "stranger 9 is not in the lock",
    ]


def test_set_of_packages_has_one_identity():
    one = engine_lock.packages_digest({"b": "2", "a": "1"})
    assert one == hashlib.sha256(b"a==1\nb==2\n").hexdigest()


def test_filter():
    result = filters.FilterModule().filters()["engine_lock"](LOCK)
    assert result == {
        "digest": engine_lock.parse_lock(LOCK).digest(),
        "packages": 3,
        "versions": {"vllm": ["0.32.0"], "torch": ["2.13.0+cpu"], "nvidia-nccl-cu13": [], "flashinfer-python": []},
        "problems": [],
    }
    assert filters.engine_lock(LOCK, "absent")["problems"] == ["it does not pin absent"]
    with pytest.raises(filters.AnsibleFilterError, match="not a int"):
        filters.engine_lock(3)


def test_shipped_locks():
    folder = Path(__file__).parents[4] / "roles/vllm/files/locks"
    shipped = sorted(folder.glob("vllm-*.txt"))
    assert shipped
    for path in shipped:
        lock = engine_lock.parse_lock(path.read_text(), "vllm")
        assert lock.problems == []
        assert lock.sources == []
        assert lock.versions("vllm") == [path.stem.removeprefix("vllm-")]
        for name in engine_lock.KEY_PACKAGES:
            assert lock.versions(name), f"{path.name} does not pin {name}"
