"""Answers that take steps, of a model or of a chain whose last part generates, as messages for one client."""

from collections.abc import Callable
from typing import Any, Protocol, final

import orjson

from penstock.core.errors import ComputeFailed, RequestError
from penstock.core.spec import Array
from penstock.serve.registry.generated import ENDED, REPLY_FAILED, GeneratedMessages, chain_reply
from penstock.serve.registry.served_chain import ServedChain
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.registry.whole_answer import GOOD, ended_by

# Makes a chunk of a request's JSON.
ChunkOf = Callable[[bytes], Array | bytes]


class StepSink(Protocol):
    """Takes the messages of one answer; `end` or `fail` is the last."""

    def send(self, step: bytes) -> None:
        """Take the JSON of a step."""
        ...

    def end(self, done: bytes) -> None:
        """Take the JSON of the end, with the reply."""
        ...

    def fail(self, error: RequestError) -> None:
        """Take the error that ends the answer; it is counted."""
        ...


@final
class ModelAnswer:
    """One answer of a model that generates.

    Args:
        served: The model.
        sink: Takes the messages.
    """

    def __init__(self, served: ServedModel, sink: StepSink) -> None:
        self._served, self._sink = served, sink
        self._messages = GeneratedMessages(served)

    def begin(self, chunk: Array | bytes, arrival_ns: int) -> Callable[[], None]:
        """Submit the request; returns a function that cancels it.

        Raises:
            RequestError: It is rejected.
        """
        return self._served.submit(chunk, self._on_result, arrival_ns).cancel

    def _on_result(self, status: int, output: Array, last: bool) -> None:
        if status not in GOOD:
            error = self._served.error_of(status, None)
            self._served.count_rejection(error)
            self._sink.fail(error)
            return
        self._sink.send(self._messages.step(output))
        if last:
            done = self._messages.done(status)
            if done is None:
                self._sink.fail(ComputeFailed(REPLY_FAILED))
            else:
                self._sink.end(done)


@final
class ChainAnswer:
    """One answer of a chain whose last part generates: the outputs of that part.

    Args:
        served: The chain.
        sink: Takes the messages.
    """

    def __init__(self, served: ServedChain, sink: StepSink) -> None:
        self._served, self._sink = served, sink
        self._messages: GeneratedMessages | None = None
        self._steps, self._ended = 0, ""

    def begin(self, chunk: Array | bytes, arrival_ns: int) -> Callable[[], None]:
        """Begin with the first part; returns a function that cancels the rest.

        Raises:
            RequestError: The request is rejected.
        """
        served = self._served
        if isinstance(chunk, bytes):
            chunk = served.application.input.from_bytes(chunk)
        return served.submit_rows(chunk[None], self._finish, arrival_ns, None, stream=self._output)

    def _output(self, part: ServedModel, status: int, output: Array, last: bool) -> None:
        self._messages = self._messages or GeneratedMessages(part)
        self._steps += 1
        if last:
            self._ended = ended_by(status)
        self._sink.send(self._messages.step(output))

    def _finish(self, result: Any) -> None:
        if isinstance(result, RequestError):
            self._sink.fail(result)
            return
        try:
            reply = chain_reply(self._served, result[0, ...], self._ended)
        except ComputeFailed as error:
            self._served.count_broken_reply()
            self._sink.fail(error)
            return
        head = orjson.dumps({ENDED: self._ended, "steps": self._steps})
        self._sink.end(head[:-1] + b',"reply":' + reply + b"}")


StepAnswer = ModelAnswer | ChainAnswer
