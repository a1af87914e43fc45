"""Whole signals run in chunks, by an executor of live streams."""

import numpy as np

from penstock.core.spec import Array
from penstock.runtime.executor import Executor, StepInput

# B signals, T frames of a signal, U frames of its output


def run_in_chunks(executor: Executor, whole_BT: Array, frames: int | None = None) -> Array:
    """Run whole signals in chunks, `[B, T, ...]` to `[B, U, ...]`.

    The states in the first slots of the executor are overwritten.

    Args:
        executor: An idle executor of a live application.
        whole_BT: Signals with any number of frames.
        frames: Frames of a chunk; the most that the executor takes by default.
    """
    if len(whole_BT) > executor.max_rows:
        parts = range(0, len(whole_BT), executor.max_rows)
        return np.concatenate([run_in_chunks(executor, whole_BT[at : at + executor.max_rows], frames) for at in parts])
    rows, total = whole_BT.shape[:2]
    most = executor.input.shape[0]
    frames = frames or most
    assert 1 <= frames <= most, (frames, most)
    chunk_BT = np.zeros((rows, *executor.input.shape), executor.input.numpy_dtype)
    outputs: list[Array] = []
    for start in range(0, total, frames):
        valid = min(frames, total - start)
        chunk_BT[:, :valid] = whole_BT[:, start : start + valid]
        result = executor.step(
            StepInput(
                slots_B=np.arange(rows),
                chunk_B=chunk_BT,
                length_B=np.full(rows, valid),
                fresh_B=np.full(rows, start == 0),
                last_B=np.full(rows, start + valid == total),
            )
        )
        assert result.length_B is not None, executor
        # Signals of equal length give outputs of equal length.
        outputs.append(result.output_B[:, : result.length_B[0]].copy())
    return np.concatenate(outputs, 1)
