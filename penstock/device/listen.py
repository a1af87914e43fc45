"""Sound in, what is heard out: chunks in their order, a stream's state carried from each to the next."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Self, final

from penstock.core.errors import PackError
from penstock.core.spec import Array
from penstock.device.audio import Chunk, Sound, waiting_chunks
from penstock.device.engine import LiveEngine
from penstock.device.feed import Feed
from penstock.device.inbox import Inbox
from penstock.device.report import Report, Tally

# U frames of an output, L labels

STALL_S = 10.0
# CTC's symbol for nothing new; Graves et al. 2006, "Connectionist Temporal Classification", section 3.1.
BLANK = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeardChunk:
    """What came of one chunk.

    Args:
        chunk: Which.
        output_U: The network's output frames, `[U, L]`, U from 0.
        told: The labels that are new in them.
        age_s: From when its last sample was heard or due; None where the sound is not played at its pace.
        model_s: The network's own time.
    """

    chunk: Chunk
    output_U: Array
    told: tuple[str, ...]
    age_s: float | None
    model_s: float


def newly_told(labels: Sequence[str], output_U: Array, before: str | None) -> tuple[tuple[str, ...], str | None]:
    """The labels that begin in some frames.

    Of equal labels behind one another one counts. Where the first of all labels is `-`, it stands for nothing new.

    Args:
        labels: The name of each entry.
        output_U: `[U, L]`.
        before: The label of the frame before; None at first.

    Returns:
        What is new, and the last frame's label.
    """
    told: list[str] = []
    indices: list[int] = output_U.argmax(1).tolist()
    for index in indices:
        label = labels[index]
        if label != before and not (label == BLANK and labels[0] == BLANK):
            told.append(label)
        before = label
    return tuple(told), before


@final
class Listen:
    """One run over a sound, to be used as a context: iterate over what is heard, then ask for the report.

    Args:
        engine: What listens.
        sound: What is listened to; it is closed in the end.
        real_time: Play a recording at its pace, instead of as fast as it goes.
        stall_s: After so many seconds without a chunk the sound is taken for dead.
        clock: Seconds that only go forward.

    Raises:
        PackError: The pack does not take sound, or does not answer with labels.
    """

    def __init__(
        self,
        engine: LiveEngine,
        sound: Sound,
        *,
        real_time: bool = True,
        stall_s: float = STALL_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        output = engine.pack.outputs[0]
        if not output.labels or len(output.shape) != 2:
            raise PackError(
                f"the pack {engine.pack.name!r} answers with {output.describe()} ({output.meaning}); watch tells "
                f"labels: give the application's output some."
            )
        self._labels = output.labels
        self._engine = engine
        self._sound = sound
        self._clock = clock
        self._tally = Tally(clock)
        live = engine.live
        self._inbox: Inbox[Chunk] = Inbox(most=waiting_chunks(live.rate_hz, live.chunk))
        self._feed: Feed[Chunk] | None = None
        if real_time or not sound.recorded:
            self._feed = Feed(
                sound.chunks(),
                self._inbox,
                clock=clock,
                paced=sound.recorded,
                stall_s=stall_s,
                name=sound.name,
                close=sound.close,
            )
        self._held = self._feed or closing(sound)

    def __enter__(self) -> Self:
        self._held.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.__exit__(*error)

    def __iter__(self) -> Iterator[HeardChunk]:
        """What is heard in each chunk, until the sound ends.

        Raises:
            SourceError: The sound broke or stalled.
        """
        states = self._engine.begin()
        before: str | None = None
        for chunk in self._feed or self._sound.chunks():
            begun_s = self._clock()
            heard = self._engine.step(chunk.samples_T, states, last=chunk.last)
            now_s = self._clock()
            states = heard.states
            told, before = newly_told(self._labels, heard.output_U, before)
            age_s = None if self._feed is None else now_s - chunk.taken_s
            self._tally.add(age_s=age_s, model_s=now_s - begun_s)
            yield HeardChunk(chunk=chunk, output_U=heard.output_U, told=told, age_s=age_s, model_s=now_s - begun_s)

    @property
    def seconds(self) -> float:
        """How long it runs."""
        return self._tally.seconds

    def report(self) -> Report:
        """What the run was like until now."""
        behind_s = self._feed.pace.behind_s if self._feed else 0.0
        return self._tally.report(dropped=self._inbox.dropped, broken=0, behind_s=behind_s)


def takes_sound(engine: LiveEngine) -> bool:
    """Whether the pack's signal is one channel of 16-bit samples."""
    spec = engine.pack.input
    return spec.dtype == "int16" and len(spec.shape) == 1
