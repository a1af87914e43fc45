"""Reading a whole set once, in order, by threads; what a command can do without torch."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.core.errors import BadExample
from penstock.core.spec import Array
from penstock.train.data import Places
from penstock.train.examples import Examples

# P examples of a piece

OnBad = Literal["stop", "skip"]


def reading_threads(processes: int = 1) -> int:
    """How many threads read where a recipe does not say: a core each, one kept for each process's steps.

    Args:
        processes: Training processes on this machine.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // processes - 1)


class Piece(NamedTuple):
    """Some examples that follow one another, as far as they could be read.

    Args:
        inputs_P: Raw inputs.
        targets_P: Their targets.
        indices_P: Which they are.
        bad: What could not be read.
    """

    inputs_P: Array
    targets_P: Array
    indices_P: Array
    bad: list[BadExample]


def in_order(examples: Examples, order: Iterator[Places], workers: int) -> Iterator[Piece]:
    """Every place of an order once, read by threads, without those that cannot be read."""
    with ThreadPoolExecutor(max(1, workers), "penstock-read") as pool:
        under_way = deque(
            pool.submit(_as_far_as_possible, examples, places) for places in islice(order, 2 * workers + 1)
        )
        while under_way:
            piece = under_way.popleft().result()
            under_way.extend(pool.submit(_as_far_as_possible, examples, places) for places in islice(order, 1))
            yield piece


def _as_far_as_possible(examples: Examples, places: Places) -> Piece:
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
