"""Lines of numbers as the inputs of a network."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import final

from penstock.core.errors import InvalidInput, RequestError, SourceError
from penstock.core.record import chunk_spec
from penstock.core.spec import Array, TensorSpec

# A number with its separator has fewer characters.
NUMBER_CHARACTERS = 32
MIN_CHARACTERS = 1 << 12
SEPARATORS = (";", "\t", ",")


def frame_spec(spec: TensorSpec) -> TensorSpec:
    """One frame of a signal `[T, ...]`."""
    shape = spec.shape[1:]
    return replace(spec, shape=shape, labels=spec.labels if shape else ())


@final
class NumberLines:
    """Reads inputs of lines of numbers, with a comma, a semicolon, a tab or spaces between them.

    A first line that is not of numbers is a header. Where its names are those of `columns`, the numbers are taken by
    name, otherwise in their order.

    Args:
        specs: The tensors of one input.
        name: Name of the pack, for messages.

    Attributes:
        max_characters: A line with more is none of this network.

    Raises:
        SourceError: Lines cannot hold such inputs.
    """

    def __init__(self, specs: Sequence[TensorSpec], name: str) -> None:
        self._specs, self._name = tuple(specs), name
        self._varies = any(spec.dims for spec in specs)
        if self._varies and (len(specs) > 1 or len(specs[0].shape) > 1):
            takes = chunk_spec(specs).describe()
            raise SourceError(
                f"the pack {name!r} takes {takes}, which lines of numbers cannot tell apart; write an .npz file with "
                f"an array for each of {', '.join(spec.name for spec in specs)}."
            )
        self.columns = [] if self._varies else [column for spec in specs for column in _columns(spec)]
        self._size = sum(spec.size for spec in specs)
        self.max_characters = max(MIN_CHARACTERS, NUMBER_CHARACTERS * self._size)

    def inputs(
        self, lines: Iterator[tuple[int, str]], failed: Callable[[int, str], None]
    ) -> Iterator[tuple[int, dict[str, Array]]]:
        """Yield the number of the first line of each input, and the input's tensors by name.

        Args:
            lines: Lines with their numbers.
            failed: Takes the number of a line that is left out, and the reason.
        """
        order: list[int] | None = None
        expected, has_header = 0, False
        window = _Window(self._size)
        for number, text in lines:
            fields = _split(text)
            if not expected:
                if not has_header and not any(map(_is_number, fields)):
                    order, has_header = self._order(fields), True
                    continue
                expected = len(fields) if self._varies else self._per_line(len(fields))
            try:
                if not self._varies and len(fields) != expected:
                    raise InvalidInput(f"it has {len(fields):,} numbers where {expected:,} belong{self._which()}.")
                numbers = [_number(field) for field in fields]
                if order is not None and len(numbers) == self._size:
                    numbers = [numbers[at] for at in order]
                given = self._given(numbers)
            except RequestError as error:
                failed(number, str(error))
                if not self._varies and expected < self._size:
                    window.spoil(number, expected)
                continue
            if given is not None:
                yield number, given
            elif (whole := window.add(number, numbers)) and (given := self._given(whole)):
                yield window.begun, given
        if window.count:
            failed(window.begun, f"{window.count:,} numbers follow, fewer than the {self._size:,} of one input.")

    def _per_line(self, found: int) -> int:
        """The numbers of a line: a whole input, or one frame of `[T, ...]` if the first line has as many."""
        frame = prod(self._specs[0].shape[1:])
        return frame if len(self._specs) == 1 and found == frame else self._size

    def _given(self, numbers: list[float]) -> dict[str, Array] | None:
        """The tensors of one input; None for a frame of one."""
        if self._varies:
            (spec,) = self._specs
            (dim,) = spec.dims
            if not dim.min <= len(numbers) <= dim.max:
                raise InvalidInput(f"it has {len(numbers):,} numbers; {spec.name} has from {dim.min:,} to {dim.max:,}.")
            return {spec.name: spec.at({dim.name: len(numbers)}).from_numbers(numbers)}
        if len(numbers) != self._size:
            # Checked now, so that the line is named.
            replace(self._specs[0], shape=(len(numbers),), labels=(), default=None).from_numbers(numbers)
            return None
        given: dict[str, Array] = {}
        start = 0
        for spec in self._specs:
            given[spec.name] = spec.from_rows(numbers[start : start + spec.size], 1)[0, ...]
            start += spec.size
        return given

    def _order(self, header: list[str]) -> list[int] | None:
        return [header.index(name) for name in self.columns] if sorted(header) == sorted(self.columns) else None

    def _which(self) -> str:
        return f": {', '.join(self.columns)}" if len(self.columns) <= 16 else ""


class _Window:
    """The frames of an input that is not whole yet."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers: list[float] = []
        self._spoiled = False
        self.count = self.begun = 0

    def add(self, line: int, numbers: list[float]) -> list[float]:
        """Add a frame; returns the numbers of the input that it completes, unless another of its frames is missing."""
        if not self.count:
            self.begun, self._numbers, self._spoiled = line, [], False
        self.count += len(numbers)
        self._numbers += numbers
        if self.count < self._size:
            return []
        self.count = 0
        return [] if self._spoiled else self._numbers

    def spoil(self, line: int, count: int) -> None:
        """Leave out the input that a bad line is part of, so that the next one begins where it would have."""
        self.add(line, [0.0] * count)
        self._spoiled = self.count > 0


def _columns(spec: TensorSpec) -> list[str]:
    if not spec.shape:
        return [spec.name]
    if spec.labels and len(spec.shape) == 1:
        return list(spec.labels)
    return [f"{spec.name}.{at}" for at in range(spec.size)]


def _split(text: str) -> list[str]:
    separator = next((each for each in SEPARATORS if each in text), None)
    return [field.strip().strip('"') for field in text.split(separator)]


def _is_number(field: str) -> bool:
    try:
        _number(field)
    except InvalidInput:
        return False
    return True


def _number(field: str) -> float:
    for kind in (int, float):
        try:
            # Python takes 1_000, which is no number in a table.
            return kind(field if "_" not in field else "")
        except ValueError:
            continue
    raise InvalidInput(f"{field[:40]!r} is not a number.")
