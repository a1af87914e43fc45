"""The largest differences between the places."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.spec import Array
from penstock.verify.examples import Example
from penstock.verify.places import Place, Training


@dataclass(kw_only=True, slots=True)
class Compared:
    """How one place compares with training's code.

    Args:
        place: Its name.
        examples: How many it was asked.
        difference: The largest absolute difference of a number; infinite where an answer is of another form.
        worst: The example that showed it.
        otherwise: How many answers have another likeliest entry.
    """

    place: str
    examples: int = 0
    difference: float = 0.0
    worst: str = ""
    otherwise: int = 0


def compare(
    training: Training, places: Sequence[Place], examples: Iterable[Example], *, labelled: bool
) -> list[Compared]:
    """Ask every place everything.

    Args:
        training: What is right.
        places: The others.
        examples: What they are asked.
        labelled: Whether one entry of an answer is the likeliest, which must be the same then.
    """
    found = {place.name: Compared(place=place.name) for place in places}
    for example in examples:
        expected = training.answer(example)
        for place in places:
            answer, one = place.answer(example), found[place.name]
            if isinstance(answer, np.ndarray):
                difference = apart(answer, expected)
                one.otherwise += labelled and difference < math.inf and not _alike(answer, expected)
            else:
                difference = apart(answer, training.reply(expected))
                one.otherwise += difference == math.inf
            one.examples += 1
            if not one.worst or not difference <= one.difference:
                one.difference, one.worst = difference, example.name
    return list(found.values())


def apart(one: Any, other: Any) -> float:
    """The largest absolute difference of two arrays or JSON values; infinite where they are not of one form."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape:
            return math.inf
        difference = float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max(initial=0.0))
        return math.inf if math.isnan(difference) else difference
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return (
            max((apart(one[key], other[key]) for key in one), default=0.0) if one.keys() == other.keys() else math.inf
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return max(map(apart, one, other), default=0.0) if len(one) == len(other) else math.inf
    if isinstance(one, int | float) and isinstance(other, int | float) and not isinstance(one, bool):
        return abs(one - other)
    return 0.0 if one == other else math.inf


def _alike(answer: Array, expected: Array) -> bool:
    return bool((answer.argmax(-1) == expected.argmax(-1)).all())
