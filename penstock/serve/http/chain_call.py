"""`POST /v1/apps/{name}` of a chain: one input in, the answer of its last step or of its join out."""

import logging
from functools import partial
from typing import Any, final

import numpy as np
import orjson

from penstock.core.errors import ComputeFailed, RequestError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.serve.exchange.accept import accepts
from penstock.serve.exchange.budget import options_of
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Cancel, Response, rejected
from penstock.serve.frontend.function_pool import FunctionJob
from penstock.serve.http.chain_events import ChainEvents
from penstock.serve.http.generated_answer import EVENTS
from penstock.serve.http.plain import RAW, chunk_of, content_type_of, form_boundary, is_decoded, part_of
from penstock.serve.registry.served_chain import ServedChain

log = logging.getLogger(__name__)


@final
class ChainCall:
    """Answers the requests with one head.

    Args:
        served: The chain.
        head: The head.

    Raises:
        InvalidInput: The budget, the priority or the boundary of a form is malformed.
    """

    def __init__(self, served: ServedChain, head: Head) -> None:
        self._served = served
        self._content_type = content_type_of(head)
        self._boundary = form_boundary(served.application, head)
        self._budget_ns, self._low_priority = options_of(head)
        self._events = served.can_stream and accepts(head, EVENTS)
        self._raw_reply = accepts(head, RAW) and not isinstance(served.application.output, RecordSpec)

    def handle(self, request: Request, answer: Answer) -> Cancel:
        """Decode the body, begin with the first step, and answer after the last; returns a function that cancels it.

        Raises:
            RequestError: The body is no input of the chain, or the request is rejected.
        """
        served, body, content_type, chunk = self._served, request.body, self._content_type, None
        served.reject_lost()
        if self._boundary is not None:
            content_type, body, chunk = part_of(served.application, body, self._boundary)
        if chunk is None and served.takes_raw and is_decoded(served.application, content_type, body):
            return self._decode(request, content_type, body, answer)
        if chunk is None:
            chunk = chunk_of(served, content_type, body)
        if isinstance(chunk, bytes):
            chunk = served.application.input.from_bytes(chunk)
        return self._submit(chunk, request, request.arrival_ns, answer)

    def _submit(self, chunk: Array, request: Request, arrival_ns: int, answer: Answer) -> Cancel:
        events = ChainEvents(answer, self._reply) if self._events else None
        return self._served.submit_rows(
            chunk[None],
            partial(self._finish, answer) if events is None else events.finish,
            arrival_ns,
            self._budget_ns,
            self._low_priority,
            request.observe_step,
            None if events is None else events.output,
        )

    def _decode(self, request: Request, content_type: str, body: bytes, answer: Answer) -> Cancel:
        """Have the body decoded in a thread, and begin then."""
        served, cancel_run = self._served, None

        def decoded(chunk: Any, own_ns: int) -> None:
            nonlocal cancel_run
            try:
                if isinstance(chunk, RequestError):
                    raise chunk
                # The time spent on this body alone depends on its size, so it does not count against the budget.
                cancel_run = self._submit(chunk, request, request.arrival_ns + own_ns, answer)
            except RequestError as error:
                served.count_rejection(error)
                answer(rejected(error))

        def cancel() -> None:
            job.cancel()
            if cancel_run is not None:
                cancel_run()

        job = FunctionJob("decode", partial(chunk_of, served, content_type, body), decoded)
        served.pool.submit(job)
        return cancel

    def _finish(self, answer: Answer, result: Array | RequestError) -> None:
        if isinstance(result, RequestError):
            answer(rejected(result))
        elif self._raw_reply:
            answer(Response(200, np.ascontiguousarray(result[0]).tobytes(), RAW))
        else:
            reply = self._reply(result[0, ...])
            answer(rejected(reply) if isinstance(reply, RequestError) else Response(200, reply))

    def _reply(self, output: Array) -> bytes | RequestError:
        served = self._served
        try:
            return orjson.dumps(served.reply(served.unpacked(output)))
        except (Exception, SystemExit):
            log.exception("the reply of %r raised; that request alone fails", served.name)
            served.count_broken_reply()
            return ComputeFailed("The chain's reply failed on this output; the server's log says how.")
