"""`POST /v1/apps/{name}` of a chain: one input in, the answer of its last step or of its join out."""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import numpy as np

from penstock.core.errors import ComputeFailed, RequestError
from penstock.core.spec import Array
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Cancel, Response, rejected
from penstock.serve.frontend.function_pool import FunctionJob
from penstock.serve.http.chain_events import ChainEvents
from penstock.serve.http.generated_answer import ended_headers
from penstock.serve.http.picture_beside import picture_of
from penstock.serve.http.plain_batch import PlainBatch, read_file, row_or_batch, submit_batch
from penstock.serve.http.plain_body import (
    RAW,
    PlainTerms,
    is_decoded,
    may_have_file,
    reply_json,
)
from penstock.serve.registry.generated import chain_reply
from penstock.serve.registry.served_chain import ServedChain
from penstock.serve.registry.whole_answer import Ends, ends_text

# Boxes of a chain are in the picture's pixels, whatever its size.
_OF_PICTURE = (1, 1)


@final
class ChainCall:
    """Answers the requests with one head.

    Args:
        served: The chain.
        head: The head.

    Raises:
        InvalidInput: The budget, the priority or the boundary of a form is malformed, or the first part is live.
    """

    def __init__(self, served: ServedChain, head: Head) -> None:
        served.reject_single()
        self._served = served
        self._terms = PlainTerms.of(served.application, head)
        self._picture = picture_of(served.application)

    def handle(self, request: Request, answer: Answer) -> Cancel:
        """Decode the body, begin with the first step, and answer after the last; returns a function that cancels it.

        Raises:
            RequestError: The body is no input of the chain, or the request is rejected.
        """
        served = self._served
        served.reject_lost()
        if self._picture is not None and may_have_file(self._terms, request.body, self._picture):
            read = partial(read_file, served, self._terms, request.body)
            return self._decode(request, answer, read)
        content_type, body, chunk = self._terms.content_of(served.application, request.body)
        is_file = chunk is None and is_decoded(served.application, content_type, body)
        if is_file and served.takes_raw:
            return self._decode(request, answer, partial(row_or_batch, served, content_type, body))
        if chunk is None:
            chunk = row_or_batch(served, content_type, body)
        return self._submit_read(chunk, request, answer, is_file=is_file)

    def read(self, request: Request) -> Array | bytes | PlainBatch:
        """Read a body that is JSON, see `handle`."""
        return row_or_batch(self._served, self._terms.content_type, request.body)

    def submit(self, chunk: Array | bytes | PlainBatch, request: Request, answer: Answer) -> Cancel:
        """Submit what was read, see `handle`."""
        self._served.reject_lost()
        return self._submit_read(chunk, request, answer, is_file=False)

    def _submit_read(
        self, chunk: Array | bytes | PlainBatch, request: Request, answer: Answer, *, is_file: bool
    ) -> Cancel:
        served = self._served
        if isinstance(chunk, PlainBatch):
            return submit_batch(served, chunk, self._terms, request, answer)
        if isinstance(chunk, bytes):
            chunk = served.application.input.from_bytes(chunk)
        return self._submit(chunk, request, answer, is_file=is_file)

    def _submit(self, chunk: Array, request: Request, answer: Answer, *, is_file: bool) -> Cancel:
        terms, ends = self._terms, Ends()
        events = ChainEvents(answer, self._reply) if terms.events and self._served.can_stream else None
        return self._served.submit_rows(
            chunk[None],
            partial(self._finish, answer, ends, is_file=is_file) if events is None else events.finish,
            request.arrival_ns,
            terms.budget_ns,
            terms.low_priority,
            request.observe_step,
            None if events is None else events.output,
            ends=ends,
        )

    def _decode(self, request: Request, answer: Answer, read: Callable[[], Any]) -> Cancel:
        """Have the body decoded in a thread by `read`, and begin then."""
        served, cancel_run = self._served, None

        def decoded(chunk: Any, own_ns: int) -> None:
            nonlocal cancel_run
            try:
                if isinstance(chunk, RequestError):
                    raise chunk
                # The time spent on this body alone depends on its size, so it does not count against the budget.
                request.arrival_ns += own_ns
                cancel_run = self._submit_read(chunk, request, answer, is_file=True)
            except RequestError as error:
                served.count_rejection(error)
                answer(rejected(error))

        def cancel() -> None:
            job.cancel()
            if cancel_run is not None:
                cancel_run()

        job = FunctionJob("decode", read, decoded)
        served.pool.submit(job)
        return cancel

    def _finish(self, answer: Answer, ends: Ends, result: Array | RequestError, *, is_file: bool) -> None:
        headers = ended_headers(ends)
        if isinstance(result, RequestError):
            answer(rejected(result))
        elif self._terms.raw_reply:
            answer(Response(200, np.ascontiguousarray(result[0]).tobytes(), RAW, headers))
        else:
            reply = self._reply(result[0, ...], ends_text(ends), is_file=is_file)
            answer(rejected(reply) if isinstance(reply, RequestError) else Response(200, reply, headers=headers))

    def _reply(self, output: Array, ended: str, *, is_file: bool = False) -> bytes | RequestError:
        try:
            if ended:
                return chain_reply(self._served, output, ended)
            return reply_json(self._served, output, _OF_PICTURE if is_file else ())
        except ComputeFailed as error:
            self._served.count_broken_reply()
            return error
