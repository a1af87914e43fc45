"""The supervisor: it starts engines and front-ends, restarts those that die, and drains at the end. It loads no torch.

    supervisor ── socket pair ── engines         torch, the networks, the tables' engine columns
        └──────── socket pair ── front-ends      sockets, parsing, decode, reply
    engines ══ slot tables in shared memory, and an eventfd for each ══ front-ends

The supervisor owns the listening sockets, so that connections in their backlog survive a front-end. The kernel kills
the children when the supervisor ends, and shared memory is freed with the last process that maps it.
"""

import asyncio
import itertools
import logging
import os
import signal
import socket
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

from penstock.core.bundle import read_manifest
from penstock.core.errors import EngineLost, InvalidInput, LoadGivenUp, PenstockError, RequestError, ServeError
from penstock.serve import messages
from penstock.serve.background import BackgroundTasks
from penstock.serve.control.backoff import REPLACED_AT_ONCE
from penstock.serve.control.bundle_preparation import BundlePreparation
from penstock.serve.control.bundle_trials import PRELOADS, BundleTrials
from penstock.serve.control.child import ChildProcess
from penstock.serve.control.fork_generation import Preload
from penstock.serve.control.fork_server import ForkServer, reap_orphans
from penstock.serve.control.lifecycle import announce, on_stop_signal, wait_to_leave
from penstock.serve.control.load_deadlines import LoadDeadlines
from penstock.serve.control.network_exports import NetworkExports
from penstock.serve.control.replica_loads import DIED_AFTER_LOAD
from penstock.serve.control.repository import ModelRepository
from penstock.serve.control.server_processes import TableMemory
from penstock.serve.exchange.response import internal_error
from penstock.serve.messages import Message, ModelLoaded
from penstock.serve.pinned_content import PinnedModels, pinned_bundle, pinned_models
from penstock.serve.settings import Settings
from penstock.serve.table.chain_counts import shared_memory

log = logging.getLogger(__name__)

# A front-end ends itself when it has drained; it is killed this long after its drain timeout.
FRONTEND_GRACE_S = 2.0
ENGINE_GRACE_S = 3.0
REAP_S = 1.0

Reply = tuple[Message, list[int]]


async def supervise(settings: Settings, sockets: list[socket.socket]) -> None:
    """Serve until SIGTERM or SIGINT, with a front-end process for each socket.

    Raises:
        PenstockError: A bundle cannot be loaded, or a network is slower than the budget.
    """
    with pinned_models(settings.models.app) as pins:
        supervisor = _Supervisor(settings, sockets, pins)
        try:
            await supervisor.run()
        finally:
            supervisor.kill()


@final
class _Supervisor:
    def __init__(self, settings: Settings, sockets: list[socket.socket], pins: PinnedModels | None = None) -> None:
        self._settings = settings
        self._sockets = sockets
        devices = settings.execution.devices
        # Made here, so that an eventfd outlives the process that it wakes.
        engine_wakes, frontend_wakes = _eventfds(len(devices)), _eventfds(len(sockets))
        self._trial_forks = ForkServer(lambda: PRELOADS)
        self._frontend_forks = ForkServer(self._preloads, has_spare=True)
        self._exports = NetworkExports(settings)
        self._trials = BundleTrials(settings, self._trial_forks, self._exports.has_failed)
        self._repository = ModelRepository(
            settings.models, self, pins=pins, preparation=BundlePreparation(self._trials.check, self._exports)
        )
        self._deadlines = LoadDeadlines(settings.limits.load_timeout_s)
        self._stop = asyncio.Event()
        self._start_error: ServeError | None = None
        # Set by the second signal.
        self._hurry = asyncio.Event()
        # Commands without a reply, by child, type and key.
        self._pending: dict[tuple[ChildProcess, type[Message], int], asyncio.Future[Reply]] = {}
        self._tasks = BackgroundTasks()
        self._reports = itertools.count()
        # Whether every model of the start is loaded.
        self._started = False
        # Whether the front-ends are not ready any more, before they drain.
        self._leaving = False
        # The front-end that accepts the connections of a dead or stalled one, by the index of that one.
        self._takeovers: dict[int, ChildProcess] = {}
        self._tables: dict[int, tuple[ModelLoaded, int]] = {}
        self._pins = pins
        # What an engine loads, by the key of the table, and what a front-end imports to attach it.
        self._loads: dict[int, messages.LoadModel] = {}
        self._importing: dict[ChildProcess, ModelLoaded] = {}
        # The chains, and the descriptors of their counts.
        self._chains: list[tuple[messages.LoadChain, int]] = []
        # Keys of the tables that front-ends attach, in the order of the commands: a name has the last of its tables.
        self._attached: dict[int, None] = {}
        engine = partial(
            ChildProcess, settings=settings, on_message=self._receive, on_exit=self._engine_exited, on_restart=None
        )
        self._engines = [
            engine(name, index, descriptors=[engine_wakes[index], *frontend_wakes])
            for index, name in enumerate(engine_names(devices))
        ]
        frontend = partial(
            engine,
            on_exit=self._frontend_exited,
            on_restart=self._frontend_restarted,
            forks=self._frontend_forks,
            at_once=REPLACED_AT_ONCE,
            on_stall=self._frontend_stalled,
        )
        listening = [listener.fileno() for listener in sockets]
        self._frontends = [
            frontend(f"front-end {index}", index, descriptors=[*engine_wakes, wake, *listening])
            for index, wake in enumerate(frontend_wakes)
        ]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        on_stop_signal(self._signalled)
        for child in (*self._engines, *self._frontends):
            child.start()
        for child in self._frontends:
            child.send(messages.StartListening())
        self._tasks.start(self._reap())
        loading = loop.create_task(self._first_load())
        stopping = loop.create_task(self._stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not self._start_error and loading.done():
            loading.result()
        await stopping
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        if self._start_error:
            raise self._start_error
        # A server that has not started has nothing to answer.
        if self._started:
            await self._leave()
            await self._drain()

    async def _first_load(self) -> None:
        await self._repository.load_all()
        # Clients that wait for the announcement must find the server ready, and its port of gRPC open.
        started = messages.ServerStarted()
        await asyncio.gather(*(self._command(child, started, 0) for child in self._frontends if child.alive))
        if self._start_error:
            return
        self._started = True
        announce(self._repository.announced, self._repository.fallbacks, self._sockets[0], self._settings.network)
        # Only now: it is for restarts, and takes time of the start.
        self._frontend_forks.start()

    async def _leave(self) -> None:
        seconds = self._settings.limits.leave_s
        if seconds:
            self._leaving = True
            for child in self._frontends:
                child.send(messages.Leave())
            await wait_to_leave(seconds, self._hurry)

    async def _drain(self) -> None:
        # The kernel would still queue connections at a listening socket without an accepting process.
        for listener in self._sockets:
            listener.close()
        for child in (*self._engines, *self._frontends):
            child.keep_running = False
        for child in self._frontends:
            child.send(messages.Drain())
        hurry = asyncio.create_task(self._hurry.wait())
        await _wait_exits(self._frontends, hurry, self._settings.limits.drain_timeout_s + FRONTEND_GRACE_S)
        for engine in self._engines:
            engine.close()
        await _wait_exits(self._engines, hurry, ENGINE_GRACE_S)

    def kill(self) -> None:
        for child in (*self._frontends, *self._engines):
            child.keep_running = False
            child.kill()
        # Last: they may be at a low priority, and these leave them time.
        self._frontend_forks.close()
        self._trial_forks.close()

    @property
    def engines(self) -> tuple[int, ...]:
        # The first start waits for all engines; later, an engine that never becomes ready must not block a load.
        return tuple(child.index for child in self._engines if child.alive and (child.ready or child.starts == 1))

    async def load(self, command: messages.LoadModel, engine: int) -> tuple[ModelLoaded, TableMemory]:
        child = self._engines[engine]
        if not child.alive:
            raise EngineLost(f"{messages.RESTARTING}.")
        starts = child.starts
        if not self._started and engine == 0 and command.pinned:
            # Beside the engine, or the start would take the time of both.
            for frontend in self._frontends:
                frontend.send(messages.ImportAhead(pinned=command.pinned))
        self._loads[command.key] = command
        try:
            loaded, descriptors = await self._deadlines.wait(command.key, self._command(child, command, command.key))
        except LoadGivenUp as error:
            self._repository.left_out.leave_out(command.model, str(error))
            self._tasks.start(self._trials.refuse(Path(command.bundle), str(error)))
            raise
        finally:
            del self._loads[command.key]
        self._repository.left_out.note_loaded(command.model, child.name)
        assert isinstance(loaded, ModelLoaded), loaded
        if not child.alive or child.starts != starts:
            os.close(descriptors[0])
            raise EngineLost(DIED_AFTER_LOAD)
        self._tables[command.key] = loaded, descriptors[0]
        return loaded, descriptors[0]

    async def report_use(self, engine: int) -> messages.EngineUse:
        child = self._engines[engine]
        if not child.alive:
            raise EngineLost(f"{messages.RESTARTING}.")
        report = messages.ReportUse(key=next(self._reports))
        use, _ = await self._command(child, report, report.key)
        assert isinstance(use, messages.EngineUse), use
        return use

    async def unload(self, key: int) -> None:
        self._attached.pop(key, None)
        if key in self._tables:
            loaded, memory = self._tables.pop(key)
            self._engines[loaded.engine].send(messages.UnloadModel(key=key))
            os.close(memory)

    async def attach(self, loaded: ModelLoaded, memory: TableMemory) -> None:
        assert isinstance(memory, int), memory
        key = loaded.command.key
        if key in self._tables:
            self._attached.pop(key, None)
            self._attached[key] = None
            self._frontend_forks.preload(_preload_of(loaded))
            replies = [self._command(child, loaded, key, (memory,)) for child in self._frontends if child.alive]
            await asyncio.gather(*replies)
        if key not in self._tables:
            raise EngineLost(DIED_AFTER_LOAD)

    async def retire(self, key: int) -> None:
        self._attached.pop(key, None)
        retire = messages.RetireTable(key=key)
        await asyncio.gather(*(self._command(child, retire, key) for child in self._frontends if child.alive))

    async def load_chain(self, reference: str) -> messages.ChainLoaded:
        pinned = "" if self._pins is None else str(await asyncio.to_thread(self._pins.pin_chain, reference))
        key, memory = len(self._chains), shared_memory(len(self._frontends))
        load = messages.LoadChain(key=key, reference=reference, again=False, pinned=pinned)
        self._chains.append((replace(load, again=True), memory))
        replies = await asyncio.gather(
            *(self._command(child, load, key, (memory,)) for child in self._frontends if child.alive)
        )
        loaded = next((reply for reply, _ in replies if isinstance(reply, messages.ChainLoaded)), None)
        if loaded is None:
            raise ServeError("the front-ends ended while they loaded a chain; their log says why.")
        self._chains[key] = replace(load, again=True, name=loaded.name), memory
        return loaded

    def publish_state(self, state: messages.ModelState) -> None:
        for child in self._frontends:
            child.send(state)

    def _command(
        self, child: ChildProcess, message: Message, key: int, descriptors: tuple[int, ...] = ()
    ) -> Awaitable[Reply]:
        # Sent at the call and not at the await: a child must receive messages in the order of events.
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[child, type(message), key] = future
        child.send(message, descriptors)
        return future

    def _receive(self, child: ChildProcess, message: Message, descriptors: list[int]) -> None:
        match message:
            case messages.Heartbeat():
                first_after_restart = not child.ready and child.starts > 1
                child.record_heartbeat()
                if child in self._engines:
                    child.serving = True
                    if first_after_restart:
                        self._tasks.start(self._repository.restore(child.index))
            case ModelLoaded(command=command):
                self._resolve(child, messages.LoadModel, command.key, message, descriptors)
            case messages.LoadProgress(key=key, activity=activity):
                if child in self._engines:
                    self._deadlines.begin_step(key, activity)
                    self._repository.note_progress(key, activity)
                elif key in self._tables:
                    self._importing[child] = self._tables[key][0]
            case messages.EngineUse(key=key):
                self._resolve(child, messages.ReportUse, key, message, [])
            case messages.UseUnknown(key=key, error=error):
                future = self._pending.pop((child, messages.ReportUse, key), None)
                if future is not None and not future.done():
                    future.set_exception(ServeError(f"{child.name} cannot measure its use: {error}"))
            case messages.DemandModel(name=name):
                self._repository.demand(name)
            case messages.CommandDone(key=key):
                if key in self._tables:
                    self._repository.left_out.note_loaded(self._tables[key][0].command.model, child.name)
                self._importing.pop(child, None)
                self._resolve(child, ModelLoaded, key, message, [])
            case messages.ChainLoaded(key=key):
                self._resolve(child, messages.LoadChain, key, message, [])
            case messages.TableRetired(key=key):
                self._resolve(child, messages.RetireTable, key, message, [])
            case messages.CommandFailed(key=key, error=error):
                self._importing.pop(child, None)
                self._fail_command(child, key, error)
            case messages.ChangeModel():
                self._tasks.start(self._change(child, message))
            case messages.FrontendReady():
                # It has attached every table: the messages of a channel keep their order.
                child.serving = True
                self._arrange_takeovers()
                self._resolve(child, messages.ServerStarted, 0, message, [])
            case messages.StartFailed(error=error):
                child.start_error = error
            case _:
                raise AssertionError(message)

    def _resolve(
        self, child: ChildProcess, kind: type[Message], key: int, reply: Message, descriptors: list[int]
    ) -> None:
        future = self._pending.pop((child, kind, key), None)
        if future is not None and not future.done():
            future.set_result((reply, descriptors))
        else:
            for descriptor in descriptors:
                os.close(descriptor)
            if kind is messages.LoadModel:
                # It was given up, see `LoadDeadlines`.
                child.send(messages.UnloadModel(key=key))

    def _fail_command(self, child: ChildProcess, key: int, error: str) -> None:
        kind = messages.LoadModel if child in self._engines else ModelLoaded
        # Chains are loaded after the models of the start, and before any other.
        chain = self._pending.pop((child, messages.LoadChain, key), None)
        future = chain or self._pending.pop((child, kind, key), None)
        if future is None:
            log.error("%s does not serve a model: %s", child.name, error)
        elif future.done():
            log.info("%s does not load a model that was given up: %s", child.name, error)
        else:
            prefix = f"{child.name}: " if len(self._engines) > 1 and kind is messages.LoadModel else ""
            future.set_exception(ServeError(prefix + error))

    async def _change(self, child: ChildProcess, change: messages.ChangeModel) -> None:
        starts = child.starts
        reply: Message = messages.CommandDone(key=change.token)
        try:
            await self._repository.change(change.name, change.unload)
        except (PenstockError, OSError) as error:
            status = error.status if isinstance(error, RequestError) else InvalidInput.status
            reply = messages.CommandFailed(key=change.token, error=str(error), status=status)
        except Exception:
            # A client waits for an answer, whatever is wrong here.
            log.exception("%s cannot be changed", change.name)
            failed = internal_error()
            reply = messages.CommandFailed(key=change.token, error=str(failed), status=failed.status)
        # A process that was restarted meanwhile has no such token.
        if child.starts == starts:
            child.send(reply)

    def _frontend_exited(self, child: ChildProcess) -> None:
        self._blame_import(child)
        # Its commands count as done: the next process starts with all tables.
        for key, future in self._take_pending(child):
            future.set_result((messages.CommandDone(key=key), []))
        self._fail_start(child)
        self._end_takeovers(child)
        self._arrange_takeovers()

    def _engine_exited(self, child: ChildProcess) -> None:
        reason = "the engine's process ended while it loaded; its log says why."
        for key, future in self._take_pending(child):
            if key in self._loads:
                reason = self._blame(child, self._loads[key], "loaded")
            future.set_exception(EngineLost(reason))
        for key, (loaded, memory) in list(self._tables.items()):
            if loaded.engine == child.index:
                os.close(memory)
                del self._tables[key]
                self._attached.pop(key, None)
        self._repository.drop_engine(child.index)
        # After the states: a front-end that was never to have the table must not be ready without it.
        for frontend in self._frontends:
            frontend.send(messages.DropEngine(engine=child.index))
        self._fail_start(child, reason)

    def _blame(self, child: ChildProcess, command: messages.LoadModel, what: str) -> str:
        """Record that a process ended while it loaded a model; returns a sentence that says so."""
        killed = child.exit_status == -signal.SIGKILL
        role = "engine" if child in self._engines else "front-end"
        mend = "its log says why" if killed else "mend the application"
        name = _application_of(command) or self._settings.models.app or "of the bundle"
        reason = f"the {role}'s process ended (status {child.exit_status}) while it {what} application {name}; {mend}."
        if not killed:
            self._tasks.start(self._trials.refuse(Path(command.bundle), reason))
        everywhere = child in self._frontends
        self._repository.left_out.note_end(command.model, child.name, reason, killed=killed, everywhere=everywhere)
        return reason

    def _blame_import(self, child: ChildProcess) -> None:
        """Fail the load of a model whose application ended a front-end that imported it."""
        importing = self._importing.pop(child, None)
        if importing is None:
            return
        key = importing.command.key
        reason = self._blame(child, importing.command, "imported")
        pending = (child, ModelLoaded, key)
        if child.exit_status != -signal.SIGKILL and pending in self._pending:
            # The next process must not attach it.
            self._attached.pop(key, None)
            future = self._pending.pop(pending)
            if not future.done():
                future.set_exception(ServeError(reason))

    def _take_pending(self, child: ChildProcess) -> list[tuple[int, asyncio.Future[Reply]]]:
        taken = [(entry[2], self._pending.pop(entry)) for entry in list(self._pending) if entry[0] is child]
        return [(key, future) for key, future in taken if not future.done()]

    def _fail_start(self, child: ChildProcess, reason: str = "its log says why.") -> None:
        if not self._started and child.keep_running:
            child.keep_running = False
            ended = EngineLost(f"the process of {child.name} ended while the server started; {reason}")
            self._start_error = self._start_error or (ServeError(child.start_error) if child.start_error else ended)
            self._stop.set()

    def _frontend_stalled(self, child: ChildProcess) -> None:
        # The connections in its listener's queue would wait for it, until the watchdog kills it.
        if child.stalled:
            self._end_takeovers(child)
        self._arrange_takeovers()

    def _end_takeovers(self, child: ChildProcess) -> None:
        for index, acting in list(self._takeovers.items()):
            if acting is child:
                del self._takeovers[index]
                child.send(messages.ReleaseListener(index=index))

    def _arrange_takeovers(self) -> None:
        accepting = [child for child in self._frontends if child.serving and not child.stalled]
        if not self._started or self._stop.is_set() or not accepting:
            return
        for index, child in enumerate(self._frontends):
            acting = self._takeovers.get(index)
            if child in accepting and acting is not None:
                acting.send(messages.ReleaseListener(index=index))
                del self._takeovers[index]
            elif child not in accepting and acting is None:
                accepting[0].send(messages.TakeOverListener(index=index), (self._sockets[index].fileno(),))
                self._takeovers[index] = accepting[0]

    def _frontend_restarted(self, child: ChildProcess) -> None:
        # Sent at once, before any later event: a child must receive messages in the order of events.
        for state in self._repository.states:
            child.send(state)
        for key in self._attached:
            loaded, memory = self._tables[key]
            child.send(loaded, (memory,))
        for chain, memory in self._chains:
            child.send(chain, (memory,))
        child.send(messages.StartListening())
        if self._started:
            child.send(messages.ServerStarted())
        if self._leaving:
            child.send(messages.Leave())

    def _preloads(self) -> list[Preload]:
        loaded = (loaded for key, (loaded, _) in self._tables.items() if key in self._attached)
        return [Preload("penstock.serve.control.frontend_process"), *dict.fromkeys(map(_preload_of, loaded))]

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_S)
            children = {child.pid for child in (*self._engines, *self._frontends) if child.pid is not None}
            forks = self._frontend_forks.pids | self._trial_forks.pids
            reap_orphans(children | forks | self._trials.processes | self._exports.processes)

    def _signalled(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()


async def _wait_exits(children: list[ChildProcess], hurry: asyncio.Task[Any], timeout_s: float) -> None:
    exits = asyncio.gather(*(child.wait_exit() for child in children))
    await asyncio.wait((exits, hurry), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _preload_of(loaded: ModelLoaded) -> Preload:
    return Preload(application=loaded.application, pinned=loaded.command.pinned)


def _application_of(command: messages.LoadModel) -> str:
    """Name the application of a model, if its manifest can be read."""
    with suppress(PenstockError, OSError):
        return read_manifest(pinned_bundle(command.pinned, command.bundle)).reference
    return ""


def engine_names(devices: tuple[str, ...]) -> list[str]:
    """Names of the engines in process lists and logs."""
    return ["engine"] if len(devices) == 1 else [f"engine {index} on {name}" for index, name in enumerate(devices)]


def _eventfds(count: int) -> list[int]:
    return [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(count)]
