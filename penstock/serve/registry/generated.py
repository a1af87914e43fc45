"""Outputs of answers that take steps as JSON, for the protocols that send each step."""

import logging
from typing import Any, final

import orjson

from penstock.core.application import unpacked
from penstock.core.errors import ComputeFailed
from penstock.core.generate import REPLY
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.serve.registry.served_chain import Served, ServedChain
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.registry.whole_answer import ended_by, whole_of
from penstock.serve.table.slots import ANSWERED, BROKEN

log = logging.getLogger(__name__)

ENDED = "ended"
REPLY_FAILED = "The application's reply failed on this output; the server's log says how."


def _step_numbers(served: ServedModel, output: Array) -> dict[str, Any]:
    spec = served.application.output
    if isinstance(spec, RecordSpec):
        return spec.to_numbers(output)
    return {spec.name: output.reshape(spec.shape).tolist()}


def answers_in_steps(served: Served) -> bool:
    """True of a model that generates, and of a chain whose last part does."""
    if isinstance(served, ServedChain):
        return served.can_stream
    return served.application.generate is not None


def chain_reply(served: ServedChain, whole: Array, ended: str) -> bytes:
    """Make the JSON of the reply of a chain whose last part generates, with the reason why it ended.

    Raises:
        ComputeFailed: The `reply` raised an error, which is logged.
    """
    try:
        return orjson.dumps(_with_reason(served, whole, ended))
    except (Exception, SystemExit):
        log.exception("the reply of %r raised, or gave what is no JSON; that request alone fails", served.name)
        raise ComputeFailed(REPLY_FAILED) from None


def reply_body(served: ServedModel, whole: Array, ended: str) -> bytes | None:
    """Make the JSON of a whole answer's reply, with the reason why it ended; None if the `reply` raises.

    Counts the request.
    """
    try:
        body = orjson.dumps(_with_reason(served, whole, ended))
    except Exception:
        log.exception("the reply of %r raised, or gave what is no JSON; that request alone fails", served.name)
        served.counts[BROKEN] += 1
        return None
    served.counts[ANSWERED] += 1
    return body


def whole_reply(served: Served, whole: Array) -> Any:
    """Make the JSON values of a whole answer's reply, of a model or of a chain whose last part generates."""
    steps_of = served.generating_part if isinstance(served, ServedChain) else served.application
    assert steps_of is not None, served.name
    reply = served.reply(unpacked(steps_of, whole))
    output = steps_of.output
    if served.application.reply is None and not isinstance(output, RecordSpec):
        return {output.name: reply}
    return reply


def _with_reason(served: Served, whole: Array, ended: str) -> Any:
    reply = whole_reply(served, whole)
    # A reply of another kind, such as a text, has no place for it; a header says it.
    return {**reply, ENDED: ended} if isinstance(reply, dict) and ENDED not in reply else reply


@final
class GeneratedMessages:
    """Makes the messages of one answer: one for each step, and the last, which has the reply.

    Args:
        served: The model.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._outputs: list[Array] = []
        generate = served.application.generate
        self._partial = generate is not None and generate.partial_replies

    def step(self, output: Array) -> bytes:
        """Make the message of a step: its outputs by name, and the `reply` to all so far where that is declared.

        A `reply` that raises there is logged, and null in this message and in those that follow.

        Args:
            output: The output of the step, flat.
        """
        self._outputs.append(output.copy())
        numbers = _step_numbers(self._served, output)
        generate = self._served.application.generate
        if generate is not None and generate.partial_replies:
            numbers[REPLY] = self._partial_reply()
        return orjson.dumps(numbers)

    def _partial_reply(self) -> Any:
        if not self._partial:
            return None
        served = self._served
        try:
            reply = served.reply(unpacked(served.application, whole_of(served.application, self._outputs)))
            orjson.dumps(reply)
        except Exception:
            log.exception("the reply of %r raised on the outputs so far; this answer goes on without", served.name)
            self._partial = False
            return None
        return reply

    def done(self, status: int) -> bytes | None:
        """Make the last message, `{"ended": ..., "steps": ..., "reply": ...}`; None if the `reply` raises."""
        ended = ended_by(status)
        reply = reply_body(self._served, whole_of(self._served.application, self._outputs), ended)
        if reply is None:
            return None
        head = orjson.dumps({ENDED: ended, "steps": len(self._outputs)})
        return head[:-1] + b',"reply":' + reply + b"}"
