"""Answers of applications with several tensors or with varying lengths, compared tensor by tensor."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, final

import numpy as np
import orjson

from penstock.client.binary_tensors import tensors_of
from penstock.core.agreement import Agreement
from penstock.core.bundles.golden import Golden
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array

Format = Literal["json", "binary"]

# Of the JSON before the tensors of a binary response.
MAX_HEAD_BYTES = 1 << 16
_HEAD = json.JSONDecoder()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RecordAnswers:
    """The expected answers, and the format in which they come.

    Args:
        expected: The tensors of each answer by name.
        agreement: The rule by which an answer is right.
        format: `"json"` for the tensors by name, `"binary"` for a response of the Open Inference Protocol.
    """

    expected: tuple[dict[str, Array], ...]
    agreement: Agreement
    format: Format

    def count_wrong(self, given: Sequence[tuple[int, bytes]]) -> int:
        """Return how many bodies differ from the expected answer to the request whose index stands before each."""
        return sum(not self._is_right(self.expected[which], body) for which, body in given)

    def _is_right(self, expected: Mapping[str, Array], body: bytes) -> bool:
        try:
            found = arrays_of_json(body) if self.format == "json" else self._binary(body)
        except (ValueError, KeyError, TypeError):
            return False
        shaped = {name: _shaped(found.get(name), array) for name, array in expected.items()}
        named = {name: array for name, array in shaped.items() if array is not None}
        return len(named) == len(expected) and self.agreement.agree(named, expected)

    def _binary(self, body: bytes) -> dict[str, Array]:
        # The response's headers, which have the length of its head, are not kept.
        _, head = _HEAD.raw_decode(body[:MAX_HEAD_BYTES].decode("latin-1"))
        arrays = tensors_of(body[:head], body[head:])
        return {name: array[0] for name, array in arrays.items()}


def record_answers(golden: Golden, output: ChunkSpec, format: Format) -> RecordAnswers:
    """Make the expected answers of golden examples."""
    agreement = golden.agreement
    if isinstance(output, RecordSpec):
        expected = tuple(map(output.unpack, golden.outputs))
    else:
        expected = tuple({output.name: answer} for answer in golden.outputs)
        agreement = replace(agreement, scales={output.name: agreement.scales[""]})
    return RecordAnswers(expected=expected, agreement=agreement, format=format)


def _shaped(found: Array | None, expected: Array) -> Array | None:
    """Return an array in the form of the expected one; None if it has another."""
    if found is None or found.dtype.kind not in "biuf":
        return None
    if found.ndim == expected.ndim or not found.ndim or not expected.ndim:
        return found
    # JSON has no inner sizes of an empty list, and flat lists for a tensor are right too.
    inner = expected.shape[1:]
    return found.reshape(len(found), *inner) if found.size == len(found) * prod(inner) else None


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
