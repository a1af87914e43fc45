"""An engine in a process of its own: tables in shared memory, and an eventfd to wake it and each front-end."""

import asyncio
import gc
import logging
import os
import socket
import time
from typing import final

from penstock.core.errors import OF_BUNDLE, PenstockError
from penstock.serve.background import BackgroundTasks
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.channel import Channel, send_heartbeats
from penstock.serve.engine.model_loader import ModelLoader
from penstock.serve.idle_polling import MAX_IN_USE, IdlePolling
from penstock.serve.messages import CommandFailed, LoadModel, LoadProgress, Message, ReportUse, UnloadModel, UseUnknown
from penstock.serve.pinned_content import pinned_bundle
from penstock.serve.settings import Settings

log = logging.getLogger(__name__)


@final
class EngineProcess:
    """Runs batches while rows are ready, and loads the models that the supervisor orders.

    Args:
        settings: Settings of the server.
        end: The socket to the supervisor.
        index: Index of this engine.
        own: The eventfd that wakes this process.
        frontends: The eventfds that wake the front-ends, in their order.
    """

    def __init__(self, settings: Settings, end: socket.socket, index: int, own: int, frontends: list[int]) -> None:
        loop = asyncio.get_running_loop()
        self._own = own
        self._frontends = frontends
        self._loader = ModelLoader(settings, self._report, shared=True, index=index, wake=self._wake)
        self._batch_loop = BatchLoop(self._work, call_soon=loop.call_soon)
        stay_ns = settings.idle_poll_ns(self._loader.device)
        self._idle_polling = IdlePolling(loop.call_soon, time.monotonic_ns, stay_ns, self._look)
        self._end = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._channel = Channel(end, self._receive, self._end.set)
        loop.add_reader(own, self._woken)

    async def run(self) -> None:
        """Serve until the supervisor is gone."""
        try:
            await send_heartbeats(self._channel, self._end)
        finally:
            self._loader.close()

    def _woken(self) -> None:
        os.eventfd_read(self._own)
        self._batch_loop.wake()

    def _look(self) -> None:
        if self._loader.has_ready_rows:
            self._batch_loop.wake()

    def _wake(self, frontend: int) -> None:
        os.eventfd_write(self._frontends[frontend], 1)

    def _work(self) -> int:
        ran = self._loader.tick()
        if ran is None:
            return 0
        handled = ran[1].run.size + ran[1].expire.size
        # Without polling, as on a CPU, the slots of all tables are not counted.
        if handled and self._idle_polling.is_on:
            loader = self._loader
            if loader.is_one_shot(ran[0]) and loader.in_use <= MAX_IN_USE:
                self._idle_polling.extend()
        return handled

    def _report(self, key: int, activity: str) -> None:
        self._channel.send(LoadProgress(key=key, activity=activity))

    def _receive(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case LoadModel():
                self._tasks.start(self._load(message))
            case UnloadModel(key=key):
                self._loader.unload(key)
            case ReportUse(key=key):
                self._tasks.start(self._report_use(key))
            case _:
                raise AssertionError(message)

    async def _report_use(self, key: int) -> None:
        try:
            use = await self._loader.report_use(key)
        except Exception as error:
            # A driver may raise anything, and the supervisor waits for an answer.
            log.exception("the use of the memory cannot be measured")
            self._channel.send(UseUnknown(key=key, error=str(error) or type(error).__name__))
        else:
            self._channel.send(use)

    async def _load(self, command: LoadModel) -> None:
        try:
            loaded, _, descriptor = await self._loader.load(command)
        except PenstockError as error:
            # Who reads it knows the bundle, and not its copy.
            copy = str(pinned_bundle(command.pinned, command.bundle))
            reason = str(error).replace(copy, command.bundle)
            self._channel.send(CommandFailed(key=command.key, error=reason, of_bundle=isinstance(error, OF_BUNDLE)))
            return
        # Loaded models are long-lived: take them out of the garbage collector's reach.
        gc.collect()
        gc.freeze()
        self._channel.send(loaded, (descriptor,))
        os.close(descriptor)
