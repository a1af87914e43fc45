"""A moving average whose first value counts whole."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(slots=True, eq=False)
class MovingAverage:
    """A moving average.

    Args:
        follow: Weight of the newest value.

    Attributes:
        value: The average; 0 before the first value.
    """

    follow: float
    value: float = 0.0

    def add(self, newest: float) -> None:
        """Follow the newest value; take the first as it is."""
        self.value += (newest - self.value) * (self.follow if self.value else 1.0)
