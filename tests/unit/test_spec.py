"""TensorSpec: what it declares, what it takes and what it refuses, with the sentence that says why."""

import json
import struct
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError, BundleCorrupt, InvalidInput
from penstock.core.spec import PROTOCOL_DATATYPES, TensorSpec

GREY = TensorSpec(dtype="uint8", shape=(2, 3), meaning="grey image", units="0..255", name="image")


def spec(dtype: str, shape: tuple[int, ...] = (2,)) -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=shape, meaning="numbers", name="x")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"dtype": "bfloat16"}, "dtype 'bfloat16'; it must be one of bool, uint8"),
        ({"dtype": "<f4"}, "dtype '<f4'"),
        ({"shape": [2, 3]}, r"shape \[2, 3\]; it must be a tuple"),
        ({"shape": 3}, "shape 3; it must be a tuple"),
        ({"shape": (2, 0)}, r"shape \(2, 0\)"),
        ({"shape": (2, -1)}, r"shape \(2, -1\)"),
        ({"shape": (True,)}, r"shape \(True,\)"),
        ({"shape": (2.0,)}, r"shape \(2.0,\)"),
        ({"labels": ("a",)}, r"1 label for shape \(2, 3\)"),
        ({"labels": "abc"}, "labels 'abc'; they must be a tuple"),
        ({"labels": (1, 2, 3)}, "they must be a tuple of names"),
        ({"shape": (), "labels": ("a",)}, "1 label "),
        ({"shape": (2, Dim("k", 3, 0)), "labels": ("a", "b", "c")}, "labels for 'k', whose length varies; leave"),
    ],
)
def test_a_wrong_declaration_says_what_is_right(fields: dict[str, Any], sentence: str) -> None:
    right: dict[str, Any] = {"dtype": "uint8", "shape": (2, 3), "meaning": "grey image"}
    with pytest.raises(ApplicationError, match=sentence):
        TensorSpec(**(right | fields))


def test_sizes() -> None:
    assert (GREY.size, GREY.nbytes, GREY.describe()) == (6, 6, "uint8[2, 3]")
    assert (spec("float64", ()).size, spec("float64", ()).nbytes) == (1, 8)


@pytest.mark.parametrize("dtype", PROTOCOL_DATATYPES)
def test_bytes_numbers_and_arrays_agree(dtype: str) -> None:
    array = np.array([0, 1], dtype)
    taken = spec(dtype)
    assert taken.check(array) is array
    for other in (taken.from_bytes(array.tobytes()), taken.from_numbers(array.tolist()), taken.cast(array)):
        assert other.dtype == array.dtype
        assert other.tolist() == array.tolist()
    assert taken.protocol_datatype == PROTOCOL_DATATYPES[dtype]


def test_every_kind_of_view_is_counted_in_bytes() -> None:
    words = memoryview(struct.pack("<2f", 0, 1)).cast("i")
    assert spec("float32").from_bytes(words).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        ([[1, 2, 3], [4, 5, 6]], "image is a list; it must be an array, uint8"),
        (np.zeros((3, 2), np.uint8), r"image is uint8\[3, 2\]; it must be uint8\[2, 3\] \(grey image\)"),
        (np.zeros((2, 3), np.int8), r"image is int8\[2, 3\]"),
    ],
)
def test_another_array_is_refused(array: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        GREY.check(array)


def test_the_other_byte_order_is_refused() -> None:
    with pytest.raises(InvalidInput, match=">f4"):
        spec("float32").check(np.zeros(2, ">f4"))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_on_every_way_in(dtype: str, bad: float) -> None:
    array = np.array([0, bad], dtype)
    taken = spec(dtype)
    for enter in (
        lambda: taken.check(array),
        lambda: taken.from_bytes(array.tobytes()),
        lambda: taken.from_numbers([0, bad]),
        lambda: taken.cast(array),
        lambda: taken.cast(array.astype("float16" if dtype != "float16" else "float64")),
    ):
        with pytest.raises(InvalidInput, match="NaN or infinity"):
            enter()


def test_bytes_of_another_count_or_kind_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"5 bytes; uint8\[2, 3\] takes exactly 6 raw bytes"):
        GREY.from_bytes(b"12345")
    with pytest.raises(InvalidInput, match="a byte above 1"):
        spec("bool").from_bytes(b"\x01\x02")
    assert {dtype for dtype in PROTOCOL_DATATYPES if spec(dtype).takes_any_bytes} == {
        dtype for dtype in PROTOCOL_DATATYPES if "int" in dtype
    }


@pytest.mark.parametrize(
    ("dtype", "numbers", "sentence"),
    [
        ("uint8", [1], "x has a list of 1 where a list of 2 belongs; it must be nested lists of shape"),
        ("uint8", [[1], [2]], "x has a list of 1 where a number belongs"),
        ("uint8", [1, [2]], "where a number belongs"),
        ("uint8", 7, "x has an integer where a list of 2 belongs"),
        ("uint8", "12", "x has a string where a list of 2 belongs"),
        ("uint8", {"0": 1, "1": 2}, "x has an object where"),
        ("uint8", None, "x has null where"),
        ("uint8", [1, None], r"x holds null, not only numbers; it must be uint8\[2\]"),
        ("uint8", [1, "2"], "x holds a string, not only numbers"),
        ("float32", [1, "nan"], "x holds a string"),
        ("float32", [1, 1j], "x holds a complex"),
        ("float32", [1, {}], "x holds an object"),
        ("uint8", [1, 256], "x holds 256; it must be a whole number from 0 to 255"),
        ("uint8", [1, -1], "x holds -1; it must be"),
        ("uint8", [1, 1.5], "x holds 1.5; it must be"),
        ("uint8", [1, float("nan")], "x holds nan; it must be"),
        ("uint8", [1, float("inf")], "x holds inf; it must be"),
        ("int64", [1, 2**63], r"x holds 9.223e\+18; it must be a whole number from -9,223,372,036,854,775,808 to"),
        ("uint64", [1, 2**64], r"x holds 1.845e\+19; it must be"),
        ("uint64", [1, 2.0**64], r"x holds 1.845e\+19; it must be"),
        ("int32", [1, True], r"x holds a bool, not only numbers; it must be int32\[2\]"),
        ("int32", [True, False], "x holds a bool"),
        ("float32", [1.5, True], "x holds a bool"),
        ("bool", [1, 2], "x holds 2; it must be 0 or 1"),
        ("float32", [1, -(10**400)], r"x holds -inf; it must be a finite number up to 3.4e\+38"),
        ("float16", [1, 65520], "x holds 65520; it must be a finite number up to 65,504"),
        ("float32", [1, 1e39], r"x holds 1.000e\+39; it must be"),
    ],
)
def test_numbers_that_are_not_a_chunk_are_refused(dtype: str, numbers: object, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        spec(dtype).from_numbers(numbers)


def test_a_tensor_of_bools_takes_booleans_and_numbers() -> None:
    assert spec("bool").from_numbers([True, 0]).tolist() == [True, False]


def test_wide_whole_numbers_are_exact_beside_fractions_and_larger_ones() -> None:
    assert spec("uint64").from_numbers([2**63 + 1, 1]).tolist() == [2**63 + 1, 1]
    assert spec("int64").from_numbers([2**53 + 1, 1.0]).tolist() == [2**53 + 1, 1]


def test_an_object_is_no_scalar() -> None:
    mode = TensorSpec(dtype="int64", shape=(), meaning="a mode", name="mode")
    with pytest.raises(InvalidInput) as raised:
        mode.from_numbers({"mode": 0})
    assert str(raised.value) == "mode is an object; send the value itself, int64[], not an object by name."


def test_a_scalar_is_a_number_without_lists() -> None:
    assert spec("int16", ()).from_numbers(-7).shape == ()
    with pytest.raises(InvalidInput, match="it must be one number"):
        spec("int16", ()).from_numbers([-7])


def test_rows_are_read_nested_or_flat() -> None:
    nested = [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]]
    assert GREY.from_rows(nested, 2).tolist() == nested
    assert GREY.from_rows(list(range(1, 13)), 2).tolist() == nested
    assert spec("uint8", (1,)).from_rows([[5], [6]], 2).tolist() == [[5], [6]]
    assert GREY.from_rows([], 0).shape == (0, 2, 3)
    for wrong in (nested, list(range(12)), "123456", None):
        with pytest.raises(InvalidInput, match="belongs"):
            GREY.from_rows(wrong, 1)


@pytest.mark.parametrize("wide", [np.array(["1", "2"]), np.array([1, None]), np.array([1j, 2]), np.zeros(2, "M8[s]")])
def test_an_array_of_other_things_is_not_cast(wide: Any) -> None:
    with pytest.raises(InvalidInput, match="not only numbers"):
        spec("uint8").cast(wide)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        ("uint64", np.array([2.0**64, 0])),
        ("int64", np.array([2.0**63, 0])),
        ("int64", np.array([2**63, 0], np.uint64)),
        ("uint8", np.array([256, 0])),
        ("uint8", np.array([np.nan, 0])),
        ("uint8", np.array([np.inf, 0], np.float16)),
        ("int8", np.array([0.5, 0])),
        ("bool", np.array([2, 0])),
    ],
)
def test_a_number_that_would_change_is_not_cast(dtype: str, wide: Any) -> None:
    with pytest.raises(InvalidInput, match=r"x holds \S+; it must be"):
        spec(dtype).cast(wide)


def test_one_long_string_among_many_numbers_costs_no_memory() -> None:
    # As one array of strings these would be 40 GB.
    numbers: list[object] = ["9" * 1_000_000, *range(9_999)]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="holds a string"):
            spec("float32", (10_000,)).from_numbers(numbers)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_deep_lists_are_refused_at_once() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    start_s = time.process_time()
    with pytest.raises(InvalidInput, match="belongs"):
        GREY.from_numbers(deep)
    with pytest.raises(InvalidInput, match="where a number belongs"):
        spec("uint8", (1,) * 8).from_numbers(deep)
    assert time.process_time() - start_s < 0.5
    while isinstance(deep, list):
        deep = deep.pop()


def test_the_same_list_in_many_places_is_not_unfolded() -> None:
    bomb: list[Any] = [0] * 10
    for _ in range(60):
        bomb = [bomb] * 10
    with pytest.raises(InvalidInput, match="belongs"):
        spec("uint8", (10, 10, 10)).from_numbers(bomb)


def test_json_and_back() -> None:
    labelled = TensorSpec(dtype="float32", shape=(2,), meaning="m", units="u", labels=("a", "b"), name="n")
    assert TensorSpec.from_json(json.loads(json.dumps(labelled.to_json()))) == labelled


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "uint8"},
        GREY.to_json() | {"shape": 3},
        GREY.to_json() | {"shape": "23"},
        GREY.to_json() | {"dtype": "uint9"},
        GREY.to_json() | {"colour": "red"},
        {key: value for key, value in GREY.to_json().items() if key != "meaning"},
        None,
        [],
    ],
)
def test_an_unreadable_spec_is_corrupt(fields: Any) -> None:
    with pytest.raises(BundleCorrupt, match="tensor spec is not readable"):
        TensorSpec.from_json(fields)


@pytest.mark.parametrize(
    ("array", "found"),
    [(np.array(["one", "two"]), "text"), (np.array(b"a file"), "bytes"), (np.array([{}, {}]), "Python objects")],
)
def test_what_an_array_holds_is_said_in_words(array: Any, found: str) -> None:
    with pytest.raises(InvalidInput, match=f"^x holds {found}, not only numbers"):
        spec("uint8").cast(array)


def test_limits_wider_than_the_dtype_are_not_those_that_a_number_is_refused_by() -> None:
    numbers = replace(spec("uint8"), limits=(-5, 300))
    with pytest.raises(InvalidInput, match=r"holds 256; it must be a whole number from 0 to 255"):
        numbers.from_numbers([256, 1])


def test_the_limits_of_a_spec_are_those_that_a_whole_number_is_refused_by() -> None:
    tokens = replace(spec("int64"), limits=(0, 99))
    for numbers in ([1, 1.5], np.array([1, 1.5])):
        with pytest.raises(InvalidInput, match=r"^x holds 1.5; it must be a whole number from 0 to 99\.$"):
            tokens.cast(numbers) if isinstance(numbers, np.ndarray) else tokens.from_numbers(numbers)
