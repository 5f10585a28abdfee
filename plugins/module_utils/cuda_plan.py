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

from ansible_collections.baremetal.kimi_k3.plugins.module_utils.gpu_facts import origin_kind, release_of, upstream_of

# Distributions as NVIDIA's repositories call them.
DISTRIBUTIONS = {
    ("ubuntu", "22.04"): "ubuntu2204",
    ("ubuntu", "24.04"): "ubuntu2404",
    ("debian", "12"): "debian12",
    ("debian", "13"): "debian13",
}
# The key of ubuntu2204, ubuntu2404 and debian12; that of debian13 is another one.
OLD_KEY = "EB693B3035CD5710E231E123A4B469963BF863CC"
# The entry that the role itself makes.
OWN_SOURCE = "/etc/apt/sources.list.d/kimi-k3-cuda.sources"
# Packages that the driver is made of. Those that only begin alike, such as the container toolkit, have versions of
# their own, which no branch of the driver has.
DRIVER_NAMES = re.compile(
    r"(nvidia-|libnvidia-|libnvsdm|xserver-xorg-video-nvidia|firmware-nvidia-|cuda-drivers).*"
    r"|libcuda1|libcudadebugger1|libnvcuvid1|libnvoptix1"
)
# What a host needs only when it manages NVSwitch itself.
FABRIC_PACKAGES = ("nvlsm",)
# A plan that does nothing.
NOTHING: dict[str, t.Any] = {
    "case": "off",
    "act": False,
    "missing": [],
    "services": [],
    "reboot": "",
    "hold": [],
    "pin": "",
    "nouveau": False,
    "lambda_stack": False,
    "ask": [],
    "text": "",
}


class CudaError(ValueError):
    """A host that cannot be prepared as it was asked for; the message is one sentence for the operator."""


def repository(
    system: t.Mapping[str, str], settings: t.Mapping[str, t.Any], sources: t.Iterable[t.Mapping[str, t.Any]] = ()
) -> dict[str, str]:
    """Address, key and fingerprint of NVIDIA's repository for a system; what the operator set wins.

    C(there) is the file of apt that has the repository already, as the package cuda-keyring brings it: a second entry
    with another key makes apt refuse everything.
    """
    place = (system.get("ID", ""), system.get("VERSION_ID", ""))
    name = DISTRIBUTIONS.get(place)
    url, key = str(settings["repository_url"]), str(settings["key_url"])
    fingerprint = str(settings["key_fingerprint"]).replace(" ", "").upper()
    known = fingerprint or settings["key_sha256"]
    if url and key and known:
        return {"url": url, "key": key, "fingerprint": fingerprint, "there": listed_in(url, sources)}
    if name is None and not (url and listed_in(url, sources)):
        raise CudaError(
            f"{place[0] or 'This system'} {place[1]} has no CUDA repository that this role knows (Ubuntu 22.04, 24.04, "
            "Debian 12, 13): set cuda_repository_url, cuda_key_url and cuda_key_fingerprint."
        )
    machine = system.get("machine", "x86_64")
    if name == "debian13" and machine != "x86_64" and not url:
        raise CudaError("NVIDIA has no CUDA repository for Debian 13 on arm64: use Ubuntu 24.04 or Debian 12 there.")
    base = url or (
        "https://developer.download.nvidia.com/compute/cuda/repos/"
        f"{name}/{'x86_64' if machine == 'x86_64' else 'sbsa'}/"
    )
    there = listed_in(base, sources)
    if name == "debian13" and not known and not there:
        raise CudaError(
            "NVIDIA signs its Debian 13 repository with a key of its own, which this role does not "
            "know in full (it ends "
            "in 8793F200): set cuda_key_url, and cuda_key_fingerprint or cuda_key_sha256, after looking at it."
        )
    key = key or f"{base.rstrip('/')}/3bf863cc.pub"
    return {"url": base, "key": key, "fingerprint": fingerprint or OLD_KEY, "there": there}


def listed_in(url: str, sources: t.Iterable[t.Mapping[str, t.Any]]) -> str:
    """The file of apt, other than the role's own, that has a repository; empty when none has."""
    # apt takes an address with and without its last slash for the same.
    return next(
        (one["file"] for one in sources if one["url"].rstrip("/") == url.rstrip("/") and one["file"] != OWN_SOURCE), ""
    )


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
    to be changed; C(pin) is a branch that apt must stay on while they are; C(services) are to be enabled and started;
    C(nouveau) is whether that driver is in the way of one that is installed; C(lambda_stack) is whether Lambda Stack
    owns the driver; C(reboot) says why a reboot is needed, or nothing.
    """
    manage = str(settings["manage_driver"]).lower()
    driver, packages = look["driver"], look["packages"] or {}
    result = {**NOTHING, "ask": names(settings, look)}
    if manage == "false":
        return {**result, "text": "The driver is not managed here (cuda_manage_driver: false)."}
    version = driver["running"] or driver["installed"]
    if not look["pci"] and not version and manage == "auto":
        return {**result, "case": "none", "text": "There is no NVIDIA GPU and no driver: nothing to do."}
    floor, lambda_stack = str(settings["driver_floor"]), is_lambda(packages)
    flavour = driver["installed_flavour"] or driver["running_flavour"]
    result["lambda_stack"] = lambda_stack
    result["reboot"] = reboot_reason(driver, look.get("modules", ()))
    result["nouveau"] = bool(driver["installed"]) and "nouveau" in look.get("modules", ()) and not lambda_stack
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
        more = {"missing": missing, "hold": _to_hold(settings, packages, version), "pin": _pin(settings, look)}
        return {**result, **more, "case": "compat", "act": bool(missing), "text": text}
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
    case = "upgrade" if version else "install"
    text = f"{told} {settings['driver_package']} of branch {settings['branch']} is installed."
    return {**result, "case": case, "act": True, "text": text, "services": services(settings, look)}


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
    extra = [name for name in extras(settings, look) if name not in packages.get("installed", {})]
    parts = [f"{', '.join(missing + extra)} is missing"] if missing or extra else []
    parts += [f"{', '.join(unlike)} does not fit"] if unlike else []
    # Lambda brings its own, from a repository that outranks all others: NVIDIA's beside it is the operator's decision.
    if lambda_stack and str(settings["manage_driver"]).lower() != "true":
        lack = f" {' and '.join(parts)}: upgrade Lambda Stack, or set cuda_manage_driver: true." if parts else ""
        return {**result, "case": "leave", "text": f"{text}: it is left alone.{lack}"}
    hold = _to_hold(settings, packages, version)
    result = {**result, "services": services(settings, look), "hold": hold}
    if parts:
        again = [entry["package"] for kind, entry in companions.items() if upstream_of(entry["version"]) != version]
        return {
            **result,
            "case": "companions",
            "act": True,
            "missing": sorted({*missing, *again}) + extra,
            "pin": _pin(settings, look),
            "text": f"{text}; {' and '.join(parts)}: installed in exactly that version.",
        }
    return {**result, "case": "leave", "text": f"{text}: it is left alone."}


def _to_hold(settings: t.Mapping[str, t.Any], packages: t.Mapping[str, t.Any], version: str | None) -> list[str]:
    """What of the driver is installed and not held yet: every package of its branch, or a dependency moves alone."""
    if not settings["hold"] or is_lambda(packages):
        return []
    return [
        name
        for name, entry in sorted(packages.get("installed", {}).items())
        if name not in packages.get("held", [])
        and (kind_of(name) != name or name in (settings["driver_package"], "nvlsm") or of_driver(name, entry, version))
    ]


def of_driver(name: str, entry: t.Mapping[str, t.Any], version: str | None) -> bool:
    """Whether a package is part of a driver of this version's branch."""
    branch = release_of(version)[:1]
    return bool(
        branch
        and release_of(entry["version"])[:1] == branch
        and DRIVER_NAMES.fullmatch(name)
        and not name.startswith("nvidia-driver-pinning")
    )


def _pin(settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]) -> str:
    """The branch that a driver which stays is to be pinned to, when NVIDIA's repository comes beside it."""
    installed = (look["packages"] or {}).get("installed", {})
    if not settings["pinning_package"] or any(name.startswith("nvidia-driver-pinning") for name in installed):
        return ""
    return str(release_of(look["driver"]["installed"] or look["driver"]["running"])[0])


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


def is_lambda(packages: t.Mapping[str, t.Any]) -> bool:
    """Whether Lambda Stack owns the driver: its metapackage, its origin, or its pin over all packages."""
    if any(name.startswith("lambda-") for name in packages.get("installed", {})):
        return True
    if "lambda" in {origin for origin in packages.get("origins", {}).values() if origin}:
        return True
    return any("lambda" in pin["pin"].lower() and pin["package"] == "*" for pin in packages.get("preferences", []))


def needs_fabric(settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]) -> bool:
    """Whether the host needs a Fabric Manager of its own: it has NVSwitch, and is no guest."""
    return bool(settings["fabric"]) and settings["virtualization"] in (None, "", "none") and bool(look["pci"])


def extras(settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]) -> list[str]:
    """Further packages that this host needs; a guest has no NVSwitch to manage."""
    return [name for name in settings["extra_packages"] if name not in FABRIC_PACKAGES or needs_fabric(settings, look)]


def services(settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]) -> list[str]:
    """Units that should run and do not: persistence first, then the fabric."""
    wanted = [name for name in settings["services"] if "fabricmanager" not in name or needs_fabric(settings, look)]
    known = look["services"]
    return [
        name
        for name in wanted
        if name in known and (known[name]["active"] != "active" or known[name]["enabled"] == "disabled")
    ]


def reboot_reason(driver: t.Mapping[str, t.Any], modules: t.Collection[str] = ()) -> str:
    """Why the driver needs a reboot, empty when it does not."""
    running, installed = driver["running"], driver["installed"]
    if running and installed and running != installed:
        return f"driver {running} runs and {installed} is installed"
    if running and driver["running_flavour"] != driver["installed_flavour"] and driver["installed_flavour"]:
        return f"the {driver['running_flavour']} module runs and the {driver['installed_flavour']} one is installed"
    # It has the GPUs and seldom lets go of them: NVIDIA's driver, and every service of it, would fail to start.
    if installed and not running and "nouveau" in modules:
        return f"nouveau runs and driver {installed} is installed"
    return ""


def choose(
    settings: t.Mapping[str, t.Any], first: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]
) -> dict[str, t.Any]:
    """Packages with exact versions, after the repository and the pin are in place.

    C(first) is the plan, C(look) has the policy of apt in C(packages.policy). The driver comes in the version that
    the pin leaves; a companion in that very version and from the same origin, under its own name or under that of the
    branch.
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
        origin = origin_kind(policy[package]["versions"].get(candidate, {}).get("origins", []))
        wanted = [*(settings["companions"] if needs_fabric(settings, look) else []), *extras(settings, look)]
    else:
        driver = look["driver"]["installed"] or look["driver"]["running"]
        origin = driver_origin(settings, look)
        wanted = list(first["missing"])
    held = [name.split("=")[0] for name in chosen]
    for name in wanted:
        if kind_of(name) == name:
            chosen.append(name)
            continue
        found = _exact(name, branch, driver, policy, origin)
        chosen.append(f"{found[0]}={found[1]}")
        held.append(found[0])
    held += [name for name in wanted if name == "nvlsm"]
    # A companion that is missing and one of another branch that is to be replaced are the same in the end.
    chosen, held = list(dict.fromkeys(chosen)), list(dict.fromkeys(held))
    return {"packages": chosen, "hold": held if settings["hold"] else []}


def driver_origin(settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]) -> str | None:
    """Whose repository the installed driver came from; None when no repository of the host has it."""
    packages, driver = look["packages"], look["driver"]
    version = driver["installed"] or driver["running"]
    whole = [
        name
        for name, entry in sorted(packages["installed"].items())
        if kind_of(name) == name and of_driver(name, entry, version) and upstream_of(entry["version"]) == version
    ]
    first = [name for name in (settings["driver_package"], driver.get("owner")) if name in whole]
    return next((packages["origins"][name] for name in [*first, *whole] if packages["origins"].get(name)), None)


def _spellings(name: str, *versions: str | None) -> list[str]:
    """Names that a companion has in the repositories: its own, and with a branch in it, as Canonical keeps it."""
    plain = re.sub(r"-\d+$", "", name)
    branches = [release_of(version)[0] for version in versions if release_of(version)]
    return list(dict.fromkeys([name, plain, *[f"{plain}-{branch}" for branch in branches]]))


def _exact(
    name: str, branch: str, driver: str | None, policy: t.Mapping[str, t.Mapping[str, t.Any]], origin: str | None
) -> tuple[str, str]:
    """A companion's name and version that equal the driver, from the repository that the driver is from."""
    plain = re.sub(r"-\d+$", "", name)
    elsewhere = []
    for candidate in _spellings(name, driver, branch):
        for version, entry in (policy.get(candidate) or {}).get("versions", {}).items():
            if upstream_of(version) != driver:
                continue
            kinds = {origin_kind([url]) for url in entry.get("origins", [])}
            if origin is None or not kinds or origin in kinds:
                return candidate, version
            elsewhere += [f"{candidate} {version} ({', '.join(sorted(str(kind) for kind in kinds))})"]
    if elsewhere:
        raise CudaError(
            f"The driver's packages are from the origin '{origin}', which has no {plain} in version {driver}; "
            f"{', '.join(elsewhere)} is another's, and the two are not mixed: add a repository of '{origin}' that has "
            "it, or install it yourself."
        )
    raise CudaError(
        f"No repository of this host has {plain} in version {driver}, which the driver is: add one that has it."
    )


def names(settings: t.Mapping[str, t.Any], look: t.Mapping[str, t.Any]) -> list[str]:
    """Every package whose policy C(choose) may ask for."""
    found = [settings["driver_package"], settings["compat_package"], *settings["extra_packages"]]
    driver = look["driver"]["installed"] or look["driver"]["running"]
    # An installed companion that does not fit can be of a kind that the host is not asked to have.
    others = [entry["package"] for entry in ((look["packages"] or {}).get("companions") or {}).values()]
    for name in [*settings["companions"], *others]:
        found += _spellings(name, driver, str(settings["branch"]))
    return list(dict.fromkeys(found))
