"""Largest differences between the backends."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.spec import Array
from penstock.verify.backends import Backend, TrainingBackend
from penstock.verify.verify_inputs import Example


@dataclass(kw_only=True, slots=True)
class Comparison:
    """Differences of one backend from the training code.

    Args:
        backend: Its name.
        examples: Number of examples.
        difference: Largest absolute difference; infinite if an answer has another form.
        worst: The example with that difference.
        disagreements: Answers with another likeliest entry.
    """

    backend: str
    examples: int = 0
    difference: float = 0.0
    worst: str = ""
    disagreements: int = 0


def compare(
    training: TrainingBackend, backends: Sequence[Backend], examples: Iterable[Example], *, labelled: bool
) -> list[Comparison]:
    """Run every example on every backend.

    Args:
        training: The reference.
        backends: The others.
        examples: The inputs.
        labelled: Whether the output has labels; then the likeliest entries must agree.
    """
    found = {backend.name: Comparison(backend=backend.name) for backend in backends}
    for example in examples:
        expected = training.answer(example)
        for backend in backends:
            answer, one = backend.answer(example), found[backend.name]
            if isinstance(answer, np.ndarray):
                difference = difference_of(answer, expected)
                one.disagreements += labelled and difference < math.inf and not _agree(answer, expected)
            else:
                difference = difference_of(answer, training.reply(expected))
                one.disagreements += difference == math.inf
            one.examples += 1
            if not one.worst or not difference <= one.difference:
                one.difference, one.worst = difference, example.name
    return list(found.values())


def difference_of(one: Any, other: Any) -> float:
    """Largest absolute difference of two arrays or JSON values; infinite if their forms differ."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape:
            return math.inf
        difference = float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max(initial=0.0))
        return math.inf if math.isnan(difference) else difference
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return math.inf
        return max((difference_of(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return max(map(difference_of, one, other), default=0.0) if len(one) == len(other) else math.inf
    if isinstance(one, int | float) and isinstance(other, int | float) and not isinstance(one, bool):
        return abs(one - other)
    return 0.0 if one == other else math.inf


def _agree(answer: Array, expected: Array) -> bool:
    return bool((answer.argmax(-1) == expected.argmax(-1)).all())
