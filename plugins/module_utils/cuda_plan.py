# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What role cuda has to do on a host, from one look at it: pure functions, no I/O.

What is right is left alone, whoever installed it. A driver is only changed when the operator said so, or where there
is none.
"""

from __future__ import annotations

import base64
import hashlib
import re
import typing as t

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.gpu_facts import release_of, upstream_of

# Distributions as NVIDIA's repositories call them.
DISTRIBUTIONS = {
    ("ubuntu", "22.04"): "ubuntu2204",
    ("ubuntu", "24.04"): "ubuntu2404",
    ("debian", "12"): "debian12",
    ("debian", "13"): "debian13",
}
# The key of ubuntu2204, ubuntu2404 and debian12; that of debian13 is another one.
OLD_KEY = "EB693B3035CD5710E231E123A4B469963BF863CC"


class CudaError(ValueError):
    """A host that cannot be prepared as it was asked for; the message is one sentence for the operator."""


def repository(system: t.Mapping[str, str], settings: t.Mapping[str, t.Any]) -> dict[str, str]:
    """Address, key and fingerprint of NVIDIA's repository for a system; what the operator set wins."""
    place = (system.get("ID", ""), system.get("VERSION_ID", ""))
    name = DISTRIBUTIONS.get(place)
    url, key = str(settings["repository_url"]), str(settings["key_url"])
    fingerprint = str(settings["key_fingerprint"]).replace(" ", "").upper()
    if url and key and (fingerprint or settings["key_sha256"]):
        return {"url": url, "key": key, "fingerprint": fingerprint}
    if name is None:
        raise CudaError(
            f"{place[0] or 'This system'} {place[1]} has no CUDA repository that this role knows (Ubuntu 22.04, 24.04, "
            "Debian 12, 13): set cuda_repository_url, cuda_key_url and cuda_key_fingerprint."
        )
    machine = system.get("machine", "x86_64")
    if name == "debian13" and machine != "x86_64":
        raise CudaError("NVIDIA has no CUDA repository for Debian 13 on arm64: use Ubuntu 24.04 or Debian 12 there.")
    if name == "debian13" and not fingerprint and not settings["key_sha256"]:
        raise CudaError(
            "NVIDIA signs its Debian 13 repository with a key of its own, which this role does not "
            "know in full (it ends "
            "in 8793F200): set cuda_key_url, and cuda_key_fingerprint or cuda_key_sha256, after looking at it."
        )
    base = url or (
        "https://developer.download.nvidia.com/compute/cuda/repos/"
        f"{name}/{'x86_64' if machine == 'x86_64' else 'sbsa'}/"
    )
    return {"url": base, "key": key or f"{base.rstrip('/')}/3bf863cc.pub", "fingerprint": fingerprint or OLD_KEY}


def fingerprints(content: bytes) -> list[str]:
    """Fingerprints of the primary keys in an OpenPGP key file, armoured or not. Raises CudaError for anything else."""
    if content.lstrip().startswith(b"-----BEGIN PGP PUBLIC KEY BLOCK-----"):
        body = content.decode("ascii", "replace").split("\n\n", 1)[-1].split("-----END", 1)[0]
        lines = [line.strip() for line in body.splitlines() if line.strip() and not line.startswith("=")]
        try:
            content = base64.b64decode("".join(lines), validate=True)
        except ValueError as error:
            raise CudaError(f"The key of the repository is no OpenPGP key ({error}).") from error
    found, position = [], 0
    while position < len(content):
        tag, start, length = _packet(content, position)
        if tag == 6:
            body = content[start : start + length]
            if body[:1] == b"\x04":
                digest = hashlib.sha1(b"\x99" + length.to_bytes(2, "big") + body)  # noqa: S324 - OpenPGP defines it so
                found.append(digest.hexdigest().upper())
        position = start + length
    if not found:
        raise CudaError("The key of the repository is no OpenPGP key: there is none in the file.")
    return found


def _packet(content: bytes, position: int) -> tuple[int, int, int]:
    """Tag, start and length of the packet at a position."""
    first = content[position]
    rest = content[position + 1 : position + 6]
    if not first & 0x80 or not rest:
        raise CudaError("The key of the repository is no OpenPGP key.")
    if first & 0x40:
        tag = first & 0x3F
        if rest[0] < 192:
            return tag, position + 2, rest[0]
        if rest[0] < 224:
            return tag, position + 3, ((rest[0] - 192) << 8) + rest[1] + 192
        return tag, position + 6, int.from_bytes(rest[1:5], "big")
    size = {0: 1, 1: 2, 2: 4}.get(first & 3)
    if size is None:
        raise CudaError("The key of the repository is no OpenPGP key that can be read.")
    return first >> 2 & 0xF, position + 1 + size, int.from_bytes(rest[:size], "big")


def plan(settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The case that a host is, in one sentence, and what to do about it.

    C(case): C(off), C(none), C(leave), C(compat), C(companions), C(install), C(upgrade). C(act) is whether packages are
    to be changed; C(services) are to be enabled and started; C(reboot) says why a reboot is needed, or nothing.
    """
    manage = str(settings["manage_driver"]).lower()
    driver, packages = look["driver"], look["packages"] or {}
    result: dict[str, t.Any] = {"case": "off", "act": False, "missing": [], "services": [], "reboot": "", "hold": []}
    result["unhold"] = []
    if manage == "false":
        return {**result, "text": "The driver is not managed here (cuda_manage_driver: false)."}
    version = driver["running"] or driver["installed"]
    if not look["pci"] and not version and manage == "auto":
        return {**result, "case": "none", "text": "There is no NVIDIA GPU and no driver: nothing to do."}
    floor, lambda_stack = str(settings["driver_floor"]), is_lambda(packages)
    flavour = driver["installed_flavour"] or driver["running_flavour"]
    result["reboot"] = reboot_reason(driver)
    new_enough = bool(version) and release_of(driver["installed"] or version) >= release_of(floor)
    if new_enough and flavour != "proprietary":
        return _right(settings, look, result, lambda_stack)
    told = _wrong(version, flavour, floor)
    if settings["compat"] and version and flavour != "proprietary":
        missing = (
            [settings["compat_package"]] if settings["compat_package"] not in packages.get("installed", {}) else []
        )
        release = re.search(r"(\d+)-(\d+)$", settings["compat_package"])
        folder = f"/usr/local/cuda-{release.group(1)}.{release.group(2)}/compat" if release else "their folder"
        text = f"{told} CUDA's compatibility libraries bridge it: serve_environment needs LD_LIBRARY_PATH: {folder}."
        return {**result, "case": "compat", "act": bool(missing), "missing": missing, "text": text}
    if driver["run_file"]:
        raise CudaError(
            f"{told} It came from a .run file: remove it with nvidia-uninstall, packages cannot replace it."
        )
    if manage == "auto" and (version or lambda_stack):
        owner = "Lambda Stack owns it: upgrade that, or " if lambda_stack else ""
        raise CudaError(
            f"{told} {owner}set cuda_manage_driver: true (upgrade and reboot)"
            f"{' or cuda_compat: true (compatibility libraries)' if version and flavour != 'proprietary' else ''}."
        )
    # A hold on a companion of the old branch, which the new one replaces, stops apt even when it may change holds.
    letting_go = [name for name in packages.get("held", []) if kind_of(name) != name]
    case = "upgrade" if version else "install"
    text = f"{told} {settings['driver_package']} of branch {settings['branch']} is installed."
    more = {"text": text, "services": services(settings, look), "unhold": letting_go}
    return {**result, "case": case, "act": True, **more}


def _right(
    settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any], result: dict[str, t.Any], lambda_stack: bool
) -> dict[str, t.Any]:
    """A driver that is new enough and open: leave it, and see to its companions and services."""
    driver, packages = look["driver"], look["packages"] or {}
    version = driver["installed"] or driver["running"]
    companions = packages.get("companions", {})
    wanted = settings["companions"] if needs_fabric(settings, look) else []
    kinds = {kind_of(name): name for name in wanted}
    missing = [
        name
        for kind, name in kinds.items()
        if name not in packages.get("installed", {})
        and (kind not in companions or upstream_of(companions[kind]["version"]) != version)
    ]
    unlike = [
        f"{entry['package']} {entry['version']}"
        for kind, entry in companions.items()
        if upstream_of(entry["version"]) not in (None, version)
    ]
    owner = " from Lambda Stack" if lambda_stack else ""
    text = f"Driver {version}{owner} is new enough and open"
    hold = [
        name
        for name in sorted(packages.get("installed", {}))
        if settings["hold"] and not lambda_stack and _held_name(name, settings) and name not in packages.get("held", [])
    ]
    result = {**result, "services": services(settings, look), "hold": hold if packages.get("installed") else []}
    extra = [name for name in settings["extra_packages"] if name not in packages.get("installed", {})]
    if missing or unlike or extra:
        parts = [f"{', '.join(missing + extra)} is missing"] if missing or extra else []
        parts += [f"{', '.join(unlike)} does not fit"] if unlike else []
        again = [entry["package"] for kind, entry in companions.items() if upstream_of(entry["version"]) != version]
        return {
            **result,
            "case": "companions",
            "act": True,
            "missing": sorted({*missing, *again}) + extra,
            "text": f"{text}; {' and '.join(parts)}: installed in exactly that version.",
        }
    return {**result, "case": "leave", "text": f"{text}: it is left alone."}


def _wrong(version: str | None, flavour: str | None, floor: str) -> str:
    if not version:
        return "There is no driver."
    if flavour == "proprietary":
        return f"Driver {version} has the proprietary kernel modules, which do not start a Blackwell GPU."
    return f"Driver {version} is older than {floor}."


def kind_of(name: str) -> str:
    """The kind of companion that a package is, by its name."""
    for word, kind in (("fabricmanager", "fabricmanager"), ("nscq", "nscq"), ("nvsdm", "nvsdm"), ("imex", "imex")):
        if word in name:
            return kind
    return name


def _held_name(name: str, settings: t.Mapping[str, t.Any]) -> bool:
    return kind_of(name) != name or name in (settings["driver_package"], "nvlsm")


def is_lambda(packages: t.Mapping[str, t.Any]) -> bool:
    """Whether Lambda Stack owns the driver: its metapackage, its origin, or its pin over all packages."""
    if any(name.startswith("lambda-") for name in packages.get("installed", {})):
        return True
    if "lambda" in {origin for origin in packages.get("origins", {}).values() if origin}:
        return True
    return any("lambda" in pin["pin"] and pin["package"] == "*" for pin in packages.get("preferences", []))


def needs_fabric(settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]) -> bool:
    """Whether the host needs a Fabric Manager of its own: it has NVSwitch, and is no guest."""
    return bool(settings["fabric"]) and settings["virtualization"] in (None, "", "none") and bool(look["pci"])


def services(settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]) -> list[str]:
    """Units that should run and do not: persistence first, then the fabric."""
    wanted = [name for name in settings["services"] if "fabricmanager" not in name or needs_fabric(settings, look)]
    known = look["services"]
    return [
        name
        for name in wanted
        if name in known and (known[name]["active"] != "active" or known[name]["enabled"] == "disabled")
    ]


def reboot_reason(driver: t.Mapping[str, t.Any]) -> str:
    """Why the driver needs a reboot, empty when it does not."""
    running, installed = driver["running"], driver["installed"]
    if running and installed and running != installed:
        return f"driver {running} runs and {installed} is installed"
    if running and driver["running_flavour"] != driver["installed_flavour"] and driver["installed_flavour"]:
        return f"the {driver['running_flavour']} module runs and the {driver['installed_flavour']} one is installed"
    return ""


def choose(
    settings: t.Mapping[str, t.Any], first: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]
) -> dict[str, t.Any]:
    """Packages with exact versions, after the repository and the pin are in place.

    C(first) is the plan, C(look) has the policy of apt in C(packages.policy). The driver comes in the version that
    the pin leaves; a companion in that very version, under its own name or under that of the branch.
    """
    policy = look["packages"]["policy"]
    branch = str(settings["branch"])
    if first["case"] == "compat":
        return {"packages": list(first["missing"]), "hold": []}
    chosen: list[str] = []
    if first["case"] in ("install", "upgrade"):
        package = settings["driver_package"]
        candidate = (policy.get(package) or {}).get("candidate")
        if not candidate:
            raise CudaError(f"No repository of this host has {package}: look at cuda_repository_url.")
        if release_of(candidate)[:1] != release_of(branch)[:1]:
            raise CudaError(
                f"apt would install {package} {candidate}, not branch {branch}: another pin outranks "
                f"{settings['pinning_package']} (apt-cache policy {package})."
            )
        chosen.append(f"{package}={candidate}")
        driver = upstream_of(candidate)
        wanted = [*(settings["companions"] if needs_fabric(settings, look) else []), *settings["extra_packages"]]
    else:
        driver = look["driver"]["installed"] or look["driver"]["running"]
        wanted = list(first["missing"])
    held = [name.split("=")[0] for name in chosen]
    for name in wanted:
        if kind_of(name) == name:
            chosen.append(name)
            continue
        found = _exact(name, branch, driver, policy)
        chosen.append(f"{found[0]}={found[1]}")
        held.append(found[0])
    held += [name for name in wanted if name == "nvlsm"]
    return {"packages": chosen, "hold": held if settings["hold"] else []}


def _exact(
    name: str, branch: str, driver: str | None, policy: t.Mapping[str, t.Mapping[str, t.Any]]
) -> tuple[str, str]:
    """A companion's name and version that equal the driver."""
    plain = re.sub(r"-\d+$", "", name)
    for candidate in dict.fromkeys((name, plain, f"{plain}-{release_of(driver)[0] if driver else branch}")):
        for version in (policy.get(candidate) or {}).get("versions", {}):
            if upstream_of(version) == driver:
                return candidate, version
    raise CudaError(
        f"No repository of this host has {plain} in version {driver}, which the driver is: add one that has it."
    )


def names(settings: t.Mapping[str, t.Any]) -> list[str]:
    """Every package whose policy C(choose) may ask for."""
    branch = str(settings["branch"])
    found = [settings["driver_package"], settings["compat_package"], *settings["extra_packages"]]
    for name in settings["companions"]:
        found += [name, f"{name}-{branch}"]
    return found
