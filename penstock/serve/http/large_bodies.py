"""Threads that unpack and read large bodies, so that the event loop goes on with small ones; the limit of JSON."""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, final

from penstock.core.errors import RequestError
from penstock.serve.exchange.form import JSON, TEXT
from penstock.serve.exchange.json_bound import check_json, size_of
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Cancel, Handler, internal_error, rejected
from penstock.serve.frontend.function_pool import FunctionJob, FunctionPool
from penstock.serve.http.encoding import decompress, is_quick
from penstock.serve.http.oip_http import HEAD_LENGTH
from penstock.serve.http.picture_beside import picture_of
from penstock.serve.http.plain_body import UNSPECIFIED, content_type_of, is_decoded
from penstock.serve.registry.served_chain import Served

log = logging.getLogger(__name__)

# Above this size a body is read in a thread; in the event loop it takes a few milliseconds at most.
LARGE_BYTES = 1 << 17


class JsonCall(Protocol):
    """Answers the requests with one head, in one step or in two."""

    def handle(self, request: Request, answer: Answer) -> Cancel:
        """Read and submit a request; returns a function that cancels it."""
        ...

    def read(self, request: Request) -> Any:
        """Read the body, in any thread."""

    def submit(self, read: Any, request: Request, answer: Answer, /) -> Cancel:
        """Submit what `read` returned."""
        ...


@final
@dataclass(eq=False)
class LargeBodies:
    """The threads of one front-end."""

    _pool: FunctionPool = field(
        default_factory=partial(FunctionPool, "the server, which reads a large body", time.monotonic_ns), init=False
    )

    def unpack(
        self, handle: Handler, max_bytes: int, served: Served | None, request: Request, answer: Answer
    ) -> Cancel | None:
        """Answer a request whose body is compressed; returns a function that cancels it.

        Args:
            handle: Answers it once it is unpacked.
            max_bytes: Of the unpacked body.
            served: The model that counts a rejection.
            request: The request.
            answer: Takes the response.

        Raises:
            RequestError: The body cannot be unpacked, or the request is rejected.
        """
        encoding = request.head.headers["content-encoding"]
        check = None
        if served is not None and json_limit(served, request.head) < sys.maxsize:
            check = partial(check_json, spec=served.application.input, rows=served.max_rows)
        unpack = partial(decompress, request.body, encoding, max_bytes, check)

        def submit(body: bytes, own_ns: int) -> Cancel | None:
            request.body = body
            # The time spent on this body alone depends on its size, so it does not count against the budget.
            request.arrival_ns += own_ns
            return handle(request, answer)

        if is_quick(request.body, encoding):
            return submit(unpack(), 0)
        return self.read(unpack, submit, served, request, answer)

    def call(self, served: Served, call: JsonCall, request: Request, answer: Answer) -> Cancel:
        """Answer a request whose body is JSON; returns a function that cancels it.

        Raises:
            RequestError: It is rejected.
        """
        body = request.body
        if len(body) <= LARGE_BYTES or is_decoded(served.application, JSON, body):
            return call.handle(request, answer)

        def submit(read: Any, own_ns: int) -> Cancel:
            request.arrival_ns += own_ns
            return call.submit(read, request, answer)

        return self.read(partial(call.read, request), submit, served, request, answer)

    def read(
        self,
        make: Callable[[], Any],
        submit: Callable[[Any, int], Cancel | None],
        served: Served | None,
        request: Request,
        answer: Answer,
    ) -> Cancel:
        """Read a body in a thread, and go on with what was read; returns a function that cancels it.

        Args:
            make: Reads it; may raise `RequestError`.
            submit: Takes what `make` returned, and its time in nanoseconds.
            served: The model that counts a rejection; None if none does.
            request: The request.
            answer: Takes the response.
        """
        cancel_submitted: Cancel | None = None

        def reject(error: RequestError) -> None:
            if served is not None:
                served.count_rejection(error)
            answer(rejected(error))

        def done(found: Any, own_ns: int) -> None:
            nonlocal cancel_submitted
            if isinstance(found, RequestError):
                # Its traceback holds the body.
                found.__cause__ = found.__context__ = None
                reject(found.with_traceback(None))
                return
            try:
                cancel_submitted = submit(found, own_ns)
            except RequestError as error:
                reject(error)
            except Exception:
                log.exception("a request with a large body failed")
                reject(internal_error())

        def cancel() -> None:
            job.cancel()
            if cancel_submitted is not None:
                cancel_submitted()

        job = FunctionJob("body", make, done, usage=request.usage)
        self._pool.submit(job)
        return cancel

    def close(self) -> None:
        """Start no further jobs."""
        self._pool.close()


def is_json(head: Head) -> bool:
    """True for the heads of bodies that may be JSON."""
    return content_type_of(head) in (JSON, *UNSPECIFIED)


def json_limit(served: Served, head: Head) -> int:
    """Bytes of the longest JSON that a model takes; without end for other bodies, and where texts make it longer."""
    application = served.application
    if picture_of(application) is not None:
        return sys.maxsize
    if content_type_of(head) != JSON or HEAD_LENGTH in head.headers or {JSON, TEXT} & {*application.accepts}:
        return sys.maxsize
    return size_of(application.input, served.max_rows).nbytes
