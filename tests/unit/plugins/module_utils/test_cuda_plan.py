# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What role cuda decides on the kinds of host that there are."""

from __future__ import annotations

import base64
import hashlib

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import cuda_plan

SETTINGS = {
    "manage_driver": "auto",
    "driver_floor": "580",
    "branch": "580",
    "compat": False,
    "compat_package": "cuda-compat-13-0",
    "fabric": True,
    "virtualization": "none",
    "driver_package": "nvidia-open",
    "pinning_package": "nvidia-driver-pinning-580",
    "companions": ["nvidia-fabricmanager", "libnvidia-nscq", "libnvsdm"],
    "extra_packages": ["nvlsm"],
    "hold": True,
    "services": ["nvidia-persistenced.service", "nvidia-fabricmanager.service"],
    "repository_url": "",
    "key_url": "",
    "key_fingerprint": "",
    "key_sha256": "",
}
VERSION = "580.159.04"
UNITS = {"active": "active", "enabled": "enabled"}


def settings(**changes):
    return {**SETTINGS, **changes}


def driver(running=VERSION, installed=VERSION, flavour="open", **changes):
    flavours = {"running_flavour": flavour if running else None, "installed_flavour": flavour if installed else None}
    return {"running": running, "installed": installed, "run_file": False, **flavours, **changes}


def look(packages=None, *, held=(), origins=None, preferences=(), policy=None, **changes):
    installed = {name: {"version": version} for name, version in (packages or {}).items()}
    found = {
        cuda_plan.kind_of(name): {"package": name, "version": entry["version"]}
        for name, entry in installed.items()
        if cuda_plan.kind_of(name) != name
    }
    return {
        "driver": driver(),
        "pci": [{"bus": "0000:15:0b.0"}] * 8,
        "services": dict.fromkeys(SETTINGS["services"], UNITS),
        "packages": {
            "installed": installed,
            "held": list(held),
            "origins": origins or {},
            "preferences": list(preferences),
            "companions": found,
            "policy": policy or {},
        },
        **changes,
    }


RIGHT = {
    "nvidia-open": f"{VERSION}-1",
    "nvidia-fabricmanager": f"{VERSION}-1",
    "libnvidia-nscq": f"{VERSION}-1",
    "libnvsdm": f"{VERSION}-1",
    "nvlsm": "2025.10.11-1",
}


def test_what_is_right_is_left_alone():
    plan = cuda_plan.plan(settings(), look(RIGHT, held=RIGHT))
    assert (plan["case"], plan["act"], plan["hold"], plan["services"], plan["reboot"]) == ("leave", False, [], [], "")
    assert plan["text"] == f"Driver {VERSION} is new enough and open: it is left alone."


def test_a_host_without_gpus_and_one_that_is_not_ours():
    nothing = look({}, driver=driver(None, None), pci=[], services={})
    assert cuda_plan.plan(settings(), nothing)["case"] == "none"
    assert cuda_plan.plan(settings(manage_driver="false"), look({}, driver=driver(None, None)))["case"] == "off"


def test_companions_that_are_missing_or_unlike():
    packages = {name: version for name, version in RIGHT.items() if name != "libnvsdm"}
    packages["nvidia-fabricmanager"] = "590.48.01-1"
    plan = cuda_plan.plan(settings(), look(packages, held=packages))
    assert plan["case"] == "companions"
    assert plan["missing"] == ["libnvsdm", "nvidia-fabricmanager"]
    assert "nvidia-fabricmanager 590.48.01-1 does not fit" in plan["text"]
    # Named with the branch, as Ubuntu's archive has them.
    named = {**RIGHT, "nvidia-fabricmanager-580": f"{VERSION}-0ubuntu1"}
    del named["nvidia-fabricmanager"]
    assert cuda_plan.plan(settings(), look(named, held=named))["case"] == "leave"


def test_a_guest_gets_no_fabric_manager():
    guest = look({"nvidia-open": f"{VERSION}-1", "nvlsm": "1"}, held=["nvidia-open", "nvlsm"])
    assert cuda_plan.plan(settings(virtualization="kvm"), guest)["case"] == "leave"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"driver": driver("570.148.08", "570.148.08")},
            "is older than 580. set cuda_manage_driver: true (upgrade and reboot) or cuda_compat: true",
        ),
        (
            {"driver": driver(flavour="proprietary")},
            "has the proprietary kernel modules, which do not start a Blackwell GPU. set cuda_manage_driver: true",
        ),
        (
            {"driver": driver("570.1.1", "570.1.1"), "origins": {"nvidia-open": "lambda"}},
            "Lambda Stack owns it: upgrade that, or set cuda_manage_driver: true",
        ),
        (
            {"driver": driver("570.1.1", "570.1.1", run_file=True)},
            "It came from a .run file: remove it with nvidia-uninstall, packages cannot replace it.",
        ),
    ],
)
def test_where_somebody_has_to_decide(changes, sentence):
    with pytest.raises(cuda_plan.CudaError) as error:
        cuda_plan.plan(settings(), look({"nvidia-open": "570.1.1-1"}, **changes))
    assert sentence in str(error.value)


def test_lambda_stack_is_left_in_peace():
    pin = {"file": "/etc/apt/preferences.d/lambda", "package": "*", "pin": "origin archive.lambdalabs.com"}
    there = look({**RIGHT, "lambda-stack-cuda": "1"}, preferences=[{**pin, "priority": "1001"}])
    plan = cuda_plan.plan(settings(), there)
    assert (plan["case"], plan["hold"]) == ("leave", [])
    assert "from Lambda Stack" in plan["text"]


def test_told_so_an_old_driver_is_upgraded():
    old = look({"nvidia-open": "570.1.1-1"}, driver=driver("570.1.1", "570.1.1"))
    assert cuda_plan.plan(settings(manage_driver="true"), old)["case"] == "upgrade"
    held = look({"nvidia-open": "570.1.1-1"}, driver=driver("570.1.1", "570.1.1"), held=["nvidia-fabricmanager-570"])
    assert cuda_plan.plan(settings(manage_driver="true"), held)["unhold"] == ["nvidia-fabricmanager-570"]
    assert cuda_plan.plan(settings(compat=True), old)["missing"] == ["cuda-compat-13-0"]
    fresh = look({}, driver=driver(None, None))
    plan = cuda_plan.plan(settings(), fresh)
    assert (plan["case"], plan["act"]) == ("install", True)


def test_a_reboot_has_a_reason():
    plan = cuda_plan.plan(settings(), look(RIGHT, held=RIGHT, driver=driver("570.1.1", VERSION)))
    assert plan["reboot"] == f"driver 570.1.1 runs and {VERSION} is installed"
    changed = {**driver(), "running_flavour": "proprietary"}
    assert "the open one is installed" in cuda_plan.reboot_reason(changed)
    assert cuda_plan.reboot_reason(driver(None, VERSION)) == ""


def versions(*found):
    return {"candidate": found[0] if found else None, "versions": {one: {"priority": 500} for one in found}}


def test_companions_come_in_the_drivers_version_and_under_the_name_there_is():
    policy = {
        "nvidia-open": versions(f"{VERSION}-1", "590.48.01-1"),
        "nvidia-fabricmanager": versions("590.48.01-1"),
        "nvidia-fabricmanager-580": versions(f"{VERSION}-1"),
        "libnvidia-nscq": versions("590.48.01-1", f"{VERSION}-1"),
        "libnvsdm": versions(f"{VERSION}-1"),
    }
    fresh = look({}, driver=driver(None, None), policy=policy)
    first = cuda_plan.plan(settings(), fresh)
    chosen = cuda_plan.choose(settings(), first, fresh)
    assert chosen["packages"] == [
        f"nvidia-open={VERSION}-1",
        f"nvidia-fabricmanager-580={VERSION}-1",
        f"libnvidia-nscq={VERSION}-1",
        f"libnvsdm={VERSION}-1",
        "nvlsm",
    ]
    assert chosen["hold"] == ["nvidia-open", "nvidia-fabricmanager-580", "libnvidia-nscq", "libnvsdm", "nvlsm"]
    policy["nvidia-open"] = versions("590.48.01-1")
    with pytest.raises(cuda_plan.CudaError, match=r"apt would install nvidia-open 590\.48\.01-1, not branch 580"):
        cuda_plan.choose(settings(), first, fresh)
    policy["nvidia-open"] = versions(f"{VERSION}-1")
    policy["libnvsdm"] = versions()
    with pytest.raises(cuda_plan.CudaError, match=f"has libnvsdm in version {VERSION}"):
        cuda_plan.choose(settings(), first, fresh)


@pytest.mark.parametrize(
    ("system", "version", "folder"),
    [
        ("ubuntu", "22.04", "ubuntu2204/x86_64"),
        ("ubuntu", "24.04", "ubuntu2404/x86_64"),
        ("debian", "12", "debian12/x86_64"),
    ],
)
def test_repositories(system, version, folder):
    found = cuda_plan.repository({"ID": system, "VERSION_ID": version, "machine": "x86_64"}, settings())
    assert found["url"] == f"https://developer.download.nvidia.com/compute/cuda/repos/{folder}/"
    assert found["fingerprint"] == cuda_plan.OLD_KEY


@pytest.mark.parametrize(
    ("system", "sentence"),
    [
        ({"ID": "debian", "VERSION_ID": "13", "machine": "x86_64"}, "set cuda_key_url, and cuda_key_fingerprint"),
        ({"ID": "debian", "VERSION_ID": "13", "machine": "aarch64"}, "no CUDA repository for Debian 13 on arm64"),
        ({"ID": "fedora", "VERSION_ID": "42"}, "fedora 42 has no CUDA repository that this role knows"),
    ],
)
def test_systems_without_a_repository_are_told(system, sentence):
    with pytest.raises(cuda_plan.CudaError) as error:
        cuda_plan.repository(system, settings())
    assert sentence in str(error.value)


def test_a_mirror_wins():
    mirror = settings(repository_url="http://mirror/cuda", key_url="http://mirror/key", key_fingerprint="ab cd")
    found = cuda_plan.repository({"ID": "fedora", "VERSION_ID": "42"}, mirror)
    assert found == {"url": "http://mirror/cuda", "key": "http://mirror/key", "fingerprint": "ABCD"}


def packet(tag, body):
    """An OpenPGP packet with a two-byte length of the old form."""
    return bytes([0x80 | tag << 2 | 1]) + len(body).to_bytes(2, "big") + body


def test_fingerprints_of_keys():
    body = b"\x04" + b"\x60\0\0\0" + b"\x01" + b"\0\x08\x80" + b"\0\x08\x03"
    expected = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()
    key = packet(6, body) + packet(13, b"A user <a@b>") + packet(14, body)
    assert cuda_plan.fingerprints(key) == [expected]
    lines = base64.encodebytes(key).decode()
    armoured = f"-----BEGIN PGP PUBLIC KEY BLOCK-----\nVersion: x\n\n{lines}=abcd\n-----END PGP PUBLIC KEY BLOCK-----\n"
    assert cuda_plan.fingerprints(armoured.encode()) == [expected]
    new_form = bytes([0xC0 | 6, len(body)]) + body
    assert cuda_plan.fingerprints(new_form) == [expected]


@pytest.mark.parametrize("content", [b"<html>404</html>", b"\x99\x00", packet(13, b"a user"), b""])
def test_what_is_no_key(content):
    with pytest.raises(cuda_plan.CudaError, match="no OpenPGP key"):
        cuda_plan.fingerprints(content)
