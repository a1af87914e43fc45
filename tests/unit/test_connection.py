"""One client's connection, on a transport that the test plays."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from penstock.core.errors import RequestError
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Handlers, Response, rejected
from penstock.serve.http.connection import Connection
from penstock.serve.http.parser import RequestParser
from tests.support.clock import Clock, idle_loop


@dataclass
class Transport:
    """A socket whose client reads only what the test takes out of it."""

    unread: int = 0
    written: bytes = b""
    said: list[str] = field(default_factory=list[str])

    def get_extra_info(self, name: str) -> None:
        pass

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.unread += len(data)
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return "close" in self.said

    def close(self) -> None:
        self.said.append("close")

    def abort(self) -> None:
        self.said.append("abort")

    def can_write_eof(self) -> bool:
        return False


def well(request: Request, answer: Answer) -> None:
    answer(Response(200, b"x" * 1000))


def refuse(error: RequestError, head: Head) -> Response:
    return rejected(error)


def connection_of(
    handlers: Handlers,
    clock: Clock,
    draining: Callable[[], bool] = lambda: False,
    batch_loop: BatchLoop | None = None,
) -> Connection:
    parser = RequestParser(lambda head: 1000)
    return Connection(handlers, set(), parser, batch_loop or idle_loop(clock.ns), clock.ns, draining)


def connected(clock: Clock) -> tuple[Connection, Transport]:
    transport = Transport()
    connection = connection_of(Handlers(handle=well, reject=refuse), clock)
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    return connection, transport


def test_a_client_that_reads_slowly_is_not_silent() -> None:
    clock = Clock()
    connection, transport = connected(clock)
    for _ in range(10):
        clock.now_s += 60
        transport.unread -= 100
        assert connection.silent_s(clock.now_s) == 0


def test_a_client_that_does_not_read_is_ended_though_bytes_wait_for_it() -> None:
    clock = Clock()
    connection, transport = connected(clock)
    assert connection.silent_s(clock.now_s) == 0
    clock.now_s += 60
    assert connection.silent_s(clock.now_s) == 60
    connection.close_idle()
    assert transport.said == ["abort"]


def test_a_client_that_read_everything_is_ended_in_peace() -> None:
    clock = Clock()
    connection, transport = connected(clock)
    transport.unread = 0
    clock.now_s += 60
    assert connection.silent_s(clock.now_s) == 60
    connection.close_idle()
    assert transport.said == ["close"]


def test_a_transport_without_half_closing_is_not_asked_for_it() -> None:
    clock = Clock()
    connection, transport = connected(clock)
    connection.data_received(b"nonsense\r\n\r\n")
    assert connection.lingering_since_ns == clock.ns()
    assert not connection.eof_received()
    assert transport.said == ["close"]


def test_what_is_certain_to_be_refused_passes_by_the_handler_unless_the_connection_is_to_close() -> None:
    full: list[bytes | None] = [None]
    clock, transport, draining = Clock(), Transport(), [False]
    handled: list[Request] = []

    def handle(request: Request, answer: Answer) -> None:
        handled.append(request)
        answer(Response(200, b""))

    handlers = Handlers(
        handle=handle, reject=refuse, reject_early=lambda head, arrival_ns: full[0] if head.path == "/" else None
    )
    connection = connection_of(handlers, clock, lambda: draining[0])
    connection.connection_made(cast(asyncio.Transport, transport))
    ask = b"GET / HTTP/1.1\r\n\r\n"
    connection.data_received(ask)
    full[0] = b"full"
    transport.unread = 0
    connection.data_received(ask)
    assert (len(handled), transport.unread) == (1, len(b"full"))
    # A head that was never seen is read first, and one that asks for something else is not refused.
    connection.data_received(b"GET /?else HTTP/1.1\r\n\r\n")
    connection.data_received(b"GET /other HTTP/1.1\r\n\r\n" * 2)
    assert len(handled) == 4
    # The last answer of a connection says that it is the last.
    connection.close_after_next()
    connection.data_received(ask)
    assert len(handled) == 5
    assert transport.said == ["close"]


def test_an_early_batch_that_raises_is_not_the_fault_of_the_request_that_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, transport = Clock(), Transport()

    def fail() -> int:
        raise ZeroDivisionError

    batch_loop = BatchLoop(fail, call_soon=lambda call: None, clock_ns=clock.ns, max_read_ns=1_000_000)
    connection = connection_of(Handlers(handle=well, reject=refuse), clock, batch_loop=batch_loop)
    connection.connection_made(cast(asyncio.Transport, transport))
    batch_loop.wake()
    clock.now_s += 0.01
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    assert transport.written.startswith(b"HTTP/1.1 200 OK\r\n")
    assert [record.getMessage() for record in caplog.records] == ["a batch failed"]


def test_a_connection_that_an_early_batch_closes_takes_no_further_request() -> None:
    clock, transport = Clock(), Transport()
    waiting: list[tuple[Request, Answer]] = []

    def answer_all() -> int:
        for _, answer in waiting:
            answer(Response(200))
        return 0

    batch_loop = BatchLoop(answer_all, call_soon=lambda call: None, clock_ns=clock.ns, max_read_ns=1_000_000)
    handlers = Handlers(handle=lambda request, answer: waiting.append((request, answer)), reject=refuse)
    connection = connection_of(handlers, clock, batch_loop=batch_loop)
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.data_received(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    batch_loop.wake()
    clock.now_s += 0.01
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    assert len(waiting) == 1
    assert transport.said == ["close"]


def test_pipelined_requests_arrive_when_the_one_before_is_answered() -> None:
    clock, transport = Clock(), Transport()
    waiting: list[tuple[Request, Answer]] = []
    handlers = Handlers(handle=lambda request, answer: waiting.append((request, answer)), reject=refuse)
    connection = connection_of(handlers, clock)
    connection.connection_made(cast(asyncio.Transport, transport))
    arrivals_ns: list[int] = []
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n" * 2)
    for _ in range(2):
        arrivals_ns.append(clock.ns())
        clock.now_s += 1
        waiting[-1][1](Response(200))
    assert [request.arrival_ns for request, _ in waiting] == arrivals_ns
