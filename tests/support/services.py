"""Protocols of speech services without sockets: a session, and a network that the test plays.

The network gives each frame `DELAY` frames later, and what it holds back at a flush and at the end. A word is a run of
equal numbers above 0, and named by them.
"""

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import orjson

from penstock.core.application import Application
from penstock.core.spec import Array, TensorSpec
from penstock.core.speech.endpoint_beam import Redecoded
from penstock.core.speech.sound import Samples
from penstock.core.speech.spoken import Speech, Word
from penstock.core.speech.utterance_decoder import UtteranceFrames
from penstock.core.streams.live import Live
from penstock.serve.streams.actions import Actions, Close, PushChunk, Redecode, Send, SetBudget
from penstock.serve.streams.protocol import LiveProtocol
from penstock.serve.transcription.listen_options import ListenOptions
from penstock.serve.transcription.listen_session import ListenSession
from penstock.serve.transcription.realtime_session import RealtimeSession
from penstock.serve.transcription.speech_model import SpeechModel

RATE_HZ, CHUNK, DELAY = 1_000, 4, 3


def events(output_U: Any, memory: Any, last: bool) -> tuple[Any, Any]:
    frames, value, start = memory or [0, 0, 0]
    words: list[list[Any]] = []
    for now in [*output_U[:, 0].tolist(), *([0] if last else [])]:
        if now != value:
            if value:
                words.append([f"w{value:g}", start / RATE_HZ, frames / RATE_HZ])
            value, start = now, frames
        frames += 1
    return words or None, [frames, value, start]


def speech(event: Any) -> Speech:
    return Speech(words=[Word(text=text, start_s=start_s, end_s=end_s) for text, start_s, end_s in event])


def application(**options: Any) -> Application:
    """The application of runs."""
    given: dict[str, Any] = {"rate_hz": RATE_HZ, "events": events, "speech": speech} | options
    return Application(
        name="runs",
        input=TensorSpec(dtype="int16", shape=(CHUNK,), meaning="sound", name="sound"),
        output=TensorSpec(dtype="float32", shape=(CHUNK + DELAY, 1), meaning="the same, later", name="later"),
        live=Live(**given),
        chunks=4,
        model="nobody:asks",
    )


def model(**options: Any) -> SpeechModel:
    return SpeechModel(name="runs", version="1", content_hash="0" * 64, application=application(**options))


def runs_of(sound_T: Samples, from_frame: int = 0) -> list[tuple[str, float, float]]:
    """The words of a signal, and their times where it begins at a frame."""
    found: list[tuple[str, float, float]] = []
    edges = [0, *(np.flatnonzero(np.diff(sound_T)) + 1).tolist(), len(sound_T)]
    for begin, end in pairwise(edges):
        if begin < end and sound_T[begin]:
            found.append((f"w{sound_T[begin]}", (from_frame + begin) / RATE_HZ, (from_frame + end) / RATE_HZ))
    return found


class Conversation:
    """A client, a session and the network.

    Args:
        session: The session.
        output: The network's output of the frames that it gives.
        better: Decodes an utterance again; returns None for the greedy text.

    Attributes:
        said: Messages to the client.
        closed: Code and reason of the close; None before it.
        redecoded: Frames of the utterances that were decoded again.
    """

    def __init__(
        self,
        session: LiveProtocol,
        output: Callable[[Samples], Array] = lambda sound_T: sound_T.astype(np.float32),
        better: Callable[[UtteranceFrames], Redecoded | None] = lambda _: None,
    ) -> None:
        self.session, self._output, self._better = session, output, better
        self.said: list[dict[str, Any]] = []
        self.closed: tuple[int, str] | None = None
        self.chunks: deque[PushChunk] = deque()
        self.redecoded: list[UtteranceFrames] = []
        self._ended = False
        self._held: Samples = np.zeros(0, np.int16)
        self._do(session.open())

    def text(self, **fields: Any) -> None:
        self.send_text(orjson.dumps(fields))

    def send_text(self, message: bytes) -> None:
        self._do(self.session.receive_text(message))

    def send(self, message: bytes) -> None:
        self._do(self.session.receive_binary(message))

    def finish(self, code: int, reason: str) -> None:
        self._do(self.session.finish(code, reason))

    def answer(self, most: int | None = None) -> None:
        """Give the results of so many chunks; of all there are, if nothing is said."""
        while self.chunks and most != 0:
            chunk = self.chunks.popleft()
            sound_T = np.concatenate([self._held, np.frombuffer(chunk.samples, np.int16)])
            keep = 0 if chunk.last or chunk.resets else DELAY
            ready = max(0, len(sound_T) - keep)
            self._held = sound_T[ready:]
            self._do(self.session.receive_result(self._output(sound_T[:ready]), chunk.last))
            most = None if most is None else most - 1

    def _do(self, actions: Actions) -> None:
        for action in actions:
            assert self.closed is None, action
            if isinstance(action, Redecode):
                found = None
                if action.frames is not None:
                    self.redecoded.append(action.frames)
                    found = self._better(action.frames)
                self._do(action.then(found))
            elif isinstance(action, PushChunk):
                assert not self._ended, "a chunk came after the last one"
                assert len(action.samples) == 2 * action.frames <= 2 * CHUNK
                assert action.frames or action.last or action.resets
                assert not (action.last and action.resets)
                self._ended = action.last
                self.chunks.append(action)
            elif isinstance(action, Send):
                assert not action.binary
                self.said.append(orjson.loads(action.payload))
                assert isinstance(self.said[-1]["type"], str)
            elif not isinstance(action, SetBudget):
                assert isinstance(action, Close), action
                assert not self.chunks
                self.closed = action.code, action.reason


def listening(query: str = "", **options: Any) -> Conversation:
    """A conversation by Deepgram's protocol, of the application's own rate where the query says nothing of it."""
    options = {"encoding": "pcm_s16le", "rate_hz": RATE_HZ} | options
    found = ListenOptions.of(query) if query else ListenOptions(**options)
    return Conversation(ListenSession(model(), found, stream="some", created="2026-01-01T00:00:00+00:00"))


def realtime() -> Conversation:
    """A conversation by OpenAI's protocol."""
    return Conversation(RealtimeSession(model(), stream="some"))
