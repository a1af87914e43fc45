"""`POST /v1/apps/{name}`: a picture, JSON, raw bytes or a form of tensors in; JSON or raw bytes out."""

import logging
from functools import partial
from typing import final

import orjson

from penstock.core.application import Application
from penstock.core.errors import ComputeFailed, InvalidInput, RequestError, UnsupportedContent
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.serve.exchange.accept import accepts
from penstock.serve.exchange.budget import options_of
from penstock.serve.exchange.form import JSON, MULTIPART, TEXT, boundary_of, chunk_of_parts, only_file, parts_of
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Cancel, Response, rejected
from penstock.serve.frontend.decode_pool import DecodeJob, DecodePool
from penstock.serve.frontend.table_writer import Done
from penstock.serve.http import generated_answer
from penstock.serve.registry.served_chain import Served
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.table.slots import ANSWERED, BROKEN, OK

log = logging.getLogger(__name__)

PATH = "/v1/apps/"
RAW = "application/octet-stream"
# Content types that clients send by default; the type is then found from the body.
UNSPECIFIED = ("", "application/x-www-form-urlencoded")


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
        self.content_type = content_type_of(head)
        self._boundary = form_boundary(served.application, head)
        self.budget_ns, self.low_priority = options_of(head)
        spec = served.application.input
        self._generates = served.application.generate is not None
        self._events = accepts(head, generated_answer.EVENTS)
        # Size of a body whose bytes are a chunk as they are; -1 if bodies are never taken so.
        self._raw_bytes = spec.nbytes if self.content_type == RAW and spec.takes_any_bytes else -1
        # Several tensors have no raw form.
        self._raw_reply = accepts(head, RAW) and not isinstance(served.application.output, RecordSpec)

    def handle(self, request: Request, answer: Answer) -> Cancel:
        """Decode the body, submit the chunk, and answer when its result comes; returns a function that cancels it.

        Raises:
            RequestError: The body is not an input of the application, or the request is rejected.
        """
        served, body, content_type, chunk = self.served, request.body, self.content_type, None
        if self._boundary is not None:
            content_type, body, chunk = part_of(served.application, body, self._boundary)
        if chunk is None and served.decode_pool is not None and is_decoded(served.application, content_type, body):
            return self._prepare(served.decode_pool, body, content_type, request.arrival_ns, answer)
        if chunk is None:
            chunk = body if len(body) == self._raw_bytes else chunk_of(served, content_type, body)
        done = self._done(answer)
        handle = served.submit(chunk, done, request.arrival_ns, self.budget_ns, self.low_priority)
        return partial(handle.writer.cancel, handle)

    def _done(self, answer: Answer, raw_shape: tuple[int, ...] = ()) -> Done:
        if self._generates:
            return generated_answer.answering(self.served, answer, self.budget_ns, events=self._events)
        # `partial` is the cheapest callback.
        return partial(self.finish, answer, raw_shape=raw_shape) if raw_shape else partial(self.finish, answer)

    def finish(self, answer: Answer, status: int, output: Array, last: bool, raw_shape: tuple[int, ...] = ()) -> None:
        """Answer with a result; that of a decoded array of `raw_shape` may be in its pixels."""
        served = self.served
        if status != OK:
            error = served.error_of(status, self.budget_ns)
            served.count_rejection(error)
            answer(rejected(error))
        elif self._raw_reply:
            served.counts[ANSWERED] += 1
            answer(Response(200, output.tobytes(), RAW))
        else:
            answer(_reply(served, output, raw_shape))

    def _prepare(self, pool: DecodePool, body: bytes, content_type: str, arrival_ns: int, answer: Answer) -> Cancel:
        """Have the body decoded and prepared in a thread, and submit its chunk then."""
        served, handle = self.served, None
        served.reject_lost()

        def submit(chunk: Array | RequestError, own_ns: int) -> None:
            nonlocal handle
            try:
                if isinstance(chunk, RequestError):
                    raise chunk
                # The time spent on this body alone depends on its size, so it does not count against the budget.
                done, start_ns = self._done(answer, job.raw_shape), arrival_ns + own_ns
                handle = served.submit(chunk, done, start_ns, self.budget_ns, self.low_priority)
            except RequestError as error:
                served.count_rejection(error)
                answer(rejected(error))

        def cancel() -> None:
            job.cancel()
            if handle is not None:
                handle.writer.cancel(handle)

        budget_ns = served.budget_ns if self.budget_ns is None else self.budget_ns
        job = DecodeJob(body, content_type, arrival_ns, budget_ns, submit)
        pool.submit(job)
        return cancel


def form_boundary(application: Application, head: Head) -> str | None:
    """The boundary of a form's parts; None for a body that is no form, or one that the application decodes itself.

    Raises:
        InvalidInput: The boundary is malformed.
    """
    is_form = content_type_of(head) == MULTIPART and MULTIPART not in application.accepts
    return boundary_of(head.headers["content-type"]) if is_form else None


def part_of(application: Application, body: bytes, boundary: str) -> tuple[str, bytes, Array | None]:
    """The content type and the bytes of the part that `decode` reads, or the chunk of a form's tensors."""
    optional = [name for name, spec in application.inputs.items() if spec.default is not None]
    parts = parts_of(body, boundary, tuple(application.inputs), optional)
    file = None if application.decode is None else only_file(parts, application.accepts)
    if file is not None:
        return file.content_type or TEXT, file.content, None
    return "", b"", chunk_of_parts(application.input, parts, application.accepts)


def content_type_of(head: Head) -> str:
    """Media type of the body, in lower case, without parameters."""
    return head.headers.get("content-type", "").partition(";")[0].strip().lower()


def _reply(served: ServedModel, output: Array, raw_shape: tuple[int, ...]) -> Response:
    shows = served.application.shows
    try:
        found = served.unpacked(output)
        if shows is not None and raw_shape:
            found = shows.in_picture(found, *raw_shape[:2])
        body = orjson.dumps(served.reply(found))
    except (Exception, SystemExit):
        log.exception("the reply of %r raised; that request alone fails", served.name)
        served.counts[BROKEN] += 1
        return rejected(ComputeFailed("The application's reply failed on this output; the server's log says how."))
    served.counts[ANSWERED] += 1
    return Response(200, body)


def chunk_of(served: Served, content_type: str, body: bytes) -> Array | bytes:
    """Make the chunk of a request's body.

    Raises:
        RequestError: The body is not an input of the application.
    """
    application = served.application
    if is_decoded(application, content_type, body):
        return _decoded(served, body, content_type)
    if content_type == RAW:
        return application.input.from_bytes(body)
    if isinstance(application.input, RecordSpec) and (content_type == JSON or content_type in UNSPECIFIED):
        return _record_of(application.input, body, takes_text=TEXT in application.accepts)
    if _is_list(body) and (content_type == JSON or content_type in UNSPECIFIED):
        return application.input.from_numbers(json_of(body))
    if content_type == JSON and "application/json" not in application.accepts:
        found = json_of(body)
        if not application.input.shape:
            return application.input.from_numbers(found)
        raise InvalidInput(f"The body is JSON but not an array; send {application.input.describe()} as nested arrays.")
    raw = () if isinstance(application.input, RecordSpec) else (RAW,)
    taken = ", ".join(dict.fromkeys((*application.accepts, JSON, *raw)))
    raise UnsupportedContent(f"Content-Type {content_type!r} is not taken by {served.name!r}; send {taken}.")


def _record_of(input: RecordSpec, body: bytes, *, takes_text: bool) -> Array:
    numbers = json_of(body)
    try:
        record = input.from_numbers(numbers)
    except InvalidInput as error:
        given: list[object] = list(numbers.values()) if isinstance(numbers, dict) else [numbers]  # pyright: ignore
        if takes_text and any(isinstance(each, str) for each in given):
            raise InvalidInput(f"{str(error).rstrip('.')}; or send it as {TEXT}.") from None
        raise
    # The only strings are the names, and JSON's parser keeps the last of two values of one name.
    if body.count(b'"') > 2 * len(input.by_name):
        names = ", ".join(map(repr, input.by_name))
        raise InvalidInput(f"The body has an input twice; send each of {names} once.")
    return record


def is_decoded(application: Application, content_type: str, body: bytes) -> bool:
    """True if a body of this content type is handed to the application's `decode`."""
    # Arrays and raw bytes need no decoding.
    if application.decode is None or content_type == RAW:
        return False
    if content_type in UNSPECIFIED or content_type == JSON:
        if isinstance(application.input, RecordSpec) and body.lstrip()[:1] == b"{":
            return content_type in application.accepts
        return not _is_list(body) and (content_type in UNSPECIFIED or content_type in application.accepts)
    return content_type in application.accepts


def _is_list(body: bytes) -> bool:
    return body.lstrip()[:1] == b"["


def json_of(body: bytes) -> object:
    """Parse a JSON body.

    Raises:
        InvalidInput: The body is malformed, too deep, or has NaN.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"The body is not JSON that can be read ({error}).") from None


def _decoded(served: Served, body: bytes, content_type: str) -> Array:
    application = served.application
    assert application.decode is not None
    try:
        return application.input.check(application.decode(body, content_type))
    except RequestError:
        raise
    except (Exception, SystemExit):
        log.exception("the decode of %r raised; that request alone fails", served.name)
        raise ComputeFailed("The application's decode failed on this body; the server's log says how.") from None
