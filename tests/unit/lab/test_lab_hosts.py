# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the lab would run, and what it reads from the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lab
import lab_contain
import lab_hosts
import lab_inventory
import pytest
import yaml
from lab_settings import LabError, Settings


@pytest.fixture
def settings():
    return Settings.from_environment({"KIMI_K3_LAB_CACHE": "/c", "KIMI_K3_LAB_STATE": "/s"})


def test_settings_follow_from_the_name():
    settings = Settings.from_environment({"KIMI_K3_LAB_NAME": "abcdef", "KIMI_K3_LAB_NET": "198.19.7", "HOME": "/root"})
    assert [host.address for host in settings.hosts] == ["198.19.7.11", "198.19.7.12"]
    assert settings.endpoint == "http://198.19.7.1:8080"
    assert settings.state == Path("/var/lib/kimi-k3-lab/abcdef")
    for name in [settings.bridge, *(lab_hosts.veth(host) for host in settings.hosts)]:
        assert len(name) <= 15


@pytest.mark.parametrize(
    ("variable", "value"),
    [("NAME", "toolong"), ("NAME", "A"), ("NAME", "a-b"), ("NET", "198.18"), ("NET", "198.18.256"), ("STATE", "rel")],
)
def test_bad_settings_are_named(variable, value):
    with pytest.raises(LabError, match=f"KIMI_K3_LAB_{variable}"):
        Settings.from_environment({f"KIMI_K3_LAB_{variable}": value})


def test_an_unknown_host(settings):
    with pytest.raises(LabError, match="there are rank0, rank1"):
        settings.host("rank2")


def test_the_command_of_a_host(settings):
    argv = lab_hosts.nspawn_argv(settings, settings.hosts[1])
    assert argv[0] == "systemd-nspawn"
    assert {
        "--directory=/s/hosts/rank1/root",
        "--machine=kimi-rank1",
        "--hostname=rank1",
        "--boot",
        "--register=no",
        "--keep-unit",
        "--network-bridge=kimi-br",
        "--bind-ro=/s/wheelhouse:/srv/wheelhouse",
        "--bind=/s/shared:/srv/shared",
    } <= set(argv)


def test_the_unit_of_a_host(settings):
    units = lab_contain.UnitBoxes(settings.name)
    argv = units.start_argv("rank0", ["systemd-nspawn", "-x"], Path("/s/log"), lab_hosts.ENVIRONMENT)
    assert argv[0] == "systemd-run"
    assert argv[-3:] == ["--", "systemd-nspawn", "-x"]
    assert {
        "--unit=kimi-lab-rank0",
        "--collect",
        "--property=Delegate=yes",
        "--property=KillMode=mixed",
        "--property=RestartForceExitStatus=133",
        "--property=SuccessExitStatus=133",
        "--setenv=UNIFIED_CGROUP_HIERARCHY=1",
    } <= set(argv)
    assert units.run_argv("root", ["mmdebstrap"])[-2:] == ["--", "mmdebstrap"]


def test_init_is_known_by_its_name_and_its_folder(tmp_path):
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/1/comm").write_text("systemd\n")
    assert not lab_contain.systemd_is_init(tmp_path)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert lab_contain.systemd_is_init(tmp_path)
    (tmp_path / "proc/1/comm").write_text("tini\n")
    assert not lab_contain.systemd_is_init(tmp_path)


HYBRID = """\
22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
31 22 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
40 22 0:40 / /s/hosts/rank0/root rw - overlay kimi-rank0 rw
41 40 0:41 / /s/hosts/rank0/root/a\\040b rw - tmpfs tmpfs rw
42 22 0:42 / /s2 rw - tmpfs tmpfs rw
"""


def test_the_control_groups_are_found():
    assert lab_contain.cgroup2_mount(HYBRID) == Path("/sys/fs/cgroup/unified")
    assert lab_contain.cgroup2_mount(HYBRID.replace("cgroup2", "cgroup")) is None


def test_mounts_below_a_folder_are_found_innermost_first():
    assert lab_hosts.mount_points(Path("/s"), HYBRID) == [
        Path("/s/hosts/rank0/root/a b"),
        Path("/s/hosts/rank0/root"),
    ]


def test_resolvers_that_a_host_cannot_reach_are_left_out():
    stub = "# managed\nnameserver 127.0.0.53\noptions edns0\nsearch example.org\n"
    real = "nameserver 192.0.2.53 # one\nnameserver fe80::1%eth0\nnameserver ::1\n; old\nsearch a.example b.example\n"
    assert lab_hosts.resolv_conf([stub, real]) == "nameserver 192.0.2.53\nsearch a.example b.example\n"
    assert lab_hosts.resolv_conf([stub]).startswith("#")
    assert lab_hosts.resolv_conf([]).startswith("#")


def test_mmdebstrap_reads_sources_only_if_there_are_any():
    assert lab_hosts.mmdebstrap_argv(Path("/t"), "Types: deb\n")[-3:] == ["bookworm", "/t", "-"]
    assert lab_hosts.mmdebstrap_argv(Path("/t"), "")[-2:] == ["bookworm", "/t"]


def test_the_root_is_known_by_its_recipe(tmp_path, monkeypatch):
    settings = Settings.from_environment({"KIMI_K3_LAB_STATE": str(tmp_path)})
    assert not lab_hosts.root_is_made(settings, Path("uv-1"))
    (tmp_path / "base/etc").mkdir(parents=True)
    (tmp_path / "base/etc/lab-recipe").write_text(lab_hosts.root_recipe(Path("uv-1")))
    assert lab_hosts.root_is_made(settings, Path("uv-1"))
    assert not lab_hosts.root_is_made(settings, Path("uv-2"))
    monkeypatch.setattr(lab_hosts, "ROOT_PACKAGES", ("systemd",))
    assert not lab_hosts.root_is_made(settings, Path("uv-1"))


def test_the_firewall_table_can_be_loaded_twice(settings):
    rules = lab_hosts.nft_rules(settings)
    assert rules.startswith("table ip kimi_lab {}\ndelete table ip kimi_lab\n")
    assert 'ip saddr 198.18.0.0/24 oifname != "kimi-br" masquerade' in rules


def test_the_inventory(settings):
    revision = "0123456789" * 4
    data = yaml.safe_load(lab_inventory.to_yaml(lab_inventory.inventory(settings, revision)))
    assert data == lab_inventory.inventory(settings, revision)
    assert sum(data["kimi_k3"]["vars"]["serve_pipeline_layers"]) == data["kimi_k3"]["vars"]["serve_layers"]
    assert [host["serve_rank"] for host in data["kimi_k3"]["hosts"].values()] == [0, 1]


def test_the_inventory_is_written_once_and_removed(tmp_path):
    settings = Settings.from_environment({"KIMI_K3_LAB_INVENTORY": str(tmp_path / "inventory")})
    file = lab_inventory.write(settings, "0" * 40)
    stamp = file.stat().st_mtime_ns
    assert lab_inventory.write(settings, "0" * 40).stat().st_mtime_ns == stamp
    lab_inventory.remove(settings)
    lab_inventory.remove(settings)
    assert not (tmp_path / "inventory").exists()


def test_a_supervisor_starts_again_only_what_asks_for_it(tmp_path):
    """Plain folders stand in for the control groups."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.events").write_text("populated 0\n")
    code = (
        "import pathlib, sys; file = pathlib.Path(sys.argv[1]); file.open('a').write('x'); "
        "sys.exit(133 if len(file.read_text()) < 3 else 7)"
    )
    supervisor = Path(lab_contain.__file__).with_name("lab_supervise.py")
    groups = ["--enter", str(tmp_path / "one"), "--child", str(tmp_path / "two"), "--again", "133"]
    argv = [sys.executable, str(supervisor), *groups, "--", sys.executable, "-c", code, str(tmp_path / "runs")]
    assert subprocess.run(argv, check=False, timeout=30).returncode == 7
    assert (tmp_path / "runs").read_text() == "xxx"
    assert (tmp_path / "one/cgroup.procs").read_text().isdigit()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(lab.shutil, "which", lambda command: None if command in {"nft", "ssh"} else "/usr/bin/x")
    monkeypatch.setattr(lab.lab_apt, "KEYRING", __file__)
    assert lab.missing_packages() == ["nftables", "openssh-client"]


def test_where_packages_cannot_be_installed_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(lab, "missing_packages", lambda: ["mmdebstrap", "nftables"])
    monkeypatch.setattr(lab.lab_apt, "os_release", lambda _text: {"ID": "fedora"})
    with pytest.raises(LabError, match="please install it: mmdebstrap nftables"):
        lab.have_prerequisites()


def test_errors_are_one_line(monkeypatch, capsys):
    monkeypatch.setenv("KIMI_K3_LAB_NAME", "far too long")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert lab.main(["up"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
