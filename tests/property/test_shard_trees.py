"""Shards of trees: any nesting of arrays, of fixed or varying length, comes back bit for bit, in any order."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Dim, TensorSpec
from penstock.core.random_arrays import random_numbers
from penstock.core.record import RecordSpec
from penstock.core.spec import PROTOCOL_DATATYPES, Array
from penstock.train.data.examples import Examples
from penstock.train.data.sampler import Indices, Seeds, example_seeds
from penstock.train.data.shard_writer import write_shards
from penstock.train.data.shards import Shards
from penstock.train.data.trees import Tree, leaves, mapped, row_forms

DTYPES = st.sampled_from(sorted(PROTOCOL_DATATYPES))
DIMS = (Dim("first", max=5), Dim("second", max=3, min=0))
SHAPES = st.lists(st.one_of(st.integers(1, 3), st.sampled_from(DIMS)), max_size=3).map(tuple)
# The dtype and the shape of a target.
LEAVES = st.tuples(DTYPES, st.lists(st.integers(0, 4), max_size=3))
TREES = st.recursive(
    LEAVES.map(list),
    lambda inner: st.one_of(
        st.dictionaries(st.text(max_size=3), inner, max_size=3), st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=5,
)


class Kept(Examples):
    """Raw inputs and targets of all examples in memory."""

    def __init__(self, inputs: Array, targets: Tree, record: RecordSpec | None) -> None:
        self.inputs, self.kept = inputs, targets
        if record is None:
            self.input_dtype, self.input_shape = inputs.dtype, inputs.shape[1:]
        else:
            self.declare(record)

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Tree:
        inputs_B[...] = self.inputs[indices_B]
        return mapped(lambda array: array[indices_B], self.kept)


def made_target(dtype: str, shape: list[int], count: int, rng: np.random.Generator) -> Array:
    """Targets with padding, negative zeros and NaN among their numbers, and rows that end in padding."""
    array = random_numbers(dtype, (count, *shape), rng)
    special = {"i": [-100, 0], "f": [0.0, -0.0, np.nan, np.inf]}.get(array.dtype.kind, [0])
    chosen = np.array(special, array.dtype)[rng.integers(0, len(special), array.shape)]
    array = np.where(rng.random(array.shape) < 0.6, chosen, array)
    if shape and shape[0]:
        for row in range(count):
            array[row, rng.integers(0, shape[0] + 1) :] = special[0]
    return array


def made_targets(tree: Any, count: int, rng: np.random.Generator) -> Tree:
    if isinstance(tree, dict):
        return {name: made_targets(part, count, rng) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(made_targets(part, count, rng) for part in tree)
    dtype, shape = tree
    return made_target(dtype, shape, count, rng)


def contents(tree: Tree) -> list[bytes]:
    return [array.tobytes() for array in leaves(tree)]


@pytest.mark.thorough
@settings(deadline=None)
@given(
    specs=st.lists(st.tuples(DTYPES, SHAPES), min_size=1, max_size=3),
    is_record=st.booleans(),
    tree=TREES,
    count=st.integers(1, 12),
    shard_bytes=st.integers(1, 300),
    seed=st.integers(0, 2**32),
)
def test_trees_come_back_as_they_were(
    specs: list[tuple[str, Any]], is_record: bool, tree: Any, count: int, shard_bytes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    record: RecordSpec | None = None
    if is_record:
        tensors = [
            TensorSpec(dtype=dtype, shape=shape, meaning="", name=f"t{place}")
            for place, (dtype, shape) in enumerate(specs)
        ]
        record = RecordSpec(tuple(tensors))
        inputs = record.random(rng, count)
    else:
        dtype, shape = specs[0]
        inputs = random_numbers(dtype, (count, *map(int, shape)), rng)
    examples = Kept(inputs, made_targets(tree, count, rng), record)
    order = rng.integers(0, count, 2 * count)
    seeds = example_seeds(0, np.zeros_like(order), order)
    with tempfile.TemporaryDirectory() as folder:
        write_shards(examples, Path(folder, "shards"), shard_bytes=shard_bytes)
        shards = Shards(Path(folder, "shards"))
        assert shards.record == record
        assert shards.verify() == []
        expected, found = examples.empty(len(order)), shards.empty(len(order))
        targets = examples.read(order, seeds, expected), shards.read(order, seeds, found)
    assert expected.dtype == found.dtype
    if record is None:
        assert expected.tobytes() == found.tobytes()
    else:
        assert contents(record.batch(expected)) == contents(record.batch(found))
        assert contents(record.lengths(expected)) == contents(record.lengths(found))
    assert row_forms(targets[0]) == row_forms(targets[1])
    assert contents(targets[0]) == contents(targets[1])
