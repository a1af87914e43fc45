"""One process that serves: engine and front-end share an event loop, the tables are in its private memory."""

import asyncio
import logging
import os
import signal
import socket
import time
from dataclasses import replace
from typing import final

from penstock.core.errors import DeviceLost, PenstockError, ServeError
from penstock.serve.engine_host import DEVICE_LOST, EngineHost
from penstock.serve.front import Front
from penstock.serve.http_server import free_grpc_port, listeners, url_of
from penstock.serve.messages import Loaded, Order
from penstock.serve.models import ModelState
from penstock.serve.repository import Memory, ModelRepository
from penstock.serve.settings import Settings
from penstock.serve.turns import Turns

log = logging.getLogger(__name__)


def serve_single(settings: Settings, runner: asyncio.Runner) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        PenstockError: A bundle cannot be loaded, a network is slower than the budget, or the port is taken.
    """
    (listener,) = listeners(settings.host, settings.port, 1)
    settings = replace(settings, grpc_port=free_grpc_port(settings))
    runner.run(_serve(settings, listener))


async def _serve(settings: Settings, listener: socket.socket) -> None:
    await _Single(settings, listener).run()


@final
class _Single:
    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._settings = settings
        self._listener = listener
        self._host = EngineHost(settings, shared=False)
        self._turns = Turns(
            self._work,
            call_soon=loop.call_soon,
            clock_ns=time.monotonic_ns,
            longest_read_ns=settings.longest_read_ns,
        )
        self._repository = ModelRepository(settings.bundles, settings.models, self, self)
        self._front = Front(
            settings,
            listener,
            self._repository,
            index=0,
            wakes=[self._turns.wake],
            arrived=self._turns.arrived,
        )
        self._stop = asyncio.Event()
        self._signals = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        await self._repository.load_all()
        await self._front.listen()
        names = ", ".join(served.name for served in self._front.models)
        url = url_of(self._listener, self._settings.tls_certificate is not None)
        print(f"Serving {names} at {url}", flush=True)
        if self._settings.grpc_port is not None:
            print(f"Serving {names} by gRPC on port {self._settings.grpc_port}", flush=True)
        await self._stop.wait()
        await self._front.drain(lambda: self._signals > 1)

    def _work(self) -> int:
        try:
            ticked = self._host.engines.tick()
        except DeviceLost as error:
            # There is no supervisor to start another engine: whoever started the server does that.
            log.critical("%s", error)
            os._exit(DEVICE_LOST)
        if ticked is None:
            return 0
        key, chosen = ticked
        answered = chosen.run.size + chosen.expire.size
        frontend = self._front.attachments.frontend(key)
        if not answered or frontend is None:
            return answered
        start_ns = time.monotonic_ns()
        frontend.collect()
        # Answering is the engine's own time here, so a batch takes that much longer.
        self._host.by_key[key].observe_handling((time.monotonic_ns() - start_ns) / answered)
        frontend.refresh(self._turns.reading_share)
        return answered

    @property
    def engines(self) -> tuple[int, ...]:
        """`EngineSide`'s."""
        return (0,)

    async def load(self, order: Order, engine: int) -> tuple[Loaded, Memory]:
        """`EngineSide`'s."""
        try:
            loaded, table, _ = await self._host.load(order)
        except PenstockError:
            raise
        except Exception as error:
            # The networks are other people's: whatever one of them raises must not leave its clients waiting.
            log.exception("%s cannot be loaded", order.bundle)
            raise ServeError(f"{order.bundle}: {type(error).__name__}: {error}") from error
        return loaded, table

    async def unload(self, key: int) -> None:
        """`EngineSide`'s."""
        self._host.unload(key)

    async def attach(self, loaded: Loaded, memory: Memory) -> None:
        """`FrontendSide`'s."""
        self._front.attach(loaded, memory)

    async def retire(self, key: int) -> None:
        """`FrontendSide`'s."""
        await self._front.retire(key)

    def tell(self, states: tuple[ModelState, ...]) -> None:
        """`FrontendSide`'s."""
        self._front.models.tell(states)

    def _signalled(self) -> None:
        self._signals += 1
        self._front.refuse_more()
        if self._signals > 1:
            self._front.abort()
        self._stop.set()
