"""Calls as the request log and the traces see them: from the head of a call to its end."""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from penstock.core.errors import RequestError
from penstock.serve.grpc.conversion import status_of
from penstock.serve.observe.call_record import CallObserver, CallRecord

Context = grpc.aio.ServicerContext[Any, Any]
# Answers a call, and fills in its record.
Behaviour = Callable[[AsyncIterable[bytes], Context, CallRecord], Awaitable[Any]]
Handle = Callable[[AsyncIterable[bytes], Context], Awaitable[Any]]
# A call that is cancelled so shortly before its deadline was cancelled by it, in the client.
DEADLINE_S = 0.05


def observed(path: str, behaviour: Behaviour, observers: Sequence[CallObserver]) -> Handle:
    """Return a handler of the calls of one path that observers see.

    Args:
        path: The path.
        behaviour: Answers a call.
        observers: Called as a call begins.
    """

    async def unseen(messages: AsyncIterable[bytes], context: Context) -> Any:
        return await behaviour(messages, context, CallRecord(path))

    async def seen(messages: AsyncIterable[bytes], context: Context) -> Any:
        metadata = context.invocation_metadata() or ()
        call = CallRecord(path, {str(name): value for name, value in metadata if isinstance(value, str)}, counts=True)
        ends = [end for observe in observers if (end := observe(call)) is not None]
        try:
            response = await behaviour(messages, context, call)
            count_response(call, response)
            return response
        except asyncio.CancelledError:
            note_gone(call, context)
            raise
        except Exception:
            # The library answers with this status, unless the call was ended with another one.
            if not call.code:
                set_status(call, grpc.StatusCode.UNKNOWN)
            raise
        finally:
            for end in ends:
                end()

    return seen if observers else unseen


def count_response(call: CallRecord, response: Message | None) -> None:
    """Add the bytes of a response, where somebody wants to know them: it is encoded once more."""
    if call.counts and response is not None:
        call.nbytes += response.ByteSize()


def note_error(call: CallRecord, error: RequestError) -> None:
    """Note why a call is rejected."""
    call.error = error
    set_status(call, status_of(error))


def note_gone(call: CallRecord, context: Context) -> None:
    """Note that a client has left, or that its deadline has passed."""
    call.gone = True
    # None where the client named no deadline.
    left_s = cast(float | None, context.time_remaining())
    passed = left_s is not None and left_s < DEADLINE_S
    set_status(call, grpc.StatusCode.DEADLINE_EXCEEDED if passed else grpc.StatusCode.CANCELLED)


def set_status(call: CallRecord, status: grpc.StatusCode) -> None:
    """Note the status with which a call ends."""
    call.code, call.status = status.value[0], status.name
