"""The content of a ticket: all that a stream's server knows of the stream, as bytes."""

import struct
from dataclasses import asdict, dataclass
from typing import Any, Self

import orjson

# The length of the fields, which are JSON; the samples and the state follow.
_SIZES = struct.Struct(">III")


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketFields:
    """Fields of a ticket beside samples and the state.

    Args:
        messages: Messages that the state has taken, and that are answered; the next one has this number.
        without_samples: Those of them without samples.
        encoding: Encoding of the samples.
        rate_hz: Rate of the samples in messages.
        binary: Whether results are binary.
        memory: Memory of the application's events.
        to_drop: Samples that the resampler gives of `heard` and gave before.
    """

    messages: int
    without_samples: int
    encoding: str
    rate_hz: float
    binary: bool
    memory: Any
    to_drop: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketContent:
    """The content of a ticket.

    Args:
        fields: Fields.
        held: Samples of the network's rate that wait for more, as its input has them.
        heard: The last samples before the resampler, float32; empty without one.
        state: The state of the network.
    """

    fields: TicketFields
    held: bytes
    heard: bytes
    state: bytes

    def encode(self) -> bytes:
        """Encode it."""
        fields = orjson.dumps(asdict(self.fields))
        sizes = _SIZES.pack(len(fields), len(self.held), len(self.heard))
        return b"".join((sizes, fields, self.held, self.heard, self.state))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode what `encode` wrote."""
        fields, held, heard = _SIZES.unpack_from(data)
        at = _SIZES.size
        ends = at + fields, at + fields + held, at + fields + held + heard
        return cls(
            fields=TicketFields(**orjson.loads(data[at : ends[0]])),
            held=data[ends[0] : ends[1]],
            heard=data[ends[1] : ends[2]],
            state=data[ends[2] :],
        )
