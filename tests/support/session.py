"""A live stream's protocol with a network that the test plays: what goes in, what comes out."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.core.live import Live
from penstock.core.spec import Array, TensorSpec
from penstock.serve.frames import BINARY, TEXT
from penstock.serve.protocols.live import Session, Terms

CHUNK = 8
RATE_HZ = 8000
SOUND = TensorSpec(dtype="int16", shape=(CHUNK,), meaning="sound", name="sound")
SCORES = TensorSpec(dtype="float32", shape=(CHUNK, 2), meaning="scores", name="scores")


@dataclass
class Talked:
    """What a session put in and said."""

    chunks: list[tuple[bytes, int, bool]] = field(default_factory=list[tuple[bytes, int, bool]])
    said: list[Any] = field(default_factory=list[Any])
    closed: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    budgets_ms: list[float] = field(default_factory=list[float])
    answered: int = 0

    def put(self, chunk: bytes | memoryview, frames: int, last: bool) -> None:
        self.chunks.append((bytes(chunk), frames, last))

    def say(self, opcode: int, payload: bytes) -> None:
        self.said.append(json.loads(payload) if opcode == TEXT else payload)

    def close(self, code: int, reason: str) -> None:
        self.closed.append((code, reason))

    @property
    def samples(self) -> Array:
        return np.frombuffer(b"".join(chunk for chunk, _, _ in self.chunks), np.int16)


def session(live: Live | None = None, input: TensorSpec = SOUND) -> tuple[Session, Talked]:
    talked = Talked()
    terms = Terms(
        app="hark",
        stream="s",
        live=live or Live(rate_hz=RATE_HZ),
        input=input,
        output=SCORES,
        latency_ms=50.0,
        window=4,
    )
    made = Session(
        terms, put=talked.put, say=talked.say, close=talked.close, allow=lambda ms: talked.budgets_ms.append(ms)
    )
    return made, talked


def start(made: Session, **fields: Any) -> None:
    made.received(TEXT, json.dumps({"type": "start"} | fields).encode())


def send(made: Session, number: int, samples: bytes | Array) -> None:
    raw = samples if isinstance(samples, bytes) else samples.tobytes()
    made.received(BINARY, number.to_bytes(4, "little") + raw)


def end(made: Session) -> None:
    made.received(TEXT, b'{"type":"end"}')


def answer_all(made: Session, talked: Talked) -> None:
    """Two scores for each frame: its chunk's number and its place."""
    while talked.answered < len(talked.chunks):
        number = talked.answered
        _, frames, last = talked.chunks[number]
        talked.answered += 1
        made.answer(np.stack([np.full(frames, number), np.arange(frames)], 1).astype(np.float32).ravel(), last)
