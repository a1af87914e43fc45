"""What one chunk looks like: the one declaration that decoding, the slot table, protocols and training all read."""

from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ApplicationError, BundleCorrupt, InvalidInput

Array = npt.NDArray[Any]

# The datatype names of the Open Inference Protocol, version 2.
PROTOCOL_DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """The dtype, shape, meaning and units of one chunk of input or output (without a batch dimension).

    Args:
        dtype: A NumPy dtype name, one of bool, (u)int8..64, float16..64.
        shape: The fixed shape of one chunk, such as `(28, 28)` for height and width.
        meaning: What the numbers are, in words: `"grey image, 0 is black"`.
        units: The unit of one number: `"0..255"`, `"probability"`, `"int16 PCM at 16 kHz"`.
        labels: Names for the entries of the last dimension, for a classifier's classes.
        name: The tensor's name in the Open Inference Protocol.

    Raises:
        ApplicationError: The dtype is unknown, the shape is not of positive whole numbers, or the labels do not fit.
    """

    dtype: str
    shape: tuple[int, ...]
    meaning: str
    units: str = ""
    labels: tuple[str, ...] = ()
    name: str = "input"

    def __post_init__(self) -> None:
        if self.dtype not in PROTOCOL_DATATYPES:
            raise ApplicationError(
                f"TensorSpec has dtype {self.dtype!r}; it must be one of {', '.join(PROTOCOL_DATATYPES)}."
            )
        if not all(isinstance(size, int) and size > 0 for size in self.shape):
            raise ApplicationError(f"TensorSpec has shape {self.shape!r}; every size must be a whole number above 0.")
        if self.labels and (not self.shape or len(self.labels) != self.shape[-1]):
            raise ApplicationError(
                f"{len(self.labels)} labels for shape {self.shape}; give one for each entry of the last dim."
            )

    @property
    def nbytes(self) -> int:
        """Bytes of one chunk."""
        return self.size * self.numpy_dtype.itemsize

    @property
    def size(self) -> int:
        """Numbers in one chunk."""
        return prod(self.shape)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as NumPy's (little-endian)."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def protocol_datatype(self) -> str:
        """The Open Inference Protocol's name for the dtype, such as `FP32`."""
        return PROTOCOL_DATATYPES[self.dtype]

    @property
    def takes_nan(self) -> bool:
        """Whether the dtype can hold NaN or infinity at all, so that a check is due."""
        return self.dtype.startswith("float")

    def describe(self) -> str:
        """`uint8[28, 28]`, for messages."""
        return f"{self.dtype}{list(self.shape)}"

    def check(self, array: Array) -> Array:
        """The array itself if it is one chunk of this spec.

        Raises:
            InvalidInput: Another dtype or shape, or a float that is NaN or infinite.
        """
        if array.dtype != self.numpy_dtype or array.shape != self.shape:
            raise InvalidInput(
                f"{self.name} is {array.dtype}{list(array.shape)}; it must be {self.describe()} ({self.meaning})."
            )
        self.check_finite(array)
        return array

    def check_finite(self, array: Array) -> None:
        """Raise `InvalidInput` if a float of the array is NaN or infinite."""
        if self.takes_nan and not np.isfinite(array).all():
            raise InvalidInput(f"{self.name} holds NaN or infinity; every number must be finite.")

    def from_bytes(self, body: bytes | memoryview) -> Array:
        """One chunk from its raw little-endian bytes.

        Raises:
            InvalidInput: The wrong count of bytes, or a float that is NaN or infinite.
        """
        if len(body) != self.nbytes:
            raise InvalidInput(
                f"The body has {len(body):,} bytes; {self.describe()} takes exactly {self.nbytes:,} raw bytes."
            )
        array = np.frombuffer(body, self.numpy_dtype).reshape(self.shape)
        self.check_finite(array)
        return array

    def from_numbers(self, numbers: object) -> Array:
        """One chunk from nested lists of numbers, as JSON gives them.

        Raises:
            InvalidInput: Not numbers, ragged, another shape, out of the dtype's range, or fractions for whole numbers.
        """
        try:
            wide = np.array(numbers)
        except (ValueError, OverflowError):
            raise InvalidInput(f"{self.name} is ragged; it must be nested lists of shape {list(self.shape)}.") from None
        if wide.dtype.kind not in "biuf":
            raise InvalidInput(f"{self.name} holds something other than numbers; it must be {self.describe()}.")
        if wide.shape != self.shape:
            raise InvalidInput(f"{self.name} has shape {list(wide.shape)}; it must be {list(self.shape)}.")
        return self.cast(wide)

    def cast(self, wide: Array) -> Array:
        """Numbers of another dtype as this spec's dtype, if none of them changes by it (floats may round).

        Raises:
            InvalidInput: A number does not fit the dtype.
        """
        if wide.dtype == self.numpy_dtype:
            self.check_finite(wide)
            return wide
        with np.errstate(invalid="ignore", over="ignore"):
            narrow = wide.astype(self.numpy_dtype)
        self.check_finite(narrow)
        if narrow.dtype.kind != "f" and not np.array_equal(narrow, wide):
            raise InvalidInput(f"{self.name} holds a number that {self.dtype} cannot: send whole numbers in its range.")
        return narrow

    def to_json(self) -> dict[str, Any]:
        """The spec as plain JSON values."""
        return asdict(self) | {"shape": list(self.shape), "labels": list(self.labels)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The spec that `to_json` wrote.

        Raises:
            BundleCorrupt: A field is missing, unknown or wrong.
        """
        try:
            tuples: dict[str, Any] = {key: tuple(fields[key]) for key in ("shape", "labels")}
            return cls(**(fields | tuples))
        except (ApplicationError, KeyError, TypeError) as error:
            raise BundleCorrupt(f"a tensor spec is not readable ({error}); write the bundle again.") from None
