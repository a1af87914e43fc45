"""Shards of examples, and a comparison of their batches."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.core.spec import Array
from penstock.train.data.examples import Examples
from penstock.train.data.loader import Batch, ReadingLoader
from penstock.train.data.sampler import example_seeds, training_order
from penstock.train.data.shard_writer import write_shards
from penstock.train.data.shards import Shards
from penstock.train.data.trees import leaves, row_forms


def sharded(examples: Examples, folder: Path, **more: Any) -> Shards:
    write_shards(examples, folder, **more)
    return Shards(folder)


def batches(examples: Examples, workers: int, to_max: bool = False) -> Iterator[Batch]:
    order = training_order(5, len(examples), 7)
    with ReadingLoader(examples, order, workers=workers, to_max=to_max) as loader:
        yield from islice(loader, 20)


def check_same_batches(one: Examples, other: Examples, **how: Any) -> None:
    for expected, found in zip(batches(one, 0, **how), batches(other, 2, **how), strict=True):
        assert row_forms(tuple(expected)) == row_forms(tuple(found))
        for first, second in zip(leaves(tuple(expected)), leaves(tuple(found)), strict=True):
            assert torch.equal(first, second)


def read(examples: Examples, indices: list[int]) -> tuple[Array, Any]:
    which = np.array(indices)
    inputs = examples.empty(len(which))
    return inputs, examples.read(which, example_seeds(3, np.zeros_like(which), which), inputs)
