"""Isolation of errors that the application's network raises: only the request that causes one fails."""

import logging
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.errors import DeviceLost
from penstock.runtime.executor import Executor, StepInput, StepOutput

# B rows of the batch

log = logging.getLogger(__name__)

FailedRows = npt.NDArray[np.bool_] | None


def begin_isolated(executor: Executor, batch: StepInput, *, adopted: bool) -> tuple[Any, FailedRows]:
    """Begin a step; where the network raises, bisect the batch for the requests that it raises on.

    Args:
        executor: The network.
        batch: The batch to run.
        adopted: The executor adopted the table. Its CUDA graphs run no code of the application, so that an error is a
            failure of the GPU, and is raised.

    Returns:
        The argument of the executor's `finish`, and the rows that failed; None where none did.
    """
    try:
        return executor.begin(batch), None
    except DeviceLost:
        raise
    except Exception:
        # The network is the application's code, which may raise anything; the other requests go on.
        if adopted:
            raise
        _log_raised(batch)
    return _bisected(executor, batch)


def step_isolated(executor: Executor, batch: StepInput) -> tuple[StepOutput, FailedRows]:
    """Run a step to its end; where that raises, bisect the batch for the requests that it raises on.

    Args:
        executor: The network.
        batch: The batch to run.

    Returns:
        The result, a copy, and the rows that failed; None where none did.
    """
    try:
        result = executor.finish(executor.begin(batch))
        # The next step may overwrite this output.
        return replace(result, output_B=result.output_B.copy()), None
    except DeviceLost:
        raise
    except Exception:  # noqa: BLE001 - the application's code
        _log_raised(batch)
    return _bisected(executor, batch)


def _log_raised(batch: StepInput) -> None:
    """Log the exception that is being handled; a traceback for one request alone."""
    rows = batch.slots_B.size
    if rows == 1:
        log.exception("the network raised on one request; that request alone fails")
    else:
        log.warning("the network raised on a batch of %d; bisecting for the request that it raised on", rows)


def _bisected(executor: Executor, batch: StepInput) -> tuple[StepOutput, FailedRows]:
    # Not where the exception is handled: its traceback keeps what the network held when it raised.
    if batch.slots_B.size > 1:
        return _join([step_isolated(executor, half) for half in _halves(batch)])
    spec = executor.output
    return StepOutput(output_B=np.zeros((1, *spec.shape), spec.numpy_dtype)), np.ones(1, np.bool_)


def _halves(batch: StepInput) -> list[StepInput]:
    middle = batch.slots_B.size // 2
    columns: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}

    def half(part: slice) -> StepInput:
        given: dict[str, Any] = {name: column if column is None else column[part] for name, column in columns.items()}
        return StepInput(**given)

    return [half(slice(middle)), half(slice(middle, None))]


def _join(halves: list[tuple[StepOutput, FailedRows]]) -> tuple[StepOutput, FailedRows]:
    results = [result for result, _ in halves]
    sizes = [len(result.output_B) for result in results]

    def joined(parts: list[Any], dtype: type) -> Any:
        filled = [np.zeros(size, dtype) if part is None else part for size, part in zip(sizes, parts, strict=True)]
        return None if all(part is None for part in parts) else np.concatenate(filled)

    whole = StepOutput(
        output_B=np.concatenate([result.output_B for result in results]),
        length_B=joined([result.length_B for result in results], np.int64),
        busy_B=joined([result.busy_B for result in results], np.bool_),
    )
    return whole, joined([failed_B for _, failed_B in halves], np.bool_)
