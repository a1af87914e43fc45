"""One client's connection, on a transport that the test plays."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

from penstock.serve.connection import Answer, Connection, refused
from penstock.serve.wire import Request, RequestReader, Response
from tests.support.clock import Clock


@dataclass
class Transport:
    """A socket whose client reads only what the test takes out of it."""

    unread: int = 0
    said: list[str] = field(default_factory=list[str])

    def get_extra_info(self, name: str) -> None:
        pass

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.unread += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def close(self) -> None:
        self.said.append("close")

    def abort(self) -> None:
        self.said.append("abort")

    def can_write_eof(self) -> bool:
        return False


def well(request: Request, answer: Answer) -> None:
    answer(Response(200, b"x" * 1000))


def connected(clock: Clock) -> tuple[Connection, Transport]:
    transport = Transport()
    connection = Connection(well, set(), RequestReader(1000), clock, lambda error, head: refused(error), lambda: False)
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
    connection.let_go()
    assert transport.said == ["abort"]


def test_a_client_that_read_everything_is_ended_in_peace() -> None:
    clock = Clock()
    connection, transport = connected(clock)
    transport.unread = 0
    clock.now_s += 60
    assert connection.silent_s(clock.now_s) == 60
    connection.let_go()
    assert transport.said == ["close"]


def test_a_transport_without_half_closing_is_not_asked_for_it() -> None:
    clock = Clock()
    connection, transport = connected(clock)
    connection.data_received(b"nonsense\r\n\r\n")
    assert connection.lingering_since_s == clock.now_s
    assert not connection.eof_received()
    assert transport.said == ["close"]


def test_what_is_certain_to_be_refused_passes_by_the_handler_unless_the_connection_is_to_close() -> None:
    full: list[bytes | None] = [None]
    clock, transport, draining = Clock(), Transport(), [False]
    handled: list[Request] = []

    def handle(request: Request, answer: Answer) -> None:
        handled.append(request)
        answer(Response(200, b""))

    connection = Connection(
        handle,
        set(),
        RequestReader(1000),
        clock,
        lambda error, head: refused(error),
        lambda: draining[0],
        shed=lambda head, heard: full[0] if head.path == "/" else None,
    )
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
