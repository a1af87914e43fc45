"""`POST /v1/apps/{name}`: a picture, a JSON array or raw bytes in; JSON or raw bytes out."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import orjson

from penstock.core.application import Application
from penstock.core.errors import ComputeFailed, InvalidInput, RequestError, UnsupportedContent
from penstock.core.spec import Array
from penstock.serve.connection import Answer, refused
from penstock.serve.frontend import Ticket
from penstock.serve.preparing import Job, Preparing
from penstock.serve.served import Served
from penstock.serve.slots import ANSWERED, BROKEN, OK
from penstock.serve.wire import Head, Request, Response

log = logging.getLogger(__name__)

PATH = "/v1/apps/"
RAW = "application/octet-stream"
BUDGET_HEADER = "penstock-latency-ms"
PRIORITY_HEADER = "penstock-priority"
PRIORITIES = ("interactive", "background")
# What clients send when they were not told better; the body itself says what it is.
UNSAID = ("", "application/x-www-form-urlencoded")
MAX_BUDGET_MS = 600_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request's head says of how to answer it.

    Args:
        served: By which model.
        content_type: Of the body, in lower case, without parameters.
        raw_bytes: Any bytes of this count are a chunk; -1 where they are not.
        raw_reply: Whether raw bytes are wanted back.
        budget_ns: Its own latency budget, or None.
        background: Whether it is of the second class.
    """

    served: Served
    content_type: str
    raw_bytes: int
    raw_reply: bool
    budget_ns: int | None
    background: bool

    @classmethod
    def of(cls, served: Served, head: Head) -> "Plan":
        """Read a head.

        Raises:
            InvalidInput: The budget or the priority is none.
        """
        content_type = head.headers.get("content-type", "").partition(";")[0].strip().lower()
        spec = served.application.input
        return cls(
            served,
            content_type,
            spec.nbytes if content_type == RAW and spec.takes_any_bytes else -1,
            RAW in head.headers.get("accept", ""),
            budget_ns_of(head.headers.get(BUDGET_HEADER)),
            is_background(head.headers.get(PRIORITY_HEADER)),
        )

    def infer(self, request: Request, answer: Answer) -> Callable[[], None]:
        """Decode the body, put it in, and answer when its result comes; gives what cancels it.

        Raises:
            RequestError: It is not what the application takes, or it is refused.
        """
        served, body = self.served, request.body
        if served.preparing is not None and _is_decoded(served.application, self.content_type, body):
            return _Prepared(self, served.preparing, request, answer).cancel
        chunk = body if len(body) == self.raw_bytes else chunk_of(served, self.content_type, body)
        # Of all that can be called later, these cost least to make.
        done = partial(self.finish, answer)
        ticket = served.put(chunk, done, self.budget_ns, self.background, request.heard)
        return partial(ticket.frontend.cancel, ticket)

    def finish(self, answer: Answer, status: int, output: Array, last: bool) -> None:
        """Answer with a result."""
        served = self.served
        if status != OK:
            error = served.why(status, self.budget_ns)
            served.count_refusal(error)
            answer(refused(error))
        elif self.raw_reply:
            served.counts[ANSWERED] += 1
            answer(Response(200, output.tobytes(), RAW))
        else:
            answer(_replied(served, output))


@final
class _Prepared:
    """A request whose body is decoded and prepared elsewhere before its chunk is put in."""

    def __init__(self, plan: Plan, preparing: Preparing, request: Request, answer: Answer) -> None:
        served = plan.served
        served.refuse_lost()
        self._plan = plan
        self._answer = answer
        self._ticket: Ticket | None = None
        self._arrival_ns = served.arrival_ns(request.heard)
        budget_ns = served.budget_ns if plan.budget_ns is None else plan.budget_ns
        self._job = Job(request.body, plan.content_type, self._arrival_ns, budget_ns, self._put)
        preparing.begin(self._job)

    def cancel(self) -> None:
        """The client is gone."""
        self._job.cancel()
        if self._ticket is not None:
            self._ticket.frontend.cancel(self._ticket)

    def _put(self, chunk: Array | RequestError, own_ns: int) -> None:
        plan = self._plan
        try:
            if isinstance(chunk, RequestError):
                raise chunk
            # What was worked on this body alone, which its size decides, is no part of the budget.
            arrival_ns = self._arrival_ns + own_ns
            done = partial(plan.finish, self._answer)
            self._ticket = plan.served.put(chunk, done, plan.budget_ns, plan.background, arrival_ns=arrival_ns)
        except RequestError as error:
            plan.served.count_refusal(error)
            self._answer(refused(error))


def _replied(served: Served, output: Array) -> Response:
    try:
        body = orjson.dumps(served.reply(output.reshape(served.application.output.shape)))
    except Exception:
        log.exception("the reply of %r raised; that request alone fails", served.name)
        served.counts[BROKEN] += 1
        return refused(ComputeFailed("The application's reply failed on this output; the server's log says how."))
    served.counts[ANSWERED] += 1
    return Response(200, body)


def chunk_of(served: Served, content_type: str, body: bytes) -> Array | bytes:
    """The raw chunk in a request's body.

    Raises:
        RequestError: It is not what the application takes.
    """
    application = served.application
    if _is_decoded(application, content_type, body):
        return _decoded(served, body, content_type)
    if content_type == RAW:
        return application.input.from_bytes(body)
    if _is_list(body) and (content_type == "application/json" or content_type in UNSAID):
        return application.input.from_numbers(json_of(body))
    if content_type == "application/json" and "application/json" not in application.accepts:
        found = json_of(body)
        if not application.input.shape:
            return application.input.from_numbers(found)
        raise InvalidInput(f"The body is JSON but not an array; send {application.input.describe()} as nested arrays.")
    taken = ", ".join(dict.fromkeys((*application.accepts, "application/json", RAW)))
    raise UnsupportedContent(f"Content-Type {content_type!r} is not taken by {served.name!r}; send {taken}.")


def _is_decoded(application: Application, content_type: str, body: bytes) -> bool:
    """Whether the application's `decode` reads a body; what is an array already is not decoded."""
    if application.decode is None or content_type == RAW:
        return False
    if content_type in UNSAID or content_type == "application/json":
        return not _is_list(body) and (content_type in UNSAID or content_type in application.accepts)
    return content_type in application.accepts


def _is_list(body: bytes) -> bool:
    return body.lstrip()[:1] == b"["


def json_of(body: bytes) -> object:
    """A JSON body.

    Raises:
        InvalidInput: It is malformed, too deep, or holds NaN.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"The body is not JSON that can be read ({error}).") from None


def budget_ns_of(text: str | None) -> int | None:
    """The latency budget that a request names for itself, in nanoseconds.

    Raises:
        InvalidInput: It is not a number of milliseconds above 0.
    """
    if text is None:
        return None
    try:
        budget_ms = float(text)
    except ValueError:
        budget_ms = -1.0
    if not 0 < budget_ms <= MAX_BUDGET_MS:
        raise InvalidInput(f"Penstock-Latency-Ms is {text!r}; it must be a number from 0 to {MAX_BUDGET_MS:,}.")
    return int(budget_ms * 1e6)


def is_background(text: str | None) -> bool:
    """Whether a request says that it is of the second class.

    Raises:
        InvalidInput: It names another class.
    """
    if text is None:
        return False
    if text.lower() not in PRIORITIES:
        raise InvalidInput(f"Penstock-Priority is {text!r}; it must be {' or '.join(PRIORITIES)}.")
    return text.lower() == "background"


def _decoded(served: Served, body: bytes, content_type: str) -> Array:
    application = served.application
    assert application.decode is not None
    try:
        return application.input.check(application.decode(body, content_type))
    except RequestError:
        raise
    except Exception:
        log.exception("the decode of %r raised; that request alone fails", served.name)
        raise ComputeFailed("The application's decode failed on this body; the server's log says how.") from None
