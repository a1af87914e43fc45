"""What a child of the supervisor runs: `python -m penstock.serve.process`, an engine or a front-end."""

import asyncio
import ctypes
import itertools
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, final

import uvloop

from penstock.core.errors import InvalidInput, Overloaded, PenstockError, RequestError, UnknownRoute
from penstock.serve.front import Front
from penstock.serve.logs import set_up_logging
from penstock.serve.messages import (
    Change,
    Channel,
    Done,
    Drain,
    Failed,
    Listen,
    Loaded,
    Lose,
    Message,
    Retire,
    Retired,
    StandBack,
    StandIn,
    States,
    Unfit,
    beat,
    encoded,
)
from penstock.serve.served import RESTART_S
from penstock.serve.settings import Settings
from penstock.serve.turns import Turns

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Play the role that the command line tells."""
    role, parent, channel, descriptors = json.loads(sys.argv[1])
    # Whatever becomes of the supervisor, nothing of it stays behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # Who ends a whole group or control group at once still gets a drain: the supervisor says when to leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = Settings.from_json(sys.argv[2])
    set_up_logging(settings, role)
    end = socket.socket(fileno=channel)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        play = _engine if role.startswith("engine") else _front
        try:
            runner.run(play(role, settings, end, descriptors))
        except PenstockError as error:
            end.send(encoded(Unfit(error=str(error))))
            sys.exit(2)


async def _engine(role: str, settings: Settings, end: socket.socket, wakes: list[int]) -> None:
    # The only one of the two that loads torch.
    from penstock.serve.engine_process import EngineProcess

    await EngineProcess(settings, end, number_of(role), wakes[0], wakes[1:]).run()


async def _front(role: str, settings: Settings, end: socket.socket, descriptors: list[int]) -> None:
    *engines, own, listener = descriptors
    await _FrontProcess(settings, end, number_of(role), engines, own, socket.socket(fileno=listener)).run()


@final
class _FrontProcess:
    def __init__(
        self, settings: Settings, end: socket.socket, index: int, engines: list[int], own: int, listener: socket.socket
    ) -> None:
        loop = asyncio.get_running_loop()
        self._own = own
        # What wakes the engines for which there is something new.
        self._asleep: set[int] = set()
        self._turns = Turns(
            self._work,
            call_soon=loop.call_soon,
            clock_ns=time.monotonic_ns,
            longest_read_ns=settings.longest_read_ns,
        )
        wakes = [partial(self._wake, engine) for engine in engines]
        self._front = Front(settings, listener, self, index=index, wakes=wakes, arrived=self._turns.arrived)
        self._changes: dict[int, asyncio.Future[None]] = {}
        self._tokens = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._drained = asyncio.Event()
        self._channel = Channel(end, self._heard, self._drained.set)
        loop.add_reader(own, self._woken)

    async def run(self) -> None:
        beating = asyncio.create_task(beat(self._channel))
        await self._drained.wait()
        beating.cancel()

    async def load(self, name: str) -> None:
        """`Repository`'s: the supervisor does it."""
        await self._change(name, unload=False)

    async def unload(self, name: str) -> None:
        """`Repository`'s: the supervisor does it."""
        await self._change(name, unload=True)

    async def _change(self, name: str, *, unload: bool) -> None:
        token = next(self._tokens)
        future = self._changes[token] = asyncio.get_running_loop().create_future()
        self._channel.send(Change(token=token, name=name, unload=unload))
        try:
            await future
        finally:
            del self._changes[token]

    def _wake(self, engine: int) -> None:
        self._asleep.add(engine)
        self._turns.wake()

    def _woken(self) -> None:
        os.eventfd_read(self._own)
        self._turns.wake()

    def _work(self) -> int:
        # One wake-up of each engine for all that this poll brought.
        woken = len(self._asleep)
        while self._asleep:
            os.eventfd_write(self._asleep.pop(), 1)
        return woken + self._front.attachments.collect()

    def _heard(self, message: Message, descriptors: list[int]) -> None:
        front = self._front
        match message:
            case Loaded():
                self._attach(message, descriptors[0])
            case Retire(key=key):
                self._run(self._retire(key))
            case Lose(engine=engine):
                front.lose_engine(engine)
            case States(models=models):
                front.models.tell(models)
            case Listen():
                self._run(front.listen())
            case StandIn(index=index):
                front.stand_in(index, socket.socket(fileno=descriptors[0]))
            case StandBack(index=index):
                front.stand_back(index)
            case Drain():
                self._run(self._drain())
            case Done(key=token):
                self._changes[token].set_result(None)
            case Failed(key=token):
                self._changes[token].set_exception(_refusal(message))
            case _:
                raise AssertionError(message)

    def _attach(self, loaded: Loaded, descriptor: int) -> None:
        key = loaded.order.key
        try:
            self._front.attach(loaded, descriptor)
        except Exception as error:
            # The one place at which a front-end takes in other people's code; whatever it raises, the others live on.
            if not isinstance(error, PenstockError):
                log.exception("%s cannot be attached", loaded.order.bundle)
            self._channel.send(Failed(key=key, error=str(error)))
        else:
            self._channel.send(Done(key=key))
        finally:
            os.close(descriptor)

    async def _retire(self, key: int) -> None:
        await self._front.retire(key)
        self._channel.send(Retired(key=key))

    async def _drain(self) -> None:
        await self._front.drain(lambda: False)
        self._drained.set()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def number_of(role: str) -> int:
    """Which of its kind plays a role: 1 for `front-end 1` and `engine 1 on cuda:1`, 0 for `engine`."""
    words = role.split()
    return int(words[1]) if len(words) > 1 else 0


def _refusal(failed: Failed) -> RequestError:
    match failed.status:
        case UnknownRoute.status:
            return UnknownRoute(failed.error)
        case Overloaded.status:
            return Overloaded(failed.error, RESTART_S)
        case _:
            return InvalidInput(failed.error)


if __name__ == "__main__":
    main()
