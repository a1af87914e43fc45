"""The listening side alone, in this process, its loop turned by hand."""

import asyncio
import errno
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import takewhile
from typing import cast

import pytest
import uvloop

from penstock.serve.exchange.request import Request
from penstock.serve.exchange.request_bounds import RequestBounds
from penstock.serve.exchange.reserved_ports import ReservedPorts
from penstock.serve.exchange.response import Answer, Handlers, Response, rejected
from penstock.serve.http import listener as listener_module
from penstock.serve.http.connection import Connection
from penstock.serve.http.listener import GRACE_S, Listener
from penstock.serve.http.response_date import ResponseDate
from penstock.serve.http.server_sockets import listeners
from penstock.serve.settings import LimitSettings, NetworkSettings
from tests.support.clock import idle_loop
from tests.support.thorough import thorough


def well(request: Request, answer: Answer) -> None:
    answer(Response(200, b"{}"))


def served(listener: socket.socket) -> Listener:
    network, limits = NetworkSettings(), LimitSettings()
    handlers = Handlers(handle=well, reject=lambda error, head: rejected(error))
    batches, date = idle_loop(time.monotonic_ns), ResponseDate()
    return Listener(
        network, limits, listener, handlers, batches, lambda head: 1000, 10**9, RequestBounds(), lambda: 0, date
    )


async def last_answer(turns: int) -> bytes:
    """Return the answer to a client that connected this many turns of the loop before the drain began."""
    with closing(ReservedPorts()) as reserved:
        (listener,) = listeners("127.0.0.1", 0, 1, reserved)
    server = served(listener)
    server.listen()
    with socket.create_connection(listener.getsockname(), timeout=10) as client:
        client.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        server.close_after_next()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = await asyncio.wait_for(loop.sock_recv(client, 4096), 10)
        await server.drain(1.0, lambda: False)
    return answer


@pytest.mark.parametrize("turns", [0, 1, *map(thorough, range(2, 7)), 7])
def test_no_connection_is_overlooked_by_a_drain(turns: int) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert b"\r\nConnection: close\r\n" in runner.run(last_answer(turns))


async def waits_after_a_drain(*, listens: bool) -> bool:
    """Whether a connection still waits at the socket of another front-end when this one has drained."""
    with closing(ReservedPorts()) as reserved:
        own, other = listeners("127.0.0.1", 0, 2, reserved)
    server = served(own)
    server.watch([other.dup()])
    if listens:
        server.listen()
    other.listen()
    other.setblocking(False)
    with other, ExitStack() as clients:
        # Where both listen, the kernel divides them.
        for _ in range(8):
            clients.enter_context(socket.create_connection(other.getsockname(), timeout=10))
        await server.drain(0.1, lambda: False)
        try:
            other.accept()[0].close()
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize("listens", [True, False])
def test_a_front_end_that_is_not_ready_leaves_connections_to_others(listens: bool) -> None:
    # It has no models to answer with.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(waits_after_a_drain(listens=listens)) is not listens


async def answer_at_a_neglected_socket() -> bytes:
    """Return the answer that an idle front-end gives to a client of one that hangs."""
    with closing(ReservedPorts()) as reserved:
        own, other = listeners("127.0.0.1", 0, 2, reserved)
    other.listen()
    server = served(own)
    server.watch([other.dup()])
    # New connections had to wait when the last of them came; nothing has been charged since then.
    server._turns.newcomers.heavy = True
    loop = asyncio.get_running_loop()
    with other, socket.create_connection(other.getsockname(), timeout=10) as client:
        client.setblocking(False)
        await loop.sock_sendall(client, REQUEST)
        server.note_work()
        answer = await answered(client)
        await server.drain(0.1, lambda: False)
    return answer


def test_a_flood_that_is_over_keeps_nobody_at_the_socket_of_a_front_end_that_hangs() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(answer_at_a_neglected_socket()).startswith(b"HTTP/1.1 200")


REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def answered(client: socket.socket) -> bytes:
    """The next answer; empty once the server has closed."""
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 4096), 10)


async def two_servers(stack: ExitStack) -> tuple[Listener, Listener, socket.socket]:
    """Two front-ends, and the socket of a client whose connection the first one has."""
    with closing(ReservedPorts()) as reserved:
        own, other = listeners("127.0.0.1", 0, 2, reserved)
    first, second = served(own), served(stack.enter_context(other))
    first.listen()
    client = stack.enter_context(socket.create_connection(own.getsockname(), timeout=10))
    client.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(client, REQUEST)
    assert (await answered(client)).startswith(b"HTTP/1.1 200")
    return first, second, client


def settled(listener: Listener) -> Listener:
    """Its connections are not new any more."""
    for each in listener._connections:
        assert isinstance(each, Connection)
        each.usage.settle()
    return listener


def given(listener: Listener) -> list[int]:
    """Descriptors of the connections that are between two requests now."""
    descriptors = takewhile(lambda found: found is not None, listener.hand_over(5))
    return [found for found in descriptors if found is not None]


async def moved(how_long: int) -> None:
    """Move a connection; requests come before, while it is under way, and afterwards."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        first, second, client = await two_servers(stack)
        # A new connection stays: nobody knows yet what its requests cost.
        assert (await first.movable(0))[0] == 0
        settled(first)
        assert await first.movable(0) == (1, first.limits.max_connections - 1)
        assert await first.movable(time.monotonic_ns()) == (0, first.limits.max_connections - 1)
        (descriptor,) = given(first)
        await loop.sock_sendall(client, REQUEST)
        for _ in range(how_long):
            await asyncio.sleep(0)
        assert not given(first)
        second.take_over(socket.socket(fileno=descriptor))
        assert (await answered(client)).startswith(b"HTTP/1.1 200")
        await loop.sock_sendall(client, REQUEST * 2)
        received = b""
        while received.count(b"HTTP/1.1 200") < 2:
            received += await answered(client)
        # It is not new there, and does not go back at once.
        (connection,) = second._connections
        assert isinstance(connection, Connection)
        assert connection.can_move
        assert (await second.movable(0))[0] == 0
        await first.drain(1.0, lambda: True)
        await second.drain(1.0, lambda: True)
        assert await answered(client) == b""


@pytest.mark.parametrize("how_long", [0, 1, 50])
@pytest.mark.parametrize("loop", [uvloop.new_event_loop, thorough(asyncio.new_event_loop)])
def test_a_connection_moves_between_two_requests(loop: Callable[[], asyncio.AbstractEventLoop], how_long: int) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(moved(how_long))


async def kept(sent: bytes) -> None:
    """A connection of which bytes have come already is not moved, and is answered where it is."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        first, second, client = await two_servers(stack)
        settled(first)
        await loop.sock_sendall(client, sent[:-1])
        while not any(cast(Connection, each).parser.in_message for each in first._connections):
            await asyncio.sleep(0.001)
        assert not given(first)
        await loop.sock_sendall(client, sent[-1:])
        assert (await answered(client)).startswith(b"HTTP/1.1 200")
        await first.drain(1.0, lambda: True)
        # A drain answers what it has, and gives nothing away.
        assert not given(first)
        await second.drain(1.0, lambda: True)


def test_a_connection_is_handed_over_after_the_request_that_is_being_answered() -> None:
    async def later() -> None:
        with ExitStack() as stack:
            first, second, client = await two_servers(stack)
            settled(first)
            client.send(REQUEST[:10])
            while not any(cast(Connection, each).parser.in_message for each in first._connections):
                await asyncio.sleep(0.001)
            assert (await first.movable(0))[0] == 1
            handed = first.hand_over(1)
            assert next(handed) is None
            client.send(REQUEST[10:])
            assert (await answered(client)).startswith(b"HTTP/1.1 200")
            descriptor = next(handed)
            assert descriptor is not None
            second.take_over(socket.socket(fileno=descriptor))
            client.send(REQUEST)
            assert (await answered(client)).startswith(b"HTTP/1.1 200")
            await first.drain(1.0, lambda: True)
            await second.drain(1.0, lambda: True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(later())


@pytest.mark.parametrize("sent", [REQUEST, thorough(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody")])
def test_half_a_request_stays_where_it_is(sent: bytes) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(kept(sent))


def test_a_front_end_without_descriptors_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_left() -> None:
        with ExitStack() as stack:
            first, second, client = await two_servers(stack)
            with monkeypatch.context() as patched:
                patched.setattr(listener_module, "_accepted", fails)
                stack.enter_context(socket.create_connection(client.getpeername(), timeout=10))
                while (await first.movable(0))[1]:
                    await asyncio.sleep(0.001)
            await first.drain(1.0, lambda: True)
            await second.drain(1.0, lambda: True)

    def fails(listener: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(none_left(), 10))


def test_a_drain_closes_a_connection_that_comes_after_the_idle_ones_were_closed() -> None:
    async def late() -> None:
        with ExitStack() as stack:
            first, second, client = await two_servers(stack)
            (descriptor,) = given(settled(first))
            over = asyncio.Event()
            # Another connection, in the middle of a request, keeps the drain from ending.
            with socket.create_server(("127.0.0.1", 0)) as server:
                ours = stack.enter_context(socket.create_connection(server.getsockname(), timeout=10))
                second.take_over(server.accept()[0])
            ours.send(REQUEST[:10])
            while not any(cast(Connection, each).parser.in_message for each in second._connections):
                await asyncio.sleep(0.001)
            drain = asyncio.create_task(second.drain(30.0, over.is_set))
            await asyncio.sleep(3 * GRACE_S)
            second.take_over(socket.socket(fileno=descriptor))
            assert await answered(client) == b""
            assert not drain.done()
            over.set()
            await drain
            await first.drain(1.0, lambda: True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(late())


def test_a_drain_ends_a_hand_over_that_has_begun() -> None:
    async def begun() -> None:
        with ExitStack() as stack:
            first, second, _ = await two_servers(stack)
            stack.enter_context(socket.create_connection(first.listener.getsockname(), timeout=10))
            while len(first._connections) < 2:
                await asyncio.sleep(0.001)
            handed = settled(first).hand_over(5)
            os.close(next(handed) or -1)
            first.close_after_next()
            assert next(handed, None) is None
            await first.drain(1.0, lambda: True)
            await second.drain(1.0, lambda: True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(begun())


def test_a_client_that_is_gone_is_not_taken_over() -> None:
    async def gone() -> None:
        with ExitStack() as stack:
            first, second, client = await two_servers(stack)
            (descriptor,) = given(settled(first))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            taken = socket.socket(fileno=descriptor)
            while True:
                try:
                    taken.getpeername()
                except OSError:
                    break
                await asyncio.sleep(0.001)
            second.take_over(taken)
            assert taken.fileno() < 0
            assert not second._connections
            await first.drain(1.0, lambda: True)
            await second.drain(1.0, lambda: True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(gone())
