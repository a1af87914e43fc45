"""One client's connection, on a transport that the test plays."""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import pytest

from penstock.core.errors import Overloaded, RequestError
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.exchange.peer import Peer
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.request_bounds import CONNECTION_BYTES, RequestBounds
from penstock.serve.exchange.response import Answer, Handlers, Response, rejected
from penstock.serve.http.connection import AGAIN_NS, Connection
from penstock.serve.http.parser import RequestParser
from penstock.serve.http.refusals import Refusals
from tests.support.clock import Clock, idle_loop


@dataclass
class Transport:
    """A socket whose client reads only what the test takes out of it."""

    unread: int = 0
    written: bytes = b""
    said: list[str] = field(default_factory=list[str])

    def get_extra_info(self, name: str) -> object:
        return None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.unread += len(data)
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unread

    def pause_reading(self) -> None:
        self.said.append("pause")

    def resume_reading(self) -> None:
        self.said.append("resume")

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
    bounds: RequestBounds | None = None,
) -> Connection:
    parser = RequestParser(lambda head: 1 << 20)
    loop, bounds = batch_loop or idle_loop(clock.ns), bounds or RequestBounds()
    return Connection(handlers, set(), parser, loop, clock.ns, draining, bounds=bounds)


def connected(clock: Clock) -> tuple[Connection, Transport]:
    transport = Transport()
    connection = connection_of(Handlers(handle=well, reject=refuse), clock)
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
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


def test_a_connection_makes_room_while_it_has_no_whole_request() -> None:
    clock, others = Clock(), set[Peer]()
    answers: list[Answer] = []
    transport = Transport()
    handlers = Handlers(handle=lambda request, answer: answers.append(answer), reject=refuse)
    connection = connection_of(handlers, clock)
    assert connection.unused() == (clock.ns(), True)  # TLS is negotiated
    connection.connection_made(cast(asyncio.Transport, transport))
    assert connection.unused() == (clock.ns(), False)
    clock.now_s += 1
    connection.data_received(b"GET / HTTP/1.1\r\n")
    begun_ns = clock.ns()
    clock.now_s += 1
    connection.data_received(b"Host: a\r\n")
    assert connection.unused() == (begun_ns, True)
    connection.data_received(b"\r\n")
    assert connection.unused() is None
    clock.now_s += 60
    connection.sweep(clock.now_s, 10, 10)
    answers[0](Response(200, b"x"))
    assert connection.unused() is None  # its client has not read it
    transport.unread = 0
    assert connection.unused() == (clock.ns(), False)
    said = transport.written
    connection.make_room(Overloaded("Full."), others)
    assert (transport.said, transport.written, others) == (["close"], said, {connection})
    connection.connection_lost(None)
    assert others == set()


def test_a_request_that_makes_room_before_it_is_whole_is_rejected() -> None:
    clock, others = Clock(), set[Peer]()
    transport = Transport()
    connection = connection_of(Handlers(handle=well, reject=refuse), clock)
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.data_received(b"GET / HTTP/1.1\r\n")
    connection.make_room(Overloaded("Full."), others)
    assert transport.written.startswith(b"HTTP/1.1 503 ")
    assert transport.said == []  # its client can still read why
    assert connection.unused() == (clock.ns(), False)
    assert others == {connection}


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
    ask = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    connection.data_received(ask)
    full[0] = b"full"
    transport.unread = 0
    connection.data_received(ask)
    assert (len(handled), transport.unread) == (1, len(b"full"))
    # A head that was never seen is read first, and one that asks for something else is not refused.
    connection.data_received(b"GET /?else HTTP/1.1\r\nHost: a\r\n\r\n")
    connection.data_received(b"GET /other HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
    assert len(handled) == 4
    # The last answer of a connection says that it is the last.
    connection.close_after_next()
    connection.data_received(ask)
    assert len(handled) == 5
    assert transport.said == ["close"]


def refused(clock: Clock, draining: Callable[[], bool] = lambda: False) -> tuple[Connection, Transport, list[Request]]:
    """A connection whose request was refused, and the refusal held: refusals have no time left."""
    handled: list[Request] = []

    def handle(request: Request, answer: Answer) -> None:
        handled.append(request)
        answer(Response(200, b""))

    handlers = Handlers(handle=handle, reject=refuse, reject_early=lambda head, arrival_ns: FULL if handled else None)
    refusals = Refusals(50_000_000, ready.append, clock.ns, share=0.0)
    while refusals.admit(clock.ns()):
        pass
    transport = Transport()
    connection = connection_of(handlers, clock, draining)
    connection.refusals = refusals
    connection.connection_made(cast(asyncio.Transport, transport))
    # One that is answered, one that is refused at once, and one that is sent again at once.
    for _ in range(3):
        connection.data_received(ASK)
    transport.written = b""
    return connection, transport, handled


ASK = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
ready: deque[Callable[[], None]] = deque()


def answer_held(clock: Clock) -> None:
    clock.now_s += 1
    while ready:
        ready.popleft()()


def test_a_held_refusal_is_answered_before_what_its_client_sends_next() -> None:
    clock = Clock()
    connection, transport, handled = refused(clock)
    assert transport.written == b""
    connection.data_received(b"GET /other HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (len(handled), transport.written) == (1, b"")
    answer_held(clock)
    assert transport.written.startswith(FULL + b"HTTP/1.1 200 OK\r\n")
    assert len(handled) == 2


def test_a_client_that_comes_again_later_is_refused_at_once() -> None:
    clock = Clock()
    connection, transport, handled = refused(clock)
    answer_held(clock)
    transport.written = b""
    clock.now_s += AGAIN_NS / 1e9 + 0.001
    connection.data_received(ASK)
    assert (len(handled), transport.written) == (1, FULL)
    connection.data_received(ASK)
    assert (len(handled), transport.written) == (1, FULL)


def test_a_held_refusal_of_a_client_that_left_is_dropped() -> None:
    clock = Clock()
    connection, transport, _ = refused(clock)
    connection.connection_lost(None)
    answer_held(clock)
    assert transport.written == b""


def test_a_held_refusal_is_the_last_answer_of_a_server_that_goes_down() -> None:
    clock = Clock()
    connection, transport, _ = refused(clock)
    connection.close_after_next()
    answer_held(clock)
    assert transport.written == FULL.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
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
    connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
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
    connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    batch_loop.wake()
    clock.now_s += 0.01
    connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert len(waiting) == 1
    assert transport.said == ["close"]


def test_pipelined_requests_arrive_when_the_one_before_is_answered() -> None:
    clock, transport = Clock(), Transport()
    waiting: list[tuple[Request, Answer]] = []
    handlers = Handlers(handle=lambda request, answer: waiting.append((request, answer)), reject=refuse)
    connection = connection_of(handlers, clock)
    connection.connection_made(cast(asyncio.Transport, transport))
    arrivals_ns: list[int] = []
    connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
    for _ in range(2):
        arrivals_ns.append(clock.ns())
        clock.now_s += 1
        waiting[-1][1](Response(200))
    assert [request.arrival_ns for request, _ in waiting] == arrivals_ns


def bounded(clock: Clock, bounds: RequestBounds) -> tuple[Connection, Transport]:
    transport = Transport()
    connection = connection_of(Handlers(handle=well, reject=refuse), clock, bounds=bounds)
    connection.connection_made(cast(asyncio.Transport, transport))
    return connection, transport


@pytest.mark.parametrize(
    ("begun", "more", "limit_s"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n", b"X: 1\r\n", 10),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n\r\n", b"x", 30),
    ],
)
def test_who_sends_a_little_from_time_to_time_has_a_deadline_for_the_whole(
    begun: bytes, more: bytes, limit_s: int
) -> None:
    clock = Clock()
    connection, transport = bounded(clock, RequestBounds(head_timeout_s=10, body_timeout_s=30))
    # The deadline is that of this request, not of the connection.
    connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    clock.now_s += 60
    transport.written, transport.unread = b"", 0
    connection.data_received(begun)
    for _ in range(limit_s):
        clock.now_s += 1
        connection.sweep(clock.now_s, 120, 20)
        assert not transport.written
        connection.data_received(more)
    clock.now_s += 1
    connection.sweep(clock.now_s, 120, 20)
    assert transport.written.startswith(b"HTTP/1.1 408 ")
    assert f"within {limit_s} s".encode() in transport.written


def test_the_time_in_which_the_server_does_not_read_is_not_the_clients() -> None:
    clock, transport = Clock(), Transport()
    waiting: list[Answer] = []
    handlers = Handlers(handle=lambda request, answer: waiting.append(answer), reject=refuse)
    connection = connection_of(handlers, clock, bounds=RequestBounds(head_timeout_s=10))
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 18 + b"GET / HT")
    assert transport.said == ["pause"]
    clock.now_s += 60
    for number in range(18):
        waiting[number](Response(200))
    assert transport.said == ["pause", "resume"]
    transport.written, transport.unread = b"", 0
    clock.now_s += 9
    connection.sweep(clock.now_s, 120, 20)
    assert not transport.written
    clock.now_s += 2
    connection.sweep(clock.now_s, 120, 20)
    assert transport.written.startswith(b"HTTP/1.1 408 ")


def test_unfinished_bodies_have_one_budget_and_give_it_back() -> None:
    clock, bounds = Clock(), RequestBounds(max_bytes=4 * CONNECTION_BYTES + 250_000)
    post = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
    first, second, third, fourth = (bounded(clock, bounds) for _ in range(4))
    for connection, transport in (first, second, third):
        connection.data_received(post + bytes(90_000))
        assert (b" 503 " in transport.written) == (connection is third[0])
    assert b"bytes; come back later" in third[1].written
    # What comes whole is answered all the same, and what is answered or gone is not counted.
    fourth[0].data_received(post + bytes(100_000))
    assert fourth[1].written.startswith(b"HTTP/1.1 200 ")
    first[0].data_received(bytes(10_000))
    assert first[1].written.startswith(b"HTTP/1.1 200 ")
    second[0].connection_lost(None)
    assert bounds.held_bytes == 3 * CONNECTION_BYTES
    for connection, _ in (first, third, fourth):
        connection.connection_lost(None)
    assert bounds.held_bytes == 0


def test_a_body_that_is_late_is_rejected_with_the_time_at_which_it_began() -> None:
    clock, heads = Clock(), list[Head]()

    def reject(error: RequestError, head: Head) -> Response:
        heads.append(head)
        return rejected(error)

    handlers, bounds = Handlers(handle=well, reject=reject), RequestBounds(head_timeout_s=10, body_timeout_s=30)
    clock.now_s += 60
    connection = connection_of(handlers, clock, bounds=bounds)
    connection.connection_made(cast(asyncio.Transport, Transport()))
    begin_ns = clock.ns()
    connection.data_received(b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n\r\n")
    clock.now_s += 31
    connection.sweep(clock.now_s, 120, 120)
    assert [(head.path, head.began_ns) for head in heads] == [("/a", begin_ns)]


def test_slow_requests_make_room_for_newer_ones() -> None:
    clock, bounds = Clock(), RequestBounds(max_bytes=3 * CONNECTION_BYTES + 150_000)
    post = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
    slow, newer, newest = (bounded(clock, bounds) for _ in range(3))
    slow[0].data_received(post + bytes(90_000))
    clock.now_s += 2
    newer[0].data_received(post + bytes(99_999))
    assert slow[1].written.startswith(b"HTTP/1.1 503 ")
    # One that has just begun stays, and the newest is rejected instead.
    newest[0].data_received(post + bytes(90_000))
    assert newest[1].written.startswith(b"HTTP/1.1 503 ")
    newer[0].data_received(b"x")
    assert newer[1].written.startswith(b"HTTP/1.1 200 ")
    assert bounds.held_bytes == 3 * CONNECTION_BYTES


def test_a_body_for_which_there_is_no_room_is_not_asked_for() -> None:
    clock = Clock()
    connection, transport = bounded(clock, RequestBounds(max_bytes=CONNECTION_BYTES + 500))
    connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\nExpect: 100-continue\r\n\r\n")
    assert transport.written.startswith(b"HTTP/1.1 503 ")


def test_bodies_that_wait_for_the_answer_before_are_counted() -> None:
    clock, transport, bounds = Clock(), Transport(), RequestBounds()
    waiting: list[Answer] = []
    handlers = Handlers(handle=lambda request, answer: waiting.append(answer), reject=refuse)
    connection = connection_of(handlers, clock, bounds=bounds)
    connection.connection_made(cast(asyncio.Transport, transport))
    post = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n" + bytes(1_000)
    connection.data_received(post * 3)
    assert bounds.held_bytes == CONNECTION_BYTES + 2_000
    waiting[0](Response(200))
    assert bounds.held_bytes == CONNECTION_BYTES + 1_000
    waiting[1](Response(200))
    waiting[2](Response(200))
    assert bounds.held_bytes == CONNECTION_BYTES


def test_others_have_their_turn_between_the_pieces_of_one_read() -> None:
    async def run() -> list[str]:
        clock, transport = Clock(), Transport()
        order: list[str] = []

        def handle(request: Request, answer: Answer) -> None:
            order.append(f"{len(request.body)} bytes")
            answer(Response(200))

        connection = connection_of(Handlers(handle=handle, reject=refuse), clock)
        connection.connection_made(cast(asyncio.Transport, transport))
        chunks = b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n"
        connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        # The client has sent all, and no more: neither its end nor a pause loses what is not parsed yet.
        connection.eof_received()
        assert transport.said == ["pause"]
        while "close" not in transport.said:
            order.append("turn")
            await asyncio.sleep(0)
        return order

    order = asyncio.run(run())
    assert order.count("turn") > 8
    assert [entry for entry in order if entry != "turn"] == ["10000 bytes"]


def test_pipelined_requests_of_one_read_are_answered_over_several_iterations_in_order() -> None:
    async def run() -> tuple[list[str], list[int]]:
        clock, transport = Clock(), Transport()
        paths: list[str] = []
        counts: list[int] = []

        def handle(request: Request, answer: Answer) -> None:
            paths.append(request.head.path)
            answer(Response(200))

        connection = connection_of(Handlers(handle=handle, reject=refuse), clock)
        connection.connection_made(cast(asyncio.Transport, transport))
        asks = (b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(2_000))
        connection.data_received(b"".join(asks))
        while len(paths) < 2_000:
            counts.append(len(paths))
            await asyncio.sleep(0)
        assert transport.said[-1] == "resume"
        return paths, counts

    paths, counts = asyncio.run(run())
    assert paths == [f"/{number}" for number in range(2_000)]
    assert max(later - earlier for earlier, later in pairwise(counts)) <= 64


def test_requests_of_a_connection_that_others_precede_wait_for_a_turn_and_are_answered_in_order() -> None:
    clock, transport = Clock(), Transport()
    paths: list[str] = []

    def handle(request: Request, answer: Answer) -> None:
        paths.append(request.head.path)
        answer(Response(200))

    async def play() -> None:
        connection = connection_of(Handlers(handle=handle, reject=refuse), clock)
        connection.connection_made(cast(asyncio.Transport, transport))
        connection.usage.young = False
        connection.usage.heavy = True
        connection.data_received(b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(3)))
        assert not paths
        assert transport.said == ["pause"]
        for _ in range(20):
            await asyncio.sleep(0)
        assert paths == ["/0", "/1", "/2"]
        assert transport.said == ["pause", "resume"]
        connection.usage.heavy = False
        connection.data_received(b"GET /3 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert paths[-1] == "/3"

    asyncio.run(play())


@dataclass
class MovableTransport(Transport):
    """One with a socket."""

    tls: object = None
    end: socket.socket = field(default_factory=socket.socket)

    def get_extra_info(self, name: str) -> object:
        return self.tls if name == "sslcontext" else self.end


def movable(handle: Callable[[Request, Answer], None], tls: object = None) -> tuple[Connection, MovableTransport]:
    transport = MovableTransport(tls=tls)
    connection = connection_of(Handlers(handle=handle, reject=refuse), Clock())
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.usage.settle()
    return connection, transport


GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def test_a_connection_is_handed_over_only_between_two_requests() -> None:
    held: list[Answer] = []
    connection, transport = movable(lambda request, answer: held.append(answer))
    assert connection.can_move
    connection.data_received(GET[:10])
    assert not connection.can_move
    connection.data_received(GET[10:] + GET)
    assert not connection.can_move
    held[0](Response(200, b"{}"))
    assert not connection.can_move
    held[1](Response(200, b"{}"))
    # The client has not taken the answers yet.
    assert not connection.can_move
    assert connection.hand_over() is None
    transport.unread = 0
    descriptor = connection.hand_over()
    assert descriptor is not None
    with socket.socket(fileno=descriptor) as copy:
        assert os.path.samestat(os.fstat(copy.fileno()), os.fstat(transport.end.fileno()))
    assert transport.said[-2:] == ["pause", "abort"]
    transport.end.close()


def test_a_connection_stays_that_is_encrypted_or_new_or_heavy_or_ends_or_has_a_sequence() -> None:
    connection, encrypted = movable(well, tls=object())
    assert not connection.can_move

    def with_sequence(request: Request, answer: Answer) -> None:
        assert request.usage is not None
        request.usage.stays = True
        answer(Response(200, b"{}"))

    connection, transport = movable(with_sequence)
    assert connection.can_move
    connection.data_received(GET)
    transport.unread = 0
    assert not connection.can_move
    connection, ending = movable(well)
    connection.close_after_next()
    assert not connection.can_move
    connection, heavy = movable(well)
    connection.usage.heavy = connection.usage.unusual = True
    assert not connection.can_move
    for each in (encrypted, transport, ending, heavy):
        each.end.close()
