"""What is said on a live stream, message by message, without sockets and without a clock.

The client starts, sends numbered messages of samples, and ends; the server says that it is ready, answers each message
with what came of it, and says that it has ended. `Session._TABLE` has what each message means in each state. Whatever
else comes is refused by a `RequestError`, which ends the stream. docs/reference/streams.md is the same for people.
"""

import logging
import math
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, final

import numpy as np
import orjson

from penstock.core.errors import ComputeFailed, InvalidInput, UnsupportedContent
from penstock.core.live import Live, events_of, is_sound
from penstock.core.sound import (
    ENCODINGS,
    MOST_HEADER_BYTES,
    MOST_RATE_HZ,
    Decoder,
    decoder_of,
    frame_bytes_of,
)
from penstock.core.spec import Array, TensorSpec
from penstock.serve.frames import BINARY, DONE, TEXT

log = logging.getLogger(__name__)

# Seconds of the signal that one message may hold, or a chunk where that is longer.
MOST_MESSAGE_S = 1.0
MOST_BUDGET_MS = 600_000
MOST_START_BYTES = 4_096
SEQUENCE_BYTES = 4
_FIELDS = {"type", "rate_hz", "encoding", "events", "latency_ms"}

# Puts a chunk in: its bytes, its frames, and whether it is the last.
Put = Callable[[bytes | memoryview, int, bool], None]
# Sends a message: its opcode and what it carries.
Say = Callable[[int, bytes], None]
# Ends the connection, with a code and a reason.
Close = Callable[[int, str], None]


class State(Enum):
    """Where a stream is."""

    STARTING = "starting"
    FLOWING = "flowing"
    ENDING = "ending"
    OVER = "over"


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a stream is of.

    Args:
        app: The application's name.
        stream: What the stream is called in logs.
        live: The application's.
        input: One chunk.
        output: What comes of one chunk at most.
        latency_ms: The latency budget of a stream that names none.
        window: How many messages a client may well have sent that are not answered yet.
    """

    app: str
    stream: str
    live: Live
    input: TensorSpec
    output: TensorSpec
    latency_ms: float
    window: int


@final
class Session:
    """One stream.

    Args:
        terms: What it is of.
        put: Takes each chunk, in order; its answers come to `answer` in the same order.
        say: Sends a message to the client.
        close: Ends the connection once all is said.
        allow: Told of the latency budget in milliseconds when the stream starts; raises where it cannot be kept.

    Attributes:
        state: Where it is.
        most_bytes: The longest message that may come now.
        heard: How many messages came that say something: the start, and those with samples.
    """

    def __init__(self, terms: Terms, *, put: Put, say: Say, close: Close, allow: Callable[[float], None]) -> None:
        self._become(State.STARTING)
        self.most_bytes = MOST_START_BYTES
        self.heard = 0
        self._terms = terms
        self._put, self._say, self._close, self._allow = put, say, close, allow
        self._chunk_frames = terms.input.shape[0]
        self._frame_bytes = terms.input.nbytes // self._chunk_frames
        self._output_frame = terms.output.shape[1:]
        self._output_size = math.prod(self._output_frame)
        self._numbers = _as_they_are if terms.output.numpy_dtype == np.dtype("<f4") else _as_float32
        self._decoder: Decoder | None = None
        self._held: Array = np.zeros(0, np.int16)
        self._checked = not terms.input.takes_any_bytes
        self._events = events_of(terms.live)
        self._speaks_always = terms.live.events is not None
        self._memory: Any = None
        self._binary = False
        self._next = self._answered = 0
        # The chunks that each unanswered message still waits for, and what came of those that the first had.
        self._awaited: deque[int] = deque()
        self._parts: list[Array] = []
        self._farewell = DONE, ""

    def received(self, opcode: int, message: bytes) -> None:
        """Take a message.

        Raises:
            RequestError: It ends the stream.
        """
        self._takes[opcode](self, message)

    def answer(self, output: Array, last: bool) -> None:
        """Take what came of the next chunk: flat valid numbers, and whether the stream ends with it.

        Raises:
            ComputeFailed: The application's events cannot be made.
        """
        awaited = self._awaited
        if not last and awaited and awaited[0] == 1 and not self._parts and self.state is State.FLOWING:
            # Nearly every answer: the one that the client's next message waits for.
            awaited.popleft()
            self._result(output, False)
            if awaited:
                self._acknowledge_empty()
            return
        if last:
            self._result(self._joined(output), True)
            self._over()
            return
        # A network may have more to say than it was given chunks; that goes with the next answer. The end's comes last.
        if len(awaited) <= (self.state is State.ENDING) or awaited[0] > 1:
            if awaited:
                awaited[0] -= 1
            self._parts.append(output.copy())
            return
        awaited.popleft()
        self._result(self._joined(output) if self._parts else output, False)
        self._acknowledge_empty()

    def finish(self, code: int, reason: str) -> None:
        """The server ends the stream: as if the client had, but for the close."""
        if self.state in (State.STARTING, State.FLOWING):
            self._farewell = code, reason
        if self.state is State.FLOWING:
            self._flush(cut_short=True)
        elif self.state is State.STARTING:
            self._over()

    def _become(self, state: State) -> None:
        self.state = state
        self._takes = self._TABLE[state]

    def _start(self, message: bytes) -> None:
        fields, terms = _start_of(message), self._terms
        rate_hz, encoding = fields.get("rate_hz"), fields.get("encoding")
        sound = is_sound(terms.live, terms.input)
        encoding = encoding or ("pcm_s16le" if sound else "raw")
        latency_ms = fields.get("latency_ms") or terms.latency_ms
        if not sound and (encoding != "raw" or rate_hz not in (None, terms.live.rate_hz)):
            raise InvalidInput(f"{terms.app!r} takes no sound; its encoding is 'raw' at {terms.live.rate_hz:g} Hz.")
        own_hz = rate_hz or terms.live.rate_hz
        frame_bytes = frame_bytes_of(encoding) if sound else self._frame_bytes
        seconds = max(MOST_MESSAGE_S, terms.live.chunk_s(terms.input))
        if encoding not in ("raw", "pcm_s16le") or own_hz != terms.live.rate_hz:
            self._decoder = decoder_of(encoding, rate_hz, terms.live.rate_hz, seconds)
        self._allow(latency_ms)
        self._binary = fields.get("events") == "binary"
        if encoding == "wav":
            most = MOST_HEADER_BYTES + math.ceil(MOST_RATE_HZ * seconds) * frame_bytes
        else:
            most = math.ceil(own_hz * seconds) * frame_bytes
        self.most_bytes = SEQUENCE_BYTES + most
        self.heard += 1
        self._become(State.FLOWING)
        ready = {
            "type": "ready",
            "app": terms.app,
            "stream": terms.stream,
            "encoding": encoding,
            "rate_hz": terms.live.rate_hz,
            "chunk_frames": self._chunk_frames,
            "chunk_ms": terms.live.chunk_s(terms.input) * 1e3,
            "latency_ms": latency_ms,
            "window": terms.window,
        }
        self._say(TEXT, orjson.dumps(ready))

    def _chunk(self, message: bytes) -> None:
        if int.from_bytes(message[:SEQUENCE_BYTES], "little") != self._next or len(message) < SEQUENCE_BYTES:
            raise self._out_of_order(message)
        samples = memoryview(message)[SEQUENCE_BYTES:]
        if self._decoder is not None:
            self._decoded(self._decoder, samples)
            return
        frames, odd = divmod(len(samples), self._frame_bytes)
        if odd or not frames:
            raise InvalidInput(
                f"Message {self._next} has {len(samples):,} bytes of samples; send whole frames of {self._frame_bytes}."
            )
        if self._checked:
            self._terms.input.check_raw(samples)
        self._next += 1
        self.heard += 1
        if frames <= self._chunk_frames:
            self._awaited.append(1)
            self._put(samples, frames, False)
            return
        self._awaited.append(-(-frames // self._chunk_frames))
        self._put_all(samples, frames, last=False)

    def _decoded(self, decoder: Decoder, samples: memoryview) -> None:
        if not samples:
            raise InvalidInput(f"Message {self._next} has no samples; send a frame or more.")
        before = decoder.frames_in
        sound_T = decoder.feed(samples)
        self._next += 1
        # A WAV may go on after its samples; that is not heard.
        self.heard += decoder.frames_in > before
        if self._held.size:
            sound_T, self._held = np.concatenate([self._held, sound_T]), self._held[:0]
        over = sound_T.size % self._chunk_frames
        if decoder.blocks and over and sound_T.size > over:
            # A resampler gives blocks, not what it is given: what is left of one goes with the next, in one chunk.
            sound_T, self._held = sound_T[:-over], sound_T[-over:]
        self._awaited.append(-(-sound_T.size // self._chunk_frames))
        if sound_T.size:
            self._put_all(memoryview(sound_T.tobytes()), sound_T.size, last=False)
        self._acknowledge_empty()

    def _end(self, message: bytes) -> None:
        if _json(message) != {"type": "end"}:
            raise UnsupportedContent(
                'Text came where samples belong, which are binary; the last text is {"type":"end"}.'
            )
        self._flush(cut_short=False)

    def _flush(self, *, cut_short: bool) -> None:
        rest_T = self._held
        if self._decoder is not None:
            rest_T = np.concatenate([rest_T, self._decoder.flush(cut_short=cut_short)])
        self._become(State.ENDING)
        self._awaited.append(max(1, -(-rest_T.size // self._chunk_frames)))
        if rest_T.size:
            self._put_all(memoryview(rest_T.tobytes()), rest_T.size, last=True)
        else:
            self._put(b"", 0, True)

    def _put_all(self, samples: memoryview, frames: int, *, last: bool) -> None:
        most, size = self._chunk_frames, self._frame_bytes
        for at in range(0, frames, most):
            count = min(most, frames - at)
            self._put(samples[at * size : (at + count) * size], count, last and at + count == frames)

    def _too_early(self, message: bytes) -> None:
        raise UnsupportedContent('Samples came before the start; the first message is text, {"type":"start"}.')

    def _too_late(self, message: bytes) -> None:
        if self._farewell[0] != DONE:
            return  # the client could not know that the server ended it
        raise InvalidInput("A message came after the end; open another stream for more.")

    def _nothing(self, message: bytes) -> None:
        pass

    def _out_of_order(self, message: bytes) -> InvalidInput:
        if len(message) < SEQUENCE_BYTES:
            return InvalidInput(f"A message has {len(message)} bytes; it begins with a sequence number of 4.")
        number = int.from_bytes(message[:SEQUENCE_BYTES], "little")
        return InvalidInput(f"Message {number} came where {self._next} belongs; count from 0 without gaps or repeats.")

    def _acknowledge_empty(self) -> None:
        # A message may give no chunk of its own: the resampler holds its samples back.
        while self._awaited and self._awaited[0] == 0:
            self._awaited.popleft()
            self._result(_NOTHING, False)

    def _joined(self, output: Array) -> Array:
        parts, self._parts = self._parts, []
        return np.concatenate([*parts, output]) if parts else output

    def _result(self, output: Array, last: bool) -> None:
        number = self._answered
        self._answered += 1
        if self._binary:
            self._say(BINARY, _RESULT.pack(number, output.size // self._output_size) + self._numbers(output))
        elif not output.size and not self._speaks_always:
            self._say(TEXT, (_SILENT_LAST if last else _SILENT) % number)
        else:
            self._say(TEXT, self._event(number, output, last))

    def _event(self, number: int, output: Array, last: bool) -> bytes:
        try:
            event, self._memory = self._events(output.reshape(-1, *self._output_frame), self._memory, last)
            said = {"type": "result", "seq": number, "event": event}
            return orjson.dumps(said | {"last": True} if last else said, option=orjson.OPT_SERIALIZE_NUMPY)
        except Exception:
            log.exception("the events of %r raised; that stream alone ends", self._terms.app)
            raise ComputeFailed("The application's events failed on a result; the server's log says how.") from None

    def _over(self) -> None:
        self._become(State.OVER)
        code, reason = self._farewell
        if code == DONE:
            self._say(TEXT, b'{"type":"end","chunks":%d}' % self._next)
        self._close(code, reason)

    # What a message is in each state.
    _TABLE: ClassVar[dict[State, dict[int, Callable[["Session", bytes], None]]]] = {
        State.STARTING: {TEXT: _start, BINARY: _too_early},
        State.FLOWING: {TEXT: _end, BINARY: _chunk},
        State.ENDING: {TEXT: _too_late, BINARY: _too_late},
        State.OVER: {TEXT: _nothing, BINARY: _nothing},
    }


_NOTHING: Array = np.zeros(0, np.float32)
# Before a binary result's numbers: of which message it is, and its frames.
_RESULT = struct.Struct("<II")
_SILENT = b'{"type":"result","seq":%d,"event":null}'
_SILENT_LAST = b'{"type":"result","seq":%d,"event":null,"last":true}'


def _as_they_are(output: Array) -> bytes:
    return output.tobytes()


def _as_float32(output: Array) -> bytes:
    return output.astype("<f4").tobytes()


def _json(message: bytes) -> Any:
    try:
        return orjson.loads(message)
    except orjson.JSONDecodeError:
        raise InvalidInput("A text message is no JSON that can be read.") from None


def _start_of(message: bytes) -> dict[str, Any]:
    fields = _json(message)
    if not isinstance(fields, dict) or fields.get("type") != "start":
        raise InvalidInput('The first message is not a start; send {"type":"start"}.')
    fields = {name: value for name, value in fields.items() if value is not None}
    if strange := sorted(fields.keys() - _FIELDS):
        raise InvalidInput(f"The start has {strange[0][:16]!r}; it takes {', '.join(sorted(_FIELDS))}.")
    for name, most in (("rate_hz", MOST_RATE_HZ), ("latency_ms", MOST_BUDGET_MS)):
        value = fields.get(name, 1)
        if type(value) not in (int, float) or not 0 < value <= most:
            raise InvalidInput(f"{name} is {str(value)[:40]}; it must be a number above 0, to {most:,}.")
    for name, known in (("encoding", ENCODINGS), ("events", ("json", "binary"))):
        value = fields.get(name, known[0])
        if value not in known:
            raise InvalidInput(f"{name} is {str(value)[:40]!r}; it must be {', '.join(known[:-1])} or {known[-1]}.")
    return fields
