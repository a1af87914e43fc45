"""Speech in the results of one stream, on the clock of its signal."""

from collections import deque
from typing import NamedTuple, final

from penstock.core.application import Application
from penstock.core.spec import Array
from penstock.core.spoken import Speech
from penstock.serve.streams.actions import PushChunk
from penstock.serve.streams.events import EventEncoder
from penstock.serve.transcription.utterances import shifted


class Heard(NamedTuple):
    """Speech in one result.

    Args:
        speech: What was spoken, with times from the start of the stream; None if nothing was added.
        until_s: Seconds of the signal that are recognised with it.
        flushed: Whether it is the last result before a flush.
    """

    speech: Speech | None
    until_s: float
    flushed: bool


@final
class Hearing:
    """The results of one stream.

    Args:
        application: An application that declares `speech`.
        name: Its name in requests.
    """

    def __init__(self, application: Application, name: str) -> None:
        assert application.live is not None, application
        self._events = EventEncoder(name, application.live, application.output_tensor)
        self._rate_hz = application.live.rate_hz
        # Frames of each chunk without a result, and whether the signal begins anew after it.
        self._chunks: deque[tuple[int, bool]] = deque()
        self._ending = False
        self._frames = 0
        # Where the signal began, after the last flush.
        self._origin_s = 0.0

    def pushed(self, chunk: PushChunk) -> None:
        """Note a chunk whose result will come."""
        self._chunks.append((chunk.frames, chunk.resets))
        self._ending = self._ending or chunk.last

    def hear(self, output: Array, last: bool) -> Heard:
        """Take the next result.

        Args:
            output: Its valid numbers, flat.
            last: Whether the stream ends with it.

        Raises:
            ComputeFailed: The application's own functions failed.
        """
        frames, resets = 0, False
        # A network may give more results than it was given chunks; the last chunk's comes last.
        if self._chunks and (last or len(self._chunks) > self._ending):
            frames, resets = self._chunks.popleft()
        self._frames += frames
        until_s = self._frames / self._rate_hz
        speech = self._events.speech(output, last or resets)
        if speech is not None and self._origin_s and speech.words:
            speech = shifted(speech, self._origin_s)
        if resets:
            self._events.clear()
            self._origin_s = until_s
        return Heard(speech, until_s, resets)
