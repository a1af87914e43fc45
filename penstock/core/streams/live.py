"""Live applications: the input is a signal that arrives in chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ApplicationError
from penstock.core.prepare import RawSpec
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.core.speech.endpoint_beam import EndpointBeam
from penstock.core.speech.spoken import SpeechOf

# U frames of an output

# Content types of a whole recording.
WAV = ("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave")

# `events(output_U, memory, last)` returns the event for the client, and the memory for the next call.
Events = Callable[[Array, Any, bool], tuple[Any, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """A signal in chunks, with network state from one chunk to the next.

    The first dimension of the application's input is frames: a client may send chunks of 1 to `input.shape[0]` frames.
    The first dimension of its output is the largest number of frames that one chunk gives. Its model makes a
    `penstock.nn.Streaming`: training calls its `forward`, serving calls its `step`.

    Args:
        rate_hz: Frames of the signal per second, the sample rate of sound.
        events: Turns the valid frames of an output `[U, ...]`, U from 0, into the client's event, as JSON values; None
            sends nothing. Its other arguments are the memory that its last call returned (None at first; JSON values,
            so that a stream can move to another server) and whether the stream ends with this output, or begins anew
            after it (a flush, which clears the memory too). By default the output as nested lists, and None for an
            output without frames.
        speech: For sound whose events have words: says of an event, which is not None, what was spoken. With it the
            clients of other makers' speech services are served, see docs/reference/speech.md. None for other events.
        frame_s: Seconds of the signal of one output frame, where the frames of all outputs lie one after the other from
            the start of the signal; for `speech`. Times that no word has are then those of the frames. None where that
            is not known, or that of `beam`: they are then those of the sound that was sent, which is later by what the
            network holds back.
        beam: For outputs that are characters by CTC: decodes each utterance again at its end, with a language model and
            hot words. None for the greedy text alone.

    Raises:
        ApplicationError: A field is out of range.
    """

    rate_hz: float
    events: Events | None = None
    speech: SpeechOf | None = None
    frame_s: float | None = None
    beam: EndpointBeam | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rate_hz, int | float) or not 0 < self.rate_hz < float("inf"):
            raise ApplicationError(
                f"Live has rate_hz={self.rate_hz!r}; it must be a number of frames a second above 0."
            )
        if self.events is not None and not callable(self.events):
            raise ApplicationError(
                f"Live has events={self.events!r}; it must be a function of output, memory and last."
            )
        if self.speech is not None and not callable(self.speech):
            raise ApplicationError(f"Live has speech={self.speech!r}; it must be a function of an event.")
        if self.frame_s is not None and not (isinstance(self.frame_s, int | float) and 0 < self.frame_s < float("inf")):
            raise ApplicationError(f"Live has frame_s={self.frame_s!r}; it must be a number of seconds above 0.")
        if self.beam is not None and (not isinstance(self.beam, EndpointBeam) or self.speech is None):
            raise ApplicationError(
                "Live has a beam that is no EndpointBeam, or no speech, which says where utterances end; give both."
            )
        if self.beam is not None and self.frame_s not in (None, self.beam.frame_s):
            raise ApplicationError(
                f"Live has frame_s={self.frame_s!r}, and its beam {self.beam.frame_s!r}; give the same, or only one."
            )

    @property
    def output_frame_s(self) -> float | None:
        """Seconds of the signal of one output frame; None where that is not known."""
        return self.frame_s if self.beam is None else self.beam.frame_s

    def chunk_s(self, input: TensorSpec) -> float:
        """Length of the longest chunk in seconds."""
        return input.shape[0] / self.rate_hz


def is_sound(input: ChunkSpec | RawSpec) -> bool:
    """True for a signal of one channel of 16-bit samples, which can be decoded and resampled as sound."""
    return not isinstance(input, RecordSpec) and input.dtype == "int16" and len(input.shape) == 1


def events_of(live: Live) -> Events:
    """The application's `events`, or the default: the output as nested lists."""
    return live.events or _as_lists


def _as_lists(output_U: Array, memory: Any, last: bool) -> tuple[Any, Any]:
    return (output_U.tolist() if len(output_U) else None), memory
