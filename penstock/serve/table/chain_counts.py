"""Counts of a chain's requests, in memory that all front-ends share; each writes its own row."""

import mmap
import os
from typing import Self, final

import numpy as np
import numpy.typing as npt

from penstock.core.chains.chain import MAX_STEPS
from penstock.serve.table.slots import TIME_EDGES_NS

# F front-ends, P steps, O outcomes

# Room for OFFERED and following, see `slots`.
OUTCOMES = 8
_TIMES = len(TIME_EDGES_NS) + 1
# Outcomes, those of each step, the latency histogram, the sum of latencies; whole cache lines.
_WIDTH = -(-(OUTCOMES + MAX_STEPS * OUTCOMES + _TIMES + 1) // 8) * 8

Ints = npt.NDArray[np.int64]


@final
class ChainCounts:
    """The counts as NumPy arrays over one buffer.

    Args:
        frontends: F.
        buffer: Zeroed memory of `nbytes` bytes.

    Attributes:
        requests: `[F, O]`, requests by outcome.
        steps: `[F, P, O]`, rejections and failures by the step that they came from.
        latency: `[F, bins]`, answered requests by the time from arrival to the answer, see `slots.TIME_EDGES_NS`.
        latency_ns: `[F]`, sum of these times.
    """

    def __init__(self, frontends: int, buffer: mmap.mmap) -> None:
        rows: Ints = np.frombuffer(buffer, np.int64, frontends * _WIDTH).reshape(frontends, _WIDTH)
        self.requests, rest = rows[:, :OUTCOMES], rows[:, OUTCOMES:]
        self.steps = rest[:, : MAX_STEPS * OUTCOMES].reshape(frontends, MAX_STEPS, OUTCOMES)
        rest = rest[:, MAX_STEPS * OUTCOMES :]
        self.latency, self.latency_ns = rest[:, :_TIMES], rest[:, _TIMES]

    @classmethod
    def private(cls) -> Self:
        """Make the counts of a single process."""
        return cls(1, mmap.mmap(-1, _nbytes(1)))

    @classmethod
    def attached(cls, frontends: int, descriptor: int) -> Self:
        """Map the counts that `shared_memory` made."""
        return cls(frontends, mmap.mmap(descriptor, _nbytes(frontends)))


def shared_memory(frontends: int) -> int:
    """Make memory for the counts of some front-ends; returns its descriptor."""
    descriptor = os.memfd_create("penstock-chain", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _nbytes(frontends))
    return descriptor


def _nbytes(frontends: int) -> int:
    return frontends * _WIDTH * 8
