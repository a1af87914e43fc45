"""The interface of a live stream's protocol: messages and results in, actions out, without sockets or clock."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from penstock.core.spec import Array
from penstock.serve.streams.actions import Actions, Send


class StreamState(Enum):
    """State of a stream's protocol; `SETTLING`: all is answered but segments that are under way in a chain."""

    STARTING = "starting"
    FLOWING = "flowing"
    ENDING = "ending"
    SETTLING = "settling"
    OVER = "over"


# Python 3.11 takes as long to look a member up as to call a method.
STARTING, FLOWING, ENDING, SETTLING, OVER = StreamState


class Ending(NamedTuple):
    """The end of a stream, for its client.

    Args:
        messages: The last messages to the client.
        code: The close code.
        reason: The reason of the close.
    """

    messages: Sequence[Send]
    code: int
    reason: str


class LiveProtocol(Protocol):
    """The protocol of one stream. A method that takes a message raises `RequestError` to end the stream.

    Attributes:
        state: Its state.
        max_message_bytes: Longest message that is accepted now.
        idle_s: Time without a message that counts as activity after which the stream ends, in seconds; None for the
            server's.
    """

    state: StreamState
    max_message_bytes: int
    idle_s: float | None

    @property
    def activity(self) -> int:
        """Number of messages that reset the idle timeout."""
        ...

    def open(self) -> Actions:
        """Begin: what the server says first."""
        ...

    def receive_text(self, message: bytes) -> Actions:
        """Take a text message from the client."""
        ...

    def receive_binary(self, message: bytes) -> Actions:
        """Take a binary message from the client."""
        ...

    def receive_result(self, output: Array, last: bool) -> Actions:
        """Take the result of the next chunk; with `last`, the stream ends with it."""
        ...

    def segment_ended(self) -> Actions:
        """Count a segment that began as over."""
        ...

    def finish(self, code: int, reason: str) -> Actions:
        """End the stream from the server's side, after all that came is answered."""
        ...

    def ending(self, code: int, reason: str) -> Ending:
        """Put an end with a code and a reason of docs/reference/streams.md into the protocol's own words."""
        ...
