"""`POST /v1/apps/{name}` of a live application: a whole recording in, its events out.

It goes through the slot table as a live stream does, a chunk at a time, as fast as there is room and as nobody who is
live is delayed.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import orjson

from penstock.core.errors import ComputeFailed, InvalidInput, RequestError, TooLarge, UnsupportedContent
from penstock.core.live import WAV, events_of, is_sound
from penstock.core.sound import Decoder, decoder_of
from penstock.core.spec import Array, TensorSpec
from penstock.serve.connection import Answer, refused
from penstock.serve.feed import Chunk, Feed
from penstock.serve.protocols.plain import BUDGET_HEADER, PRIORITY_HEADER, RAW, UNSAID, budget_ns_of, is_background
from penstock.serve.served import Served
from penstock.serve.slots import ANSWERED, OK
from penstock.serve.streams import Streams
from penstock.serve.wire import Head, Request, Response

log = logging.getLogger(__name__)

# Of a recording so much is decoded at a time: less than a millisecond of work.
PIECE_BYTES = 1 << 16

# A chunk's samples, its frames, and whether it is the last.
Chunks = Iterator[tuple[bytes, int, bool]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request's head says of how to answer it.

    Args:
        served: By which model.
        content_type: Of the body, in lower case, without parameters.
    """

    served: Served
    content_type: str

    @classmethod
    def of(cls, served: Served, head: Head) -> "Plan":
        """Read a head.

        Raises:
            InvalidInput: The budget or the priority is none. Neither means anything here.
        """
        budget_ns_of(head.headers.get(BUDGET_HEADER))
        is_background(head.headers.get(PRIORITY_HEADER))
        return cls(served, head.headers.get("content-type", "").partition(";")[0].strip().lower())

    def infer(self, request: Request, answer: Answer) -> Callable[[], None]:
        """Begin with the recording, and answer when all of it was heard; gives what cancels it.

        Raises:
            RequestError: It is none that the application takes, or it is refused.
        """
        served, streams = self.served, self.served.streams
        assert streams is not None, served.name
        # The server reads bodies as long as any of its applications takes.
        if len(request.body) > (most := served.application.max_body_bytes):
            raise TooLarge(f"The body has {len(request.body):,} bytes; {served.name!r} takes {most:,} at most.")
        chunks = chunks_of(self._decoder(request.body), request.body, served.application.input)
        first = next(chunks)
        served.refuse_lost()
        recording = streams.take_in(lambda taking: _Recording(taking, served, chunks, answer), streams.budget_ns)
        recording.begin(first)
        return recording.leave

    def _decoder(self, body: bytes) -> Decoder | None:
        application, content_type = self.served.application, self.content_type
        live = application.live
        assert live is not None, application
        sound = is_sound(live, application.input)
        if content_type == RAW:
            return None
        if sound and (content_type in WAV or (content_type in UNSAID and body.startswith(b"RIFF"))):
            return decoder_of("wav", None, live.rate_hz)
        taken = f"a WAV as {WAV[0]}, or samples as {RAW}" if sound else f"frames as {RAW}"
        raise UnsupportedContent(
            f"Content-Type {content_type!r} is not taken by {self.served.name!r}; send {taken}, or a live stream to "
            f"/v1/apps/{self.served.name}/stream."
        )


def chunks_of(decoder: Decoder | None, body: bytes, spec: TensorSpec) -> Chunks:
    """The chunks of a recording, all as long as they may be but the last, decoded as they are asked for.

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
    # Of raw frames whole chunks: a piece may not end within a number.
    step = PIECE_BYTES if decoder is not None else spec.nbytes * max(1, PIECE_BYTES // spec.nbytes)
    for at in range(0, len(body), step):
        piece = memoryview(body)[at : at + step]
        if decoder is None and not spec.takes_any_bytes:
            spec.check_raw(piece)
        held += piece if decoder is None else decoder.feed(piece).tobytes()
        # What could be the last chunk waits.
        whole = max(0, len(held) - 1) // spec.nbytes * spec.nbytes
        for begin in range(0, whole, spec.nbytes):
            yield held[begin : begin + spec.nbytes], spec.shape[0], False
        held = held[whole:]
    if decoder is not None:
        held += decoder.flush().tobytes()
    while len(held) > spec.nbytes:
        yield held[: spec.nbytes], spec.shape[0], False
        held = held[spec.nbytes :]
    yield held, len(held) // frame_bytes, True


@final
class _Recording:
    """One recording on its way.

    Args:
        streams: The model's, where it was taken in.
        served: The model.
        chunks: What is left of it after the first chunk.
        answer: Takes the response.

    Raises:
        Overloaded: No slot is free.
    """

    def __init__(self, streams: Streams, served: Served, chunks: Chunks, answer: Answer) -> None:
        assert streams.live is not None
        self._streams, self._served, self._chunks, self._answer = streams, served, chunks, answer
        self._events = events_of(streams.live)
        self._frame = served.application.output.shape[1:]
        self._memory: Any = None
        self._said: list[bytes] = []
        self._feed = Feed(streams, self._done, background=True)

    def begin(self, first: tuple[bytes, int, bool]) -> None:
        """Put the first chunk in; the others follow as results come."""
        self._put(first)

    def leave(self, *, broken: bool = True) -> None:
        """Nobody waits for the answer any more, or it is given."""
        self._feed.leave()
        self._streams.left(self, broken=broken)

    def finish(self, code: int, reason: str) -> None:
        """`Member`'s: a request that was accepted is answered."""

    def _put(self, chunk: tuple[bytes, int, bool]) -> None:
        now_ns = self._streams.now_ns()
        self._feed.put(Chunk(*chunk, now_ns, self._streams.budget_ns))

    def _done(self, status: int, output: Array, last: bool) -> None:
        try:
            if status != OK:
                raise self._streams.why(status, None)
            self._hear(output, last)
            while self._feed.room and (chunk := next(self._chunks, None)) is not None:
                self._put(chunk)
        except RequestError as error:
            self._served.count_refusal(error)
            self.leave()
            self._answer(refused(error))
            return
        if last:
            self._served.counts[ANSWERED] += 1
            self.leave(broken=False)
            self._answer(Response(200, b'{"events":[' + b",".join(self._said) + b"]}"))

    def _hear(self, output: Array, last: bool) -> None:
        try:
            event, self._memory = self._events(output.reshape(-1, *self._frame), self._memory, last)
            if event is not None:
                # At once: what it is made of lives no longer than this call.
                self._said.append(orjson.dumps(event, option=orjson.OPT_SERIALIZE_NUMPY))
        except Exception:
            log.exception("the events of %r raised; that recording alone fails", self._served.name)
            raise ComputeFailed("The application's events failed on a result; the server's log says how.") from None
