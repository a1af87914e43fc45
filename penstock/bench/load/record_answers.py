"""Answers of applications with several tensors or with varying lengths, compared tensor by tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import orjson

from penstock.client.binary_tensors import tensors_of
from penstock.core.golden import Golden
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array

Format = Literal["json", "binary"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RecordAnswers:
    """The expected answers, and the format in which they come.

    Args:
        expected: The tensors of each answer by name.
        tolerances: Largest difference of a right answer, by tensor.
        format: `"json"` for the tensors by name, `"binary"` for a response of the Open Inference Protocol.
        own_lengths: Number of lengths that a binary response has beside the tensors.
    """

    expected: tuple[dict[str, Array], ...]
    tolerances: dict[str, float]
    format: Format
    own_lengths: int

    def count_wrong(self, given: Sequence[tuple[int, bytes]]) -> int:
        """Return how many bodies differ from the expected answer to the request whose index stands before each."""
        return sum(not self._is_right(self.expected[which], body) for which, body in given)

    def _is_right(self, expected: Mapping[str, Array], body: bytes) -> bool:
        try:
            found = arrays_of_json(body) if self.format == "json" else self._binary(expected, body)
        except (ValueError, KeyError, TypeError):
            return False
        return all(
            name in found and _is_close(found[name], array, self.tolerances[name]) for name, array in expected.items()
        )

    def _binary(self, expected: Mapping[str, Array], body: bytes) -> dict[str, Array]:
        # The response's headers, which have the length of its head, are not kept.
        tail = sum(array.nbytes for array in expected.values()) + 8 * self.own_lengths
        arrays = tensors_of(body[: len(body) - tail], body[len(body) - tail :])
        return {name: array[0] for name, array in arrays.items()}


def record_answers(golden: Golden, input: ChunkSpec, output: ChunkSpec, format: Format) -> RecordAnswers:
    """Make the expected answers of golden examples."""
    tolerances = golden.tolerances
    if isinstance(output, RecordSpec):
        known = input.dims if isinstance(input, RecordSpec) else {}
        own = len(output.dims.keys() - known)
        expected = tuple(map(output.unpack, golden.outputs))
    else:
        own, expected = 0, tuple({output.name: answer} for answer in golden.outputs)
        tolerances = {output.name: golden.tolerance}
    return RecordAnswers(expected=expected, tolerances=tolerances, format=format, own_lengths=own)


def _is_close(found: Array, expected: Array, tolerance: float) -> bool:
    if found.dtype.kind not in "biuf" or found.shape[:1] != expected.shape[:1] or found.size != expected.size:
        return False
    # NaN counts as a difference.
    return bool(
        (np.abs(found.astype(np.float64).reshape(expected.shape) - expected.astype(np.float64)) <= tolerance).all()
    )


def arrays_of_json(body: bytes) -> dict[str, Array]:
    """Read arrays by name from JSON.

    Raises:
        ValueError: It is no such object.
    """
    found = orjson.loads(body)
    if not isinstance(found, dict):
        raise ValueError(f"{body[:80]!r} is no object")
    fields: dict[str, Any] = found
    return {name: np.asarray(value) for name, value in fields.items()}
