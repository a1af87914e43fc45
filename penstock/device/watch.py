"""Run a pack on the frames of a source: one frame in flight, and only the latest of the others waits."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from penstock.core.errors import PackError, SourceError, TooLarge
from penstock.core.packs.pack import Pack
from penstock.core.pictures.boxes import FoundBox
from penstock.core.recognition import Recognition
from penstock.core.spec import Array
from penstock.device.device_run import STALL_TIMEOUT_S, DeviceRun
from penstock.device.inbox import Inbox
from penstock.device.pack_engine import PackEngine
from penstock.device.smoothing import Smoothed, smooth, smoothed_answer
from penstock.device.source import Frame, FrameSource
from penstock.device.table_source import fitting_source

# In the fields of `Recognition.answer`, or what a detector found, the largest score first.
FrameAnswer = dict[str, Any] | tuple[FoundBox, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameResult:
    """A frame and its answer.

    Args:
        frame: The frame.
        pixels: RGBA `[H, W, 4]`.
        answer: Of the classifier or the detector.
        age_s: Time from when the frame was due or arrived until its answer; None outside real time.
        model_s: Time of the network alone.
    """

    frame: Frame
    pixels: Array
    answer: FrameAnswer
    age_s: float | None
    model_s: float


def recognition_of(pack: Pack) -> Recognition:
    """The labels and thresholds of a pack.

    Raises:
        PackError: Its first output is not one probability per label.
    """
    output = pack.outputs[0]
    if pack.recognition is not None:
        return pack.recognition
    if output.labels and len(output.shape) == 1 and output.units == "probability":
        return Recognition(labels=output.labels)
    raise PackError(
        f"the pack {pack.name!r} answers with {output.describe()} ({output.meaning}); watch shows the answers of "
        f"classifiers and detectors: give its application a `recognition` or a `shows` and export it again."
    )


def check_pictures(pack: Pack) -> None:
    """Check that a pack takes pictures of any size.

    Raises:
        PackError: It does not.
    """
    raw = pack.raw
    if pack.live is None and raw is not None and raw.dtype == "uint8" and raw.shape == (None, None, 4):
        return
    if raw is not None:
        fix = "give its application a `prepare` of pictures and export it again"
    else:
        fix = f"name {fitting_source(pack)}"
        fix += "" if pack.live is not None else "; pictures need a `prepare` in its application"
    raise PackError(f"the pack {pack.name!r} takes {pack.input.describe()}, not pictures of any size; {fix}.")


@final
class WatchRun(DeviceRun[Frame, FrameResult]):
    """Classify the frames of a source, or find things in them.

    Args:
        engine: The pack.
        source: Closed at the end.
        every_frame: Process each frame of a recording, instead of playing it in real time.
        stall_timeout_s: The source is given up after so many seconds without a frame.
        clock: Monotonic seconds.

    Raises:
        PackError: The pack takes no pictures, or is neither a classifier nor a detector.
    """

    def __init__(
        self,
        engine: PackEngine,
        source: FrameSource,
        *,
        every_frame: bool = False,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        pack = engine.pack
        check_pictures(pack)
        self._engine = engine
        self._recognition = recognition_of(pack) if pack.shows is None else None
        self._independent = source.independent
        self._smoothed: Smoothed | None = None
        super().__init__(
            source,
            Inbox(),
            real_time=not (source.independent or (every_frame and source.recorded)),
            stall_timeout_s=stall_timeout_s,
            clock=clock,
        )

    def __iter__(self) -> Iterator[FrameResult]:
        """Results in order, until the source ends.

        Raises:
            SourceError: The source failed or stalled, or its frames are larger than the pack takes.
        """
        for frame in self._items():
            try:
                result = self._result(frame)
            except TooLarge as error:
                if not self._independent:
                    raise SourceError(f"the frames of {self._source.name} are too large: {error}") from None
                self._source.failures.add(f"{frame.name}: {error}")
                continue
            self._count(age_s=result.age_s, model_s=result.model_s)
            yield result

    def _result(self, frame: Frame) -> FrameResult:
        pixels = frame.read()
        start_s = self._clock()
        outputs = self._engine.run(pixels)
        model_s = self._clock() - start_s
        answer = self._answer(outputs, frame, pixels)
        return FrameResult(frame=frame, pixels=pixels, answer=answer, age_s=self._age_s(frame), model_s=model_s)

    def _answer(self, outputs: list[Array], frame: Frame, pixels: Array) -> FrameAnswer:
        pack, recognition = self._engine.pack, self._recognition
        if pack.shows is not None:
            named = dict(zip((spec.name for spec in pack.outputs), outputs, strict=True))
            return pack.shows.found(named, *pixels.shape[:2])
        assert recognition is not None, pack.name
        if self._independent:
            return recognition.answer(outputs[0])
        self._smoothed = smooth(recognition, self._smoothed, outputs[0], frame.time_s)
        return smoothed_answer(recognition, self._smoothed)
