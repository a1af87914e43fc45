"""Batches of plain requests: several rows as JSON in one request, a slot each, admitted and answered together.

A batch is `{"inputs": [row, ...]}`, answered by `{"outputs": [reply, ...]}`; `{"instances": [row, ...]}`, answered by
`{"predictions": [reply, ...]}`, as in version 1 of KServe's protocol; or a list nested one level deeper than a row,
answered by a list. A body that fits as one row is one row.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import orjson

from penstock.core.errors import ComputeFailed, InvalidInput, RequestError, TooLarge
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array
from penstock.serve.exchange.budget import options_of
from penstock.serve.exchange.form import JSON, TEXT
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Cancel, Response, rejected
from penstock.serve.exchange.timing import Timing, is_timed
from penstock.serve.http.generated_answer import ended_headers
from penstock.serve.http.picture_beside import check_row, picture_of
from penstock.serve.http.plain_body import (
    FIELDS,
    INSTANCES,
    RAW,
    UNSPECIFIED,
    PlainTerms,
    chunk_of,
    decoded,
    is_decoded,
    numbers_by_name,
    numbers_of,
    with_flag,
)
from penstock.serve.oip import inference
from penstock.serve.registry.generated import ENDED, REPLY_FAILED, answers_in_steps, whole_reply
from penstock.serve.registry.served_chain import Served, ServedChain
from penstock.serve.registry.whole_answer import Ends

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlainBatch:
    """The rows of a request.

    Args:
        chunks: `[n, *input.shape]`.
        field: Field that held them; empty for a list.
    """

    chunks: Array
    field: str


@final
class PredictCall:
    """Answers the requests with one head to `POST /v1/models/{name}:predict`.

    Args:
        served: The model.
        head: The head.

    Raises:
        InvalidInput: The budget or the priority is malformed, or the model is live.
    """

    def __init__(self, served: Served, head: Head) -> None:
        if isinstance(served, ServedChain):
            served.reject_single()
        elif served.streams is not None:
            raise InvalidInput(
                f"{served.name!r} takes live signals, not instances; send a recording to /v1/apps/{served.name}."
            )
        self._served = served
        self._budget_ns, self._low_priority = options_of(head)
        self._timed = is_timed(head)

    def handle(self, request: Request, answer: Answer) -> Cancel:
        """Submit the instances, and answer when all have a result; returns a function that cancels them.

        Raises:
            RequestError: The request is malformed, an instance is no input of the model, or they are rejected.
        """
        return self.submit(self.read(request), request, answer)

    def read(self, request: Request) -> PlainBatch:
        """Read the body, see `handle`."""
        numbers = numbers_of(self._served, request.body)
        if not isinstance(numbers, dict) or INSTANCES not in numbers:
            raise InvalidInput(f'The body has no {INSTANCES!r}; send {{"{INSTANCES}": [...]}}, a list of inputs.')
        _check_alone(cast(dict[str, Any], numbers), INSTANCES)
        rows = cast(Any, numbers[INSTANCES])
        return PlainBatch(chunks=_chunks_of(self._served, rows, INSTANCES, request.body), field=INSTANCES)

    def submit(self, batch: PlainBatch, request: Request, answer: Answer) -> Cancel:
        """Submit what was read, see `handle`."""
        terms = (self._budget_ns, self._low_priority)
        return _submit(self._served, batch, request, answer, *terms, timed=self._timed, raw_reply=False)


def submit_batch(served: Served, batch: PlainBatch, terms: PlainTerms, request: Request, answer: Answer) -> Cancel:
    """Submit a batch, and answer when all rows have a result; returns a function that cancels them.

    Raises:
        RequestError: They are rejected.
    """
    raw_reply = terms.raw_reply and not isinstance(served.application.answer, RecordSpec)
    given = (terms.budget_ns, terms.low_priority)
    return _submit(served, batch, request, answer, *given, timed=terms.timed, raw_reply=raw_reply)


def batch_of(served: Served, content_type: str, body: bytes) -> PlainBatch | None:
    """Make the batch of a body that is not one row; None if it is no batch.

    Raises:
        RequestError: A row is not an input of the application, or there are none or too many.
    """
    application = served.application
    if content_type != JSON and content_type not in UNSPECIFIED:
        return None
    if body.lstrip()[:1] not in (b"[", b"{") or is_decoded(application, content_type, body):
        return None
    numbers = numbers_of(served, body)
    _refuse_oip(served.name, numbers)
    found = _rows_in(application.input, numbers)
    if found is None:
        return None
    field, rows = found
    return PlainBatch(chunks=_chunks_of(served, rows, field, body), field=field)


def row_or_batch(served: Served, content_type: str, body: bytes) -> Array | bytes | PlainBatch:
    """Make the chunk of a body, or the batch of one that is no row.

    Raises:
        RequestError: It is neither.
    """
    try:
        return chunk_of(served, content_type, body)
    except TooLarge:
        raise
    except RequestError as error:
        batch = batch_of(served, content_type, body)
        if batch is None:
            raise with_flag(served.application, content_type, body, error) from None
        return batch


def read_file(served: Served, terms: PlainTerms, body: bytes) -> Array | PlainBatch:
    """Make the chunk or the batch of a body that may have a picture's file beside other tensors, in a thread.

    Raises:
        RequestError: It is neither.
    """
    application = served.application
    content_type, content, chunk = terms.content_of(application, body)
    found = row_or_batch(served, content_type, content) if chunk is None else chunk
    return application.input.from_bytes(found) if isinstance(found, bytes) else found


def _refuse_oip(name: str, numbers: Any) -> None:
    """Name the route of a request of the Open Inference Protocol that came here."""
    inputs = cast(dict[str, Any], numbers).get("inputs") if isinstance(numbers, dict) else None
    first = cast(list[Any], inputs)[0] if isinstance(inputs, list) and inputs else None
    if isinstance(first, dict) and {"name", "shape", "datatype"} <= set(cast(dict[str, Any], first)):
        raise InvalidInput(f"This is a request of the Open Inference Protocol; POST it to /v2/models/{name}/infer.")


def _rows_in(input: ChunkSpec, numbers: Any) -> tuple[str, Any] | None:
    """Find the field that holds rows, and the rows; an input of that name makes the body one row."""
    if isinstance(numbers, dict):
        own = input.by_name if isinstance(input, RecordSpec) else {}
        field = next((name for name in FIELDS if name in numbers and name not in own), None)
        if field is None:
            return None
        _check_alone(cast(dict[str, Any], numbers), field)
        return field, numbers[field]
    return ("", numbers) if _is_deeper(input, numbers) else None


def _is_deeper(input: ChunkSpec, numbers: Any) -> bool:
    """True if a list is nested one level deeper than a row."""
    rows = cast(list[Any], numbers) if isinstance(numbers, list) else []
    if isinstance(input, RecordSpec) or (rows and isinstance(rows[0], dict)):
        return bool(rows) and all(isinstance(row, dict) for row in rows)
    depth = 0
    while isinstance(numbers, list):
        depth += 1
        level = cast(list[Any], numbers)
        numbers = level[0] if level else None
    return depth == len(input.shape) + 1


def _check_alone(numbers: dict[str, Any], field: str) -> None:
    if len(numbers) > 1:
        other = next(name for name in numbers if name != field)
        raise InvalidInput(f"There is {other!r:.80} beside {field!r}; send {field!r} alone.")


def _chunks_of(served: Served, rows: Any, field: str, body: bytes) -> Array:
    if not isinstance(rows, list):
        raise InvalidInput(f"{field!r} is no list; send a list of inputs, {served.application.input.describe()} each.")
    rows = cast(list[Any], rows)
    inference.check_rows(len(rows), served.max_rows)
    make = _row_maker(served)
    chunks: list[Array] = []
    for at, row in enumerate(rows):
        try:
            chunks.append(make(row))
        except InvalidInput as error:
            raise InvalidInput(f"{field}[{at}]: {error}" if field else f"[{at}]: {error}") from None
    # The only strings are names, and JSON's parser keeps the last of two values of one name.
    names = sum(len(cast(Any, row)) for row in rows if isinstance(row, dict)) + bool(field)
    if not any(isinstance(row, str) for row in rows) and body.count(b'"') > 2 * names:
        raise InvalidInput("The body has a name twice; send each once.")
    return np.stack(chunks)


def _row_maker(served: Served) -> Callable[[Any], Array]:
    """Return the function that makes the chunk of a row: of numbers, or of a text where one is decoded at once."""
    application = served.application
    in_threads = served.takes_raw if isinstance(served, ServedChain) else served.decode_pool is not None
    picture = picture_of(application)
    takes_text = application.decode is not None and TEXT in application.accepts and not in_threads

    def make(row: Any) -> Array:
        if takes_text and isinstance(row, str):
            return decoded(served, row.encode(), TEXT)
        if picture is not None:
            check_row(row, picture)
        return application.input.from_numbers(numbers_by_name(application.input, row))

    return make


def _submit(
    served: Served,
    batch: PlainBatch,
    request: Request,
    answer: Answer,
    budget_ns: int | None,
    low_priority: bool,
    *,
    timed: bool,
    raw_reply: bool,
) -> Cancel:
    timing, ends = Timing() if timed else None, Ends()
    if request.usage is not None:
        request.usage.add_rows(len(batch.chunks))

    def finished(result: Array | RequestError) -> None:
        if isinstance(result, RequestError):
            answer(rejected(result))
            return
        if raw_reply:
            response = Response(200, np.ascontiguousarray(result).tobytes(), RAW, ended_headers(ends))
        else:
            response = _replies(served, result, batch.field, ends)
        answer(response if timing is None else timing.added_to(response))

    infer = inference.Infer(id=None, chunks=batch.chunks, batched=True, wanted={}, budget_ns=budget_ns)
    return inference.submit(
        served,
        infer,
        finished,
        arrival_ns=request.arrival_ns,
        owner="",
        budget_ns=budget_ns,
        low_priority=low_priority,
        observe=request.observe_step,
        timing=timing,
        ends=ends,
    )


def _replies(served: Served, outputs: Array, field: str, ends: Ends) -> Response:
    try:
        replies = [_reply(served, outputs[at, ...]) for at in range(len(outputs))]
        ended = {ENDED: ends} if ends else {}
        body = orjson.dumps({FIELDS[field]: replies} | ended if field else replies)
        return Response(200, body, headers=ended_headers(ends))
    except (Exception, SystemExit):
        log.exception("the reply of %r raised, or gave what is no JSON; that request alone fails", served.name)
        served.count_broken_reply()
        return rejected(ComputeFailed(REPLY_FAILED))


def _reply(served: Served, output: Array) -> Any:
    if answers_in_steps(served):
        return whole_reply(served, output)
    return served.reply(served.unpacked(output))
