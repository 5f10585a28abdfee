# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The server of the benchmarks, a process of its own: the lab's hub for questions, nginx (sendfile) for the bytes.

    server.py ROOT STATE     serves ROOT/<owner>/<name>/<commit>/, keeps nginx's files in STATE, tells its addresses

Without nginx the hub's own CDN sends the bytes, with sendfile as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "molecule" / "lab"))

import lab_hub

CONFIGURATION = """
daemon off;
{user}
worker_processes {workers};
pid {state}/nginx.pid;
error_log {state}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    default_type application/octet-stream;
    sendfile on;
    tcp_nopush on;
    client_body_temp_path {state}/body;
    proxy_temp_path {state}/proxy;
    fastcgi_temp_path {state}/fastcgi;
    uwsgi_temp_path {state}/uwsgi;
    scgi_temp_path {state}/scgi;
    server {{
        listen 127.0.0.1:{port};
        root {root};
    }}
}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_nginx(root: Path, state: Path) -> tuple[subprocess.Popen[bytes], int] | None:
    """nginx on a free port; nothing where there is none."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        return None
    port, file = free_port(), state / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""
    workers = len(os.sched_getaffinity(0))
    file.write_text(
        CONFIGURATION.format(user=user, workers=workers, state=state, port=port, root=root), encoding="utf-8"
    )
    child = subprocess.Popen([program, "-e", str(state / "error.log"), "-p", str(state), "-c", str(file)])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and child.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return child, port
        time.sleep(0.02)
    child.kill()
    raise SystemExit(f"nginx does not start: {(state / 'error.log').read_text(encoding='utf-8')}")


def main() -> int:
    root, state = (Path(word).resolve() for word in sys.argv[1:3])
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    nginx = start_nginx(root, state)
    try:
        with lab_hub.Hub(root) as hub:
            if nginx:
                hub.cdn = f"http://127.0.0.1:{nginx[1]}"
            address = {"endpoint": hub.endpoint, "cdn": hub.cdn, "bytes_by": "nginx" if nginx else "lab_hub"}
            sys.stdout.write(json.dumps(address) + "\n")
            sys.stdout.flush()
            ended.wait()
    finally:
        if nginx:
            nginx[0].terminate()
            nginx[0].wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
