"""Examples with several named tensors, of varying length: their records, batches and refusals."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock import Application, Dim, TensorSpec
from penstock.core.errors import BadExample, TrainError
from penstock.core.spec import Array
from penstock.train.data.augment import mixup, random_flip
from penstock.train.data.collate import joined_tensors
from penstock.train.data.examples import ArraySet, Examples
from penstock.train.data.loader import ReadingLoader, first_batch, first_inputs
from penstock.train.data.readers import read_piece
from penstock.train.data.resident import Resident, ResidentLoader
from penstock.train.data.sampler import one_pass
from penstock.train.data.trees import leaves, mapped, split
from penstock.train.recipe import Data
from penstock.train.run_folder import bound, spread_rows
from tests.support.trees import APP, RECORD, texts

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=20)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Found:
    scores: Any
    other: Any = None


class Outputs(OrderedDict[str, Any]):
    """A mapping of another class."""


def test_a_function_of_a_tree_keeps_its_form() -> None:
    tree = {"a": (1, [2, Pair(3, None)]), "b": Found(4), "c": Outputs(d=5)}
    doubled = mapped(lambda number: number * 2, tree)
    assert doubled == {"a": (2, [4, Pair(6, None)]), "b": Found(8), "c": {"d": 10}}
    assert leaves(tree) == [1, 2, 3, 4, 5]
    parts = split({"x": torch.arange(6), "y": (torch.arange(6.0),)}, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]


def test_tensors_of_several_batches_are_padded_to_the_longest() -> None:
    batches = [(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64)), (torch.ones(1, 5), torch.ones(1, 5).long())]
    floats, labels = joined_tensors(batches, fills=True)
    assert floats[0].tolist() == [1, 1, 1, 0, 0]
    assert labels[1].tolist() == [1, 1, 1, -100, -100]
    assert joined_tensors(batches, fills=False)[1][0].tolist() == [1, 1, 1, 0, 0]


def test_small_labels_widen_where_they_are_padded() -> None:
    batches = [torch.ones(1, size, dtype=torch.uint8) for size in (1, 2)]
    assert joined_tensors(batches, fills=True).tolist() == [[1, -100], [1, 1]]


# The first example warms torch up.
@settings(deadline=None)
@given(sizes=lengths, to_max=st.booleans())
def test_batches_hold_every_example_and_zeros_after_it(sizes: list[int], to_max: bool) -> None:
    examples = texts(sizes, tags=True).bound(RECORD)
    batches = list(ReadingLoader(examples, one_pass(len(sizes), 4), to_max=to_max))
    resident = Resident(examples, torch.device("cpu"), 1)
    kept = list(ResidentLoader(resident, one_pass(len(sizes), 4), to_max=to_max))
    row = 0
    for (inputs, targets), same in zip(batches, kept, strict=True):
        for one, other in zip(leaves((inputs, targets)), leaves(tuple(same)), strict=True):
            assert torch.equal(one, other)
        count = len(targets["label"])
        longest = 9 if to_max else max(sizes[row : row + count])
        assert inputs["ids"].shape == inputs["mask"].shape == targets["tags"].shape == (count, longest)
        assert inputs["tokens"].tolist() == sizes[row : row + count]
        for place, size in enumerate(inputs["tokens"].tolist()):
            assert inputs["ids"][place, :size].tolist() == examples.inputs["ids"][row + place].tolist()
            assert not inputs["ids"][place, size:].any()
            assert not inputs["mask"][place, size:].any()
            assert (targets["tags"][place, size:] == -100).all()
        row += count


def test_lengths_are_found_and_named_after_their_first_tensor() -> None:
    boxes = [np.zeros((count, 4), np.float32) for count in (1, 3)]
    found = ArraySet(
        inputs={"ids": [[1, 2], [3]], "mask": [[1.0, 1.0], [1.0]], "boxes": boxes, "flag": [0, 1]},
        targets=(np.zeros(2), [np.zeros(2), np.zeros(1)], [[1], [2, 3, 4]]),
    )
    assert found.record is not None
    assert found.record.describe() == (
        "ids: int64[ids_length<=2], mask: float64[ids_length<=2], boxes: float32[boxes_length<=3, 4], flag: int64[]"
    )
    assert found.target_axes == ((), ("ids_length",), ("boxes_length",))
    inputs, targets = first_batch(found, 1)
    assert {name: list(part.shape) for name, part in inputs.items()} == {
        "ids": [1, 2], "mask": [1, 2], "boxes": [1, 1, 4], "flag": [1], "ids_length": [1], "boxes_length": [1]
    }  # fmt: skip
    assert [list(part.shape) for part in targets] == [[1], [1, 2], [1, 1]]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"ids": [[1, 2]]}, "'mask' is missing"),
        ({"ids": [[1, 2]], "mask": [[1, 1]], "more": [[1, 1]]}, "There is no input 'more'"),
        ({"ids": [[1, 2]], "mask": [[1]]}, r"'mask' of example 0 has the shape \[1\].*another input has 2"),
        ({"ids": [[1, 10]], "mask": [[1, 1]]}, "holds 10; it must be from 0 to 9"),
        ({"ids": [[1, 0.5]], "mask": [[1, 1]]}, "holds 0.5; it must be"),
        ({"ids": [[1] * 10], "mask": [[1] * 10]}, r"'ids' of example 0 has the shape \[10\].*from 1 to 9 tokens\.$"),
        ({"ids": [[[1]]], "mask": [[[1]]]}, "'ids' of the examples has 2 dimensions"),
        ({"ids": [[]], "mask": [[]]}, "from 1 to 9 tokens"),
        (np.zeros((1, 3)), "have no names"),
    ],
)
def test_examples_that_are_not_the_applications_inputs_are_refused(inputs: Any, said: str) -> None:
    examples = ArraySet(inputs=inputs, targets=np.zeros(1))
    with pytest.raises(TrainError, match=said):
        bound(APP, Data(train=examples, validation=examples))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inputs": {}, "targets": np.zeros(1)}, "empty dictionary"),
        ({"inputs": {"a": [[1], [2]]}, "targets": np.zeros(1)}, "2 inputs and 1 targets"),
        ({"inputs": {"a": [[1], [2]], "b": [[1]]}, "targets": np.zeros(2)}, "2 and 1 examples in different arrays"),
        ({"inputs": {"a": [[1], [2]]}, "targets": (np.zeros(2), np.zeros(3))}, "2 and 3 examples"),
        ({"inputs": {"a": [[1], [2]]}, "targets": {}}, "targets of the data are empty"),
        ({"inputs": {"a": [[1], [[2]]]}, "targets": np.zeros(2)}, "1, 2. dimensions"),
        ({"inputs": {"a": [["x"]]}, "targets": np.zeros(1)}, "give numbers"),
        ({"inputs": {"a": "text"}, "targets": np.zeros(1)}, "give an array of numbers"),
        ({"inputs": {"a": [[[1], [2, 3]]]}, "targets": np.zeros(1)}, "no array"),
        ({"inputs": {"a-b": [[1]]}, "targets": np.zeros(1)}, "the name 'a-b'; give it a Python identifier"),
        ({"inputs": {"a": []}, "targets": np.zeros(0)}, "at least one"),
    ],
)
def test_arrays_that_make_no_examples_are_refused(given: Any, said: str) -> None:
    with pytest.raises(TrainError, match=said):
        ArraySet(**given)


def test_one_tensor_of_varying_length_needs_no_name() -> None:
    app = Application(
        name="sums",
        input=TensorSpec(dtype="float32", shape=(Dim("n", max=4),), meaning="numbers"),
        output=TensorSpec(dtype="float32", shape=(1,), meaning="their sum"),
        model=nn.Identity,
    )
    for inputs in ([[1.0, 2.0], [3.0]], {"input": [[1.0, 2.0], [3.0]]}):
        examples = ArraySet(inputs=inputs, targets=np.zeros(2))
        made = bound(app, Data(train=examples, validation=examples)).train
        assert first_batch(made, 2).inputs["input"].tolist() == [[1, 2], [3, 0]]
    whole = ArraySet(inputs=np.ones((2, 3), np.float32), targets=np.zeros(2))
    made = bound(app, Data(train=whole, validation=whole)).train
    assert first_batch(made, 2).inputs["n"].tolist() == [3, 3]


def test_named_examples_of_an_application_of_one_tensor_are_refused() -> None:
    spec = TensorSpec(dtype="float32", shape=(3,), meaning="numbers")
    app = Application(name="plain", input=spec, output=spec, model=nn.Identity)
    examples = ArraySet(inputs={"input": np.zeros((1, 3), np.float32)}, targets=np.zeros(1))
    with pytest.raises(TrainError, match="declares one tensor of fixed size"):
        bound(app, Data(train=examples, validation=examples))


class Written(Examples):
    """Examples of a user, with one damaged example."""

    def __init__(self, bad: int | None = None) -> None:
        self.declare(APP.input)
        self.target_axes = {"label": (), "tags": ("tokens",)}
        self.bad = bad

    def __len__(self) -> int:
        return 6

    def read(self, indices_B: Array, seeds_B: Array, inputs_B: Array) -> Any:
        if self.bad in indices_B:
            raise BadExample("it is damaged.", index=self.bad or 0, name="b")
        tags = np.full((len(indices_B), 9), -100)
        for row, index in enumerate(indices_B.tolist()):
            ids = np.arange(index + 1)
            inputs_B[row] = RECORD.check({"ids": ids, "mask": np.ones(index + 1, np.float32)})
            tags[row, : index + 1] = ids % 2
        return {"label": indices_B % 2, "tags": tags}


def test_examples_of_a_user_fill_records() -> None:
    inputs, targets = first_batch(Written(), 3)
    assert inputs["ids"].tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2]]
    assert targets["tags"].tolist() == [[0, -100, -100], [0, 1, -100], [0, 1, 0]]
    written = Written()
    assert bound(APP, Data(train=written, validation=written)).train is written
    piece = read_piece(Written(bad=1), next(one_pass(6, 3)), written.empty(3), "leave out")
    assert piece.targets_P["label"].tolist() == [0, 0]
    assert first_inputs(Written(bad=1), 3, on_bad="skip")["tokens"].tolist()[0] == 1


def test_examples_that_do_not_declare_their_tensors_are_refused() -> None:
    class Plain(Written):
        def __init__(self) -> None:
            self.input_dtype, self.input_shape = np.dtype("float32"), (3,)

    with pytest.raises(TrainError, match=r"Plain give float32\[3\].*declare\(app.input\)"):
        bound(APP, Data(train=Plain(), validation=Plain()))


def test_golden_examples_have_the_shortest_and_the_longest() -> None:
    sizes = np.arange(1000) % 77
    rows = spread_rows([sizes, sizes[::-1]], 1000, 32)
    assert len(rows) == len(set(rows)) == 32
    assert {0, 76} <= set(sizes[rows].tolist())
    assert spread_rows([sizes], 3, 32) == [0, 1, 2]
    assert spread_rows([], 40, 32) == list(range(32))


def test_training_and_validation_become_one_record() -> None:
    def made(sizes_a: list[int], sizes_b: list[int], dtype: Any = np.float32) -> ArraySet:
        rows = {"a": [np.ones(size, np.int64) for size in sizes_a], "b": [np.ones(size, dtype) for size in sizes_b]}
        return ArraySet(inputs=rows, targets=np.zeros(len(sizes_a)))

    train, same = made([1, 2], [2, 1]), made([4, 3], [4, 3], np.int64)
    both = train.joint_record(same)
    assert both is not None
    assert both.describe() == "a: int64[a_length<=4], b: float32[b_length<=4]"
    assert train.bound(both).record == same.bound(both).record == both
    turned = ArraySet(inputs=dict(reversed(same.inputs.items())), targets=same.targets)
    assert train.joint_record(turned) == both
    declared = texts([2, 3]).bound(RECORD)
    assert texts([9]).joint_record(declared) == declared.joint_record(texts([9])) == RECORD


def test_augmentations_of_one_tensor_refuse_several() -> None:
    for augment in (mixup(2), random_flip()):
        with pytest.raises(TrainError, match="changes one tensor"):
            augment({"a": torch.zeros(2)}, torch.zeros(2), torch.Generator())
