"""Speech in the results of one stream, on the clock of its signal."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, final

from penstock.core.application import Application
from penstock.core.spec import Array
from penstock.core.speech.endpoint_beam import Redecoded
from penstock.core.speech.hot_words import HotWord
from penstock.core.speech.spoken import Speech
from penstock.serve.streams.actions import Actions, PushChunk, Redecode
from penstock.serve.streams.events import EventEncoder
from penstock.serve.streams.frame_log import FrameLog
from penstock.serve.transcription.utterances import Cause, Utterance, shifted


class Heard(NamedTuple):
    """Speech in one result.

    Args:
        speech: What was spoken, with times from the start of the stream; None if nothing was added.
        until_s: Seconds of the signal that are recognised with it: to the last frame of the output, where the time of a
            frame is known, and otherwise to the end of its chunk.
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
        # Output frames since the signal began, each of so many numbers and seconds.
        self._outputs = 0
        self._output_size = math.prod(application.output_tensor.shape[1:])
        self._output_s = application.live.output_frame_s
        # Where the signal began, after the last flush.
        self._origin_s = 0.0
        # The frames of the open utterance, and where their signal began; where the application ended it last.
        beam = application.live.beam
        self._log = None if beam is None else FrameLog(application.output_tensor.shape[-1])
        self._log_origin_s = 0.0
        self._end_s: float | None = None
        self._begins_anew = False

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
        self._outputs += output.size // self._output_size
        until_s = self._until_s(ends=last or resets)
        if self._log is not None:
            if self._begins_anew:
                self._log.clear()
                self._log_origin_s = self._origin_s
            self._begins_anew = resets
            self._log.add(output)
        speech = self._events.speech(output, last or resets)
        self._end_s = None if speech is None else speech.end_s
        if speech is not None:
            # The rest of the signal belongs to the last utterance.
            speech = shifted(replace(speech, end_s=None) if last or resets else speech, self._origin_s)
        if resets:
            self._events.clear()
            self._origin_s, self._outputs = until_s, 0
        return Heard(speech, until_s, resets)

    def ended(
        self, utterance: Utterance, hot_words: Sequence[HotWord], then: Callable[[Utterance], Actions]
    ) -> Actions:
        """Return the actions for an utterance that ended with the last result, decoded again if there is a beam.

        Args:
            utterance: The utterance.
            hot_words: Of its stream.
            then: Makes the actions of it, with its better text.
        """
        if self._log is None:
            return then(utterance)
        end_s = None
        if utterance.cause is Cause.APPLICATION:
            end_s = self._end_s
        elif utterance.cause is Cause.LENGTH and utterance.words:
            # The text behind its last word is in the next utterance.
            end_s = utterance.words[-1].end_s - self._log_origin_s
        assert self._output_s is not None
        frames = self._log.take(None if end_s is None else round(end_s / self._output_s))
        # Where nothing is spoken, the order alone matters.
        frames = frames if utterance.text else None
        return (Redecode(frames, hot_words, partial(self._with_text, utterance, then, self._log_origin_s)),)

    def _until_s(self, *, ends: bool) -> float:
        until_s = self._frames / self._rate_hz
        # At the end of the signal all of it is recognised; a network may give a frame for the rest of its last one.
        if ends or self._output_s is None:
            return until_s
        return min(until_s, self._origin_s + self._outputs * self._output_s)

    def in_order(self, then: Callable[[], Actions]) -> Actions:
        """Return actions that come behind those of the utterances before, whose better texts they need."""
        return then() if self._log is None else (Redecode(None, (), lambda _: then()),)

    def _with_text(
        self,
        utterance: Utterance,
        then: Callable[[Utterance], Actions],
        origin_s: float,
        redecoded: Redecoded | None,
    ) -> Actions:
        if redecoded is not None:
            words = [
                replace(word, start_s=word.start_s + origin_s, end_s=word.end_s + origin_s) for word in redecoded.words
            ]
            utterance = replace(utterance, text=redecoded.text, words=words)
        return then(utterance)
