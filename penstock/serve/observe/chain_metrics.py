"""Metrics of chains: requests by outcome and by the step that ended them, and the time to the answer."""

from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from penstock.serve.observe.histograms import EDGE_STEP, OUTCOMES, buckets
from penstock.serve.registry.served_chain import ServedChain
from penstock.serve.table import slots


def chain_stats(chain: ServedChain, uptime_s: float) -> dict[str, Any]:
    """Collect a chain's counts for the page, as those of a model; a chain has no batches and no queue of its own."""
    upper_ms = [*(slots.TIME_EDGES_NS / 1e6).round(4).tolist(), None]
    nothing = {"upper_ms": upper_ms, "counts": [0] * len(upper_ms)}
    used = [(table.slots, int(table.held.sum())) for table in chain.tables]
    return {
        "uptime_s": uptime_s,
        "latency_ms": chain.budget_ns / 1e6,
        **{outcome: chain.total(column) for outcome, column in OUTCOMES.items()},
        # Of its parts together.
        "slots": {"total": sum(total for total, _ in used), "in_use": sum(in_use for _, in_use in used)},
        "batch": {"upper": [*slots.BATCH_EDGES.tolist(), None], "counts": [0] * (len(slots.BATCH_EDGES) + 1)},
        "latency": {"upper_ms": upper_ms, "counts": chain.totals.latency.sum(0).tolist()},
        "queue": nothing,
        "compute": nothing,
        "parts": list(chain.parts),
        "steps": {
            name: {outcome: int(counts[column]) for outcome, column in OUTCOMES.items() if column != slots.ANSWERED}
            for name, counts in zip(chain.step_names, chain.totals.steps.sum(0), strict=False)
        },
    }


def chain_statistics(chain: ServedChain) -> dict[str, Any]:
    """A chain's entry of the Open Inference Protocol's statistics."""
    answered, latency_ns = chain.total(slots.ANSWERED), int(chain.totals.latency_ns.sum())
    nothing = {"count": 0, "ns": 0}
    return {
        "name": chain.name,
        "version": chain.version,
        "inference_count": answered,
        "execution_count": answered,
        "inference_stats": {
            "success": {"count": answered, "ns": latency_ns},
            "fail": {"count": chain.total(slots.BROKEN), "ns": 0},
            "queue": nothing,
            "compute_input": nothing,
            "compute_infer": nothing,
            "compute_output": nothing,
        },
    }


def chain_families(chains: Iterable[ServedChain]) -> list[Metric]:
    """Prometheus's families of some chains; none without chains."""
    steps = CounterMetricFamily(
        "penstock_chain_rejections", "Requests of a chain that a step ended.", labels=["app", "step", "outcome"]
    )
    latency = HistogramMetricFamily(
        "penstock_chain_latency_seconds", "Time from arrival to the answer of a chain.", labels=["app"]
    )
    edges_s = (slots.TIME_EDGES_NS / 1e9).tolist()
    for chain in chains:
        for name, counts in zip(chain.step_names, chain.totals.steps.sum(0), strict=False):
            for outcome, column in OUTCOMES.items():
                if column != slots.ANSWERED:
                    steps.add_metric([chain.name, name, outcome], int(counts[column]))
        counts, sum_s = chain.totals.latency.sum(0), float(chain.totals.latency_ns.sum()) / 1e9
        latency.add_metric([chain.name], buckets(edges_s, counts, EDGE_STEP), sum_s)
    return [steps, latency] if latency.samples else []
