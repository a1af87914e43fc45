"""`POST /v1/apps/{name}`: a picture, a JSON array or raw bytes in; JSON or raw bytes out."""

import logging
from collections.abc import Callable

import orjson

from penstock.core.errors import ComputeFailed, InvalidInput, RequestError, TooLate, UnsupportedContent
from penstock.core.spec import Array
from penstock.serve.connection import Answer, refused
from penstock.serve.served import Served
from penstock.serve.wire import Request, Response

log = logging.getLogger(__name__)

RAW = "application/octet-stream"
BUDGET_HEADER = "penstock-latency-ms"
# What clients send when they were not told better; the body itself says what it is.
_UNSAID = ("", "application/x-www-form-urlencoded")
MAX_BUDGET_MS = 600_000


def infer(served: Served, request: Request, answer: Answer) -> Callable[[], None]:
    """Decode the body, put it in, and answer when its result comes.

    Raises:
        RequestError: It is not what the application takes, or it is refused.
    """
    raw_reply = RAW in request.headers.get("accept", "")

    def finished(result: Array | RequestError) -> None:
        if isinstance(result, RequestError):
            count_refusal(served, result)
            answer(refused(result))
            return
        try:
            body = result.tobytes() if raw_reply else orjson.dumps(served.reply(result))
        except Exception:
            log.exception("the reply of %r raised; that request alone fails", served.application.name)
            served.counts.failed += 1
            answer(refused(ComputeFailed("The application's reply failed on this output; the server's log says how.")))
            return
        served.counts.answered += 1
        answer(Response(200, body, RAW if raw_reply else "application/json"))

    ticket = served.ask(chunk_of(served, request), finished, budget_ns_of(request))
    return lambda: served.frontend.cancel(ticket)


def chunk_of(served: Served, request: Request) -> Array | bytes:
    """The raw chunk in a request's body.

    Raises:
        RequestError: It is not what the application takes.
    """
    application, body = served.application, request.body
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == RAW:
        if application.input.takes_any_bytes and len(body) == application.input.nbytes:
            return body
        return application.input.from_bytes(body)
    begins = body.lstrip()[:1]
    if begins == b"[" and (content_type == "application/json" or content_type in _UNSAID):
        return application.input.from_numbers(json_of(body))
    if content_type == "application/json" and "application/json" not in application.accepts:
        found = json_of(body)
        if not application.input.shape:
            return application.input.from_numbers(found)
        raise InvalidInput(f"The body is JSON but not an array; send {application.input.describe()} as nested arrays.")
    if application.decode is not None and (content_type in _UNSAID or content_type in application.accepts):
        return _decoded(served, body, content_type)
    taken = ", ".join(dict.fromkeys((*application.accepts, "application/json", RAW)))
    raise UnsupportedContent(f"Content-Type {content_type!r} is not taken by {application.name!r}; send {taken}.")


def json_of(body: bytes) -> object:
    """A JSON body.

    Raises:
        InvalidInput: It is malformed, too deep, or holds NaN.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"The body is not JSON that can be read ({error}).") from None


def budget_ns_of(request: Request) -> int | None:
    """The latency budget that a request names for itself, in nanoseconds.

    Raises:
        InvalidInput: It is not a number of milliseconds above 0.
    """
    text = request.headers.get(BUDGET_HEADER)
    if text is None:
        return None
    try:
        budget_ms = float(text)
    except ValueError:
        budget_ms = -1.0
    if not 0 < budget_ms <= MAX_BUDGET_MS:
        raise InvalidInput(f"Penstock-Latency-Ms is {text!r}; it must be a number from 0 to {MAX_BUDGET_MS:,}.")
    return int(budget_ms * 1e6)


def count_refusal(served: Served, error: RequestError) -> None:
    """Count a request that got no result by what was the matter."""
    if isinstance(error, TooLate):
        served.counts.expired += 1
    elif error.status in (503, 504):
        served.counts.refused += 1
    elif error.status >= 500:
        served.counts.failed += 1
    else:
        served.counts.invalid += 1


def _decoded(served: Served, body: bytes, content_type: str) -> Array:
    application = served.application
    assert application.decode is not None
    try:
        return application.input.check(application.decode(body, content_type))
    except RequestError:
        raise
    except Exception:
        log.exception("the decode of %r raised; that request alone fails", application.name)
        raise ComputeFailed("The application's decode failed on this body; the server's log says how.") from None
