# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real connections between hosts that are observed at the same moment.

Every host listens on one port of its own, connects to that port of each peer, learns there on which other ports the
peer listens for this purpose, and connects to those too. On the way it measures the difference of the clocks, as NTP
does. A host stays until each of its peers has said that it is done, or until time is up.

A port that something else listens on already (the replica that serves) is left alone.
"""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
import typing as t

GREETING = "kimi-k3-preflight"
MAX_LINE = 1 << 16


class Listener:
    """The ports of this host, answered by a thread per connection."""

    def __init__(self, address: str, port: int, others: t.Sequence[int], name: str, group: str) -> None:
        self.name, self.group = name, group
        self.done: set[str] = set()
        self.changed = threading.Condition()
        self._stop = threading.Event()
        self.busy: list[int] = []
        self.sockets: dict[int, socket.socket] = {}
        self.problem: str | None = None
        for number in (port, *others, 0):
            try:
                self.sockets[number] = self._open(address, number)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    self.problem = f"this host cannot listen on {address} port {number}: {error.strerror}"
                    break
                self.busy.append(number)
        self.control = port
        self.open_ports = sorted(listener.getsockname()[1] for listener in self.sockets.values())
        for listener in self.sockets.values():
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    @staticmethod
    def _open(address: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(16)
        except OSError:
            listener.close()
            raise
        listener.settimeout(0.2)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while not self._stop.is_set():
            try:
                connection, _peer = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer lines of JSON until the peer goes; what is none ends the connection."""
        connection.settimeout(5)
        try:
            with connection, connection.makefile("rwb") as stream:
                while line := stream.readline(MAX_LINE):
                    arrived = time.time()
                    asked = json.loads(line)
                    if asked.get("hello") != GREETING or asked.get("group") != self.group:
                        return
                    if asked.get("done"):
                        with self.changed:
                            self.done.add(str(asked.get("name")))
                            self.changed.notify_all()
                    answer = {"hello": GREETING, "name": self.name, "arrived": arrived, "ports": self.open_ports}
                    stream.write(json.dumps({**answer, "busy": self.busy, "sent": time.time()}).encode() + b"\n")
                    stream.flush()
        except (OSError, ValueError, AttributeError):
            return

    def wait_for(self, names: t.Collection[str], deadline: float) -> list[str]:
        """Wait until these peers are done; the names of those that were not in time."""
        with self.changed:
            while not set(names) <= self.done:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(left)
            return sorted(set(names) - self.done)

    def close(self) -> None:
        self._stop.set()
        for listener in self.sockets.values():
            listener.close()


def say(address: str, port: int, message: dict[str, t.Any], timeout: float) -> dict[str, t.Any]:
    """One line to a peer and its answer, with the difference of its clock to ours in seconds. Raises OSError."""
    with socket.create_connection((address, port), timeout=timeout) as connection:
        connection.settimeout(timeout)
        with connection.makefile("rwb") as stream:
            sent = time.time()
            stream.write(json.dumps({"hello": GREETING, **message}).encode() + b"\n")
            stream.flush()
            line = stream.readline(MAX_LINE)
            back = time.time()
    if not line:
        raise ConnectionError("something else listens there and hung up")
    try:
        answer = json.loads(line)
        offset = ((answer["arrived"] - sent) + (answer["sent"] - back)) / 2
    except (ValueError, KeyError, TypeError) as error:
        raise ConnectionError("something else listens there") from error
    if answer.get("hello") != GREETING:
        raise ConnectionError("something else listens there")
    return {**answer, "offset": offset, "round_trip": back - sent}


def unreached(peer: t.Mapping[str, t.Any], error: str | None = None) -> dict[str, t.Any]:
    """A peer as long as nothing is known of it."""
    result: dict[str, t.Any] = {"name": peer["name"], "address": peer["address"], "reached": False, "error": error}
    return {**result, "offset": None, "round_trip": None, "open": [], "closed": {}, "busy": []}


def visit(
    peer: t.Mapping[str, t.Any], port: int, message: dict[str, t.Any], deadline: float, pause: float = 0.1
) -> dict[str, t.Any]:
    """Reach one peer: the clock's difference, ports that answered, ports that did not and why."""
    result = unreached(peer)
    while True:
        left = deadline - time.monotonic()
        try:
            answer = say(peer["address"], port, message, max(0.1, min(5.0, left)))
            break
        except OSError as error:
            result["error"] = reason(error)
        if time.monotonic() + pause >= deadline:
            return result
        time.sleep(pause)
    result.update({"reached": True, "error": None, "offset": answer["offset"], "busy": answer["busy"]})
    result["round_trip"] = answer["round_trip"]
    for number in answer["ports"]:
        if number == port:
            continue
        try:
            better = say(peer["address"], number, message, max(0.1, min(5.0, deadline - time.monotonic())))
        except OSError as error:
            result["closed"][str(number)] = reason(error)
            continue
        result["open"].append(number)
        if better["round_trip"] < result["round_trip"]:
            result.update({"offset": better["offset"], "round_trip": better["round_trip"]})
    return result


def reason(error: OSError) -> str:
    """Why a connection failed, in words that tell a firewall from a process that is not there."""
    if isinstance(error, TimeoutError) or error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH):
        return "no answer (a firewall drops it, or the host is not there)"
    if isinstance(error, ConnectionRefusedError):
        return "refused (nothing listens there, or a firewall rejects it)"
    return error.strerror or str(error)


def meet(
    name: str,
    address: str,
    peers: t.Sequence[t.Mapping[str, t.Any]],
    *,
    port: int,
    others: t.Sequence[int],
    group: str,
    timeout: float,
) -> dict[str, t.Any]:
    """Meet all peers at the same time; what came of it."""
    deadline = time.monotonic() + timeout
    listener = Listener(address, port, others, name, group)
    results: list[dict[str, t.Any]] = []
    try:
        if listener.problem:
            # Who was not asked is told as one who was not reached: an empty list would say that there are no peers.
            return {
                "problem": listener.problem,
                "busy": listener.busy,
                "peers": [unreached(peer, listener.problem) for peer in peers],
                "absent": [peer["name"] for peer in peers],
            }
        message = {"name": name, "group": group}
        threads = []
        for peer in peers:
            thread = threading.Thread(
                target=lambda peer=peer: results.append(visit(peer, port, message, deadline)), daemon=True
            )
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()
        # Only who was reached can be told, and only who is told can leave: both stay as long as the other needs them.
        for peer in results:
            if peer["reached"]:
                try:
                    say(peer["address"], port, {**message, "done": True}, 5)
                except OSError as error:
                    peer["error"] = reason(error)
        absent = listener.wait_for([peer["name"] for peer in peers], deadline)
    finally:
        listener.close()
    order = {peer["name"]: index for index, peer in enumerate(peers)}
    return {
        "problem": None,
        "busy": listener.busy,
        "peers": sorted(results, key=lambda peer: order[peer["name"]]),
        "absent": absent,
    }
