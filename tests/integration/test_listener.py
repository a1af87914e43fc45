"""The listening side alone, in this process, its loop turned by hand."""

import asyncio
import socket
import time
from contextlib import ExitStack, closing

import pytest
import uvloop

from penstock.serve.exchange.request import Request
from penstock.serve.exchange.request_bounds import RequestBounds
from penstock.serve.exchange.reserved_ports import ReservedPorts
from penstock.serve.exchange.response import Answer, Handlers, Response, rejected
from penstock.serve.http.listener import Listener, listeners
from penstock.serve.http.response_date import ResponseDate
from penstock.serve.settings import LimitSettings, NetworkSettings
from tests.support.clock import idle_loop


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


@pytest.mark.parametrize("turns", range(8))
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
