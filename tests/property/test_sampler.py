"""The order of the examples: a function of (seed, cursor) and nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.data import batch_indices, permutation

counts = st.integers(1, 60)
seeds = st.integers(0, 2**32)


@given(seeds, counts, st.integers(0, 5))
def test_every_epoch_sees_every_example_once(seed: int, examples: int, epoch: int) -> None:
    seen = batch_indices(seed, epoch * examples, examples, examples)
    assert sorted(seen.tolist()) == list(range(examples))
    np.testing.assert_array_equal(seen, permutation(seed, epoch, examples))


@given(seeds, counts, st.integers(0, 300), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_however_the_stream_is_cut_into_batches_it_is_the_same(
    seed: int, examples: int, cursor: int, sizes: list[int]
) -> None:
    whole = batch_indices(seed, cursor, sum(sizes), examples)
    starts = np.cumsum([cursor, *sizes[:-1]])
    parts = [batch_indices(seed, int(start), size, examples) for start, size in zip(starts, sizes, strict=True)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(permutation(seed, epoch, 30)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
