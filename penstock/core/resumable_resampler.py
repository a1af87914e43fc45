"""A resampler whose signal another one can go on with, though soxr's state cannot be read.

The last samples before the resampler are kept. Another one that begins with them gives, after the length of its filter,
what the first one gives, to the rounding of floats: both have the same phase, since what is kept begins at a whole
number of periods. What the first one had given already is dropped.
"""

from fractions import Fraction
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt

# T samples before the resampler, U samples behind it

Floats = npt.NDArray[np.float32]

# Kept at least: more than soxr's low quality holds back in its blocks, which is 60 ms, and the length of its filter.
KEPT_S = 0.1
# Of rates whose phases repeat later, too much would have to be kept.
MAX_PERIOD = 8_192


@final
class ResumableResampler:
    """A resampler, and what another one needs to go on.

    Args:
        resampler: A fresh one.
        rate_hz: Rate of the samples before it.
        period: Samples before it in which its phases repeat.
        gives: Samples behind it in that time.
    """

    def __init__(self, resampler: Any, *, rate_hz: float, period: int, gives: int) -> None:
        self._resampler, self._period, self._gives = resampler, period, gives
        self._kept = int(KEPT_S * rate_hz) + 1
        self._recent_T: Floats = np.zeros(0, np.float32)
        # Since the resampler began: periods before `recent_T`, samples that it gave, and those that were passed on.
        self._periods = self._given = self._passed = 0
        self._ready_U: Floats = np.zeros(0, np.float32)

    @classmethod
    def of(cls, resampler: Any, rate_hz: float, target_hz: float) -> Self | None:
        """Make one of a fresh resampler; None where the rates have too long a period."""
        ratio = Fraction(rate_hz) / Fraction(target_hz)
        if ratio.numerator > MAX_PERIOD:
            return None
        return cls(resampler, rate_hz=rate_hz, period=ratio.numerator, gives=ratio.denominator)

    def resample_chunk(self, sound_T: Floats, last: bool) -> Floats:
        """Resample the next samples, as soxr's `ResampleStream` does."""
        new_U = self._resample(sound_T, last)
        if self._ready_U.size:
            new_U, self._ready_U = np.concatenate([self._ready_U, new_U]), self._ready_U[:0]
        self._passed += new_U.size
        return new_U

    def heard(self) -> tuple[bytes, int]:
        """Return what another resampler begins with, and how many of its samples were passed on already."""
        return self._recent_T.tobytes(), self._passed - self._periods * self._gives

    def resume(self, heard: bytes, passed: int) -> None:
        """Go on after what `heard` of another one returned; before any other samples."""
        self._passed = passed
        self._ready_U = self._resample(np.frombuffer(heard, np.float32), False)

    def _resample(self, sound_T: Floats, last: bool) -> Floats:
        self._recent_T = np.concatenate([self._recent_T, sound_T])
        over = max(0, self._recent_T.size - self._kept) // self._period
        if over:
            self._periods += over
            self._recent_T = self._recent_T[over * self._period :]
        new_U = self._resampler.resample_chunk(sound_T, last)
        before, self._given = self._given, self._given + new_U.size
        return new_U[max(0, self._passed - before) :]
