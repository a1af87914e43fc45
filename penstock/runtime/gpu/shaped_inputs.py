"""Golden examples as inputs of one shape: so many rows, in rooms that they may exceed. No torch."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array

# N examples, B rows


def fits(chunks: Array, rooms: Mapping[str, int]) -> npt.NDArray[np.bool_]:
    """Find the examples `[N]` that rooms hold."""
    held = np.ones(len(chunks), np.bool_)
    for name, room in rooms.items():
        held &= chunks[name] <= room
    return held


def clipped(input: ChunkSpec, chunks: Array, rooms: Mapping[str, int]) -> Array:
    """Return examples whose lengths are cut to the rooms that exceed them."""
    if not isinstance(input, RecordSpec):
        return chunks
    lengths = {name: np.minimum(chunks[name], room) for name, room in rooms.items()}
    return input.records(input.batch(chunks, rooms), lengths)


def inputs_of(input: ChunkSpec, chunks: Array, rooms: Mapping[str, int]) -> dict[str, Array]:
    """Return the tensors of examples, padded to rooms that hold them, and the lengths of their dimensions."""
    if not isinstance(input, RecordSpec):
        return {input.name: chunks}
    return input.batch(chunks, rooms) | input.lengths(chunks)


def repeated(chunks: Array, rows: int) -> Array:
    """Return so many examples, again from the first where there are fewer."""
    return chunks[np.arange(rows) % len(chunks)]
