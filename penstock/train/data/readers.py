"""Reading of a whole set once, in order, by threads, without torch."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.core.errors import BadExample
from penstock.core.spec import Array
from penstock.train.data.examples import Examples
from penstock.train.data.sampler import BatchIndices

# P examples of a piece

OnBad = Literal["stop", "skip"]


def reading_threads(processes: int = 1) -> int:
    """Choose the default number of reading threads: one for each core, less one for the steps.

    Args:
        processes: Training processes on this machine.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // processes - 1)


class Piece(NamedTuple):
    """Consecutive examples, without those that cannot be read.

    Args:
        inputs_P: Raw inputs.
        targets_P: Targets.
        indices_P: Indices.
        bad: The errors of the others.
    """

    inputs_P: Array
    targets_P: Array
    indices_P: Array
    bad: list[BadExample]


def in_order(examples: Examples, order: Iterator[BatchIndices], workers: int) -> Iterator[Piece]:
    """Read the examples of an order by threads, without those that cannot be read."""
    with ThreadPoolExecutor(max(1, workers), "penstock-read") as pool:
        under_way = deque(
            pool.submit(_as_far_as_possible, examples, places) for places in islice(order, 2 * workers + 1)
        )
        while under_way:
            piece = under_way.popleft().result()
            under_way.extend(pool.submit(_as_far_as_possible, examples, places) for places in islice(order, 1))
            yield piece


def _as_far_as_possible(examples: Examples, places: BatchIndices) -> Piece:
    inputs_P = examples.empty(len(places.indices_B))
    try:
        targets_P = examples.read(places.indices_B, places.seeds_B, inputs_P)
        return Piece(inputs_P, targets_P, places.indices_B, [])
    except BadExample:
        pass
    good: list[int] = []
    targets: list[Any] = []
    bad: list[BadExample] = []
    for row in range(len(inputs_P)):
        one = slice(row, row + 1)
        try:
            targets.extend(examples.read(places.indices_B[one], places.seeds_B[one], inputs_P[one]))
            good.append(row)
        except BadExample as error:
            bad.append(error)
    return Piece(inputs_P[good], np.array(targets), places.indices_B[good], bad)
