"""Outputs of answers that take steps as JSON, for the protocols that send each step."""

import logging
from typing import Any, final

import orjson

from penstock.core.application import unpacked
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.registry.whole_answer import ended_by, whole_of
from penstock.serve.table.slots import ANSWERED, BROKEN

log = logging.getLogger(__name__)

ENDED = "ended"
REPLY_FAILED = "The application's reply failed on this output; the server's log says how."


def step_numbers(served: ServedModel, output: Array) -> dict[str, Any]:
    """Return the output of one step, given flat, as JSON values by name."""
    spec = served.application.output
    if isinstance(spec, RecordSpec):
        return spec.to_numbers(output)
    return {spec.name: output.reshape(spec.shape).tolist()}


def reply_body(served: ServedModel, whole: Array, ended: str) -> bytes | None:
    """Make the JSON of a whole answer's reply, with the reason why it ended; None if the `reply` raises.

    Counts the request.
    """
    try:
        body = orjson.dumps(_with_reason(served, whole, ended))
    except Exception:
        log.exception("the reply of %r raised; that request alone fails", served.name)
        served.counts[BROKEN] += 1
        return None
    served.counts[ANSWERED] += 1
    return body


def _with_reason(served: ServedModel, whole: Array, ended: str) -> Any:
    reply = served.reply(unpacked(served.application, whole))
    output = served.application.output
    if served.application.reply is None and not isinstance(output, RecordSpec):
        reply = {output.name: reply}
    # A reply of another kind, such as a text, has no place for it; a header says it.
    return {**reply, ENDED: ended} if isinstance(reply, dict) and ENDED not in reply else reply


@final
class GeneratedReply:
    """Keeps the outputs of one answer for the last message, which has the reply.

    Args:
        served: The model.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._outputs: list[Array] = []

    def add(self, output: Array) -> None:
        """Keep the output of a step, given flat."""
        self._outputs.append(output.copy())

    def done(self, status: int) -> bytes | None:
        """Make the last message, `{"ended": ..., "steps": ..., "reply": ...}`; None if the `reply` raises."""
        ended = ended_by(status)
        reply = reply_body(self._served, whole_of(self._served.application, self._outputs), ended)
        if reply is None:
            return None
        head = orjson.dumps({ENDED: ended, "steps": len(self._outputs)})
        return head[:-1] + b',"reply":' + reply + b"}"
