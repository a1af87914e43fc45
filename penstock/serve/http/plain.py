"""`POST /v1/apps/{name}`: a picture, JSON, raw bytes or a form of tensors in; JSON or raw bytes out."""

from collections.abc import Callable
from functools import partial
from typing import Any, final

from penstock.core.errors import ComputeFailed, RequestError
from penstock.core.spec import Array
from penstock.serve.exchange.form import JSON
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Cancel, Response, rejected, with_headers
from penstock.serve.exchange.timing import Timing
from penstock.serve.frontend.decode_pool import DecodeJob, DecodePool
from penstock.serve.frontend.table_writer import Done, SlotHandle
from penstock.serve.http import generated_answer
from penstock.serve.http.picture_beside import picture_of
from penstock.serve.http.plain_batch import PlainBatch, read_file, row_or_batch, submit_batch
from penstock.serve.http.plain_body import (
    RAW,
    PlainTerms,
    is_decoded,
    may_have_file,
    reply_json,
    with_flag,
)
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.table.slots import ANSWERED, BROKEN, OK

PATH = "/v1/apps/"


@final
class PlainCall:
    """Answers the requests with one head.

    Args:
        served: The model.
        head: The head.

    Raises:
        InvalidInput: The budget, the priority or the boundary of a form is malformed.
    """

    def __init__(self, served: ServedModel, head: Head) -> None:
        self.served = served
        self._terms = terms = PlainTerms.of(served.application, head)
        self.budget_ns, self.low_priority = terms.budget_ns, terms.low_priority
        spec = served.application.input
        self._generates = served.application.generate is not None
        self._headers = served.version_headers
        self._timed = terms.timed and not self._generates
        self._picture = picture_of(served.application)
        # Size of a body whose bytes are a chunk as they are; -1 if bodies are never taken so.
        self._raw_bytes = spec.nbytes if terms.content_type == RAW and spec.takes_any_bytes else -1

    @property
    def raw_bytes(self) -> int:
        """Size of a body whose bytes are a chunk as they are; -1 if bodies are never taken so."""
        return self._raw_bytes

    @property
    def content_type(self) -> str:
        """Media type of the bodies."""
        return self._terms.content_type

    @property
    def raw_reply(self) -> bool:
        """True if responses are raw bytes."""
        return self._terms.raw_reply

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers of responses."""
        return self._headers

    @property
    def rejects_early(self) -> bool:
        """True if a cached rejection answers requests: it is of the default budget.

        One of normal priority holds for low priority too, which waits behind as many rows at least.
        """
        return self.budget_ns is None

    @property
    def is_plain(self) -> bool:
        """True if requests need nothing but their chunk, from bodies that the application does not decode."""
        application, terms = self.served.application, self._terms
        is_row = terms.content_type == RAW or (terms.content_type == JSON and JSON not in application.accepts)
        return is_row and self._picture is None and not (terms.timed or self._generates)

    @property
    def decodes(self) -> bool:
        """True if each body is a file that the application decodes."""
        application, content_type = self.served.application, self._terms.content_type
        is_file = content_type in application.accepts and content_type not in (RAW, JSON)
        return application.decode is not None and is_file

    def handle(self, request: Request, answer: Answer) -> Cancel:
        """Decode the body, submit the chunk, and answer when its result comes; returns a function that cancels it.

        Raises:
            RequestError: The body is not an input of the application, or the request is rejected.
        """
        served = self.served
        pool = served.decode_pool
        if self._picture is not None and pool is not None and may_have_file(self._terms, request.body, self._picture):
            read = partial(read_file, served, self._terms, request.body)
            return self._prepare(pool, request.body, self._terms.content_type, request, answer, read)
        content_type, body, chunk = self._terms.content_of(served.application, request.body)
        is_file = chunk is None and is_decoded(served.application, content_type, body)
        if is_file and pool is not None and not pool.is_quick(body):
            return self._prepare(pool, body, content_type, request, answer)
        if is_file:
            chunk = self._decoded(content_type, body, request.arrival_ns)
        elif chunk is None:
            chunk = body if len(body) == self._raw_bytes else row_or_batch(served, content_type, body)
        return self.submit(chunk, request, answer)

    def _decoded(self, content_type: str, body: bytes, arrival_ns: int) -> Array | bytes | PlainBatch:
        """Decode a body in the event loop, unless its answer would be late."""
        served = self.served
        late = served.late_rejection(arrival_ns, self.budget_ns, self.low_priority)
        if late is not None:
            raise late
        begin_ns = served.now_ns()
        chunk = row_or_batch(served, content_type, body)
        served.decode_ns.add(served.now_ns() - begin_ns)
        return chunk

    def read(self, request: Request) -> Array | bytes | PlainBatch:
        """Read a body that is JSON, see `handle`."""
        return row_or_batch(self.served, self._terms.content_type, request.body)

    def submit(
        self,
        chunk: Array | bytes | PlainBatch,
        request: Request,
        answer: Answer,
        raw_shape: tuple[int, ...] = (),
    ) -> Cancel:
        """Submit what was read, see `handle`; boxes of a decoded array of `raw_shape` may be in its pixels."""
        served = self.served
        if isinstance(chunk, PlainBatch):
            return submit_batch(served, chunk, self._terms, request, with_headers(self._headers, answer))
        if self._timed:
            handle = self._submit_timed(chunk, request.arrival_ns, answer, raw_shape)
        else:
            done = self._done(answer, raw_shape)
            handle = served.submit(chunk, done, request.arrival_ns, self.budget_ns, self.low_priority)
        return handle.cancel

    def _done(self, answer: Answer, raw_shape: tuple[int, ...] = ()) -> Done:
        if self._generates:
            versioned = with_headers(self._headers, answer)
            return generated_answer.answering(self.served, versioned, self.budget_ns, events=self._terms.events)
        # `partial` is the cheapest callback.
        return partial(self.finish, answer, raw_shape=raw_shape) if raw_shape else partial(self.finish, answer)

    def _submit_timed(
        self, chunk: Array | bytes, arrival_ns: int, answer: Answer, raw_shape: tuple[int, ...] = ()
    ) -> SlotHandle:
        """Submit a chunk whose response has the times of the request."""

        def done(status: int, output: Array, last: bool) -> None:
            timing = Timing()
            if status == OK:
                timing.add(*handle.writer.times_ns(handle))
            self.finish(lambda response: answer(timing.added_to(response)), status, output, last, raw_shape)

        handle = self.served.submit(chunk, done, arrival_ns, self.budget_ns, self.low_priority)
        return handle

    def finish(self, answer: Answer, status: int, output: Array, last: bool, raw_shape: tuple[int, ...] = ()) -> None:
        """Answer with a result; that of a decoded array of `raw_shape` may be in its pixels."""
        served = self.served
        if status != OK:
            error = served.error_of(status, self.budget_ns)
            served.count_rejection(error)
            answer(rejected(error))
        else:
            answer(self.respond(output, raw_shape))

    def respond(self, output: Array, raw_shape: tuple[int, ...] = ()) -> Response:
        """Make the response to a good result, see `finish`."""
        counts = self.served.counts
        if self._terms.raw_reply:
            counts[ANSWERED] += 1
            return Response(200, output.tobytes(), RAW, self._headers)
        try:
            body = reply_json(self.served, output, raw_shape)
        except ComputeFailed as error:
            counts[BROKEN] += 1
            return rejected(error)
        counts[ANSWERED] += 1
        return Response(200, body, headers=self._headers)

    def _prepare(
        self,
        pool: DecodePool,
        body: bytes,
        content_type: str,
        request: Request,
        answer: Answer,
        read: Callable[[], Array | PlainBatch] | None = None,
    ) -> Cancel:
        """Have the body decoded and prepared in a thread, or read by `read`, and submit what it gives then."""
        served, cancel_submitted = self.served, None
        served.reject_lost()

        def submit(chunk: Any, own_ns: int) -> None:
            nonlocal cancel_submitted
            if isinstance(chunk, RequestError):
                reject(chunk if read is not None else with_flag(served.application, content_type, body, chunk))
                return
            try:
                # The time spent on this body alone depends on its size, so it does not count against the budget.
                request.arrival_ns += own_ns
                cancel_submitted = self.submit(chunk, request, answer, job.raw_shape)
            except RequestError as error:
                reject(error)

        def reject(error: RequestError) -> None:
            served.count_rejection(error)
            answer(rejected(error))

        def cancel() -> None:
            job.cancel()
            if cancel_submitted is not None:
                cancel_submitted()

        budget_ns = served.budget_ns if self.budget_ns is None else self.budget_ns
        job = DecodeJob(body, content_type, request.arrival_ns, budget_ns, submit, request.usage, read)
        pool.submit(job)
        return cancel
