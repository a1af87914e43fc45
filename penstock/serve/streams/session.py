"""The protocol of one live stream, without sockets and without a clock: messages and results in, actions out.

The client sends a start, numbered messages of samples and flushes, and an end. The server sends `ready`, one result per
message, and `end`. `Session._TABLE` lists what each event does in each state, and is the only place where the state
changes. A message that the protocol does not allow raises a `RequestError`, which ends the stream.
docs/reference/streams.md describes the protocol to users.
"""

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import orjson
from websockets.frames import CloseCode

from penstock.core.application import Application
from penstock.core.errors import ComputeFailed, InvalidInput, UnsupportedContent
from penstock.core.spec import Array
from penstock.core.speech.endpoint_beam import Redecoded
from penstock.core.speech.hot_words import HotWord, checked_hot_words
from penstock.core.speech.sound import (
    MAX_HEADER_BYTES,
    MAX_RATE_HZ,
    PcmDecoder,
    SoundDecoder,
    frame_bytes_of,
    sound_decoder,
)
from penstock.core.streams.live import is_sound
from penstock.core.streams.segments import SegmentFinder
from penstock.serve.frontend.function_pool import log_cause
from penstock.serve.streams.actions import (
    Action,
    Actions,
    BeginSegment,
    Close,
    PushChunk,
    Redecode,
    Restore,
    Send,
    SetBudget,
)
from penstock.serve.streams.event_frames import EventFrames
from penstock.serve.streams.events import EventEncoder
from penstock.serve.streams.protocol import ENDING, FLOWING, OVER, SETTLING, STARTING, Ending, StreamState
from penstock.serve.streams.session_tickets import SessionTickets, resumable_decoder, tickets_of_start
from penstock.serve.streams.stream_start import MAX_START_BYTES, MAX_TEXT_BYTES, read_json, read_start

# Seconds of the signal that one message may hold, or one chunk if that is longer.
MAX_MESSAGE_S = 1.0
# A message may have so many bytes, however few a second of the signal has.
MIN_MESSAGE_BYTES = 64
NUMBER_BYTES = 4

_Handler: TypeAlias = Callable[["Session", Any], Actions]
_Rule: TypeAlias = tuple[_Handler, StreamState]
# Handler of each event in one state, and the state after it. Other events have no effect; a handler that raises leaves
# the state as it is.
_Rules: TypeAlias = dict[str, _Rule]


@final
class Session:
    """The protocol of one stream.

    The caller executes the returned actions in order, and gives the results of pushed chunks back in the order of the
    chunks.

    Args:
        application: A live application.
        name: Its name in requests.
        stream: The stream's name in logs.
        latency_ms: The latency budget of a stream that names none.
        find_segments: Finds the segments that feed the later steps of a chain; None without a chain.
        tickets: Its tickets; None where there are none.

    Attributes:
        state: State of the protocol; only `_enter` writes it.
        max_message_bytes: Longest message that is accepted now.
        idle_s: See `LiveProtocol`.
    """

    def __init__(
        self,
        application: Application,
        *,
        name: str,
        stream: str,
        latency_ms: float,
        find_segments: SegmentFinder | None = None,
        tickets: SessionTickets | None = None,
    ) -> None:
        assert application.live is not None, application
        self.idle_s: float | None = None
        self._enter(STARTING)
        if find_segments is not None:
            # A chain's segments go into no ticket.
            tickets = None
        self.max_message_bytes = MAX_START_BYTES + (0 if tickets is None else tickets.max_text_bytes)
        # Those that a start may ask for or bring; and those that it asked for.
        self._tickets = tickets
        self._asked: SessionTickets | None = None
        self._application, self._live, self._input = application, application.live, application.input_tensor
        self._name, self._stream, self._latency_ms = name, stream, latency_ms
        self._chunk_frames = self._input.shape[0]
        self._frame_bytes = self._input.nbytes // self._chunk_frames
        self._output_size = math.prod(application.output_tensor.shape[1:])
        self._is_float32 = application.output_tensor.numpy_dtype == np.dtype("<f4")
        self._decoder: SoundDecoder | None = None
        # Makes the decoder of what follows a flush; None where there is no decoder, or a WAV's.
        self._next_decoder: Callable[[], SoundDecoder] | None = None
        self._held: Array = np.zeros(0, np.int16)
        self._check_samples = not self._input.takes_any_bytes
        self._events = EventEncoder(name, self._live, application.output_tensor)
        self._binary = False
        self._find_segments = find_segments
        # The frames of the open utterance, where its end is decoded again.
        self._log: EventFrames | None = None
        self._hot_words: Sequence[HotWord] = ()
        self._segments = self._under_way = 0
        self._next = self._answered = self._without_samples = 0
        # For each unanswered message, the number of its chunks without a result; and results of the first one's chunks.
        self._chunks_left: deque[int] = deque()
        # Numbers of the flushes that are not answered.
        self._flushes: deque[int] = deque()
        self._parts: list[Array] = []
        self._close = Close(CloseCode.NORMAL_CLOSURE, "")

    @property
    def activity(self) -> int:
        """Number of messages that reset the idle timeout: the start, and those with samples."""
        return self._next - self._without_samples + (self.state is not STARTING)

    @property
    def plain_counts(self) -> tuple[int, int] | None:
        """Numbers of the next message and of the next result of a plain stream; None of any other.

        A stream is plain when its signal is the network's own, its results are binary, and each message that is not
        answered yet is one chunk.
        """
        plain = (
            self.state is FLOWING
            and self._binary
            and self._is_float32
            and self._decoder is None
            and self._find_segments is None
            and self._next > 0
            and not self._parts
            and not self._flushes
            and all(left == 1 for left in self._chunks_left)
        )
        return (self._next, self._answered) if plain else None

    def set_plain_counts(self, next_message: int, next_result: int) -> None:
        """Go on after messages of a plain stream that were taken and answered elsewhere."""
        self._next, self._answered = next_message, next_result
        self._chunks_left = deque([1] * (next_message - next_result))

    def open(self) -> Actions:
        """Wait for the start."""
        return ()

    def ending(self, code: int, reason: str) -> Ending:
        """End with the code and the reason alone."""
        return Ending((), code, reason)

    def receive_text(self, message: bytes) -> Actions:
        """Take a text message from the client.

        Raises:
            RequestError: The protocol does not allow it; the stream ends.
        """
        if self.state is FLOWING and read_json(message) == {"type": "flush"}:
            return self._flush_signal()
        return self._apply(self._rules.get("text"), message)

    def receive_binary(self, message: bytes) -> Actions:
        """Take a binary message from the client.

        Raises:
            RequestError: The protocol does not allow it; the stream ends.
        """
        if self.state is not FLOWING:
            return self._apply(self._rules.get("binary"), message)
        # The common case: without the call of a handler, and without a change of the state.
        size = len(message) - NUMBER_BYTES
        if size < 0 or _NUMBER.unpack_from(message)[0] != self._next:
            raise self._out_of_order(message)
        samples = memoryview(message)[NUMBER_BYTES:]
        if self._decoder is not None:
            return self._decoded(self._decoder, samples)
        frames = size // self._frame_bytes
        if frames * self._frame_bytes != size or not frames:
            raise InvalidInput(
                f"Message {self._next} has {size:,} bytes of samples; send whole frames of {self._frame_bytes}."
            )
        if self._check_samples:
            self._input.check_raw(samples)
        self._next += 1
        if frames <= self._chunk_frames:
            self._chunks_left.append(1)
            chunk = PushChunk(samples, frames, False)
            if self._asked is not None and self._asked.is_due(frames):
                self._begin_ticket(self._asked, chunk)
            return (chunk,)
        return self._chunks(samples, frames, last=False)

    def receive_result(self, output: Array, last: bool) -> Actions:
        """Take the result of the next chunk.

        Args:
            output: Its valid numbers, flat.
            last: Whether the stream ends with it.

        Raises:
            ComputeFailed: The application's `events` failed.
        """
        if last:
            actions = self._apply(self._rules.get("last_result"), output)
            return actions if self._under_way else (*actions, *self._apply(self._rules.get("settled"), None))
        left = self._chunks_left
        # A network may give more results than it was given chunks. They go with the next answer, the end's with the
        # last one.
        if len(left) <= (self.state is ENDING) or left[0] > 1:
            if left:
                left[0] -= 1
            self._parts.append(output.copy())
            return ()
        left.popleft()
        results = self._result(self._joined(output) if self._parts else output, False)
        return (*results, *self._results_without_chunks()) if left and not left[0] else results

    def receive_state(self, state: bytes) -> Actions:
        """Take the network's state after a chunk that was to be saved, once the chunk's result was taken."""
        message = None if self._asked is None or self.state is not FLOWING else self._asked.message(state)
        return () if message is None else (Send(message, False),)

    def segment_ended(self) -> Actions:
        """Count a segment that began as over: all its messages are sent."""
        self._under_way -= 1
        return () if self._under_way else self._apply(self._rules.get("settled"), None)

    def finish(self, code: int, reason: str) -> Actions:
        """End the stream from the server's side: as if the client had sent its end, with another close."""
        return self._apply(self._rules.get("finish"), Close(code, reason))

    def _apply(self, rule: _Rule | None, argument: Any) -> Actions:
        if rule is None:
            return ()
        handle, after = rule
        actions = handle(self, argument)
        self._enter(after)
        return actions

    def _enter(self, state: StreamState) -> None:
        self.state = state
        self._rules = self._TABLE[state]

    def _start(self, message: bytes) -> Actions:
        fields, live = read_start(message, max(MAX_TEXT_BYTES, self.max_message_bytes)), self._live
        rate_hz, encoding = fields.get("rate_hz"), fields.get("encoding")
        sound = is_sound(self._input)
        encoding = encoding or ("pcm_s16le" if sound else "raw")
        latency_ms = fields.get("latency_ms") or self._latency_ms
        if not sound and (encoding != "raw" or rate_hz not in (None, live.rate_hz)):
            raise InvalidInput(f"{self._name!r} takes no sound; its encoding is 'raw' at {live.rate_hz:g} Hz.")
        own_hz = rate_hz or live.rate_hz
        frame_bytes = frame_bytes_of(encoding) if sound else self._frame_bytes
        seconds = max(MAX_MESSAGE_S, live.chunk_s(self._input))
        self._binary = fields.get("events") == "binary"
        if encoding not in ("raw", "pcm_s16le") or own_hz != live.rate_hz:
            make = partial(sound_decoder, encoding, rate_hz, live.rate_hz, seconds)
            self._decoder = make()
            self._next_decoder = make if encoding != "wav" else None
        self._start_log(fields)
        restored = self._take_tickets(fields, encoding, own_hz)
        if encoding == "wav":
            max_bytes = MAX_HEADER_BYTES + math.ceil(MAX_RATE_HZ * seconds) * frame_bytes
        else:
            max_bytes = math.ceil(own_hz * seconds) * frame_bytes
        # A slow signal has fewer bytes in a second than the text of the end.
        self.max_message_bytes = max(NUMBER_BYTES + max_bytes, MIN_MESSAGE_BYTES)
        ready = {
            "type": "ready",
            "app": self._name,
            "stream": self._stream,
            "encoding": encoding,
            "rate_hz": live.rate_hz,
            "chunk_frames": self._chunk_frames,
            "chunk_ms": live.chunk_s(self._input) * 1e3,
            "latency_ms": latency_ms,
            "window": self._application.chunks,
        }
        if encoding == "raw":
            ready |= {"dtype": self._input.dtype, "frame": list(self._input.shape[1:])}
        if self._asked is not None:
            ready["tickets"] = True
        if restored:
            ready["next"] = self._next
        return SetBudget(latency_ms), *restored, Send(orjson.dumps(ready), False)

    def _take_tickets(self, fields: dict[str, Any], encoding: str, rate_hz: float) -> Actions:
        """Give tickets from now on if the start asks for them, and go on where the one that it brings says."""
        # A ticket has no room for the frames of an utterance that is decoded again at its end.
        tickets = tickets_of_start(fields, self._tickets if self._log is None else None, self._decoder)
        if tickets is None:
            return ()
        content = tickets.start(fields, encoding=encoding, rate_hz=rate_hz, binary=self._binary)
        self._asked = tickets if fields.get("tickets") else None
        if self._next_decoder is not None:
            self._next_decoder = partial(resumable_decoder, self._next_decoder)
        if content is None:
            return ()
        self._next = self._answered = content.fields.messages
        self._without_samples = content.fields.without_samples
        self._events.restore(content.fields.memory)
        self._held = np.frombuffer(content.held, np.int16)
        if isinstance(self._decoder, PcmDecoder):
            self._decoder.resume(content.heard, content.fields.to_drop)
        return (Restore(content.state),)

    def _begin_ticket(self, tickets: SessionTickets, chunk: PushChunk) -> None:
        """Have a ticket cover all messages so far, of which this is the last chunk."""
        tickets.begin(self._next, self._without_samples, self._held.tobytes(), self._decoder)
        chunk.saves = True

    def _start_log(self, fields: dict[str, Any]) -> None:
        """Keep the frames of utterances, where they are decoded again."""
        if not self._binary and self._find_segments is None:
            self._log = EventFrames.of(self._live.beam, self._output_size, self._events)
        if "hot_words" in fields:
            self._hot_words = checked_hot_words(fields["hot_words"])
            if self._log is None:
                raise InvalidInput(f"{self._name!r} decodes no utterance again in this stream; leave hot_words out.")

    def _decoded(self, decoder: SoundDecoder, samples: memoryview) -> Actions:
        if not samples:
            raise InvalidInput(f"Message {self._next} has no samples; send a frame or more.")
        before = decoder.frames_in
        sound_T = decoder.feed(samples)
        self._next += 1
        self._without_samples += decoder.frames_in == before
        if self._held.size:
            sound_T, self._held = np.concatenate([self._held, sound_T]), self._held[:0]
        over = sound_T.size % self._chunk_frames
        if decoder.blocks and over and sound_T.size > over:
            # A resampler gives blocks of its own length; the rest of one goes with the next, in one chunk.
            sound_T, self._held = sound_T[:-over], sound_T[-over:]
        chunks = self._chunks(memoryview(sound_T.tobytes()), sound_T.size, last=False)
        return (*chunks, *self._results_without_chunks())

    def _end(self, message: bytes) -> Actions:
        if read_json(message) != {"type": "end"}:
            raise UnsupportedContent(
                'Text came where samples belong, which are binary; other texts are {"type":"flush"} and {"type":"end"}.'
            )
        return self._flush(cut_short=False)

    def _flush_signal(self) -> Actions:
        """Have the network give all that it holds back, and begin anew: the message of a number, without samples."""
        if self._find_segments is not None:
            raise UnsupportedContent("The stream of a chain takes no flush: the chain finds where its segments end.")
        if self._decoder is not None and self._next_decoder is None:
            raise UnsupportedContent("A WAV takes no flush; send its samples as pcm_s16le, and flush those.")
        rest_T = self._rest(cut_short=False)
        if self._next_decoder is not None:
            self._decoder = self._next_decoder()
        self._flushes.append(self._next)
        self._next += 1
        self._without_samples += 1
        *chunks, last = self._chunks(memoryview(rest_T.tobytes()), rest_T.size, last=True)
        return (*chunks, PushChunk(last.samples, last.frames, last=False, resets=True))

    def _finish_early(self, close: Close) -> Actions:
        self._close = close
        return self._flush(cut_short=True)

    def _finish_at_once(self, close: Close) -> Actions:
        return (close,)

    def _flush(self, *, cut_short: bool) -> Actions:
        rest_T = self._rest(cut_short=cut_short)
        return self._chunks(memoryview(rest_T.tobytes()), rest_T.size, last=True)

    def _rest(self, *, cut_short: bool) -> Array:
        rest_T, self._held = self._held, self._held[:0]
        if self._decoder is not None:
            rest_T = np.concatenate([rest_T, self._decoder.flush(cut_short=cut_short)])
        return rest_T

    def _chunks(self, samples: memoryview, frames: int, *, last: bool) -> list[PushChunk]:
        """The chunks of one message; the end has one always, though it may be empty."""
        longest, size = self._chunk_frames, self._frame_bytes
        starts = range(0, max(frames, last), longest)
        self._chunks_left.append(len(starts))
        chunks = [
            PushChunk(samples[at * size : (at + longest) * size], min(longest, frames - at), last and at == starts[-1])
            for at in starts
        ]
        if self._asked is not None and chunks and not last and self._asked.is_due(frames):
            self._begin_ticket(self._asked, chunks[-1])
        return chunks

    def _too_early(self, message: bytes) -> Actions:
        raise UnsupportedContent('Samples came before the start; the first message is text, {"type":"start"}.')

    def _too_late(self, message: bytes) -> Actions:
        if self._close.code != CloseCode.NORMAL_CLOSURE:
            return ()  # the client could not know that the server ended the stream
        raise InvalidInput("A message came after the end; open another stream for more.")

    def _out_of_order(self, message: bytes) -> InvalidInput:
        if len(message) < NUMBER_BYTES:
            return InvalidInput(f"A message has {len(message)} bytes; it begins with a sequence number of 4.")
        (number,) = _NUMBER.unpack_from(message)
        return InvalidInput(f"Message {number} came where {self._next} belongs; count from 0 without gaps or repeats.")

    def _results_without_chunks(self) -> Actions:
        """Results of messages that gave no chunk: the resampler holds their samples back."""
        results: list[Action] = []
        while self._chunks_left and self._chunks_left[0] == 0:
            self._chunks_left.popleft()
            results += self._result(_EMPTY, False)
        return results

    def _joined(self, output: Array) -> Array:
        parts, self._parts = self._parts, []
        return np.concatenate([*parts, output]) if parts else output

    def _result(self, output: Array, last: bool) -> Actions:
        number = self._answered
        self._answered += 1
        # The segments are found in the events, whatever the client wants.
        flushed = bool(self._flushes) and self._flushes[0] == number
        event = b"" if self._binary and self._find_segments is None else self._events.encode(output, last or flushed)
        ended = None if self._log is None else self._log.hear(output)
        if flushed:
            self._flushes.popleft()
            self._events.clear()
            if self._log is not None:
                self._log.clear()
        if self._asked is not None:
            self._asked.answered(self._answered, self._events)
        if self._binary:
            raw = output.tobytes() if self._is_float32 else output.astype("<f4").tobytes()
            result = Send(_RESULT.pack(number, output.size // self._output_size) + raw, True)
        else:
            text = _LAST_TEXT if last else _FLUSHED_TEXT if flushed else _TEXT
            result = Send(text % (number, event), False)
            if ended is not None:
                then = partial(self._revised, self._events.event, text, number, result)
                return (Redecode(ended, self._hot_words, then),)
        return (result,) if self._find_segments is None else (result, *self._begun(self._find_segments, number, last))

    def _revised(self, event: Any, text: bytes, number: int, greedy: Send, redecoded: Redecoded | None) -> Actions:
        if redecoded is None:
            return (greedy,)
        return (Send(text % (number, self._events.revised(event, redecoded)), False),)

    def _begun(self, find: SegmentFinder, number: int, last: bool) -> Actions:
        try:
            found = find(self._events.event, last)
        except ComputeFailed as error:
            log_cause(self._name, error)
            raise
        first = self._segments
        self._segments += len(found)
        self._under_way += len(found)
        return [BeginSegment(first + index, number, value) for index, value in enumerate(found)]

    def _last_result(self, output: Array) -> Actions:
        return self._result(self._joined(output), True)

    def _settled(self, _: None) -> Actions:
        if self._close.code != CloseCode.NORMAL_CLOSURE:
            return (self._close,)
        return Send(b'{"type":"end","chunks":%d}' % self._next, False), self._close

    _TABLE: ClassVar[dict[StreamState, _Rules]] = {
        STARTING: {"text": (_start, FLOWING), "binary": (_too_early, STARTING), "finish": (_finish_at_once, OVER)},
        FLOWING: {"text": (_end, ENDING), "binary": (receive_binary, FLOWING), "finish": (_finish_early, ENDING)},
        ENDING: {"text": (_too_late, ENDING), "binary": (_too_late, ENDING), "last_result": (_last_result, SETTLING)},
        SETTLING: {"text": (_too_late, SETTLING), "binary": (_too_late, SETTLING), "settled": (_settled, OVER)},
        OVER: {},
    }


_EMPTY: Array = np.zeros(0, np.float32)
_NUMBER = struct.Struct("<I")
# Head of a binary result: number of its message, count of its frames.
_RESULT = struct.Struct("<II")
_TEXT = b'{"type":"result","seq":%d,"event":%b}'
_FLUSHED_TEXT = b'{"type":"result","seq":%d,"event":%b,"flushed":true}'
_LAST_TEXT = b'{"type":"result","seq":%d,"event":%b,"last":true}'
