"""Frames in, what is shown out: one frame in flight, and while it is looked at the latest of those that come waits."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self, final

from penstock.core.errors import PackError, SourceError, TooLarge
from penstock.core.pack import Pack
from penstock.core.recognition import Recognition
from penstock.core.spec import Array
from penstock.device.engine import Engine
from penstock.device.feed import Feed
from penstock.device.frames import Frame, Source
from penstock.device.inbox import Inbox
from penstock.device.report import Report, Tally
from penstock.device.smoothing import Smoothed, shown, smooth

# An older frame is not looked at any more.
MOST_AGE_S = 1.0
STALL_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What came of one frame.

    Args:
        frame: Which.
        pixels: Its pixels, RGBA `[H, W, 4]`.
        shown: What is shown with it, in the fields of `Recognition.answer`.
        age_s: From when the frame came or was due until its answer; None where frames are not played at their pace.
        model_s: The network's own time.
    """

    frame: Frame
    pixels: Array
    shown: dict[str, Any]
    age_s: float | None
    model_s: float


def recognition_of(pack: Pack) -> Recognition:
    """What makes labels of the pack's answers.

    Raises:
        PackError: Its first output is not one probability for each of some labels.
    """
    output = pack.outputs[0]
    if pack.recognition is not None:
        return pack.recognition
    if output.labels and len(output.shape) == 1 and output.units == "probability":
        return Recognition(labels=output.labels)
    raise PackError(
        f"the pack {pack.name!r} answers with {output.describe()} ({output.meaning}); watch shows what a classifier "
        f"says: give its application a `recognition` and export it again."
    )


def takes_pictures(pack: Pack) -> bool:
    """Whether the pack takes RGBA pictures of any size."""
    return pack.live is None and pack.input.dtype == "uint8" and pack.input.shape == (None, None, 4)


@final
class Watcher:
    """Looks at frames one after the other.

    Args:
        engine: What looks.
        apart: Whether frames have nothing to do with one another, so that nothing is smoothed.
        clock: Seconds that only go forward.

    Raises:
        PackError: The pack takes no pictures, or is no classifier.
    """

    def __init__(self, engine: Engine, *, apart: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        pack = engine.pack
        if not takes_pictures(pack):
            raise PackError(
                f"the pack {pack.name!r} takes {pack.input.describe()}, not pictures of any size; give its application "
                f"a `prepare` and export it again."
            )
        self._engine = engine
        self._recognition = recognition_of(pack)
        self._apart = apart
        self._clock = clock
        self._smoothed: Smoothed | None = None

    def look(self, frame: Frame, *, aged: bool) -> Seen:
        """What is seen in a frame.

        Args:
            frame: The next one.
            aged: Whether it has an age.

        Raises:
            TooLarge: It has more pixels than the pack takes.
        """
        pixels = frame.read()
        before_s = self._clock()
        probabilities_L = self._engine.run(pixels)[0]
        model_s = self._clock() - before_s
        if self._apart:
            answer = self._recognition.answer(probabilities_L)
        else:
            self._smoothed = smooth(self._recognition, self._smoothed, probabilities_L, frame.time_s)
            answer = shown(self._recognition, self._smoothed)
        age_s = self._clock() - frame.taken_s if aged else None
        return Seen(frame=frame, pixels=pixels, shown=answer, age_s=age_s, model_s=model_s)


@final
class Watch:
    """One run over a source, to be used as a context: iterate over what is seen, then ask for the report.

    Args:
        engine: What looks.
        source: What is looked at; it is closed in the end.
        every_frame: Look at each frame of a recording however long it takes, instead of playing it at its pace.
        stall_s: After so many seconds without a frame the source is taken for dead.
        clock: Seconds that only go forward.

    Raises:
        PackError: The pack takes no pictures, or is no classifier.
    """

    def __init__(
        self,
        engine: Engine,
        source: Source,
        *,
        every_frame: bool = False,
        stall_s: float = STALL_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._watcher = Watcher(engine, apart=source.apart, clock=clock)
        self._source = source
        self._clock = clock
        self._tally = Tally(clock)
        self._inbox: Inbox[Frame] = Inbox(most=1, most_age_s=MOST_AGE_S)
        self._feed: Feed[Frame] | None = None
        if not (source.apart or (every_frame and source.recorded)):
            self._feed = Feed(
                source.frames(),
                self._inbox,
                clock=clock,
                paced=source.recorded,
                stall_s=stall_s,
                name=source.name,
                close=source.close,
            )
        self._held = self._feed or closing(source)

    def __enter__(self) -> Self:
        self._held.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.__exit__(*error)

    def __iter__(self) -> Iterator[Seen]:
        """What is seen in each frame that is looked at, until the source ends.

        Raises:
            SourceError: The source broke or stalled, or its frames are larger than the pack takes.
        """
        aged = self._feed is not None
        for frame in self._feed or self._source.frames():
            try:
                seen = self._watcher.look(frame, aged=aged)
            except TooLarge as error:
                if not self._source.apart:
                    raise SourceError(f"the frames of {self._source.name} are too large: {error}") from None
                self._source.broken.add(f"{frame.name}: {error}")
                continue
            self._tally.add(age_s=seen.age_s, model_s=seen.model_s)
            yield seen

    @property
    def seconds(self) -> float:
        """How long it runs."""
        return self._tally.seconds

    def report(self) -> Report:
        """What the run was like until now."""
        feed = self._feed
        return self._tally.report(
            dropped=self._inbox.dropped if feed else 0,
            broken=self._source.broken.count,
            behind_s=feed.pace.behind_s if feed else 0.0,
        )
