"""Requests of a day: users, what each sends, and the shape of the day."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.core.errors import BenchError

Floats = npt.NDArray[np.float64]

DAY_S = 86_400.0
# Beyond this, nearly all requests of a day come within a few minutes.
MAX_PEAK = 100.0


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Users and their requests.

    The rate over a day is that of a von Mises density: smooth, with one peak and one trough.

    Args:
        users: Users of a day.
        utterances: Live streams of speech of each user.
        utterance_s: Length of each in seconds.
        pictures: One-shot requests of each user.
        peak: Peak rate over the mean rate.
        peak_hour: Hour of the peak, 0 to 24.
    """

    users: float = 300e6
    utterances: float = 3.0
    utterance_s: float = 5.0
    pictures: float = 2.0
    peak: float = 3.0
    peak_hour: float = 20.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_0 = name in ("utterances", "pictures", "peak_hour")
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_0):
                raise BenchError(
                    f"{name} is {value:g}; give a finite number {'of 0 or more' if may_be_0 else 'above 0'}."
                )
        if self.utterances + self.pictures == 0:
            raise BenchError("users send neither utterances nor pictures; give one of them above 0.")
        if not 1 <= self.peak <= MAX_PEAK:
            raise BenchError(f"peak is {self.peak:g} times the mean; give 1 to {MAX_PEAK:g}.")
        if self.peak_hour > 24:
            raise BenchError(f"peak_hour is {self.peak_hour:g}; give 0 to 24.")

    @property
    def requests(self) -> float:
        """Requests of a day: utterances and pictures."""
        return self.users * (self.utterances + self.pictures)

    @property
    def utterance_rate(self) -> float:
        """Utterances begun a second at the peak."""
        return self.users * self.utterances / DAY_S * self.peak

    @property
    def picture_rate(self) -> float:
        """Pictures a second at the peak."""
        return self.users * self.pictures / DAY_S * self.peak

    def share_of_peak(self, second_T: Floats) -> Floats:
        """Return the rate over that of the peak, `[T]`.

        Args:
            second_T: Seconds since midnight.
        """
        angle_T = (second_T - self.peak_hour * 3600) * (2 * np.pi / DAY_S)
        return np.exp(self._concentration * (np.cos(angle_T) - 1))

    @cached_property
    def _concentration(self) -> float:
        """Solve peak over mean = exp(k) / I0(k) for k by bisection."""
        low, high = 0.0, 2 * np.pi * (MAX_PEAK + 1) ** 2
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if _peak_over_mean(middle) < self.peak else (low, middle)
        return (low + high) / 2


def _peak_over_mean(concentration: float) -> float:
    # exp(k) and I0(k) overflow beyond k = 700: their ratio tends to sqrt(2 pi k).
    if concentration > 500:
        return math.sqrt(2 * math.pi * concentration)
    return math.exp(concentration) / float(np.i0(concentration))
