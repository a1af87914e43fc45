"""What makes one chunk of a fixed size from a raw array of any size: declared once, and exported with the bundle."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Self

import numpy as np

from penstock.core.errors import ApplicationError, BundleCorrupt, InvalidInput, TooLarge
from penstock.core.spec import PROTOCOL_DATATYPES, Array


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSpec:
    """The dtype and shape of one raw array, of which some dimensions may have any size.

    Args:
        dtype: A NumPy dtype name, one of bool, (u)int8..64, float16..64.
        shape: Its shape, None where any size is taken: `(None, None, 4)` for a picture's height, width and RGBA.
        meaning: What the numbers are, in words.
        units: The unit of one number: `"0..255"`.
        most: The largest size of each dimension, above 1 where any size is taken; may be left out where none is.

    Raises:
        ApplicationError: A field is out of range.
    """

    dtype: str
    shape: tuple[int | None, ...]
    meaning: str
    units: str = ""
    most: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in PROTOCOL_DATATYPES:
            raise ApplicationError(
                f"RawSpec has dtype {self.dtype!r}; it must be one of {', '.join(PROTOCOL_DATATYPES)}."
            )
        sizes = isinstance(self.shape, tuple) and all(
            size is None or (type(size) is int and size > 0) for size in self.shape
        )
        if not sizes or not self.shape:
            raise ApplicationError(
                f"RawSpec has shape {self.shape!r}; it must be a tuple of whole numbers above 0, or None for any size, "
                f"such as (None, None, 4)."
            )
        if not self.most and None not in self.shape:
            object.__setattr__(self, "most", self.shape)
        if not self._most_fits():
            raise ApplicationError(
                f"RawSpec has shape {self.shape!r} and most={self.most!r}; name the largest size of each dimension, "
                f"such as most=(4096, 4096, 4)."
            )

    def _most_fits(self) -> bool:
        return (
            isinstance(self.most, tuple)
            and len(self.most) == len(self.shape)
            and all(type(most) is int and most > 0 for most in self.most)
            and all(
                most > 1 if size is None else size == most for size, most in zip(self.shape, self.most, strict=True)
            )
        )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as NumPy's (little-endian)."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest raw array."""
        return prod(self.most) * self.numpy_dtype.itemsize

    def describe(self) -> str:
        """`uint8[any, any, 4]`, for messages."""
        return f"{self.dtype}[{', '.join('any' if size is None else str(size) for size in self.shape)}]"

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of a shape is one of these, were it not too large."""
        return len(shape) == len(self.shape) and all(
            found > 0 and size in (None, found) for size, found in zip(self.shape, shape, strict=True)
        )

    def check(self, array: Array) -> Array:
        """The array itself if it is one raw array of this spec.

        Raises:
            InvalidInput: Not an array, another dtype or shape, or a float that is NaN or infinite.
            TooLarge: A dimension is larger than is taken.
        """
        if not isinstance(array, np.ndarray):
            raise InvalidInput(f"raw is a {type(array).__name__}; it must be an array, {self.describe()}.")
        if array.dtype != self.numpy_dtype or not self.takes(array.shape):
            raise InvalidInput(
                f"raw is {array.dtype}{list(array.shape)}; it must be {self.describe()} ({self.meaning})."
            )
        if any(found > most for found, most in zip(array.shape, self.most, strict=True)):
            raise TooLarge(f"raw has shape {list(array.shape)}; at most {list(self.most)} is taken. Scale it down.")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InvalidInput("raw holds NaN or infinity; every number must be finite.")
        return array

    def to_json(self) -> dict[str, Any]:
        """The spec as plain JSON values."""
        return asdict(self) | {"shape": list(self.shape), "most": list(self.most)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The spec that `to_json` wrote.

        Raises:
            BundleCorrupt: A field is missing, unknown or wrong.
        """
        try:
            tuples: dict[str, Any] = {key: tuple(fields[key]) for key in ("shape", "most")}
            return cls(**(fields | tuples))
        except (ApplicationError, KeyError, TypeError) as error:
            raise BundleCorrupt(f"a raw spec is not readable ({error}); write the bundle again.") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """Makes one chunk of the application's `input` from one raw array, which `decode` gives then.

    The same graph, exported when the bundle is written, does it in the server, on devices and in browsers.

    Args:
        module: Makes the `torch.nn.Module`, without arguments, or its import path. It has no learned weights; its
            `forward` takes one raw array as a tensor, without a batch dimension, and gives one chunk.
        raw: One raw array.

    Raises:
        ApplicationError: A field is of another kind.
    """

    module: Callable[[], Any] | str
    raw: RawSpec

    def __post_init__(self) -> None:
        made = isinstance(self.module, str) or (callable(self.module) and not hasattr(self.module, "state_dict"))
        if not made and not isinstance(self.module, type):
            raise ApplicationError(
                f"Prepare has module={' '.join(repr(self.module).split())[:80]}; it must be a class or function that "
                f"makes the module, or its import path, not the module itself."
            )
        if not isinstance(self.raw, RawSpec):
            raise ApplicationError(f"Prepare has raw={self.raw!r}; it must be a RawSpec.")
