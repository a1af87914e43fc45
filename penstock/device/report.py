"""What a run was like: how old answers were, how many there were, what they cost."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

# Of the newest answers the percentiles are taken, however long the run.
MOST_KEPT = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Figures of a run.

    Args:
        answered: Frames, pictures or chunks that the network looked at.
        dropped: Those that came and made room for later ones, or grew too old.
        broken: Those that could not be decoded.
        seconds: The run's length.
        per_second: Answers a second.
        age_p50_ms: From when a frame came or was due until its answer; None where frames are not played at their pace.
        age_p95_ms: The same, of the slowest of twenty.
        model_p50_ms: The network's own time.
        cpu_ms: Processor time for an answer, everything included.
        behind_s: Seconds by which decoding was slower than real time.
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
    behind_s: float

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def rows(self, unit: str = "frames") -> dict[str, str]:
        """For people."""
        rows = {
            unit: f"{self.answered:,} answered, {self.dropped:,} dropped, {self.broken:,} broken",
            f"{unit} a second": f"{self.per_second:.1f} in {self.seconds:.1f} s",
            "network": f"{self.model_p50_ms:.2f} ms (p50)",
            "processor time": f"{self.cpu_ms:.2f} ms for each",
        }
        if self.age_p50_ms is not None:
            rows["age of an answer"] = f"{self.age_p50_ms:.1f} ms (p50), {self.age_p95_ms:.1f} ms (p95)"
        if self.behind_s >= 0.05:
            rows["played later"] = f"{self.behind_s:.1f} s, because it was decoded slower than real time"
        return rows


@final
class Tally:
    """Counts while a run goes on.

    Args:
        clock: Seconds that only go forward.
        cpu: Seconds of processor time of this process.
    """

    def __init__(self, clock: Callable[[], float], cpu: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._cpu = cpu
        self._start_s = clock()
        self._start_cpu_s = cpu()
        self._answered = 0
        self._ages_s: deque[float] = deque(maxlen=MOST_KEPT)
        self._models_s: deque[float] = deque(maxlen=MOST_KEPT)

    def add(self, *, age_s: float | None, model_s: float) -> None:
        """One answer."""
        self._answered += 1
        self._models_s.append(model_s)
        if age_s is not None:
            self._ages_s.append(age_s)

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return self._clock() - self._start_s

    def report(self, *, dropped: int, broken: int, behind_s: float) -> Report:
        """Until now."""
        seconds = self.seconds
        p50, p95 = 1e3 * np.percentile(self._ages_s, (50, 95)) if self._ages_s else (None, None)
        return Report(
            answered=self._answered,
            dropped=dropped,
            broken=broken,
            seconds=seconds,
            per_second=self._answered / seconds if seconds > 0 else 0.0,
            age_p50_ms=None if p50 is None else float(p50),
            age_p95_ms=None if p95 is None else float(p95),
            model_p50_ms=1e3 * float(np.median(self._models_s)) if self._models_s else 0.0,
            cpu_ms=1e3 * (self._cpu() - self._start_cpu_s) / max(self._answered, 1),
            behind_s=behind_s,
        )
