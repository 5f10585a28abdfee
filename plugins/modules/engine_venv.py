# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_venv
short_description: Install the engine into a virtual environment that is never edited in place
version_added: "1.0.0"
description:
  - Keeps O(path) a link to a virtual environment that holds exactly what a lock pins.
  - An environment is built in a new directory beside the others, checked, given a receipt C(engine.json),
    and only then becomes the target of the link, by one rename.
    A build that fails leaves the link and what it points to as they were.
  - The directory is named after the first twelve digits of the lock's digest and lies in O(path) with C(s) appended,
    so V(/opt/kimi-k3/venv) becomes a link to V(/opt/kimi-k3/venvs/0123456789ab).
  - Nothing is done when the receipt bears the lock's digest, the interpreter runs, and every file has the size
    and the modification time that it had when the environment was built.
  - Otherwise the environment is broken or outdated, and another one takes its place.
    An older one that is still whole and has the right lock is taken as it is, so going back takes a second.
  - After a change the environment used before is kept, unless it was broken.
    Older ones and half-built ones are removed, but none that a process uses.
  - Needs no Python package on the host besides the standard library. Without C(uv) it needs C(ensurepip),
    which Debian and Ubuntu ship in the package C(python3-venv).
options:
  path:
    description:
      - Place of the link.
      - A directory, a file, or a link to somewhere else at this place was not made by this module and is refused.
    type: path
    required: true
  lock:
    description:
      - Text of the lock. These are requirements as C(uv pip compile --generate-hashes) writes them,
        each pinned by C(==) and with its hashes.
      - The lock is the whole environment. Nothing beside it is installed, also no dependency that it leaves out.
      - Options in it that say where packages come from are used unless O(index_url) or O(wheelhouse) is given.
      - Exactly one of O(lock) and O(version) is required.
    type: str
  version:
    description:
      - Version of O(distribution) to install when there is no lock.
      - Dependencies are then what the index offers on that day, and two hosts may get different ones.
    type: str
  distribution:
    description:
      - Python package that is the engine.
    type: str
    default: vllm
  index_url:
    description:
      - Package index to use instead of the one that the host's own configuration names.
      - With it, the host's configuration of C(pip) and C(uv) is ignored.
      - May carry credentials. It reaches the installer in a file that only the user who runs the module can read.
    type: str
  extra_index_urls:
    description:
      - Package indexes to use besides.
      - With a lock, the installer takes a pinned file from whichever index has it, since the hash decides.
    type: list
    elements: str
    default: []
  wheelhouse:
    description:
      - Directory on the host, or address of a page, with the files to install. No index is asked then.
      - Mutually exclusive with O(index_url) and not to be used with O(extra_index_urls).
    type: str
  installer:
    description:
      - V(uv) installs in a fraction of the time that V(pip) needs.
      - V(auto) takes C(uv) if the host has it, else C(pip).
    type: str
    choices: [auto, uv, pip]
    default: auto
  python:
    description:
      - Interpreter on the host from which the environment is made.
      - Another one than before means another environment.
    type: path
    default: /usr/bin/python3
  only_binary:
    description:
      - Whether to take wheels only.
      - A source package would run its own build code, and fetch build tools that no lock names.
    type: bool
    default: true
  proof:
    description:
      - Python code that the new environment must run without an error before it is used, such as V(import torch, vllm).
    type: str
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    details:
      - Shows digest, interpreter and the versions of the packages that matter most.
  idempotent:
    support: full
extends_documentation_fragment:
  - baremetal.kimi_k3.attributes
  - baremetal.kimi_k3.attributes.actiongroup
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
"""

EXAMPLES = r"""
- name: Install what the lock pins
  baremetal.kimi_k3.engine_venv:
    path: /opt/kimi-k3/venv
    lock: "{{ lookup('ansible.builtin.file', 'vllm-0.32.0.txt') }}"

- name: Install on a host without a way out
  baremetal.kimi_k3.engine_venv:
    path: /opt/kimi-k3/venv
    lock: "{{ lookup('ansible.builtin.file', 'vllm-0.32.0.txt') }}"
    wheelhouse: /srv/wheelhouse

- name: Install a version as the index offers it today
  baremetal.kimi_k3.engine_venv:
    path: /opt/kimi-k3/venv
    version: 0.32.0
    proof: import torch, vllm
"""

RETURN = r"""
path:
  description: Place of the link.
  returned: always
  type: str
  sample: /opt/kimi-k3/venv
environment:
  description: Directory that the link points to. In check mode the one it points to now, if any.
  returned: when there is one
  type: str
  sample: /opt/kimi-k3/venvs/0123456789ab
action:
  description:
    - V(none), V(build) for a new environment, or V(switch) to an older one that fits.
  returned: always
  type: str
  sample: build
reason:
  description: Why something was done.
  returned: always
  type: str
  sample: there is no environment yet
lock_digest:
  description: SHA-256 of the canonical lock.
  returned: always
  type: str
  sample: 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae
packages_digest:
  description: SHA-256 over the sorted names and versions of all installed packages.
  returned: when the environment exists
  type: str
  sample: fcde2b2edba56bf408601fb721fe9b5c338d10ee429ea04fae5511b68fbf8fb9
versions:
  description: Installed versions of the packages that matter most, null for those that are not installed.
  returned: when the environment exists
  type: dict
  sample: {vllm: 0.32.0, torch: 2.13.0, nvidia-nccl-cu13: 2.29.7, flashinfer-python: 0.7.0}
python:
  description: Version of the interpreter.
  returned: when the environment exists
  type: str
  sample: 3.12.3
installer:
  description: What the environment was made with.
  returned: when the environment exists
  type: str
  sample: uv
removed:
  description: Directories of older or half-built environments that were removed.
  returned: when something was done
  type: list
  elements: str
  sample: []
in_use:
  description: Directories that were left because processes use them.
  returned: when something was done
  type: list
  elements: str
  sample: []
"""

import contextlib
import errno
import fcntl
import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.engine_lock import (
    KEY_PACKAGES,
    Lock,
    bare_lock,
    canonical_name,
    compare_installed,
    packages_digest,
    parse_lock,
)

RECEIPT = "engine.json"
MANIFEST = "engine.files.gz"
ENVIRONMENT = re.compile(r"[0-9a-f]{12}(-[0-9]+)?")
WORK = ".work-"
#: Seconds to wait for another build on the same host.
BUILD_WAIT = 3600

LIST_INSTALLED = """
import importlib.metadata, json, platform, sys
found = {}
for dist in importlib.metadata.distributions(path=[p for p in sys.path if p.startswith(sys.prefix)]):
    found[dist.metadata["Name"]] = dist.version
print(json.dumps({"python": platform.python_version(), "installed": found}))
"""


# How the installers say that a file is not the one whose hash is pinned.
_OTHER_HASH_UV = re.compile(
    r"Hash mismatch for `(?P<package>[^`]+)`\s+Expected:\s+sha256:(?P<wanted>\w+)"
    r"[\s\S]*?Computed:\s+sha256:(?P<got>\w+)"
)
_OTHER_HASH_PIP = re.compile(
    r"^\s*(?P<package>[\w.-]+==\S+) from .*\n\s*Expected sha256 (?P<wanted>\w+)[\s\S]*?Got\s+(?P<got>\w+)", re.MULTILINE
)


class EngineError(Exception):
    """Something that the operator must put right, in one sentence."""


# --- what an environment is ---------------------------------------------------------------------------------------


def list_files(root: str) -> Iterator[str]:
    """Give size, modification time and path of each file; not of byte code, which running the engine may write."""
    stack = [""]
    while stack:
        folder = stack.pop()
        try:
            entries = sorted(os.scandir(os.path.join(root, folder)), key=lambda entry: entry.name)
        except NotADirectoryError:
            continue
        for entry in entries:
            path = os.path.join(folder, entry.name)
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    stack.append(path)
            elif path not in (RECEIPT, MANIFEST) and not entry.name.endswith(".pyc"):
                status = entry.stat(follow_symlinks=False)
                yield f"{status.st_size} {status.st_mtime_ns} {path}\n"


def digest_lines(lines: Iterable[str]) -> str:
    """Give the digest of lines in whatever order."""
    return hashlib.sha256("".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()


def describe_changes(before: Iterable[str], after: Iterable[str]) -> str:
    """Name a file that differs between two lists, and how many do."""
    old = {line.split(" ", 2)[2].rstrip("\n"): line for line in before}
    new = {line.split(" ", 2)[2].rstrip("\n"): line for line in after}
    words = [(path, "is missing") for path in old if path not in new]
    words += [(path, "was changed") for path, line in old.items() if new.get(path, line) != line]
    words += [(path, "was added") for path in new if path not in old]
    if not words:
        return "files differ"
    path, what = min(words)
    more = len(words) - 1
    return f"{path} {what}" + (
        f", and {more} other files differ" if more > 1 else ", and another file differs" if more else ""
    )


def write_atomically(path: str, data: bytes) -> None:
    """Write a file so that its name never bears half of it."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)


def read_receipt(environment: str) -> dict[str, Any] | None:
    """Give the receipt of an environment, None when it has none or it is damaged."""
    try:
        with open(os.path.join(environment, RECEIPT), encoding="utf-8") as file:
            receipt = json.load(file)
    except (OSError, ValueError):
        return None
    return receipt if isinstance(receipt, dict) and receipt.get("schema") == 1 else None


def write_receipt(environment: str, receipt: dict[str, Any]) -> None:
    """Write receipt and list of files of a finished environment."""
    lines = sorted(list_files(environment))
    packed = gzip.compress("".join(lines).encode("utf-8", "surrogateescape"), compresslevel=6, mtime=0)
    write_atomically(os.path.join(environment, MANIFEST), packed)
    text = json.dumps({**receipt, "files_digest": digest_lines(lines)}, indent=2) + "\n"
    write_atomically(os.path.join(environment, RECEIPT), text.encode())


def damage(environment: str, receipt: dict[str, Any]) -> str:
    """Say what was changed since the environment was built; empty when nothing was."""
    lines = list(list_files(environment))
    if digest_lines(lines) == receipt.get("files_digest"):
        return ""
    try:
        with gzip.open(os.path.join(environment, MANIFEST), "rt", encoding="utf-8", errors="surrogateescape") as file:
            before = list(file)
    except (OSError, EOFError, UnicodeDecodeError):
        return f"{MANIFEST} is missing or damaged"
    return describe_changes(before, lines)


# --- who uses what ------------------------------------------------------------------------------------------------


def used(directories: Iterable[str], proc: str = "/proc") -> set[str]:
    """Give those directories that a process runs from, works in, has mapped, or names in its command."""
    left = set(directories)
    found: set[str] = set()
    own = str(os.getpid())
    for pid in os.listdir(proc) if left else []:
        if not pid.isdigit() or pid == own:
            continue
        seen = []
        for name in ("exe", "cwd"):
            with contextlib.suppress(OSError):
                seen.append(os.readlink(os.path.join(proc, pid, name)) + "/")
        for name in ("cmdline", "maps"):
            with (
                contextlib.suppress(OSError),
                open(os.path.join(proc, pid, name), encoding="utf-8", errors="replace") as file,
            ):
                seen.append(file.read() + "/")
        hits = {directory for directory in left if any(directory + "/" in text for text in seen)}
        found |= hits
        left -= hits
    return found


# --- messages -----------------------------------------------------------------------------------------------------


def redact(text: str) -> str:
    """Take credentials out of addresses."""
    return re.sub(r"(?<=://)[^/@\s]+@", "***@", text)


def explain(stdout: str, stderr: str, limit: int = 900) -> str:
    """Give the part of an installer's output that says what is wrong."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", f"{stdout}\n{stderr}")
    wrong = _OTHER_HASH_UV.search(text) or _OTHER_HASH_PIP.search(text)
    if wrong:
        return (
            f"{wrong['package']} is not the file that the lock pins"
            f" (wanted sha256 {wrong['wanted']}, got {wrong['got']});"
            " either the file was tampered with, or the lock was made for another source of packages"
        )
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if re.match(r"\s*(?:\u00d7|error:|ERROR:)", line):
            lines = lines[number:]
            break
    else:
        lines = lines[-8:]
    shown = redact(
        "; ".join(re.sub(r"^[\s\u00d7\u2500-\u257f\u25b6]+|^(?:error|ERROR): ", "", line).strip() for line in lines)
    )
    return shown if len(shown) <= limit else shown[:limit] + "…"


def summary(receipt: dict[str, Any] | None, state: str = "") -> str:
    """Give the lines that a diff compares."""
    if receipt is None:
        return ""
    lines = [f"lock_digest: {receipt['lock_digest']}", f"python: {receipt.get('python')}"]
    lines += [f"{name}: {version}" for name, version in sorted(receipt.get("versions", {}).items()) if version]
    if state:
        lines.append(f"state: {state}")
    return "".join(f"{line}\n" for line in lines)


def planned_versions(lock: Lock, distribution: str) -> dict[str, str | None]:
    """Give the versions that the lock promises for the packages that matter most."""
    names = dict.fromkeys((canonical_name(distribution), *KEY_PACKAGES))
    return {name: " or ".join(lock.versions(name)) or None for name in names}


# --- the work -----------------------------------------------------------------------------------------------------


@dataclass
class State:
    """What stands at a directory, and why it does not do; `reason` is empty when it does."""

    directory: str | None
    receipt: dict[str, Any] | None
    reason: str


class Engine:
    """The environments behind one link."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        params = module.params
        self.path = os.path.abspath(params["path"])
        self.store = self.path + "s"
        self.distribution = canonical_name(params["distribution"])
        self.base = os.path.realpath(params["python"])
        self.lock = self._wanted()
        self.digest = self.lock.digest()

    def _wanted(self) -> Lock:
        params = self.module.params
        if params["version"] is not None:
            if not re.fullmatch(r"[0-9A-Za-z.!+_-]+", params["version"]):
                raise EngineError(f"version: {params['version']!r} is not a version; it must look like 0.32.0")
            return bare_lock(self.distribution, params["version"])
        lock = parse_lock(params["lock"], self.distribution)
        if lock.problems:
            more = f" (and {len(lock.problems) - 1} more)" if len(lock.problems) > 1 else ""
            raise EngineError(f"lock: {lock.problems[0]}{more}; make the lock with 'uv pip compile --generate-hashes'")
        return lock

    # -- looking

    def target(self) -> str | None:
        """Give the directory that the link points to; refuse what is not ours."""
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise EngineError(f"path: {os.path.dirname(self.path)} is not a directory") from None
        if not stat.S_ISLNK(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a file"
            raise EngineError(
                f"path: {self.path} is {kind} that was not made by this module;"
                " move it away, or set path to another place"
            )
        target = os.path.normpath(os.path.join(os.path.dirname(self.path), os.readlink(self.path)))
        if os.path.dirname(target) != self.store or not ENVIRONMENT.fullmatch(os.path.basename(target)):
            raise EngineError(
                f"path: {self.path} is a link to {target}, which was not made by this module;"
                " remove the link, or set path to another place"
            )
        return target

    def inspect(self, directory: str | None) -> State:
        """Judge an environment."""
        if directory is None:
            return State(None, None, "there is no environment yet")
        if not os.path.isdir(directory):
            return State(None, None, f"{directory} is gone")
        receipt = read_receipt(directory)
        if receipt is None:
            return State(
                directory, None, f"{directory} has no receipt: it was not finished, or its {RECEIPT} is damaged"
            )
        if receipt.get("lock_digest") != self.digest:
            return State(directory, receipt, f"{directory} has another lock")
        if receipt.get("base_python") != self.base:
            return State(
                directory, receipt, f"{directory} was made from {receipt.get('base_python')}, wanted {self.base}"
            )
        changed = damage(directory, receipt)
        if changed:
            return State(directory, receipt, f"{directory} is broken: {changed}")
        code, _out, err = self.module.run_command([os.path.join(directory, "bin", "python"), "-I", "-S", "-c", ""])
        if code != 0:
            return State(directory, receipt, f"{directory} is broken: its python does not run: {err.strip()[-200:]}")
        return State(directory, receipt, "")

    def environments(self) -> list[str]:
        """Give the directories of all environments, finished or not."""
        try:
            names = sorted(os.listdir(self.store))
        except FileNotFoundError:
            return []
        return [os.path.join(self.store, name) for name in names if ENVIRONMENT.fullmatch(name)]

    def fitting(self, current: str | None) -> str | None:
        """Give an environment beside the current one that is as wanted."""
        prefix = self.digest[:12]
        for directory in self.environments():
            if (
                directory != current
                and os.path.basename(directory).startswith(prefix)
                and not self.inspect(directory).reason
            ):
                return directory
        return None

    # -- building

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other builds on this host away; wait for one that goes on after its run was cut off."""
        os.makedirs(self.store, mode=0o755, exist_ok=True)
        with open(os.path.join(self.store, ".lock"), "a", encoding="utf-8") as file:
            deadline = time.monotonic() + BUILD_WAIT
            while True:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as exc:
                    if exc.errno not in (errno.EACCES, errno.EAGAIN):
                        raise
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"another run has been building in {self.store} for {BUILD_WAIT} s; see who holds {file.name}"
                    )
                time.sleep(0.5)
            yield

    def installer(self) -> tuple[str, str]:
        """Give the installer and its executable."""
        wanted = self.module.params["installer"]
        if wanted != "pip":
            homes = ["/usr/local/bin", os.path.join(os.environ.get("HOME", "/root"), ".local", "bin")]
            uv = self.module.get_bin_path("uv", opt_dirs=homes)
            if uv:
                return "uv", uv
            if wanted == "uv":
                raise EngineError("installer: uv is not on this host; install it, or set installer to pip or auto")
        return "pip", ""

    def run(self, argv: list[str], env: dict[str, str], what: str) -> str:
        """Run a step; raise in words when it fails."""
        code, out, err = self.module.run_command(argv, environ_update=env, cwd=self.store)
        if code != 0:
            raise EngineError(f"{what}: {explain(out, err) or f'exit status {code}'}")
        return str(out)

    def requirements(self, work: str) -> str:
        """Write what to install and from where; nobody else reads the file, since addresses may carry credentials."""
        params = self.module.params
        lines = []
        if params["wheelhouse"]:
            lines += ["--no-index", f"--find-links {params['wheelhouse']}"]
        elif params["index_url"]:
            lines.append(f"--index-url {params['index_url']}")
        else:
            lines += self.lock.sources
        lines += [f"--extra-index-url {url}" for url in params["extra_index_urls"]]
        path = os.path.join(work, "requirements.txt")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines) + self.lock.text())
        return path

    def environment_variables(self, work: str) -> dict[str, str]:
        """Give the installers' environment: scratch space beside the result, the host's settings only if needed."""
        params = self.module.params
        for name in list(os.environ):
            own_source = params["index_url"] or params["wheelhouse"]
            if name in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME") or (own_source and name.startswith(("PIP_", "UV_"))):
                del os.environ[name]
        # The system's scratch space may be a small memory file system; the packages have gigabytes.
        env = {
            "TMPDIR": work,
            "UV_CACHE_DIR": os.path.join(work, "uv"),
            "UV_PYTHON_DOWNLOADS": "never",
            "NO_COLOR": "1",
        }
        if params["index_url"] or params["wheelhouse"]:
            env |= {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}
        return env

    def install(self, directory: str, work: str, installer: str, uv: str) -> None:
        """Make an environment and put the packages into it."""
        params = self.module.params
        env = self.environment_variables(work)
        locked = params["lock"] is not None
        requirements = self.requirements(work)
        common = ["--require-hashes", "--no-deps"] if locked else []
        if params["wheelhouse"]:
            common.append("--no-index")
        if params["only_binary"]:
            common += ["--only-binary", ":all:"]
        python = os.path.join(directory, "bin", "python")
        failed = f"{params['distribution']} could not be installed by {installer}"
        if installer == "uv":
            self.run([uv, "venv", "--quiet", "--python", params["python"], directory], env, "no virtual environment")
            argv = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python]
            if locked:
                # Hashes decide what is installed, so any index may provide it.
                argv += ["--index-strategy", "unsafe-best-match"]
            self.run([*argv, *common, "-r", requirements], env, failed)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, ".lock"))  # left by uv, and writable for everybody
            return
        pip = self.borrow_pip(work, env)
        self.run([params["python"], "-m", "venv", "--without-pip", directory], env, "no virtual environment")
        argv = [python, pip, "install", "--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
        self.run([*argv, "--no-warn-script-location", *common, "-r", requirements], env, failed)

    def borrow_pip(self, work: str, env: dict[str, str]) -> str:
        """Give pip from an environment of its own, so that what is installed is the same as with uv."""
        python = self.module.params["python"]
        boot, alone = os.path.join(work, "boot"), os.path.join(work, "alone")
        code, out, err = self.module.run_command([python, "-m", "venv", boot], environ_update=env, cwd=self.store)
        packages = [
            os.path.join(folder, "pip")
            for folder, names, _files in os.walk(boot)
            if "pip" in names and folder.endswith("-packages")
        ]
        if code != 0 or not packages:
            if "ensurepip" in out + err or "No module named venv" in out + err:
                raise EngineError(
                    f"{python} cannot make a virtual environment with pip; install the package python3-venv"
                    " (python3.11-venv and the like for another version than the system's), or install uv"
                )
            raise EngineError(f"no virtual environment: {explain(out, err)}")
        os.mkdir(alone)
        os.rename(packages[0], os.path.join(alone, "pip"))
        return os.path.join(alone, "pip")

    def check(self, directory: str) -> dict[str, Any]:
        """Prove a new environment and give its receipt."""
        params = self.module.params
        python = os.path.join(directory, "bin", "python")
        seen = json.loads(
            self.run([python, "-I", "-c", LIST_INSTALLED], {}, "the new environment's python does not run")
        )
        installed = {canonical_name(name): version for name, version in seen["installed"].items()}
        if params["lock"] is not None:
            problems = compare_installed(self.lock, installed)
            if problems:
                raise EngineError(f"what was installed is not what the lock pins: {'; '.join(problems[:5])}")
        if self.distribution not in installed:
            raise EngineError(f"{params['distribution']} is not among the installed packages")
        if params["proof"]:
            self.run([python, "-I", "-c", params["proof"]], {}, "the new environment fails its proof")
        names = dict.fromkeys((self.distribution, *KEY_PACKAGES))
        return {
            "schema": 1,
            "lock_digest": self.digest,
            "python": seen["python"],
            "base_python": self.base,
            "versions": {name: installed.get(name) for name in names},
            "packages_digest": packages_digest(installed),
            "packages": dict(sorted(installed.items())),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }

    def build(self) -> str:
        """Build an environment under a new name, and give its directory."""
        if not os.access(self.module.params["python"], os.X_OK):
            raise EngineError(
                f"python: {self.module.params['python']} is not on this host; install it or name another one"
            )
        self._check_wheelhouse()
        installer, uv = self.installer()
        directory = next(
            name
            for name in (f"{self.store}/{self.digest[:12]}{'' if n == 0 else f'-{n}'}" for n in itertools.count())
            if not os.path.lexists(name)
        )
        work = tempfile.mkdtemp(prefix=WORK, dir=self.store)
        try:
            self.install(directory, work, installer, uv)
            write_receipt(directory, {**self.check(directory), "installer": installer})
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return directory

    def _check_wheelhouse(self) -> None:
        wheelhouse = self.module.params["wheelhouse"]
        if wheelhouse and "://" not in wheelhouse and not os.path.isdir(wheelhouse):
            raise EngineError(f"wheelhouse: {wheelhouse} is not a directory on this host; mount or copy it there first")

    def swap(self, directory: str) -> None:
        """Let the link point to an environment, in one step."""
        temporary = f"{self.path}.{os.getpid()}.tmp"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        os.symlink(directory, temporary)
        os.rename(temporary, self.path)
        parent = os.open(os.path.dirname(self.path), os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)

    def clean(self, keep: Iterable[str | None]) -> tuple[list[str], list[str]]:
        """Remove what nobody needs; give what was removed, and what processes still use."""
        kept = {directory for directory in keep if directory}
        candidates = [directory for directory in self.environments() if directory not in kept]
        with contextlib.suppress(FileNotFoundError):
            candidates += [os.path.join(self.store, name) for name in os.listdir(self.store) if name.startswith(WORK)]
        busy = used(candidates)
        removed = []
        for directory in candidates:
            if directory in busy:
                continue
            # Without its receipt it is nothing but a leftover, also when removing it is cut off halfway.
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, RECEIPT))
            try:
                shutil.rmtree(directory)
            except OSError as exc:
                self.module.warn(f"{directory} could not be removed: {exc.strerror}: {exc.filename}")
            else:
                removed.append(directory)
        return removed, sorted(busy)

    # -- all of it

    def ensure(self) -> dict[str, Any]:
        """Bring the link where it should be."""
        now = self.inspect(self.target())
        if not now.reason:
            return self.result("none", "", now, now)
        if self.module.check_mode:
            fitting = self.fitting(now.directory)
            if fitting:
                return self.result("switch", now.reason, now, State(fitting, read_receipt(fitting), ""))
            self._check_wheelhouse_for_check_mode()
            return self.result("build", now.reason, now, State(None, None, ""))
        os.umask(0o022)  # the engine runs as another user, whatever the mask of this one
        with self.exclusive():
            before = self.inspect(self.target())
            if not before.reason:
                # Another run has just finished it.
                return self.result("none", "", before, before)
            directory = self.fitting(before.directory)
            action = "switch" if directory else "build"
            if directory is None:
                self.clean([before.directory, *(found for found in self.environments() if read_receipt(found))])
                directory = self.build()
            self.swap(directory)
            previous = before.directory if before.receipt else None
            removed, busy = self.clean([directory, previous if previous and not self._is_broken(before) else None])
            result = self.result(action, before.reason, before, State(directory, read_receipt(directory), ""))
            return {**result, "removed": removed, "in_use": busy}

    def _check_wheelhouse_for_check_mode(self) -> None:
        try:
            self._check_wheelhouse()
        except EngineError as exc:
            self.module.warn(str(exc))

    @staticmethod
    def _is_broken(state: State) -> bool:
        return " is broken: " in state.reason

    def result(self, action: str, reason: str, before: State, after: State) -> dict[str, Any]:
        """Give the module's answer."""
        planned = {
            "lock_digest": self.digest,
            "python": f"as {self.base}",
            "versions": planned_versions(self.lock, self.distribution),
        }
        result: dict[str, Any] = {
            "changed": action != "none",
            "path": self.path,
            "action": action,
            "reason": reason,
            "lock_digest": self.digest,
        }
        shown = after if not self.module.check_mode or action == "none" else State(before.directory, None, "")
        if shown.directory:
            result["environment"] = shown.directory
        if shown.receipt:
            result |= {key: shown.receipt.get(key) for key in ("packages_digest", "versions", "python", "installer")}
        if self.module._diff:
            state = before.reason if before.receipt and self._is_broken(before) else ""
            result["diff"] = {
                "before_header": before.directory or f"{self.path} (absent)",
                "after_header": after.directory or f"{self.store}/{self.digest[:12]}",
                "before": summary(before.receipt, state),
                "after": summary(after.receipt or planned),
            }
        return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            # No secret, but hundreds of kilobytes that the host's journal and every -vvv would repeat.
            "lock": {"type": "str", "no_log": True},
            "version": {"type": "str"},
            "distribution": {"type": "str", "default": "vllm"},
            "index_url": {"type": "str", "no_log": True},
            "extra_index_urls": {"type": "list", "elements": "str", "default": [], "no_log": True},
            "wheelhouse": {"type": "str"},
            "installer": {"type": "str", "choices": ["auto", "uv", "pip"], "default": "auto"},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "only_binary": {"type": "bool", "default": True},
            "proof": {"type": "str"},
        },
        required_one_of=[("lock", "version")],
        mutually_exclusive=[("lock", "version"), ("index_url", "wheelhouse")],
        supports_check_mode=True,
    )
    if module.params["wheelhouse"] and module.params["extra_index_urls"]:
        module.fail_json(msg="extra_index_urls: no index is asked when wheelhouse is set; leave one of the two out")
    try:
        result = Engine(module).ensure()
    except EngineError as exc:
        module.fail_json(msg=str(exc))
    except OSError as exc:
        place = f": {exc.filename}" if exc.filename else ""
        module.fail_json(msg=f"the environment could not be prepared: {exc.strerror}{place}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
