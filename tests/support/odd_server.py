"""A server with faults for tests of the load generator; it imports little, because each test spawns it."""

import asyncio
import time
from multiprocessing.connection import Connection

import numpy as np

ANSWERS = np.arange(8, dtype=np.float32).reshape(2, 4)


def serve(kind: str, ready: Connection) -> None:
    began: list[float] = []

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                which = (await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0])))[0]
                began.append(time.monotonic())
                body, status = ANSWERS[which].tobytes(), 200
                if kind == "wrong" and len(began) % 50 == 0:
                    body = (ANSWERS[which] + 1).tobytes()
                if kind == "refusing" and len(began) % 2:
                    body, status = b"{}", 503
                if kind == "breaking" and len(began) % 10 == 0:
                    writer.close()
                    return
                if kind == "stalling" and began[-1] - began[0] > 0.6:
                    time.sleep(0.5)  # the whole server stands still
                    began[0] = float("inf")
                more = b""
                if kind == "describing":
                    body, more = b"{}" + body, b"Inference-Header-Content-Length: 2\r\n"
                writer.write(b"HTTP/1.1 %d X\r\n%scontent-length: %d\r\n\r\n" % (status, more, len(body)) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(client, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())
