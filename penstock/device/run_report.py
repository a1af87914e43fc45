"""Statistics of a run over a source: age of answers, counts, cost."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """Statistics of a run.

    Args:
        answered: Frames, pictures or chunks that the network processed.
        dropped: Items that were replaced by later ones.
        broken: Items that could not be decoded.
        seconds: Length of the run.
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
    age_p50_ms: float | None
    age_p95_ms: float | None
    model_p50_ms: float
    cpu_ms: float
    lag_s: float

    def rows(self, unit: str = "frames") -> dict[str, str]:
        """The rows of a table."""
        rows = {
            unit: f"{self.answered:,} answered, {self.dropped:,} dropped, {self.broken:,} broken",
            f"{unit} per second": f"{self.answered / self.seconds:.1f} in {self.seconds:.1f} s",
            "network": f"{self.model_p50_ms:.2f} ms (p50)",
            "CPU time": f"{self.cpu_ms:.2f} ms per answer",
        }
        if self.age_p50_ms is not None:
            rows["age of an answer"] = f"{self.age_p50_ms:.1f} ms (p50), {self.age_p95_ms:.1f} ms (p95)"
        if self.lag_s >= 0.05:
            rows["playback delay"] = f"{self.lag_s:.1f} s, because decoding was slower than real time"
        return rows
