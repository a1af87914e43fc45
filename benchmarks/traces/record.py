"""Record the arrivals of clients that draw on a page, each with one request in flight and the latest picture next.

    python benchmarks/traces/record.py > benchmarks/traces/drawing.csv

A server on loopback records the arrivals. Each client draws strokes of a random length, sends a picture as soon as the
last one is answered, and pauses between strokes.
"""

import asyncio
import random
import sys
import time

CLIENTS = 24
SECONDS = 12.0
ANSWER_S = 0.012
BUDGET_MS = 50
SEED = 0


async def main() -> None:
    arrivals: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            arrivals.append(time.monotonic())
            await asyncio.sleep(ANSWER_S)
            writer.write(b"ok\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await asyncio.gather(*(draw(port, random.Random(SEED + client)) for client in range(CLIENTS)))
    server.close()
    print(f"# {CLIENTS} clients that draw on a page for {SECONDS:g} s: {sys.argv[0]}")
    print("arrival_s,budget_ms")
    first = min(arrivals)
    print("\n".join(f"{arrival - first:.6f},{BUDGET_MS}" for arrival in sorted(arrivals)))


async def draw(port: int, chance: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        await asyncio.sleep(chance.expovariate(1 / 1.2))
        stroke_end = time.monotonic() + chance.lognormvariate(-1.0, 0.5)
        while time.monotonic() < min(stroke_end, end):
            writer.write(b"picture\n")
            await reader.readline()
            await asyncio.sleep(chance.uniform(0.004, 0.02))
    writer.close()


if __name__ == "__main__":
    asyncio.run(main())
