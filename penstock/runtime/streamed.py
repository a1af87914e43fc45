"""Whole signals through what serves live ones, a chunk at a time."""

import numpy as np

from penstock.core.spec import Array
from penstock.runtime.executor import Batch, Executor

# B signals, T frames of a signal, U frames that come of it


def streamed(executor: Executor, whole_BT: Array, frames: int | None = None) -> Array:
    """What comes of whole signals where they are served in chunks, `[B, U, ...]`.

    The signals take the first slots of the executor; whatever lived there is gone.

    Args:
        executor: Of a live application, idle.
        whole_BT: `[B, T, ...]`, of any number of frames.
        frames: Of a chunk; by default as many as there may be.
    """
    if len(whole_BT) > executor.max_rows:
        parts = range(0, len(whole_BT), executor.max_rows)
        return np.concatenate([streamed(executor, whole_BT[at : at + executor.max_rows], frames) for at in parts])
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
            Batch(
                slots_B=np.arange(rows),
                chunk_B=chunk_BT,
                length_B=np.full(rows, valid),
                fresh_B=np.full(rows, start == 0),
                last_B=np.full(rows, start + valid == total),
            )
        )
        assert result.length_B is not None, executor
        # As long as each other, so what comes of them is too.
        outputs.append(result.output_B[:, : result.length_B[0]].copy())
    return np.concatenate(outputs, 1)
