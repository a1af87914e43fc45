"""`--log-requests`: one line for each request. Without the option the request path has none of it."""

import logging
import time
from collections.abc import Callable
from typing import final

from penstock.core.errors import RequestError
from penstock.serve.exchange.access import Access
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Handler, Refuser, Response

log = logging.getLogger("penstock.requests")

CLIENT_GONE = 499  # nginx logs the same for a client that closed before its answer


@final
class RequestLog:
    """Writes a line for each request as it is answered.

    Args:
        handle: Answers requests.
        refuse: Answers requests that cannot be read to their end.
        access: Finds client names by their keys.
        clock_s: A monotonic clock in seconds.
    """

    def __init__(
        self, handle: Handler, refuse: Refuser, access: Access, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._handle = handle
        self._refuse = refuse
        self._access = access
        self._clock_s = clock_s
        # Independent of --verbose.
        log.setLevel(logging.INFO)

    def handle(self, request: Request, answer: Answer) -> Callable[[], None] | None:
        """Answer a request, and log it then."""
        head, start_s = request.head, self._clock_s()

        def answered(response: Response) -> None:
            self._write(head, response.status, start_s, len(response.body))
            answer(response)

        cancel = self._handle(request, answered)

        def left() -> None:
            self._write(head, CLIENT_GONE, start_s, 0)
            if cancel is not None:
                cancel()

        return left

    def refuse(self, error: RequestError, head: Head) -> Response:
        """Answer a request that cannot be read to its end, and log it."""
        response = self._refuse(error, head)
        self._write(head, response.status, self._clock_s(), len(response.body))
        return response

    def _write(self, head: Head, status: int, start_s: float, count: int) -> None:
        milliseconds = round((self._clock_s() - start_s) * 1e3, 3)
        client = self._access.client(head)
        fields = {
            "method": head.method,
            "path": head.path,
            "status": status,
            "milliseconds": milliseconds,
            "bytes": count,
            "client": client,
        }
        # `%r`: a path may hold line ends and control characters, which must not look like lines of their own.
        log.info(
            "%s %r %d %.3f ms %d bytes %s",
            head.method or "-",
            head.path,
            status,
            milliseconds,
            count,
            client or "-",
            extra={"fields": fields},
        )
