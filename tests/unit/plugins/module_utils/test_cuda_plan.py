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


def test_lambda_stack_gets_nothing_of_nvidia_beside_it_unless_told():
    """What Lambda did not bring is named, and neither a repository, nor a package, nor a service is touched."""
    stopped = {"nvidia-fabricmanager.service": {"active": "inactive", "enabled": "disabled"}}
    bare = look({"nvidia-open": f"{VERSION}-0lambda1", "lambda-stack-cuda": "1"}, services=stopped)
    plan = cuda_plan.plan(settings(), bare)
    assert (plan["case"], plan["act"], plan["services"], plan["hold"], plan["pin"]) == ("leave", False, [], [], "")
    assert plan["lambda_stack"] is True
    assert plan["text"] == (
        f"Driver {VERSION} from Lambda Stack is new enough and open: it is left alone. nvidia-fabricmanager, "
        "libnvidia-nscq, libnvsdm, nvlsm is missing: upgrade Lambda Stack, or set cuda_manage_driver: true."
    )
    plan = cuda_plan.plan(settings(manage_driver="true"), bare)
    assert (plan["case"], plan["act"]) == ("companions", True)
    by_release = {"package": "*", "pin": "release o=Lambda Labs", "priority": "1001"}
    assert cuda_plan.plan(settings(), look({"nvidia-open": f"{VERSION}-1"}, preferences=[by_release]))["act"] is False


def test_a_guest_gets_nothing_that_manages_nvswitch():
    guest = look({"nvidia-open": f"{VERSION}-1"}, held=["nvidia-open"])
    assert cuda_plan.plan(settings(virtualization="kvm"), guest)["case"] == "leave"
    plan = cuda_plan.plan(settings(virtualization="kvm", extra_packages=["nvlsm", "gpu-manager"]), guest)
    assert plan["missing"] == ["gpu-manager"]
    policy = {"nvidia-open": versions(f"{VERSION}-1")}
    fresh = look({}, driver=driver(None, None), policy=policy)
    alone = settings(virtualization="kvm")
    assert cuda_plan.choose(alone, cuda_plan.plan(alone, fresh), fresh)["packages"] == [f"nvidia-open={VERSION}-1"]


def test_a_driver_that_stays_is_pinned_before_a_repository_with_newer_ones_comes():
    packages = {"nvidia-open": f"{VERSION}-1"}
    assert cuda_plan.plan(settings(), look(packages))["pin"] == "580"
    newer = look({"nvidia-open": "590.48.01-1"}, driver=driver("590.48.01", "590.48.01"))
    assert cuda_plan.plan(settings(), newer)["pin"] == "590"
    older = look({"nvidia-open": "570.1.1-1"}, driver=driver("570.1.1", "570.1.1"))
    assert cuda_plan.plan(settings(compat=True), older)["pin"] == "570"
    # Whoever pins already, or wants none.
    pinned = look({**packages, "nvidia-driver-pinning-580": "580-1"})
    assert cuda_plan.plan(settings(), pinned)["pin"] == ""
    assert cuda_plan.plan(settings(pinning_package=""), look(packages))["pin"] == ""


def test_every_package_of_the_drivers_branch_is_held():
    packages = {
        **RIGHT,
        "nvidia-driver-open": f"{VERSION}-1",
        "libnvidia-compute": f"{VERSION}-1",
        "libcuda1": f"{VERSION}-1",
        "nvidia-driver-pinning-580": "580-1",
        "nvidia-container-toolkit": "1.18.0-1",
        "libnvidia-container1": "1.18.0-1",
    }
    plan = cuda_plan.plan(settings(), look(packages, held=["nvidia-open"]))
    assert plan["hold"] == sorted({*RIGHT, "nvidia-driver-open", "libnvidia-compute", "libcuda1"} - {"nvidia-open"})
    old = {"nvidia-open": "570.1.1-1", "libnvidia-compute-570": "570.1.1-1"}
    plan = cuda_plan.plan(settings(compat=True), look(old, driver=driver("570.1.1", "570.1.1")))
    assert plan["hold"] == ["libnvidia-compute-570", "nvidia-open"]


def test_told_so_an_old_driver_is_upgraded():
    old = look({"nvidia-open": "570.1.1-1"}, driver=driver("570.1.1", "570.1.1"))
    assert cuda_plan.plan(settings(manage_driver="true"), old)["case"] == "upgrade"
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


def test_nouveau_in_the_way_is_for_the_reboot_policy():
    plan = cuda_plan.plan(settings(), look(RIGHT, held=RIGHT, driver=driver(None, VERSION), modules=["nouveau"]))
    assert plan["reboot"] == f"nouveau runs and driver {VERSION} is installed"
    assert plan["nouveau"] is True
    # Loaded for another card, and not in the way.
    plan = cuda_plan.plan(settings(), look(RIGHT, held=RIGHT, modules=["nouveau"]))
    assert plan["reboot"] == ""
    nothing = look({}, driver=driver(None, None), modules=["nouveau"])
    assert cuda_plan.plan(settings(), nothing)["reboot"] == ""


def versions(*found, origins=()):
    entries = {one: {"priority": 500, "origins": list(origins)} for one in found}
    return {"candidate": found[0] if found else None, "versions": entries}


NVIDIA = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64"
CANONICAL = "http://archive.ubuntu.com/ubuntu"


def test_canonicals_names_of_another_branch_are_asked_for():
    """cuda_branch is 580, the driver that is there is of 590: the branch in the name is the driver's."""
    installed = {"nvidia-driver-590-server-open": "590.48.01-0ubuntu1"}
    there = look(installed, driver=driver("590.48.01", "590.48.01"))
    first = cuda_plan.plan(settings(), there)
    assert {"nvidia-fabricmanager-590", "libnvidia-nscq-590", "nvidia-fabricmanager-580"} <= set(first["ask"])
    names = ("nvidia-fabricmanager-590", "libnvidia-nscq-590", "libnvsdm-590")
    there["packages"]["policy"] = {name: versions("590.48.01-0ubuntu1", origins=[CANONICAL]) for name in names}
    there["packages"]["origins"] = {"nvidia-driver-590-server-open": "ubuntu"}
    chosen = cuda_plan.choose(settings(), first, there)["packages"]
    assert sorted(chosen) == sorted([*(f"{name}=590.48.01-0ubuntu1" for name in names), "nvlsm"])


def test_a_companion_of_another_branch_is_replaced_once():
    packages = {name: version for name, version in RIGHT.items() if name != "nvidia-fabricmanager"}
    policy = {"nvidia-fabricmanager-580": versions(f"{VERSION}-1"), "nvidia-fabricmanager-570": versions("570.1.1-1")}
    there = look({**packages, "nvidia-fabricmanager-570": "570.1.1-1"}, policy=policy)
    first = cuda_plan.plan(settings(), there)
    assert first["missing"] == ["nvidia-fabricmanager", "nvidia-fabricmanager-570"]
    assert cuda_plan.choose(settings(), first, there)["packages"] == [f"nvidia-fabricmanager-580={VERSION}-1"]


def test_companions_come_from_where_the_driver_is_from():
    policy = {
        "nvidia-fabricmanager": versions(f"{VERSION}-1", origins=[NVIDIA]),
        "nvidia-fabricmanager-580": versions(f"{VERSION}-0ubuntu1", origins=[CANONICAL]),
    }
    packages = {name: version for name, version in RIGHT.items() if name != "nvidia-fabricmanager"}
    wanted = {"nvidia": f"nvidia-fabricmanager={VERSION}-1", "ubuntu": f"nvidia-fabricmanager-580={VERSION}-0ubuntu1"}
    for origin, expected in wanted.items():
        there = look(packages, policy=policy, origins={"nvidia-open": origin})
        assert cuda_plan.choose(settings(), cuda_plan.plan(settings(), there), there)["packages"] == [expected]
    there = look(packages, policy=policy, origins={"nvidia-open": "lambda"})
    with pytest.raises(cuda_plan.CudaError, match="The driver's packages are from the origin 'lambda', which has no"):
        cuda_plan.choose(settings(), cuda_plan.plan(settings(manage_driver="true"), there), there)
    # Nobody has the driver's version any more: its version alone counts.
    there = look(packages, policy=policy)
    assert cuda_plan.choose(settings(), cuda_plan.plan(settings(), there), there)["packages"] == [wanted["nvidia"]]


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
    assert found == {"url": "http://mirror/cuda", "key": "http://mirror/key", "fingerprint": "ABCD", "there": ""}


def test_an_entry_that_is_there_is_used_again():
    """A second one with another key makes apt refuse everything, with a last slash or without."""
    url = "https://developer.download.nvidia.com/compute/cuda/repos/debian13/x86_64"
    keyring = {"file": "/etc/apt/sources.list.d/cuda-debian13-x86_64.list", "url": f"{url}/", "signed_by": "/x.gpg"}
    system = {"ID": "debian", "VERSION_ID": "13", "machine": "x86_64"}
    assert cuda_plan.repository(system, settings(), [keyring])["there"] == keyring["file"]
    assert cuda_plan.repository(system, settings(repository_url=url), [keyring])["there"] == keyring["file"]
    own = {"file": cuda_plan.OWN_SOURCE, "url": f"{url}/", "signed_by": "/y.asc"}
    trusted = settings(key_fingerprint="ABCD")
    assert cuda_plan.repository(system, trusted, [own])["there"] == ""
    assert cuda_plan.repository(system, trusted, [own, keyring])["there"] == keyring["file"]
    other = {**keyring, "url": url.replace("debian13", "debian12")}
    assert cuda_plan.repository(system, trusted, [other])["there"] == ""


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
