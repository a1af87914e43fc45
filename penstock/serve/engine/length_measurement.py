"""Measurement of batch costs by rows and length, at start."""

from collections.abc import Callable, Generator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid, resized

# L lengths of the grid, M measured ones, S batch sizes of the grid

# Measured lengths: the shortest, the longest and some in between.
MEASURED_LENGTHS = 4

Floats = npt.NDArray[np.float64]


class _Curve(NamedTuple):
    """Times of the network at one length, by measured batch size, and the shortest of one row."""

    ns: list[float]
    min_ns: float


def measuring_lengths(
    grid: LengthGrid,
    spec: RecordSpec,
    example: Array,
    buckets: list[int],
    measured_ns: Callable[[Array, int, int], npt.NDArray[np.int64]],
    count_worthwhile: Callable[[list[int], list[float]], int],
    *,
    max_ns: float,
    limit_ns: int,
) -> Generator[None, None, LengthCosts]:
    """Measure batches of several sizes at several lengths; yield before each.

    Args:
        grid: The lengths.
        spec: The input.
        example: One realistic record; records of other lengths repeat or cut it.
        buckets: Batch sizes in ascending order.
        measured_ns: Runs batches of one record, so many rows, for about so many nanoseconds; returns their times.
        count_worthwhile: Counts the batch sizes that are worth running, of sizes and times.
        max_ns: Larger batches than those that take this long are not measured.
        limit_ns: Time of the whole measurement, about.
    """
    places = sorted({round(place) for place in np.linspace(0, len(grid.edges) - 1, MEASURED_LENGTHS)})
    curves: list[_Curve] = []
    for place in places:
        record = resized(spec, example, grid.sizes_at(grid.edges[place]))
        spent_ns, curve = 0.0, _Curve([], np.inf)
        for rows in buckets:
            yield
            times_ns = measured_ns(record, rows, limit_ns // (4 * len(places)))
            spent_ns += float(times_ns.sum())
            if curve.ns and np.median(times_ns) > max_ns:
                break
            if not curve.ns:
                curve = _Curve([], float(times_ns.min()))
            curve.ns.append(float(np.median(times_ns)))
            if spent_ns > limit_ns / len(places) or curve.ns[-1] > max_ns:
                break
        curves.append(curve)
    rows = buckets[: max(len(curve.ns) for curve in curves)]
    edges = np.array(grid.edges, np.float64)
    measured_MS = np.array([_extended(curve.ns, rows) for curve in curves])
    ns_LS = np.stack([np.interp(edges, edges[places], ns_M) for ns_M in measured_MS.T], 1)
    worth = [rows[count_worthwhile(rows[: len(curve.ns)], curve.ns) - 1] for curve in curves]
    # Between two measured lengths, the largest batch of the longer one: that is known to be worth it.
    largest = [worth[int(np.searchsorted(places, place))] for place in range(len(edges))]
    min_compute = np.interp(edges, edges[places], [curve.min_ns for curve in curves])
    return LengthCosts(grid, rows, ns_LS, largest=largest, min_compute_ns=min_compute.tolist())


def _extended(ns: list[float], rows: list[int]) -> list[float]:
    """Continue a curve in proportion to the rows."""
    last = len(ns) - 1
    return [ns[at] if at <= last else ns[last] * rows[at] / rows[last] for at in range(len(rows))]
