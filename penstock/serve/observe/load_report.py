"""The load of this server, in the forms of ORCA (Open Request Cost Aggregation), for proxies that weigh servers by it.

The utilisation comes from measured costs, not from a count of requests: rows offered a second, by the time that each
takes in the most efficient batch that keeps the budget. Rows that were refused count as offered, so it may exceed 1.
Nothing is recorded per request: a report compares the counts of the slot tables with those of the report before.

Source of the forms: https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto, and how Envoy reads
the header `endpoint-load-metrics`.
"""

import base64
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from penstock.core.errors import InvalidInput
from penstock.serve.exchange.request import Head
from penstock.serve.frontend.table_writer import NEVER_NS
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_model import Replica, ServedModel
from penstock.serve.table import slots
from penstock.serve.table.costs import Costs
from penstock.serve.table.generation_costs import GenerationCosts
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import MAX_LENGTHS, LengthGrid

HEADER = "endpoint-load-metrics"
# Header of a request that asks for a report.
FORMAT_HEADER = "endpoint-load-metrics-format"
FORMS = ("text", "json", "bin")
# Rates hold for this long; the predicted finish is of the moment of each report.
PERIOD_S = 0.1
# Time constant of the moving averages of rates.
FOLLOW_S = 1.0

_OFFERED = (slots.OFFERED, slots.CHUNKS)
_ERRORS = (slots.REFUSED, slots.TOO_LATE, slots.BROKEN)
# Fields of the message `OrcaLoadReport`.
_RPS_FRACTIONAL, _EPS, _NAMED_METRICS, _APPLICATION_UTILIZATION = 6, 7, 8, 9
_FINISH = "predicted_finish_ms"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """The load at one moment.

    Args:
        utilisation: Of the busiest engine; above 1 where more is offered than it can answer.
        rows_s: Rows and chunks of live streams that are offered a second, refused ones included.
        errors_s: Those a second that were refused, late or failed.
        finish_ms: Predicted time to the answer of a request that comes now, of the slowest model; None where it would
            not be admitted, or no model is served.
    """

    utilisation: float = 0.0
    rows_s: float = 0.0
    errors_s: float = 0.0
    finish_ms: float | None = None

    def encode(self, form: str) -> str:
        """Encode as the value of the header `endpoint-load-metrics`, in one of `FORMS`."""
        if form == "bin":
            return f"BIN {base64.b64encode(self.message()).decode()}"
        fields = {"application_utilization": self.utilisation, "rps_fractional": self.rows_s, "eps": self.errors_s}
        # To significant digits: a fast network's utilisation is small, and proxies divide by it.
        fields = {name: float(f"{value:.6g}") for name, value in fields.items()}
        finish = {} if self.finish_ms is None else {_FINISH: round(self.finish_ms, 3)}
        if form == "json":
            return f"JSON {json.dumps(fields | ({'named_metrics': finish} if finish else {}), separators=(',', ':'))}"
        named = {f"named_metrics.{name}": value for name, value in finish.items()}
        return "TEXT " + ",".join(f"{name}={value}" for name, value in (fields | named).items())

    def message(self) -> bytes:
        """Encode as the protobuf message `OrcaLoadReport`, as gRPC's trailer `endpoint-load-metrics-bin` carries it."""
        fields = ((_RPS_FRACTIONAL, self.rows_s), (_EPS, self.errors_s), (_APPLICATION_UTILIZATION, self.utilisation))
        message = b"".join(_double(field, value) for field, value in fields)
        if self.finish_ms is not None:
            # An entry of a map is a message of its key and its value.
            entry = bytes([1 << 3 | 2, len(_FINISH)]) + _FINISH.encode() + _double(2, self.finish_ms)
            message += bytes([_NAMED_METRICS << 3 | 2, len(entry)]) + entry
        return message


@dataclass(slots=True)
class _Rates:
    """Counts of one model at the last report, and their moving averages a second."""

    offered: int
    errors: int
    offered_s: float = 0.0
    errors_s: float = 0.0


@final
class LoadMeter:
    """Makes the reports of a server; each front-end has one, and they agree, as the tables are shared.

    Args:
        models: The served models.
        clock_s: A monotonic clock in seconds.
        reading_share: Returns the share of the engine's loop that reading sockets takes, where both share one loop.
    """

    def __init__(
        self, models: ModelRegistry, clock_s: Callable[[], float], reading_share: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._models, self._clock_s, self._reading_share = models, clock_s, reading_share
        self._rates: dict[str, _Rates] = {}
        # The length that rows of a model had lately, where lengths vary.
        self._lengths: dict[str, int] = {}
        self._made_s = clock_s()
        self._report: LoadReport | None = None
        # By form and predicted finish in microseconds, of this period.
        self._encoded: dict[tuple[str, int], str] = {}

    def report(self) -> LoadReport:
        """Return the report of now; its rates may be of at most `PERIOD_S` ago."""
        rates, finish_ns = self._current(), self._finish_ns()
        return rates if finish_ns is None else replace(rates, finish_ms=finish_ns / 1e6)

    def encode(self, form: str) -> str:
        """Return the report of now in one of `FORMS`."""
        rates, finish_ns = self._current(), self._finish_ns()
        key = form, -1 if finish_ns is None else finish_ns // 1000
        encoded = self._encoded.get(key)
        if encoded is None:
            finish_ms = None if finish_ns is None else finish_ns / 1e6
            encoded = self._encoded[key] = replace(rates, finish_ms=finish_ms).encode(form)
        return encoded

    def _current(self) -> LoadReport:
        """Return the rates of this period."""
        now_s = self._clock_s()
        if self._report is None or now_s - self._made_s >= PERIOD_S:
            self._report = self._measure(now_s - self._made_s)
            self._made_s = now_s
            self._encoded.clear()
        return self._report

    def _finish_ns(self) -> int | None:
        """Predict the finish of a request that comes now, at the slowest model; None where none is admitted."""
        finishes_ns = [
            served.predict(1, low_priority=False).finish_ns
            for served in self._models.served_models
            if not served.engine_lost
        ]
        finish_ns = max(finishes_ns, default=NEVER_NS)
        return None if finish_ns >= NEVER_NS else finish_ns

    def _measure(self, passed_s: float) -> LoadReport:
        """Update the rates; the predicted finish stays out."""
        before, self._rates = self._rates, {}
        weight = 1 - math.exp(-passed_s / FOLLOW_S)
        busy: dict[int, float] = {}
        for served in self._models.served_models:
            offered, errors = (sum(map(served.total, columns)) for columns in (_OFFERED, _ERRORS))
            rates = before.get(served.label) or _Rates(offered, errors)
            self._rates[served.label] = rates
            if passed_s > 0:
                rates.offered_s += weight * (max(0, offered - rates.offered) / passed_s - rates.offered_s)
                rates.errors_s += weight * (max(0, errors - rates.errors) / passed_s - rates.errors_s)
            rates.offered, rates.errors = offered, errors
            if served.engine_lost:
                continue
            capacity_s = sum(1e9 / self._row_ns(served, replica) for replica in served.replicas)
            for replica in served.replicas:
                busy[replica.engine] = busy.get(replica.engine, 0.0) + rates.offered_s / capacity_s
        stretch = 1 / (1 - min(self._reading_share(), 0.5))
        return LoadReport(
            utilisation=max(busy.values(), default=0.0) * stretch,
            rows_s=sum(rates.offered_s for rates in self._rates.values()),
            errors_s=sum(rates.errors_s for rates in self._rates.values()),
        )

    def _row_ns(self, served: ServedModel, replica: Replica) -> float:
        """Time of one row in the most efficient batch that keeps the budget."""
        table, grid = replica.table, LengthGrid.of(served.application.input)
        length = 0 if grid is None else self._length_of(served.label, replica, grid)
        generation = GenerationCosts.published(table, grid)
        if generation is not None:
            begin = generation.begin.at(length) if isinstance(generation.begin, LengthCosts) else generation.begin
            steps_ns = generation.mean_steps * generation.step_ns(generation.max_rows) / generation.max_rows
            return _best_ns(begin, served.budget_ns) + steps_ns
        costs = Costs.published(table) if grid is None else LengthCosts.published(table, grid).at(length)
        return _best_ns(costs, served.budget_ns)

    def _length_of(self, label: str, replica: Replica, grid: LengthGrid) -> int:
        """Return the mean length of the rows that wait now, or of the last ones that did."""
        held_2L = replica.table.held_lengths.sum(0)[: 2 * MAX_LENGTHS]
        rows, lengths = int(held_2L[:MAX_LENGTHS].sum()), int(held_2L[MAX_LENGTHS:].sum())
        if rows > 0:
            self._lengths[label] = min(max(lengths // rows, 1), grid.longest)
        return self._lengths.get(label, grid.longest)


def form_of(head: Head, default: str | None = None) -> str | None:
    """Return the form in which a request asks for a report; None if it asks for none.

    Args:
        head: Its head.
        default: The form where the head does not say.

    Raises:
        InvalidInput: There is no such form.
    """
    asked = head.headers.get(FORMAT_HEADER)
    if asked is None:
        return default
    form = asked.lower()
    if form not in FORMS:
        raise InvalidInput(f"{FORMAT_HEADER} is {asked[:40]!r}; it must be text, json or bin.")
    return form


def _best_ns(costs: Costs, budget_ns: int) -> float:
    # A row waits for the batch that runs when it comes, and then for its own.
    each = [costs.of(rows) / rows for rows in costs.rows if rows == 1 or 2 * costs.of(rows) <= budget_ns]
    return max(min(each), 1.0)


def _double(field: int, value: float) -> bytes:
    return struct.pack("<Bd", field << 3 | 1, value)
