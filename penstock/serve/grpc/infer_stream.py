"""One `ModelStreamInfer` call: its requests run at once, and each is answered as soon as it is done."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine
from typing import Any, final

import grpc
import grpc.aio

from penstock.core.errors import RequestError
from penstock.serve.exchange.response import internal_error
from penstock.serve.grpc import oip_v2_pb2 as pb
from penstock.serve.grpc.compression import Unfolding
from penstock.serve.grpc.conversion import details_of, parsed, retry_metadata, status_of
from penstock.serve.grpc.message_bounds import StreamPatience
from penstock.serve.grpc.observed_calls import count_response, note_error, note_gone, set_status
from penstock.serve.observe.call_record import CallRecord
from penstock.serve.settings import LimitSettings

log = logging.getLogger(__name__)

# Unanswered requests of one stream; the stream is read no further at this number.
STREAM_IN_FLIGHT = 256

Context = grpc.aio.ServicerContext[Any, Any]
# The steps of an answer that have come and were not written yet; None after the last.
Steps = asyncio.Queue[pb.ModelInferResponse | None]
Infer = Callable[[pb.ModelInferRequest, Steps], Coroutine[Any, Any, pb.ModelInferResponse]]


@final
class InferStream:
    """Reads the requests of a stream and writes their responses.

    Args:
        context: The call.
        call: Its record.
        limits: Timeouts.
        unfolding: Unfolds compressed messages.
        infer: Answers a request; the steps of its answer but the last go to the queue.
        begins: Called at the first whole request.
    """

    def __init__(
        self,
        context: Context,
        call: CallRecord,
        limits: LimitSettings,
        unfolding: Unfolding,
        infer: Infer,
        begins: Callable[[], None],
    ) -> None:
        self._begins = begins
        self._begun = False
        self._context, self._call = context, call
        self._infer, self._unfolding = infer, unfolding
        self._patience = StreamPatience(limits, self._end)
        self._ended: RequestError | None = None
        self._room, self._writing = asyncio.Semaphore(STREAM_IN_FLIGHT), asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None

    async def run(self, requests: AsyncIterable[bytes]) -> None:
        """Answer the requests until the client or `stop_reading` ends the stream."""
        gone = False
        try:
            async with asyncio.TaskGroup() as group:
                self._reading = group.create_task(self._read(requests, group))
        except* (grpc.aio.InternalError, grpc.aio.UsageError):
            # The client is gone: the call cannot be read or written any more.
            gone = True
        finally:
            self._patience.close()
        assert self._reading is not None, gone
        if gone:
            note_gone(self._call, self._context)
            return
        if self._ended is not None:
            note_error(self._call, self._ended)
            await self._context.abort(status_of(self._ended), details_of(self._ended), retry_metadata(self._ended))
        if self._reading.cancelled():
            set_status(self._call, grpc.StatusCode.UNAVAILABLE)
            await self._context.abort(
                grpc.StatusCode.UNAVAILABLE, "The server is shutting down; open a stream to another one."
            )

    def stop_reading(self) -> None:
        """Take no further request; the stream ends when its last one is answered."""
        if self._reading is not None:
            self._reading.cancel()

    def _end(self, error: RequestError) -> None:
        self._ended = error
        self.stop_reading()
        for task in self._tasks:
            task.cancel()

    async def _read(self, requests: AsyncIterable[bytes], group: asyncio.TaskGroup) -> None:
        async for raw in requests:
            if not self._begun:
                self._begun = True
                self._begins()
            self._patience.message_came()
            await self._room.acquire()
            # Here and not in its task: requests of a sequence stay in order.
            message: bytes | RequestError
            try:
                message = await self._unfolding.unfolded(raw)
            except RequestError as error:
                message = error
            task = group.create_task(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: bytes | RequestError) -> None:
        async for response in self._responses(message):
            async with self._writing:
                self._patience.write_begins()
                await self._context.write(response)
                count_response(self._call, response)
                self._patience.write_ended()
        self._patience.answered()
        self._room.release()

    async def _responses(self, message: bytes | RequestError) -> AsyncGenerator[pb.ModelStreamInferResponse]:
        """Yield the response to a request, or that of each step of its answer."""
        request = pb.ModelInferRequest()
        # At most those of one answer.
        steps: Steps = asyncio.Queue()
        answering: asyncio.Task[pb.ModelInferResponse] | None = None
        try:
            if isinstance(message, RequestError):
                raise message
            request = parsed(pb.ModelInferRequest, message)
            answering = asyncio.create_task(self._infer(request, steps))
            answering.add_done_callback(lambda _: steps.put_nowait(None))
            while (step := await steps.get()) is not None:
                yield pb.ModelStreamInferResponse(infer_response=step)
            response = await answering
            response.parameters["triton_final_response"].bool_param = True
            yield pb.ModelStreamInferResponse(infer_response=response)
            return
        except RequestError as error:
            rejection = error
        except Exception:
            log.exception("a request of a stream failed")
            rejection = internal_error()
        finally:
            if answering is not None:
                # The client is gone: its rows need not run.
                answering.cancel()
        yield pb.ModelStreamInferResponse(
            error_message=str(rejection), infer_response=pb.ModelInferResponse(id=request.id)
        )
