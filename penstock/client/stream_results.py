"""Results of a live stream, and those of its segments in a chain."""

from dataclasses import dataclass
from typing import Any

from penstock.client.retry import ClientConfig, error_of_event
from penstock.core.errors import PenstockError
from penstock.core.spec import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamResult:
    """The result of one message.

    Args:
        seq: Number of the message, from 0; for the end of the stream, the number after the last message.
        event: The application's event; None if there is none.
        output: With binary events, the output's frames, float32, flat.
        last: Whether the stream ends with it.
        flushed: Whether it answers a flush; always False with binary events.
    """

    seq: int
    event: Any = None
    output: Array | None = None
    last: bool = False
    flushed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentResult(StreamResult):
    """A result of a segment of the signal in the later parts of a chain. It has no event.

    Args:
        segment: Number of the segment, from 0; `seq` is the message whose result ended it.
        part: Name of the step; of the answer of a `join`, that of the chain.
    """

    segment: int
    part: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentStep(SegmentResult):
    """One output of an answer that takes steps.

    Args:
        outputs: The tensors by name, as JSON values, and `reply` where the part has partial replies.
    """

    outputs: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentAnswer(SegmentResult):
    """The answer of one part, or the chain's, which is the last result of a segment.

    Args:
        reply: The reply, as JSON values; of an `each`, a list of them.
        final: Whether it is the chain's answer.
        ended: Why an answer that takes steps ended, `"end"` or `"max_steps"`; empty for others.
    """

    reply: Any
    final: bool
    ended: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentError(SegmentResult):
    """The last result of a segment that gets no answer; the stream goes on.

    Args:
        error: The error, as a request to the chain would raise it.
    """

    error: PenstockError


def segment_result(fields: dict[str, Any], config: ClientConfig) -> SegmentResult:
    """Read a message of a segment.

    Raises:
        KeyError: It is none.
    """
    place: dict[str, Any] = {name: fields[name] for name in ("seq", "segment", "part")}
    match fields["type"]:
        case "step":
            return SegmentStep(outputs=fields["output"], **place)
        case "answer":
            return SegmentAnswer(reply=fields["reply"], final=fields["last"], ended=fields.get("ended", ""), **place)
        case _:
            return SegmentError(error=error_of_event(fields, config), **place)
