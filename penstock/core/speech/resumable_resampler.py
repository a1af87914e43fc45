"""A resampler whose signal another one can go on with, though soxr's state cannot be read.

The last samples before the resampler are kept. Another one that begins with them gives, after the length of its filter,
what the first one gives, to the rounding of floats: both have the same phase, since what is kept begins at a whole
number of periods. What the first one had given already is dropped.

soxr gives its samples in blocks, which depend on where it began. So they are held back for a fixed time, a little
longer than soxr does: how many samples were given depends on how many came, and on nothing else.
"""

import math
from fractions import Fraction
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt

# T samples before the resampler, U samples behind it

Floats = npt.NDArray[np.float32]

# soxr's low quality holds back so many samples before it at most, where the rate is raised, or so many behind it, where
# it is lowered; by measurement up to 719 and 493. Where it held more back, samples would come later.
HELD_BEFORE, HELD_BEHIND = 740, 510
# Samples behind it in which another one's filter has none of its beginning left, by measurement up to 27.
FILTER = 64
# Of rates whose phases repeat later, too much would have to be kept.
MAX_PERIOD = 8_192


@final
class ResumableResampler:
    """A resampler, and what another one needs to go on.

    Args:
        resampler: A fresh one.
        period: Samples before it in which its phases repeat.
        gives: Samples behind it in that time.
    """

    def __init__(self, resampler: Any, *, period: int, gives: int) -> None:
        self._resampler, self._period, self._gives = resampler, period, gives
        self._held_U = max(HELD_BEHIND, -(-HELD_BEFORE * gives // period))
        self._kept = -(-(self._held_U + FILTER) * period // gives)
        self._recent_T: Floats = np.zeros(0, np.float32)
        # Since the resampler began: samples that came, periods before `recent_T`, samples of soxr, and those given.
        self._came = self._periods = self._made = self._given = 0
        # Those that soxr made and that are held back.
        self._ready_U: Floats = np.zeros(0, np.float32)

    @classmethod
    def of(cls, resampler: Any, rate_hz: float, target_hz: float) -> Self | None:
        """Make one of a fresh resampler; None where the rates have too long a period."""
        ratio = Fraction(rate_hz) / Fraction(target_hz)
        return None if ratio.numerator > MAX_PERIOD else cls(resampler, period=ratio.numerator, gives=ratio.denominator)

    @staticmethod
    def max_heard_bytes(max_rate_hz: float, target_hz: float) -> int:
        """Bytes of `heard` at most, of sound at any rate up to a maximum."""
        kept = HELD_BEFORE + (HELD_BEHIND + FILTER + 1) * max_rate_hz / target_hz
        return 4 * math.ceil(kept + MAX_PERIOD + 1)

    def resample_chunk(self, sound_T: Floats, last: bool) -> Floats:
        """Resample the next samples, as soxr's `ResampleStream` does."""
        self._resample(sound_T, last)
        due = self._ready_U.size if last else self._came * self._gives // self._period - self._held_U - self._given
        given_U, self._ready_U = np.split(self._ready_U, [max(0, min(due, self._ready_U.size))])
        self._given += given_U.size
        return given_U

    def heard(self) -> tuple[bytes, int]:
        """Return what another resampler begins with, and how many of its samples were given already."""
        return self._recent_T.tobytes(), self._given - self._periods * self._gives

    def resume(self, heard: bytes, given: int) -> None:
        """Go on after what `heard` of another one returned; before any other samples."""
        self._given = given
        self._resample(np.frombuffer(heard, np.float32), False)

    def _resample(self, sound_T: Floats, last: bool) -> None:
        self._came += sound_T.size
        self._recent_T = np.concatenate([self._recent_T, sound_T])
        over = max(0, self._recent_T.size - self._kept) // self._period
        if over:
            self._periods += over
            self._recent_T = self._recent_T[over * self._period :]
        made_U = self._resampler.resample_chunk(sound_T, last)
        before, self._made = self._made, self._made + made_U.size
        self._ready_U = np.concatenate([self._ready_U, made_U[max(0, self._given - before) :]])
