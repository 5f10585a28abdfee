# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every check of the project, each by its name, or all of them.

    checks.py all               what `make test` runs
    checks.py lint              the quick ones
    checks.py units sanity      some by name
    checks.py --list

A check writes its full output to .cache/logs/<name>.log and passes when every command in it does, each within its
limit of time: a check that hangs is told and ended, so that the others still have their say. The closing lines name
what failed and count checks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import typing as t
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import bootstrap

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "benchmarks"))

import measure

CACHE = ROOT / ".cache"
LOGS = CACHE / "logs"
BIN = Path(sys.executable).parent
LAB = ROOT / "molecule" / "lab" / "lab.py"
INVENTORY = ROOT / "inventory" / "lab" / "hosts.yml"
COLLECTION = ("baremetal", "kimi_k3")
# Nobody waits for these: they take what the checks beside them leave of the processor.
PATIENT = ["ansible-lint", "units-oldest", "bench-smoke", "sanity", "build"]
# Seconds that one command of a check may take: several times what it takes on two busy cores.
LIMIT = 1200.0
LIMITS = {"molecule-default": 2400.0}
# Seconds that an interrupted command has to say where it stood.
GRACE = 30.0
SCENARIOS = ["cuda", "fabric", "preflight", "vllm", "checkpoint", "serve", "default"]

Check = t.Callable[["Log"], None]


class CheckError(Exception):
    """One sentence on what did not hold."""


RUNNING: set[subprocess.Popen[bytes]] = set()


def family(group: int) -> dict[int, str]:
    """What ps says of the members of a group and of all that they started: Ansible's workers have own sessions."""
    command = ["ps", "-e", "--forest", "-o", "pid,ppid,pgid,stat,etimes,wchan:24,args"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found: dict[int, str] = {}
    # Parents come first.
    for line in told.splitlines()[1:]:
        pid, parent, owner = (int(word) for word in line.split(maxsplit=3)[:3])
        if owner == group or parent in found:
            found[pid] = line[:300]
    return found


def end(run: subprocess.Popen[bytes]) -> None:
    """End a command and all that it started; what an interrupt says of where it stood is worth a moment."""
    with contextlib.ExitStack() as opened:
        members = []
        for pid in family(run.pid):
            with contextlib.suppress(ProcessLookupError):
                members.append(os.pidfd_open(pid))
                opened.callback(os.close, members[-1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(GRACE)
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(member, signal.SIGKILL)
        # A kill is asked for at once and done some time later; one that waits for a device may take for ever.
        for member in members:
            select.select([member], [], [], GRACE)
    run.poll()


class Log:
    """Runs the commands of one check and keeps what they print."""

    def __init__(self, name: str) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self.path = LOGS / f"{name}.log"
        self.prefix = ["nice", "-n", "10"] if name in PATIENT else []
        self.path.write_text("", encoding="utf-8")
        self.limit = LIMITS.get(name, LIMIT)

    def run(self, *words: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None, expect: int = 0) -> str:
        """The output of a command; fails the check unless it exits as expected within the limit."""
        command = [*self.prefix, *(str(word) for word in words)]
        # What somebody has set for Ansible, a path of collections before all, is not what is checked.
        own = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        environment = {**own, "PATH": f"{BIN}:{os.environ['PATH']}", "ANSIBLE_FORCE_COLOR": "0", **(env or {})}
        with self.path.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            start = log.tell()
            # A group of its own, so that whatever it started can be ended with it.
            run = subprocess.Popen(
                command, cwd=cwd, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0
            )
            RUNNING.add(run)
            try:
                code = run.wait(self.limit)
            except subprocess.TimeoutExpired:
                stands = "\n".join(family(run.pid).values())
                log.write(f"after {self.limit:g} s these still ran:\n{stands}\n")
                log.flush()
                end(run)
                raise CheckError(f"'{' '.join(command)}' did not end within {self.limit:g} s") from None
            finally:
                RUNNING.discard(run)
        output = self.path.read_bytes()[start:].decode("utf-8", "replace")
        if code != expect:
            raise CheckError(f"'{' '.join(command)}' exited {code}, not {expect}")
        return output

    def say(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as log:
            log.write(f"{text}\n")


def collections(parent: Path = ROOT / ".collections") -> dict[str, str]:
    return {"ANSIBLE_COLLECTIONS_PATH": str(parent)}


def make_tree(log: Log) -> Path:
    """A real copy, below ansible_collections/, of the files git would take: what ansible-test and the build want."""
    tree = CACHE / "tree" / "ansible_collections" / COLLECTION[0] / COLLECTION[1]
    shutil.rmtree(CACHE / "tree", ignore_errors=True)
    tree.mkdir(parents=True)
    listed = log.run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, listed):
        source, target = ROOT / name, tree / name
        if name.startswith(".collections/") or not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    # Without a repository of its own the copy, which git ignores here, looks empty to ansible-test.
    log.run("git", "init", "--quiet", cwd=tree)
    return tree


def yamllint(log: Log) -> None:
    log.run("yamllint", "--strict", ".")


def ruff(log: Log) -> None:
    log.run("ruff", "check", "--no-cache", ".")
    log.run("ruff", "format", "--no-cache", "--check", ".")


def ansible_lint(log: Log) -> None:
    log.run("ansible-lint", "--offline", "--strict", env=collections())


def readmes(log: Log) -> None:
    log.run(sys.executable, ROOT / "tests" / "tools" / "readmes.py")


def docs(log: Log) -> None:
    log.run("antsibull-docs", "lint-collection-docs", "--plugin-docs", "--validate-collection-refs=self", ".")


def changelog(log: Log) -> None:
    log.run("antsibull-changelog", "lint")
    listed = re.findall(r"^- baremetal\.kimi_k3\.(\w+)", (ROOT / "CHANGELOG.rst").read_text(encoding="utf-8"), re.M)
    modules = {path.stem for path in (ROOT / "plugins" / "modules").glob("*.py")}
    filters = {path.stem for path in (ROOT / "plugins" / "filter").glob("*.yml")}
    lookups = {path.stem for path in (ROOT / "plugins" / "lookup").glob("*.py")}
    if missing := sorted((modules | filters | lookups) - set(listed)):
        raise CheckError(f"CHANGELOG.rst does not name {', '.join(missing)}: run antsibull-changelog release")


def sanity(log: Log) -> None:
    """ansible-test sanity with empty ignore files, on the Python that runs this."""
    ignored = [path for path in (ROOT / "tests" / "sanity").glob("ignore-*.txt") if path.read_text().strip()]
    if ignored:
        raise CheckError(f"{ignored[0].name} is not empty")
    tree = make_tree(log)
    seed_pip_bootstrap(log)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    output = log.run("ansible-test", "sanity", "--python", python, "--color", "no", cwd=tree)
    # Exit status 0 with no file seen is how ansible-test says that it did not find the collection.
    if output.count("Running sanity test") < 20 or "All targets skipped" in output:
        raise CheckError("ansible-test saw no files")


def seed_pip_bootstrap(log: Log) -> None:
    """ansible-test fetches a script that installs pip unless it finds one; the interpreter's bundled pip serves."""
    source = log.run(
        sys.executable,
        "-c",
        "import ansible_test._internal.python_requirements as m, pathlib; print(pathlib.Path(m.__file__).read_text())",
    )
    cache = Path("~/.ansible/test/cache").expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    for found in set(re.findall(r"pip_version = '([\d.]+)'", source)) | {"25.2"}:
        script = cache / f"get_pip_{found.replace('.', '_')}.py"
        if not script.exists():
            script.write_text("import ensurepip\n\nensurepip.bootstrap(upgrade=True)\n", encoding="utf-8")


AGENT_TESTS = "tests/unit/roles/serve/test_rank_agent.py"


def units_agent(log: Log) -> None:
    """The units that measure for how long a process is silent."""
    log.run(sys.executable, "-m", "pytest", "-n", "3", "-q", AGENT_TESTS, env=collections())


def units(log: Log) -> None:
    words = ["-n", "2", "--dist", "worksteal", "-q", "tests/unit", f"--ignore={AGENT_TESTS}"]
    log.run(sys.executable, "-m", "pytest", *words, env=collections())


def units_oldest(log: Log) -> None:
    """The units that meet ansible-core on the oldest one that meta/runtime.yml promises."""
    folder = ROOT / ".venv-oldest"
    bootstrap.environment(folder, ROOT / "requirements-oldest.txt", wanted=(3, 13))
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    # What is left out runs the same whatever ansible-core is there.
    parts = ["playbooks", "roles", *(f"plugins/{part}" for part in ("action", "filter", "modules"))]
    words = [folder / "bin" / "python", "-m", "pytest", "-n", "2", "-q", *(f"tests/unit/{part}" for part in parts)]
    log.run(*words, f"--ignore={AGENT_TESTS}", env={**collections(), **path})


def bench_smoke(log: Log) -> None:
    """All benchmarks on small files: that they run and that counts and digests are right, never how fast it was."""
    values = CACHE / "benchmarks-smoke.json"
    values.unlink(missing_ok=True)
    log.run(sys.executable, ROOT / "tests" / "benchmarks" / "run.py", "--smoke", "--json", values)
    told = json.loads(values.read_text(encoding="utf-8"))
    for section in ("fetch", "verify_warm", "verify_cold"):
        if "hf_checkpoint" not in told[section]["contenders"]:
            raise CheckError(f"section {section} has no result of hf_checkpoint")
    if told["plan"]["tensors"] != 497_220 or not all(step["rounds"] for step in told["plan"]["steps"].values()):
        raise CheckError("not all plans were made")
    log.say(judge_uplink(told["uplink"], measure.why_no_namespaces()))


def judge_uplink(told: dict[str, t.Any], reason: str | None) -> str:
    """What crossed the uplink, in words. To leave the measurement out takes a reason that is true."""
    if not told.get("measured"):
        if reason is None:
            raise CheckError(f"the uplink was not measured, though this machine can do it ({told.get('reason')})")
        return f"the uplink was not measured: {reason}"
    shares = {
        way: [row["body_bytes"] / told["union_bytes"] for row in rows] for way, rows in told.get("ways", {}).items()
    }
    for way, times in (("each host for itself", 2.0), ("peers exchange", 1.0)):
        if not shares.get(way) or any(abs(share - times) > 0.1 for share in shares[way]):
            raise CheckError(f"{way}: not {times} times the bytes over the uplink, but {shares.get(way)}")
    return f"times the bytes over the uplink: {shares}"


def build(log: Log) -> None:
    """The tarball, as Galaxy would take it, installed into an empty path and used from there."""
    tree, target = make_tree(log), CACHE / "build"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    log.run("ansible-galaxy", "collection", "build", "--force", "--output-path", target, ".", cwd=tree)
    tarball = next(target.glob("*.tar.gz"))
    config = target / "importer.cfg"
    config.write_text(
        "[galaxy-importer]\nREQUIRE_V1_OR_GREATER = True\nCHECK_REQUIRED_TAGS = True\nRUN_FLAKE8 = False\n",
        encoding="utf-8",
    )
    output = log.run(
        sys.executable, "-m", "galaxy_importer.main", tarball, cwd=target, env={"GALAXY_IMPORTER_CONFIG": str(config)}
    )
    if "ERROR" in output:
        raise CheckError("galaxy-importer told an error")
    installed = CACHE / "installed"
    shutil.rmtree(installed, ignore_errors=True)
    log.run("ansible-galaxy", "collection", "install", tarball, "-p", installed, cwd=target)
    example = ROOT / "inventory" / "example"
    log.run(
        "ansible-playbook",
        "baremetal.kimi_k3.site",
        "--syntax-check",
        "-i",
        example,
        cwd=target,
        env=collections(installed),
    )
    log.run("ansible-playbook", "baremetal.kimi_k3.validate", "-i", example, cwd=target, env=collections(installed))


def lab(log: Log) -> None:
    """Hosts that have nothing yet, whatever ran on them before."""
    log.run(sys.executable, LAB, "down")
    log.run(sys.executable, LAB, "up")


def check_mode(log: Log) -> None:
    """The whole deployment in check mode on those hosts: it says what it would do, and does none of it."""
    output = log.run("ansible-playbook", "-i", INVENTORY, "site.yml", "--check", "--diff")
    if len(re.findall(r"^rank\d +: .*changed=[1-9]\d* +unreachable=0 +failed=0", output, re.MULTILINE)) != 2:
        raise CheckError("check mode did not announce changes on both hosts")
    for word in ("+Type=notify", "+VLLM_PP_LAYER_PARTITION=", "plan_digest"):
        if word not in output:
            raise CheckError(f"the difference does not show {word}")
    places = "/opt/kimi-k3 /srv/kimi-k3 /etc/kimi-k3 /run/kimi-k3 /etc/systemd/system/kimi-k3.service"
    left = log.run(
        "ansible", "kimi_k3", "-i", INVENTORY, "-m", "ansible.builtin.shell", "-a", f"ls -d {places} 2>/dev/null; true"
    )
    if "/kimi-k3" in left:
        raise CheckError("check mode left something on a host")


def molecule(scenario: str) -> Check:
    def check(log: Log) -> None:
        told = log.path.with_suffix(".ansible.log")
        told.unlink(missing_ok=True)
        # Molecule remembers hosts that it made, also those that are gone since.
        log.run("molecule", "reset", "--scenario-name", scenario, env=collections())
        log.run("molecule", "test", "--scenario-name", scenario, env={**collections(), "ANSIBLE_LOG_PATH": str(told)})
        no_deprecations(told)

    return check


def no_deprecations(path: Path) -> None:
    """ansible-core has no switch that makes a deprecation an error.

    What pytest-testinfra asks of the command ansible, its tree of results, is not this project's to mend.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for found in re.findall(r"\[DEPRECATION WARNING\].*", text):
        if "'--tree' argument is deprecated" not in found and "tree has been deprecated" not in found:
            raise CheckError(f"{path.name}: {found}")


def installed(log: Log) -> None:
    """The proof of the running demo from the collection that `build` installed, outside of the checkout."""
    words = ["ansible-playbook", "baremetal.kimi_k3.verify", "-i", INVENTORY]
    output = log.run(*words, cwd=CACHE / "build", env=collections(CACHE / "installed"))
    no_failure_no_change(output)


def site_oldest(log: Log) -> None:
    """The whole deployment on the oldest ansible-core, and once more without a change."""
    words = [ROOT / ".venv-oldest" / "bin" / "ansible-playbook", "-i", INVENTORY, "site.yml"]
    log.run(*words)
    no_failure_no_change(log.run(*words))


def no_failure_no_change(output: str) -> None:
    recap = re.findall(r"^\S+ +: ok=(\d+) +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", output, re.MULTILINE)
    if not recap or any(counts[1:] != ("0", "0", "0") for counts in recap):
        raise CheckError("a host changed, failed or was not reached")
    if "[DEPRECATION WARNING]" in output:
        raise CheckError("ansible-core told a deprecation")


CHECKS: dict[str, Check] = {
    "yamllint": yamllint,
    "ruff": ruff,
    "readmes": readmes,
    "changelog": changelog,
    "docs": docs,
    "units-agent": units_agent,
    "units": units,
    "ansible-lint": ansible_lint,
    "units-oldest": units_oldest,
    "bench-smoke": bench_smoke,
    "sanity": sanity,
    "build": build,
    "lab": lab,
    "check-mode": check_mode,
    **{f"molecule-{name}": molecule(name) for name in SCENARIOS},
    "installed": installed,
    "site-oldest": site_oldest,
}
GROUPS = {
    "all": list(CHECKS),
    "units": ["units-agent", "units"],
    "lint": ["yamllint", "ruff", "readmes", "changelog", "docs", "ansible-lint"],
    "molecule": ["lab", "check-mode", *[f"molecule-{name}" for name in SCENARIOS]],
}


# The checks that use the two hosts go one after the other, the rest beside them. What measures time goes alone, and so
# does the engine, which takes all the processor that there is.
HOSTS = [*GROUPS["molecule"], "installed", "site-oldest"]
REST = [name for name in CHECKS if name not in HOSTS]
AFTER = {
    "check-mode": ["units-agent"],
    "molecule-default": REST,
    "installed": ["build"],
    "site-oldest": ["units-oldest"],
}


def perform(name: str) -> str | None:
    """Run one check; what did not hold, or None."""
    log, start = Log(name), time.monotonic()
    try:
        CHECKS[name](log)
        failure = None
    except CheckError as error:
        failure = str(error)
    except OSError as error:
        failure = f"{type(error).__name__}: {error}"
    print(f"{'ok  ' if failure is None else 'FAIL'} {name:<20} {time.monotonic() - start:6.1f} s", flush=True)
    if failure is not None:
        tail = log.path.read_text(encoding="utf-8", errors="replace").splitlines()[-120:]
        print("\n".join([f"     {failure}", f"     all of it: {log.path.relative_to(ROOT)}", *tail]), flush=True)
    return failure


def perform_all(names: list[str]) -> dict[str, str | None]:
    """What did not hold, or None, of each check that was run."""
    done = {name: Event() for name in names}
    interrupted = Event()

    def lane(members: list[str]) -> dict[str, str | None]:
        results = {}
        for name in [name for name in names if name in members]:
            for other in AFTER.get(name, []):
                if other in done:
                    done[other].wait()
            if interrupted.is_set():
                break
            try:
                results[name] = perform(name)
            finally:
                done[name].set()
        return results

    with ThreadPoolExecutor(2) as lanes:
        parts = [lanes.submit(lane, members) for members in (REST, HOSTS)]
        try:
            return {**parts[0].result(), **parts[1].result()}
        except KeyboardInterrupt:
            # What has not begun stays so; the groups of what runs did not get it from the terminal.
            interrupted.set()
            for run in list(RUNNING):
                end(run)
            for event in done.values():
                event.set()
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["all"], metavar="CHECK")
    parser.add_argument("--list", action="store_true", help="name the checks and groups")
    options = parser.parse_args()
    if options.list:
        print(json.dumps({"checks": list(CHECKS), "groups": GROUPS}, indent=2))
        return 0
    names: list[str] = []
    for name in options.names:
        if name not in CHECKS and name not in GROUPS:
            parser.error(f"no check '{name}': see --list")
        names += [part for part in GROUPS.get(name, [name]) if part not in names]
    results = perform_all(names)
    failures = {name: failure for name, failure in results.items() if failure is not None}
    if names == GROUPS["all"] and not failures and LAB.exists():
        subprocess.run([sys.executable, str(LAB), "down"], check=False)
    for name, failure in failures.items():
        print(f"FAIL {name}: {failure}", flush=True)
    print(f"{len(names) - len(failures)} passed, {len(failures)} failed", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
