"""A fault of the application's own network: the request that it raises on fails alone, its neighbours are answered."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.runtime.executor import Batch, Executor, Result

# B rows of the batch

log = logging.getLogger(__name__)

Failed = npt.NDArray[np.bool_] | None


def begun_or_failed(executor: Executor, batch: Batch, *, adopted: bool) -> tuple[Any, Failed]:
    """Begin a step; where the network raises, look by halves for the requests that it raises on.

    Args:
        executor: The network.
        batch: What to run.
        adopted: Whether the executor adopted the table: its graphs run no code of the application, so what fails there
            is the GPU, for good, and is raised.

    Returns:
        What the executor's `finish` takes, and which rows failed; None where none did.
    """
    rows = batch.slots_B.size
    try:
        return executor.begin(batch), None
    except Exception:
        if adopted:
            raise
        if rows == 1:
            log.exception("the network raised on one request; that request alone fails")
        else:
            log.warning("the network raised on a batch of %d; looking for the request that it raised on", rows)
    if rows > 1:
        return _joined([_kept(executor, *begun_or_failed(executor, half, adopted=False)) for half in _halves(batch)])
    spec = executor.output
    return Result(output_B=np.zeros((1, *spec.shape), spec.numpy_dtype)), np.ones(1, np.bool_)


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    middle = batch.slots_B.size // 2
    first, second = (
        Batch(
            slots_B=batch.slots_B[part],
            chunk_B=batch.chunk_B[part],
            length_B=batch.length_B[part],
            fresh_B=batch.fresh_B[part],
            last_B=None if batch.last_B is None else batch.last_B[part],
        )
        for part in (slice(middle), slice(middle, None))
    )
    return first, second


def _kept(executor: Executor, begun: Any, failed_B: Failed) -> tuple[Result, Failed]:
    result = executor.finish(begun)
    # The next step may overwrite what this one gave.
    return replace(result, output_B=result.output_B.copy()), failed_B


def _joined(halves: list[tuple[Result, Failed]]) -> tuple[Result, Failed]:
    sizes = [len(result.output_B) for result, _ in halves]
    failed = [np.zeros(size, np.bool_) if mask is None else mask for size, (_, mask) in zip(sizes, halves, strict=True)]
    results = [result for result, _ in halves]
    length = [np.zeros(n, np.int64) if r.length_B is None else r.length_B for n, r in zip(sizes, results, strict=True)]
    busy = [np.zeros(n, np.bool_) if r.busy_B is None else r.busy_B for n, r in zip(sizes, results, strict=True)]
    whole = Result(
        output_B=np.concatenate([result.output_B for result in results]),
        length_B=None if all(result.length_B is None for result in results) else np.concatenate(length),
        busy_B=None if all(result.busy_B is None for result in results) else np.concatenate(busy),
    )
    return whole, np.concatenate(failed)
