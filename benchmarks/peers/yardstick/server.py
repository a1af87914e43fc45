"""A batching server that a good engineer writes in an afternoon: whatever became readable is the next batch."""

import asyncio
from typing import Any, final

import httptools
import uvloop

from benchmarks.peers.bundle_network import Network, peer_arguments

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n"


@final
class Batcher:
    def __init__(self, network: Network, max_batch: int) -> None:
        self._network = network
        self._max_batch = max_batch
        self._waiting: list[tuple[Any, bytes]] = []
        self._loop = asyncio.get_running_loop()

    def add(self, transport: Any, body: bytes) -> None:
        # The loop calls back when it has read every socket that is readable now.
        if not self._waiting:
            self._loop.call_soon(self._run)
        self._waiting.append((transport, body))

    def _run(self) -> None:
        batch = self._waiting[: self._max_batch]
        del self._waiting[: self._max_batch]
        answers = self._network.answer([body for _, body in batch])
        for (transport, _), answer in zip(batch, answers, strict=True):
            transport.write(HEAD % len(answer) + answer)
        if self._waiting:
            self._loop.call_soon(self._run)


@final
class Connection(asyncio.Protocol):
    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._batcher.add(self._transport, self._body)
        self._body = b""


async def main() -> None:
    given = peer_arguments()
    batcher = Batcher(Network(given.bundle), given.max_batch)
    loop = asyncio.get_running_loop()
    # Several processes share the port; one alone must not share it with one that was left behind.
    server = await loop.create_server(
        lambda: Connection(batcher), "127.0.0.1", given.port, backlog=1024, reuse_port=given.http > 1
    )
    print(f"listening on {given.port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
