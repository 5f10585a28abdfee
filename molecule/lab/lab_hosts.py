# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's machines: systemd-nspawn hosts over one Debian root, on a bridge.

The root is made once. A host is an overlay over it, which ``down`` throws away and a power cycle keeps. Hosts reach
each other and this machine, and by masquerading the world, as far as this machine reaches it.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import lab_apt
from lab_settings import Host, LabError, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lab_contain import Boxes

ROOT_PACKAGES = (
    "ca-certificates",
    "dbus",
    "g++",  # the engine's CPU build compiles with it, if it is not told not to
    "iproute2",
    "libnuma1",  # the engine links with it
    "openssh-server",
    "procps",
    "python3",
    "python3-dev",  # what it compiles includes this
    "python3-venv",
    "systemd",
    "systemd-sysv",
    "udev",
)
# What a host does not need to do here: it costs time at each boot.
MASKED_UNITS = ("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer")
RESOLVERS = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
ENVIRONMENT = {"UNIFIED_CGROUP_HIERARCHY": "1"}


def call(*argv: str, stdin: str | None = None) -> str:
    """Run a command that should succeed, and give what it prints."""
    text = "" if stdin is None else stdin
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(argv)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


# The root file system


def root_recipe(uv: Path) -> str:
    """A name for how the root is made: another recipe makes another root. The name of uv's file has its digest."""
    recipe = json.dumps([ROOT_PACKAGES, MASKED_UNITS, uv.name, lab_apt.CODENAME, 1])
    return hashlib.sha256(recipe.encode()).hexdigest()


def mmdebstrap_argv(target: Path, sources: str) -> list[str]:
    """The command that makes a Debian root; sources come on its standard input."""
    return [
        "mmdebstrap",
        "--variant=minbase",
        f"--include={','.join(ROOT_PACKAGES)}",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        # A mirror frozen at a date, or a clock that is off, is no reason to have no lab.
        '--aptopt=Acquire::Check-Valid-Until "false"',
        lab_apt.CODENAME,
        str(target),
        *(["-"] if sources else []),
    ]


def root_is_made(settings: Settings, uv: Path) -> bool:
    """Whether the root is there and made by this recipe."""
    stamp = settings.base / "etc/lab-recipe"
    return stamp.is_file() and stamp.read_text() == root_recipe(uv)


def make_root(settings: Settings, boxes: Boxes, uv: Path, say: Callable[[str], None]) -> None:
    """Make the root file system; no host may be up."""
    say("making the Debian root of the hosts")
    release = lab_apt.os_release(Path("/etc/os-release").read_text())
    choices = lab_apt.choose_sources(settings.mirror, release, Path("/etc/apt"))
    target = settings.state / "base.new"
    for sources in choices:
        remove_tree(target)
        if boxes.run("root", mmdebstrap_argv(target, sources), stdin=sources) == 0:
            break
    else:
        raise LabError(
            "The Debian root of the hosts could not be made; the reason is above. "
            "KIMI_K3_LAB_MIRROR names another Debian mirror."
        )
    prepare_root(target, uv)
    (target / "etc/lab-recipe").write_text(root_recipe(uv))
    remove_tree(settings.base)
    target.rename(settings.base)


def prepare_root(root: Path, uv: Path) -> None:
    """What all hosts have in common."""
    shutil.copyfile(uv, root / "usr/local/bin/uv")
    (root / "usr/local/bin/uv").chmod(0o755)
    units = root / "etc/systemd/system"
    for unit in MASKED_UNITS:
        _link(units / unit, "/dev/null")
    wants = units / "multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    _link(wants / "systemd-networkd.service", "/lib/systemd/system/systemd-networkd.service")
    (root / "srv/wheelhouse").mkdir(parents=True, exist_ok=True)


def _link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def remove_tree(path: Path) -> None:
    """Remove a folder of the lab; what is mounted in it has to be gone."""
    mounted = mount_points(path, Path("/proc/self/mountinfo").read_text())
    if mounted:
        raise LabError(f"{path} cannot be removed: {mounted[0]} is still mounted.")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def mount_points(below: Path, mountinfo: str) -> list[Path]:
    """What is mounted at or below a folder, the last mount first."""
    fields = (line.split(" ", 5) for line in mountinfo.splitlines())
    points = [Path(field[4].encode().decode("unicode_escape")) for field in fields]
    return [point for point in reversed(points) if point == below or below in point.parents]


# The network


def nft_rules(settings: Settings) -> str:
    """Masquerade what leaves the lab's network; a second load changes nothing."""
    table = f"table ip {settings.table}"
    return (
        f"{table} {{}}\ndelete {table}\n"
        f"{table} {{\n  chain post {{\n    type nat hook postrouting priority srcnat; policy accept;\n"
        f'    ip saddr {settings.net}.0/24 oifname != "{settings.bridge}" masquerade\n  }}\n}}\n'
    )


def network_up(settings: Settings, say: Callable[[str], None]) -> None:
    """Bridge, address, forwarding and masquerading."""
    if not Path("/sys/class/net", settings.bridge).is_dir():
        _refuse_taken_network(settings)
        call("ip", "link", "add", settings.bridge, "type", "bridge")
    call("ip", "address", "replace", f"{settings.gateway}/24", "dev", settings.bridge)
    call("ip", "link", "set", settings.bridge, "up")
    # The way out is good to have (apt in the hosts); the lab itself does without.
    try:
        forward = Path("/proc/sys/net/ipv4/ip_forward")
        before = forward.read_text().strip()
        if before != "1":
            (settings.state / "ip_forward").write_text(before)
            forward.write_text("1")
        call("nft", "-f", "-", stdin=nft_rules(settings))
    except (OSError, LabError) as error:
        say(f"the hosts have no way out: {error}")


def _refuse_taken_network(settings: Settings) -> None:
    for link in json.loads(call("ip", "-json", "-4", "address", "show") or "[]"):
        for address in link.get("addr_info", []):
            network = ipaddress.ip_network(f"{address['local']}/{address['prefixlen']}", strict=False)
            if network.prefixlen and network.overlaps(ipaddress.ip_network(f"{settings.net}.0/24")):
                raise LabError(
                    f"The lab's network {settings.net}.0/24 is in use on {link['ifname']} ({network}); "
                    "choose another one with KIMI_K3_LAB_NET."
                )


def network_down(settings: Settings) -> None:
    """Take it all away, and put forwarding back."""
    for name in [settings.bridge, *(veth(host) for host in settings.hosts)]:
        if Path("/sys/class/net", name).is_dir():
            call("ip", "link", "delete", name)
    if shutil.which("nft"):
        call("nft", "-f", "-", stdin=f"table ip {settings.table} {{}}\ndelete table ip {settings.table}\n")
    saved = settings.state / "ip_forward"
    if saved.is_file():
        with contextlib.suppress(OSError):
            Path("/proc/sys/net/ipv4/ip_forward").write_text(saved.read_text())
        saved.unlink()


def veth(host: Host) -> str:
    """The outer end of a host's cable."""
    return f"vb-{host.machine}"


def resolv_conf(texts: Iterable[str]) -> str:
    """A resolver file for the hosts: the first of these that names servers a host can reach."""
    for text in texts:
        lines = [line.split("#")[0].split(";")[0].split() for line in text.splitlines()]
        servers = [words[1] for words in lines if words[:1] == ["nameserver"] and len(words) == 2]
        reachable = [server for server in servers if not _is_local(server)]
        if reachable:
            rest = [" ".join(words) for words in lines if words[:1] in (["search"], ["options"]) and len(words) > 1]
            return "".join(f"{line}\n" for line in [*(f"nameserver {server}" for server in reachable[:3]), *rest])
    return "# The machine outside names no server that can be reached from here.\n"


def _is_local(server: str) -> bool:
    try:
        address = ipaddress.ip_address(server.partition("%")[0])
    except ValueError:
        return True
    return address.is_loopback or address.is_link_local or address.version != 4


# Hosts


def host_folder(settings: Settings, host: Host) -> Path:
    return settings.state / "hosts" / host.name


def nspawn_argv(settings: Settings, host: Host) -> list[str]:
    """The command that is a host."""
    return [
        "systemd-nspawn",
        f"--directory={host_folder(settings, host) / 'root'}",
        f"--machine={host.machine}",
        f"--hostname={host.name}",
        "--boot",
        "--register=no",
        "--keep-unit",
        f"--network-bridge={settings.bridge}",
        "--resolv-conf=off",
        "--timezone=off",
        "--link-journal=no",
        "--capability=all",
        "--kill-signal=SIGRTMIN+3",
        f"--bind-ro={settings.wheelhouse}:/srv/wheelhouse",
        f"--bind={settings.shared}:/srv/shared",
        "--setenv=LANG=C.UTF-8",
        "--console=pipe",
    ]


def start_host(settings: Settings, boxes: Boxes, host: Host) -> bool:
    """Switch a host on; False if it is on."""
    if boxes.alive(host.name):
        return False
    stop_host(settings, boxes, host)
    folder = host_folder(settings, host)
    root = folder / "root"
    for name in ("upper", "work", "root"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    settings.shared.mkdir(exist_ok=True)
    options = f"lowerdir={settings.base},upperdir={folder / 'upper'},workdir={folder / 'work'}"
    call("mount", "-t", "overlay", f"{settings.name}-{host.name}", "-o", options, str(root))
    if not (folder / "installed").exists():
        _install_host(settings, host, root)
        (folder / "installed").touch()
    boxes.start(host.name, nspawn_argv(settings, host), folder / "console.log", ENVIRONMENT)
    return True


def _install_host(settings: Settings, host: Host, root: Path) -> None:
    """What makes a host itself: name, address, key, resolver."""
    ssh = root / "root/.ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    (ssh / "authorized_keys").write_text(settings.key.with_suffix(".pub").read_text())
    (ssh / "authorized_keys").chmod(0o600)
    network = root / "etc/systemd/network"
    network.mkdir(parents=True, exist_ok=True)
    (network / "10-host0.network").write_text(
        f"[Match]\nName=host0\n\n[Network]\nAddress={host.address}/24\nGateway={settings.gateway}\n"
        "LinkLocalAddressing=no\nDHCP=no\nIPv6AcceptRA=no\n"
    )
    texts = [path.read_text() for path in RESOLVERS if path.is_file()]
    resolver = root / "etc/resolv.conf"
    resolver.unlink(missing_ok=True)
    resolver.write_text(resolv_conf(texts))
    (root / "etc/hostname").write_text(f"{host.name}\n")
    names = [f"{peer.address} {peer.name}\n" for peer in settings.hosts]
    (root / "etc/hosts").write_text("".join(["127.0.0.1 localhost\n", "::1 localhost\n", *names]))
    machine_id = root / "etc/machine-id"
    machine_id.unlink(missing_ok=True)
    machine_id.write_text(hashlib.md5(os.urandom(16), usedforsecurity=False).hexdigest() + "\n")


def stop_host(settings: Settings, boxes: Boxes, host: Host) -> None:
    """Cut the power: every process of the host is gone at once, its disk stays."""
    boxes.kill(host.name)
    deadline = time.monotonic() + 0.5
    while Path("/sys/class/net", veth(host)).is_dir():
        # The kernel takes the cable away with the host's network namespace, in its own time; left over, it would be in
        # the way of the next start.
        if time.monotonic() > deadline:
            subprocess.run(["ip", "link", "delete", veth(host)], capture_output=True, check=False)
        time.sleep(0.02)
    _forget_lock(host_folder(settings, host) / "root")
    unmount_below(host_folder(settings, host))
    with contextlib.suppress(OSError):
        Path("/run/systemd/nspawn/propagate", host.machine).rmdir()


def _forget_lock(root: Path) -> None:
    """A host that is killed leaves the file with which systemd-nspawn keeps others off its folder."""
    with contextlib.suppress(OSError):
        status = root.stat()
        Path(f"/run/systemd/nspawn/locks/inode-{status.st_dev}:{status.st_ino}").unlink()


def unmount_below(folder: Path) -> None:
    """Unmount what is mounted at or below a folder."""
    deadline = time.monotonic() + 20
    while points := mount_points(folder, Path("/proc/self/mountinfo").read_text()):
        done = subprocess.run(["umount", str(points[0])], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            if time.monotonic() > deadline:
                raise LabError(f"{points[0]} cannot be unmounted: {done.stderr.strip()}")
            time.sleep(0.05)


def remove_host(settings: Settings, boxes: Boxes, host: Host) -> None:
    """Switch a host off and throw its disk away."""
    stop_host(settings, boxes, host)
    remove_tree(host_folder(settings, host))


# Reaching a host


def ssh_argv(settings: Settings, host: Host, *command: str) -> list[str]:
    """A command on a host, without the connection sharing that Ansible uses."""
    plain = [
        "BatchMode=yes",
        "ConnectTimeout=5",
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "LogLevel=ERROR",
    ]
    options = [word for option in plain for word in ("-o", option)]
    return ["ssh", "-F", "/dev/null", "-i", str(settings.key), *options, f"root@{host.address}", *command]


def wait_for_host(settings: Settings, boxes: Boxes, host: Host, timeout: float = 90) -> None:
    """Wait until a host has booted and can be reached."""
    deadline = time.monotonic() + timeout
    console = host_folder(settings, host) / "console.log"
    last = "no answer"
    while time.monotonic() < deadline:
        if not boxes.alive(host.name):
            raise LabError(f"Host {host.name} has gone while booting; see {console}")
        if _answers(host.address):
            argv = ssh_argv(settings, host, "systemctl", "is-system-running", "--wait")
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout)
            last = (done.stdout or done.stderr).strip()
            if last == "running":
                return
            if last == "degraded":
                failed = subprocess.run(
                    ssh_argv(settings, host, "systemctl", "--failed", "--plain", "--no-legend"),
                    capture_output=True,
                    text=True,
                    check=False,
                )
                raise LabError(f"Host {host.name} has failed units: {failed.stdout.strip()}")
        time.sleep(0.1)
    raise LabError(f"Host {host.name} did not come up in {timeout:.0f} s (last: {last}); see {console}")


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, 22), timeout=1) as connection:
        return connection.recv(4) == b"SSH-"
    return False


REACH = """
import socket, sys
for name, address, port in zip(*[iter(sys.argv[1:])] * 3):
    try:
        socket.create_connection((address, int(port)), 5).close()
    except OSError as error:
        sys.exit(f"{name} at {address}:{port}: {error}")
"""


def check_reach(settings: Settings, host: Host, targets: Sequence[tuple[str, str, int]]) -> None:
    """See that a host reaches the others and the hub: firewalls of this machine may be in the way."""
    words = [str(word) for target in targets for word in target]
    remote = shlex.join(["python3", "-c", REACH, *words])
    done = subprocess.run(ssh_argv(settings, host, remote), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(
            f"Host {host.name} does not reach {done.stderr.strip()}. A firewall of this machine is in the way "
            f"(ufw, firewalld, or Docker's rules on bridged traffic): allow traffic on {settings.bridge}."
        )
