"""Networks small enough to follow by hand, for the engine's tests: NumPy, with and without state."""

from typing import Any, final

import numpy as np

from penstock.core.spec import TensorSpec
from penstock.runtime.executor import Batch, Executor, Result

POINT = TensorSpec(dtype="float32", shape=(2,), meaning="two numbers")
TOTAL = TensorSpec(dtype="float32", shape=(2,), meaning="two numbers", name="output")


@final
class Doubler(Executor):
    """One-shot: twice the input. Raises where an input is 13 and gives NaN where it is 17."""

    def __init__(self, max_rows: int = 64) -> None:
        self.input, self.output, self.max_rows = POINT, TOTAL, max_rows
        self.batches: list[int] = []

    def step(self, batch: Batch) -> Result:
        self.batches.append(batch.slots_B.size)
        if (batch.chunk_B == 13).any():
            raise ValueError("thirteen")
        return Result(output_B=np.where(batch.chunk_B == 17, np.nan, batch.chunk_B * 2).astype(np.float32))


@final
class RunningSum(Executor):
    """A stream: the sum of all chunks of the stream so far. Its state must never reach another stream."""

    def __init__(self, slots: int, max_rows: int = 64) -> None:
        self.input, self.output, self.max_rows = POINT, TOTAL, max_rows
        self._state = np.zeros((slots, 2), np.float32)

    def step(self, batch: Batch) -> Result:
        state = np.where(batch.fresh_B[:, None], 0, self._state[batch.slots_B])
        valid = np.arange(2)[None] < batch.length_B[:, None]
        state = state + np.where(valid, batch.chunk_B, 0)
        self._state[batch.slots_B] = state
        return Result(output_B=state)


@final
class Countdown(Executor):
    """Autoregressive: for the number n it gives n, n - 1, ... 0, a step each; `busy` until the 0."""

    def __init__(self, slots: int, max_rows: int = 64) -> None:
        self.input, self.output, self.max_rows = POINT, TOTAL, max_rows
        self._state: Any = np.zeros(slots, np.float32)

    def step(self, batch: Batch) -> Result:
        new = batch.length_B > 0
        value = np.where(new, batch.chunk_B[:, 0], self._state[batch.slots_B] - 1)
        self._state[batch.slots_B] = value
        output = np.stack([value, value], 1).astype(np.float32)
        return Result(output_B=output, length_B=np.where(value % 2 == 0, 2, 1), busy_B=value > 0)
