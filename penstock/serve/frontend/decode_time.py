"""Time of the bodies that a front-end decodes in its event loop, so that none is decoded for an answer that is late."""

from dataclasses import dataclass
from typing import final

# Weight of the newest body in the moving average.
FOLLOW = 0.1
# A request with more than this share of its budget left is always tried: only a body that is decoded can correct the
# average.
SURE_SHARE = 0.5


@final
@dataclass(slots=True, eq=False)
class DecodeTime:
    """Usual time of one model's bodies.

    Attributes:
        usual_ns: A moving average; 0 before the first.
    """

    usual_ns: float = 0.0

    def observe(self, spent_ns: int) -> None:
        """Note the time of a body."""
        self.usual_ns += (spent_ns - self.usual_ns) * (FOLLOW if self.usual_ns else 1.0)

    def is_late(self, left_ns: int, budget_ns: int, finish_ns: int) -> bool:
        """Return whether the result of a body that is decoded now would be late.

        Args:
            left_ns: Time to its deadline.
            budget_ns: Its latency budget.
            finish_ns: Predicted time from its submission to its result.
        """
        return left_ns <= budget_ns * SURE_SHARE and left_ns < self.usual_ns + finish_ns
