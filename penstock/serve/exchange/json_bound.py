"""Bounds of JSON by the spec of what it can hold: known before it is parsed, so that a few bytes do not cost much.

A list of a few bytes takes some 60 bytes of memory and 50 ns of the event loop. Counting brackets and commas takes
1 ns a byte.
"""

from math import prod
from typing import NamedTuple

from penstock.core.errors import TooLarge
from penstock.core.record import ChunkSpec

# Bodies up to this size cost too little to be counted.
QUICK_BYTES = 16_384
# What a request may have beside its rows: the fields of a protocol, its outputs and parameters.
OTHER_LISTS, OTHER_VALUES, OTHER_BYTES = 1_024, 8_192, 65_536
# One number with its comma and the indentation of its line; one list likewise.
VALUE_BYTES = 64


class JsonSize(NamedTuple):
    """The size of JSON that holds rows.

    Args:
        lists: Lists and objects.
        values: Numbers and other values.
    """

    lists: int
    values: int

    @property
    def nbytes(self) -> int:
        """Bytes of the longest JSON without strings."""
        return OTHER_BYTES + VALUE_BYTES * (self.lists + self.values)


def size_of(spec: ChunkSpec, rows: int) -> JsonSize:
    """Return the largest size of JSON with so many rows."""
    lists = values = 0
    for tensor in spec.tensors:
        sizes = [int(size) for size in tensor.shape]
        lists += sum(prod(sizes[:depth]) for depth in range(len(sizes)))
        values += prod(sizes)
    # A row of several tensors is an object.
    return JsonSize(OTHER_LISTS + rows * (lists + 1), OTHER_VALUES + rows * (values + lists + 1))


def check_json(text: bytes, spec: ChunkSpec, rows: int) -> None:
    """Check that JSON has no more lists and values than rows of a spec.

    Args:
        text: The JSON, not parsed yet.
        spec: A row.
        rows: The most rows of a request.

    Raises:
        TooLarge: It has.
    """
    if len(text) <= QUICK_BYTES:
        return
    most = size_of(spec, rows)
    found, bare = _counted(text), None
    if found.lists > most.lists or found.values > most.values:
        # Brackets and commas within strings are neither. A value may be a string, with a name before it.
        strings = text.count(b'"') // 2
        if strings > 2 * most.values:
            raise TooLarge(
                f"The JSON has {strings:,} strings or more; {rows:,} times {spec.describe()} has at most "
                f"{most.values:,} values."
            )
        bare = _without_strings(text)
        found = _counted(bare)
    # White space unpacks from a thousandth of its size.
    if len(text) > found.nbytes and (others := len(bare or _without_strings(text))) > found.nbytes:
        raise TooLarge(
            f"The JSON has {others:,} bytes outside its strings for {found.values:,} values; at most {VALUE_BYTES} "
            "each are taken."
        )
    if found.lists > most.lists or found.values > most.values:
        raise TooLarge(
            f"The JSON has {found.lists:,} lists or objects and {found.values:,} values; {rows:,} times "
            f"{spec.describe()} has at most {most.lists:,} and {most.values:,}."
        )


def _without_strings(text: bytes) -> bytes:
    """Cut the strings out. No regular expression: it would hold the interpreter's lock for 60 to 150 ns a byte."""
    # Backslashes are in strings alone. Where one is not, a parser goes no further.
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(unescaped.split(b'"')[::2])


def _counted(text: bytes) -> JsonSize:
    return JsonSize(text.count(b"[") + text.count(b"{"), text.count(b",") + 1)
