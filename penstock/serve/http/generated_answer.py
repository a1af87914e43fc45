"""Answers that take steps over HTTP: the whole answer as JSON, or server-sent events, one for each step."""

from collections.abc import Callable, Sequence
from typing import final

import orjson

from penstock.core.errors import ComputeFailed, Overloaded, RequestError
from penstock.core.spec import Array
from penstock.serve.exchange.response import Answer, Body, Response, Streamed, rejected, retry_after
from penstock.serve.registry.generated import REPLY_FAILED, GeneratedMessages, reply_body
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.registry.whole_answer import GOOD, WholeAnswer, ends_text

EVENTS = "text/event-stream"
ENDED_HEADER = "Penstock-Ended"


def ended_headers(ends: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the header that says why the answers of a request ended; none where they take one step."""
    return ((ENDED_HEADER, ends_text(ends)),) if ends else ()


def answering(served: ServedModel, answer: Answer, budget_ns: int | None, *, events: bool) -> Callable[..., None]:
    """Return the function that takes the results of one request, see `table_writer.SlotHandle`.

    Args:
        served: The model.
        answer: Answers the request.
        budget_ns: Latency budget of the request, None for the model's.
        events: Whether each step is an event; else the answer is one response.
    """
    if events:
        return EventAnswer(served, answer, budget_ns)

    def finished(status: int, whole: Array, ended: str) -> None:
        if status not in GOOD:
            error = served.error_of(status, budget_ns)
            served.count_rejection(error)
            answer(rejected(error))
            return
        reply = reply_body(served, whole, ended)
        if reply is None:
            answer(rejected(ComputeFailed(REPLY_FAILED)))
            return
        answer(Response(200, reply, headers=ended_headers([ended])))

    return WholeAnswer(served.application, finished)


@final
class EventAnswer:
    """Sends the output of each step as an event, and `done` with the reply at the end.

    Args:
        served: The model.
        answer: Answers the request.
        budget_ns: Latency budget of the request, None for the model's.
    """

    def __init__(self, served: ServedModel, answer: Answer, budget_ns: int | None) -> None:
        self._served, self._answer, self._budget_ns = served, answer, budget_ns
        self._body: Body | None = None
        self._messages = GeneratedMessages(served)

    def __call__(self, status: int, output: Array, last: bool) -> None:
        """Take a result, see `table_writer.SlotHandle`."""
        served = self._served
        if status not in GOOD:
            error = served.error_of(status, self._budget_ns)
            served.count_rejection(error)
            if self._body is None:
                self._answer(rejected(error))
            else:
                self._end(error_event(error))
            return
        if self._body is None:
            self._answer(Streamed(200, content_type=EVENTS, headers=EVENT_HEADERS, opened=self._opened))
        if self._body is None:
            # The client was gone when the stream was opened.
            return
        self._body.write(event(b"", self._messages.step(output)))
        if last:
            done = self._messages.done(status)
            if done is None:
                self._end(error_event(ComputeFailed(REPLY_FAILED)))
            else:
                self._end(event(b"done", done))

    def _opened(self, body: Body) -> None:
        self._body = body

    def _end(self, last: bytes) -> None:
        assert self._body is not None
        self._body.write(last)
        self._body.end()


# A proxy must pass each event on at once.
EVENT_HEADERS = (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))


def event(name: bytes, data: bytes) -> bytes:
    """Return a server-sent event of JSON; an output has no name."""
    # JSON has no line ends.
    return b"event: " + name + b"\ndata: " + data + b"\n\n" if name else b"data: " + data + b"\n\n"


def error_event(error: RequestError) -> bytes:
    """Return the event of an error after the first step, with what a response's head would have said of it."""
    fields = {"error": str(error), "status": error.status}
    if isinstance(error, Overloaded):
        fields["retry_after_s"] = retry_after(error)
    return event(b"error", orjson.dumps(fields))
