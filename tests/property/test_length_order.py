"""The order by length: each epoch a permutation, a function of (seed, cursor), the same for any number of ranks."""

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.record import Lengths
from penstock.train.data.length_order import ExampleOrder, bucket_of, by_length
from penstock.train.data.sampler import batch_indices, permutation, training_order

seeds = st.integers(0, 2**32)
batch_sizes = st.integers(1, 12)
orders = st.builds(ExampleOrder, buckets=st.integers(0, 9), shortest_first=st.booleans())
# Few different ones, so that many are equal.
lengths_of_sets = st.lists(st.integers(1, 20), min_size=1, max_size=80).map(lambda found: np.array(found, np.int64))


@given(lengths_of_sets, orders, batch_sizes, seeds, st.integers(0, 4))
def test_every_epoch_sees_every_example_once(
    lengths_n: Lengths, order: ExampleOrder, batch_size: int, seed: int, epoch: int
) -> None:
    examples = len(lengths_n)
    seen = batch_indices(seed, epoch * examples, examples, examples, by_length(lengths_n, order, batch_size))
    assert sorted(seen.tolist()) == list(range(examples))


@given(lengths_of_sets, orders, batch_sizes, seeds)
def test_the_first_epoch_goes_from_short_to_long_if_wanted(
    lengths_n: Lengths, order: ExampleOrder, batch_size: int, seed: int
) -> None:
    first_n = by_length(lengths_n, order, batch_size)(seed, 0, len(lengths_n))
    if order.shortest_first:
        assert (np.diff(lengths_n[first_n]) >= 0).all()
    elif not order.buckets:
        np.testing.assert_array_equal(first_n, permutation(seed, 0, len(lengths_n)))


@pytest.mark.thorough
@given(lengths_of_sets, orders, batch_sizes, seeds, st.integers(0, 30))
def test_a_run_goes_on_in_the_middle_of_an_epoch_and_on_any_number_of_ranks(
    lengths_n: Lengths, order: ExampleOrder, batch_size: int, seed: int, first: int
) -> None:
    steps = 8

    def batches(first_step: int, rows: slice = slice(None)) -> list[list[int]]:
        # As in another process: nothing is kept between them.
        made = by_length(lengths_n, order, batch_size)
        found = training_order(seed, len(lengths_n), batch_size, first_step=first_step, rows=rows, order=made)
        return [places.indices_B.tolist() for places in islice(found, first + steps - first_step)]

    whole = batches(0)
    assert batches(first) == whole[first:]
    for ranks in (2, 3):
        edges = [round(rank * batch_size / ranks) for rank in range(ranks + 1)]
        parts = [batches(0, slice(*edges[rank : rank + 2])) for rank in range(ranks)]
        assert [[index for part in step for index in part] for step in zip(*parts, strict=True)] == whole


@given(lengths_of_sets, st.integers(1, 9), batch_sizes, seeds, st.integers(0, 4))
def test_the_whole_batches_of_an_epoch_divide_the_buckets_among_them(
    lengths_n: Lengths, buckets: int, batch_size: int, seed: int, epoch: int
) -> None:
    examples = len(lengths_n)
    bucket_n = bucket_of(lengths_n, buckets, batch_size)
    assert set(bucket_n.tolist()) == set(range(bucket_n.max() + 1))
    made_n = by_length(lengths_n, ExampleOrder(buckets=buckets), batch_size)(seed, epoch, examples)
    starts = range(-epoch * examples % batch_size, examples - batch_size + 1, batch_size)
    found = [bucket_n[made_n[start : start + batch_size]] for start in starts]
    ranges = sorted((int(batch.min()), int(batch.max())) for batch in found)
    if bucket_n.any():
        # A bucket whose last batch is not full shares it with the next one.
        assert all(one[1] <= other[0] for one, other in pairwise(ranges))


@given(st.integers(1, 40), st.integers(1, 30), orders, batch_sizes, seeds, st.integers(1, 3))
def test_examples_of_one_length_are_shuffled(
    length: int, examples: int, order: ExampleOrder, batch_size: int, seed: int, epoch: int
) -> None:
    lengths_n = np.full(examples, length)
    assert not bucket_of(lengths_n, order.buckets, batch_size).any()
    np.testing.assert_array_equal(
        by_length(lengths_n, order, batch_size)(seed, epoch, examples), permutation(seed, epoch, examples)
    )
