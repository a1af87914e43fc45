"""FastAPI under uvicorn, with the batching that its users write: a queue, and a task that empties it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request, Response

from benchmarks.peers.bundle_network import Network, peer_arguments

given = peer_arguments()
network = Network(given.bundle)
waiting: asyncio.Queue[tuple[bytes, asyncio.Future[bytes]]] = asyncio.Queue()


async def run_batches() -> None:
    while True:
        batch = [await waiting.get()]
        # One turn of the loop: every request that is readable now comes into this batch.
        await asyncio.sleep(given.max_wait_ms / 1000)
        while len(batch) < given.max_batch and not waiting.empty():
            batch.append(waiting.get_nowait())
        for (_, answered), answer in zip(batch, network.answer([body for body, _ in batch]), strict=True):
            if not answered.cancelled():
                answered.set_result(answer)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
    task = asyncio.create_task(run_batches())
    yield
    task.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/predict")
async def predict(request: Request) -> Response:
    if waiting.qsize() >= given.max_queue:
        return Response(status_code=503)
    answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    waiting.put_nowait((await request.body(), answered))
    return Response(await answered, media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=given.port, loop="uvloop", http="httptools", access_log=False)
