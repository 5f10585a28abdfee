# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""engine_venv on real directories; most tests install by a stand-in for uv that unpacks wheels, two by the real pip."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.baremetal.kimi_k3.plugins.modules import engine_venv

# Understands the commands that the module gives, and no others.
UV = """#!{python}
import hashlib, os, pathlib, re, subprocess, sys, zipfile
args = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*args, file=log)
if args[0] == "venv":
    assert args[1:3] == ["--quiet", "--python"], args
    sys.exit(subprocess.run([args[3], "-m", "venv", "--without-pip", args[4]]).returncode)
assert args[:2] == ["pip", "install"] and os.environ["UV_PYTHON_DOWNLOADS"] == "never", args
python = pathlib.Path(args[args.index("--python") + 1])
requirements = pathlib.Path(args[args.index("-r") + 1])
assert requirements.stat().st_mode & 0o777 == 0o600
text = requirements.read_text()
pathlib.Path({log!r} + ".requirements").write_text(text)
house = re.search(r"--find-links (\\S+)", text)
site = next(python.parent.parent.glob("lib/python*/site-packages"))
for line in text.splitlines():
    if line.startswith("-"):
        continue
    name, version = re.match(r"([a-z0-9-]+)==(\\S+)", line).groups()
    wheel = pathlib.Path(house[1]) / f"{{name}}-{{version}}-py3-none-any.whl"
    hashes = re.findall(r"--hash=sha256:(\\S+)", line)
    if hashes and hashlib.sha256(wheel.read_bytes()).hexdigest() not in hashes:
        what = f"`{{name}}=={{version}}`"
        print(f"error: Failed to read {{what}}\\n  Caused by: Hash mismatch for {{what}}", file=sys.stderr)
        sys.exit(2)
    zipfile.ZipFile(wheel).extractall(site)
"""

WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_wheel(folder: Path, name: str, version: str, code: str = "") -> str:
    """Write a wheel and give its line in a lock."""
    module = name.replace("-", "_")
    files = {
        f"{module}/__init__.py": code or f"version = {version!r}\n",
        f"{module}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{module}-{version}.dist-info/WHEEL": WHEEL,
    }
    record = ""
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(content)}\n"
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inner, content in files.items():
            wheel.writestr(inner, content)
        wheel.writestr(f"{module}-{version}.dist-info/RECORD", record + f"{module}-{version}.dist-info/RECORD,,\n")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


class Host:
    """One host's directories, and the module run on it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.wheelhouse = root / "wheelhouse"
        self.wheelhouse.mkdir()
        self.path = root / "opt" / "venv"
        self.path.parent.mkdir()
        self.store = root / "opt" / "venvs"
        self.bin = root / "bin"
        self.bin.mkdir()
        self.log = root / "uv.log"
        uv = self.bin / "uv"
        uv.write_text(UV.format(python=Path(sys.executable).resolve(), log=str(self.log)))
        uv.chmod(0o755)
        self.one = make_wheel(self.wheelhouse, "vllm", "0.32.0") + make_wheel(self.wheelhouse, "torch", "2.13.0+cpu")
        self.two = make_wheel(self.wheelhouse, "vllm", "0.33.0") + make_wheel(self.wheelhouse, "torch", "2.14.0+cpu")

    def run(self, lock: str | None = None, check: bool = False, diff: bool = False, **options) -> dict:
        args = {
            "path": str(self.path),
            "wheelhouse": str(self.wheelhouse),
            "python": sys.executable,
            "_ansible_check_mode": check,
            "_ansible_diff": diff,
            **options,
        }
        if "version" not in options:
            args["lock"] = self.one if lock is None else lock
        args = {name: value for name, value in args.items() if value is not None}
        with patch_module_args(args), pytest.raises(SystemExit):
            engine_venv.main()
        return json.loads(self.capsys.readouterr().out)

    def environments(self) -> list[str]:
        return (
            sorted(found.name for found in self.store.iterdir() if found.name != ".lock") if self.store.exists() else []
        )

    def snapshot(self) -> list[str]:
        return sorted(
            f"{path} {path.lstat().st_mtime_ns}" for path in self.path.parent.rglob("*") if path.name != "__pycache__"
        )


@pytest.fixture
def host(tmp_path, capsys, monkeypatch):
    made = Host(tmp_path, capsys)
    monkeypatch.setenv("PATH", f"{made.bin}{os.pathsep}{os.environ['PATH']}")
    return made


def site(environment: str) -> Path:
    return next(Path(environment).glob("lib/python*/site-packages"))


def test_builds_links_and_gives_a_receipt(host):
    result = host.run(diff=True)
    digest = result["lock_digest"]
    assert result["changed"] is True
    assert result["action"] == "build"
    assert result["reason"] == "there is no environment yet"
    assert result["environment"] == str(host.store / digest[:12])
    assert str(host.path.readlink()) == result["environment"]
    assert result["versions"] == {
        "vllm": "0.32.0",
        "torch": "2.13.0+cpu",
        "nvidia-nccl-cu13": None,
        "flashinfer-python": None,
    }
    assert result["installer"] == "uv"
    receipt = json.loads((host.path / "engine.json").read_text())
    assert receipt["schema"] == 1
    assert receipt["lock_digest"] == digest
    assert receipt["packages_digest"] == result["packages_digest"]
    assert receipt["packages"] == {"torch": "2.13.0+cpu", "vllm": "0.32.0"}
    assert receipt["versions"] == result["versions"]
    assert result["diff"]["before"] == ""
    assert "vllm: 0.32.0\n" in result["diff"]["after"]
    assert host.environments() == [digest[:12]]
    lines = host.log.read_text().splitlines()
    assert len(lines) == 2
    assert "--require-hashes --no-deps --no-index --only-binary :all:" in lines[1]


def test_second_run_changes_nothing(host):
    host.run()
    # Running the engine may write byte code.
    subprocess.run([host.path / "bin" / "python", "-c", "import vllm"], check=True, env={})
    assert list(site(str(host.path)).glob("vllm/__pycache__/*.pyc"))
    before = host.snapshot()
    result = host.run(lock="# another comment\n" + host.one, diff=True)
    assert result["changed"] is False
    assert result["action"] == "none"
    assert result["diff"]["before"] == result["diff"]["after"] != ""
    assert host.snapshot() == before
    assert len(host.log.read_text().splitlines()) == 2


def test_files_can_be_read_by_the_user_who_serves(host):
    old = os.umask(0o077)
    try:
        host.run()
    finally:
        os.umask(old)
    for path in (host.store, host.path, host.path / "engine.json", site(str(host.path)) / "vllm" / "__init__.py"):
        wanted = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
        assert path.stat().st_mode & wanted == wanted, path


def test_other_lock_is_built_beside_and_the_old_one_kept(host):
    first = host.run()
    second = host.run(lock=host.two, diff=True)
    assert second["action"] == "build"
    assert "has another lock" in second["reason"]
    assert str(host.path.readlink()) == second["environment"] != first["environment"]
    assert second["removed"] == []
    assert Path(first["environment"]).is_dir()
    assert "vllm: 0.32.0" in second["diff"]["before"]
    assert "vllm: 0.33.0" in second["diff"]["after"]


def test_going_back_builds_nothing(host):
    first = host.run()
    host.run(lock=host.two)
    calls = host.log.read_text()
    checked = host.run(check=True)
    assert (checked["action"], checked["changed"]) == ("switch", True)
    back = host.run()
    assert back["action"] == "switch"
    assert back["environment"] == first["environment"]
    assert str(host.path.readlink()) == first["environment"]
    assert host.log.read_text() == calls


def test_only_the_previous_one_is_kept(host):
    host.run()
    host.run(lock=host.two)
    third = make_wheel(host.wheelhouse, "vllm", "0.34.0")
    result = host.run(lock=third)
    assert len(result["removed"]) == 1
    assert len(host.environments()) == 2
    assert "torch" not in json.loads((host.path / "engine.json").read_text())["packages"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "vllm" / "__init__.py").unlink(), "vllm/__init__.py is missing"),
        (
            lambda path: (path / "vllm" / "__init__.py").write_text("version = '0.31.9'\n"),
            "vllm/__init__.py was changed",
        ),
        (lambda path: (path / "extra.py").write_text(""), "extra.py was added"),
        (lambda path: (path.parents[2] / "engine.json").write_text("{"), "has no receipt"),
        (lambda path: (path.parents[2] / "bin" / "python").unlink(), "bin/python is missing"),
    ],
)
def test_broken_environment_is_rebuilt_beside(host, damage, words):
    first = host.run()
    damage(site(first["environment"]))
    checked = host.run(check=True, diff=True)
    assert checked["changed"] is True
    assert checked["action"] == "build"
    assert words in checked["reason"]
    second = host.run()
    assert second["action"] == "build"
    assert words in second["reason"]
    assert second["environment"] == first["environment"] + "-1"
    assert second["removed"] == [first["environment"]]
    assert host.environments() == [Path(second["environment"]).name]
    assert host.run()["changed"] is False


def test_several_changes_are_counted(host):
    first = host.run()
    for name in ("vllm", "torch"):
        (site(first["environment"]) / name / "__init__.py").unlink()
    assert "torch/__init__.py is missing, and another file differs" in host.run(check=True)["reason"]


def test_environment_that_a_process_uses_is_left(host):
    first = host.run()
    (site(first["environment"]) / "extra.py").write_text("")
    python = Path(first["environment"]) / "bin" / "python"
    with subprocess.Popen([python, "-c", "input()"], stdin=subprocess.PIPE) as process:
        second = host.run()
        assert second["in_use"] == [first["environment"]]
        assert second["removed"] == []
        assert (site(first["environment"]) / "vllm" / "__init__.py").exists()
        process.communicate(b"\n")
    third = host.run(lock=host.two)
    assert third["removed"] == [first["environment"]]


def test_half_built_leftovers_go_away(host):
    (host.store / "0123456789ab" / "lib").mkdir(parents=True)
    (host.store / ".work-killed").mkdir()
    (host.store / "notes").mkdir()
    host.run()
    assert (host.store / "notes").is_dir()
    assert len(host.environments()) == 2


def test_failed_build_leaves_the_old_one_serving(host):
    first = host.run()
    make_wheel(host.wheelhouse, "torch", "2.14.0+cpu", "tampered = True\n")
    before = host.snapshot()
    result = host.run(lock=host.two)
    assert result["failed"] is True
    assert "Hash mismatch for `torch==2.14.0+cpu`" in result["msg"]
    assert str(host.path.readlink()) == first["environment"]
    assert host.environments() == [Path(first["environment"]).name]
    assert [line for line in host.snapshot() if "/venvs/" in line] == [line for line in before if "/venvs/" in line]
    assert host.run()["changed"] is False


def test_first_build_that_fails_leaves_no_link(host):
    make_wheel(host.wheelhouse, "torch", "2.13.0+cpu", "tampered = True\n")
    assert host.run()["failed"] is True
    assert not os.path.lexists(host.path)
    assert host.environments() == []


def test_proof_that_fails(host):
    result = host.run(proof="import vllm, missing")
    assert result["failed"] is True
    assert "fails its proof" in result["msg"]
    assert "No module named 'missing'" in result["msg"]
    assert not os.path.lexists(host.path)
    assert host.run(proof="import vllm, torch")["changed"] is True


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_others_made_is_refused(host, kind):
    if kind == "directory":
        host.path.mkdir()
    elif kind == "file":
        host.path.write_text("")
    else:
        host.path.symlink_to("/usr")
    for check in (True, False):
        result = host.run(check=check)
        assert result["failed"] is True
        assert str(host.path) in result["msg"]
        assert "not made by this module" in result["msg"]
    assert host.environments() == []


def test_link_to_an_environment_that_is_gone(host):
    host.path.symlink_to(host.store / "0123456789ab")
    result = host.run()
    assert result["action"] == "build"
    assert "is gone" in result["reason"]


def test_check_mode_on_a_host_that_has_nothing(host):
    result = host.run(check=True, diff=True, python="/usr/bin/python3.99", wheelhouse="/nonexistent")
    assert "failed" not in result
    assert result["changed"] is True
    assert result["action"] == "build"
    assert "environment" not in result
    assert "packages_digest" not in result
    assert "vllm: 0.32.0\n" in result["diff"]["after"]
    assert not host.store.exists()
    assert not host.log.exists()


def test_check_mode_on_a_host_that_is_right(host):
    host.run()
    before = host.snapshot()
    result = host.run(check=True)
    assert result["changed"] is False
    assert result["packages_digest"]
    assert host.snapshot() == before


def test_other_interpreter_is_another_environment(host, tmp_path):
    host.run()
    other = tmp_path / "python-other"
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    other.chmod(0o755)
    result = host.run(python=str(other))
    assert result["action"] == "build"
    assert f"wanted {other}" in result["reason"]


def test_version_instead_of_a_lock(host):
    result = host.run(version="0.32.0")
    assert result["versions"]["vllm"] == "0.32.0"
    assert "--no-deps" not in host.log.read_text()
    assert host.run(version="0.32.0")["changed"] is False
    assert host.run(version="0.33.0")["changed"] is True


def test_credentials_stay_in_a_file(host):
    index = "https://reader:sesame@index.example/simple"
    result = host.run(wheelhouse=None, index_url=index, extra_index_urls=["https://t0ken@extra.example/"])
    assert result["failed"] is True
    assert "sesame" not in json.dumps(result)
    assert "t0ken" not in json.dumps(result)
    assert "sesame" not in host.log.read_text()
    written = Path(f"{host.log}.requirements").read_text().splitlines()
    assert written[:2] == [f"--index-url {index}", "--extra-index-url https://t0ken@extra.example/"]
    assert host.environments() == []


def test_sources_in_the_lock_are_used_unless_others_are_given(host):
    lock = f"--find-links {host.wheelhouse}\n{host.one}"
    host.run(lock=lock, wheelhouse=None)
    assert Path(f"{host.log}.requirements").read_text().startswith(f"--find-links {host.wheelhouse}\n")
    host.run(lock=f"--index-url https://elsewhere.example\n{host.two}")
    assert "elsewhere" not in Path(f"{host.log}.requirements").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lock": "vllm==0.32.0"}, "vllm has no --hash"),
        ({"lock": "six"}, "and 1 more"),
        ({"version": "0.32.0; rm"}, "is not a version"),
        ({"python": "/usr/bin/python3.99"}, "/usr/bin/python3.99 is not on this host"),
        ({"wheelhouse": "/nonexistent"}, "/nonexistent is not a directory"),
        ({"extra_index_urls": ["https://extra.example"]}, "leave one of the two out"),
        ({"index_url": "https://index.example"}, "mutually exclusive"),
        ({"distribution": "sglang"}, "it does not pin sglang"),
    ],
)
def test_wrong_options(host, options, words):
    result = host.run(**options)
    assert result["failed"] is True
    assert words in result["msg"]
    assert not os.path.lexists(host.path)
    assert host.environments() == []


def test_no_uv(host, monkeypatch):
    monkeypatch.setattr(engine_venv.AnsibleModule, "get_bin_path", lambda *_args, **_options: None)
    assert "uv is not on this host" in host.run(installer="uv")["msg"]


def test_python_without_ensurepip(host, tmp_path):
    python = tmp_path / "python-bare"
    python.write_text(
        "#!/bin/sh\necho 'The virtual environment was not created because ensurepip is not available.'\nexit 1\n"
    )
    python.chmod(0o755)
    assert "install the package python3-venv" in host.run(installer="pip", python=str(python))["msg"]


def test_pip_installs_the_same_set_and_names_a_wrong_file(host):
    by_uv = host.run()
    host.path.unlink()
    host.store.rename(f"{host.store}-away")
    by_pip = host.run(installer="pip")
    assert by_pip["installer"] == "pip"
    assert by_pip["packages_digest"] == by_uv["packages_digest"]
    assert list(site(by_pip["environment"]).glob("vllm/__pycache__/*.pyc"))
    make_wheel(host.wheelhouse, "torch", "2.14.0+cpu", "tampered = True\n")
    failed = host.run(lock=host.two, installer="pip")
    assert failed["failed"] is True
    assert "torch" in failed["msg"]
    assert "sha256" in failed["msg"]
    assert str(host.path.readlink()) == by_pip["environment"]


def test_users_are_found_in_every_way(tmp_path):
    proc = tmp_path / "proc"
    store = "/opt/venvs"

    def process(pid: str, **files: str) -> None:
        (proc / pid).mkdir(parents=True)
        for name, content in files.items():
            if name in ("exe", "cwd"):
                (proc / pid / name).symlink_to(content)
            else:
                (proc / pid / name).write_text(content)

    process("1", cmdline=f"{store}/aaaaaaaaaaaa/bin/python\0-m\0x\0")
    process("2", maps=f"7f00 r-xp 0 08:01 1 {store}/bbbbbbbbbbbb/lib/libtorch.so\n")
    process("3", cwd=f"{store}/cccccccccccc")
    process("4", exe=f"{store}/dddddddddddd/bin/python3.11")
    process("5", cmdline=f"{store}/eeeeeeeeeeee-1/bin/python\0")
    process("self", cmdline=f"{store}/ffffffffffff/bin/python\0")
    names = [f"{store}/{letter * 12}" for letter in "abcdef"]
    assert engine_venv.used(names, str(proc)) == set(names[:4])


@pytest.mark.parametrize(
    ("out", "err", "words"),
    [
        (
            "",
            "  \u00d7 No solution found\n  ╰─▶ Because six was not found, it fails.\n",
            "No solution found; Because six was not found",
        ),
        ("x\n", "WARNING: old\nERROR: Could not find a version\n", "Could not find a version"),
        ("", "error: failed https://me:secret@host/simple\n", "failed https://***@host/simple"),
        ("only words\n", "", "only words"),
        ("", "", ""),
    ],
)
def test_words_of_an_installer(out, err, words):
    assert engine_venv.explain(out, err).startswith(words)
    assert "secret" not in engine_venv.explain(out, err)


UV_MISMATCH = """\
  \u00d7 Failed to download `idna==3.20`
  \u2570\u2500\u25b6 Hash mismatch for `idna==3.20`

      Expected:
        sha256:ffff

      Computed:
        sha256:ab7a
"""
PIP_MISMATCH = """\
ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package versions, ...
    idna==3.20 from file:///srv/wheelhouse/idna-3.20-py3-none-any.whl (from -r /x/requirements.txt (line 4)):
        Expected sha256 ffff
             Got        ab7a
"""


@pytest.mark.parametrize("output", [UV_MISMATCH, PIP_MISMATCH])
def test_words_for_a_file_that_is_another_one(output):
    said = engine_venv.explain("", output)
    assert said.startswith("idna==3.20 is not the file that the lock pins (wanted sha256 ffff, got ab7a)")
