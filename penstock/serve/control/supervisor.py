"""The supervisor: it starts engines and front-ends, restarts those that die, and drains at the end. It loads no torch.

    supervisor ── socket pair ── engines         torch, the networks, the tables' engine columns
        └──────── socket pair ── front-ends      sockets, parsing, decode, reply
    engines ══ slot tables in shared memory, and an eventfd for each ══ front-ends

The supervisor owns the listening sockets, so that connections in their backlog survive a front-end. The kernel kills
the children when the supervisor ends, and shared memory is freed with the last process that maps it.
"""

import asyncio
import logging
import os
import socket
from functools import partial
from typing import Any, final

from penstock.core.errors import BundleError, EngineLost, InvalidInput, PenstockError, RequestError, ServeError
from penstock.serve import messages
from penstock.serve.background import BackgroundTasks
from penstock.serve.control.backoff import REPLACED_AT_ONCE
from penstock.serve.control.bundle_trials import PRELOADS, BundleTrials
from penstock.serve.control.child import ChildProcess
from penstock.serve.control.connection_balance import ConnectionBalance
from penstock.serve.control.ended_loads import EndedLoads
from penstock.serve.control.fork_generation import Preload
from penstock.serve.control.fork_server import ForkServer, reap_orphans
from penstock.serve.control.lifecycle import announce, on_stop_signal, wait_to_leave
from penstock.serve.control.listener_takeovers import ListenerTakeovers
from penstock.serve.control.model_commands import ModelCommands
from penstock.serve.control.pending_commands import PendingCommands
from penstock.serve.exchange.reserved_ports import ReservedPorts
from penstock.serve.exchange.response import internal_error
from penstock.serve.messages import LoadModel, Message, ModelLoaded
from penstock.serve.pinned_content import PinnedModels, pinned_models
from penstock.serve.repository.bundle_preparation import BundlePreparation
from penstock.serve.repository.load_deadlines import LoadDeadlines
from penstock.serve.repository.model_repository import ModelRepository
from penstock.serve.repository.network_exports import NetworkExports
from penstock.serve.settings import Settings

log = logging.getLogger(__name__)

# A front-end ends itself when it has drained; it is killed this long after its drain timeout.
FRONTEND_GRACE_S = 2.0
ENGINE_GRACE_S = 3.0
REAP_S = 1.0


async def supervise(settings: Settings, sockets: list[socket.socket], reserved: ReservedPorts) -> None:
    """Serve until SIGTERM or SIGINT, with a front-end process for each socket.

    Raises:
        PenstockError: A bundle cannot be loaded, or a network is slower than the budget.
    """
    with pinned_models(settings.models.app) as pins:
        supervisor = _Supervisor(settings, sockets, pins, reserved)
        try:
            await supervisor.run()
        finally:
            supervisor.kill()


@final
class _Supervisor:
    def __init__(
        self,
        settings: Settings,
        sockets: list[socket.socket],
        pins: PinnedModels | None = None,
        reserved: ReservedPorts | None = None,
    ) -> None:
        self._settings = settings
        self._sockets = sockets
        self._reserved = reserved or ReservedPorts()
        self._trial_forks = ForkServer(lambda: PRELOADS)
        self._frontend_forks = ForkServer(self._preloads, has_spare=True)
        self._engines, self._frontends = self._make_children()
        self._takeovers = ListenerTakeovers(self._frontends, sockets)
        self._balance = ConnectionBalance(self._frontends)
        self._pending = PendingCommands()
        self._deadlines = LoadDeadlines(settings.limits.load_timeout_s)
        self._commands = ModelCommands(
            self._engines,
            self._frontends,
            self._pending,
            self._deadlines,
            pins=pins,
            is_started=lambda: self._started,
            preload=self._frontend_forks.preload,
            on_loaded=self._note_loaded,
            on_given_up=self._give_up,
        )
        self._exports = NetworkExports(settings)
        self._trials = BundleTrials(settings, self._trial_forks, self._exports.has_failed)
        preparation = BundlePreparation(self._trials.check, self._exports)
        self._repository = ModelRepository(settings.models, self._commands, pins=pins, preparation=preparation)
        self._ended_loads = EndedLoads(settings.models.app, self._trials, self._repository.left_out)
        self._tasks = BackgroundTasks()
        self._stop = asyncio.Event()
        # Set by the second signal.
        self._hurry = asyncio.Event()
        self._start_error: ServeError | None = None
        # Whether every model of the start is loaded.
        self._started = False
        # Whether the front-ends are not ready any more, before they drain.
        self._leaving = False

    def _make_children(self) -> tuple[list[ChildProcess], list[ChildProcess]]:
        """Return the engines and the front-ends."""
        devices = self._settings.execution.devices
        # Made here, so that an eventfd outlives the process that it wakes.
        engine_wakes, frontend_wakes = _eventfds(len(devices)), _eventfds(len(self._sockets))
        engine = partial(
            ChildProcess,
            settings=self._settings,
            on_message=self._receive,
            on_exit=self._engine_exited,
            on_restart=None,
        )
        engines = [
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
            gives_way=lambda: any(child.answers for child in self._frontends),
        )
        listening = [listener.fileno() for listener in self._sockets]
        frontends = [
            frontend(f"front-end {index}", index, descriptors=[*engine_wakes, wake, *listening])
            for index, wake in enumerate(frontend_wakes)
        ]
        return engines, frontends

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
        await asyncio.gather(*(self._pending.send(child, started, 0) for child in self._frontends if child.alive))
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
        # Another server may take them over while this one drains.
        self._reserved.close()
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
                if not self._pending.resolve(child, LoadModel, command.key, message, descriptors):
                    # It was given up, see `LoadDeadlines`.
                    child.send(messages.UnloadModel(key=command.key))
            case messages.LoadProgress(key=key, activity=activity):
                if child in self._engines:
                    self._deadlines.begin_step(key, activity)
                    self._repository.note_progress(key, activity)
                elif (loaded := self._commands.table(key)) is not None:
                    self._ended_loads.begin_import(child, loaded)
            case messages.EngineUse(key=key):
                self._pending.resolve(child, messages.ReportUse, key, message, [])
            case messages.UseUnknown(key=key, error=error):
                unknown = ServeError(f"{child.name} cannot measure its use: {error}")
                self._pending.fail(child, messages.ReportUse, key, unknown)
            case messages.DemandModel(name=name):
                self._repository.demand(name)
            case messages.CommandDone(key=key):
                if (attached := self._commands.table(key)) is not None:
                    self._note_loaded(attached.command, child)
                self._ended_loads.end_import(child)
                self._pending.resolve(child, ModelLoaded, key, message, [])
            case messages.ChainLoaded(key=key):
                self._pending.resolve(child, messages.LoadChain, key, message, [])
            case messages.TableRetired(key=key):
                self._pending.resolve(child, messages.RetireTable, key, message, [])
            case messages.CommandFailed(key=key, error=reason, of_bundle=of_bundle):
                self._ended_loads.end_import(child)
                self._fail_command(child, key, reason, BundleError if of_bundle else ServeError)
            case messages.ChangeModel():
                self._tasks.start(self._change(child, message))
            case messages.FrontendReady():
                # It has attached every table: the messages of a channel keep their order.
                child.serving = True
                self._arrange_takeovers()
                self._pending.resolve(child, messages.ServerStarted, 0, message, [])
            case messages.FrontendUse():
                if self._started and not self._leaving and not self._stop.is_set():
                    self._balance.note(child, message)
            case messages.HandedOver():
                self._forward_connection(child, message, descriptors)
            case messages.StartFailed(error=error):
                child.start_error = error
            case _:
                raise AssertionError(message)

    def _forward_connection(self, source: ChildProcess, handed: messages.HandedOver, descriptors: list[int]) -> None:
        target = self._balance.target(handed.target, source)
        if target is not None:
            target.send(handed, tuple(descriptors))
        # Where none is left, its client sees what it would have seen from a front-end that ended.
        for descriptor in descriptors:
            os.close(descriptor)

    def _fail_command(self, child: ChildProcess, key: int, error: str, kind_of_error: type[PenstockError]) -> None:
        kind = LoadModel if child in self._engines else ModelLoaded
        # Chains are loaded after the models of the start, and before any other.
        chain = self._pending.take(child, messages.LoadChain, key)
        future = chain or self._pending.take(child, kind, key)
        if future is None:
            log.error("%s does not serve a model: %s", child.name, error)
        elif future.done():
            log.info("%s does not load a model that was given up: %s", child.name, error)
        else:
            prefix = f"{child.name}: " if len(self._engines) > 1 and kind is LoadModel else ""
            future.set_exception(kind_of_error(prefix + error))

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
        self._fail_import(child)
        # Its commands count as done: the next process starts with all tables.
        for _, key, future in self._pending.take_all(child):
            future.set_result((messages.CommandDone(key=key), []))
        self._fail_start(child)
        self._takeovers.end(child)
        self._arrange_takeovers()

    def _engine_exited(self, child: ChildProcess) -> None:
        reason = "the engine's process ended while it loaded; its log says why."
        for kind, key, future in self._pending.take_all(child):
            # Other commands have keys of their own.
            if kind is messages.LoadModel and (command := self._commands.loading(key)) is not None:
                reason = self._ended_loads.record_load(child, command)
            future.set_exception(EngineLost(reason))
        self._commands.drop_engine(child.index)
        self._repository.drop_engine(child.index)
        # After the states: a front-end that was never to have the table must not be ready without it.
        for frontend in self._frontends:
            frontend.send(messages.DropEngine(engine=child.index))
        self._fail_start(child, reason)

    def _note_loaded(self, command: LoadModel, child: ChildProcess) -> None:
        self._repository.left_out.note_loaded(command.model, child.name)

    def _give_up(self, command: LoadModel, reason: str) -> None:
        self._ended_loads.give_up(command, reason)

    def _fail_import(self, child: ChildProcess) -> None:
        """Fail the load of a model whose application ended a front-end that imported it."""
        ended = self._ended_loads.record_import(child)
        if ended is not None:
            key, reason = ended
            if self._pending.fail(child, ModelLoaded, key, ServeError(reason)):
                # The next process must not attach it.
                self._commands.detach(key)

    def _fail_start(self, child: ChildProcess, reason: str = "its log says why.") -> None:
        if not self._started and child.keep_running:
            child.keep_running = False
            ended = EngineLost(f"the process of {child.name} ended while the server started; {reason}")
            self._start_error = self._start_error or (ServeError(child.start_error) if child.start_error else ended)
            self._stop.set()

    def _frontend_stalled(self, child: ChildProcess) -> None:
        # The connections in its listener's queue would wait for it, until the watchdog kills it.
        if child.stalled:
            self._takeovers.end(child)
        self._arrange_takeovers()

    def _arrange_takeovers(self) -> None:
        if self._started and not self._stop.is_set():
            self._takeovers.arrange()

    def _frontend_restarted(self, child: ChildProcess) -> None:
        # Sent at once, before any later event: a child must receive messages in the order of events.
        for state in self._repository.states:
            child.send(state)
        self._commands.attach_all(child)
        child.send(messages.StartListening())
        if self._started:
            child.send(messages.ServerStarted())
        if self._leaving:
            child.send(messages.Leave())

    def _preloads(self) -> list[Preload]:
        return [Preload("penstock.serve.control.frontend_process"), *self._commands.preloads()]

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


def engine_names(devices: tuple[str, ...]) -> list[str]:
    """Names of the engines in process lists and logs."""
    return ["engine"] if len(devices) == 1 else [f"engine {index} on {name}" for index, name in enumerate(devices)]


def _eventfds(count: int) -> list[int]:
    return [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(count)]
