"""Classify frames of a source: one frame in flight, and only the latest of the others waits."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from penstock.core.errors import PackError, SourceError, TooLarge
from penstock.core.pack import Pack
from penstock.core.recognition import Recognition
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.device.device_run import STALL_TIMEOUT_S, DeviceRun
from penstock.device.inbox import Inbox
from penstock.device.pack_engine import PackEngine
from penstock.device.smoothing import Smoothed, smooth, smoothed_answer
from penstock.device.source import Frame, FrameSource


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameResult:
    """A frame and its answer.

    Args:
        frame: The frame.
        pixels: RGBA `[H, W, 4]`.
        answer: In the fields of `Recognition.answer`.
        age_s: Time from when the frame was due or arrived until its answer; None outside real time.
        model_s: Time of the network alone.
    """

    frame: Frame
    pixels: Array
    answer: dict[str, Any]
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
        f"the pack {pack.name!r} answers with {output.describe()} ({output.meaning}); watch shows the answers of a "
        f"classifier: give its application a `recognition` and export it again."
    )


def check_pictures(pack: Pack) -> None:
    """Check that a pack takes pictures of any size.

    Raises:
        PackError: It does not.
    """
    raw = pack.raw
    if pack.live is None and raw is not None and raw.dtype == "uint8" and raw.shape == (None, None, 4):
        return
    fix = "give its application a `prepare` and export it again"
    if isinstance(pack.input, RecordSpec):
        fix = "run it in its web app or by PackEngine.predict"
    raise PackError(f"the pack {pack.name!r} takes {pack.input.describe()}, not pictures of any size; {fix}.")


@final
class WatchRun(DeviceRun[Frame, FrameResult]):
    """Classify the frames of a source.

    Args:
        engine: The pack.
        source: Closed at the end.
        every_frame: Process each frame of a recording, instead of playing it in real time.
        stall_timeout_s: The source is given up after so many seconds without a frame.
        clock: Monotonic seconds.

    Raises:
        PackError: The pack takes no pictures, or is no classifier.
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
        self._recognition = recognition_of(pack)
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
                result = self._classify(frame)
            except TooLarge as error:
                if not self._independent:
                    raise SourceError(f"the frames of {self._source.name} are too large: {error}") from None
                self._source.failures.add(f"{frame.name}: {error}")
                continue
            self._count(age_s=result.age_s, model_s=result.model_s)
            yield result

    def _classify(self, frame: Frame) -> FrameResult:
        pixels = frame.read()
        start_s = self._clock()
        probabilities_L = self._engine.run(pixels)[0]
        model_s = self._clock() - start_s
        if self._independent:
            answer = self._recognition.answer(probabilities_L)
        else:
            self._smoothed = smooth(self._recognition, self._smoothed, probabilities_L, frame.time_s)
            answer = smoothed_answer(self._recognition, self._smoothed)
        return FrameResult(frame=frame, pixels=pixels, answer=answer, age_s=self._age_s(frame), model_s=model_s)
