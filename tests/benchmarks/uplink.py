# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two hosts behind one slow uplink: how often each byte crosses it, with and without the exchange between peers.

The hosts are network namespaces of this machine with names and addresses of their own, on a bridge with no limit
between them; the hub is behind a link that tc holds to a rate. That link and the hub's log count what crosses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ansible_collections.baremetal.kimi_k3.plugins.modules.hf_checkpoint import ARGUMENT_SPEC
from measure import CommandError, why_no_namespaces
from peers import attached

ROOT = Path(__file__).resolve().parents[2]
HUB = "192.0.2.1"
HOSTS = {"rank0": "192.0.2.11", "rank1": "192.0.2.12"}
PORT = 8080
_BECOME = 'hostname "$1"; shift; exec "$@"'


def exchanging(name: str, token: str) -> dict[str, Any]:
    """The module's options with which a host exchanges files with the other one."""
    other = next(host for host in HOSTS if host != name)
    return {
        "exchange": {"address": HOSTS[name], "peer": HOSTS[other], "token": token, "first": name < other},
    }


class Network:
    """Namespaces for the hub, the hosts, and the bridge between them; gone with the block."""

    def __init__(self, rate: str) -> None:
        self._prefix = f"k3b{os.getpid()}"
        self._rate = rate

    def inside(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self._space(name)]

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("bridge", "hub", *HOSTS):
            subprocess.run(["ip", "netns", "del", self._space(name)], check=False, stderr=subprocess.DEVNULL)

    def _make(self) -> None:
        self._do("ip", "netns", "add", self._space("bridge"))
        self._do(*self.inside("bridge"), "ip", "link", "add", "name", "switch", "type", "bridge")
        self._do(*self.inside("bridge"), "ip", "link", "set", "switch", "up")
        for name, address in {"hub": HUB, **HOSTS}.items():
            self._do("ip", "netns", "add", self._space(name))
            ends = ["type", "veth", "peer", "name", "eth0", "netns", self._space(name)]
            self._do(*self.inside("bridge"), "ip", "link", "add", "name", f"to-{name}", *ends)
            self._do(*self.inside("bridge"), "ip", "link", "set", f"to-{name}", "master", "switch", "up")
            self._do(*self.inside(name), "ip", "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                self._do(*self.inside(name), "ip", "link", "set", device, "up")
        shape = ["tbf", "rate", self._rate, "burst", "512kb", "latency", "200ms"]
        self._do(*self.inside("hub"), "tc", "qdisc", "add", "dev", "eth0", "root", *shape)

    def _do(self, *words: str) -> str:
        made = subprocess.run(words, capture_output=True, text=True, check=False)
        if made.returncode:
            raise CommandError(f"{' '.join(words)}: {made.stderr.strip()}")
        return made.stdout

    def crossed(self) -> int:
        """Bytes that the hub's link has sent."""
        return int(self._do(*self.inside("hub"), "cat", "/sys/class/net/eth0/statistics/tx_bytes"))

    def log(self, method: str = "GET") -> Any:
        """The hub's log, asked for beside the shaped link."""
        ask = "import sys, urllib.request as r; q = r.Request(sys.argv[1], method=sys.argv[2])"
        code = f"{ask}; print(r.urlopen(q).read().decode())"
        url = f"http://{HUB}:{PORT}/_lab/log"
        return json.loads(self._do(*self.inside("hub"), sys.executable, "-c", code, url, method))

    @contextlib.contextmanager
    def serving(self, root: Path) -> Iterator[None]:
        words = [sys.executable, str(ROOT / "molecule" / "lab" / "lab_hub.py"), "--root", str(root), "--host", HUB]
        child = subprocess.Popen([*self.inside("hub"), *words, "--port", str(PORT)], stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            if not child.stdout.readline():
                raise CommandError("the hub behind the uplink does not start")
            yield
        finally:
            child.terminate()
            child.wait()


def fetch(network: Network, work: Path, repository: tuple[str, str], options: dict[str, dict[str, Any]]) -> list[Any]:
    """Let both hosts fetch at the same time; what their modules tell."""
    children = []
    for name in HOSTS:
        values = {
            "repository": repository[0],
            "revision": repository[1],
            "dest": str(work / name),
            "endpoint": f"http://{HUB}:{PORT}",
            "allow_tmpfs": True,
            **attached(),
            **options[name],
        }
        arguments, output = work / f"{name}.json", (work / f"{name}.out").open("w+b")
        arguments.write_text(json.dumps({"ANSIBLE_MODULE_ARGS": values}), encoding="utf-8")
        words = [sys.executable, str(ROOT / "plugins" / "modules" / "hf_checkpoint.py"), str(arguments)]
        become = ["unshare", "--uts", "sh", "-c", _BECOME, "sh", name]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / ".collections")}
        child = subprocess.Popen([*network.inside(name), *become, *words], stdout=output, env=environment)
        children.append((name, child, output))
    results = []
    for name, child, output in children:
        status = child.wait()
        output.seek(0)
        text = output.read().decode()
        output.close()
        if status:
            raise CommandError(f"hf_checkpoint on {name} exited {status}: {text}")
        results.append(json.loads(text[text.index("{") :]))
    return results


def bench(
    say: Callable[[str], None], work: Path, repository: tuple[str, str], *, rounds: int, seconds: float
) -> dict[str, Any]:
    """Both ways in turns; the bytes each took over the uplink, in multiples of what both hosts need together.

    The hub serves WORK/hub, over a link that takes SECONDS for all of it once.
    """
    reason = why_no_namespaces()
    if reason:
        say(f"\nuplink: not measured, {reason}")
        return {"measured": False, "reason": reason}
    root = work / "hub"
    union = sum(path.stat().st_size for path in (root / repository[0] / repository[1]).iterdir())
    exchange = "exchange" in ARGUMENT_SPEC
    ways: dict[str, dict[str, dict[str, Any]]] = {"each host for itself": {name: {} for name in HOSTS}}
    if exchange:
        token = secrets.token_hex(32)
        ways["peers exchange"] = {name: exchanging(name, token) for name in HOSTS}
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    rate = f"{max(1, round(union * 8 / seconds / 1e6))}mbit"
    with Network(rate) as network, network.serving(root):
        for _round in range(rounds):
            for way, options in ways.items():
                network.log("DELETE")
                before, began = network.crossed(), time.monotonic()
                results = fetch(network, work, repository, options)
                wall, crossed = time.monotonic() - began, network.crossed() - before
                if any(result["verified"] != "sha256" for result in results):
                    raise CommandError(f"{way}: not every byte was proven: {results}")
                sent = sum(entry["bytes"] for entry in network.log()["requests"])
                measured[way].append({"wall_s": wall, "link_bytes": crossed, "body_bytes": sent})
                for name in HOSTS:
                    shutil.rmtree(work / name)
    say(f"\ntwo hosts behind an uplink of {rate}, {union / 1e6:.0f} MB needed by both")
    for way, rows in measured.items():
        for row in rows:
            say(
                f"  {way}: {row['body_bytes'] / union:.3f} times the bytes ({row['link_bytes'] / union:.3f} with all "
                f"headers), {row['wall_s']:.1f} s"
            )
    values: dict[str, Any] = {"measured": True, "rate": rate, "union_bytes": union, "ways": measured}
    if not exchange:
        values["reason"] = "hf_checkpoint has no option for an exchange between peers"
        say(f"  peers exchange: not measured, {values['reason']}")
    elif any(row["body_bytes"] > 1.1 * union for row in measured["peers exchange"]):
        raise CommandError(f"with peers the uplink still carried more than the union: {measured['peers exchange']}")
    alone = measured["each host for itself"]
    if any(not 1.9 * union <= row["body_bytes"] <= 2.1 * union for row in alone):
        raise CommandError(f"without peers the uplink did not carry twice the union, so nothing was compared: {alone}")
    return values
