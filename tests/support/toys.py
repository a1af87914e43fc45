"""Small networks in NumPy for tests of the engine, with and without state."""

from dataclasses import replace
from typing import Any, final

import numpy as np

from penstock.core.spec import TensorSpec
from penstock.runtime.executor import Executor, StepInput, StepOutput

POINT = TensorSpec(dtype="float32", shape=(2,), meaning="two numbers")
TOTAL = TensorSpec(dtype="float32", shape=(2,), meaning="two numbers", name="output")


class Doubler(Executor):
    """One-shot: twice the input. Raises where an input is 13 and gives NaN where it is 17."""

    def __init__(self, max_rows: int = 64) -> None:
        self.input, self.output, self.max_rows = POINT, TOTAL, max_rows
        self.batches: list[int] = []

    def step(self, batch: StepInput) -> StepOutput:
        self.batches.append(batch.slots_B.size)
        if (batch.chunk_B == 13).any():
            raise ValueError("thirteen")
        return StepOutput(output_B=np.where(batch.chunk_B == 17, np.nan, batch.chunk_B * 2).astype(np.float32))


@final
class RunningSum(Executor):
    """A stream: the sum of all chunks of the stream so far. Its state must never reach another stream."""

    runs_ahead = True

    def __init__(self, slots: int, max_rows: int = 64) -> None:
        self.input, self.output, self.max_rows = POINT, TOTAL, max_rows
        self._state = np.zeros((slots, 2), np.float32)

    def step(self, batch: StepInput) -> StepOutput:
        state = np.where(batch.fresh_B[:, None], 0, self._state[batch.slots_B])
        valid = np.arange(2)[None] < batch.length_B[:, None]
        state = state + np.where(valid, batch.chunk_B, 0)
        self._state[batch.slots_B] = state
        return StepOutput(output_B=state)


@final
class Countdown(Executor):
    """Autoregressive: for the number n it gives n, n - 1, ... 0, a step each; `busy` until the 0."""

    def __init__(self, slots: int, max_rows: int = 64) -> None:
        self.input, self.output, self.max_rows = POINT, TOTAL, max_rows
        self._state: Any = np.zeros(slots, np.float32)

    def step(self, batch: StepInput) -> StepOutput:
        new = batch.length_B > 0
        value = np.where(new, batch.chunk_B[:, 0], self._state[batch.slots_B] - 1)
        self._state[batch.slots_B] = value
        output = np.stack([value, value], 1).astype(np.float32)
        return StepOutput(output_B=output, length_B=np.where(value % 2 == 0, 2, 1), busy_B=value > 0)


@final
class Afar(Executor):
    """The running sums of a GPU: takes chunks from the table and puts sums there, when it is asked to finish."""

    runs_ahead = True

    def __init__(self, slots: int, max_rows: int = 64) -> None:
        self.input, self.output, self.max_rows = POINT, TOTAL, max_rows
        self._sums = RunningSum(slots, max_rows)
        self._table: Any = None
        self._begun: list[StepInput] = []
        self.most_begun = 0

    def adopt(self, input_E: Any, output_E: Any) -> bool:
        self._table = input_E, output_E
        return True

    def begin(self, batch: StepInput) -> Any:
        assert batch.chunk_B.size == 0
        self._begun.append(batch)
        self.most_begun = max(self.most_begun, len(self._begun))
        return batch

    def finish(self, begun: Any) -> StepOutput:
        assert begun is self._begun.pop(0)
        chunks_E, outputs_E = self._table
        result = self._sums.step(replace(begun, chunk_B=chunks_E[begun.from_B]))
        outputs_E[begun.to_B] = result.output_B
        finite_B = np.logical_and.reduce(np.isfinite(result.output_B), 1)
        return StepOutput(output_B=result.output_B[:0], length_B=np.full(begun.slots_B.size, 2), finite_B=finite_B)

    def step(self, batch: StepInput) -> StepOutput:
        return self.finish(self.begin(batch))
