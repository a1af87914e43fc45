"""Run a live pack over a signal: chunks in order, the stream's state carried from each to the next."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from penstock.core.scores import are_scores
from penstock.core.spec import Array
from penstock.device.device_run import STALL_TIMEOUT_S, DeviceRun
from penstock.device.inbox import Inbox
from penstock.device.pack_engine import LivePackEngine
from penstock.device.sound_source import SoundChunk, max_waiting_chunks
from penstock.device.source import Source

# U frames of an output, L labels

# CTC's blank symbol; Graves et al. 2006, "Connectionist Temporal Classification", section 3.1.
BLANK, SPACE = "-", " "
# Frames without a character that end a word too: the last one of an utterance has no space behind it.
REST_FRAMES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkResult:
    """A chunk of a signal and its answer.

    Args:
        chunk: The chunk.
        output_U: The network's output frames, `[U, L]`, U from 0.
        labels: Labels that begin in these frames, or words that end in them where the labels are characters; None
            where the network does not answer with labels.
        age_s: Time from when the last sample was heard or due until the answer; None outside real time.
        model_s: Time of the network alone.
    """

    chunk: SoundChunk
    output_U: Array
    labels: tuple[str, ...] | None
    age_s: float | None
    model_s: float


def new_labels(labels: Sequence[str], output_U: Array, before: str | None) -> tuple[tuple[str, ...], str | None]:
    """Labels that begin in some frames: repeats count once, and blanks not at all if the first label is `-`.

    See `Speller` for labels that are characters.

    Args:
        labels: The name of each entry.
        output_U: `[U, L]`.
        before: The label of the frame before; None at first.

    Returns:
        The new labels, and the last frame's label.
    """
    new: list[str] = []
    indices: list[int] = output_U.argmax(1).tolist()
    for index in indices:
        label = labels[index]
        if label != before and not (label == BLANK and labels[0] == BLANK):
            new.append(label)
        before = label
    return tuple(new), before


def is_spelled(labels: Sequence[str]) -> bool:
    """Return whether the labels are CTC's blank and characters, with a space between words."""
    return labels[0] == BLANK and SPACE in labels and all(len(label) == 1 for label in labels)


@final
class Speller:
    """Joins characters into words, each when it ends: with a space, with a rest, or with the stream."""

    def __init__(self) -> None:
        self._word, self._rest = "", 0

    def take(self, characters: Sequence[str], frames: int, last: bool) -> tuple[str, ...]:
        """Take the characters that began in some frames; return the words that ended.

        Args:
            characters: The characters.
            frames: Number of the frames.
            last: Whether the stream ends.
        """
        *ended, self._word = (self._word + "".join(characters)).split(SPACE)
        self._rest = 0 if characters else self._rest + frames
        if last or self._rest >= REST_FRAMES:
            ended.append(self._word)
            self._word = ""
        return tuple(word for word in ended if word)


@final
class ListenRun(DeviceRun[SoundChunk, ChunkResult]):
    """Run a live pack over sound, or over the frames of a sensor.

    Args:
        engine: The pack.
        source: Closed at the end.
        real_time: Play a recording in real time, instead of as fast as it goes.
        stall_timeout_s: The source is given up after so many seconds without a chunk.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        engine: LivePackEngine,
        source: Source[SoundChunk],
        *,
        real_time: bool = True,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        output = engine.pack.outputs[0]
        self._labels = output.labels if are_scores(output) and len(output.shape) == 2 else None
        self._engine = engine
        super().__init__(
            source,
            Inbox(capacity=max_waiting_chunks(engine.live.rate_hz, engine.live.chunk)),
            real_time=real_time or not source.recorded,
            stall_timeout_s=stall_timeout_s,
            clock=clock,
        )

    def __iter__(self) -> Iterator[ChunkResult]:
        """Results in order, until the sound ends."""
        states = self._engine.begin()
        before: str | None = None
        speller = Speller() if self._labels is not None and is_spelled(self._labels) else None
        for chunk in self._items():
            start_s = self._clock()
            output_U, states = self._engine.step(chunk.samples_T, states, last=chunk.last)
            model_s, age_s = self._clock() - start_s, self._age_s(chunk)
            labels: tuple[str, ...] | None = None
            if self._labels is not None:
                labels, before = new_labels(self._labels, output_U, before)
            if speller is not None and labels is not None:
                labels = speller.take(labels, len(output_U), chunk.last)
            self._count(age_s=age_s, model_s=model_s)
            yield ChunkResult(chunk=chunk, output_U=output_U, labels=labels, age_s=age_s, model_s=model_s)
