"""Metrics of the server: `/metrics` for Prometheus, `/v1/stats` for the page.

Both read the histogram columns of the tables, which the engines update once per batch; nothing is recorded per request.
"""

from collections.abc import Iterable, Mapping
from typing import Any, final

import numpy as np
import numpy.typing as npt
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from penstock.serve.observe.chain_metrics import chain_families, chain_statistics, chain_stats
from penstock.serve.observe.histograms import EDGE_STEP, OUTCOMES, buckets
from penstock.serve.observe.load_report import LoadReport
from penstock.serve.registry.served_chain import Served, ServedChain
from penstock.serve.registry.served_model import Replica, ServedModel
from penstock.serve.table import slots
from penstock.serve.table.lengths import LengthGrid

Counts = npt.NDArray[np.int64]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Counts of live streams, in the order of the output; all but the first are counters.
STREAM_COUNTS = {
    "open": (slots.STREAMS_OPEN, "Live streams that are open."),
    "opened": (slots.STREAMS, "Live streams that were admitted."),
    "refused": (slots.STREAMS_REFUSED, "Live streams refused by admission control or a quota."),
    "aborted": (slots.STREAMS_ABORTED, "Live streams that were aborted."),
    "chunks": (slots.CHUNKS, "Input chunks of live streams."),
    "results": (slots.RESULTS, "Results of live streams."),
    "resumed": (slots.RESUMED, "Live streams that went on in another engine after theirs had died."),
    "replayed": (slots.REPLAYED, "Input chunks of live streams that ran once more in another engine."),
}
# Why live streams ended with their engine.
LOST_STREAMS = {
    "outgrown": slots.LOST_OUTGROWN,
    "memory": slots.LOST_NO_MEMORY,
    "no_engine": slots.LOST_NO_ENGINE,
    "repeated": slots.LOST_REPEATED,
}
# What became of the ends of utterances, where an application declares a beam.
UTTERANCES = {
    "decoded": slots.BEAM_DECODED,
    "late": slots.BEAM_LATE,
    "refused": slots.BEAM_REFUSED,
    "failed": slots.BEAM_FAILED,
}


def stats_of(served: Served, uptime_s: float) -> dict[str, Any]:
    """Collect the counts of a model or a chain for the page, cumulative since the start."""
    return chain_stats(served, uptime_s) if isinstance(served, ServedChain) else stats(served, uptime_s)


def server_stats(models: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Collect the counts of the whole server: outcomes and retried rows of all models, slots of all but chains.

    Everything else is that of the first model: its histograms, costs and engines.

    Args:
        models: What `stats_of` gave for each, by label.
    """
    if not models:
        return {}
    each = list(models.values())
    summed = {name: sum(stats.get(name, 0) for stats in each) for name in (*OUTCOMES, "retried")}
    # A chain's slots are those of its parts, which are models too.
    own = [stats["slots"] for stats in each if "parts" not in stats] or [each[0]["slots"]]
    slots_of_all = {key: sum(stats[key] for stats in own) for key in ("total", "in_use")}
    return each[0] | summed | {"slots": slots_of_all}


def statistics_of(served: Served) -> dict[str, Any]:
    """The entry of a model or a chain in the Open Inference Protocol's statistics."""
    return chain_statistics(served) if isinstance(served, ServedChain) else model_statistics(served)


def stats(served: ServedModel, uptime_s: float) -> dict[str, Any]:
    """Collect the counts for the page, cumulative since the start: of all engines together, then of each."""
    upper_ms = [*(slots.TIME_EDGES_NS / 1e6).round(4).tolist(), None]
    streams = {name: served.total(column) for name, (column, _) in STREAM_COUNTS.items()}
    streams["lost"] = sum(map(served.total, LOST_STREAMS.values()))
    engines = [_of_engine(replica) for replica in served.replicas]

    def counts(column: str) -> list[int]:
        return _summed(served, column).tolist()

    return {
        "uptime_s": uptime_s,
        "latency_ms": served.budget_ns / 1e6,
        "slots": {key: sum(engine["slots"][key] for engine in engines) for key in ("total", "in_use")},
        **{outcome: served.total(column) for outcome, column in OUTCOMES.items()},
        **({} if served.streams is None else {"streams": streams}),
        "batch": {"upper": [*slots.BATCH_EDGES.tolist(), None], "counts": counts("batch_counts")},
        "latency": {"upper_ms": upper_ms, "counts": counts("latency_counts")},
        "queue": {"upper_ms": upper_ms, "counts": counts("queue_counts")},
        "compute": {"upper_ms": upper_ms, "counts": counts("compute_counts")},
        **_generating(served, upper_ms),
        "retried": served.total(slots.RETRIED),
        "costs": engines[0]["costs"],
        "engines": engines,
    }


def _generating(served: ServedModel, upper_ms: list[float | None]) -> dict[str, Any]:
    """Counts of answers that take steps; nothing where they take one."""
    if served.application.generate is None:
        return {}
    return {
        "generated": {
            "outputs": int(_summed(served, "generated")[0]),
            "in_progress": int(_summed(served, "in_progress")[0]),
            "first": {"upper_ms": upper_ms, "counts": _summed(served, "first_counts").tolist()},
            "step": {"upper_ms": upper_ms, "counts": _summed(served, "step_counts").tolist()},
        }
    }


def _of_engine(replica: Replica) -> dict[str, Any]:
    table = replica.table
    grid = LengthGrid.of(table.layout.input)
    measured = table.cost_rows[0] > 0
    ms = table.cost_ns[:, measured] / 1e6
    runs_by, fallback = table.described
    streams = {} if replica.streams is None else {"streams_open": replica.streams.open_everywhere}
    return {
        "engine": replica.engine,
        "device": replica.device,
        "runs_by": runs_by or replica.runs_by,
        "fallback": fallback or replica.fallback,
        "slots": {"total": table.slots, "in_use": int(table.held.sum())},
        "load_s": replica.load_s,
        "memory_bytes": replica.memory_bytes,
        "table_bytes": replica.table_bytes,
        **streams,
        "rows": int(table.sums[0]),
        "batches": int(table.batch_counts.sum()),
        "costs": {
            "rows": table.cost_rows[0, measured].tolist(),
            # With lengths that vary, a list for each length.
            "ms": ms[0].tolist() if grid is None else ms.tolist(),
            **({} if grid is None else {"lengths": list(grid.edges)}),
            "handling_us": int(table.handling_ns[0]) / 1e3,
        },
    }


def model_statistics(served: ServedModel) -> dict[str, Any]:
    """A model's entry of the Open Inference Protocol's statistics."""
    rows, queue_ns, compute_ns, latency_ns = _summed(served, "sums").tolist()

    def entry(ns: int) -> dict[str, int]:
        return {"count": rows, "ns": ns}

    nothing = {"count": 0, "ns": 0}
    return {
        "name": served.name,
        "version": served.version,
        "inference_count": rows,
        "execution_count": int(_summed(served, "batch_counts").sum()),
        "inference_stats": {
            "success": entry(latency_ns),
            "fail": {"count": served.total(slots.BROKEN), "ns": 0},
            "queue": entry(queue_ns),
            "compute_input": nothing,
            "compute_infer": entry(compute_ns),
            "compute_output": nothing,
        },
    }


def exposition(applications: Iterable[Served], load: LoadReport | None = None) -> bytes:
    """Prometheus's text of every application's metrics, and of the server's load."""
    return generate_latest(_TableCollector(applications, load))


@final
class _TableCollector(Collector):
    def __init__(self, applications: Iterable[Served], load: LoadReport | None) -> None:
        self._load = load
        served = list(applications)
        self._applications = [each for each in served if isinstance(each, ServedModel)]
        self._chains = [each for each in served if isinstance(each, ServedChain)]

    def collect(self) -> Iterable[Metric]:
        """Collect every metric.

        Counts of the front-ends have one series per application: they survive an engine while another one serves it.
        Counts of the engines have one series per engine.
        """
        return [
            *self._of_applications(),
            *self._of_engines(),
            *self._of_generated(),
            *chain_families(self._chains),
            *self._of_server(),
        ]

    def _of_server(self) -> list[Metric]:
        if self._load is None:
            return []
        utilization = GaugeMetricFamily(
            "penstock_utilization", "Rows offered over those that the busiest engine can answer in time."
        )
        utilization.add_metric([], self._load.utilisation)
        finish = GaugeMetricFamily(
            "penstock_predicted_finish_seconds", "Predicted time to the answer of a request that comes now."
        )
        if self._load.finish_ms is not None:
            finish.add_metric([], self._load.finish_ms / 1e3)
        return [utilization, finish] if finish.samples else [utilization]

    def _of_generated(self) -> list[Metric]:
        each = ["app", "engine"]
        outputs = CounterMetricFamily("penstock_generated_outputs", "Outputs of answers that take steps.", labels=each)
        rows = GaugeMetricFamily("penstock_generating_rows", "Answers in progress.", labels=each)
        first = HistogramMetricFamily("penstock_first_output_seconds", "Time from arrival to the first.", labels=each)
        step = HistogramMetricFamily("penstock_step_seconds", "Time from each output to the next.", labels=each)
        edges_s = (slots.TIME_EDGES_NS / 1e9).tolist()
        for served in self._applications:
            for replica in served.replicas if served.application.generate is not None else ():
                name, table = [served.label, str(replica.engine)], replica.table
                count, first_ns, step_ns = table.generated.tolist()
                outputs.add_metric(name, count)
                rows.add_metric(name, int(table.in_progress[0]))
                first.add_metric(name, buckets(edges_s, table.first_counts, EDGE_STEP), first_ns / 1e9)
                step.add_metric(name, buckets(edges_s, table.step_counts, EDGE_STEP), step_ns / 1e9)
        return [outputs, rows, first, step] if outputs.samples else []

    def _of_applications(self) -> list[Metric]:
        requests = CounterMetricFamily("penstock_requests", "Requests by outcome.", labels=["app", "outcome"])
        engines = GaugeMetricFamily("penstock_engines", "Engines that serve the application.", labels=["app"])
        retried = CounterMetricFamily(
            "penstock_retried_rows", "Rows that were submitted to another engine after theirs had died.", labels=["app"]
        )
        budget = GaugeMetricFamily("penstock_latency_budget_seconds", "Latency budget by default.", labels=["app"])
        streams = {
            name: CounterMetricFamily(f"penstock_streams_{name}", what, labels=["app"])
            for name, (_, what) in STREAM_COUNTS.items()
            if name != "open"
        }
        lost = CounterMetricFamily(
            "penstock_streams_lost", "Live streams that ended with their engine.", labels=["app", "reason"]
        )
        utterances = CounterMetricFamily(
            "penstock_utterances",
            "Utterances that ended: decoded again by the beam, or greedy since it was late, full or had failed.",
            labels=["app", "outcome"],
        )
        restarts = CounterMetricFamily(
            "penstock_beam_restarts", "Times that a front-end's beam process was started again.", labels=["app"]
        )
        for served in self._applications:
            for outcome, column in OUTCOMES.items():
                requests.add_metric([served.label, outcome], served.total(column))
            retried.add_metric([served.label], served.total(slots.RETRIED))
            engines.add_metric([served.label], 0 if served.engine_lost else len(served.replicas))
            budget.add_metric([served.label], served.budget_ns / 1e9)
            if served.streams is not None:
                for name, family in streams.items():
                    family.add_metric([served.label], served.total(STREAM_COUNTS[name][0]))
                for reason, column in LOST_STREAMS.items():
                    lost.add_metric([served.label, reason], served.total(column))
                if served.beam is not None:
                    for outcome, column in UTTERANCES.items():
                        utterances.add_metric([served.label, outcome], served.total(column))
                    restarts.add_metric([served.label], served.total(slots.BEAM_RESTARTS))
        for chain in self._chains:
            for outcome, column in OUTCOMES.items():
                requests.add_metric([chain.name, outcome], chain.total(column))
            budget.add_metric([chain.name], chain.budget_ns / 1e9)
        return [
            requests,
            engines,
            retried,
            budget,
            *(family for family in (*streams.values(), lost, utterances, restarts) if family.samples),
        ]

    def _of_engines(self) -> list[Metric]:
        each = ["app", "engine"]
        misses = CounterMetricFamily("penstock_deadline_misses", "Answered, but after the deadline.", labels=each)
        uncaptured = CounterMetricFamily(
            "penstock_uncaptured_batches", "Batches on a GPU without a CUDA graph, where lengths vary.", labels=each
        )
        in_use = GaugeMetricFamily("penstock_slots_in_use", "Slots in use.", labels=each)
        total = GaugeMetricFamily("penstock_slots", "All slots.", labels=each)
        streams = GaugeMetricFamily("penstock_streams_open", STREAM_COUNTS["open"][1], labels=each)
        batch = HistogramMetricFamily("penstock_batch_rows", "Rows of each batch.", labels=each)
        queue = HistogramMetricFamily("penstock_queue_seconds", "Time from arrival to its batch.", labels=each)
        compute = HistogramMetricFamily("penstock_compute_seconds", "Time of the batch of each request.", labels=each)
        latency = HistogramMetricFamily("penstock_latency_seconds", "Time from arrival to the result.", labels=each)
        edges_s = (slots.TIME_EDGES_NS / 1e9).tolist()
        for app, replica in [(served.label, replica) for served in self._applications for replica in served.replicas]:
            name, table = [app, str(replica.engine)], replica.table
            misses.add_metric(name, int(table.outcomes[4]))
            if not replica.device.startswith("cpu") and table.layout.lengths > 1:
                uncaptured.add_metric(name, int(table.uncaptured[0]))
            in_use.add_metric(name, int(table.held.sum()))
            total.add_metric(name, table.slots)
            if replica.streams is not None:
                streams.add_metric(name, replica.streams.open_everywhere)
            rows, queue_ns, compute_ns, latency_ns = table.sums.tolist()
            batch.add_metric(name, buckets(slots.BATCH_EDGES.tolist(), table.batch_counts, 1), rows)
            for family, column, sum_ns in (
                (queue, table.queue_counts, queue_ns),
                (compute, table.compute_counts, compute_ns),
                (latency, table.latency_counts, latency_ns),
            ):
                family.add_metric(name, buckets(edges_s, column, EDGE_STEP), sum_ns / 1e9)
        seldom = [family for family in (streams, uncaptured) if family.samples]
        return [misses, in_use, total, batch, queue, compute, latency, *seldom]


def _summed(served: ServedModel, column: str) -> Counts:
    """Sum a column over the engines."""
    return np.sum([getattr(replica.table, column) for replica in served.replicas], 0)
