"""One process that serves a bundle: load, measure, listen, and at the end drain.

The engine and the front-end share this process's event loop; the table is in its private memory.
"""

import asyncio
import errno
import logging
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
import uvloop

from penstock.core.errors import ServeError, TooSlow
from penstock.core.spec import Array
from penstock.runtime.load import Predictor, load
from penstock.serve.connection import Connection
from penstock.serve.engine import Engine
from penstock.serve.frontend import Frontend
from penstock.serve.routes import Routes
from penstock.serve.served import Served
from penstock.serve.slots import SlotTable, TableLayout
from penstock.serve.turns import Turns
from penstock.serve.wire import MAX_HEAD_BYTES

log = logging.getLogger(__name__)

# The table takes at most this much memory, and never more slots than this.
TABLE_BYTES = 256 << 20
MOST_SLOTS = 4096
# A client must send on within this time: a begun request, or the next one.
BEGUN_S = 20.0
IDLE_S = 120.0
SWEEP_S = 1.0
# How long a refused client may go on sending what nobody keeps, so that it reads the refusal.
LINGER_S = 2.0
# How long a drained server waits for requests that are in the sockets already.
GRACE_S = 0.25
BACKLOG = 1024
# By what share more threads must shorten a batch of so many rows to be used.
WORTHWHILE_THREADS = 0.75
TRIED_ROWS = 16
TRIED_RUNS = 5
TRIED_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a bundle is served.

    Args:
        bundle: Its folder.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        latency_ms: The budget of a request that names none, in milliseconds.
        max_batch: A limit of the batch below what the budget allows; None for no other.
        app: Where the application is now, if it moved.
        accept_changed_app: Take an application whose sources changed, as long as the golden examples agree.
        drain_s: How long accepted requests may take after SIGTERM, in seconds.
    """

    bundle: Path
    host: str = "127.0.0.1"
    port: int = 8000
    latency_ms: float = 50.0
    max_batch: int | None = None
    app: str | None = None
    accept_changed_app: bool = False
    drain_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.latency_ms <= 600_000:
            raise ServeError(f"--latency-ms is {self.latency_ms:g}; it must be from above 0 to 600,000.")
        if self.max_batch is not None and self.max_batch < 1:
            raise ServeError(f"--max-batch is {self.max_batch}; it must be at least 1.")
        if not 0 <= self.port <= 65535:
            raise ServeError(f"--port is {self.port}; it must be from 0 to 65535.")


def serve(settings: Settings) -> None:
    """Serve a bundle until SIGTERM or SIGINT.

    Raises:
        PenstockError: The bundle cannot be loaded, the network is slower than the budget, or the port is taken.
    """
    listener = _listener(settings.host, settings.port)
    predictor = load(
        settings.bundle,
        app=settings.app,
        accept_changed=settings.accept_changed_app,
    )
    choose_threads(predictor, len(os.sched_getaffinity(0)))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Server(settings, predictor, listener).run())


def choose_threads(predictor: Predictor, cores: int) -> None:
    """Give the network all cores if that makes a batch clearly faster, else one.

    Threads that gain little cost much as soon as anything else runs on the machine: each waits for the slowest.
    """
    example = predictor.files.golden.inputs[:1]
    batch = np.repeat(example, TRIED_ROWS, 0)
    times_s = {threads: _batch_s(predictor, batch, threads) for threads in {cores, 1}}
    threads = cores if times_s[cores] < WORTHWHILE_THREADS * times_s[1] else 1
    torch.set_num_threads(threads)
    log.info(
        "%d rows take %s; the network gets %d threads",
        TRIED_ROWS,
        ", ".join(f"{seconds * 1e3:.2f} ms with {count}" for count, seconds in sorted(times_s.items())),
        threads,
    )


def _batch_s(predictor: Predictor, batch: Array, threads: int) -> float:
    torch.set_num_threads(threads)
    times_s: list[float] = []
    # The first run allocates; a network that takes long is judged by fewer runs.
    while len(times_s) <= TRIED_RUNS and sum(times_s) < TRIED_S:
        start_s = time.perf_counter()
        predictor.executor.predict(batch)
        times_s.append(time.perf_counter() - start_s)
    return float(np.median(times_s[1:] or times_s))


@final
class _Server:
    def __init__(self, settings: Settings, predictor: Predictor, listener: socket.socket) -> None:
        self._settings = settings
        self._application = predictor.application
        self._listener = listener
        self._connections: set[Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._signals = 0
        budget_ns = int(settings.latency_ms * 1e6)
        layout = _layout(predictor)
        self._table = SlotTable.private(layout)
        self._engine = Engine(
            predictor.executor,
            self._table,
            budget_ns=budget_ns,
            clock_ns=time.monotonic_ns,
            max_rows=settings.max_batch,
        )
        costs = self._engine.measure(predictor.files.golden.inputs[0])
        log.info(
            "measured on %d threads: 1 row %.2f ms, %d rows %.2f ms, the largest batch within %g ms",
            torch.get_num_threads(),
            costs.of(1) / 1e6,
            costs.largest,
            costs.of(costs.largest) / 1e6,
            settings.latency_ms,
        )
        turns = Turns(
            self._engine,
            lambda wake: Frontend(self._table, budget_ns=budget_ns, wake=wake),
            call_soon=lambda turn: asyncio.get_running_loop().call_soon(turn),
            clock_ns=time.monotonic_ns,
        )
        self._served = Served(
            predictor.application,
            predictor.files.manifest,
            turns.frontend,
            self._table,
            budget_ns=budget_ns,
            arrival_ns=turns.arrival_ns,
            now_ns=time.monotonic_ns,
        )
        started = time.monotonic()
        self._routes = Routes(
            {predictor.application.name: self._served},
            max_batch_rows=max(1, layout.slots // 4),
            uptime_s=lambda: time.monotonic() - started,
        )

    async def run(self) -> None:
        """Listen until a signal comes, then drain."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        loop.add_reader(self._listener, self._accept)
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"Serving {self._application.name} at http://{shown}:{port}/", flush=True)
        sweeper = asyncio.create_task(self._sweep())
        await self._stop.wait()
        log.info("draining: %d requests are being answered", self._served.frontend.in_use)
        await self._drain(loop)
        sweeper.cancel()
        log.info("drained; %d requests were answered in all", self._served.counts.answered)

    def _accept(self) -> None:
        # Every connection that waits, not one a turn of the loop: while a batch runs, many may come.
        loop = asyncio.get_running_loop()
        while True:
            try:
                waiting, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._wait_for_descriptors(loop)
                return
            task = loop.create_task(self._connected(waiting))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _wait_for_descriptors(self, loop: asyncio.AbstractEventLoop) -> None:
        # The listener stays readable as long as somebody waits in it: to try again at once would take a whole core.
        log.warning("no descriptor is free for another client; raise the limit of open files (ulimit -n)")
        loop.remove_reader(self._listener)
        loop.call_later(SWEEP_S, self._accept_again, loop)

    def _accept_again(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._listener.fileno() >= 0:
            loop.add_reader(self._listener, self._accept)

    async def _connected(self, waiting: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._connection, waiting)
        except OSError as error:
            log.info("a client was gone before it was accepted: %s", error)

    async def _drain(self, loop: asyncio.AbstractEventLoop) -> None:
        end_s = time.monotonic() + self._settings.drain_s
        # Clients and balancers see that it is not ready any more, and those that talk on learn it from their answers.
        await asyncio.sleep(min(GRACE_S, self._settings.drain_s))
        # A listener that closes resets the connections that wait in it: take them all first.
        self._accept()
        loop.remove_reader(self._listener)
        self._listener.close()
        await asyncio.sleep(min(GRACE_S, self._settings.drain_s))
        for connection in list(self._connections):
            connection.close_when_idle()
        while self._connections and time.monotonic() < end_s and self._signals < 2:
            await asyncio.sleep(0.005)
        self._abort()

    def _abort(self) -> None:
        for connection in list(self._connections):
            connection.abort()

    def _connection(self) -> Connection:
        # The parser keeps a body only up to the largest that any route takes.
        most = self._application.max_body_bytes + MAX_HEAD_BYTES
        connection = Connection(self._routes.handle, self._connections, most, time.monotonic)
        if self._routes.draining:
            connection.close_after_next()
        return connection

    async def _sweep(self) -> None:
        """End connections whose clients fell silent."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for connection in list(self._connections):
                silent_s = now - connection.heard_s
                if connection.lingering_since_s is not None:
                    if now - connection.lingering_since_s > LINGER_S:
                        connection.abort()
                elif connection.idle and silent_s > IDLE_S:
                    connection.close_when_idle()
                elif not connection.idle and not connection.answering and silent_s > BEGUN_S:
                    connection.refuse(
                        TooSlow(f"Nothing came for {silent_s:.0f} s of a request that had begun; send it in one go.")
                    )

    def _signalled(self) -> None:
        self._signals += 1
        self._routes.draining = True
        for connection in list(self._connections):
            connection.close_after_next()
        if self._signals > 1:
            self._abort()
        self._stop.set()


def _layout(predictor: Predictor) -> TableLayout:
    application = predictor.application
    chunk_bytes = (application.input.nbytes + application.output.nbytes) * application.chunks
    slots = min(MOST_SLOTS, TABLE_BYTES // chunk_bytes)
    if slots < 1:
        raise ServeError(
            f"one chunk of {application.input.describe()} takes {chunk_bytes / 1e6:,.0f} MB, more than the slot table "
            f"may have ({TABLE_BYTES >> 20} MB)."
        )
    return TableLayout(slots=slots, chunks=application.chunks, input=application.input, output=application.output)


def _listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise ServeError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port."
        ) from None
    return listener
