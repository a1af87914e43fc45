"""The declaration of `prepare`: it makes one chunk of a fixed size from a raw array of any size."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from penstock.core.errors import ApplicationError, TooLarge
from penstock.core.spec import Array, Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSpec(Spec):
    """The dtype and shape of one raw array; some dimensions may have any size.

    Args:
        dtype: A NumPy dtype name, one of bool, (u)int8..64, float16..64.
        shape: Its shape, None for any size: `(None, None, 4)` for a picture's height, width and RGBA.
        meaning: Meaning of the numbers, in words.
        units: Unit of one number: `"0..255"`.
        max_shape: Largest size of each dimension, above 1 for those of any size; optional if there are none.

    Raises:
        ApplicationError: A field is out of range.
    """

    unreadable = "a raw spec is not readable ({}); write the bundle again."
    max_shape: tuple[int, ...] = ()
    name: str = field(default="raw", init=False, repr=False)

    def __post_init__(self) -> None:
        self.check_dtype()
        sizes = isinstance(self.shape, tuple) and all(
            size is None or (type(size) is int and size > 0) for size in self.shape
        )
        if not sizes or not self.shape:
            raise ApplicationError(
                f"RawSpec has shape {self.shape!r}; it must be a tuple of whole numbers above 0, or None for any size, "
                f"such as (None, None, 4)."
            )
        if not self.max_shape and None not in self.shape:
            object.__setattr__(self, "max_shape", self.shape)
        if not self._max_shape_fits():
            raise ApplicationError(
                f"RawSpec has shape {self.shape!r} and max_shape={self.max_shape!r}; name the largest size of each "
                f"dimension, such as max_shape=(4096, 4096, 4)."
            )

    def _max_shape_fits(self) -> bool:
        return (
            isinstance(self.max_shape, tuple)
            and len(self.max_shape) == len(self.shape)
            and all(type(largest) is int and largest > 0 for largest in self.max_shape)
            and all(
                largest > 1 if size is None else size == largest
                for size, largest in zip(self.shape, self.max_shape, strict=True)
            )
        )

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest raw array."""
        return prod(self.max_shape) * self.numpy_dtype.itemsize

    def check(self, array: Array) -> Array:
        """Return the array if it is one raw array of this spec.

        Raises:
            InvalidInput: Not an array, another dtype or shape, or a float that is NaN or infinite.
            TooLarge: A dimension exceeds `max_shape`.
        """
        Spec.check(self, array)
        if any(found > largest for found, largest in zip(array.shape, self.max_shape, strict=True)):
            raise TooLarge(
                f"raw has shape {list(array.shape)}; at most {list(self.max_shape)} is taken. Scale it down."
            )
        return array


def is_factory(value: object) -> bool:
    """True for a class, a function or an import path that makes a module; False for the module itself."""
    return isinstance(value, str | type) or (callable(value) and not hasattr(value, "state_dict"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """Make one chunk of the application's `input` from one raw array, as `decode` returns it.

    The graph that is exported with the bundle does this on servers, on devices and in browsers.

    Args:
        module: Makes the `torch.nn.Module`, without arguments, or its import path. It has no trained weights; its
            `forward` takes one raw array as a tensor, without a batch dimension, and returns one chunk.
        raw: The raw array.

    Raises:
        ApplicationError: A field is of another kind.
    """

    module: Callable[[], Any] | str
    raw: RawSpec

    def __post_init__(self) -> None:
        if not is_factory(self.module):
            raise ApplicationError(
                f"Prepare has module={' '.join(repr(self.module).split())[:80]}; it must be a class or function that "
                f"makes the module, or its import path, not the module itself."
            )
        if not isinstance(self.raw, RawSpec):
            raise ApplicationError(f"Prepare has raw={self.raw!r}; it must be a RawSpec.")
