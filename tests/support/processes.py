"""The processes of a server, from /proc, and clients that record the outcome of every request."""

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

import numpy as np

from penstock.bench.process_usage import worker_pids
from penstock.core.machine.process_stat import is_running
from tests.fuzz.process import listening_on
from tests.support.serving import RunningServer

# Longer than the budget of a test's server.
HANGS_S = 10.0
PAUSE_S = 0.01


def exists(process: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    return is_running(process)


def tables_of(processes: list[int]) -> int:
    """Count the descriptors of slot tables of some processes."""
    count = 0
    for process in processes:
        for entry in Path(f"/proc/{process}/fd").glob("*"):
            try:
                count += "memfd:penstock-slots" in os.readlink(entry)
            except OSError:
                continue
    return count


def mapped_tables(process: int) -> int:
    """Count the slot tables that a process has mapped."""
    return sum("memfd:penstock-slots" in line for line in Path(f"/proc/{process}/maps").read_text().splitlines())


def owner(server: RunningServer, client_port: int) -> str:
    """The role of the process that has accepted a client's connection; empty while nobody has."""
    ends = f":{server.port:04X}", f":{client_port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(ends[0]) and line[2].endswith(ends[1])}
    for role, process in worker_pids(server.process.pid).items():
        for entry in Path(f"/proc/{process}/fd").glob("*"):
            try:
                if os.readlink(entry) in sockets:
                    return role
            except OSError:
                continue
    return ""


def memory_bytes(server: RunningServer) -> int:
    """The memory of the process that listens: `server.process` may be the tests' Python, which waits for it."""
    pid = listening_on(server.port)
    assert pid is not None, "nobody listens"
    return process_bytes(pid)


def process_bytes(process: int) -> int:
    """The memory of a process, without pages of files; shared pages count whole.

    Servers of other tests are forks of the same Python: a proportional share would grow when one of them ends.
    """
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def kill(server: RunningServer, role: str) -> float:
    """Send SIGKILL to one role; return the time."""
    os.kill(worker_pids(server.process.pid)[role], signal.SIGKILL)
    return time.monotonic()


def eventually(what: Callable[[], bool], *, within_s: float) -> float:
    """Wait until a condition holds; return the seconds that it took."""
    start_s = time.monotonic()
    while not what():
        assert time.monotonic() - start_s < within_s, f"not within {within_s} s"
        time.sleep(PAUSE_S)
    return time.monotonic() - start_s


@dataclass(frozen=True, slots=True)
class Event:
    """The outcome of one request.

    Args:
        outcome: `right`, `wrong`, `refused` (503 with Retry-After), `closed`, `hung`, `late` or `not accepted`
            (where no front-end had taken the connection in time), or the head of another answer.
        sent_s: When it was sent.
        ended_s: When that was known.
        port: The client's, which names the connection.
    """

    outcome: str
    sent_s: float
    ended_s: float
    port: int


@final
class Crowd:
    """Clients of a doubler in a closed loop, each with other numbers, that check every answer.

    Args:
        server: Whom they ask.
        clients: How many.
        path: What they ask.
        reconnect: Whether each request has a connection of its own.
        pause_s: How long a client waits before its next request.
    """

    def __init__(
        self,
        server: RunningServer,
        *,
        clients: int = 8,
        path: str = "/v1/apps/doubler",
        reconnect: bool = False,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._pause_s = pause_s
        self._server = server
        self._path = path
        self._reconnect = reconnect
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]
        self.events: list[Event] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    @property
    def outcomes(self) -> Counter[str]:
        """Count the requests by outcome."""
        return Counter(event.outcome for event in self.events)

    def until_right(self, count: int, *, since_s: float = 0.0, within_s: float = 10.0) -> float:
        """Wait for a number of right answers to requests sent after a time; return the time of the last."""

        def right() -> list[Event]:
            return [event for event in self.events if event.outcome == "right" and event.sent_s > since_s]

        eventually(lambda: len(right()) >= count, within_s=within_s)
        return sorted(event.ended_s for event in right())[count - 1]

    def _client(self, number: int) -> None:
        rng = np.random.default_rng(number)
        while not self._over.is_set():
            try:
                connection = socket.create_connection((self._server.host, self._server.port), timeout=HANGS_S)
            except ConnectionError:
                time.sleep(PAUSE_S)
                continue
            except TimeoutError:
                self.events.append(Event("hung", 0.0, time.monotonic(), 0))
                continue
            with connection:
                port = connection.getsockname()[1]
                outcome = "right"
                while not self._over.is_set() and outcome in ("right", "refused"):
                    numbers = rng.integers(20, 1 << 20, 4).astype(np.float32)
                    sent_s = time.monotonic()
                    outcome = self._asked(connection, numbers)
                    self.events.append(Event(outcome, sent_s, time.monotonic(), port))
                    time.sleep(PAUSE_S if outcome != "right" else self._pause_s)
                    if self._reconnect:
                        break

    def _asked(self, connection: socket.socket, numbers: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> str:
        body = numbers.tobytes()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\n"
            f"Accept: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            connection.sendall(head.encode() + body)
            received = connection.recv(4096)
        except TimeoutError:
            return self._silent(connection)
        except ConnectionError:
            return "closed"
        if not received:
            return "closed"
        said, _, content = received.partition(b"\r\n\r\n")
        if said.startswith(b"HTTP/1.1 200 "):
            return "right" if content == (numbers * 2).tobytes() else "wrong"
        if said.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: " in said:
            return "refused"
        return repr(received)

    def _silent(self, connection: socket.socket) -> str:
        if not owner(self._server, connection.getsockname()[1]):
            return "not accepted"
        try:
            return "late" if connection.recv(4096) else "closed"
        except TimeoutError:
            return "hung"
        except ConnectionError:
            return "closed"
