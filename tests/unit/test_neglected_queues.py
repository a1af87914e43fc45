"""Connections that wait at a socket whose process does not accept them."""

import asyncio
import select
import socket
from collections.abc import Generator
from contextlib import contextmanager

from penstock.serve.http.neglected_queues import LOOK_S, NeglectedQueues


@contextmanager
def _listening() -> Generator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def _connect(listener: socket.socket) -> socket.socket:
    client = socket.create_connection(listener.getsockname())
    assert select.select([listener], [], [], 5)[0]
    return client


def test_what_waits_at_two_looks_is_accepted() -> None:
    asyncio.run(_what_waits_at_two_looks_is_accepted())


async def _what_waits_at_two_looks_is_accepted() -> None:
    with _listening() as neglected, _listening() as other:
        taken: list[socket.socket] = []
        queues = NeglectedQueues((neglected, other), taken.append)
        with _connect(neglected):
            queues.note_work()
            await asyncio.sleep(1.5 * LOOK_S)
            assert not taken
            while not taken:
                await asyncio.sleep(LOOK_S)
        assert set(taken) == {neglected}


def test_what_the_owner_accepts_in_time_is_left_to_it() -> None:
    asyncio.run(_what_the_owner_accepts_in_time_is_left_to_it())


async def _what_the_owner_accepts_in_time_is_left_to_it() -> None:
    with _listening() as listener:
        taken: list[socket.socket] = []
        queues = NeglectedQueues((listener,), taken.append)
        for _ in range(5):
            with _connect(listener):
                queues.note_work()
                await asyncio.sleep(1.5 * LOOK_S)
                listener.accept()[0].close()
            queues.note_work()
            await asyncio.sleep(1.5 * LOOK_S)
        assert not taken


def test_it_rests_without_work_and_closes_after_a_last_call() -> None:
    asyncio.run(_it_rests_without_work_and_closes_after_a_last_call())


async def _it_rests_without_work_and_closes_after_a_last_call() -> None:
    with _listening() as listener:
        taken: list[socket.socket] = []
        queues = NeglectedQueues((listener,), taken.append)
        with _connect(listener):
            await asyncio.sleep(4 * LOOK_S)
            assert not taken
            queues.close(taken.append)
            assert taken == [listener]
            assert listener.fileno() < 0
            queues.note_work()
            await asyncio.sleep(4 * LOOK_S)
            assert taken == [listener]
