"""Statistics of a run over a source: age of answers, counts, cost."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

# Percentiles are taken over the newest answers, however long the run.
MAX_KEPT = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """Statistics of a run.

    Args:
        answered: Frames, pictures or chunks that the network processed.
        dropped: Items that were replaced by later ones, or grew too old.
        broken: Items that could not be decoded.
        seconds: Length of the run.
        per_second: Answers per second.
        age_p50_ms: Median time from when an item was due or arrived until its answer; None where nothing is played in
            real time.
        age_p95_ms: The 95th percentile.
        model_p50_ms: Median time of the network alone.
        cpu_ms: CPU time of the process per answer.
        lag_s: Seconds by which decoding was slower than real time.
    """

    answered: int
    dropped: int
    broken: int
    seconds: float
    per_second: float
    age_p50_ms: float | None
    age_p95_ms: float | None
    model_p50_ms: float
    cpu_ms: float
    lag_s: float

    def rows(self, unit: str = "frames") -> dict[str, str]:
        """The rows of a table."""
        rows = {
            unit: f"{self.answered:,} answered, {self.dropped:,} dropped, {self.broken:,} broken",
            f"{unit} per second": f"{self.per_second:.1f} in {self.seconds:.1f} s",
            "network": f"{self.model_p50_ms:.2f} ms (p50)",
            "CPU time": f"{self.cpu_ms:.2f} ms per answer",
        }
        if self.age_p50_ms is not None:
            rows["age of an answer"] = f"{self.age_p50_ms:.1f} ms (p50), {self.age_p95_ms:.1f} ms (p95)"
        if self.lag_s >= 0.05:
            rows["playback delay"] = f"{self.lag_s:.1f} s, because decoding was slower than real time"
        return rows


@final
class RunTally:
    """Counts of a run in progress.

    Args:
        clock: Monotonic seconds.
        cpu: CPU seconds of this process.
    """

    def __init__(self, clock: Callable[[], float], cpu: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._cpu = cpu
        self._start_s = clock()
        self._start_cpu_s = cpu()
        self._answered = 0
        self._ages_s: deque[float] = deque(maxlen=MAX_KEPT)
        self._models_s: deque[float] = deque(maxlen=MAX_KEPT)

    def add(self, *, age_s: float | None, model_s: float) -> None:
        """Count one answer."""
        self._answered += 1
        self._models_s.append(model_s)
        if age_s is not None:
            self._ages_s.append(age_s)

    @property
    def seconds(self) -> float:
        """Time since the tally was made."""
        return self._clock() - self._start_s

    def report(self, *, dropped: int, broken: int, lag_s: float) -> RunReport:
        """Statistics until now."""
        seconds = self.seconds
        p50, p95 = 1e3 * np.percentile(self._ages_s, (50, 95)) if self._ages_s else (None, None)
        return RunReport(
            answered=self._answered,
            dropped=dropped,
            broken=broken,
            seconds=seconds,
            per_second=self._answered / seconds if seconds > 0 else 0.0,
            age_p50_ms=None if p50 is None else float(p50),
            age_p95_ms=None if p95 is None else float(p95),
            model_p50_ms=1e3 * float(np.median(self._models_s)) if self._models_s else 0.0,
            cpu_ms=1e3 * (self._cpu() - self._start_cpu_s) / max(self._answered, 1),
            lag_s=lag_s,
        )
