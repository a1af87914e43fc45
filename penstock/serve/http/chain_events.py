"""A chain whose last part generates, as server-sent events: each output of that part, and `done` with the reply."""

from collections.abc import Callable
from typing import Any, final

import orjson

from penstock.core.errors import RequestError
from penstock.core.spec import Array
from penstock.serve.exchange.response import Answer, Body, Streamed, rejected
from penstock.serve.http.generated_answer import EVENT_HEADERS, EVENTS, error_event, event
from penstock.serve.registry.generated import ENDED, GeneratedMessages
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.registry.whole_answer import ended_by


@final
class ChainEvents:
    """The events of one request.

    Args:
        answer: Answers the request.
        reply: Makes the JSON of the chain's reply of one answer, given why it ended; returns an error if it fails.
    """

    def __init__(self, answer: Answer, reply: Callable[[Array, str], bytes | RequestError]) -> None:
        self._answer, self._reply = answer, reply
        self._body: Body | None = None
        self._messages: GeneratedMessages | None = None
        self._steps, self._ended = 0, ""

    def output(self, part: ServedModel, status: int, output: Array, last: bool) -> None:
        """Send one output of the last part; the first opens the stream."""
        if self._body is None:
            self._answer(Streamed(200, content_type=EVENTS, headers=EVENT_HEADERS, opened=self._opened))
        self._steps += 1
        if last:
            self._ended = ended_by(status)
        if self._body is not None:
            self._messages = self._messages or GeneratedMessages(part)
            self._body.write(event(b"", self._messages.step(output)))

    def finish(self, result: Any) -> None:
        """End with the reply, or with an error; without an output before it, the error is a response."""
        found = result if isinstance(result, RequestError) else self._reply(result[0, ...], self._ended)
        if not self._steps:
            assert isinstance(found, RequestError), found
            self._answer(rejected(found))
        elif self._body is None:
            # The client was gone when the stream was opened.
            return
        elif isinstance(found, RequestError):
            self._body.write(error_event(found))
            self._body.end()
        else:
            head = orjson.dumps({ENDED: self._ended, "steps": self._steps})
            self._body.write(event(b"done", head[:-1] + b',"reply":' + found + b"}"))
            self._body.end()

    def _opened(self, body: Body) -> None:
        self._body = body
