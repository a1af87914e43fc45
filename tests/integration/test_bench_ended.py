"""A bench that is ended by SIGTERM ends the servers that it started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from pathlib import Path
from penstock.bench.server_process import running_server

with running_server(Path(sys.argv[1]), ("--frontends", "1")) as server:
    print(server.process.pid, flush=True)
    time.sleep(300)
"""
# Servers that threads start.
SEVERAL = """
import sys, time
from pathlib import Path
from benchmarks.acceptance.fleet.routing_servers import routed_servers

with routed_servers(Path(sys.argv[1]), ("--frontends", "1"), (0.0,)) as servers:
    print(servers.process(0).process.pid, flush=True)
    time.sleep(300)
"""


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def in_session(server: int) -> list[str]:
    """Its front-ends and engine, and what they forked, which end a moment after it."""
    found = subprocess.run(["ps", "-o", "pid=", "-s", str(server)], capture_output=True, text=True, check=False)
    return found.stdout.split()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", [PROGRAM, SEVERAL], ids=["one", "several"])
def test_a_bench_that_is_ended_leaves_no_server(digits_bundle: Path, program: str) -> None:
    command = [sys.executable, "-c", program, str(digits_bundle)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        server = int(bench.stdout.readline())
        assert is_there(server)
        bench.send_signal(signal.SIGTERM)
        bench.wait(30)
        assert bench.stderr is not None
        assert "KeyboardInterrupt" in bench.stderr.read()
    end_s = time.monotonic() + 10
    while (is_there(server) or in_session(server)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not is_there(server)
    assert not in_session(server)
