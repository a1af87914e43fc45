"""Outcomes of a load of live streams."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

# n results, m chunks

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamLoadResult:
    """Outcomes of the chunks that were due during the measurement.

    Args:
        streams: Requested streams.
        latency_s: Latency of each result, `[n]`, from when its chunk was due.
        offered: Chunks due.
        lost: Chunks without a result.
        repeated: Results out of order.
        opened: Admitted streams.
        refused: Rejected streams.
        broken: Streams that ended early, by reason.
        checked: Streams whose outputs were compared.
        difference: Their largest difference from the offline outputs.
        late_s: Delay of the generator itself in sending each chunk, `[m]`, from when it was due.
        cpu_s: CPU time of the generator during the measurement; NaN where that was not measured.
        held: Chunks that were sent later, because their stream had its window of unanswered messages.
        counted: What the caller's counter counted during the measurement.
        idle: Share of the time in which the generator's cores were idle; NaN where that was not measured.
    """

    streams: int
    latency_s: Floats
    offered: int
    lost: int
    repeated: int
    opened: int
    refused: int
    broken: dict[str, int]
    checked: int
    difference: float
    late_s: Floats
    cpu_s: float = math.nan
    held: int = 0
    counted: float = 0.0
    idle: float = math.nan

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Merge the results of several processes."""
        broken: Counter[str] = Counter()
        for part in parts:
            broken.update(part.broken)
        counts = ("streams", "offered", "lost", "repeated", "opened", "refused", "checked", "cpu_s", "held")
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in counts},
            latency_s=np.concatenate([part.latency_s for part in parts]),
            late_s=np.concatenate([part.late_s for part in parts]),
            broken=dict(broken),
            # NaN is kept: Python's max would drop it.
            difference=float(np.max([part.difference for part in parts])),
        )

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the latency in milliseconds; a lost chunk counts as infinity."""
        kept = np.concatenate([self.latency_s, np.full(self.lost, np.inf)])
        return float(np.percentile(kept, percent, method="higher")) * 1e3 if kept.size else float("inf")

    def late_ms(self, percent: float) -> float:
        """Return a percentile of the generator's own delay in milliseconds; 0 if it sent nothing."""
        return float(np.percentile(self.late_s, percent, method="higher")) * 1e3 if self.late_s.size else 0.0

    @property
    def complete(self) -> bool:
        """True if every stream lasted to the end and every chunk has one result."""
        return self.opened == self.streams and not (self.lost or self.repeated or self.broken)
