"""What makes an application one of live streams: its input is a signal that comes a chunk at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ApplicationError
from penstock.core.spec import Array, TensorSpec

# U frames of an output

# The content types by which a whole recording of sound comes.
WAV = ("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave")

# `events(output_U, memory, last)`: what the client gets of one result, and what the next call is given as memory.
Events = Callable[[Array, Any, bool], tuple[Any, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """Chunks of one client belong to one signal, and the network remembers what it heard.

    The application's input is then a chunk of a signal with its frames first: a client may send chunks of 1 frame up to
    `input.shape[0]`. Its output has the frames that one chunk gives at most first. Its model makes a
    `penstock.nn.Streaming`, whose `forward` is what training calls and whose `step` is what is served.

    Args:
        rate_hz: Frames of the signal in a second of real time, the sample rate of sound.
        events: Makes of the valid frames of an output `[U, ...]`, U from 0, what the client gets, as JSON values; None
            for nothing. It is also given what its last call returned as memory (None at first; JSON values, so that a
            stream can go on elsewhere) and whether the stream ends with this output. By default the output as nested
            lists, and None where it has no frame.

    Raises:
        ApplicationError: A field is out of range.
    """

    rate_hz: float
    events: Events | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rate_hz, int | float) or not 0 < self.rate_hz < float("inf"):
            raise ApplicationError(
                f"Live has rate_hz={self.rate_hz!r}; it must be a number of frames a second above 0."
            )
        if self.events is not None and not callable(self.events):
            raise ApplicationError(
                f"Live has events={self.events!r}; it must be a function of output, memory and last."
            )

    def chunk_s(self, input: TensorSpec) -> float:
        """Seconds of the signal in the longest chunk."""
        return input.shape[0] / self.rate_hz


def is_sound(live: Live, input: TensorSpec) -> bool:
    """Whether the signal is one channel of 16-bit samples, so that it can be resampled and decoded as sound."""
    return input.dtype == "int16" and len(input.shape) == 1


def events_of(live: Live) -> Events:
    """The `events` of a live application, or the default: the output as nested lists."""
    return live.events or _as_lists


def _as_lists(output_U: Array, memory: Any, last: bool) -> tuple[Any, Any]:
    return (output_U.tolist() if len(output_U) else None), memory
