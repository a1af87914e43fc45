"""An engine in a process of its own: tables in shared memory, a wake-up for it and one for each front-end."""

import asyncio
import gc
import logging
import os
import socket
import time
from typing import final

import numpy as np

from penstock.core.errors import DeviceLost, PenstockError
from penstock.serve.engine_host import DEVICE_LOST, EngineHost
from penstock.serve.messages import Channel, Failed, Message, Order, Unload, beat
from penstock.serve.settings import Settings
from penstock.serve.slots import SlotTable
from penstock.serve.turns import Turns

log = logging.getLogger(__name__)


@final
class EngineProcess:
    """Ticks while there is work, and loads what the supervisor orders.

    Args:
        settings: How to serve.
        end: The socket to the supervisor.
        index: Which of the engines this is.
        own: The eventfd that wakes this process.
        frontends: The eventfds that wake the front-ends, in their order.
    """

    def __init__(self, settings: Settings, end: socket.socket, index: int, own: int, frontends: list[int]) -> None:
        loop = asyncio.get_running_loop()
        self._own = own
        self._frontends = frontends
        self._host = EngineHost(settings, shared=True, index=index)
        self._tables: dict[int, SlotTable] = {}
        self._turns = Turns(self._work, call_soon=loop.call_soon, clock_ns=time.monotonic_ns)
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel = Channel(end, self._heard, self._over.set)
        loop.add_reader(own, self._woken)

    async def run(self) -> None:
        """Until the supervisor is gone."""
        beating = asyncio.create_task(beat(self._channel))
        await self._over.wait()
        beating.cancel()

    def _woken(self) -> None:
        os.eventfd_read(self._own)
        self._turns.wake()

    def _work(self) -> int:
        try:
            ticked = self._host.engines.tick()
        except DeviceLost as error:
            # What waits is answered by the front-ends once this process is gone; the supervisor starts another.
            log.critical("%s", error)
            os._exit(DEVICE_LOST)
        if ticked is None:
            return 0
        key, chosen = ticked
        answered = chosen.run.size + chosen.expire.size
        if answered:
            each = self._tables[key].layout.slots_each
            told = np.unique(np.concatenate([chosen.run, chosen.expire]) // each)
            for index in told.tolist():
                os.eventfd_write(self._frontends[index], 1)
        return answered

    def _heard(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case Order():
                task = asyncio.get_running_loop().create_task(self._load(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Unload(key=key):
                self._host.unload(key)
                self._tables.pop(key, None)
            case _:
                raise AssertionError(message)

    async def _load(self, order: Order) -> None:
        try:
            loaded, table, descriptor = await self._host.load(order)
        except PenstockError as error:
            self._channel.send(Failed(key=order.key, error=str(error)))
            return
        except Exception as error:
            # The one place at which the engine takes in other people's networks; whatever they raise, it lives on.
            log.exception("%s cannot be loaded", order.bundle)
            self._channel.send(Failed(key=order.key, error=f"{order.bundle}: {type(error).__name__}: {error}"))
            return
        self._tables[order.key] = table
        # What is there now stays, and need not be gone over by the garbage collector.
        gc.collect()
        gc.freeze()
        self._channel.send(loaded, (descriptor,))
        os.close(descriptor)
