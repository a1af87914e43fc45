"""Reading of examples by threads, without torch: pieces of a batch, and a whole set once, in order."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from penstock.core.errors import BadExample, TrainError
from penstock.core.machine.cores import available_cores
from penstock.core.spec import Array
from penstock.train.data.examples import Examples
from penstock.train.data.sampler import BatchIndices, another
from penstock.train.data.trees import Tree, check_row_forms, joined

# B examples of a batch, P examples of a piece

OnBad = Literal["stop", "skip"]
# With half of the examples damaged, 64 bad draws in a row happen once in 10**19.
ATTEMPTS = 64


def reading_threads(processes: int = 1) -> int:
    """Choose the default number of reading threads: one for each core, less one for the steps.

    Args:
        processes: Training processes on this machine.
    """
    cores = available_cores()
    return max(1, cores // processes - 1)


class Piece(NamedTuple):
    """Some examples, read.

    Args:
        inputs_P: Raw inputs.
        targets_P: The tree of targets.
        indices_P: Indices.
        bad: The errors of those that cannot be read.
    """

    inputs_P: Array
    targets_P: Tree
    indices_P: Array
    bad: list[BadExample]


def in_order(examples: Examples, order: Iterator[BatchIndices], workers: int) -> Iterator[Piece]:
    """Read the examples of an order by threads, without those that cannot be read."""

    def read(places: BatchIndices) -> Piece:
        return read_piece(examples, places, examples.empty(len(places.indices_B)), "leave out")

    with ThreadPoolExecutor(max(1, workers), "penstock-read") as pool:
        under_way = deque(pool.submit(read, places) for places in islice(order, 2 * workers + 1))
        while under_way:
            piece = under_way.popleft().result()
            under_way.extend(pool.submit(read, places) for places in islice(order, 1))
            yield piece


def read_piece(
    examples: Examples, places: BatchIndices, inputs_P: Array, on_bad: Literal["stop", "skip", "leave out"]
) -> Piece:
    """Read some examples.

    Args:
        examples: The set.
        places: The indices and seeds of the examples.
        inputs_P: The destination of the raw inputs.
        on_bad: `"stop"` at an example that cannot be read, `"skip"`: read another one in its place, or `"leave out"`.
    """
    try:
        return Piece(inputs_P, examples.read(places.indices_B, places.seeds_B, inputs_P), places.indices_B, [])
    except BadExample:
        if on_bad == "stop":
            raise
    # One by one, so that a bad example does not read the others again.
    _clear(inputs_P)
    good: list[int] = []
    targets: list[Tree] = []
    bad: list[BadExample] = []
    for row in range(len(inputs_P)):
        place = places.of(slice(row, row + 1))
        index_1, attempts_1 = place.indices_B, np.zeros(1, np.int64)
        while len(index_1):
            try:
                targets.append(examples.read(index_1, place.seeds_B, inputs_P[row : row + 1]))
                good.append(row)
                break
            except BadExample as error:
                bad.append(error)
                _clear(inputs_P[row : row + 1])
                skips = on_bad == "skip"
                index_1 = replaced(index_1, place, error, attempts_1, len(examples))[0] if skips else index_1[:0]
    check_row_forms(targets)
    return Piece(inputs_P[good], joined(targets) if targets else np.array([]), places.indices_B[good], bad)


def _clear(inputs_P: Array) -> None:
    """Fill records with zeros again: a read that failed may have written more than the next one does."""
    if inputs_P.dtype.names is not None:
        inputs_P[...] = np.zeros((), inputs_P.dtype)


def replaced(
    indices_B: Array, places: BatchIndices, error: BadExample, attempts_B: Array, examples: int
) -> tuple[Array, int]:
    """Replace the indices of an example that cannot be read, as a function of the places alone.

    Args:
        indices_B: The indices to read.
        places: The places of the batch.
        error: The error of one example.
        attempts_B: The number of replacements of each place; updated.
        examples: The number of examples.

    Returns:
        The new indices, and the number of replacements.

    Raises:
        TrainError: A place was replaced too often.
    """
    indices_B = indices_B.copy()
    rows = np.flatnonzero(indices_B == error.index)
    if not len(rows):
        raise TrainError(f"a BadExample names example {error.index}, which was not requested: {error}") from error
    for row in rows:
        if attempts_B[row] == ATTEMPTS:
            raise TrainError(f"{ATTEMPTS} examples in a row cannot be read, the last one: {error}")
        indices_B[row] = another(places.seeds_B[row], int(attempts_B[row]), examples)
        attempts_B[row] += 1
    return indices_B, len(rows)
