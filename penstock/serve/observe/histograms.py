"""Outcomes and histograms in Prometheus's form, as the metrics of models and of chains have them."""

import numpy as np
import numpy.typing as npt

from penstock.serve.table import slots

OUTCOMES = {
    "answered": slots.ANSWERED,
    "refused": slots.REFUSED,
    "expired": slots.TOO_LATE,
    "failed": slots.BROKEN,
    "invalid": slots.INVALID,
}
# Every fourth edge, a factor of two, is fine enough for Prometheus.
EDGE_STEP = 4


def buckets(edges: list[float], counts: npt.NDArray[np.int64], every: int) -> list[tuple[str, float]]:
    """Return the cumulative counts below every so many edges, as Prometheus has them."""
    below = counts.cumsum()
    kept = [(f"{edges[index]:.6g}", int(below[index])) for index in range(0, len(edges), every)]
    return [*kept, ("+Inf", int(below[-1]))]
