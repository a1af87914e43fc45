"""HAProxy in front of given backends."""

import shutil
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.acceptance.fleet.routing_proxies import DEPLOY
from penstock.core.errors import BenchError

READY_S = 10.0
# `random` draws on a ring of 16 points for each unit of weight: with a weight of 1 servers get unequal shares.
WEIGHT = 100
# Not an algorithm of HAProxy's own.
FINISH = "predicted finish"
FINISH_LINES = """\
    balance roundrobin
    http-request lua.choose_by_finish
    use-server %[var(txn.chosen)] if { var(txn.chosen) -m found }
    http-response lua.observe_finish"""
CONFIGURATION = """\
global
    nbthread 1
    lua-load {lua}
    maxconn 8000
defaults
    mode http
    timeout connect 2s
    timeout client 30s
    timeout server 30s
    option http-keep-alive
    http-reuse always
    retries 0
frontend in
    bind 127.0.0.1:{port}
    default_backend paced
backend paced
{balance}
{servers}
"""


@contextmanager
def haproxy(balance: str, backends: Sequence[int]) -> Generator[int]:
    """Run HAProxy until the block ends; gives its port.

    Args:
        balance: The algorithm, as `balance` in its configuration; or `FINISH`, with the script of `deploy/`.
        backends: Ports of the servers on this machine.

    Raises:
        BenchError: HAProxy is not installed, or does not start.
    """
    program = shutil.which("haproxy")
    if program is None:
        raise BenchError("this figure needs HAProxy, and there is no 'haproxy' here; apt-get install haproxy.")
    with TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        servers = "\n".join(f"    server s{at} 127.0.0.1:{each} weight {WEIGHT}" for at, each in enumerate(backends))
        file = Path(folder) / "haproxy.cfg"
        chosen = FINISH_LINES if balance == FINISH else f"    balance {balance}"
        file.write_text(CONFIGURATION.format(port=port, balance=chosen, servers=servers, lua=DEPLOY / "finish.lua"))
        process = subprocess.Popen([program, "-db", "-q", "-f", str(file)], stderr=subprocess.PIPE, text=True)
        try:
            _wait_until_ready(process, port)
            yield port
        finally:
            process.terminate()
            process.communicate()


def _wait_until_ready(process: "subprocess.Popen[str]", port: int) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise BenchError(f"HAProxy ended with status {process.returncode}: {process.communicate()[1].strip()}.")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise BenchError(f"HAProxy did not listen on port {port} within {READY_S:g} s.")
