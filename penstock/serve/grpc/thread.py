"""A gRPC server in a thread and loop of its own, beside a loop in which an engine runs its batches.

An engine's loop polls once a batch. HTTP needs one poll, but gRPC needs several for each call and accepts one call
after the other: in the same loop, a batch would hold hardly more than one request.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

import uvloop

from penstock.core.errors import ServeError

# `stop` of a server that accepts calls, see `GrpcServer`; this file does not need the packages of penstock-nn[grpc].
Stop = Callable[[float | None], Coroutine[Any, Any, None]]

# Time for cancelled calls to end by themselves.
CUT_OFF_S = 0.5


@final
@dataclass(eq=False)
class GrpcThread:
    """Runs a gRPC server beside the running loop of the models.

    Args:
        serve: Makes and starts the server in the new thread's loop; its `home` is the running loop.
    """

    serve: Callable[[], Coroutine[Any, Any, Stop]]

    def __post_init__(self) -> None:
        self._started: Future[tuple[Stop, asyncio.AbstractEventLoop]] = Future()
        self._over = asyncio.Event()
        self._home = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="grpc", daemon=True)

    async def start(self) -> None:
        """Accept calls.

        Raises:
            ServeError: The port is taken.
        """
        self._thread.start()
        await asyncio.wrap_future(self._started)

    async def drain(self, grace_s: float) -> None:
        """Reject new calls, answer the accepted ones, and cancel those that are left after so many seconds."""
        stop, loop = self._started.result()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(stop(grace_s), loop))

    async def close(self) -> None:
        """Cancel the remaining calls and end the thread; a running `drain` ends too."""
        _, loop = self._started.result()
        loop.call_soon_threadsafe(self._over.set)
        # The running loop goes on meanwhile: cancelled calls cancel their rows in it.
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        try:
            stop = await self.serve()
            self._started.set_result((stop, asyncio.get_running_loop()))
        except ServeError as error:
            self._started.set_exception(error)
            return
        finally:
            # The thread logs any other error itself; `start` must not wait for ever.
            self._started.cancel()
        await self._over.wait()
        await stop(None)
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            # grpc has cancelled them already; a second cancel logs a traceback for each.
            _, left = await asyncio.wait(calls, timeout=CUT_OFF_S)
            for call in left:
                call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        # The home loop may hand answers to this one until it has cancelled the rows of these calls.
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._home))
