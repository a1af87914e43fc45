"""Inputs whose lengths vary, and a network of them in NumPy, for tests of the engine."""

from collections.abc import Sequence
from typing import final

import numpy as np

from penstock.core.dim import Dim
from penstock.core.named_arrays import chunks_of, feeds_of
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid

TOKENS = Dim("tokens", max=64)
WORDS = RecordSpec((TensorSpec(dtype="float32", shape=(TOKENS, 2), meaning="vectors", name="words"),))
SUMS = RecordSpec(
    (
        TensorSpec(dtype="float32", shape=(2,), meaning="their sum", name="sum"),
        TensorSpec(dtype="float32", shape=(TOKENS,), meaning="the first of each", name="first"),
    )
)


def words(length: int, seed: int = 0) -> Array:
    """One record of small whole numbers, whose sums are exact in any order."""
    numbers = np.random.default_rng(seed).integers(-50, 50, (length, 2))
    return WORDS.check({"words": numbers.astype(np.float32)})


def linear_costs(batch_ns: float, token_ns: float, most: int = 8, largest: Sequence[int] | None = None) -> LengthCosts:
    """Costs of batches that take a constant and a time a token, padding included."""
    rows = [1 << exponent for exponent in range(most.bit_length())]
    grid = LengthGrid.of(WORDS)
    assert grid is not None
    ns = [[batch_ns + token_ns * each * length for each in rows] for length in grid.edges]
    return LengthCosts(grid, rows, ns, largest=largest)


@final
class WordSums(Executor):
    """One-shot: the sum of a row's words, and the first number of each word."""

    def __init__(self, max_rows: int = 64) -> None:
        self.input, self.output, self.max_rows = WORDS, SUMS, max_rows
        self.shapes: list[tuple[int, ...]] = []

    def step(self, batch: StepInput) -> StepOutput:
        feeds, lengths = feeds_of(self.input, batch.chunk_B)
        given = feeds["words"]
        self.shapes.append(given.shape)
        return StepOutput(output_B=chunks_of(self.output, {"sum": given.sum(1), "first": given[..., 0]}, lengths))
