"""`--log-requests`: one line a request. Nothing of this is in the path of a request without the option."""

import logging
import time
from collections.abc import Callable
from typing import final

from penstock.core.errors import RequestError
from penstock.serve.access import Access
from penstock.serve.connection import Answer, Handler, Refuse
from penstock.serve.wire import Head, Request, Response

log = logging.getLogger("penstock.requests")

LEFT = 499  # what nginx logs for a client that left before its answer


@final
class RequestLog:
    """Writes a line for each request as it is answered.

    Args:
        handle: What answers requests.
        refuse: What answers requests that cannot be read to their end.
        access: Knows the clients' names by their keys.
        clock_s: A monotonic clock in seconds.
    """

    def __init__(
        self, handle: Handler, refuse: Refuse, access: Access, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._handle = handle
        self._refuse = refuse
        self._access = access
        self._clock_s = clock_s
        # Its lines were asked for by themselves, whether or not --verbose is given.
        log.setLevel(logging.INFO)

    def handle(self, request: Request, answer: Answer) -> Callable[[], None] | None:
        """Answer a request, and log it when that is done."""
        head, start_s = request.head, self._clock_s()

        def answered(response: Response) -> None:
            self._write(head, response.status, start_s, len(response.body))
            answer(response)

        cancel = self._handle(request, answered)

        def left() -> None:
            self._write(head, LEFT, start_s, 0)
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
