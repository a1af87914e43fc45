"""Actions of a live stream's protocol: what its caller does with the slot and the connection.

Those made for every chunk are not frozen: freezing triples the time to make one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from penstock.core.speech.endpoint_beam import Redecoded
from penstock.core.speech.hot_words import HotWord
from penstock.core.speech.utterance_decoder import UtteranceFrames


@final
@dataclass(slots=True)
class PushChunk:
    """Put a chunk into the stream's slot.

    Args:
        samples: Its frames.
        frames: Their number; 0 only with the last chunk.
        last: Whether the stream ends with it.
        resets: Whether the network gives what it holds back after it, and goes on with a clear state.
        saves: Whether the network's state after it is wanted.
    """

    samples: bytes | memoryview
    frames: int
    last: bool
    resets: bool = False
    saves: bool = False


@final
@dataclass(slots=True)
class Send:
    """Send a message to the client.

    Args:
        payload: Its bytes; text is UTF-8.
        binary: Whether it is a binary message.
    """

    payload: bytes
    binary: bool


@final
@dataclass(frozen=True, slots=True)
class SetBudget:
    """Grant the stream a latency budget in milliseconds; where that is rejected, drop the actions that follow."""

    latency_ms: float


@final
@dataclass(frozen=True, slots=True)
class Restore:
    """Begin the stream in the network's state that another server saved."""

    state: bytes


@final
@dataclass(frozen=True, slots=True)
class Close:
    """End the connection after everything that was sent before."""

    code: int
    reason: str


@final
@dataclass(frozen=True, slots=True)
class BeginSegment:
    """Send a segment through the later steps of a chain; report to `Session.segment_ended` when it is over.

    Args:
        number: Its number in the stream, from 0.
        seq: Number of the message whose result ended it.
        value: The input of the next step.
    """

    number: int
    seq: int
    value: Any


@final
@dataclass(slots=True)
class Redecode:
    """Decode an utterance that has ended again. The actions that follow wait for it, but for chunks and budgets.

    Args:
        frames: Its frames; None where there is nothing to decode, and the order alone matters.
        hot_words: Of the stream.
        then: Returns the actions that follow at once; called with None where the greedy text stays.
    """

    frames: UtteranceFrames | None
    hot_words: Sequence[HotWord]
    then: "Callable[[Redecoded | None], Actions]"


Action: TypeAlias = PushChunk | Send | SetBudget | Restore | BeginSegment | Close | Redecode
Actions: TypeAlias = Sequence[Action]
