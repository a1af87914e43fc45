"""`POST /v1/apps/{name}` of a live application: a whole recording in, its events out.

It goes through the slot table as a live stream does, a chunk at a time, as fast as there is room and as nobody who is
live is delayed.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, final

from penstock.core.errors import InvalidInput, RequestError, UnsupportedContent
from penstock.core.spec import Array, TensorSpec
from penstock.core.speech.endpoint_beam import Redecoded
from penstock.core.speech.sound import SoundDecoder, sound_decoder
from penstock.core.streams.live import WAV, is_sound
from penstock.serve.exchange.budget import options_of
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Response, rejected
from penstock.serve.http.plain_body import RAW, UNSPECIFIED, content_type_of
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.streams.actions import Actions, PushChunk, Redecode
from penstock.serve.streams.endpoint_queue import RECORDING, EndpointQueue
from penstock.serve.streams.event_frames import EventFrames
from penstock.serve.streams.events import EventEncoder
from penstock.serve.streams.slot_feed import SlotFeed
from penstock.serve.streams.stream_balancer import StreamBalancer
from penstock.serve.streams.streams import Streams
from penstock.serve.table.slots import ANSWERED, OK

# Of a recording so much is decoded at a time: less than a millisecond of work.
PIECE_BYTES = 1 << 16

Chunks = Iterator[PushChunk]


class RecordingListener(Protocol):
    """Takes the results of a recording, and answers its request."""

    def pushed(self, chunk: PushChunk) -> None:
        """Note a chunk that goes to the network."""

    def hear(self, output: Array, last: bool) -> None:
        """Take the next result; raises `RequestError` to reject the request."""

    def finish(self) -> None:
        """Answer: the last result was taken."""

    def reject(self, error: RequestError) -> None:
        """Answer with a rejection."""

    def cancel(self) -> None:
        """Answer nothing more: the client is gone."""


@final
class RecordingCall:
    """Answers the requests with one head.

    Args:
        served: The model.
        head: The head.

    Raises:
        InvalidInput: The budget or the priority, which have no effect here, is malformed.
    """

    def __init__(self, served: ServedModel, head: Head) -> None:
        self._served = served
        self._content_type = content_type_of(head)
        options_of(head)

    def handle(self, request: Request, answer: Answer) -> Callable[[], None]:
        """Start to feed the recording, and answer when its end is processed; returns a function that cancels it.

        Raises:
            RequestError: The body is no input of the application, or the request is rejected.
        """
        served, streams = self._served, self._served.streams
        assert streams is not None, served.name
        chunks = chunks_of(self._decoder(request.body), request.body, served.application.input_tensor)
        first = next(chunks)
        served.reject_lost()
        return admitted(served, streams, first, chunks, lambda taking: _Events(taking, served, answer))

    def _decoder(self, body: bytes) -> SoundDecoder | None:
        application, content_type = self._served.application, self._content_type
        live = application.live
        assert live is not None, application
        sound = is_sound(application.input_tensor)
        if content_type == RAW:
            return None
        if sound and (content_type in WAV or (content_type in UNSPECIFIED and body.startswith(b"RIFF"))):
            return sound_decoder("wav", None, live.rate_hz)
        taken = f"a WAV as {WAV[0]}, or samples as {RAW}" if sound else f"frames as {RAW}"
        raise UnsupportedContent(
            f"Content-Type {content_type!r} is not taken by {self._served.name!r}; send {taken}, or a live stream to "
            f"/v1/apps/{self._served.name}/stream."
        )


def admitted(
    served: ServedModel,
    streams: Streams | StreamBalancer,
    first: PushChunk,
    chunks: Chunks,
    listener: Callable[[Streams], RecordingListener],
) -> Callable[[], None]:
    """Admit a recording like a stream, and begin with it; returns a function that cancels it.

    Args:
        served: The model.
        streams: Its streams.
        first: The first chunk.
        chunks: The others.
        listener: Makes what takes the results.

    Raises:
        RequestError: It is not admitted.
    """
    recording = streams.admit_stream(
        lambda taking: Recording(taking, served, chunks, listener(taking)), streams.budget_ns
    )
    recording.put(first)
    return recording.cancel


def chunks_of(decoder: SoundDecoder | None, body: bytes, spec: TensorSpec) -> Chunks:
    """The chunks of a recording, all as long as they may be but the last, decoded lazily.

    Args:
        decoder: Makes samples of the body; None where it is raw frames.
        body: The recording.
        spec: One chunk.

    Raises:
        InvalidInput: It is not of the encoding, or ends within a frame.
    """
    frame_bytes = spec.nbytes // spec.shape[0]
    if decoder is None and len(body) % frame_bytes:
        raise InvalidInput(f"The body has {len(body):,} bytes; {spec.describe()} takes whole frames of {frame_bytes}.")
    held = b""
    for part in _parts(decoder, body, spec):
        held += part
        # What could be the last chunk waits.
        whole = max(0, len(held) - 1) // spec.nbytes * spec.nbytes
        for begin in range(0, whole, spec.nbytes):
            yield PushChunk(held[begin : begin + spec.nbytes], spec.shape[0], False)
        held = held[whole:]
    yield PushChunk(held, len(held) // frame_bytes, True)


def _parts(decoder: SoundDecoder | None, body: bytes, spec: TensorSpec) -> Iterator[bytes | memoryview]:
    # Of raw frames whole chunks: a piece may not end within a number.
    step = PIECE_BYTES if decoder is not None else spec.nbytes * max(1, PIECE_BYTES // spec.nbytes)
    for at in range(0, len(body), step):
        piece = memoryview(body)[at : at + step]
        if decoder is not None:
            yield decoder.feed(piece).tobytes()
            continue
        if not spec.takes_any_bytes:
            spec.check_raw(piece)
        yield piece
    if decoder is not None:
        yield decoder.flush().tobytes()


@final
class Recording:
    """One recording in progress.

    Args:
        streams: The model's streams, which admitted it.
        served: The model.
        chunks: The chunks after the first.
        listener: Takes the results.

    Raises:
        Overloaded: No slot is free.
    """

    def __init__(self, streams: Streams, served: ServedModel, chunks: Chunks, listener: RecordingListener) -> None:
        self._streams, self._served, self._chunks, self._listener = streams, served, chunks, listener
        self._feed = SlotFeed(
            streams.writer, self._done, drained=self._more, low_priority=True, ring=streams.ring(), lost=self._lost
        )

    def leave(self, *, aborted: bool = True) -> None:
        """Release the slot."""
        self._feed.leave()
        self._streams.left(self, aborted=aborted)

    def cancel(self) -> None:
        """Release the slot, and answer nothing: the client is gone."""
        self._listener.cancel()
        self.leave()

    def finish(self, code: int, reason: str) -> None:
        """`Member`'s: a request that was accepted is answered."""

    def resume(self, streams: Streams) -> None:
        """Go on in another replica, see `Member`."""
        before, self._streams = self._streams, streams
        streams.take_over(self, self._feed, before)

    def give_up(self, status: int) -> None:
        """End with the error of a status, see `Member`."""
        self._fail(self._streams.error_of_status(status, None))

    def put(self, chunk: PushChunk) -> None:
        """Put a chunk in. After the first one, the others follow as results come."""
        now_ns = self._streams.now_ns()
        self._listener.pushed(chunk)
        self._feed.put(chunk, now_ns, now_ns + self._streams.budget_ns)

    def _lost(self, status: int) -> None:
        self._streams.wait_for_engine(self, self._feed, status)

    def _more(self) -> None:
        try:
            while self._feed.room and (chunk := next(self._chunks, None)) is not None:
                self.put(chunk)
        except RequestError as error:
            self._fail(error)

    def _fail(self, error: RequestError) -> None:
        self._served.count_rejection(error)
        self.leave()
        self._listener.reject(error)

    def _done(self, status: int, output: Array, last: bool) -> None:
        try:
            if status != OK:
                raise self._streams.error_of_status(status, None)
            self._listener.hear(output, last)
        except RequestError as error:
            self._fail(error)
            return
        if last:
            self._served.counts[ANSWERED] += 1
            self.leave(aborted=False)
            self._listener.finish()
            return
        self._more()


@final
class _Events:
    """Collects the events of a recording.

    Args:
        streams: The model's streams.
        served: The model.
        answer: Takes the response.
    """

    def __init__(self, streams: Streams, served: ServedModel, answer: Answer) -> None:
        self._answer: Answer | None = answer
        self._events = EventEncoder(served.name, streams.live, served.application.output_tensor)
        self._said: list[bytes] = []
        self._log = EventFrames.of(streams.live.beam, served.application.output_tensor.shape[-1], self._events)
        self._endpoints = recorded_endpoints(streams, self.reject)

    def pushed(self, chunk: PushChunk) -> None:
        """Do nothing: results have no times here."""

    def hear(self, output: Array, last: bool) -> None:
        """Take the event of a result."""
        event = self._events.encode(output, last)
        if event != b"null":
            self._said.append(event)
        if self._log is not None and (ended := self._log.hear(output)) is not None:
            then = partial(self._revise, len(self._said) - 1, self._events.event)
            self._endpoints.add(Redecode(ended, (), then))

    def finish(self) -> None:
        """Answer with all events, once the better texts are there."""
        self._endpoints.add(Redecode(None, (), self._finish))

    def reject(self, error: RequestError) -> None:
        """Answer with the rejection."""
        answer = self._answer
        self.cancel()
        if answer is not None:
            answer(rejected(error))

    def cancel(self) -> None:
        """Answer nothing, see `RecordingListener`."""
        self._answer = None
        self._endpoints.cancel()

    def _revise(self, index: int, event: Any, redecoded: Redecoded | None) -> Actions:
        if redecoded is not None:
            self._said[index] = self._events.revised(event, redecoded)
        return ()

    def _finish(self, _: Redecoded | None) -> Actions:
        if self._answer is not None:
            self._answer(Response(200, b'{"events":[' + b",".join(self._said) + b"]}"))
        return ()


def recorded_endpoints(streams: Streams, reject: Callable[[RequestError], None]) -> EndpointQueue:
    """Make the queue of the ends of a recording's utterances; each is decoded again after the one before."""
    return EndpointQueue(streams.beam, lambda _: None, reject, streams.count_utterance, RECORDING)
