"""Processor time of an answer, measured beside the refusals of the same process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import final

from penstock.serve.moving_average import MovingAverage

# Answers of one measurement, at least; weight of the newest one in the moving average.
LEAST_ANSWERS = 16
FOLLOW = 0.5


@final
@dataclass(slots=True, eq=False)
class AnswerCost:
    """Processor time of an answer.

    Args:
        cpu_ns: Processor time of the process, with all its threads.
        answered: Number of answers so far.
    """

    cpu_ns: Callable[[], int]
    answered: Callable[[], int]
    _average_ns: MovingAverage = field(default_factory=partial(MovingAverage, FOLLOW), init=False)
    _cpu_ns: int = field(default=0, init=False)
    _answers: int = field(default=0, init=False)
    _refusing_ns: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._cpu_ns, self._answers = self.cpu_ns(), self.answered()

    @property
    def ns(self) -> float:
        """A moving average; 0 before the first measurement."""
        return self._average_ns.value

    def add_refusal(self, ns: float) -> None:
        """Note the time of a refusal, which is no part of an answer."""
        self._refusing_ns += ns

    def measure(self) -> None:
        """Measure, if there were enough answers since the last time."""
        answers = self.answered()
        count = answers - self._answers
        # Fewer than before: a model that answered is gone.
        if 0 <= count < LEAST_ANSWERS:
            return
        cpu_ns = self.cpu_ns()
        if count > 0:
            self._average_ns.add(max(0.0, cpu_ns - self._cpu_ns - self._refusing_ns) / count)
        self._cpu_ns, self._answers, self._refusing_ns = cpu_ns, answers, 0.0
