"""Costs of answers that take steps: of beginning some rows, and of a step of the rows in progress."""

from math import sqrt
from typing import Self, final

import numpy as np

from penstock.core.generate import Generate
from penstock.serve.table.costs import Costs
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid
from penstock.serve.table.slots import SlotTable

# Weight of one answer in the mean of their steps.
STEPS_WEIGHT = 0.05


def budgets_ns(generate: Generate, budget_ns: int) -> tuple[int, int]:
    """Return the budgets of the first output and of each further one in nanoseconds.

    Args:
        generate: The declaration.
        budget_ns: The server's latency budget, for those that are not declared.
    """
    first, step = (budget_ns if ms is None else int(ms * 1e6) for ms in (generate.first_ms, generate.step_ms))
    return first, step


@final
class GenerationCosts:
    """Times of the two functions of a network that generates.

    Args:
        begin: Time to begin rows: by their number, or by number and length.
        step: Time of a step by the rows in progress; the largest is the most that may be in progress.
        mean_steps: Mean number of steps of an answer.
        beside: Whether rows begin beside the steps; the time of a step is then one with rows that begin beside it.
    """

    def __init__(self, begin: Costs | LengthCosts, step: Costs, mean_steps: float, *, beside: bool = False) -> None:
        self.begin, self.step, self.mean_steps, self.beside = begin, step, mean_steps, beside

    @property
    def max_rows(self) -> int:
        """The most rows in progress."""
        return self.step.largest

    def begin_ns(self, rows: int, length: int) -> int:
        """Predict the time to begin rows of at most a length in nanoseconds; the length is 0 where it is fixed."""
        if isinstance(self.begin, LengthCosts):
            return self.begin.of(min(rows, self.begin.largest(length)), length)
        return self.begin.of(min(rows, self.begin.largest))

    def step_ns(self, rows: int) -> int:
        """Predict the time of a step in nanoseconds; of more rows than may be in progress, that of the most."""
        return self.step.of(max(1, min(rows, self.max_rows)))

    def finish_ns(self, ahead: int, length: int = 0) -> int:
        """Predict the time in nanoseconds until a new row's first output.

        Args:
            ahead: Rows in progress and rows that wait.
            length: Length of the new row; 0 where it is fixed.
        """
        waiting = ahead + 1 - self.max_rows
        # The step that runs, its own beginning, and its own first step.
        begin_ns = self.begin_ns(1, length)
        ns = 2 * self.step_ns(ahead + 1) + begin_ns
        if waiting > 0:
            # A place is free whenever an answer ends; the rows before this one begin alone, at worst.
            each_ns = self.mean_steps * self.step_ns(self.max_rows) / self.max_rows + begin_ns
            # One standard deviation more, for answers whose lengths are about geometric.
            ns += int((waiting + sqrt(waiting)) * each_ns)
        return ns

    def observe_answer(self, steps: float, answers: int) -> None:
        """Update the mean with answers of so many steps, on average."""
        self.mean_steps += (1 - (1 - STEPS_WEIGHT) ** answers) * (steps - self.mean_steps)

    def observe_handling(self, ns: float) -> None:
        """Update the handling time of one output."""
        self.step.observe_handling(ns)

    def publish(self, table: SlotTable) -> None:
        """Write the costs into the table's header, for the admission control of the front-ends."""
        self.begin.publish(table)
        self.publish_step(table)

    def publish_step(self, table: SlotTable) -> None:
        """Write the costs of a step, which alone change with each step, and the mean number of steps."""
        count = len(self.step.rows)
        table.step_rows[:count], table.step_rows[count:] = self.step.rows, 0
        table.step_ns[:count] = [self.step.of(rows) for rows in self.step.rows]
        table.mean_steps[0] = int(self.mean_steps * 1000)

    @classmethod
    def published(cls, table: SlotTable, grid: LengthGrid | None) -> Self | None:
        """Read the costs from the table's header; None where answers take one step."""
        if not table.step_rows[0]:
            return None
        count = int(np.count_nonzero(table.step_rows))
        begin = Costs.published(table) if grid is None else LengthCosts.published(table, grid)
        step = Costs(table.step_rows[:count].tolist(), table.step_ns[:count].tolist())
        return cls(begin, step, float(table.mean_steps[0]) / 1000)
