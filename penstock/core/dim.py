"""A dimension whose length varies."""

from collections.abc import Mapping
from keyword import iskeyword
from typing import Any, Self, SupportsIndex, final

from penstock.core.errors import ApplicationError


@final
class Dim(int):
    """A dimension whose length varies; the same name in several specs is the same length.

    As a number it is its largest length, so that a shape with a `Dim` is the room that a tensor needs.

    Args:
        name: Its name, a Python identifier: `"tokens"`.
        max: The largest length.
        min: The smallest length.

    Raises:
        ApplicationError: The name is no identifier or a keyword, or the lengths are not whole numbers, 0 <= min <= max,
            max >= 1.
    """

    name: str
    min: int

    def __new__(cls, name: str, max: int, min: int = 1) -> Self:  # noqa: D102
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            raise ApplicationError(f"Dim has name {name!r}; give it a Python identifier, such as 'tokens'.")
        if not (type(min) is int and isinstance(max, int) and 0 <= min <= max and max > 0):
            raise ApplicationError(
                f"Dim {name!r} has min={min!r} and max={max!r}; give whole numbers, 0 <= min <= max, max at least 1."
            )
        dim = super().__new__(cls, max)
        dim.name, dim.min = name, min
        return dim

    @property
    def max(self) -> int:
        """The largest length."""
        return int(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Dim):
            return (self.name, self.min, int(self)) == (other.name, other.min, int(other))
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(int(self))

    def __repr__(self) -> str:
        return f"{self.name}<={int(self)}"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return Dim, (self.name, int(self), self.min)

    def to_json(self) -> dict[str, Any]:
        """The dimension as JSON values."""
        return {"name": self.name, "max": int(self), "min": self.min}

    @classmethod
    def from_json(cls, fields: Any) -> "Dim":
        """Read what `to_json` wrote.

        Raises:
            TypeError: It is no such object.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"{fields!r:.80} is no dimension")
        return Dim(**fields)
