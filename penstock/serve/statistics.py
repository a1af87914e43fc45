"""What the server says of itself: `/metrics` for Prometheus, `/v1/stats` for the page.

Both read the table's histogram columns, which the engine fills once a batch; nothing is observed once a request.
"""

from collections.abc import Iterable
from typing import Any, final

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from penstock.serve.served import Served
from penstock.serve.slots import (
    ANSWERED,
    BATCH_EDGES,
    BROKEN,
    CHUNKS,
    INVALID,
    REFUSED,
    RESULTS,
    STREAMS,
    STREAMS_BROKEN,
    STREAMS_OPEN,
    STREAMS_REFUSED,
    TIME_EDGES_NS,
    TOO_LATE,
)

Counts = npt.NDArray[np.int64]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = {"answered": ANSWERED, "refused": REFUSED, "expired": TOO_LATE, "failed": BROKEN, "invalid": INVALID}
# What is counted of live streams, in the order in which it is told: all but the first only ever grow.
STREAM_COUNTS = {
    "open": (STREAMS_OPEN, "Live streams that are open."),
    "opened": (STREAMS, "Live streams that were taken in."),
    "refused": (STREAMS_REFUSED, "Live streams that were refused because more could not be carried."),
    "broken": (STREAMS_BROKEN, "Live streams that ended before their end."),
    "chunks": (CHUNKS, "Chunks of live streams that went in."),
    "results": (RESULTS, "Results of live streams that came out."),
}
# Every fourth edge, a doubling, is fine enough for Prometheus and a quarter of the lines.
_EVERY = 4


def stats(served: Served, uptime_s: float) -> dict[str, Any]:
    """The counts that the page draws, cumulative since the start."""
    table = served.table
    upper_ms = [*(TIME_EDGES_NS / 1e6).round(4).tolist(), None]
    return {
        "uptime_s": uptime_s,
        "latency_ms": served.budget_ns / 1e6,
        "slots": {"total": table.slots, "in_use": int(table.held.sum())},
        **{outcome: served.total(column) for outcome, column in OUTCOMES.items()},
        **({} if served.streams is None else {"streams": _streams(served)}),
        "batch": {"upper": [*BATCH_EDGES.tolist(), None], "counts": table.batch_counts.tolist()},
        "latency": {"upper_ms": upper_ms, "counts": table.latency_counts.tolist()},
        "queue": {"upper_ms": upper_ms, "counts": table.queue_counts.tolist()},
        "compute": {"upper_ms": upper_ms, "counts": table.compute_counts.tolist()},
        "costs": {
            "rows": _used(table.cost_rows),
            "ms": [ns / 1e6 for ns in _used(table.cost_ns)],
            "handling_us": int(table.handling_ns[0]) / 1e3,
        },
    }


def _streams(served: Served) -> dict[str, int]:
    return {name: served.total(column) for name, (column, _) in STREAM_COUNTS.items()}


def model_statistics(served: Served) -> dict[str, Any]:
    """A model's entry of the Open Inference Protocol's statistics."""
    rows, queue_ns, compute_ns, latency_ns = served.table.sums.tolist()

    def entry(ns: int) -> dict[str, int]:
        return {"count": rows, "ns": ns}

    nothing = {"count": 0, "ns": 0}
    return {
        "name": served.name,
        "version": served.version,
        "inference_count": rows,
        "execution_count": int(served.table.batch_counts.sum()),
        "inference_stats": {
            "success": entry(latency_ns),
            "fail": {"count": served.total(BROKEN), "ns": 0},
            "queue": entry(queue_ns),
            "compute_input": nothing,
            "compute_infer": entry(compute_ns),
            "compute_output": nothing,
        },
    }


def exposition(applications: Iterable[Served]) -> bytes:
    """Prometheus's text of every application's metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_TableCollector(list(applications)))
    return generate_latest(registry)


@final
class _TableCollector(Collector):
    def __init__(self, applications: list[Served]) -> None:
        self._applications = applications

    def collect(self) -> Iterable[Metric]:
        """Every metric with a sample for each application."""
        requests = CounterMetricFamily(
            "penstock_requests", "Requests by what became of them.", labels=["app", "outcome"]
        )
        misses = CounterMetricFamily("penstock_deadline_misses", "Answered, but after the deadline.", labels=["app"])
        slots = GaugeMetricFamily("penstock_slots_in_use", "Slots that a request holds.", labels=["app"])
        total = GaugeMetricFamily("penstock_slots", "Slots in all.", labels=["app"])
        budget = GaugeMetricFamily("penstock_latency_budget_seconds", "Of a request that names none.", labels=["app"])
        batch = HistogramMetricFamily("penstock_batch_rows", "Rows of each batch.", labels=["app"])
        queue = HistogramMetricFamily("penstock_queue_seconds", "From arrival to its batch.", labels=["app"])
        compute = HistogramMetricFamily("penstock_compute_seconds", "Of the batch of each request.", labels=["app"])
        latency = HistogramMetricFamily("penstock_latency_seconds", "From arrival to its result.", labels=["app"])
        streams = {
            name: (GaugeMetricFamily if name == "open" else CounterMetricFamily)(
                f"penstock_streams_{name}", what, labels=["app"]
            )
            for name, (_, what) in STREAM_COUNTS.items()
        }
        for served in self._applications:
            for column, count in _streams(served).items() if served.streams is not None else ():
                streams[column].add_metric([served.name], count)
            name, table = [served.name], served.table
            for outcome, column in OUTCOMES.items():
                requests.add_metric([*name, outcome], served.total(column))
            misses.add_metric(name, int(table.outcomes[4]))
            slots.add_metric(name, int(table.held.sum()))
            total.add_metric(name, table.slots)
            budget.add_metric(name, served.budget_ns / 1e9)
            rows, queue_ns, compute_ns, latency_ns = table.sums.tolist()
            batch.add_metric(name, _buckets(BATCH_EDGES.tolist(), table.batch_counts, 1), rows)
            for family, column, sum_ns in (
                (queue, table.queue_counts, queue_ns),
                (compute, table.compute_counts, compute_ns),
                (latency, table.latency_counts, latency_ns),
            ):
                family.add_metric(name, _buckets((TIME_EDGES_NS / 1e9).tolist(), column, _EVERY), sum_ns / 1e9)
        told = [family for family in streams.values() if family.samples]
        return [requests, misses, slots, total, budget, batch, queue, compute, latency, *told]


def _buckets(edges: list[float], counts: Counts, every: int) -> list[tuple[str, float]]:
    below = counts.cumsum()
    kept = [(f"{edges[index]:.6g}", int(below[index])) for index in range(0, len(edges), every)]
    return [*kept, ("+Inf", int(below[-1]))]


def _used(column: Counts) -> list[int]:
    return column[column > 0].tolist()
