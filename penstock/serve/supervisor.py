"""Starts engines and front-ends, watches them, starts again what dies, and drains at the end. It loads no torch.

    supervisor ── pair of sockets ── engines         torch, the networks, the tables' engine columns
        └──────── pair of sockets ── front-ends      sockets, parsing, decode, reply
    engines ══ slot tables in shared memory, and a wake-up for each ══ front-ends

The listening sockets are the supervisor's, so that what waits in them outlives a front-end. A child is killed by the
kernel when the supervisor is gone, however it went, and shared memory dies with the last process that holds it.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from typing import Any, final

from penstock.core.errors import EngineLost, PenstockError, RequestError, ServeError
from penstock.serve.child import Child
from penstock.serve.http_server import BACKLOG, free_grpc_port, listeners, url_of
from penstock.serve.messages import (
    Alive,
    Change,
    Done,
    Drain,
    Failed,
    Listen,
    Loaded,
    Lose,
    Message,
    Order,
    Retire,
    Retired,
    StandBack,
    StandIn,
    States,
    Unfit,
    Unload,
)
from penstock.serve.models import ModelState
from penstock.serve.repository import Memory, ModelRepository
from penstock.serve.settings import Settings

log = logging.getLogger(__name__)

# A front-end ends itself once it has drained; so long after that it is killed.
OVERTIME_S = 2.0
ENGINE_ENDS_S = 3.0


def supervise(settings: Settings, runner: asyncio.Runner) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        PenstockError: A bundle cannot be loaded, a network is slower than the budget, or the port is taken.
    """
    sockets = listeners(settings.host, settings.port, settings.frontend_processes)
    settings = replace(settings, grpc_port=free_grpc_port(settings))
    runner.run(_supervise(settings, sockets))


async def _supervise(settings: Settings, sockets: list[socket.socket]) -> None:
    supervisor = _Supervisor(settings, sockets)
    try:
        await supervisor.run()
    finally:
        supervisor.kill()


@final
class _Supervisor:
    def __init__(self, settings: Settings, sockets: list[socket.socket]) -> None:
        self._settings = settings
        self._sockets = sockets
        count = len(sockets)
        # What wakes each engine and each front-end; all made here, so that they outlive who uses them.
        engine_wakes, wakes = _eventfds(len(settings.devices)), _eventfds(count)
        self._repository = ModelRepository(settings.bundles, settings.models, self, self)
        self._stop = asyncio.Event()
        self._failed = ""
        self._signals = 0
        # Who was asked what, by the kind of message and its key.
        self._waiting: dict[tuple[Child, type[Message], int], asyncio.Future[tuple[Message, list[int]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening = False
        # Who takes a dead front-end's connections, by the dead one's index.
        self._stand_ins: dict[int, Child] = {}
        self._tables: dict[int, tuple[Loaded, int]] = {}
        # Of these tables, those that front-ends work on.
        self._shown: set[int] = set()
        self._engines = [
            Child(role, settings, [wake, *wakes], self._heard, self._engine_lost, lambda child: None)
            for role, wake in zip(engine_roles(settings.devices), engine_wakes, strict=True)
        ]
        self._frontends = [
            Child(
                f"front-end {index}",
                settings,
                [*engine_wakes, wakes[index], sockets[index].fileno()],
                self._heard,
                self._frontend_lost,
                self._frontend_back,
            )
            for index in range(count)
        ]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        for child in (*self._engines, *self._frontends):
            child.start()
        loading = loop.create_task(self._first_load())
        stopping = loop.create_task(self._stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not self._failed and loading.done():
            loading.result()
        await stopping
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        if self._failed:
            raise ServeError(self._failed)
        await self._drain()

    async def _first_load(self) -> None:
        await self._repository.load_all()
        self._listening = True
        for listener in self._sockets:
            # The front-ends begin when they read of it; who connects at once, told by the line below, waits for them.
            listener.listen(BACKLOG)
        for child in self._frontends:
            child.send(Listen())
        names = ", ".join(dict.fromkeys(loaded.order.name for loaded, _ in self._repository.loaded))
        print(f"Serving {names} at {url_of(self._sockets[0], self._settings.tls_certificate is not None)}", flush=True)
        if self._settings.grpc_port is not None:
            print(f"Serving {names} by gRPC on port {self._settings.grpc_port}", flush=True)

    async def _drain(self) -> None:
        # A socket of ours that nobody accepts from would still be given connections.
        for listener in self._sockets:
            listener.close()
        for child in (*self._engines, *self._frontends):
            child.wanted = False
        for child in self._frontends:
            child.send(Drain())
        allowed_s = self._settings.drain_s + OVERTIME_S
        ends = [asyncio.create_task(child.ended()) for child in self._frontends]
        hurried = asyncio.create_task(self._hurried())
        await asyncio.wait((asyncio.gather(*ends), hurried), timeout=allowed_s, return_when=asyncio.FIRST_COMPLETED)
        for engine in self._engines:
            engine.close()
        ends = [asyncio.create_task(engine.ended()) for engine in self._engines]
        await asyncio.wait((asyncio.gather(*ends), hurried), timeout=ENGINE_ENDS_S, return_when=asyncio.FIRST_COMPLETED)

    async def _hurried(self) -> None:
        while self._signals < 2:
            await asyncio.sleep(0.02)

    def kill(self) -> None:
        """Leave no child behind."""
        for child in (*self._frontends, *self._engines):
            child.wanted = False
            child.kill()

    @property
    def engines(self) -> tuple[int, ...]:
        """`EngineSide`'s."""
        # At the start of the server all are waited for, later none that may never be ready.
        there = (
            index for index, child in enumerate(self._engines) if child.alive and (child.ready or child.starts == 1)
        )
        return tuple(there)

    async def load(self, order: Order, engine: int) -> tuple[Loaded, Memory]:
        """`EngineSide`'s."""
        child = self._engines[engine]
        if not child.alive:
            raise EngineLost("the engine's process is being started again.")
        starts = child.starts
        answer, descriptors = await self._ask(child, order, order.key)
        assert isinstance(answer, Loaded), answer
        if not child.alive or child.starts != starts:
            os.close(descriptors[0])
            raise EngineLost("the engine's process ended when it had loaded; its log says why.")
        self._tables[order.key] = answer, descriptors[0]
        return answer, descriptors[0]

    async def unload(self, key: int) -> None:
        """`EngineSide`'s."""
        self._shown.discard(key)
        if key in self._tables:
            loaded, memory = self._tables.pop(key)
            self._engines[loaded.engine].send(Unload(key=key))
            os.close(memory)

    async def attach(self, loaded: Loaded, memory: Memory) -> None:
        """`FrontendSide`'s."""
        assert isinstance(memory, int), memory
        key = loaded.order.key
        if key in self._tables:
            self._shown.add(key)
            asked = [self._ask(child, loaded, key, (memory,)) for child in self._frontends if child.alive]
            await asyncio.gather(*asked)
        if key not in self._tables:
            raise EngineLost("the engine's process ended when it had loaded; its log says why.")

    async def retire(self, key: int) -> None:
        """`FrontendSide`'s."""
        self._shown.discard(key)
        await asyncio.gather(*(self._ask(child, Retire(key=key), key) for child in self._frontends if child.alive))

    def tell(self, states: tuple[ModelState, ...]) -> None:
        """`FrontendSide`'s."""
        for child in self._frontends:
            child.send(States(models=states))

    def _ask(
        self, child: Child, message: Message, key: int, descriptors: tuple[int, ...] = ()
    ) -> Awaitable[tuple[Message, list[int]]]:
        # Sent now and not when it is awaited: what a child hears stays in the order in which things happened.
        future: asyncio.Future[tuple[Message, list[int]]] = asyncio.get_running_loop().create_future()
        self._waiting[child, type(message), key] = future
        child.send(message, descriptors)
        return future

    def _heard(self, child: Child, message: Message, descriptors: list[int]) -> None:
        match message:
            case Alive():
                back = not child.ready and child.starts > 1
                child.heard()
                self._arrange_stand_ins()
                if back and child in self._engines:
                    self._run(self._repository.restore(self._engines.index(child)))
            case Change():
                self._run(self._change(child, message))
            case Loaded(order=order):
                self._answer(child, Order, order.key, message, descriptors)
            case Done(key=key):
                self._answer(child, Loaded, key, message, [])
            case Retired(key=key):
                self._answer(child, Retire, key, message, [])
            case Failed(key=key, error=error):
                asked = Order if child in self._engines else Loaded
                future = self._waiting.pop((child, asked, key), None)
                if future is None or future.done():
                    log.error("%s does not serve a model: %s", child.role, error)
                else:
                    which = f"{child.role}: " if len(self._engines) > 1 and asked is Order else ""
                    future.set_exception(ServeError(which + error))
            case Unfit(error=error):
                child.why = error
            case _:
                raise AssertionError(message)

    def _answer(self, child: Child, asked: type[Message], key: int, message: Message, descriptors: list[int]) -> None:
        future = self._waiting.pop((child, asked, key), None)
        if future is not None and not future.done():
            future.set_result((message, descriptors))
        else:
            for descriptor in descriptors:
                os.close(descriptor)

    async def _change(self, child: Child, change: Change) -> None:
        """A client of a front-end asked to load or to unload a model."""
        do = self._repository.unload if change.unload else self._repository.load
        starts = child.starts
        answer: Message = Done(key=change.token)
        try:
            await do(change.name)
        except (PenstockError, OSError) as error:
            status = error.status if isinstance(error, RequestError) else RequestError.status
            answer = Failed(key=change.token, error=str(error), status=status)
        # Another process that plays the same part did not ask.
        if child.starts == starts:
            child.send(answer)

    def _frontend_lost(self, child: Child) -> None:
        # What was asked of it counts as done: the next one begins with all that is loaded.
        for key, future in self._forgotten(child):
            future.set_result((Done(key=key), []))
        self._fail_start(child)
        self._stand_ins = {index: other for index, other in self._stand_ins.items() if other is not child}
        self._arrange_stand_ins()

    def _engine_lost(self, child: Child) -> None:
        engine = self._engines.index(child)
        for frontend in self._frontends:
            frontend.send(Lose(engine=engine))
        for _, future in self._forgotten(child):
            future.set_exception(EngineLost("the engine's process ended while it loaded; its log says why."))
        for key, (loaded, memory) in list(self._tables.items()):
            if loaded.engine == engine:
                os.close(memory)
                del self._tables[key]
                self._shown.discard(key)
        self._repository.lose(engine)
        self._fail_start(child)

    def _forgotten(self, child: Child) -> list[tuple[int, asyncio.Future[tuple[Message, list[int]]]]]:
        """What was asked of a process that is gone, by its key."""
        asked = [each for each in self._waiting if each[0] is child]
        futures = [(each[2], self._waiting.pop(each)) for each in asked]
        return [(key, future) for key, future in futures if not future.done()]

    def _fail_start(self, child: Child) -> None:
        if not self._listening and child.wanted:
            child.wanted = False
            why = child.why or f"the process of {child.role} ended while the server started; its log says why."
            self._failed = self._failed or why
            self._stop.set()

    def _arrange_stand_ins(self) -> None:
        """Let somebody take the connections that wait for a front-end that is not there, as long as it is not."""
        there = [child for child in self._frontends if child.ready]
        if not self._listening or self._stop.is_set() or not there:
            return
        for index, child in enumerate(self._frontends):
            stand_in = self._stand_ins.get(index)
            if child.ready and stand_in is not None:
                stand_in.send(StandBack(index=index))
                del self._stand_ins[index]
            elif not child.ready and stand_in is None:
                there[0].send(StandIn(index=index), (self._sockets[index].fileno(),))
                self._stand_ins[index] = there[0]

    def _frontend_back(self, child: Child) -> None:
        # All at once, before anything that happens from now on: it hears of that in its order.
        child.send(States(models=self._repository.states))
        for key, (loaded, memory) in self._tables.items():
            if key in self._shown:
                child.send(loaded, (memory,))
        child.send(Listen())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _signalled(self) -> None:
        self._signals += 1
        self._stop.set()


def engine_roles(devices: tuple[str, ...]) -> list[str]:
    """What the engines are called, in processes and in logs."""
    return ["engine"] if len(devices) == 1 else [f"engine {index} on {name}" for index, name in enumerate(devices)]


def _eventfds(count: int) -> list[int]:
    return [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(count)]
