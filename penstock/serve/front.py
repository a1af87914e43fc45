"""A front-end put together: models by name, their tables, the routes, the sockets. It never loads torch."""

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import final

from penstock.core.errors import ServeError
from penstock.serve.access import Access, Keys
from penstock.serve.attachments import Attachments
from penstock.serve.connection import Handler
from penstock.serve.http_server import SWEEP_S, HttpServer
from penstock.serve.messages import Loaded
from penstock.serve.models import Models, Repository
from penstock.serve.protocols.grpc_thread import GrpcThread
from penstock.serve.request_log import RequestLog
from penstock.serve.routes import Routes
from penstock.serve.settings import Settings
from penstock.serve.slots import SlotTable
from penstock.serve.wire import MAX_HEAD_BYTES

# How often a drain looks whether it is to hurry.
LOOK_S = 0.01
# New objects after which garbage is looked for.
GARBAGE_AFTER = 20_000

log = logging.getLogger(__name__)


@final
class Front:
    """Everything between the sockets and the tables.

    Args:
        settings: How to serve.
        listener: The socket that clients connect to.
        repository: Loads and unloads models when a client asks.
        index: Which of the front-ends this is.
        wakes: Of each engine, called when there is something new for it.
        arrived: Told of each request that was read, and when; gives the earliest moment at which it can have come.

    Raises:
        ServeError: The API keys or TLS files cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        repository: Repository,
        *,
        index: int,
        wakes: Sequence[Callable[[], None]],
        arrived: Callable[[int], int],
    ) -> None:
        self._settings = settings
        self.models = Models(repository, loading=settings.models is not None)
        self.attachments = Attachments(
            self.models,
            budget_ns=settings.budget_ns,
            idle_ns=int(settings.idle_s * 1e9),
            # What a poll may read before the next turn, it has read half of on the average.
            margin_ns=settings.longest_read_ns // 2,
            index=index,
            wakes=wakes,
            arrived=arrived,
            now_ns=time.monotonic_ns,
        )
        started_s = time.monotonic()
        self._access = access_of(settings)
        self._grpc: GrpcThread | None = None
        routes = Routes(
            self.models,
            self._access,
            uptime_s=lambda: time.monotonic() - started_s,
        )
        handle, refuse = routes.handle, routes.refuse
        # Traces and the log of requests hear of every one.
        shed = None if settings.otlp_endpoint or settings.log_requests else routes.shed
        self._sweeper: asyncio.Task[None] | None = None
        self._end_traces: Callable[[], None] | None = None
        if settings.otlp_endpoint is not None:
            handle, self._end_traces = _traced(handle, self.models, settings, settings.otlp_endpoint)
        if settings.log_requests:
            log_of_requests = RequestLog(handle, refuse, self._access)
            handle, refuse = log_of_requests.handle, log_of_requests.refuse
        self._http = HttpServer(settings, listener, handle, self._most_body_bytes, refuse, shed)

    def attach(self, loaded: Loaded, memory: SlotTable | int) -> None:
        """Let a model answer to its name, see `Attachments.attach`."""
        self.attachments.attach(loaded, memory)
        self._http.forget_heads()

    async def retire(self, key: int) -> None:
        """Let go of a table, see `Attachments.retire`."""
        await self.attachments.retire(key)
        # What a head was found to mean holds the table.
        self._http.forget_heads()

    def lose_engine(self, engine: int) -> None:
        """An engine is gone, see `Attachments.lose_engine`."""
        self.attachments.lose_engine(engine)
        self._http.forget_heads()

    async def listen(self) -> None:
        """Take connections from now on.

        Raises:
            ServeError: The port of gRPC is taken.
        """
        # What is there now stays: without this, each full collection goes over all modules, for tens of milliseconds.
        gc.collect()
        gc.freeze()
        # Thousands of requests that wait are no garbage; with the usual threshold they would be looked through for it.
        gc.set_threshold(GARBAGE_AFTER)
        self._http.listen()
        self._sweeper = asyncio.create_task(self._sweep())
        port = self._settings.grpc_port
        if port is None:
            return
        # Here, because the packages of penstock[grpc] need not be there.
        from penstock.serve.protocols.grpc_v2 import grpc_server

        home = asyncio.get_running_loop()
        certificate, key = self._settings.tls_certificate, self._settings.tls_key
        tls = (key.read_bytes(), certificate.read_bytes()) if key and certificate else None
        thread = GrpcThread(
            lambda: grpc_server(
                self.models,
                host=self._settings.host,
                port=port,
                max_message_bytes=self._most_body_bytes() + MAX_HEAD_BYTES,
                authorise=self._access.check_key,
                tls=tls,
                home=home,
            )
        )
        await thread.start()
        self._grpc = thread

    def stand_in(self, index: int, listener: socket.socket) -> None:
        """Take the connections of another front-end too, until `stand_back`."""
        listener.setblocking(False)
        self._http.stand_in(index, listener)

    def stand_back(self, index: int) -> None:
        """The other front-end is there again."""
        self._http.stand_back(index)

    def refuse_more(self) -> None:
        """Say that the server is not ready any more, and let each connection's next answer be its last."""
        self.models.draining = True
        self.attachments.begin_no_more()
        self._http.close_after_next()

    async def drain(self, hurry: Callable[[], bool]) -> None:
        """Answer what was accepted, then end every connection."""
        self.refuse_more()
        log.info("draining: %d requests are being answered", self.attachments.in_use)
        seconds = self._settings.drain_s
        calls = asyncio.create_task(self._grpc.drain(seconds)) if self._grpc else None
        await self._http.drain(seconds, hurry)
        if self._grpc is not None and calls is not None:
            while not calls.done() and not hurry():
                await asyncio.sleep(LOOK_S)
            await self._grpc.close()
            await asyncio.wait([calls])
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._end_traces is not None:
            self._end_traces()
        log.info("drained; %d requests were answered in all", self.attachments.answered)

    def abort(self) -> None:
        """End every connection at once; what waits does not run."""
        self._http.abort()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.attachments.sweep()

    def _most_body_bytes(self) -> int:
        return max((served.application.max_body_bytes for served in self.models), default=0)


def check_telemetry(settings: Settings) -> None:
    """See whether what `--otlp-endpoint` needs is there.

    Raises:
        ServeError: It is not.
    """
    if settings.otlp_endpoint is None:
        return
    try:
        import_module("penstock.serve.traces")
    except ModuleNotFoundError as error:
        raise ServeError(
            f"--otlp-endpoint needs the package {error.name}; pip install 'penstock[telemetry]'."
        ) from None


def _traced(handle: Handler, models: Models, settings: Settings, endpoint: str) -> tuple[Handler, Callable[[], None]]:
    # Loaded by who wants it alone: it brings an HTTP client of its own.
    from penstock.serve.traces import Traces, exporting

    scheme = "http" if settings.tls_certificate is None else "https"
    traces = Traces(handle, exporting(endpoint), models, settings.trace_share, scheme)
    return traces.handle, traces.shut_down


def access_of(settings: Settings) -> Access:
    """Who may ask.

    Raises:
        ServeError: The file of the API keys cannot be used.
    """
    keys = None if settings.api_keys is None else Keys.read(settings.api_keys)
    return Access(keys, settings.cors)
