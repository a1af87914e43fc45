"""Processor time of an answer, measured beside the refusals of the same process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

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

    Attributes:
        ns: A moving average; 0 before the first measurement.
    """

    cpu_ns: Callable[[], int]
    answered: Callable[[], int]
    ns: float = field(default=0.0, init=False)
    _cpu_ns: int = field(default=0, init=False)
    _answers: int = field(default=0, init=False)
    _refusing_ns: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._cpu_ns, self._answers = self.cpu_ns(), self.answered()

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
            each_ns = max(0.0, cpu_ns - self._cpu_ns - self._refusing_ns) / count
            self.ns += (each_ns - self.ns) * (FOLLOW if self.ns else 1.0)
        self._cpu_ns, self._answers, self._refusing_ns = cpu_ns, answers, 0.0
