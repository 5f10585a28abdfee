# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab: two real hosts, a model hub, a tiny checkpoint and the engine's packages, on this one machine. Run as root.

=========================== ==========================================================================================
``lab.py up``               set up what is missing, boot the hosts, write ``inventory/lab/hosts.yml``
``lab.py down``             hosts, hub and network away; root, checkpoint and downloads stay
``lab.py clean``            ``down``, and the state folder away; downloads stay, unless ``--downloads``
``lab.py host stop NAME``   cut a host's power (``start``: switch it on again, with its disk as it was)
``lab.py hub stop``         stop the hub (``start``: start it)
``lab.py wheelhouse``       have the engine's packages of ``engine.lock``
``lab.py checkpoint``       make the tiny checkpoint
``lab.py lock``             make ``engine.lock`` anew
``lab.py status``           what is up; exit status 1 if something is not
=========================== ==========================================================================================

The environment variables are those of ``lab_settings``. A command that was killed leaves nothing that ``down`` or
``clean`` would not find: processes are in boxes with known names (``lab_contain``), mounts lie below the state folder,
bridge and firewall table have the lab's name.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lab_apt
import lab_checkpoint
import lab_hosts
import lab_inventory
import lab_wheelhouse
from lab_contain import Boxes, find_boxes
from lab_settings import CDN_PORT, HUB_PORT, LAB, LabError, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# Commands that the lab calls, and where Debian and Ubuntu have them.
COMMANDS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "mount": "util-linux",
}


def say(text: str) -> None:
    """Tell what goes on."""
    print(f"lab: {text}", flush=True)


# What this machine must have


def missing_packages() -> list[str]:
    """Packages of Debian and Ubuntu that the lab needs and this machine lacks."""
    missing = {package for command, package in COMMANDS.items() if shutil.which(command) is None}
    if not Path(lab_apt.KEYRING).is_file():
        missing.add("debian-archive-keyring")
    own = subprocess.run([sys.executable, "-c", "import ensurepip"], capture_output=True, check=False)
    pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if own.returncode != 0 and pip.returncode != 0:
        missing.add("python3-venv")
    return sorted(missing)


def have_prerequisites() -> None:
    """Install what is missing where that is possible, else say what is missing."""
    missing = missing_packages()
    if not missing:
        return
    release = lab_apt.os_release(Path("/etc/os-release").read_text()) if Path("/etc/os-release").is_file() else {}
    family = {release.get("ID", ""), *release.get("ID_LIKE", "").split()}
    names = " ".join(missing)
    if not family & {"debian", "ubuntu"} or shutil.which("apt-get") is None:
        raise LabError(f"The lab needs what Debian and Ubuntu have in these packages; please install it: {names}")
    say(f"installing {names}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for argv in (
        ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", "update"],
        ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", "install", "--no-install-recommends", "-y", *missing],
    ):
        if subprocess.run(argv, env=environment, check=False, stdout=subprocess.DEVNULL).returncode != 0:
            raise LabError(f"{' '.join(argv)} failed; the lab needs these packages: {names}")
    left = missing_packages()
    if left:
        raise LabError(f"These packages are installed, and what the lab needs of them is not there: {' '.join(left)}")


@contextlib.contextmanager
def only_one(settings: Settings) -> Iterator[None]:
    """Let one command at a time change the lab; the mark goes with the process, however it ends."""
    settings.lock_file.parent.mkdir(parents=True, exist_ok=True)
    with settings.lock_file.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("waiting for another command of this lab to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Parts


def have_key(settings: Settings) -> None:
    """The key that opens the hosts."""
    if not settings.key.is_file() or not settings.key.with_suffix(".pub").is_file():
        for path in (settings.key, settings.key.with_suffix(".pub")):
            path.unlink(missing_ok=True)
        lab_hosts.call(
            "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"{settings.name}-lab", "-f", str(settings.key)
        )


def hub_argv(settings: Settings) -> list[str]:
    """The command that is the hub."""
    return [
        sys.executable,
        str(LAB / "lab_hub.py"),
        f"--root={settings.hub_root}",
        f"--host={settings.gateway}",
        f"--port={HUB_PORT}",
        f"--cdn-port={CDN_PORT}",
    ]


def start_hub(settings: Settings, boxes: Boxes) -> None:
    """Have the hub run, by the code of this checkout."""
    argv = hub_argv(settings)
    code = hashlib.sha256((LAB / "lab_hub.py").read_bytes() + repr(argv).encode()).hexdigest()
    stamp = settings.state / "hub.stamp"
    if boxes.alive("hub"):
        if stamp.is_file() and stamp.read_text() == code:
            return
        boxes.kill("hub")
    log = settings.state / "hub.log"
    stamp.write_text(code)
    boxes.start("hub", argv, log, {"PYTHONUNBUFFERED": "1"})
    deadline = time.monotonic() + 20
    while not hub_answers(settings):
        if not boxes.alive("hub") or time.monotonic() > deadline:
            lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
            raise LabError(f"The hub does not start: {lines[-1] if lines else 'no output'} (see {log})")
        time.sleep(0.05)
    say(f"hub at {settings.endpoint}")


def hub_answers(settings: Settings) -> bool:
    """Whether the hub is there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{settings.endpoint}/_lab/faults", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


# Commands


def up(settings: Settings) -> None:
    """Set up what is missing."""
    have_prerequisites()
    boxes = find_boxes(settings.name)
    settings.state.mkdir(parents=True, exist_ok=True)
    settings.cache.mkdir(parents=True, exist_ok=True)
    have_key(settings)
    lab_hosts.network_up(settings, say)
    uv = lab_wheelhouse.uv_binary(settings, boxes, say)
    if not lab_hosts.root_is_made(settings, uv):
        for host in settings.hosts:
            lab_hosts.remove_host(settings, boxes, host)
        lab_hosts.make_root(settings, boxes, uv, say)
    lab_wheelhouse.make_wheelhouse(settings, boxes, say)
    revision = lab_checkpoint.publish(settings.hub_root, say)
    start_hub(settings, boxes)
    started = [host for host in settings.hosts if lab_hosts.start_host(settings, boxes, host)]
    if started:
        say(f"booting {', '.join(host.name for host in started)}")
    for host in settings.hosts:
        lab_hosts.wait_for_host(settings, boxes, host)
    if started:
        peers = [(host.name, host.address, 22) for host in settings.hosts]
        ports = [("the hub", settings.gateway, HUB_PORT), ("the hub", settings.gateway, CDN_PORT)]
        lab_hosts.check_reach(settings, settings.hosts[0], [*peers[1:], *ports])
    file = lab_inventory.write(settings, revision)
    say(f"up; inventory {file}")


def down(settings: Settings) -> None:
    """Take hosts, hub and network away."""
    boxes = find_boxes(settings.name)
    for box in ("root", "download", "hub"):
        boxes.kill(box)
    for host in settings.hosts:
        lab_hosts.remove_host(settings, boxes, host)
    lab_hosts.network_down(settings)
    lab_hosts.unmount_below(settings.state)
    lab_hosts.remove_tree(settings.shared)


def clean(settings: Settings, *, downloads: bool) -> None:
    """Take everything away."""
    down(settings)
    lab_hosts.remove_tree(settings.state)
    with contextlib.suppress(OSError):
        settings.state.parent.rmdir()
    lab_inventory.remove(settings)
    if downloads:
        lab_hosts.remove_tree(settings.cache)
    settings.lock_file.unlink(missing_ok=True)


def power(settings: Settings, action: str, name: str) -> None:
    """Switch a host off or on."""
    boxes = find_boxes(settings.name)
    host = settings.host(name)
    if action == "stop":
        lab_hosts.stop_host(settings, boxes, host)
        return
    if not settings.base.is_dir():
        raise LabError(f"There is no lab yet; make one first: {Path(sys.argv[0])} up")
    lab_hosts.network_up(settings, say)
    lab_hosts.start_host(settings, boxes, host)
    lab_hosts.wait_for_host(settings, boxes, host)


def hub(settings: Settings, action: str) -> None:
    """Start or stop the hub."""
    boxes = find_boxes(settings.name)
    if action == "stop":
        boxes.kill("hub")
        return
    settings.state.mkdir(parents=True, exist_ok=True)
    lab_checkpoint.publish(settings.hub_root, say)
    lab_hosts.network_up(settings, say)
    start_hub(settings, boxes)


def status(settings: Settings) -> int:
    """Print what is up."""
    boxes = find_boxes(settings.name)
    parts = {
        "root": settings.base.is_dir(),
        "wheelhouse": settings.wheelhouse.is_dir(),
        "checkpoint": (settings.hub_root / lab_checkpoint.REPOSITORY / "refs/main").is_file(),
        "network": Path("/sys/class/net", settings.bridge).is_dir(),
        f"hub {settings.endpoint}": boxes.alive("hub"),
        **{f"{host.name} {host.address}": boxes.alive(host.name) for host in settings.hosts},
        f"inventory {settings.inventory}": (settings.inventory / "hosts.yml").is_file(),
    }
    for part, good in parts.items():
        print(f"{'up  ' if good else 'none'}  {part}")
    return 0 if all(parts.values()) else 1


def command(settings: Settings, options: argparse.Namespace) -> int:
    """Do what the command line says, alone."""
    if options.command == "status":
        return status(settings)
    if os.geteuid() != 0:
        raise LabError("The lab needs root: it makes a network, mounts and control groups.")
    with only_one(settings):
        match options.command:
            case "up":
                up(settings)
            case "down":
                down(settings)
            case "clean":
                clean(settings, downloads=options.downloads)
            case "host":
                power(settings, options.action, options.name)
            case "hub":
                hub(settings, options.action)
            case "wheelhouse":
                lab_wheelhouse.make_wheelhouse(settings, find_boxes(settings.name), say)
            case "checkpoint":
                print(lab_checkpoint.publish(settings.hub_root, say))
            case "lock":
                lab_wheelhouse.write_lock(settings, find_boxes(settings.name), say)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description="The lab: two real hosts and a model hub on this one machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="set up what is missing and boot the hosts")
    commands.add_parser("down", help="take hosts, hub and network away")
    commands.add_parser("clean", help="take everything away").add_argument(
        "--downloads", action="store_true", help="the downloads too"
    )
    host = commands.add_parser("host", help="switch a host off or on")
    host.add_argument("action", choices=["stop", "start"])
    host.add_argument("name")
    commands.add_parser("hub", help="start or stop the hub").add_argument("action", choices=["start", "stop"])
    commands.add_parser("wheelhouse", help="have the engine's packages")
    commands.add_parser("checkpoint", help="make the tiny checkpoint")
    commands.add_parser("lock", help="make engine.lock anew")
    commands.add_parser("status", help="tell what is up")
    options = parser.parse_args(arguments)
    # Neither the umask nor the language nor the short PATH of whoever starts this may change what comes out.
    os.umask(0o022)
    os.environ["LC_ALL"] = "C.UTF-8"
    os.environ["PATH"] = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/local/sbin:/usr/sbin:/sbin"
    try:
        return command(Settings.from_environment(), options)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted; run the same command again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
