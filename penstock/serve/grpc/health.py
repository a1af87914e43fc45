"""gRPC's own protocol for health checks: of the server, or of a model by its name.

https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, NoReturn, final

import grpc
import grpc.aio

from penstock.core.errors import RequestError, UnknownRoute
from penstock.serve.grpc import health_pb2 as pb
from penstock.serve.grpc.conversion import parsed
from penstock.serve.registry.model_registry import ModelRegistry

SERVICE = "grpc.health.v1.Health"
# Names of the server as a whole.
SERVER = ("", "inference.GRPCInferenceService")
# Between two looks for a Watch.
LOOK_S = 0.5
Context = grpc.aio.ServicerContext[Any, Any]
Status = pb.HealthCheckResponse.ServingStatus


@final
@dataclass(frozen=True, kw_only=True)
class HealthService:
    """Answers health checks.

    Args:
        models: The models of the server.
        home: The loop of the models.
        read: Reads the one message of a call.
        reject: Ends a call with an error.
    """

    models: ModelRegistry
    home: asyncio.AbstractEventLoop
    read: Callable[[Context], Awaitable[bytes]]
    reject: Callable[[Context, RequestError], Awaitable[NoReturn]]

    def handlers(self) -> grpc.GenericRpcHandler:
        """The handlers of both methods."""
        serialise = methodcaller("SerializeToString")
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, response_serializer=serialise),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=serialise),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _check(self, _: AsyncIterable[bytes], context: Context) -> pb.HealthCheckResponse:
        try:
            service = await self._service(context)
            status = await self._status(service)
            if status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
                raise UnknownRoute(f"This server has no model {service!r}.")
        except RequestError as error:
            return await self.reject(context, error)
        return pb.HealthCheckResponse(status=status)

    async def _watch(self, _: AsyncIterable[bytes], context: Context) -> None:
        try:
            service = await self._service(context)
        except RequestError as error:
            return await self.reject(context, error)
        before: Status | None = None
        while True:
            ends = self.models.ends
            status = await self._status(service)
            if status != before:
                await context.write(pb.HealthCheckResponse(status=status))
                before = status
            if ends:
                # A server that ends would wait for it.
                return None
            await asyncio.sleep(LOOK_S)

    async def _service(self, context: Context) -> str:
        return parsed(pb.HealthCheckRequest, await self.read(context)).service

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
