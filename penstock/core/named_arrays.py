"""Batches of chunks as named arrays, as a network takes and gives them. No torch."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError
from penstock.core.record import ChunkSpec, Lengths, RecordSpec
from penstock.core.spec import Array, TensorSpec

# B rows of a batch

Mask = npt.NDArray[np.bool_]
# Exporters take a length of 1 for a constant, so that shorter batches are padded to this.
SHORTEST_ROOM = 2


def feeds_of(
    input: ChunkSpec, chunk_B: Array, shortest_room: int = SHORTEST_ROOM
) -> tuple[dict[str, Array], dict[str, Lengths]]:
    """Return the tensors of a batch of chunks by name, and the lengths `[B]` of its dimensions.

    Args:
        input: One raw input chunk.
        chunk_B: The batch.
        shortest_room: Shorter batches are padded to it.
    """
    if not isinstance(input, RecordSpec):
        return {input.name: chunk_B}, {}
    lengths = input.lengths(chunk_B)
    room = {name: min(max(shortest_room, int(lengths[name].max())), int(dim)) for name, dim in input.dims.items()}
    return input.batch(chunk_B, room), lengths


def fill(input: RecordSpec, chunk_B: Array, into: Mapping[str, Array]) -> None:
    """Write the tensors of records into the first rows of a batch, with zeros as padding.

    Args:
        input: The spec of the records.
        chunk_B: The records, `[B]`.
        into: The tensors of the batch by name; those of varying length have any room from the longest on.
    """
    rows = len(chunk_B)
    beyond: dict[tuple[str, int], Mask | None] = {}
    for spec in input.tensors:
        array = into[spec.name][:rows]
        array[...] = chunk_B[spec.name][(slice(None), *(slice(size) for size in array.shape[1:]))]
        for axis, size in enumerate(spec.shape, start=1):
            if not isinstance(size, Dim):
                continue
            # Tensors of the same dimension have the same padding.
            key = size.name, array.shape[axis]
            if key not in beyond:
                beyond[key] = _beyond(chunk_B[size.name], key[1])
            if (padding := beyond[key]) is not None:
                where = padding.reshape(rows, *(key[1] if at == axis else 1 for at in range(1, array.ndim)))
                np.copyto(array, np.zeros((), array.dtype), where=where)


def _beyond(lengths: Lengths, room: int) -> Mask | None:
    """Mask what lies beyond the lengths; None where nothing does."""
    return None if lengths.min() >= room else np.arange(room) >= lengths[:, None]


def chunks_of(output: ChunkSpec, arrays: Mapping[str, Array], lengths: Mapping[str, Lengths]) -> Array:
    """Make output chunks of a network's results.

    Args:
        output: One output chunk.
        arrays: The results by name, `[B, ...]`; also the lengths that the network gives.
        lengths: The lengths of the input's dimensions.

    Raises:
        ApplicationError: A result does not have its declared type or shape.
    """
    if not isinstance(output, RecordSpec):
        return arrays[output.name]
    given = {
        name: lengths[name] if name in lengths else _checked_lengths(name, arrays[name], dim)
        for name, dim in output.dims.items()
    }
    longest = {name: int(each.max(initial=0)) for name, each in given.items()}
    for spec in output.tensors:
        _check(arrays[spec.name], spec, longest)
    return output.records(arrays, given)


def _check(array: Array, spec: TensorSpec, longest: Mapping[str, int]) -> None:
    shape = array.shape[1:]
    fits = len(shape) == len(spec.shape) and all(
        longest[declared.name] <= size <= declared if isinstance(declared, Dim) else size == declared
        for size, declared in zip(shape, spec.shape, strict=True)
    )
    if array.dtype != spec.numpy_dtype or not fits:
        lacks_rows = array.ndim == len(spec.shape)
        raise ApplicationError(
            f"the network gives {spec.name!r} as {array.dtype}{list(array.shape)}, but it is declared as "
            f"{spec.describe()} for each row{'; the first dimension must be the rows' if lacks_rows else ''}."
        )


def _checked_lengths(name: str, lengths: Array, dim: Dim) -> Lengths:
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or ((lengths < 0) | (lengths > int(dim))).any():
        raise ApplicationError(
            f"the network gives the lengths {name!r} as {lengths.dtype}{list(lengths.shape)}, "
            f"{lengths.tolist()!r:.80}; they must be whole numbers from 0 to {int(dim)}, one for each row."
        )
    return lengths.astype(np.int64)
