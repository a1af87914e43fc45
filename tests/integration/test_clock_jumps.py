"""A wall clock that is set forward or back by an hour while a server runs: its deadlines and pauses stay right."""

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

import numpy as np
import pytest

from penstock.bench.process_usage import worker_pids
from tests.support.processes import Crowd, kill
from tests.support.serving import RunningServer, write_doubler
from tests.support.warm_client import SOCKET_VARIABLE

pytestmark = pytest.mark.thorough

HEAD_S, HOUR_S = 1.5, 3600
# The clock of a process with this library is ahead of the machine's by the seconds in a file.
LIBRARY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead_s(void)
{
    char text[32] = {0};
    int file = open(getenv("CLOCK_AHEAD"), O_RDONLY);
    if (file < 0)
        return 0;
    if (read(file, text, sizeof text - 1) < 0)
        text[0] = 0;
    close(file);
    return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += ahead_s();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    now->tv_sec = read.tv_sec;
    now->tv_usec = read.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now)
        *now = read.tv_sec;
    return read.tv_sec;
}
"""


@final
class ClockServer:
    """A server whose wall clock a test sets."""

    def __init__(self, folder: Path) -> None:
        self._ahead = folder / "ahead"
        self.set(0)
        options = ["--frontends", "2", "--head-timeout-s", str(HEAD_S), "--watchdog-s", "20"]
        self.server = RunningServer(write_doubler(folder), *options)

    def set(self, ahead_s: int) -> None:
        """Set the clock ahead of that of the machine."""
        temporary = self._ahead.with_suffix(".new")
        temporary.write_text(str(ahead_s))
        temporary.rename(self._ahead)


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClockServer]:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "ahead.c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "ahead.so", "ahead.c"], cwd=folder, check=True)
    with pytest.MonkeyPatch.context() as patched:
        # A fork of a Python that runs already would not have the library.
        patched.delenv(SOCKET_VARIABLE, raising=False)
        patched.setenv("LD_PRELOAD", str(folder / "ahead.so"))
        patched.setenv("CLOCK_AHEAD", str(folder / "ahead"))
        made = ClockServer(folder)
    with made.server:
        yield made


def test_the_clock_of_the_server_is_set(clock: ClockServer) -> None:
    pid = worker_pids(clock.server.process.pid)["engine"]
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert "ahead.so" in mapped
    command = ["python", "-c", "import time; print(time.time())"]
    environ = dict(line.split(b"=", 1) for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if line)
    clock.set(HOUR_S)
    shown = float(subprocess.run(command, env=environ, capture_output=True, check=True).stdout)
    clock.set(0)
    assert abs(shown - time.time() - HOUR_S) < 60


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])
def test_requests_deadlines_and_restarts_do_not_notice(clock: ClockServer, ahead_s: int) -> None:
    clock.set(0)
    server, answers = clock.server, list[int]()
    engine = worker_pids(server.process.pid)["engine"]
    # The network takes two seconds, and the clock is set meanwhile.
    body, head = np.full(4, -2, np.float32).tobytes(), {"Content-Type": "application/octet-stream"}
    slow = threading.Thread(target=lambda: answers.append(server.ask("POST", "/v1/apps/doubler", body, head)[0]))
    start_s = time.monotonic()
    with socket.create_connection((server.host, server.port), timeout=20) as half:
        slow.start()
        half.sendall(b"POST /v1/apps/doubler HTTP/1.1\r\n")
        time.sleep(0.5)
        clock.set(ahead_s)
        said = half.recv(4096)
        took_s = time.monotonic() - start_s
    slow.join()
    assert answers == [200]
    assert said.startswith(b"HTTP/1.1 408")
    # By the clock that was set it would be at once, or after an hour.
    assert took_s >= HEAD_S - 0.1
    with Crowd(server, clients=2) as crowd:
        crowd.until_right(5, since_s=time.monotonic())
        # Longer than a process may be silent before others take its connections.
        time.sleep(3)
        assert crowd.outcomes.keys() == {"right"}
        assert worker_pids(server.process.pid)["engine"] == engine
        killed_s = kill(server, "engine")
        crowd.until_right(5, since_s=killed_s + 0.2, within_s=60)
    clock.set(0)
    assert os.path.exists(f"/proc/{server.process.pid}")
