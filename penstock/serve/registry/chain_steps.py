"""The steps of a chain in a front-end: its parts among the served models, their predicted times, admission."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, final

from penstock.core.chains.chain_run import ChainPlan
from penstock.core.errors import DeadlineImpossible, Overloaded, RequestError, TooLate, UnknownRoute
from penstock.serve.frontend.function_pool import THREADS, FunctionPool
from penstock.serve.frontend.table_writer import NEVER_NS
from penstock.serve.messages import RESTART_S
from penstock.serve.moving_average import MovingAverage
from penstock.serve.registry.served_model import ServedModel

# Weight of the newest request in the moving averages of rows and lengths.
FOLLOW = 0.1
MIN_RETRY_S = 0.1


class PredictedStep(NamedTuple):
    """Prediction for one step.

    Args:
        ns: Its time, `NEVER_NS` where no slot is free.
        min_ns: The shortest time of its network.
        idle: Whether nothing waits before it.
    """

    ns: int
    min_ns: int
    idle: bool


@dataclass(slots=True)
class _Usual:
    """Moving averages of one step's rows in a request, and of the length of its rows."""

    rows: float = 1.0
    length: MovingAverage = field(default_factory=partial(MovingAverage, FOLLOW))

    def observe(self, rows: int, length: int) -> None:
        self.rows += FOLLOW * (rows - self.rows)
        if length:
            self.length.add(length)


@final
@dataclass(eq=False, slots=True)
class ChainSteps:
    """The steps of one chain.

    Args:
        plan: The chain with the applications of its parts; replaced when a part is.
        find_part: Finds a served model by name; raises `RequestError` if it is not served.
        pool: Runs the chain's own functions.
        now_ns: The clock of deadlines.
    """

    plan: ChainPlan
    find_part: Callable[[str], ServedModel]
    pool: FunctionPool
    now_ns: Callable[[], int]
    _usual: dict[int, _Usual] = field(init=False, default_factory=dict[int, _Usual])

    @property
    def count(self) -> int:
        """Number of steps."""
        return len(self.plan.chain.steps)

    def name_of(self, step: int) -> str:
        """Name of a step."""
        return self.plan.chain.steps[step].name

    def part(self, step: int) -> ServedModel:
        """Return the served model of a step.

        Raises:
            Overloaded: It is not served now, or its engine is gone.
        """
        return self.served(self.plan.chain.steps[step].part_name)

    def served(self, name: str) -> ServedModel:
        """Return the served model of a part by its name.

        Raises:
            Overloaded: It is not served now, or its engine is gone.
        """
        try:
            part = self.find_part(name)
        except UnknownRoute:
            raise Overloaded("The model is not loaded; load it, or come back later.", RESTART_S) from None
        part.reject_lost()
        return part

    def observe(self, step: int, rows: int, length: int) -> None:
        """Follow the rows of a step, and the length of one."""
        self._usual.setdefault(step, _Usual()).observe(rows, length)

    def predict(self, step: int, low_priority: bool) -> PredictedStep:
        """Predict the time of a step from now on.

        Raises:
            Overloaded: Its part is not served now.
        """
        own_ns = self.pool.usual_ns(step)
        waiting = 1 + self.pool.waiting / THREADS if own_ns else 0.0
        own_ns = int(own_ns * waiting)
        if not self.plan.chain.steps[step].part_name:
            return PredictedStep(own_ns, 0, True)
        part, usual = self.part(step), self._usual.get(step, _Usual())
        rows = min(part.max_rows, max(1, math.ceil(usual.rows)))
        predicted = part.predict(rows, low_priority, math.ceil(usual.length.value))
        return PredictedStep(
            min(NEVER_NS, predicted.finish_ns + own_ns), part.min_compute_ns, predicted.waiting - (rows - 1) <= 0
        )

    def rest_ns(self, step: int, low_priority: bool) -> tuple[int, int]:
        """Predict the time of a step, up to the first output where there are several, and of all that follows it."""
        own, *rest = (self.predict(each, low_priority).ns for each in range(step, self.count))
        return own, sum(rest) + sum(self.further_ns(each) for each in range(step, self.count))

    def is_idle(self, step: int, low_priority: bool) -> bool:
        """True where nothing waits before a step and before those that follow it."""
        return all(self.predict(each, low_priority).idle for each in range(step, self.count))

    def slowest(self, first: int, low_priority: bool) -> tuple[str, int]:
        """Return the name and the predicted time of the slowest step from one on."""
        predicted = {step: self.predict(step, low_priority).ns for step in range(first, self.count)}
        step = max(predicted, key=lambda each: predicted[each])
        return self.name_of(step), predicted[step]

    def further_ns(self, step: int) -> int:
        """Predict the time from the first output of a step to its whole answer, if the next step waits for that.

        Raises:
            Overloaded: Its part is not served now.
        """
        if step == self.count - 1 or not self.plan.chain.steps[step].part_name:
            return 0
        part = self.part(step)
        return 0 if part.application.generate is None else part.further_outputs_ns

    def admit(self, left_ns: int, budget_ns: int, low_priority: bool) -> None:
        """Check that the predicted times of all steps fit into the time that is left.

        Raises:
            Overloaded: They do not, or a part is not served now.
            DeadlineImpossible: The budget is shorter than the networks' own time.
        """
        predicted: list[PredictedStep] = []
        for step in range(self.count):
            try:
                predicted.append(self.predict(step, low_priority))
            except RequestError as error:
                raise self.of_step(error, step) from None
        min_ns, total_ns = sum(each.min_ns for each in predicted), sum(each.ns for each in predicted)
        total_ns += sum(map(self.further_ns, range(self.count)))
        if budget_ns < min_ns:
            raise DeadlineImpossible(
                f"A budget of {budget_ns / 1e6:g} ms is shorter than the own time of the chain's networks, "
                f"{min_ns / 1e6:.2f} ms; ask for more."
            )
        # As for a single model, an idle server always tries.
        if total_ns <= left_ns or all(each.idle for each in predicted):
            return
        slowest = max(range(self.count), key=lambda step: predicted[step].ns)
        if total_ns >= NEVER_NS:
            raise self.of_step(Overloaded("All slots are in use; come back later.", MIN_RETRY_S), slowest)
        raise Overloaded(
            f"The answer would come after {total_ns / 1e6:.0f} ms, past the budget of {budget_ns / 1e6:g} ms; "
            f"part {self.name_of(slowest)!r} takes {predicted[slowest].ns / 1e6:.0f} ms.",
            max(MIN_RETRY_S, predicted[slowest].ns / 1e9),
        )

    def of_step(self, error: RequestError, step: int) -> RequestError:
        """Return an error with the name of the part that it came from."""
        message = f"Part {self.name_of(step)!r}: {error}"
        if isinstance(error, TooLate):
            return TooLate(message, error.retry_after_s)
        if isinstance(error, Overloaded):
            return Overloaded(message, error.retry_after_s)
        if isinstance(error, DeadlineImpossible):
            # Of the share that was left for this step: another request may have more.
            return TooLate(message)
        return type(error)(message)
