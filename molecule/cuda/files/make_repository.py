# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A signed apt repository of stand-ins for NVIDIA's packages, made on the host that uses it.

The names are those that change between branches: with the branch in them up to 580, without from 590 on. Their
scripts do to a tree of tests/fixtures/fake_node.py what the real ones do to a host: installing changes what modinfo
says, a boot or the persistence daemon loads what is installed.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

BASE = Path(sys.argv[1])
REPOSITORY, LAMBDA, NODE = BASE / "repository", BASE / "lambda", BASE / "node"

LOAD = f"""#!/usr/bin/python3
import json
from pathlib import Path
known = json.loads(Path("{NODE}/state/modinfo.json").read_text())
version = known["-F version nvidia"].strip()
kind = "Open Kernel Module for x86_64" if "GPL" in known["-F license nvidia"] else "x86_64 Kernel Module"
file = Path("{NODE}/proc/driver/nvidia/version")
file.parent.mkdir(parents=True, exist_ok=True)
file.write_text(f"NVRM version: NVIDIA UNIX {{kind}}  {{version}}  Release Build  (builder@)\\n")
"""

INSTALL = f"""#!/usr/bin/python3
import json, os, sys
from pathlib import Path
version = "@VERSION@"
answers = {{"filename": "/lib/modules/x/updates/dkms/nvidia.ko", "version": version, "license": "Dual MIT/GPL"}}
state = Path("{NODE}/state/modinfo.json")
state.write_text(json.dumps({{f"-F {{name}} nvidia": f"{{value}}\\n" for name, value in answers.items()}}))
script = Path("{NODE}/bin/modinfo")
script.write_text('''#!/usr/bin/python3
import json, sys
known = json.load(open("{NODE}/state/modinfo.json"))
words = " ".join(sys.argv[1:])
sys.exit("modinfo: unknown " + words) if words not in known else sys.stdout.write(known[words])
''')
script.chmod(0o755)
os.system("systemctl daemon-reload; systemctl enable --quiet nvidia-load.service")
"""

UNIT = "[Unit]\nDescription=Stand-in\n[Service]\n{service}\n[Install]\nWantedBy=multi-user.target\n"
STAY = "ExecStart=/bin/sleep infinity"
LOADING = "ExecStartPre=/bin/sh -c 'test -e {node}/proc/driver/nvidia/version || /usr/lib/nvidia-load'\n" + STAY
PIN = "Package: nvidia-* libnvidia-* libnvsdm*\nPin: version 580.*\nPin-Priority: 1000\n"
REAL = {"570": "570.148.08", "580": "580.159.04", "590": "590.48.01"}


def package(
    name: str,
    version: str,
    files: dict[str, str | bytes] | None = None,
    depends: str = "",
    *,
    postinst: str = "",
    repository: Path = REPOSITORY,
) -> None:
    """Build one package and put it into a repository."""
    tree = BASE / "build"
    shutil.rmtree(tree, ignore_errors=True)
    for path, content in (files or {}).items():
        file = tree / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else content.encode()
        file.write_bytes(data)
        file.chmod(0o755 if data.startswith(b"#!") else 0o644)
    control = tree / "DEBIAN"
    control.mkdir(parents=True)
    lines = [f"Package: {name}", f"Version: {version}", "Architecture: all", "Maintainer: Nobody <nobody@example.org>"]
    lines += [f"Depends: {depends}"] if depends else []
    if "fabricmanager" in name:  # only one branch of it can be there
        lines += [f"{field}: nvidia-fabricmanager-any" for field in ("Provides", "Conflicts", "Replaces")]
    (control / "control").write_text("\n".join([*lines, "Description: stand-in", ""]))
    if postinst:
        (control / "postinst").write_text(postinst)
        (control / "postinst").chmod(0o755)
    target = repository / f"{name}_{version.replace(':', '%3a')}_all.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(target)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def packages() -> None:
    for branch, version in REAL.items():
        full, suffix = f"{version}-1", "" if branch == "590" else f"-{branch}"
        load = {
            "/usr/lib/nvidia-load": LOAD,
            "/lib/systemd/system/nvidia-load.service": UNIT.format(
                service="Type=oneshot\nExecStart=/usr/lib/nvidia-load"
            ),
        }
        postinst = INSTALL.replace("@VERSION@", version)
        package("nvidia-open", full, load, f"nvidia-persistenced (= {full})", postinst=postinst)
        unit = UNIT.format(service=LOADING.format(node=NODE))
        package("nvidia-persistenced", full, {"/lib/systemd/system/nvidia-persistenced.service": unit})
        manager = {"/lib/systemd/system/nvidia-fabricmanager.service": UNIT.format(service=STAY)}
        package(f"nvidia-fabricmanager{suffix}", full, manager)
        package("libnvidia-nscq", full)
        package("libnvsdm", full)
    package("nvlsm", "2025.10.11-1")
    dcgm = {"/lib/systemd/system/nvidia-dcgm.service": UNIT.format(service=STAY)}
    package("datacenter-gpu-manager-4-cuda13", "1:4.4.0-1", dcgm)
    package("nvidia-driver-pinning-580", "580-1", {"/etc/apt/preferences.d/nvidia-driver-pinning-580": PIN})
    keyring = "/usr/share/keyrings/cuda-archive-keyring.gpg"
    entry = f"deb [signed-by={keyring}] file:{REPOSITORY} /\n"
    files = {keyring: (BASE / "key.gpg").read_bytes(), "/etc/apt/sources.list.d/cuda-debian12-x86_64.list": entry}
    package("cuda-keyring", "1.1-1", files)
    package("cuda-compat-13-0", "580.159.04-1", {"/usr/local/cuda-13.0/compat/libcuda.so.580.159.04": ""})
    # Lambda Stack has a repository of its own, with a driver that is older.
    old = f"{REAL['570']}-0lambda1"
    package("lambda-stack-cuda", "0.1.15", repository=LAMBDA)
    package("nvidia-open", old, depends=f"nvidia-persistenced (= {old})", repository=LAMBDA)
    package("nvidia-persistenced", old, repository=LAMBDA)


def index(repository: Path, origin: str) -> None:
    """Packages and Release of a flat repository."""
    stanzas = []
    for deb in sorted(repository.glob("*.deb")):
        fields = subprocess.run(["dpkg-deb", "--field", deb], check=True, capture_output=True, text=True).stdout.strip()
        content = deb.read_bytes()
        sums = f"Filename: ./{deb.name}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}"
        stanzas.append(f"{fields}\n{sums}\n")
    text = "\n".join(stanzas).encode()
    (repository / "Packages").write_bytes(text)
    (repository / "Packages.gz").write_bytes(gzip.compress(text, mtime=0))
    sums = []
    for name in ("Packages", "Packages.gz"):
        content = (repository / name).read_bytes()
        sums.append(f" {hashlib.sha256(content).hexdigest()} {len(content)} {name}\n")
    (repository / "Release").write_text(f"Origin: {origin}\nLabel: stand-in\nSuite: stable\nSHA256:\n{''.join(sums)}")


def gpg(*words: str, **options: Any) -> subprocess.CompletedProcess:
    home = ["--homedir", str(BASE / "gnupg"), "--batch", "--yes", "--quiet"]
    return subprocess.run(
        ["gpg", *home, "--pinentry-mode", "loopback", "--passphrase", "", *words], check=True, **options
    )


def key() -> str:
    """Make a key, write it armoured and binary, and give its fingerprint."""
    (BASE / "gnupg").mkdir(mode=0o700)
    gpg("--quick-generate-key", "Stand-in <a@example.org>", "rsa3072", "sign", "never")
    listed = gpg("--with-colons", "--list-keys", capture_output=True, text=True).stdout
    fingerprint = next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr:"))
    (BASE / "key.asc").write_bytes(gpg("--armor", "--export", fingerprint, capture_output=True).stdout)
    (BASE / "key.gpg").write_bytes(gpg("--export", fingerprint, capture_output=True).stdout)
    return fingerprint


def main() -> None:
    REPOSITORY.mkdir(parents=True)
    LAMBDA.mkdir()
    fingerprint = key()
    packages()
    for repository, origin in ((REPOSITORY, "NVIDIA"), (LAMBDA, "Lambda Labs")):
        index(repository, origin)
        gpg("--clearsign", "--output", str(repository / "InRelease"), str(repository / "Release"))
        for folder, _folders, _files in os.walk(repository):
            Path(folder).chmod(0o755)
    subprocess.run(["gpgconf", "--homedir", str(BASE / "gnupg"), "--kill", "all"], check=True)
    (BASE / "fingerprint").write_text(fingerprint)


if __name__ == "__main__":
    main()
