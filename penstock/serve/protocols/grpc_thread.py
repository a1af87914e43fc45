"""A gRPC server in a thread and loop of its own, beside a loop in which an engine runs its batches.

Such a loop polls once a batch. HTTP is read in one poll, but gRPC takes several for each call and accepts one call
after the other: in the same loop, hardly more than one request would come into each batch.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, final

import uvloop

from penstock.core.errors import ServeError


class Server(Protocol):
    """What the thread runs, see `GrpcServer`. This file does without the packages of penstock[grpc]."""

    port: int

    async def start(self) -> None:
        """Take calls from now on."""
        ...

    async def stop(self, grace_s: float | None) -> None:
        """Take no new calls and answer those that there are."""
        ...


# For so long calls that were cut off may take to end by themselves.
CUT_OFF_S = 0.5


@final
class GrpcThread:
    """Runs a gRPC server beside the running loop, in which the models are.

    Args:
        make: Makes the server, called in the new thread's loop; its `home` is the loop that runs now.
    """

    def __init__(self, make: Callable[[], Server]) -> None:
        self._make = make
        self._started: Future[tuple[Server, asyncio.AbstractEventLoop]] = Future()
        self._over = asyncio.Event()
        self._home = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="grpc", daemon=True)

    async def start(self) -> int:
        """Take calls from now on; gives the port.

        Raises:
            ServeError: The port is taken.
        """
        self._thread.start()
        server, _ = await asyncio.wrap_future(self._started)
        return server.port

    async def drain(self, grace_s: float) -> None:
        """Take no new calls and answer those that there are; after so many seconds what is left is cancelled."""
        server, loop = self._started.result()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.stop(grace_s), loop))

    async def close(self) -> None:
        """Cancel what is left and end the thread; a `drain` that is under way ends too."""
        _, loop = self._started.result()
        loop.call_soon_threadsafe(self._over.set)
        # The running loop goes on meanwhile: calls that are cancelled take their rows back in it.
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        try:
            server = self._make()
            await server.start()
            self._started.set_result((server, asyncio.get_running_loop()))
        except ServeError as error:
            self._started.set_exception(error)
            return
        finally:
            # Whatever else went wrong, the thread says it itself; nobody must wait for it.
            self._started.cancel()
        await self._over.wait()
        await server.stop(None)
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            # grpc has cancelled them already; who does it twice gets a traceback of grpc's for each.
            _, left = await asyncio.wait(calls, timeout=CUT_OFF_S)
            for call in left:
                call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        # Until the home loop has taken back what these calls had put in, it may hand answers to this one.
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._home))
