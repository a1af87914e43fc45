"""Predicted finishes of requests, for admission control: from the published costs and the rows that wait."""

from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import DeadlineImpossible, Overloaded
from penstock.serve.table.costs import Costs
from penstock.serve.table.generation_costs import GenerationCosts
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import MAX_LENGTHS, LengthGrid
from penstock.serve.table.slots import SlotTable

# A request that needs at most this share of its budget is admitted without an exact prediction.
SURE_SHARE = 0.5
# Share of the budget that is kept free under a lasting overload, for each share of the time that reading takes.
SPARE_SHARE = 0.8
# Clients of an engine that hangs should come back after so many seconds.
STALLED_RETRY_S = 1.0


@final
class FinishPrediction:
    """Predicts finishes by the measured costs in the table's header and the rows that all front-ends hold.

    Args:
        table: The slots.
        grid: The lengths of records; None where the size is fixed.
        budget_ns: Latency budget of a request that names none.
        margin_ns: Added to predicted finishes, for the requests that are read or run in between.

    Attributes:
        sure_ns: Time that a request must have left to be admitted without an exact prediction.
        sure_rows: Rows ahead below which it is.
        shortest_length: The shortest length of a row; 0 where the size is fixed.
        shortest_lengths: The shortest length of each bucket; 0 where the size is fixed.
        stalled: Whether the engine gives no results, although some are long overdue: then none is predicted.
    """

    def __init__(self, table: SlotTable, grid: LengthGrid | None, *, budget_ns: int, margin_ns: int) -> None:
        self._table, self._grid, self._margin_ns = table, grid, margin_ns
        self._held = [scalars(row) for row in table.held]
        self._held_lengths = [scalars(row) for row in table.held_lengths]
        self._min_compute_ns, self._other_tables_ns = scalars(table.min_compute_ns), scalars(table.other_tables_ns)
        self._other_tables_share, self._handling_ns = scalars(table.other_tables_share), scalars(table.handling_ns)
        # Of the only length.
        self._cost_rows, self._cost_ns = scalars(table.cost_rows[0]), scalars(table.cost_ns[0])
        self._costs = Costs.published(table)
        self._budget_ns, self._spare_ns = budget_ns, 0
        self.stalled = False
        self.sure_ns = int(budget_ns * SURE_SHARE)
        self.shortest_length = 0 if grid is None else 1
        self.shortest_lengths = (0,) if grid is None else grid.shortest
        self.refresh()

    def refresh(self, reading_share: float = 0.0, *, overloaded: bool = False) -> None:
        """Read the costs that the engine published.

        Args:
            reading_share: Share of the engine's time that reading takes, if both share one loop.
            overloaded: Whether requests are rejected all the time. A queue that fills the budget is of no use then: it
                does not end, and the requests in the sockets wait while it is worked off.
        """
        self._spare_ns = int(self._budget_ns * SPARE_SHARE * reading_share) if overloaded else 0
        self._stretch = 1 / (1 - min(reading_share, 0.5))
        self._generation_costs = GenerationCosts.published(self._table, self._grid)
        if self._grid is not None:
            # A request is predicted by its length each time.
            self._length_costs, self.sure_rows = LengthCosts.published(self._table, self._grid), 0
            return
        handling_ns, min_compute_ns = self._handling_ns[0], self._min_compute_ns[0]
        if not self._costs.read(self._cost_rows, self._cost_ns, handling_ns, min_compute_ns):
            self._costs = Costs.published(self._table)
        # Predictions by the number of waiting rows: with several engines each request needs one from every engine.
        self._own_ns: dict[int, int] = {}
        sure_ns = self.sure_ns - self._spare_ns
        if self.stalled:
            self.sure_rows = 0
            return
        self.sure_rows = 0
        # Mostly the largest, which is tried first.
        for rows in reversed(self._costs.rows):
            if self.finish_ns(rows) <= sure_ns:
                self.sure_rows = rows
                break

    def set_stalled(self, stalled: bool) -> None:
        """Note whether the engine gives no results, although some are long overdue."""
        if stalled != self.stalled:
            self.stalled = stalled
            self.refresh()

    def rows_ahead(self, low_priority: bool) -> int:
        """Count the rows that run before a new one."""
        # Low priority waits behind all rows, normal priority only behind its own.
        rows_ahead = 0
        for held in self._held:
            rows_ahead += held[0] + held[1] if low_priority else held[0]
        return rows_ahead

    def min_compute_ns(self, length: int) -> int:
        """Return the network's own time for a row of this length, 0 where the size is fixed."""
        return self._length_costs.at(length).min_compute_ns if length else self._min_compute_ns[0]

    def finish_ns(self, rows_ahead: int, length: int = 0, low_priority: bool = False, rows: int = 1) -> int:
        """Predict the time from now to the result of a request's last row.

        Args:
            rows_ahead: Rows that run before its last.
            length: Length of its longest row; 0 where the size is fixed.
            low_priority: Whether it runs after the others.
            rows: Its rows.
        """
        own_ns = None if length else self._own_ns.get(rows_ahead)
        if self._generation_costs is not None:
            own_ns = int(self._generation_costs.finish_ns(rows_ahead, length) * self._stretch)
        elif length:
            waiting, sums = self._lengths_ahead(low_priority)
            if rows > 1:
                # The other rows of a request are at most as long as its longest.
                bucket = self._length_costs.grid.bucket(length)
                waiting[bucket] += rows - 1
                sums[bucket] += (rows - 1) * length
            own_ns = int(self._length_costs.finish_ns(waiting, sums, length) * self._stretch)
        elif own_ns is None:
            own_ns = self._own_ns[rows_ahead] = int(self._costs.finish_ns(rows_ahead) * self._stretch)
        share, other_tables_ns = self._other_tables_share[0], self._other_tables_ns[0]
        if share or other_tables_ns:
            # The engine's other tables get at most as much of its time as this one, and need as much as lately.
            share = min(share, 500)
            own_ns += max(min(other_tables_ns, own_ns), own_ns * share // (1000 - share))
        return own_ns + self._margin_ns

    def rejection(
        self, rows_ahead: int, left_ns: int, budget_ns: int, length: int, low_priority: bool
    ) -> Overloaded | DeadlineImpossible | None:
        """Return why a request cannot finish in time; None if it can.

        Args:
            rows_ahead: Rows that run before it.
            left_ns: Time to its deadline.
            budget_ns: Its latency budget.
            length: Its length; 0 where the size is fixed.
            low_priority: Whether it runs after the others.
        """
        min_compute_ns = self.min_compute_ns(length)
        if budget_ns < min_compute_ns:
            of = f" for a length of {length:,}" if length else ""
            return DeadlineImpossible(
                f"A budget of {budget_ns / 1e6:g} ms is shorter than the network's own time of "
                f"{min_compute_ns / 1e6:.2f} ms{of}; ask for more."
            )
        if self.stalled:
            return Overloaded("The engine does not answer; come back later.", STALLED_RETRY_S)
        # An idle server always tries: only a batch that runs can correct a pessimistic prediction.
        if not rows_ahead:
            return None
        finish_ns = self.finish_ns(rows_ahead, length, low_priority)
        if finish_ns > left_ns:
            gone_ms = (budget_ns - left_ns) / 1e6
            gone = f", {gone_ms:.0f} of them gone already" if gone_ms >= 1 else ""
            return Overloaded(
                f"The answer would come after {finish_ns / 1e6 + gone_ms:.0f} ms{gone}, past the budget of "
                f"{budget_ns / 1e6:g} ms.",
                self.retry_after_s(),
            )
        if finish_ns + self._spare_ns > left_ns:
            return Overloaded(
                f"Requests come faster than they are answered within the budget of {budget_ns / 1e6:g} ms; come back "
                f"later.",
                self.retry_after_s(),
            )
        return None

    def retry_after_s(self) -> float:
        """Predict the time until all waiting rows are done."""
        rows = sum(sum(held[:2]) for held in self._held)
        return self.finish_ns(rows, self.shortest_length, low_priority=True) / 1e9

    def least_finish_ns(self) -> int:
        """Return the time below which no new request is admitted: its earliest finish, of any length."""
        ahead = self.rows_ahead(False)
        return min([self.finish_ns(ahead, shortest) for shortest in self.shortest_lengths]) + self._spare_ns

    def _lengths_ahead(self, low_priority: bool) -> tuple[list[int], list[int]]:
        waiting, sums = [0] * MAX_LENGTHS, [0] * MAX_LENGTHS
        for held in self._held_lengths:
            for at in range(MAX_LENGTHS):
                waiting[at] += held[at]
                sums[at] += held[at + MAX_LENGTHS]
                if low_priority:
                    waiting[at] += held[at + 2 * MAX_LENGTHS]
                    sums[at] += held[at + 3 * MAX_LENGTHS]
        return waiting, sums


def scalars(column: npt.NDArray[np.int64]) -> "memoryview[int]":
    """View a column as a memoryview: one number takes half the time that it takes through NumPy."""
    return memoryview(cast(Any, column.reshape(-1))).cast("B").cast("q")
