"""HAProxy in front of given backends."""

import shutil
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.core.errors import BenchError

READY_S = 10.0
# `random` draws on a ring of 16 points for each unit of weight: with a weight of 1 servers get unequal shares.
WEIGHT = 100
CONFIGURATION = """\
global
    nbthread 1
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
    balance {balance}
{servers}
"""


@contextmanager
def haproxy(balance: str, backends: Sequence[int]) -> Generator[int]:
    """Run HAProxy until the block ends; gives its port.

    Args:
        balance: The algorithm, as `balance` in its configuration.
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
        file.write_text(CONFIGURATION.format(port=port, balance=balance, servers=servers))
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
