"""Training on examples in the order of their lengths: padding, what is said, and an exact resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.train.data.examples import ArraySet, Examples
from penstock.train.data.length_order import ExampleOrder, bucket_of, by_length, epoch_order, padding_share
from penstock.train.data.loader import ReadingLoader
from penstock.train.data.sampler import permutation, training_order
from penstock.train.overrides import with_overrides
from penstock.train.recipe import Data, Recipe
from tests.support.trees import RECORD

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(20, 400, 2000)


def sentences(lengths: Any) -> ArraySet:
    """Examples of these lengths, each filled with its length."""
    rows = [np.full(length, length, np.float32) for length in lengths]
    return ArraySet(inputs=rows, targets=np.asarray(lengths, np.float32))


class Unmeasured(Examples):
    """Examples whose lengths are known when they are read."""

    def __init__(self) -> None:
        self.declare(RECORD)

    def __len__(self) -> int:
        return 6

    def read(self, indices_B: Array, seeds_B: Array, inputs_B: Array) -> Any:
        raise AssertionError(indices_B)


def order_of(examples: Any, order: ExampleOrder, batch_size: int = 16) -> tuple[Any, list[str]]:
    said: list[str] = []
    made = epoch_order(examples, order, batch_size=batch_size, seed=3, notify=said.append)
    return made, said


def test_buckets_leave_little_padding_and_shuffle_the_batches() -> None:
    order = by_length(LENGTHS, ExampleOrder(buckets=20), 16)
    bucketed, shuffled = (padding_share(LENGTHS, each, 0, 16) for each in (order, permutation))
    assert bucketed < 0.05 < 0.3 < shuffled
    batches = order(0, 1, 2000).reshape(-1, 16)
    assert abs(np.corrcoef(np.arange(len(batches)), LENGTHS[batches].mean(1))[0, 1]) < 0.3
    # Another epoch has other batches, not the same in another order.
    again = {frozenset(batch) for batch in order(0, 2, 2000).reshape(-1, 16).tolist()}
    assert len(again & {frozenset(batch) for batch in batches.tolist()}) < 5


def test_a_small_set_has_fewer_buckets() -> None:
    assert bucket_of(np.arange(100), 20, 16).max() + 1 == 3
    assert bucket_of(np.arange(100), 2, 16).max() + 1 == 2
    assert not bucket_of(np.arange(20), 20, 16).any()
    # Many equal lengths are in one bucket.
    assert np.bincount(bucket_of(np.array([5] * 90 + [6] * 10), 10, 5)).tolist() == [90, 10]


def test_the_batches_that_are_read_are_as_long_as_their_longest_example() -> None:
    examples = sentences(LENGTHS[:200])
    made, said = order_of(examples, ExampleOrder(buckets=5, shortest_first=True))
    assert len(said) == 2
    assert "5 buckets of examples of similar length: " in said[0]
    assert said[1] == "The first epoch takes the examples from the shortest to the longest."
    with ReadingLoader(examples, training_order(3, 200, 16, order=made)) as feed:
        sizes = [next(feed).inputs["input"].shape[1] for _ in range(12)]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 300 > 60 > sizes[0]


def test_what_cannot_be_ordered_is_shuffled_or_refused() -> None:
    order = ExampleOrder(buckets=5, shortest_first=True)
    whole = ArraySet(inputs=np.zeros((3, 2), np.float32), targets=np.zeros(3))
    assert order_of(whole, order) == (permutation, [])
    assert order_of(sentences([4] * 50), order) == (permutation, [])
    assert order_of(sentences([4, 5]), ExampleOrder()) == (permutation, [])
    # One example, and fewer than a batch.
    assert order_of(sentences([4]), order) == (permutation, [])
    _, said = order_of(sentences([4, 8]), ExampleOrder(buckets=5))
    assert said == ["25.0% of a batch is padding, with too few examples for buckets."]
    with pytest.raises(TrainError, match=r"Unmeasured do not know their lengths; .* or set order\.buckets=0 and"):
        order_of(Unmeasured(), order)
    for buckets in (-1, 1.5, True):
        with pytest.raises(TrainError, match=r"order\.buckets .*; it must be a whole number, 0 for none"):
            ExampleOrder(buckets=buckets)  # pyright: ignore[reportArgumentType]


def test_the_order_is_a_setting() -> None:
    examples = sentences([2, 3])
    recipe = Recipe(
        data=lambda: Data(train=examples, validation=examples),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,  # pyright: ignore[reportArgumentType]
        epochs=1,
        order=ExampleOrder(buckets=7),
    )
    assert with_overrides(recipe, {"order.buckets": 0, "order.shortest_first": True}).order == ExampleOrder(
        shortest_first=True
    )
    with pytest.raises(TrainError, match=r"order\.shortest_first is 1; it must be true or false"):
        with_overrides(recipe, {"order.shortest_first": 1})
    with pytest.raises(TrainError, match=r"order\.buckets -1"):
        with_overrides(recipe, {"order.buckets": -1})
    assert replace(recipe, order=ExampleOrder()).order.is_by_length is False


class Mean(nn.Module):
    """A scale of the mean of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, input: torch.Tensor, input_length: torch.Tensor) -> torch.Tensor:
        return self.scale * input.sum(1) / input_length


def test_a_training_learns_in_the_order_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = sentences(LENGTHS[:300]).inputs["input"]
    fitted = penstock.fit(
        Mean(),
        train=({"input": [row / 400 for row in rows]}, [len(row) / 400 for row in rows]),
        optimizer=penstock.Optimizer("adam", lr=0.05),
        batch_size=16,
        epochs=6,
        order=ExampleOrder(buckets=5, shortest_first=True),
        out=str(tmp_path / "run"),
    )
    (scale,) = fitted.network.parameters()
    assert scale.item() == pytest.approx(1, abs=0.05)
    assert "5 buckets of examples of similar length" in capsys.readouterr().out
    assert '"order.buckets": 5' in (tmp_path / "run" / "run.json").read_text()
