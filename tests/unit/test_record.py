"""Records: several tensors, or tensors of varying length, as one element of an array."""

import json
import pickle
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError, InvalidInput
from penstock.core.record import RecordSpec, chunk_spec, given_by_name
from penstock.core.spec import TensorSpec

TOKENS = Dim("tokens", max=9)
BOXES = Dim("boxes", max=4, min=0)
IDS = TensorSpec(name="ids", dtype="int64", shape=(TOKENS,), meaning="token ids", limits=(0, 99))
MASK = TensorSpec(name="mask", dtype="bool", shape=(TOKENS,), meaning="where there is a token")
PLANES = TensorSpec(name="planes", dtype="float32", shape=(2, TOKENS, BOXES), meaning="something for each pair")
TEXT = RecordSpec((IDS, MASK))
PAIRS = RecordSpec((IDS, PLANES))


def text(tokens: int) -> dict[str, Any]:
    return {"ids": list(range(tokens)), "mask": [True] * tokens}


def test_a_record_comes_back_without_padding() -> None:
    record = TEXT.from_numbers(text(3))
    assert record.shape == ()
    assert record["tokens"] == 3
    assert TEXT.to_numbers(record) == text(3)
    assert TEXT.to_numbers(TEXT.check(TEXT.unpack(record))) == text(3)
    assert TEXT.check(record) is not None
    assert TEXT.nbytes == TEXT.numpy_dtype.itemsize == TEXT.empty(3).itemsize


def test_a_batch_is_padded_to_its_longest_row_with_zeros() -> None:
    records = TEXT.of_many([text(2), text(5), text(1)])
    batch = TEXT.batch(records)
    assert batch["ids"].shape == batch["mask"].shape == (3, 5)
    assert batch["ids"].tolist() == [[0, 1, 0, 0, 0], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    assert batch["mask"].sum(1).tolist() == [2, 5, 1]
    assert TEXT.batch(records, {"tokens": 7})["ids"].shape == (3, 7)
    assert all(array.flags.c_contiguous for array in batch.values())


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_poisoned_padding_does_not_show(seed: int, count: int) -> None:
    records = PAIRS.random(np.random.default_rng(seed), count)
    before = PAIRS.batch(records)
    lengths = PAIRS.lengths(records)
    poisoned = records.copy()
    for row in range(count):
        poisoned["ids"][row, lengths["tokens"][row] :] = -7
        poisoned["planes"][row, :, lengths["tokens"][row] :] = np.nan
        poisoned["planes"][row, :, :, lengths["boxes"][row] :] = np.nan
    after = PAIRS.batch(poisoned)
    assert {name: array.tobytes() for name, array in after.items()} == {
        name: array.tobytes() for name, array in before.items()
    }
    assert PAIRS.finite(poisoned).all()
    PAIRS.check_numbers(poisoned)
    assert PAIRS.records(after, lengths).tobytes() == PAIRS.records(before, lengths).tobytes() == records.tobytes()
    one = int(np.random.default_rng(seed).integers(count))
    assert {name: array.tolist() for name, array in PAIRS.unpack(poisoned[one]).items()} == PAIRS.to_numbers(
        records[one]
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "The input 'ids' is missing; send 'ids', 'mask' and, optionally, 'seed', 'most'."),
        ([], "The input is a list; it must have 'ids', 'mask' and, optionally, 'seed', 'most' by name."),
    ],
)
def test_inputs_with_a_default_are_called_optional(given: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        given_by_name(["ids", "seed", "mask", "most"], given, ["seed", "most"])
    assert str(raised.value) == sentence


def test_a_valid_number_that_is_not_finite_is_found() -> None:
    records = PAIRS.random(np.random.default_rng(0), 3)
    records["tokens"], records["boxes"] = 2, [1, 2, 0]
    records["planes"][1, 0, 1, 1] = np.nan
    assert PAIRS.finite(records).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ({"ids": [1]}, "The input 'mask' is missing; send 'ids', 'mask'"),
        (text(1) | {"more": 1}, "There is no input 'more'; there is 'ids', 'mask'"),
        ([1], "The input is a list; it must have 'ids', 'mask' by name"),
        (None, "The input is null"),
        (text(0), "ids has 0 tokens; it must have from 1 to 9"),
        (text(10), "ids has 10 tokens; it must have from 1 to 9"),
        (text(2) | {"mask": [True]}, "mask has 1 tokens and ids has 2; send both equally long"),
        (text(1) | {"ids": [[1]]}, r"ids has 2 dimensions, \[1, 1\]; it must be int64\[tokens<=9\]"),
        (text(1) | {"ids": 1}, "ids has 0 dimensions"),
        (text(1) | {"ids": None}, r"ids is null; it must be int64\[tokens<=9\]\."),
        (text(1) | {"ids": "one"}, r"ids is a string; it must be int64\[tokens<=9\]\."),
        (text(1) | {"ids": {"0": 1}}, r"ids is an object; it must be int64\[tokens<=9\]\."),
        (text(1) | {"ids": [100]}, "ids holds 100; it must be from 0 to 99"),
        (text(1) | {"ids": [-1]}, "ids holds -1; it must be from 0 to 99"),
        (text(1) | {"ids": ["a"]}, "ids holds a string, not only numbers"),
        (text(1) | {"ids": [1.5]}, "ids holds 1.5; it must be"),
        (text(1) | {"mask": [2]}, "mask holds 2; it must be 0 or 1"),
    ],
)
def test_what_does_not_fit_is_refused(numbers: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        TEXT.from_numbers(numbers)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"ids": [1], "mask": np.ones(1, np.bool_)}, "ids is a list; it must be an array"),
        ({"ids": np.ones(1, np.int32), "mask": np.ones(1, np.bool_)}, r"ids is int32\[1\]; it must be int64\[1\]"),
        (np.zeros(2, TEXT.numpy_dtype), "is an array"),
        (np.zeros((), TEXT.numpy_dtype), "a record's tokens are not from 1 to 9"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        TEXT.check(arrays)


def test_batches_by_name_become_records_and_fits_are_cast() -> None:
    records = TEXT.of_many({"ids": np.ones((2, 3), np.uint8), "mask": np.ones((2, 3), np.int64)})
    assert records["tokens"].tolist() == [3, 3]
    assert TEXT.of_many(records) is records
    with pytest.raises(InvalidInput, match=r"The batches have \[2, 3\] examples"):
        TEXT.of_many({"ids": np.ones((2, 3)), "mask": np.ones((3, 3))})


@pytest.mark.parametrize("examples", [5, None, "ab", {"ids": 1, "mask": 2}])
def test_what_are_no_examples_is_refused(examples: Any) -> None:
    with pytest.raises(InvalidInput, match="give a"):
        TEXT.of_many(examples)


@pytest.mark.parametrize(
    ("dtype", "limits"), [("int64", (1, 9)), ("uint8", (3, 300)), ("float32", (-9, -0.5)), ("int8", (0.5, 3.5))]
)
def test_padding_is_not_checked_against_limits(dtype: str, limits: tuple[float, float]) -> None:
    spec = RecordSpec((TensorSpec(name="a", dtype=dtype, shape=(TOKENS, 2), meaning="m", limits=limits),))
    records = spec.random(np.random.default_rng(0), 20)
    assert len(set(records["tokens"])) > 1
    assert spec.of_many(records) is records
    last = int(records["tokens"][4]) - 1
    records["a"][4, last, 1] = 0
    with pytest.raises(InvalidInput, match=r"a holds 0(\.0)?; it must be from"):
        spec.check_numbers(records)


def test_only_what_is_given_of_a_large_room_is_touched() -> None:
    spec = RecordSpec((TensorSpec(name="a", dtype="float32", shape=(Dim("frames", 4096), 128), meaning="m"),))
    touched: list[int] = []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.core.record._clear_padding", lambda array, *_: touched.append(array.nbytes))  # pyright: ignore
        spec.records({"a": np.ones((64, 1, 128), np.float32)}, {"frames": np.ones(64, np.int64)})
    assert touched == [64 * 128 * 4]


def test_an_empty_list_says_nothing_of_its_inner_sizes() -> None:
    each = TensorSpec(name="m", dtype="int64", shape=(BOXES, TOKENS), meaning="m")
    spec = RecordSpec((IDS, each))
    record = spec.from_numbers({"ids": [1, 2, 3], "m": []})
    assert (record["tokens"], record["boxes"]) == (3, 0)
    assert spec.unpack(record)["m"].shape == (0, 3)
    alone = RecordSpec((each,)).from_numbers({"m": []})
    assert (alone["tokens"], alone["boxes"]) == (1, 0)


def test_a_dimension_is_no_number_where_specs_are_compared() -> None:
    spec = TensorSpec(name="a", dtype="uint8", shape=(Dim("n", 4),), meaning="m")
    fixed = spec.at({"n": 4})
    assert spec.shape == fixed.shape == (4,)
    assert spec != fixed
    assert fixed == TensorSpec(name="a", dtype="uint8", shape=(4,), meaning="m")
    assert len({fixed, spec, spec.at({"n": 4})}) == 2
    assert RecordSpec((spec, IDS)) != RecordSpec((fixed, IDS))


def test_a_message_shows_the_beginning_of_a_shape() -> None:
    with pytest.raises(InvalidInput) as raised:
        TEXT.lengths_of({"ids": (1,) * 10_000})
    assert len(str(raised.value)) < 200


def test_raw_bytes_have_no_lengths() -> None:
    with pytest.raises(InvalidInput, match="send it as JSON by name"):
        TEXT.from_bytes(b"")


def test_one_tensor_of_fixed_size_is_its_own_chunk() -> None:
    fixed = TensorSpec(dtype="uint8", shape=(3,), meaning="m", name="x")
    assert chunk_spec([fixed]) is fixed
    assert chunk_spec([IDS]) == RecordSpec((IDS,))
    assert chunk_spec([fixed, IDS]) == RecordSpec((fixed, IDS))


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ((IDS, IDS), "has name 'ids'; give each a name of its own"),
        ((TensorSpec(dtype="uint8", shape=(TOKENS,), meaning="m", name="tokens"),), "has name 'tokens'"),
        ((TensorSpec(dtype="uint8", shape=(TOKENS,), meaning="m"),), "has name ''"),
        ((TensorSpec(dtype="uint8", shape=(TOKENS,), meaning="m", name="a-b"),), "has name 'a-b'; .* identifier"),
        ((TensorSpec(dtype="uint8", shape=(TOKENS,), meaning="m", name="class"),), "has name 'class'; .* identifier"),
        (
            (IDS, TensorSpec(dtype="uint8", shape=(Dim("tokens", 8),), meaning="m", name="x")),
            "Dim 'tokens' is declared as tokens<=9 and as tokens<=8",
        ),
    ],
)
def test_a_wrong_record_says_what_is_right(tensors: tuple[TensorSpec, ...], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        RecordSpec(tensors)


def test_a_dimension_is_its_largest_length_and_more() -> None:
    assert TOKENS == 9
    assert Dim("tokens", 9) == TOKENS
    assert Dim("tokens", 8) != TOKENS
    assert Dim("words", 9) != TOKENS
    assert Dim("tokens", 9, min=0) != TOKENS
    assert {TOKENS: 1}[TOKENS] == 1
    assert (TOKENS.name, TOKENS.max, TOKENS.min, repr(TOKENS)) == ("tokens", 9, 1, "tokens<=9")
    for copied in (deepcopy(TOKENS), pickle.loads(pickle.dumps(TOKENS))):
        assert type(copied) is Dim
        assert copied == TOKENS
    assert Dim.from_json(json.loads(json.dumps(TOKENS.to_json()))) == TOKENS


@pytest.mark.parametrize(
    "wrong", [("", 3), ("a b", 3), ("in", 3), (1, 3), ("t", 0), ("t", "3"), ("t", 3, 4), ("t", 3, -1), ("t", 2.5)]
)
def test_a_wrong_dimension_says_what_is_right(wrong: Any) -> None:
    with pytest.raises(ApplicationError, match="Dim "):
        Dim(*wrong)


def test_specs_with_dimensions_and_limits_come_back_from_json() -> None:
    for spec in (*PAIRS.tensors, MASK):
        assert TensorSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert IDS.at({"tokens": 3}).shape == (3,)
    assert MASK.describe() == "bool[tokens<=9]"


@pytest.mark.parametrize("limits", [(1, 0), (1,), "01", (None, 1), [0, 1], (0, float("inf")), (float("nan"), 1)])
def test_wrong_limits_say_what_is_right(limits: Any) -> None:
    with pytest.raises(ApplicationError, match="give the smallest and the largest number"):
        TensorSpec(dtype="uint8", shape=(), meaning="m", limits=limits)
