"""Hostile connections: the memory that they take of a server, and how late its deadlines end them."""

import resource
import selectors
import socket
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from urllib.parse import urlsplit

from benchmarks.acceptance.train.training_run import trained
from penstock.bench.process_usage import read_usage
from penstock.bench.server_process import ServerProcess, running_server
from penstock.core.errors import BenchError

CONNECTIONS = 10_000
# Other descriptors of this process.
OTHER_DESCRIPTORS = 200
CAP_MIB = 256
BODY_BYTES, HEAD_BYTES = 48_000, 8_000
# Time after the last connection in which the memory is watched.
WATCHED_S = 10.0
DRIBBLING, HEAD_S, BODY_S = 200, 2.0, 4.0
DRIBBLE_S = 0.2
REPETITIONS = 3

_POST = b"POST /v1/apps/digits HTTP/1.1\r\nHost: bench\r\nContent-Type: application/octet-stream\r\n"
# What each connection sends in turn: a head without an end, a body of known and one of unknown length, nothing.
_BEGUN = (
    b"GET / HTTP/1.1\r\nHost: bench\r\n"
    + b"".join(b"X-%03d: %b\r\n" % (at, b"x" * 150) for at in range(HEAD_BYTES // 160)),
    _POST + b"Content-Length: 1000000\r\n\r\n" + bytes(BODY_BYTES),
    _POST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"400\r\n" + bytes(1024) + b"\r\n") * (BODY_BYTES // 1024),
    b"",
)


def memory() -> list[float]:
    """Return the memory that 10,000 hostile connections take over the cap `--max-unfinished-mib`.

    Raises:
        BenchError: The server answered others wrong, or this process may not open so many sockets.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CONNECTIONS + OTHER_DESCRIPTORS:
        raise BenchError(
            f"{hard:,} descriptors may be open here, and {CONNECTIONS:,} connections need more; raise them."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with trained("digits", "--epochs", "1") as run:
        options = [
            "--frontends",
            "0",
            "--max-connections",
            str(CONNECTIONS + 100),
            "--max-unfinished-mib",
            str(CAP_MIB),
        ]
        with running_server(run.bundle, options) as server:
            return [_growth_bytes(server) / (CAP_MIB << 20)]


def _growth_bytes(server: ServerProcess) -> int:
    _check_healthy(server)
    before, most = _memory_bytes(server), 0
    with _connections(server, CONNECTIONS) as clients:
        for at, client in enumerate(clients):
            with suppress(OSError):
                client.send(_BEGUN[at % len(_BEGUN)])
            if at % 500 == 0:
                most = max(most, _memory_bytes(server))
        end_s = time.monotonic() + WATCHED_S
        while time.monotonic() < end_s:
            most = max(most, _memory_bytes(server))
            _check_healthy(server)
            time.sleep(0.1)
    return most - before


def deadline_s() -> list[float]:
    """Return how late the last of 200 dribbling connections is rejected, for heads and for bodies in turn.

    Raises:
        BenchError: One was rejected too early, or not at all.
    """
    begun = (
        (_BEGUN[0], b"X: 1\r\n", HEAD_S),
        (_POST + b"Content-Length: 1000000\r\n\r\n", b"x", BODY_S),
        (_POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", BODY_S),
    )
    options = ["--frontends", "0", "--head-timeout-s", str(HEAD_S), "--body-timeout-s", str(BODY_S)]
    with trained("digits", "--epochs", "1") as run, running_server(run.bundle, options) as server:
        _check_healthy(server)
        return [_latest_s(server, *one) for _ in range(REPETITIONS) for one in begun]


@dataclass(slots=True)
class _Dribbling:
    start_s: float
    next_s: float


def _latest_s(server: ServerProcess, begun: bytes, more: bytes, limit_s: float) -> float:
    latest_s = 0.0
    with _connections(server, DRIBBLING) as clients, selectors.DefaultSelector() as selector:
        for client in clients:
            start_s = time.monotonic()
            client.send(begun)
            selector.register(client, selectors.EVENT_READ, _Dribbling(start_s, start_s + DRIBBLE_S))
        end_s = time.monotonic() + limit_s + 20
        while selector.get_map():
            for key, _ in selector.select(DRIBBLE_S / 4):
                client: socket.socket = key.fileobj  # pyright: ignore[reportAssignmentType]
                late_s = time.monotonic() - key.data.start_s - limit_s
                answer = client.recv(65_536)
                if not answer.startswith(b"HTTP/1.1 408 ") or late_s < 0:
                    raise BenchError(f"a dribbling connection got {answer[:80]!r} {late_s:.3f} s after its deadline.")
                latest_s = max(latest_s, late_s)
                selector.unregister(client)
            now_s = time.monotonic()
            if now_s > end_s:
                raise BenchError(f"{len(selector.get_map())} dribbling connections were not rejected.")
            for key in list(selector.get_map().values()):
                if now_s >= key.data.next_s:
                    key.data.next_s = now_s + DRIBBLE_S
                    with suppress(OSError):
                        key.fileobj.send(more)  # pyright: ignore
    return latest_s


@contextmanager
def _connections(server: ServerProcess, count: int) -> Generator[list[socket.socket]]:
    where = urlsplit(server.url)
    with ExitStack() as opened:
        clients: list[socket.socket] = []
        for _ in range(count):
            clients.append(opened.enter_context(socket.create_connection((where.hostname, where.port), timeout=30)))
            clients[-1].setblocking(False)
        yield clients


def _memory_bytes(server: ServerProcess) -> int:
    usage = read_usage(server.process.pid)
    if usage is None:
        raise BenchError("the server ended.")
    return usage.memory_bytes


def _check_healthy(server: ServerProcess) -> None:
    client = HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    try:
        for method, path, body in (("GET", "/v2/health/ready", None), ("POST", "/v1/apps/digits", bytes(784))):
            client.request(method, path, body, {"Content-Type": "application/octet-stream"} if body else {})
            answer = client.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise BenchError(f"{path} was answered with {answer.status}: {text[:200]!r}.")
    finally:
        client.close()
