"""Isolation of errors that a network raises in `begin` or `step`: only the request that causes one fails."""

import logging
from typing import Any

import numpy as np

from penstock.core.errors import DeviceLost
from penstock.core.spec import Array
from penstock.runtime.generation.generating import (
    Generating,
    GeneratingAhead,
    GeneratingInTurn,
    GenerationStep,
    Mask,
    RowStates,
)

# B rows of a batch or in progress

log = logging.getLogger(__name__)


def begin_isolated(executor: Generating, chunk_B: Array) -> tuple[list[Any], Mask]:
    """Begin rows; where the network raises, bisect them for the requests that it raises on.

    Returns:
        The rows that began, in one part or several, which can join; and the rows that failed, `[B]`.
    """
    rows = len(chunk_B)
    try:
        return [executor.begin(chunk_B)], np.zeros(rows, np.bool_)
    except DeviceLost:
        # A CUDA graph runs no code of the application.
        raise
    except Exception:
        # The network is the application's code, which may raise anything; the other requests go on.
        if rows == 1:
            log.exception("the network's begin raised on one request; that request alone fails")
            return [], np.ones(1, np.bool_)
        log.warning("the network's begin raised on %d requests; bisecting for the one that it raised on", rows)
    halves = [begin_isolated(executor, half) for half in np.split(chunk_B, [rows // 2])]
    return [each for begun, _ in halves for each in begun], np.concatenate([failed_B for _, failed_B in halves])


def rejected_rows(executor: GeneratingAhead, begun: list[Any]) -> Mask:
    """Take rows whose lengths are out of range out of those that began; returns them, `[B]`.

    The lengths are found on the device, after `begin` returned.
    """
    found: list[Mask] = []
    for each in begun:
        failed_B, reasons = executor.rejected(each)
        for why in reasons:
            log.error("%d requests fail: %s", np.count_nonzero(failed_B), why)
        found.append(failed_B)
    return np.concatenate(found)


def step_isolated(executor: GeneratingInTurn, state: RowStates) -> tuple[GenerationStep, Mask]:
    """Step all rows in progress; where the network raises, bisect them for those that it raises on.

    A step that raised may have written its tensors in place, so that the same entries are written once more.

    Returns:
        The step, in which a row that failed is done; and the rows that failed, `[B]`.
    """
    try:
        return executor.step(state), np.zeros(state.rows, np.bool_)
    except Exception:
        # As above.
        if state.rows == 1:
            log.exception("the network's step raised on one request; that request alone fails")
            spec, failed_B = executor.output, np.ones(1, np.bool_)
            nothing_B = np.zeros((1, *spec.shape), spec.numpy_dtype)
            return GenerationStep(state, nothing_B, failed_B, np.zeros(1, np.bool_)), failed_B
        log.warning("the network's step raised on %d requests; bisecting for those that it raised on", state.rows)
    index_B = np.arange(state.rows)
    halves = [step_isolated(executor, executor.part(state, part)) for part in np.split(index_B, [state.rows // 2])]
    steps = [step for step, _ in halves]
    whole = GenerationStep(
        state=executor.join([step.state for step in steps]),
        output_B=np.concatenate([step.output_B for step in steps]),
        done_B=np.concatenate([step.done_B for step in steps]),
        full_B=np.concatenate([step.full_B for step in steps]),
    )
    return whole, np.concatenate([failed_B for _, failed_B in halves])
