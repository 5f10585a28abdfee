# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two modules of the support bundle, run as on a host with secrets planted in what its programs and files say."""

from __future__ import annotations

import json
import stat
import sys
import tarfile
from pathlib import Path

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import support

ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(ROOT / "tests" / "unit" / "plugins")]

from run_module import run_module

API_KEY = "planted-api-key-1"
GROUP_SECRET = "planted-group-secret-2"
HUB_TOKEN = "hf_plantedPLANTED3"
VARIABLE = "planted/in+a=variable4"
GIVEN = "planted by the controller 5"
PLANTED = ("planted", "PLANTED")


@pytest.fixture
def host(tmp_path):
    """The arguments that make the module look at a made-up host."""
    config, root, programs = tmp_path / "etc", tmp_path / "root", tmp_path / "bin"
    for folder in (config, root / "etc", programs, tmp_path / "proc" / "driver" / "nvidia", tmp_path / "venv"):
        folder.mkdir(parents=True)
    (config / "api.key").write_text(f"{API_KEY}\n")
    (config / "group.secret").write_text(GROUP_SECRET)
    (tmp_path / "token").write_text(f"{HUB_TOKEN}\n")
    (config / "rank.json").write_text('{"argv": ["vllm", "serve"]}')
    (config / "serve.env").write_text(f'MY_TOKEN="{VARIABLE}"\nVLLM_PP_LAYER_PARTITION="47,46"\n')
    (config / "digest").write_text("0123456789abcdef\n")
    (tmp_path / "status.json").write_text(f'{{"state": "serving", "text": "with {API_KEY}"}}')
    (tmp_path / "venv" / "engine.json").write_text('{"versions": {"vllm": "0.32.0"}}')
    (root / "etc" / "os-release").write_text("PRETTY_NAME=Planetary Linux\n")
    (tmp_path / "proc" / "driver" / "nvidia" / "version").write_text("NVRM version: 580.159.04\n")

    def program(name, text):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)

    log = tmp_path / "journal"
    log.write_text(
        f"start with {GROUP_SECRET} and {API_KEY}\nvalue {VARIABLE} again\nAuthorization: Bearer planted-bearer\n"
        f"pull {HUB_TOKEN}\nread {GIVEN}\nlast line\n"
    )
    kernel = tmp_path / "kernel"
    kernel.write_text("usb 1-1: new device\nNVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus\n")
    program("journalctl", f'case "$*" in *--dmesg*) cat {kernel};; *kimi-k3*) echo "$*"; cat {log};; esac')
    program(
        "systemctl", 'case "$1" in show) echo ActiveState=active;; cat) echo Environment=X_PASSWORD=planted6;; esac'
    )
    program("nvidia-smi", 'case "$1" in -q) echo "GPU 00000000:1B:00.0";; *) echo broken >&2; exit 9;; esac')
    program("dpkg-query", 'printf "nvidia-open\\t580\\nvim\\t9\\n"')
    return {
        "config_dir": str(config),
        "status_file": str(tmp_path / "status.json"),
        "venv": str(tmp_path / "venv"),
        "checkpoint": str(tmp_path / "nothing"),
        "secret_files": [f"{config}/*.key", f"{config}/*.secret", str(tmp_path / "token")],
        "secrets": [GIVEN],
        "root": str(root),
        "proc_root": str(tmp_path / "proc"),
        "command_path": str(programs),
    }


def texts_of(told):
    assert not told.get("failed"), told
    return support.unpack(told["archive"])


def test_a_host_tells_all_and_no_secret(host):
    told = run_module("support_bundle", host)
    texts = texts_of(told)
    assert told["changed"] is False
    assert not [name for name, text in texts.items() if any(word in text for word in PLANTED)]
    assert told["removed"] >= 8
    assert {
        "journal/kimi-k3.service.txt",
        "journal/kernel.txt",
        "unit/show.txt",
        "unit/cat.txt",
        "config/rank.json",
        "config/serve.env",
        "config/digest",
        "status.json",
        "versions/engine.json",
        "versions/nvidia.txt",
        "versions/os-release",
        "versions/packages.txt",
        "gpu/nvidia-smi-q.txt",
    } <= set(texts)
    assert "last line" in texts["journal/kimi-k3.service.txt"]
    assert "--since=-24h --lines=20000 --unit kimi-k3.service" in texts["journal/kimi-k3.service.txt"]
    assert texts["journal/kernel.txt"] == "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus\n"
    assert texts["versions/packages.txt"] == "nvidia-open\t580\n"
    assert 'VLLM_PP_LAYER_PARTITION="47,46"' in texts["config/serve.env"]
    assert json.loads(texts["status.json"])["text"] == "with <removed>"
    # A program that fails is told of with what it said.
    assert "[exit status 9]\nbroken" in texts["gpu/topology.txt"]
    assert not [name for name in texts if "api.key" in name or "group.secret" in name]


def test_it_changes_nothing_and_bounds_what_it_takes(host, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    (tmp_path / "journal").write_text("x" * 99 + "\n" + "a line of the journal\n" * 100_000)
    before[tmp_path / "journal"] = (tmp_path / "journal").stat().st_mtime_ns
    texts = texts_of(run_module("support_bundle", {**host, "limit_mib": 1, "hours": 2, "lines": 7}, check_mode=True))
    journal = texts["journal/kimi-k3.service.txt"]
    assert len(journal) < (1 << 20) + 100
    first, second = journal.split("\n")[:2]
    assert first.startswith("[the first ")
    assert second == "a line of the journal"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_bare_host_is_an_answer(tmp_path):
    nothing = str(tmp_path / "nothing")
    names = ("config_dir", "status_file", "venv", "checkpoint", "root", "proc_root")
    told = run_module("support_bundle", {**dict.fromkeys(names, nothing), "secret_files": []})
    assert "versions/kernel.txt" in texts_of(told)
    assert told["problems"] == []
    assert run_module("support_bundle", {"hours": 0})["msg"] == "hours is 0: it must be at least 1."


def archive(tmp_path, **changes):
    reports = tmp_path / "reports"
    reports.mkdir()
    for day in range(1, 6):
        (reports / f"preflight-kimi_k3-2026120{day}T000000Z.json").write_text(
            json.dumps({"day": day, "api_key": "planted7"})
        )
    (reports / "fabric-20261201T000000Z.json").write_text("{}")
    arguments = {
        "path": str(tmp_path / "out" / "kimi-k3-logs-x.tar.gz"),
        "hosts": [
            {"host": "gpu-a", "told": {"archive": support.pack({"config/a": f"with {GIVEN}\n"}), "removed": 2}},
            {"host": "gpu-b", "told": {"unreachable": True, "msg": "no route to host"}},
            {"host": "gpu-c", "told": {"failed": False, "msg": "Module failed"}},
            {"host": "../../gpu d", "told": {"archive": support.pack({"../../../etc/x": "text"})}},
            {"host": "gpu-e", "told": {"archive": "bm90IGl0"}},
            {"host": "gpu-f", "told": {}},
        ],
        "texts": {"status.txt": f"READY {GIVEN}\n"},
        "reports": str(reports),
        "secrets": [GIVEN],
        **changes,
    }
    return arguments, Path(arguments["path"])


def test_an_archive_of_what_there_is_says_what_there_is_not(tmp_path):
    arguments, path = archive(tmp_path)
    told = run_module("support_archive", arguments)
    assert not told.get("failed"), told
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    with tarfile.open(path) as opened:
        content = {entry.name: opened.extractfile(entry).read().decode() for entry in opened}
        assert {entry.mode for entry in opened} == {0o600}
    top = "kimi-k3-logs-x"
    assert sorted(content) == sorted(
        [
            f"{top}/MANIFEST.txt",
            f"{top}/hosts/gpu-a/config/a",
            f"{top}/hosts/gpu_d/etc/x",
            f"{top}/controller/status.txt",
            *(f"{top}/controller/reports/preflight-kimi_k3-2026120{day}T000000Z.json" for day in (3, 4, 5)),
            f"{top}/controller/reports/fabric-20261201T000000Z.json",
        ]
    )
    assert told["files"] == len(content)
    assert told["size"] == path.stat().st_size
    assert told["silent"] == ["gpu-b", "gpu-c", "gpu-e", "gpu-f"]
    assert not [name for name, text in content.items() if "planted" in text]
    assert told["removed"] == 2 + 1 + 1 + 3
    page = content[f"{top}/MANIFEST.txt"]
    assert "host gpu-a: 1 files\n" in page
    assert "host gpu-b: 0 files\n  UNREACHABLE, nothing was gathered: no route to host" in page
    assert "host gpu-c: 0 files\n  nothing was gathered: Module failed" in page
    assert "host gpu-e: 0 files\n  the host's part is damaged" in page
    assert "host gpu-f: 0 files\n  nothing was gathered: the host was left" in page


def test_check_mode_writes_nothing(tmp_path):
    arguments, path = archive(tmp_path)
    told = run_module("support_archive", arguments, check_mode=True)
    assert (told["size"], told["files"], path.parent.exists()) == (0, 8, False)


def test_an_archive_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    arguments, _path = archive(tmp_path, path=str(tmp_path / "file" / "x.tar.gz"))
    told = run_module("support_archive", arguments)
    assert told["failed"]
    assert told["msg"].startswith(f"The archive {tmp_path}/file/x.tar.gz cannot be written: ")


def test_a_program_that_hangs_is_left(host, monkeypatch, tmp_path):
    monkeypatch.setattr(support, "PATIENCE", 1)
    look = support.Look(run, command_path(host, "sleep 600"), "/proc", host["command_path"])
    got = support.Gatherer(look, 1 << 20)
    got.command("gpu/nvidia-smi-q.txt", ["nvidia-smi", "-q"])
    assert got.problems == ["'nvidia-smi -q' did not end within 1 s"]


def command_path(host, text):
    path = Path(host["command_path"]) / "nvidia-smi"
    path.write_text(f"#!/bin/sh\nexec {text}\n")
    return "/sys"


def run(words, environ_update, **_kwargs):
    import os  # noqa: PLC0415
    import subprocess  # noqa: PLC0415

    done = subprocess.run(words, env={**os.environ, **environ_update}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr
