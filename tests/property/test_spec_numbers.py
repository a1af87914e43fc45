"""Numbers from strangers: what is accepted is unchanged, everything else is refused in one sentence, and quickly."""

import math
import struct
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.core.errors import InvalidInput
from penstock.core.spec import PROTOCOL_DATATYPES, TensorSpec

DTYPES = st.sampled_from(sorted(PROTOCOL_DATATYPES))
SHAPES = st.lists(st.integers(1, 3), max_size=3).map(tuple)
WHOLE = st.one_of(
    st.integers(-300, 300),
    st.sampled_from(
        [sign * 2**power + off for sign in (1, -1) for power in (8, 16, 31, 53, 63, 64) for off in (-1, 0, 1)]
    ),
    st.integers(),
)
NUMBERS = st.one_of(WHOLE, st.booleans(), st.floats(), st.integers(-300, 300).map(float))
JUNK = st.recursive(
    st.one_of(st.none(), st.text(max_size=3), NUMBERS, st.binary(max_size=2)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    max_leaves=12,
)


def nested(flat: list[Any], shape: tuple[int, ...]) -> Any:
    """A flat list as nested lists of a shape."""
    for size in reversed(shape[1:]):
        flat = [flat[start : start + size] for start in range(0, len(flat), size)]
    return flat if shape else flat[0]


def exactly(dtype: str, number: Any) -> bool:
    """Whether a dtype can hold a number: whole numbers exactly, fractions rounded but finite."""
    kind = np.dtype(dtype).kind
    if kind != "f":
        low, high = (0, 1) if kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        return math.isfinite(number) and number == int(number) and low <= number <= high
    try:
        wide = float(number)
        struct.pack({"float16": "<e", "float32": "<f", "float64": "<d"}[dtype], wide)
    except OverflowError:
        return False
    return math.isfinite(wide)


@given(data=st.data(), dtype=DTYPES, shape=SHAPES)
def test_numbers_are_taken_unchanged_or_refused(data: st.DataObject, dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec(dtype=dtype, shape=shape, meaning="numbers")
    flat = data.draw(st.lists(NUMBERS, min_size=spec.size, max_size=spec.size))
    good = all(exactly(dtype, number) and (dtype == "bool" or type(number) is not bool) for number in flat)
    try:
        taken = spec.from_numbers(nested(flat, shape))
    except InvalidInput:
        assert not good
        return
    assert good
    assert (taken.dtype, taken.shape) == (spec.numpy_dtype, shape)
    if spec.takes_nan:
        # Twice rounded, through float64, may be one last bit away from once.
        assert np.allclose(taken.ravel(), np.array(list(map(float, flat))), rtol=2e-3, atol=1e-7)
        assert np.isfinite(taken).all()
    else:
        assert taken.ravel().tolist() == flat
    assert np.array_equal(spec.from_rows([nested(flat, shape)], 1)[0], taken)
    assert np.array_equal(spec.from_rows(flat, 1)[0], taken)


@given(junk=JUNK, dtype=DTYPES, shape=SHAPES)
def test_anything_else_is_refused_in_a_sentence(junk: Any, dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec(dtype=dtype, shape=shape, meaning="numbers", name="input")
    try:
        taken = spec.from_numbers(junk)
    except InvalidInput as error:
        said = str(error)
    else:
        assert taken.shape == shape
        assert spec.check(taken) is taken
        return
    assert said.startswith(("input h", "input is an object"))
    assert said.endswith(".")
    assert len(said) < 300


@given(data=st.data(), dtype=DTYPES, given_dtype=DTYPES)
def test_an_array_is_cast_unchanged_or_refused(data: st.DataObject, dtype: str, given_dtype: str) -> None:
    spec = TensorSpec(dtype=dtype, shape=(3,), meaning="numbers")
    wide = data.draw(hnp.arrays(given_dtype, 3))
    good = all(exactly(dtype, number) for number in wide.tolist())
    try:
        narrow = spec.cast(wide)
    except InvalidInput:
        assert not good
    else:
        assert good
        assert narrow.dtype == spec.numpy_dtype
        if not spec.takes_nan:
            assert narrow.tolist() == wide.tolist()


@given(data=st.data(), dtype=DTYPES, shape=SHAPES)
def test_bytes_are_taken_unchanged_or_refused(data: st.DataObject, dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec(dtype=dtype, shape=shape, meaning="numbers")
    body = data.draw(st.one_of(st.binary(max_size=40), st.binary(min_size=spec.nbytes, max_size=spec.nbytes)))
    try:
        taken = spec.from_bytes(body)
    except InvalidInput:
        assert len(body) != spec.nbytes or not spec.takes_any_bytes
    else:
        assert taken.tobytes() == body
        assert spec.check(taken) is taken
