"""Batches of large rows that are brought to the GPU while the batch before them runs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock import Application, Bundle, TensorSpec
from penstock.core.bundles.bundle import read_bundle
from penstock.runtime.execution import Execution
from penstock.runtime.executor import StepInput
from penstock.runtime.gpu.cuda_graph_executor import STAGED_BATCH_BYTES, STAGED_ROW_BYTES, CudaGraphExecutor
from penstock.runtime.gpu.gpu_choice import gpu_runnable
from penstock.runtime.load import as_found

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SIDE, SLOTS, ROUNDS = 96, 128, 60
# A staged batch, one that its graph reads in the table, and one with padding.
SIZES = (64, 8, 50)


class Means(nn.Module):
    """The mean of each row and colour, after enough work that the next batch is staged meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(SIDE * 3).repeat(1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        rows = pixels.float().reshape(-1, SIDE, SIDE * 3)
        for _ in range(20):
            rows = rows @ self.mix
        return rows.reshape(-1, SIDE, SIDE, 3).mean(2).flatten(1)


application = Application(
    name="means",
    description="Means.",
    input=TensorSpec(dtype="uint8", shape=(SIDE, SIDE, 3), meaning="pixels"),
    output=TensorSpec(dtype="float32", shape=(SIDE * 3,), meaning="means"),
    model=Means,
)


def pictures(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)


def test_batches_that_overlap_have_the_pictures_of_their_own_rows(tmp_path: Path) -> None:
    assert pictures(1, 0).nbytes >= STAGED_ROW_BYTES
    assert min(SIZES[0], SIZES[2]) * pictures(1, 0).nbytes >= STAGED_BATCH_BYTES > SIZES[1] * pictures(1, 0).nbytes
    Bundle.write(as_found(application), Means(), pictures(8, 0), to=tmp_path / "bundle")
    how = Execution(cache=tmp_path / "cache", cores=4, device="cuda:0", precision="fp32", max_rows=64)
    executor = gpu_runnable(read_bundle(tmp_path / "bundle"), as_found(application), how, SLOTS).executor
    assert isinstance(executor, CudaGraphExecutor)
    table, outputs = pictures(SLOTS, 1), np.zeros((SLOTS, SIDE * 3), np.float32)
    assert executor.adopt(table, outputs)
    assert executor.staging_ns > 0
    rng = np.random.default_rng(2)
    batches = [rng.permutation(SLOTS)[: SIZES[number % len(SIZES)]] for number in range(ROUNDS)]
    under_way = None
    for number, rows_B in enumerate([*batches, None]):
        if rows_B is not None and under_way is not None:
            # Two batches at once have rows of their own.
            rows_B = np.setdiff1d(rows_B, under_way[0])
        begun = None
        if rows_B is not None:
            table[rows_B] = pictures(len(rows_B), number)
            ones = np.ones(len(rows_B), np.int64)
            batch = StepInput(
                slots_B=rows_B, chunk_B=table[:0], length_B=ones, fresh_B=ones > 0, from_B=rows_B, to_B=rows_B
            )
            begun = executor.begin(batch)
        if under_way is not None:
            done_B, earlier = under_way
            executor.finish(earlier)
            assert executor.done(earlier)
            expected = table[done_B].astype(np.float64).mean(2).reshape(len(done_B), -1)
            assert np.abs(outputs[done_B] - expected).max() < 0.05, number
            outputs[done_B] = np.nan
        under_way = None if rows_B is None else (rows_B, begun)
