"""The order of the examples: a function of (seed, cursor) and nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.data.sampler import batch_indices, equal_shares, one_pass, permutation

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


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 5))
def test_equal_shares_are_equal_and_together_the_whole(examples: int, batch_size: int, ranks: int) -> None:
    whole = list(one_pass(examples, batch_size))
    shares = [list(equal_shares(iter(whole), rank, ranks)) for rank in range(ranks)]
    for places, *parts in zip(whole, *shares, strict=True):
        assert len({len(part.indices_B) for part in parts}) == 1
        together = np.concatenate([part.indices_B for part in parts])
        np.testing.assert_array_equal(together[: len(places.indices_B)], places.indices_B)
        assert set(together) == set(places.indices_B)


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(permutation(seed, epoch, 30)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
