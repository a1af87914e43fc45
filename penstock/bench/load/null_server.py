"""A server that does nothing but answer, which shows the ceiling of the load generator."""

import asyncio
import multiprocessing
import os
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, final

import httptools
import uvloop


@contextmanager
def null_server(answer: bytes, cpus: frozenset[int] | None) -> Generator[int]:
    """Run the server in its own process, on the cores of the real server; gives its port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(answer, cpus, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve(answer: bytes, cpus: frozenset[int] | None, ready: Connection) -> None:
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_listen(answer, ready))


async def _listen(answer: bytes, ready: Connection) -> None:
    whole = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n" % len(answer)
        + answer
    )
    server = await asyncio.get_running_loop().create_server(lambda: _Canned(whole), "127.0.0.1", 0)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


@final
class _Canned(asyncio.Protocol):
    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._transport.write(self._answer)
