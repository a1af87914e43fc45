"""The Open Inference Protocol, version 2, over gRPC.

gRPC may run in another loop than the models: everything that touches a model runs in the models' loop, the home loop.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterable, Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, NoReturn, final

import grpc
import grpc.aio
from google.protobuf.message import Message

from penstock.core.errors import InvalidInput, RequestError
from penstock.core.machine.version import __version__
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.exchange.local_client import Connected
from penstock.serve.exchange.open_connections import all_in_use
from penstock.serve.exchange.response import internal_error
from penstock.serve.grpc import oip_v2_pb2 as pb
from penstock.serve.grpc.call import submit_call
from penstock.serve.grpc.call_order import CallOrder, CallPlace
from penstock.serve.grpc.conversion import details_of, parsed, retry_metadata, status_of
from penstock.serve.grpc.frame_guard import FrameGuard
from penstock.serve.grpc.health import HealthService
from penstock.serve.grpc.infer_stream import InferStream, Steps
from penstock.serve.grpc.message_bounds import MessageBounds, channel_options
from penstock.serve.grpc.observed_calls import Handle, note_error, observed
from penstock.serve.observe.call_record import CallObserver, CallRecord
from penstock.serve.observe.load_report import FORMAT_HEADER, HEADER, LoadMeter
from penstock.serve.observe.metrics import statistics_of
from penstock.serve.oip.metadata import model_config, model_metadata
from penstock.serve.oip.shared_memory import Lookup, Regions, extensions, no_regions
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.settings import LimitSettings
from penstock.serve.streams.quotas import GRPC_STREAMS, StreamClient, StreamQuotas

log = logging.getLogger(__name__)

SERVICE = "inference.GRPCInferenceService"
EXTENSIONS = ["model_configuration", "model_repository", "sequence", "statistics"]
Context = grpc.aio.ServicerContext[Any, Any]
# Takes the metadata `authorization` of a call and whether it needs an admin; returns the owner of the key, and raises
# if the call is not allowed.
Authorise = Callable[[str | None, bool], str]
# The parameter of a request that belongs to a sequence, whose requests keep their order.
SEQUENCE = "sequence_id"
HEALTH = ("ServerLive", "ServerReady")
# What is answered over a connection beyond the limit.
PROBES = (*HEALTH, "ModelReady")
ADMINS = ("RepositoryModelLoad", "RepositoryModelUnload")
# The field of a request that names the model.
NAMED = {
    "ModelReady": "name",
    "ModelMetadata": "name",
    "ModelConfig": "name",
    "ModelStatistics": "name",
    "ModelInfer": "model_name",
    "RepositoryModelLoad": "model_name",
    "RepositoryModelUnload": "model_name",
}
Answer = Callable[[Any], Coroutine[Any, Any, Message]]
Trailers = tuple[tuple[str, str | bytes], ...]


@final
@dataclass(eq=False)
class GrpcServer:
    """A gRPC server of models, in the running event loop; `start` it, and `stop` it to drain.

    Args:
        models: The models of the server.
        batch_loop: Runs the batches.
        listener: The socket that clients connect to.
        max_message_bytes: Largest message that is accepted.
        limits: Limits of connections and of messages that have not come whole, and timeouts.
        authorise: Checks the key of a call; liveness and readiness need none.
        regions: The regions of shared memory.
        tls: The TLS context; None for no TLS.
        home: The loop of the models; the running one by default.
        quotas: Limits the sequences and the streams of one client.
        load: Makes load reports.
        load_report: Form of the load report of each answer, see `TelemetrySettings`.
        observers: The request log and the traces.

    Attributes:
        port: The port of the listener.

    Raises:
        ServeError: The library has no place for its own socket.
    """

    models: ModelRegistry
    _: KW_ONLY
    batch_loop: BatchLoop
    listener: socket.socket
    max_message_bytes: int
    limits: LimitSettings
    authorise: Authorise
    regions: Regions
    tls: ssl.SSLContext | None = None
    home: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    quotas: StreamQuotas = field(default_factory=StreamQuotas)
    load: LoadMeter | None = None
    load_report: str | None = None
    observers: Sequence[CallObserver] = ()

    def __post_init__(self) -> None:
        self._streams: set[InferStream] = set()
        self._bounds = MessageBounds(self.limits, self.max_message_bytes)
        self._order = CallOrder()
        self._server = grpc.aio.server(options=channel_options(self.limits, self.max_message_bytes))
        unfold = self._bounds.unfolding.unfolded
        health = HealthService(
            models=self.models, home=self.home, unfold=unfold, reject=_reject, observers=self.observers
        )
        self._server.add_generic_rpc_handlers((self._handlers(), health.handlers()))
        self.port: int = self.listener.getsockname()[1]
        self._guard = FrameGuard(self.listener, self.limits, self.tls)
        self._guard.bind(self._server.add_insecure_port)

    async def start(self) -> None:
        """Accept calls."""
        await self._server.start()
        self._guard.start()

    async def stop(self, grace_s: float | None) -> None:
        """Reject new calls, answer the accepted ones, and end streams when their last request is answered.

        A second call with a shorter time shortens it.

        Args:
            grace_s: Seconds after which the remaining calls are cancelled; None for at once.
        """
        self._guard.stop_accepting()
        for stream in list(self._streams):
            stream.stop_reading()
        await self._server.stop(grace_s)
        await self._guard.close()

    def _handlers(self) -> grpc.GenericRpcHandler:
        """The handler of each method; messages come as bytes, so that a damaged one gets an error of our own.

        Methods of one message are handled as streams of messages, which are the same on the wire: the handler runs
        when the head has come, and checks the key and bounds the message.
        """
        answers: dict[str, Answer | None] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "ModelInfer": None,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": None,
            "SystemSharedMemoryRegister": None,
            "SystemSharedMemoryUnregister": None,
        }
        serialise = methodcaller("SerializeToString")
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.stream_unary_rpc_method_handler(self._answering(name, answer), response_serializer=serialise)
            for name, answer in answers.items()
        }
        streaming = observed(f"/{SERVICE}/ModelStreamInfer", self._model_stream_infer, self.observers)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(streaming, response_serializer=serialise)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _answering(self, method: str, answer_at_home: Answer | None) -> Handle:
        request_type: type[Message] = getattr(pb, f"{method}Request")

        async def answer(_: AsyncIterable[bytes], context: Context, call: CallRecord) -> Message:
            place = self._order.enter(context.peer()) if method == "ModelInfer" else None
            try:
                if method not in PROBES and self._guard.is_reserved(context.peer()):
                    raise all_in_use(self.limits.max_connections)
                if method in HEALTH:
                    # Its message has no fields, and nobody's message may delay it.
                    owner, request = "", request_type()
                else:
                    owner = self._check_key(context, admin=method in ADMINS)
                    request = parsed(request_type, await self._bounds.read(context))
                if method in NAMED:
                    call.name_model(getattr(request, NAMED[method]))
                if answer_at_home is not None:
                    at_home = asyncio.run_coroutine_threadsafe(answer_at_home(request), self.home)
                    return await asyncio.wrap_future(at_home)
                if isinstance(request, pb.ModelInferRequest):
                    if place is not None and SEQUENCE in request.parameters:
                        await place.wait()
                    client, lookup = self._client(context, owner), self._lookup(context, owner)
                    response = await self._infer(request, context.time_remaining(), client, lookup, call, place=place)
                    if report := await self._report(context):
                        context.set_trailing_metadata(report)
                    return response
                changed = self._shared_memory(request, self._connected(context), owner)
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(changed, self.home))
            except RequestError as error:
                rejection = error
            except Exception:
                log.exception("%s failed", method)
                rejection = internal_error()
            finally:
                if place is not None:
                    place.end()
            return await _reject(
                context, call, rejection, await self._report(context) if method == "ModelInfer" else ()
            )

        return observed(f"/{SERVICE}/{method}", answer, self.observers)

    async def _report(self, context: Context) -> Trailers:
        """The load report as trailing metadata, where the call asks for one; gRPC has one form of it."""
        load = self.load
        asked = self.load_report or any(name == FORMAT_HEADER for name, _ in context.invocation_metadata() or ())
        if load is None or not asked:
            return ()

        async def made() -> bytes:
            return load.report().message()

        message = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(made(), self.home))
        return ((f"{HEADER}-bin", message),)

    def _check_key(self, context: Context, *, admin: bool = False) -> str:
        keys = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        # Only metadata whose name ends in -bin holds bytes.
        return self.authorise(str(keys[0]) if keys else None, admin)

    async def _server_live(self, request: pb.ServerLiveRequest) -> Message:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, request: pb.ServerReadyRequest) -> Message:
        try:
            self.models.reject_unready()
        except RequestError:
            return pb.ServerReadyResponse(ready=False)
        return pb.ServerReadyResponse(ready=True)

    async def _server_metadata(self, request: pb.ServerMetadataRequest) -> Message:
        return pb.ServerMetadataResponse(
            name="penstock", version=__version__, extensions=extensions(EXTENSIONS, self.regions)
        )

    async def _model_ready(self, request: pb.ModelReadyRequest) -> Message:
        ready = any(
            model.name == request.name and request.version in ("", model.version) and model.state == "READY"
            for model in self.models.states_here
        )
        return pb.ModelReadyResponse(ready=ready and not self.models.ends)

    async def _model_metadata(self, request: pb.ModelMetadataRequest) -> Message:
        served = self.models.named(request.name, request.version)
        return pb.ModelMetadataResponse(**model_metadata(served, self.models.versions(served.name)))

    async def _model_config(self, request: pb.ModelConfigRequest) -> Message:
        config = model_config(self.models.named(request.name, request.version))
        return pb.ModelConfigResponse(config=pb.ModelConfig(**config))

    async def _model_statistics(self, request: pb.ModelStatisticsRequest) -> Message:
        wanted = [(request.name, request.version)]
        if not request.name:
            wanted = [(model.name, model.version) for model in self.models.states_here if model.state == "READY"]
        entries = [statistics_of(self.models.named(*model, first_use=False)) for model in wanted]
        return pb.ModelStatisticsResponse(model_stats=[pb.ModelStatistics(**entry) for entry in entries])

    async def _repository_index(self, request: pb.RepositoryIndexRequest) -> Message:
        _check_repository(request.repository_name)
        models = self.models.index()
        if request.ready:
            models = [model for model in models if model["state"] == "READY"]
        return pb.RepositoryIndexResponse(models=models)

    async def _load(self, request: pb.RepositoryModelLoadRequest) -> Message:
        _check_repository(request.repository_name)
        if request.parameters:
            raise InvalidInput(
                f"Loading takes no parameters here, and {', '.join(sorted(request.parameters))} came; "
                "change the bundle and load it anew."
            )
        await self.models.change(request.model_name, unload=False)
        return pb.RepositoryModelLoadResponse()

    async def _unload(self, request: pb.RepositoryModelUnloadRequest) -> Message:
        # Clients send one parameter, unload_dependents; no model here depends on another one.
        _check_repository(request.repository_name)
        await self.models.change(request.model_name, unload=True)
        return pb.RepositoryModelUnloadResponse()

    def _connected(self, context: Context) -> Connected | None:
        metadata = {str(name): value for name, value in context.invocation_metadata() or ()}
        return Connected.over_grpc(self._guard.peer(context.peer()), self.port, metadata)

    def _client(self, context: Context, owner: str) -> StreamClient:
        if self.quotas.per_address is None:
            return StreamClient(owner)
        connected = Connected.over_grpc(self._guard.peer(context.peer()), self.port, {})
        return StreamClient(owner, "" if connected is None else connected.address)

    def _lookup(self, context: Context, owner: str) -> Lookup:
        return self.regions.lookup(self._connected(context), owner) if self.regions.enabled else no_regions

    async def _shared_memory(self, request: Message, client: Connected | None, owner: str) -> Message:
        if isinstance(request, pb.SystemSharedMemoryRegisterRequest):
            self.regions.register(request.name, request.key, request.offset, request.byte_size, client, owner)
            return pb.SystemSharedMemoryRegisterResponse()
        if isinstance(request, pb.SystemSharedMemoryUnregisterRequest):
            self.regions.unregister(request.name, client, owner)
            return pb.SystemSharedMemoryUnregisterResponse()
        assert isinstance(request, pb.SystemSharedMemoryStatusRequest), request
        status = pb.SystemSharedMemoryStatusResponse.RegionStatus
        found = {each["name"]: status(**each) for each in self.regions.status(request.name, client, owner)}
        return pb.SystemSharedMemoryStatusResponse(regions=found)

    async def _infer(
        self,
        request: pb.ModelInferRequest,
        left_s: float | None,
        client: StreamClient,
        lookup: Lookup,
        call: CallRecord | None = None,
        steps: asyncio.Queue[pb.ModelInferResponse | None] | None = None,
        place: CallPlace | None = None,
    ) -> pb.ModelInferResponse:
        """Answer a request; with `steps`, those of an answer that takes steps go there, except the last.

        The place of its call ends once the request is submitted. A stream's requests have no call of their own.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[pb.ModelInferResponse | RequestError] = loop.create_future()

        def resolve(result: pb.ModelInferResponse | RequestError) -> None:
            # A cancelled call cancels its rows only when it runs again.
            if not answer.done():
                answer.set_result(result)

        cancel_rows: Callable[[], None] | None = None

        def submit() -> None:
            nonlocal cancel_rows
            stepped = None if steps is None else partial(loop.call_soon_threadsafe, steps.put_nowait)

            def submit_it(done: Callable[[Any], object]) -> Callable[[], None] | None:
                return submit_call(
                    self.models,
                    self.batch_loop,
                    request,
                    left_s,
                    client.key,
                    done,
                    stepped,
                    lookup,
                    client.address,
                    None if call is None else call.observe_step,
                )

            done = partial(loop.call_soon_threadsafe, resolve)
            cancel_rows = submit_it(done) if call is None else call.submit(request.model_name, submit_it, done)

        def cancel() -> None:
            if cancel_rows is not None:
                cancel_rows()

        self.home.call_soon_threadsafe(submit)
        if place is not None:
            place.end()
        try:
            result = await answer
        except asyncio.CancelledError:
            # The client is gone: its rows need not run.
            self.home.call_soon_threadsafe(cancel)
            raise
        if isinstance(result, RequestError):
            raise result
        return result

    async def _model_stream_infer(self, requests: AsyncIterable[bytes], context: Context, call: CallRecord) -> None:
        try:
            if self._guard.is_reserved(context.peer()):
                raise all_in_use(self.limits.max_connections)
            client = self._client(context, self._check_key(context))
            self.quotas.admit(client, GRPC_STREAMS)
        except RequestError as error:
            await _reject(context, call, error)
        # The deadline of the RPC belongs to the whole stream, not to a request.
        lookup = self._lookup(context, client.key)
        held: list[str] = []

        def begins() -> None:
            held.append(context.peer())
            self._guard.hold(held[0], 1)

        async def infer(request: pb.ModelInferRequest, steps: Steps) -> pb.ModelInferResponse:
            if not call.model:
                call.name_model(request.model_name)
            return await self._infer(request, None, client, lookup, steps=steps)

        stream = InferStream(
            context,
            call,
            self.limits,
            self._bounds.unfolding,
            infer,
            begins,
        )
        self._streams.add(stream)
        try:
            await stream.run(requests)
        finally:
            self._streams.discard(stream)
            for peer in held:
                self._guard.hold(peer, -1)
            self.quotas.leave(client, GRPC_STREAMS)


async def _reject(context: Context, call: CallRecord, error: RequestError, further: Trailers = ()) -> NoReturn:
    note_error(call, error)
    await context.abort(status_of(error), details_of(error), (*retry_metadata(error), *further))


def _check_repository(name: str) -> None:
    if name:
        raise InvalidInput(f"There is one repository, and it has no name; {name!r} came.")
