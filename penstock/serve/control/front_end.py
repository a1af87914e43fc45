"""Assembly of a front-end: models by name, their tables, routes, sockets, gRPC."""

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import final

from penstock.core.chains.chain import Chain
from penstock.core.errors import ServeError
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.control.agent_check import AgentCheck
from penstock.serve.control.certificate_watch import watch_certificate
from penstock.serve.control.descriptors import descriptor_limit, grpc_limits
from penstock.serve.exchange.access import Access, Keys
from penstock.serve.exchange.request import MAX_HEAD_BYTES
from penstock.serve.exchange.request_bounds import RequestBounds
from penstock.serve.exchange.response import Handlers
from penstock.serve.frontend.held_loop import held_ns
from penstock.serve.frontend.helper_thread import switch_soon
from penstock.serve.grpc.thread import GrpcThread, Stop
from penstock.serve.http.listener import SWEEP_S, Listener
from penstock.serve.http.plain_body import chunk_of_message
from penstock.serve.http.response_date import ResponseDate
from penstock.serve.http.routes import Routes
from penstock.serve.http.server_sockets import agent_listener, grpc_listener
from penstock.serve.http.tls_files import tls_of
from penstock.serve.messages import ModelLoaded
from penstock.serve.observe.call_record import CallObserver
from penstock.serve.observe.load_report import LoadMeter
from penstock.serve.observe.request_log import CallLog, RequestLog
from penstock.serve.oip.shared_memory import Regions
from penstock.serve.registry.attachments import Attachments
from penstock.serve.registry.chains import Chains
from penstock.serve.registry.model_registry import Change, Demand, ModelRegistry
from penstock.serve.registry.served_chain import Served
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.settings import AccessSettings, LimitSettings, Settings, TelemetrySettings
from penstock.serve.streams.quotas import StreamQuotas
from penstock.serve.streams.replay_ring import ReplayLimits, ReplayMemory
from penstock.serve.streams.tickets import TicketKeys, TicketSealer
from penstock.serve.table.chain_counts import ChainCounts
from penstock.serve.table.client_counts import ClientCounts
from penstock.serve.table.slots import ANSWERED, CHUNKS, SlotTable
from penstock.serve.transcription.vendor_errors import LISTEN, REALTIME
from penstock.serve.websocket.generate_connection import GenerateConnection
from penstock.serve.websocket.handshake import reject_page, upgrade_to_shared, upgrade_to_stream
from penstock.serve.websocket.service_streams import ServiceStreams
from penstock.serve.websocket.shared_connection import AdmitNamed, SharedConnection

# Poll interval of a drain.
POLL_S = 0.01
# Allocations between garbage collections.
GARBAGE_AFTER = 20_000

log = logging.getLogger(__name__)


@final
class FrontEnd:
    """All parts of a front-end between the sockets and the tables.

    Args:
        settings: How to serve.
        listener: The socket that clients connect to.
        change: Loads and unloads models when a client asks.
        demand: Loads models on first use.
        index: Index of this front-end.
        wakes: For each engine, called when there is new work for it.
        batch_loop: Runs the batches of this process.

    Attributes:
        http: The connections of HTTP.

    Raises:
        ServeError: The API keys or TLS files cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        change: Change,
        *,
        index: int,
        wakes: Sequence[Callable[[], None]],
        batch_loop: BatchLoop,
        demand: Demand | None = None,
    ) -> None:
        self._settings = settings
        self.models = ModelRegistry(change, loading=settings.models.directory is not None, demand=demand)
        self.models.starting = True
        self._quotas = quotas_of(settings, index)
        self._bounds = bounds_of(settings.limits)
        self.attachments = Attachments(
            models=self.models,
            budget_ns=settings.batching.budget_ns,
            idle_ns=int(settings.limits.idle_timeout_s * 1e9),
            # On average half of the longest read lies between a prediction and the next batch.
            margin_ns=settings.batching.max_read_ns // 2,
            index=index,
            wakes=wakes,
            batch_loop=batch_loop,
            now_ns=time.monotonic_ns,
            quotas=self._quotas,
            replay=replay_of(settings, self._bounds),
            headroom=settings.batching.stream_headroom,
            sealer=sealer_of(settings.access),
            ticket_s=settings.limits.ticket_s,
        )
        self.chains = Chains(
            models=self.models, budget_ns=settings.batching.budget_ns, index=index, now_ns=time.monotonic_ns
        )
        # The folder is made by `serve`, for all front-ends.
        self._regions = Regions(settings.access.regions, settings.access.shared_memory << 20)
        started_s = time.monotonic()
        self._access = access_of(settings.access)
        self._batch_loop = batch_loop
        self._grpc: GrpcThread | None = None
        # gRPC reads its limit once, when it starts; None before that.
        self._grpc_body_bytes: int | None = None
        # In a process of its own, the engine does not read sockets.
        reading = (lambda: batch_loop.reading_share) if settings.frontend_processes == 0 else (lambda: 0.0)
        self._load = LoadMeter(self.models, time.monotonic, reading)
        self._agent = AgentCheck(self.models, self._load, time.monotonic)
        self.date = ResponseDate()
        services = ServiceStreams(self.models, self._access, self._bounds)
        routes = Routes(
            self.models,
            self._access,
            uptime_s=lambda: time.monotonic() - started_s,
            open_stream=partial(
                upgrade_to_stream,
                models=self.models,
                access=self._access,
                bounds=self._bounds,
                generating=self._generate_connection,
            ),
            share_streams=partial(
                upgrade_to_shared, models=self.models, access=self._access, make=self._shared_connection
            ),
            service_streams={LISTEN: services.listen, REALTIME: services.realtime},
            reject_stream=partial(reject_page, access=self._access),
            regions=self._regions,
            offers_examples=settings.access.examples,
            load=self._load,
            load_report=settings.telemetry.load_report,
            date=self.date,
        )
        handle, reject = routes.handle, routes.reject
        # Traces and the request log need to see every request.
        telemetry = settings.telemetry
        sees_all = bool(telemetry.otlp_endpoint or telemetry.log_requests)
        reject_early, lane = (None, None) if sees_all else (routes.reject_early, routes.lane)
        self._regular: list[asyncio.Task[None]] = []
        self._end_traces: Callable[[], None] = lambda: None
        self._call_observers: list[CallObserver] = []
        if telemetry.otlp_endpoint is not None:
            # Imported only where traces are wanted: it brings an HTTP client of its own.
            from penstock.serve.observe.call_traces import CallTraces
            from penstock.serve.observe.tracing import Traces, exporting

            scheme = "http" if settings.network.tls_certificate is None else "https"
            traces = Traces(handle, exporting(telemetry.otlp_endpoint), self.models, telemetry.trace_share, scheme)
            handle, self._end_traces = traces.handle, traces.shut_down
            self._call_observers.append(CallTraces(traces).observe)
        if telemetry.log_requests:
            request_log = RequestLog(handle, reject, self._access)
            handle, reject = request_log.handle, request_log.reject
            self._call_observers.append(CallLog(self._access).observe)
        network, limits = settings.network, settings.limits
        handlers = Handlers(handle=handle, reject=reject, reject_early=reject_early, lane=lane)
        self.http = Listener(
            network,
            limits,
            listener,
            handlers,
            batch_loop,
            routes.max_body_bytes,
            settings.batching.budget_ns,
            self._bounds,
            self._answered,
            self.date,
        )

    def _answered(self) -> int:
        """Number of answers and chunks of streams so far."""
        models = [served for served in self.models if isinstance(served, ServedModel)]
        return sum(served.counts[ANSWERED] + served.counts[CHUNKS] for served in models)

    def _generate_connection(self, served: Served) -> GenerateConnection:
        return GenerateConnection(
            served,
            partial(chunk_of_message, served),
            self._batch_loop,
            time.monotonic,
            self.http.bounds,
        )

    def _shared_connection(self, admit: AdmitNamed) -> SharedConnection:
        return SharedConnection(admit, self._batch_loop, time.monotonic, self.http.bounds)

    def attach(self, loaded: ModelLoaded, memory: SlotTable | int) -> None:
        """Serve a model under its name, see `Attachments.attach`."""
        self.attachments.attach(loaded, memory)
        self.chains.refresh()
        self.http.forget_heads()
        name = loaded.command.name
        needed, limit = self.models.named(name).application.max_body_bytes, self._grpc_body_bytes
        # The first front-end logs it for all.
        if limit is not None and self.attachments.index == 0 and needed > limit:
            log.warning(
                "%s takes bodies of up to %d bytes, but gRPC messages are limited to the %d bytes of the models with "
                "which the server started; restart it, or send larger ones by HTTP",
                name,
                needed,
                limit,
            )

    def attach_chain(self, reference: str, counts: ChainCounts, *, again: bool = False) -> Chain:
        """Serve a chain of the models, see `Chains.attach`."""
        return self.chains.attach(reference, counts, again=again).chain

    async def retire(self, key: int) -> None:
        """Detach a table, see `Attachments.retire`."""
        await self.attachments.retire(key)
        # Cached routes hold references to the table.
        self.http.forget_heads()

    def lose_engine(self, engine: int) -> None:
        """Fail the requests of a lost engine, see `Attachments.lose_engine`."""
        self.attachments.lose_engine(engine)
        self.http.forget_heads()

    def listen(self) -> None:
        """Accept connections: requests are answered for the models that are attached, others with 503."""
        self.http.listen()
        self._regular = [asyncio.create_task(self._sweep()), asyncio.create_task(self._keep_date())]
        certificate = self._settings.network.tls_certificate
        # The first front-end logs it for all.
        if certificate is not None and self.attachments.index == 0:
            self._regular.append(asyncio.create_task(watch_certificate(certificate)))

    async def started(self) -> None:
        """Become ready, and serve gRPC and agent checks: every model of the start is attached.

        Raises:
            ServeError: A port is taken.
        """
        # Existing objects stay: without this, each full collection scans all modules, for tens of milliseconds.
        gc.collect()
        gc.freeze()
        switch_soon()
        # Thousands of waiting requests are not garbage; the default threshold would scan them often.
        gc.set_threshold(GARBAGE_AFTER)
        if self._settings.network.grpc_port is not None:
            await self._serve_grpc(self._settings.network.grpc_port)
        network = self._settings.network
        if network.agent_port is not None:
            # Not before: HAProxy takes no answer for none, and other front-ends may be ready.
            await self._agent.listen(agent_listener(network, network.agent_port))
        self.models.starting = False
        self.models.epoch += 1
        self.http.forget_heads()

    async def _serve_grpc(self, port: int) -> None:
        # Imported here: the packages of penstock-nn[grpc] are optional.
        from penstock.serve.grpc.service import GrpcServer

        home = asyncio.get_running_loop()
        max_bytes = self._grpc_body_bytes = self.models.max_body_bytes
        network = self._settings.network

        async def serve() -> Stop:
            server = GrpcServer(
                self.models,
                batch_loop=self._batch_loop,
                listener=grpc_listener(network, port),
                max_message_bytes=max_bytes + MAX_HEAD_BYTES,
                limits=grpc_limits(self._settings, descriptor_limit()),
                authorise=self._access.check_key,
                regions=self._regions,
                quotas=self._quotas,
                load=self._load,
                load_report=self._settings.telemetry.load_report,
                observers=self._call_observers,
                tls=tls_of(network),
                home=home,
            )
            await server.start()
            return server.stop

        thread = GrpcThread(serve)
        await thread.start()
        self._grpc = thread

    def leave(self) -> None:
        """Become not ready, and go on: load balancers are to see it before connections close."""
        self.models.leaving = True

    def begin_drain(self) -> None:
        """Become not ready, and close each connection after its next answer."""
        self.models.draining = True
        self.attachments.close_sequences()
        self.http.close_after_next()

    async def drain(self, hurry: Callable[[], bool]) -> None:
        """Answer the accepted requests, then close every connection."""
        self.begin_drain()
        log.info("draining: %d requests are being answered", self.attachments.in_use)
        seconds = self._settings.limits.drain_timeout_s
        calls = asyncio.create_task(self._grpc.drain(seconds)) if self._grpc else None
        await self.http.drain(seconds, hurry)
        if self._grpc is not None and calls is not None:
            while not calls.done() and not hurry():
                await asyncio.sleep(POLL_S)
            await self._grpc.close()
            await asyncio.wait([calls])
        for task in self._regular:
            task.cancel()
        self._end_traces()
        self._agent.close()
        self.chains.close()
        self.attachments.beams.close()
        log.info("drained; %d requests were answered in all", self.attachments.answered)

    async def _sweep(self) -> None:
        while True:
            begin_ns = time.monotonic_ns()
            await asyncio.sleep(SWEEP_S)
            now_ns = time.monotonic_ns()
            self.date.renew_if_due(now_ns)
            self.attachments.sweep(held_ns(begin_ns, now_ns, round(SWEEP_S * 1e9)))
            await self.http.sweep()

    async def _keep_date(self) -> None:
        while True:
            await asyncio.sleep(self.date.renew())


def quotas_of(settings: Settings, index: int) -> StreamQuotas:
    """Make the quotas of live streams for the front-end of this index."""
    access = settings.access
    if not settings.has_stream_quotas:
        return StreamQuotas()
    if access.client_counts is None:
        counts = ClientCounts.private()
    else:
        counts = ClientCounts.attached(settings.frontend_processes, index, access.client_counts)
    return StreamQuotas(access.max_streams_per_key, access.max_streams_per_address, counts)


def bounds_of(limits: LimitSettings) -> RequestBounds:
    """Make the bounds of connections and unfinished requests."""
    return RequestBounds(
        head_timeout_s=limits.head_timeout_s,
        body_timeout_s=limits.body_timeout_s,
        max_bytes=limits.max_unfinished_mib << 20,
    )


def sealer_of(access: AccessSettings) -> TicketSealer | None:
    """Make what seals the tickets of live streams; None without a key.

    Raises:
        ServeError: The keys cannot be used.
    """
    return TicketSealer(TicketKeys.read(access.ticket_keys)) if access.ticket_keys else None


def replay_of(settings: Settings, bounds: RequestBounds) -> ReplayLimits | None:
    """Make the limits of replays; None where nothing is kept: an engine in this process takes the streams with it."""
    limits = settings.limits
    if not limits.replay_s or not settings.frontend_processes:
        return None
    return ReplayLimits(ReplayMemory(bounds), limits.replay_s, limits.resume_timeout_s)


def check_telemetry(telemetry: TelemetrySettings) -> None:
    """Check that the packages for `--otlp-endpoint` are installed.

    Raises:
        ServeError: They are not.
    """
    if telemetry.otlp_endpoint is None:
        return
    try:
        import_module("penstock.serve.observe.tracing")
    except ModuleNotFoundError as error:
        raise ServeError(
            f"--otlp-endpoint needs the package {error.name}; pip install 'penstock-nn[telemetry]'."
        ) from None


def access_of(access: AccessSettings) -> Access:
    """Read the API keys and the CORS settings.

    Raises:
        ServeError: The file of the API keys cannot be used.
    """
    keys = None if access.api_keys is None else Keys.read(access.api_keys)
    return Access(keys, access.cors)
