"""`--log-requests`: one line for each request and gRPC call. Without the option the request path has none of it."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from penstock.core.errors import RequestError
from penstock.serve.exchange.access import Access
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Handler, Rejecter, Response
from penstock.serve.observe.call_record import CallRecord

log = logging.getLogger("penstock.requests")

# Of an error, which may repeat megabytes of a request.
MAX_ERROR_CHARACTERS = 1000
CLIENT_GONE = 499  # nginx logs the same for a client that closed before its answer


@final
@dataclass(eq=False)
class RequestLog:
    """Writes a line for each request as it is answered.

    Args:
        handler: Answers requests.
        rejecter: Answers requests that cannot be read to their end.
        access: Finds client names by their keys.
        clock_s: A monotonic clock in seconds.
    """

    handler: Handler
    rejecter: Rejecter
    access: Access
    clock_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # Independent of --verbose.
        log.setLevel(logging.INFO)

    def handle(self, request: Request, answer: Answer) -> Callable[[], None] | None:
        """Answer a request, and log it then."""
        head, start_s = request.head, self.clock_s()

        def answered(response: Response) -> None:
            self._write(head, response, start_s)
            answer(response)

        cancel = self.handler(request, answered)

        def left() -> None:
            self._write(head, Response(CLIENT_GONE), start_s)
            if cancel is not None:
                cancel()

        return left

    def reject(self, error: RequestError, head: Head) -> Response:
        """Answer a request that cannot be read to its end, and log it."""
        response = self.rejecter(error, head)
        # A body that did not come in time took all that time.
        self._write(head, response, head.began_ns / 1e9 or self.clock_s())
        return response

    def _write(self, head: Head, response: Response, start_s: float) -> None:
        milliseconds = round((self.clock_s() - start_s) * 1e3, 3)
        client = self.access.client(head)
        error = _text_of(response.error)
        fields = {
            "method": head.method,
            "path": head.path,
            "status": response.status,
            "milliseconds": milliseconds,
            "bytes": len(response.body),
            "client": client,
            "error": error,
        }
        shown = {
            "method": head.method or "-",
            "client": client or "-",
            "error": "" if error is None else f" {error!r}",
        }
        # `%r`: a path or an error may hold line ends and control characters, which must not look like further lines.
        line = "%(method)s %(path)r %(status)d %(milliseconds).3f ms %(bytes)d bytes %(client)s%(error)s"
        log.info(line, fields | shown, extra={"fields": fields})


@final
@dataclass(eq=False)
class CallLog:
    """Writes a line for each gRPC call as it ends.

    Args:
        access: Finds client names by their keys.
        clock_s: A monotonic clock in seconds.
    """

    access: Access
    clock_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # Independent of --verbose.
        log.setLevel(logging.INFO)

    def observe(self, call: CallRecord) -> Callable[[], None]:
        """Note the begin of a call; returns what is called at its end."""
        start_s = self.clock_s()
        return lambda: self._write(call, start_s)

    def _write(self, call: CallRecord, start_s: float) -> None:
        client = self.access.client_of(call.metadata.get("authorization"))
        error = _text_of(call.error)
        fields = {
            "method": "gRPC",
            "path": call.path,
            "model": call.model or None,
            "grpc_status": call.status,
            "milliseconds": round((self.clock_s() - start_s) * 1e3, 3),
            "bytes": call.nbytes,
            "client": client,
            "error": error,
        }
        shown = {
            "model": repr(call.model) if call.model else "-",
            "client": client or "-",
            "error": "" if error is None else f" {error!r}",
        }
        line = "%(method)s %(path)r %(model)s %(grpc_status)s %(milliseconds).3f ms %(bytes)d bytes %(client)s%(error)s"
        log.info(line, fields | shown, extra={"fields": fields})


def _text_of(error: RequestError | None) -> str | None:
    text = None if error is None else str(error)
    return text if text is None or len(text) <= MAX_ERROR_CHARACTERS else f"{text[:MAX_ERROR_CHARACTERS]}..."
