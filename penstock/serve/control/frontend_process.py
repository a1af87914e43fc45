"""A front-end in a process of its own: it attaches the tables that the supervisor sends, and wakes the engines."""

import asyncio
import itertools
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import final

from penstock.core.bundles.bundle import Manifest
from penstock.core.errors import (
    OF_BUNDLE,
    ComputeFailed,
    InvalidInput,
    Overloaded,
    PenstockError,
    RequestError,
    ServeError,
    UnknownRoute,
)
from penstock.core.json_record import compute_hints
from penstock.core.machine.start_pace import StartPace
from penstock.serve import messages
from penstock.serve.background import BackgroundTasks, in_daemon_thread
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.channel import Channel, send_heartbeats
from penstock.serve.control.front_end import FrontEnd
from penstock.serve.idle_polling import MAX_IN_USE, IdlePolling
from penstock.serve.messages import Message
from penstock.serve.pinned_content import pinned_reference
from penstock.serve.registry.attachments import import_application
from penstock.serve.settings import Settings
from penstock.serve.table.chain_counts import ChainCounts
from penstock.serve.table.slots import column_hints

log = logging.getLogger(__name__)

# Time between two reports of a front-end's use.
USE_S = 1.0
# Connections handed over at once, and the pause after them: both front-ends answer requests meanwhile, and the closed
# sockets give their descriptors back.
HANDED_OVER, HAND_OVER_PAUSE_S = 8, 0.01
# With more requests that wait for results, the process hardly sleeps anyway, and none of them is alone.
MAX_AWAITED = 4
IMPORTING = "importing the application"
# Messages that wait while an application is imported; the others, such as the loss of an engine, do not.
_IN_ORDER = (
    messages.ImportAhead,
    messages.ModelLoaded,
    messages.LoadChain,
    messages.RetireTable,
    messages.StartListening,
    messages.ServerStarted,
)


@final
class FrontendProcess:
    """Answers requests until the supervisor drains it.

    Args:
        settings: Settings of the server.
        end: The socket to the supervisor.
        index: Index of this front-end.
        own: The eventfd that wakes this process.
        engines: The eventfds that wake the engines.
        listeners: The listening sockets of all front-ends.
        pace: Pauses until it serves; None if nothing else serves meanwhile.
    """

    def __init__(
        self,
        settings: Settings,
        end: socket.socket,
        index: int,
        own: int,
        engines: list[int],
        listeners: list[socket.socket],
        pace: StartPace | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._settings = settings
        self._own = own
        # The eventfds of the engines that have new rows.
        self._to_wake: set[int] = set()
        max_read_ns = settings.batching.max_read_ns
        self._batch_loop = BatchLoop(self._work, call_soon=loop.call_soon, max_read_ns=max_read_ns)
        wakes = [partial(self._wake_engine, index, wake) for index, wake in enumerate(engines)]
        self._front = FrontEnd(
            settings,
            listeners[index],
            self._change,
            index=index,
            wakes=wakes,
            batch_loop=self._batch_loop,
            demand=self._demand,
        )
        stay_ns = settings.idle_poll_ns("cuda")
        self._idle_polling = IdlePolling(loop.call_soon, time.monotonic_ns, stay_ns, self._look)
        # The engines whose results are worth it.
        self._polled_engines: set[int] = set()
        # Whether a request waits, or waited until now, for a result of one of them.
        self._polls = False
        self._changes: dict[int, asyncio.Future[None]] = {}
        self._tokens = itertools.count()
        self._tasks = BackgroundTasks()
        # What has an application imported beside the event loop, and the messages that must come after it.
        self._importing: messages.ModelLoaded | messages.ImportAhead | None = None
        self._waiting: deque[tuple[Message, list[int]]] = deque()
        # Keys of tables that were lost with their engine before they were attached.
        self._lost: set[int] = set()
        # Keys of served tables that could not be attached.
        self._refused: set[int] = set()
        self._front.http.watch([listener for other, listener in enumerate(listeners) if other != index])
        self._pace = pace
        self._is_ready = False
        self._drained = asyncio.Event()
        self._channel = Channel(end, self._receive, self._drained.set)
        loop.add_reader(own, self._woken)

    async def run(self) -> None:
        """Serve until drained, or until the supervisor is gone."""
        await send_heartbeats(self._channel, self._drained)

    async def _change(self, name: str, unload: bool) -> None:
        """Have the supervisor load or unload a model."""
        token = next(self._tokens)
        future = self._changes[token] = asyncio.get_running_loop().create_future()
        self._channel.send(messages.ChangeModel(token=token, name=name, unload=unload))
        try:
            await future
        finally:
            # The error's traceback holds this frame: without the future, they are no cycle that keeps a table mapped.
            del self._changes[token], future

    def _demand(self, name: str) -> None:
        self._channel.send(messages.DemandModel(name=name))

    def _wake_engine(self, engine: int, wake: int) -> None:
        self._to_wake.add(wake)
        # Live streams send more by themselves, and are many.
        attachments = self._front.attachments
        if (
            engine in self._polled_engines
            and 0 < attachments.awaited <= MAX_AWAITED
            and attachments.awaited_by_all <= MAX_IN_USE
        ):
            self._polls = True
            self._idle_polling.extend()
        self._batch_loop.wake()

    def _woken(self) -> None:
        os.eventfd_read(self._own)
        self._batch_loop.wake()

    def _look(self) -> None:
        if self._front.attachments.has_results:
            self._batch_loop.wake()

    def _work(self) -> int:
        # Each engine is woken once for all requests of this poll.
        woken = len(self._to_wake)
        while self._to_wake:
            os.eventfd_write(self._to_wake.pop(), 1)
        self._front.date.renew_if_due(time.monotonic_ns())
        collected = self._front.attachments.collect()
        if self._is_ready:
            self._front.http.note_work()
        if collected and self._polls:
            # After the last result, for a client that asks again at once.
            self._polls = self._front.attachments.awaited > 0
            self._idle_polling.extend()
        return woken + collected

    def _receive(self, message: Message, descriptors: list[int]) -> None:
        if self._importing is not None and isinstance(message, _IN_ORDER):
            self._waiting.append((message, descriptors))
            return
        front = self._front
        match message:
            case messages.ImportAhead(pinned=pinned):
                self._importing = message
                self._tasks.start(self._import("", pinned, lambda error: None))
            case messages.ModelLoaded():
                if front.attachments.has_imported(message.command):
                    self._attach(message, descriptors[0], "")
                else:
                    self._importing = message
                    # Should the application end this process, the supervisor knows which one it was.
                    self._channel.send(messages.LoadProgress(key=message.command.key, activity=IMPORTING))
                    attach = partial(self._attach, message, descriptors[0])
                    self._tasks.start(self._import(message.application, message.command.pinned, attach))
            case messages.LoadChain():
                self._load_chain(message, descriptors[0])
            case messages.RetireTable(key=key):
                self._tasks.start(self._retire(key))
            case messages.DropEngine(engine=engine):
                pending = [self._importing, *(each for each, _ in self._waiting)]
                lost = (each for each in pending if isinstance(each, messages.ModelLoaded) and each.engine == engine)
                self._lost |= {each.command.key for each in lost}
                front.lose_engine(engine)
            case messages.ModelState():
                front.models.set_state(message)
            case messages.StartListening():
                front.listen()
            case messages.ServerStarted():
                self._tasks.start(self._become_ready())
            case messages.TakeOverListener(index=index):
                front.http.accept_from(index, socket.socket(fileno=descriptors[0]))
            case messages.ReleaseListener(index=index):
                front.http.release(index)
            case messages.HandOver(count=count, target=target):
                self._tasks.start(self._hand_over(count, target))
            case messages.HandedOver():
                front.http.take_over(socket.socket(fileno=descriptors[0]))
            case messages.Leave():
                front.leave()
            case messages.Drain():
                self._tasks.start(self._drain())
            case messages.CommandDone(key=token):
                if (change := self._waiting_change(token)) is not None:
                    change.set_result(None)
            case messages.CommandFailed(key=token):
                if (change := self._waiting_change(token)) is not None:
                    change.set_exception(_request_error(message))
            case _:
                raise AssertionError(message)

    def _waiting_change(self, token: int) -> "asyncio.Future[None] | None":
        """Return the change for which a request still waits; None if its client is gone."""
        change = self._changes.get(token)
        return None if change is None or change.done() else change

    async def _import(self, application: str, pinned: str, attach: Callable[[str], None]) -> None:
        timeout_s, error = self._settings.limits.load_timeout_s, ""
        imported = in_daemon_thread(partial(_try_import, application, pinned))
        # Unlike `wait_for`, this ends with the task even where the import has ended, too.
        await asyncio.wait((imported,), timeout=timeout_s)
        if not imported.done():
            # Its thread is left alone.
            error = (
                f"importing application {application} took longer than {timeout_s:g} s; mend the application, or raise "
                f"--load-timeout-s."
            )
        if self._pace is not None and not self._is_ready:
            # The messages that come meanwhile wait, as during the import.
            await asyncio.sleep(self._pace.pause_s())
        self._importing = None
        attach(error)
        while self._waiting and self._importing is None:
            self._receive(*self._waiting.popleft())

    def _attach(self, loaded: messages.ModelLoaded, descriptor: int, error: str) -> None:
        """Attach a table whose application is imported, or say why that failed."""
        key = loaded.command.key
        try:
            if key in self._lost:
                self._lost.remove(key)
            elif error:
                raise ServeError(error)
            else:
                self._front.attach(loaded, descriptor)
                if self._settings.idle_poll_ns(loaded.device):
                    self._polled_engines.add(loaded.engine)
        except (Exception, SystemExit, asyncio.CancelledError) as failure:
            # Attaching imports the application, which may raise anything; the other models go on.
            if not isinstance(failure, PenstockError):
                log.exception("%s cannot be attached", loaded.command.bundle)
            # A failure at the server's own start ends it: this process replaces another one, which served the model.
            # Another version, which is attached since then, may give the name back.
            if self._front.models.starting or key in self._refused:
                self._refused.add(key)
                reason = f"{messages.NOT_ATTACHED}: {failure}"
                self._front.models.set_not_attached(loaded.command.name, loaded.command.version, reason)
            of_bundle = not isinstance(failure, PenstockError) or isinstance(failure, OF_BUNDLE)
            self._channel.send(messages.CommandFailed(key=key, error=str(failure), of_bundle=of_bundle))
        else:
            self._channel.send(messages.CommandDone(key=key))
        finally:
            os.close(descriptor)

    def _load_chain(self, load: messages.LoadChain, descriptor: int) -> None:
        try:
            counts = ChainCounts.attached(self._settings.frontend_processes, descriptor)
            chain = self._front.attach_chain(pinned_reference(load.pinned) or load.reference, counts, again=load.again)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # As for a model: it imports the user's code.
            if not isinstance(error, PenstockError):
                log.exception("%s cannot be served", load.reference)
            if load.again:
                self._front.models.set_not_attached(load.name, "1", f"{messages.NOT_ATTACHED}: {error}")
            self._channel.send(messages.CommandFailed(key=load.key, error=str(error)))
        else:
            self._channel.send(messages.ChainLoaded(key=load.key, name=chain.name, parts=chain.parts))
        finally:
            os.close(descriptor)

    async def _become_ready(self) -> None:
        try:
            await self._front.started()
        # The thread of gRPC may raise anything, and be cancelled; the supervisor would wait for ever.
        except (Exception, asyncio.CancelledError) as error:
            if not isinstance(error, PenstockError):
                log.exception("the front-end cannot start")
            self._channel.send(messages.StartFailed(error=str(error) or type(error).__name__))
            self._drained.set()
        else:
            self._is_ready = True
            self._channel.send(messages.FrontendReady())
            if self._settings.frontend_processes > 1:
                self._tasks.start(self._report_use())

    async def _hand_over(self, count: int, target: int) -> None:
        number = 0
        for descriptor in self._front.http.hand_over(count):
            if descriptor is not None:
                self._channel.send(messages.HandedOver(target=target), (descriptor,))
                os.close(descriptor)
                number += 1
            if descriptor is None or number % HANDED_OVER == 0:
                await asyncio.sleep(HAND_OVER_PAUSE_S)
        log.debug("%d of %d connections were handed over to front-end %d", number, count, target)

    async def _report_use(self) -> None:
        """Report each second what this process does, so that front-ends share the work evenly."""
        while not self._drained.is_set():
            begin_ns, begin_cpu_ns = time.monotonic_ns(), time.process_time_ns()
            await asyncio.sleep(USE_S)
            busy = (time.process_time_ns() - begin_cpu_ns) / (time.monotonic_ns() - begin_ns)
            movable, room = await self._front.http.movable(begin_ns)
            if self._front.models.refuses_some:
                # It has little to do because it refuses requests that the others answer.
                room = 0
            self._channel.send(messages.FrontendUse(busy=busy, movable=movable, room=room))

    async def _retire(self, key: int) -> None:
        self._refused.discard(key)
        try:
            await self._front.retire(key)
        except Exception:
            log.exception("table %d cannot be retired", key)
        # The supervisor waits for it, and holds up every other change meanwhile.
        self._channel.send(messages.TableRetired(key=key))

    async def _drain(self) -> None:
        await self._front.drain(lambda: False)
        self._drained.set()


def compute_ahead() -> None:
    """Compute what each start needs, in the process that front-ends are forked from."""
    for kind in (Settings, Manifest, *Message.kinds.values()):
        compute_hints(kind)
    column_hints()


def _try_import(application: str, pinned: str) -> None:
    # What cannot be imported fails again when it is attached, where that is reported.
    with suppress(Exception, SystemExit, asyncio.CancelledError):
        import_application(application, pinned)


def _request_error(failed: messages.CommandFailed) -> RequestError:
    if failed.status == Overloaded.status:
        return Overloaded(failed.error, messages.RESTART_S)
    if failed.status == ComputeFailed.status:
        return ComputeFailed(failed.error)
    return (UnknownRoute if failed.status == UnknownRoute.status else InvalidInput)(failed.error)
