"""The protocol of a live stream; the test supplies the results of the network."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.core.application import Application
from penstock.core.spec import Array, TensorSpec
from penstock.core.streams.live import Live
from penstock.core.streams.segments import SegmentFinder, Segments
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
from penstock.serve.streams.session import Session
from penstock.serve.streams.session_tickets import SessionTickets

CHUNK = 8
RATE_HZ = 8000
SOUND = TensorSpec(dtype="int16", shape=(CHUNK,), meaning="sound", name="sound")
SCORES = TensorSpec(dtype="float32", shape=(CHUNK, 2), meaning="scores", name="scores")


@dataclass
class Talk:
    """A session and the effects of its actions so far."""

    session: Session
    actions: list[Action] = field(default_factory=list[Action])
    chunks: list[tuple[bytes, int, bool]] = field(default_factory=list[tuple[bytes, int, bool]])
    sent: list[Any] = field(default_factory=list[Any])
    closed: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    budgets_ms: list[float] = field(default_factory=list[float])
    segments: list[tuple[int, int, Any]] = field(default_factory=list[tuple[int, int, Any]])
    answered: int = 0
    # Chunks after which the network begins anew.
    resets: list[int] = field(default_factory=list[int])
    # Chunks after which the state is wanted; and states that the network began with.
    saves: list[int] = field(default_factory=list[int])
    restored: list[bytes] = field(default_factory=list[bytes])

    def execute(self, actions: Actions) -> None:
        for action in actions:
            self.actions.append(action)
            match action:
                case PushChunk(samples, frames, last, resets, saves):
                    self.chunks.append((bytes(samples), frames, last))
                    self.resets += [len(self.chunks) - 1] * resets
                    self.saves += [len(self.chunks) - 1] * saves
                case Restore(state):
                    self.restored.append(state)
                case Send(payload, binary):
                    self.sent.append(payload if binary else json.loads(payload))
                case Redecode(then=then):
                    self.execute(then(None))
                case Close(code, reason):
                    self.closed.append((code, reason))
                case SetBudget(latency_ms):
                    self.budgets_ms.append(latency_ms)
                case BeginSegment(number, seq, value):
                    self.segments.append((number, seq, value))

    def text(self, message: bytes) -> None:
        self.execute(self.session.receive_text(message))

    def binary(self, message: bytes) -> None:
        self.execute(self.session.receive_binary(message))

    def start(self, **fields: Any) -> None:
        self.text(json.dumps({"type": "start"} | fields).encode())

    def send(self, number: int, samples: bytes | Array) -> None:
        raw = samples if isinstance(samples, bytes) else samples.tobytes()
        self.binary(number.to_bytes(4, "little") + raw)

    def flush(self) -> None:
        self.text(b'{"type":"flush"}')

    def end(self) -> None:
        self.text(b'{"type":"end"}')

    def finish(self, code: int, reason: str) -> None:
        self.execute(self.session.finish(code, reason))

    def result(self, output: Array, last: bool) -> None:
        self.execute(self.session.receive_result(output, last))

    def answer_all(self) -> None:
        """Two scores for each frame: its chunk's number and its place."""
        while self.answered < len(self.chunks):
            number = self.answered
            _, frames, last = self.chunks[number]
            self.answered += 1
            self.result(np.stack([np.full(frames, number), np.arange(frames)], 1).astype(np.float32).ravel(), last)

    def segment_ended(self) -> None:
        self.execute(self.session.segment_ended())

    @property
    def samples(self) -> Array:
        return np.frombuffer(b"".join(chunk for chunk, _, _ in self.chunks), np.int16)


def talk(
    live: Live | None = None,
    input: TensorSpec = SOUND,
    segments: Segments | None = None,
    tickets: SessionTickets | None = None,
) -> Talk:
    live = live or Live(rate_hz=RATE_HZ)
    application = Application(name="hark", input=input, output=SCORES, live=live, chunks=4, model=":net")
    find = None if segments is None else SegmentFinder("hark", segments)
    return Talk(Session(application, name="hark", stream="s", latency_ms=50.0, find_segments=find, tickets=tickets))
