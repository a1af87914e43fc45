"""Inputs and outputs of applications with several tensors or with varying lengths, as rows of requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from penstock.client.binary_tensors import tensors_of
from penstock.core.dim import Dim
from penstock.core.errors import InvalidInput
from penstock.core.record import ChunkSpec, Lengths, RecordSpec, given_by_name
from penstock.core.spec import Array, TensorSpec
from penstock.core.wording.json_fault import json_kind

# n rows of one request


class RequestRows(NamedTuple):
    """The rows of one request, which all have the same lengths.

    Args:
        rows: Their places among the rows of the call.
        arrays: The input tensors `[n, ...]` by name.
        lengths: The length of each dimension of the input.
    """

    rows: list[int]
    arrays: dict[str, Array]
    lengths: dict[str, int]


def chunks_of(name: str, spec: TensorSpec, given: Any) -> tuple[Array, bool]:
    """Make chunks `[n, ...]` of what a caller gave to an application of one input of fixed size.

    Args:
        name: Name of the application.
        spec: Its input.
        given: A chunk or a batch of them, alone or in a dictionary by the input's name.

    Returns:
        The chunks, and whether the caller gave one chunk, not several.

    Raises:
        InvalidInput: It is not what the application takes.
    """
    if isinstance(given, Mapping):
        given = given_by_name([spec.name], given)[spec.name]
    if isinstance(given, str | bytes):
        raise InvalidInput(
            f"The input is {json_kind(type(given))}; predict takes arrays, {spec.describe()}. Give a file's bytes or a "
            f"text to ask."
        )
    try:
        array = np.asarray(given)
    except ValueError:
        raise InvalidInput(
            f"The input is lists of different lengths; {name!r} takes {spec.describe()}, or several of them as "
            f"{['n', *spec.shape]} with n from 1."
        ) from None
    chunks = spec.cast(array)
    if chunks.shape == spec.shape:
        return chunks[None], True
    if chunks.shape[1:] != spec.shape or len(chunks) < 1:
        raise InvalidInput(
            f"The array is {chunks.dtype}{list(chunks.shape)}; {name!r} takes {spec.describe()}, or several of them as "
            f"{['n', *spec.shape]} with n from 1."
        )
    return chunks, False


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RecordCalls:
    """The conversions of one application's inputs and outputs.

    Args:
        name: Name of the application.
        input: One input chunk.
        output: One output chunk.
    """

    name: str
    input: ChunkSpec
    output: ChunkSpec

    def requests(self, given: Any) -> tuple[list[RequestRows], bool]:
        """Split what a caller gave into requests of rows of the same lengths.

        Returns:
            The requests, and whether the caller gave one chunk, not several.

        Raises:
            InvalidInput: It is not what the application takes.
        """
        if not isinstance(self.input, RecordSpec):
            chunks, single = chunks_of(self.name, self.input, given)
            return [RequestRows(list(range(len(chunks))), {self.input.name: chunks}, {})], single
        single = isinstance(given, Mapping)
        if not single and not isinstance(given, list | tuple):
            raise InvalidInput(
                f"The inputs are {json_kind(type(given))}; {self.name!r} takes a dictionary of arrays by name, "
                f"{self.input.describe()}, or a list of such dictionaries."
            )
        if not single and not given:
            raise InvalidInput(f"The list is empty; give {self.name!r} at least one dictionary of arrays.")
        return _of_equal_lengths(self.input, self.input.of_many([given] if single else given)), single

    def outputs(self, head: bytes, tail: bytes, request: RequestRows) -> list[Any]:
        """Read a response: the output of each row, several tensors by name.

        Raises:
            ValueError: The response is not that of this application; the message says why.
        """
        return self.outputs_of(tensors_of(head, tail), request)

    def outputs_of(self, arrays: Mapping[str, Array], request: RequestRows) -> list[Any]:
        """Split the tensors of a response into the output of each row, several tensors by name.

        Raises:
            ValueError: They are not those of this application; the message says why.
        """
        dims = self.output.dims if isinstance(self.output, RecordSpec) else {}
        own = {name: dim for name, dim in dims.items() if name not in request.lengths}
        names = [*(spec.name for spec in self.output.tensors), *own]
        if missing := [name for name in names if name not in arrays]:
            raise ValueError(f"the output {missing[0]!r} is missing")
        n = len(request.rows)
        lengths = {name: np.full(n, length) for name, length in request.lengths.items()}
        lengths |= {name: _read_lengths(name, arrays[name], n, dim) for name, dim in own.items()}
        for spec in self.output.tensors:
            _check(arrays[spec.name], spec, n, lengths)
        if not isinstance(self.output, RecordSpec):
            # Copied, because an array over bytes is read-only.
            return list(arrays[self.output.name].copy())
        records = self.output.records(arrays, {name: lengths[name] for name in dims})
        return [{name: part.copy() for name, part in self.output.unpack(record).items()} for record in records]


def _of_equal_lengths(spec: RecordSpec, records: Array) -> list[RequestRows]:
    """Group records by their lengths, so that nothing is padded on the way to the server."""
    rows_of: dict[tuple[int, ...], list[int]] = {}
    columns = [records[name].tolist() for name in spec.dims]
    for row in range(len(records)):
        rows_of.setdefault(tuple(column[row] for column in columns), []).append(row)
    return [
        RequestRows(rows, spec.batch(records[rows]), dict(zip(spec.dims, lengths, strict=True)))
        for lengths, rows in rows_of.items()
    ]


def _read_lengths(name: str, array: Array, n: int, dim: Dim) -> Lengths:
    if array.shape != (n,) or array.dtype.kind not in "iu" or ((array < 0) | (array > int(dim))).any():
        raise ValueError(f"the lengths {name!r} are {array.dtype}{list(array.shape)}, {array.tolist()!r:.80}")
    return array.astype(np.int64)


def _check(array: Array, spec: TensorSpec, n: int, lengths: Mapping[str, Lengths]) -> None:
    sizes = (int(lengths[size.name].max()) if isinstance(size, Dim) else size for size in spec.shape)
    if array.dtype != spec.numpy_dtype or array.shape != (n, *sizes):
        raise ValueError(f"{spec.name!r} is {array.dtype}{list(array.shape)}, not {n} x {spec.describe()} as described")
