"""Specs: the dtype and shape of one array, read by decoding, the slot table, protocols and training."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from itertools import chain
from math import isfinite, prod
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError, InvalidInput
from penstock.core.json_record import JsonRecord
from penstock.core.wording.counted import counted
from penstock.core.wording.json_fault import json_kind, shown_number

Array = npt.NDArray[Any]

_NUMBERS = {int, float}
_BOOLS = {bool, *_NUMBERS}
_LISTS = {list, tuple}
# What arrays hold that are no numbers, by the kind of their dtype.
_ELEMENTS = {"U": "text", "S": "bytes", "O": "Python objects", "M": "times", "m": "times", "c": "complex numbers"}
_LARGEST = {"float16": " up to 65,504", "float32": " up to 3.4e+38"}

# The datatype names of the Open Inference Protocol, version 2.
_WHOLE = [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)]
PROTOCOL_DATATYPES = {
    name: name.upper().replace("FLOAT", "FP") for name in ("bool", *_WHOLE, "float16", "float32", "float64")
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec(JsonRecord):
    """Base of the specs of arrays.

    Args:
        dtype: A NumPy dtype name, one of bool, (u)int8..64, float16..64.
        shape: The shape of one array, None for a dimension of any size.
        meaning: Meaning of the numbers, in words.
        units: The unit of one number.
        name: The array's name in messages.
    """

    dtype: str
    shape: tuple[int | None, ...]
    meaning: str
    units: str = ""
    name: str

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as NumPy's (little-endian)."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def title(self) -> str:
        """The name in messages."""
        return self.name or "the array"

    def check_dtype(self) -> None:
        """Raise `ApplicationError` unless the dtype is one of the Open Inference Protocol."""
        if self.dtype not in PROTOCOL_DATATYPES:
            known = ", ".join(PROTOCOL_DATATYPES)
            raise ApplicationError(f"{type(self).__name__} has dtype {self.dtype!r}; it must be one of {known}.")

    @property
    def takes_nan(self) -> bool:
        """True for float dtypes, which must be checked for NaN and infinity."""
        return self.dtype.startswith("float")

    def describe(self) -> str:
        """`uint8[28, 28]` or `uint8[any, any, 4]`, for messages."""
        return f"{self.dtype}[{', '.join('any' if size is None else str(size) for size in self.shape)}]"

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """True if an array of this shape matches."""
        return shape == self.shape or (
            len(shape) == len(self.shape)
            and all(found > 0 and size in (None, found) for size, found in zip(self.shape, shape, strict=True))
        )

    def check(self, array: Array) -> Array:
        """Return the array if it is one of this spec.

        Raises:
            InvalidInput: Not an array, another dtype or shape, or a float that is NaN or infinite.
        """
        if not isinstance(array, np.ndarray):
            raise InvalidInput(f"{self.title} is a {type(array).__name__}; it must be an array, {self.describe()}.")
        if array.dtype != self.numpy_dtype or not self.accepts(array.shape):
            raise InvalidInput(
                f"{self.title} is {array.dtype}{list(array.shape)}; it must be {self.describe()} ({self.meaning})."
            )
        self.check_numbers(array)
        return array

    def check_numbers(self, array: Array) -> None:
        """Raise `InvalidInput` if a float of the array is NaN or infinite."""
        if self.takes_nan and not np.isfinite(array).all():
            raise InvalidInput(f"{self.title} holds NaN or infinity; every number must be finite.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec(Spec):
    """The dtype, shape, meaning and units of one tensor of input or output (without a batch dimension).

    Args:
        dtype: A NumPy dtype name, one of bool, (u)int8..64, float16..64.
        shape: The shape of one chunk, such as `(28, 28)` for height and width, with a `Dim` where the length varies.
        meaning: Meaning of the numbers, in words: `"grey image, 0 is black"`.
        units: The unit of one number: `"0..255"`, `"probability"`, `"int16 PCM at 16 kHz"`.
        labels: Names for the entries of the last dimension, which is of fixed size, for a classifier's classes.
        name: The tensor's name in the Open Inference Protocol and among the arguments of the network. An application
            gives it the key in `inputs` or `outputs`; in its short form, `"input"` or `"output"`.
        limits: The smallest and the largest number that is valid, such as `(0, 30521)` for token ids; None for all
            numbers of the dtype.
        default: The number that a request without this tensor has in all its places, such as a seed of 0; None if each
            request needs the tensor. For inputs of fixed size beside others.

    Raises:
        ApplicationError: The dtype is unknown, the shape is not a tuple of positive whole numbers, or the labels,
            limits or default do not fit.
    """

    unreadable = "a tensor spec is not readable ({}); write the bundle again."
    shape: tuple[int | Dim, ...]
    labels: tuple[str, ...] = ()
    name: str = ""
    limits: tuple[float, float] | None = None
    default: float | None = None

    def __post_init__(self) -> None:
        self.check_dtype()
        if not isinstance(self.shape, tuple) or not all(type(size) in (int, Dim) and size > 0 for size in self.shape):
            raise ApplicationError(
                f"TensorSpec has shape {self.shape!r}; it must be a tuple of whole numbers above 0, such as (28, 28)."
            )
        if not isinstance(self.name, str):
            raise ApplicationError(f"TensorSpec has name {self.name!r}; give the tensor a name, such as 'image'.")
        if not isinstance(self.labels, tuple) or not all(isinstance(label, str) for label in self.labels):
            raise ApplicationError(
                f"TensorSpec has labels {self.labels!r}; they must be a tuple of names, such as ('cat', 'dog')."
            )
        if self.labels and (not self.shape or len(self.labels) != self.shape[-1]):
            raise ApplicationError(
                f"{counted(len(self.labels), 'label')} for shape {self.shape}; give one for each entry of the last dim."
            )
        if self.labels and isinstance(self.shape[-1], Dim):
            raise ApplicationError(
                f"TensorSpec has labels for {self.shape[-1].name!r}, whose length varies; leave the labels out, or "
                "give the last dimension a fixed size."
            )
        self._check_limits()
        self._check_default()

    def _check_default(self) -> None:
        if self.default is None:
            return
        if self.dims:
            raise ApplicationError(
                f"TensorSpec {self.name!r} has a default and lengths that vary, {self.describe()}; leave the default "
                f"out, or give every dimension a fixed size."
            )
        try:
            if type(self.default) not in (int, float):
                raise InvalidInput("that is no number")
            self.cast(np.asarray(self.default))
        except InvalidInput as error:
            raise ApplicationError(
                f"TensorSpec {self.name!r} has default={self.default!r} ({error}); give a number that is valid input."
            ) from None

    @property
    def filled(self) -> Array:
        """The tensor of a request that gives none, where there is a default."""
        assert self.default is not None, self
        return np.full(self.shape, self.default, self.numpy_dtype)

    def _check_limits(self) -> None:
        limits = self.limits
        numbers = (
            isinstance(limits, tuple) and len(limits) == 2 and all(type(limit) in (int, float) for limit in limits)
        )
        if limits is None:
            return
        finite = numbers and all(type(limit) is int or isfinite(limit) for limit in limits)
        if not (finite and limits[0] <= limits[1]):
            raise ApplicationError(
                f"TensorSpec {self.name!r} has limits {limits!r}; give the smallest and the largest number, finite, "
                f"such as (0, 30521)."
            )

    def __eq__(self, other: object) -> bool:
        # A `Dim` equals its largest length in the shape of an array, but not here.
        return (
            isinstance(other, TensorSpec)
            and list(map(type, self.shape)) == list(map(type, other.shape))
            and all(getattr(self, field.name) == getattr(other, field.name) for field in fields(self))
        )

    @property
    def tensors(self) -> tuple["TensorSpec", ...]:
        """The tensor itself, as `RecordSpec.tensors`."""
        return (self,)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dimensions whose length varies."""
        return tuple(size for size in self.shape if isinstance(size, Dim))

    def at(self, lengths: Mapping[str, int]) -> Self:
        """Return the spec with fixed lengths of its named dimensions."""
        if not self.dims:
            return self
        # Not `replace`, which would refuse a length of 0.
        fixed = copy(self)
        shape = tuple(lengths[size.name] if isinstance(size, Dim) else size for size in self.shape)
        object.__setattr__(fixed, "shape", shape)
        return fixed

    @property
    def nbytes(self) -> int:
        """Bytes of one chunk."""
        return self.size * self.numpy_dtype.itemsize

    @property
    def size(self) -> int:
        """Numbers in one chunk."""
        return prod(self.shape)

    @property
    def protocol_datatype(self) -> str:
        """The Open Inference Protocol's name for the dtype, such as `FP32`."""
        return PROTOCOL_DATATYPES[self.dtype]

    @property
    def takes_any_bytes(self) -> bool:
        """True if raw bytes of the right count are always valid; floats can be NaN, and bools must be 0 or 1."""
        return self.numpy_dtype.kind in "iu" and self.limits is None

    def is_batch(self, array: Array, *, any_frames: bool = False) -> bool:
        """True if an array has the shape of one or more chunks, `[N, *shape]`.

        Args:
            array: The array.
            any_frames: The first dimension of a chunk may have any size, as in whole signals.
        """
        of_one = (*self.shape[:1], *array.shape[2:]) if any_frames else array.shape[1:]
        return array.ndim == 1 + len(self.shape) and of_one == self.shape and array.size > 0

    def check_numbers(self, array: Array) -> None:
        """Raise `InvalidInput` if a float of the array is NaN or infinite, or a number is beyond the limits."""
        super(TensorSpec, self).check_numbers(array)
        if self.limits is not None and array.size:
            low, high = self.limits
            beyond = array[(array < low) | (array > high)]
            if beyond.size:
                raise InvalidInput(f"{self.title} holds {beyond.flat[0]}; it must be from {low:,} to {high:,}.")

    def to_json(self) -> dict[str, Any]:
        """The spec as JSON values."""
        fields = super(TensorSpec, self).to_json()
        for name in ("limits", "default"):
            if fields[name] is None:
                # Left out, so that the hash is that of earlier bundles.
                del fields[name]
        return fields

    def check_raw(self, frames: bytes | memoryview) -> None:
        """Check some whole frames of a chunk, given as raw little-endian bytes.

        Raises:
            InvalidInput: A float that is NaN or infinite, or a bool that is neither 0 nor 1.
        """
        array = np.frombuffer(frames, self.numpy_dtype)
        if self.dtype == "bool" and (array.view(np.uint8) > 1).any():
            raise InvalidInput(f"{self.title} holds a byte above 1; each bool is one byte, 0 or 1.")
        self.check_numbers(array)

    def from_bytes(self, body: bytes | memoryview) -> Array:
        """Make one chunk from its raw little-endian bytes.

        Raises:
            InvalidInput: The wrong count of bytes, a float that is NaN or infinite, or a bool that is neither 0 nor 1.
        """
        count = memoryview(body).nbytes
        if count != self.nbytes:
            raise InvalidInput(
                f"The body has {count:,} bytes; {self.describe()} takes exactly {self.nbytes:,} raw bytes."
            )
        self.check_raw(body)
        return np.frombuffer(body, self.numpy_dtype).reshape(self.shape)

    def from_numbers(self, numbers: object) -> Array:
        """Make one chunk from nested lists of numbers, as in JSON; a tensor of bools takes `true` and `false` too.

        Raises:
            InvalidInput: Not numbers, ragged, another shape, out of the dtype's range, or fractions for whole numbers.
        """
        return self._from_flat(self._flat(numbers, self.shape)).reshape(self.shape)

    def from_rows(self, numbers: object, rows: int) -> Array:
        """Make several chunks, `[rows, *shape]`, from nested or flat lists of numbers.

        Raises:
            InvalidInput: As `from_numbers`.
        """
        flat = isinstance(numbers, list) and not set(map(type, numbers)) & _LISTS
        shape = (rows * self.size,) if flat else (rows, *self.shape)
        return self._from_flat(self._flat(numbers, shape)).reshape(rows, *self.shape)

    def cast(self, wide: Array) -> Array:
        """Convert numbers of another dtype to this spec's dtype, if none of them changes (floats may round).

        Raises:
            InvalidInput: Not numbers, or one that does not fit the dtype.
        """
        if wide.dtype.kind not in "biuf":
            raise self._not_numbers(_ELEMENTS.get(wide.dtype.kind, str(wide.dtype)))
        if wide.dtype == self.numpy_dtype:
            self.check_numbers(wide)
            return wide
        if wide.dtype.kind == "f" and self.numpy_dtype.kind in "iu":
            # The result of converting a float out of range depends on the processor.
            limits = np.iinfo(self.numpy_dtype)
            with np.errstate(over="ignore"):
                fits = (wide >= float(limits.min)) & (wide < float(limits.max + 1))
            if not fits.all():
                raise self._does_not_fit(wide[~fits].flat[0])
        with np.errstate(over="ignore"):
            narrow = wide.astype(self.numpy_dtype)
        self.check_numbers(wide)
        if self.takes_nan and not (fits := np.isfinite(narrow)).all():
            raise self._does_not_fit(wide[~fits].flat[0])
        if narrow.dtype.kind != "f" and (differs := narrow != wide).any():
            raise self._does_not_fit(wide[differs].flat[0])
        return narrow

    def _flat(self, numbers: object, shape: tuple[int, ...]) -> list[Any]:
        # Holds at most the shape's count of numbers, whatever was sent. np.array would look for a dtype that fits
        # everything, and allocate gigabytes for one long string among short ones.
        level: list[Any] = [numbers]
        for size in shape:
            if level and (not set(map(type, level)) <= _LISTS or set(map(len, level)) != {size}):
                wrong = next(item for item in level if type(item) not in _LISTS or len(item) != size)
                raise self._not_nested(wrong, f"a list of {size:,} belongs", shape)
            level = list(chain.from_iterable(level))
        kinds = set(map(type, level))
        if kinds & _LISTS:
            wrong = next(item for item in level if type(item) in _LISTS)
            raise self._not_nested(wrong, "a number belongs", shape)
        if not shape and kinds == {dict}:
            raise InvalidInput(
                f"{self.title} is an object; send the value itself, {self.describe()}, not an object by name."
            )
        taken = _BOOLS if self.dtype == "bool" else _NUMBERS
        if not kinds <= taken:
            raise self._not_numbers(", ".join(sorted(map(json_kind, kinds - taken))))
        return level

    def _from_flat(self, numbers: list[Any]) -> Array:
        if self.takes_nan:
            try:
                wide = np.array(numbers, np.float64)
            except OverflowError:
                raise self._does_not_fit(max(numbers, key=abs)) from None
            return self.cast(wide)
        try:
            whole = [int(number) for number in numbers] if float in set(map(type, numbers)) else numbers
            if whole != numbers or (self.dtype == "bool" and not set(numbers) <= {0, 1}):
                raise ValueError(numbers)
            array = np.array(whole, self.numpy_dtype)
        except (OverflowError, ValueError):
            low, high = _whole_range(self.numpy_dtype)
            wrong = (number for number in numbers if not (low <= number <= high and number == int(number)))
            raise self._does_not_fit(next(wrong)) from None
        self.check_numbers(array)
        return array

    def _does_not_fit(self, number: Any) -> InvalidInput:
        if self.dtype == "bool":
            taken = "0 or 1"
        elif self.takes_nan:
            taken = f"a finite number{_LARGEST.get(self.dtype, '')}"
        else:
            # Limits may be wider than the dtype.
            low, high = _whole_range(self.numpy_dtype)
            if self.limits is not None:
                low, high = max(low, self.limits[0]), min(high, self.limits[1])
            taken = f"a whole number from {low:,} to {high:,}"
        return InvalidInput(f"{self.title} holds {shown_number(number)}; it must be {taken}.")

    def _not_numbers(self, found: str) -> InvalidInput:
        return InvalidInput(f"{self.title} holds {found}, not only numbers; it must be {self.describe()}.")

    def _not_nested(self, item: Any, belongs: str, shape: tuple[int, ...]) -> InvalidInput:
        found = f"a list of {len(item):,}" if type(item) in _LISTS else json_kind(type(item))
        wanted = f"nested lists of shape {list(shape)}" if shape else "one number"
        return InvalidInput(f"{self.title} has {found} where {belongs}; it must be {wanted}.")


def _whole_range(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.kind == "b":
        return 0, 1
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)
