"""Batches: the same for any number of workers, however the run is cut, whatever is bad."""

from collections.abc import Iterator
from itertools import islice

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.train.data.loader import Batch, ReadingLoader
from penstock.train.data.resident import Resident, ResidentLoader
from penstock.train.data.sampler import BatchIndices, training_order
from tests.support.examples import Counted

STEPS = 6


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    count=st.integers(2, 40),
    batch=st.integers(1, 30),
    workers=st.integers(0, 4),
    first=st.integers(0, STEPS),
    bad=st.sets(st.integers(0, 39), max_size=12),
    varies=st.booleans(),
)
def test_what_is_learned_from_is_a_function_of_the_step(
    seed: int, count: int, batch: int, workers: int, first: int, bad: set[int], varies: bool
) -> None:
    # Half at least is good, so that a good one is found.
    examples = Counted(count, bad=tuple(sorted(index for index in bad if index < count))[: count // 2], varies=varies)

    def order(first: int) -> Iterator[BatchIndices]:
        return islice(training_order(seed, count, batch, first_step=first), STEPS - first)

    def got(workers: int, first: int) -> tuple[list[Batch], dict[str, int]]:
        with ReadingLoader(examples, order(first), workers=workers, on_bad="skip") as feed:
            return list(feed), feed.bad

    plain, replaced = got(0, 0)
    assert got(workers, 0)[1] == replaced
    for one, other in zip(plain[first:], got(workers, first)[0], strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
    if not varies:
        resident = ResidentLoader(Resident(examples, torch.device("cpu"), 1), order(0), on_bad="skip")
        for one, other in zip(plain, resident, strict=True):
            assert torch.equal(one.inputs, other.inputs)
        assert resident.bad == replaced
