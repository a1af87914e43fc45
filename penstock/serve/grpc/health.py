"""gRPC's own protocol for health checks: of the server, or of a model by its name.

https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, NoReturn, final

import grpc
import grpc.aio

from penstock.core.errors import InvalidInput, Overloaded, RequestError, TooLarge, TooSlow, UnknownRoute
from penstock.serve.grpc import health_pb2 as pb
from penstock.serve.grpc.conversion import parsed
from penstock.serve.grpc.observed_calls import count_response, observed
from penstock.serve.observe.call_record import CallObserver, CallRecord
from penstock.serve.registry.model_registry import ModelRegistry

SERVICE = "grpc.health.v1.Health"
# Names of the server as a whole.
SERVER = ("", "inference.GRPCInferenceService")
# How often a Watch reads the state, and how many there may be: each keeps its connection open, without a key.
POLL_S, MAX_WATCHES = 0.5, 64
# A request comes whole with its call. Slow ones are ended, the oldest first, so that none delays a check.
READ_S, MAX_READ, MAX_BYTES = 1.0, 64, 4096
Context = grpc.aio.ServicerContext[Any, Any]
Status = pb.HealthCheckResponse.ServingStatus


@final
@dataclass(frozen=True, kw_only=True)
class HealthService:
    """Answers health checks.

    Args:
        models: The models of the server.
        home: The loop of the models.
        unfold: Unfolds a message that came compressed.
        reject: Ends a call with an error.
        observers: The request log and the traces.
    """

    models: ModelRegistry
    home: asyncio.AbstractEventLoop
    unfold: Callable[[bytes], Awaitable[bytes]]
    reject: Callable[[Context, CallRecord, RequestError], Awaitable[NoReturn]]
    observers: Sequence[CallObserver] = ()
    _reading: dict[asyncio.Task[Any], None] = field(default_factory=dict[asyncio.Task[Any], None], init=False)
    _watches: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]], init=False)

    def handlers(self) -> grpc.GenericRpcHandler:
        """The handlers of both methods."""
        serialise = methodcaller("SerializeToString")
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Check": grpc.stream_unary_rpc_method_handler(
                observed(f"/{SERVICE}/Check", self._check, self.observers), response_serializer=serialise
            ),
            "Watch": grpc.stream_stream_rpc_method_handler(
                observed(f"/{SERVICE}/Watch", self._watch, self.observers), response_serializer=serialise
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _check(self, _: AsyncIterable[bytes], context: Context, call: CallRecord) -> pb.HealthCheckResponse:
        try:
            service = await self._service(context, call)
            status = await self._status(service)
            if status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
                raise UnknownRoute(f"This server has no model {service!r}.")
        except RequestError as error:
            return await self.reject(context, call, error)
        return pb.HealthCheckResponse(status=status)

    async def _watch(self, _: AsyncIterable[bytes], context: Context, call: CallRecord) -> None:
        try:
            service = await self._service(context, call)
            if len(self._watches) >= MAX_WATCHES:
                raise Overloaded(f"This server has {MAX_WATCHES} watches of its health; call Check instead.")
        except RequestError as error:
            return await self.reject(context, call, error)
        watch = _this_task()
        self._watches.add(watch)
        try:
            return await self._write_changes(service, context, call)
        finally:
            self._watches.discard(watch)

    async def _write_changes(self, service: str, context: Context, call: CallRecord) -> None:
        before: Status | None = None
        while True:
            ends = self.models.ends
            status = await self._status(service)
            if status != before:
                response = pb.HealthCheckResponse(status=status)
                await context.write(response)
                count_response(call, response)
                before = status
            if ends:
                # A server that ends would wait for it.
                return
            await asyncio.sleep(POLL_S)

    async def _service(self, context: Context, call: CallRecord) -> str:
        reading = _this_task()
        if len(self._reading) >= MAX_READ:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            oldest.cancel()
        self._reading[reading] = None
        try:
            async with asyncio.timeout(READ_S):
                message = await context.read()
        except TimeoutError:
            raise TooSlow(f"The request was not whole after {READ_S:g} s.") from None
        finally:
            self._reading.pop(reading, None)
        if not isinstance(message, bytes):
            raise InvalidInput("A health check has one message.")
        if len(message) > MAX_BYTES:
            raise TooLarge(f"A health check has at most {MAX_BYTES:,} bytes.")
        service = parsed(pb.HealthCheckRequest, await self.unfold(message)).service
        call.name_model("" if service in SERVER else service)
        return service

    async def _status(self, service: str) -> Status:
        async def found() -> Status:
            return self._status_here(service)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(found(), self.home))

    def _status_here(self, service: str) -> Status:
        serving, not_serving = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
        if service in SERVER:
            try:
                self.models.reject_unready()
            except RequestError:
                return not_serving
            return serving
        states = [model.state for model in self.models.states_here if model.name == service]
        if not states:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        return serving if "READY" in states and not self.models.ends else not_serving


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
