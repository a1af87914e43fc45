"""Largest differences between the backends."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from penstock.core.agreement import Agreement
from penstock.core.spec import Array
from penstock.verify.backends import Backend, Reference
from penstock.verify.verify_inputs import Example

# Name of the reason in a server's reply.
ENDED = "ended"


@dataclass(kw_only=True, slots=True)
class Comparison:
    """Differences of one backend from the training code.

    Args:
        backend: Its name.
        tensor: The output that is compared; empty for a whole answer: one tensor, or a reply.
        examples: Number of examples.
        difference: Largest absolute difference; infinite if an answer has another form.
        worst: The example with that difference.
        disagreements: Answers with another likeliest entry.
    """

    backend: str
    tensor: str = ""
    examples: int = 0
    difference: float = 0.0
    worst: str = ""
    disagreements: int = 0

    def count(self, example: str, difference: float, *, disagrees: bool) -> None:
        """Add one example."""
        self.examples += 1
        self.disagreements += disagrees
        if not self.worst or not difference <= self.difference:
            self.difference, self.worst = difference, example


def compare(
    training: Reference,
    backends: Sequence[Backend],
    examples: Iterable[Example],
    *,
    labelled: Collection[str],
    rule: Agreement | None = None,
) -> list[Comparison]:
    """Run every example on every backend.

    Args:
        training: The reference.
        backends: The others.
        examples: The inputs.
        labelled: Names of the outputs that have labels; their likeliest entries must agree. Of one tensor, any name.
        rule: The rule by which rows are compared as sets; None if there are none.

    Returns:
        One comparison for each backend, or for each of its tensors where there are several.
    """
    found: dict[tuple[str, str], Comparison] = {}
    for example in examples:
        expected = training.answer(example)
        for backend in backends:
            given, truth, in_sets = backend.answer(example), expected, dict[str, float]()
            if rule is not None and rule.sets is not None:
                given, truth, set_rule = training.comparable(given, expected, rule, example)
                in_sets = set_rule.differences(given, truth) if _is_named(given, truth) else {}
            for tensor, answer, wanted in _parts(given, truth, training, example):
                one = found.setdefault((backend.name, tensor), Comparison(backend=backend.name, tensor=tensor))
                if tensor in in_sets:
                    one.count(example.name, in_sets[tensor], disagrees=in_sets[tensor] == math.inf)
                    continue
                difference = difference_of(answer, wanted)
                if isinstance(answer, np.ndarray):
                    has_labels = tensor in labelled if tensor else bool(labelled)
                    disagrees = has_labels and difference < math.inf and not _agree(answer, wanted)
                else:
                    disagrees = difference == math.inf
                one.count(example.name, difference, disagrees=disagrees)
    order = [backend.name for backend in backends]
    return sorted(found.values(), key=lambda one: order.index(one.backend))


def _parts(answer: Any, expected: Any, training: Reference, example: Example) -> Iterator[tuple[str, Any, Any]]:
    """Pair an answer with the expected one: the arrays of each tensor, else a whole array or reply."""
    if _is_named(answer, expected):
        yield from ((name, answer[name], wanted) for name, wanted in expected.items())
        return
    if isinstance(answer, np.ndarray):
        yield "", answer, expected
        return
    reply = training.reply(expected, example)
    yield "", _without_reason(answer, reply), reply


def _without_reason(answer: Any, reply: Any) -> Any:
    """Leave out the reason why an answer in steps ended, which a server adds to the application's reply."""
    if not isinstance(answer, dict) or not isinstance(reply, dict) or ENDED in reply:
        return answer
    return {name: value for name, value in cast(dict[str, Any], answer).items() if name != ENDED}


def _is_named(answer: Any, expected: Any) -> bool:
    if not isinstance(answer, dict) or not isinstance(expected, dict):
        return False
    named = cast(dict[str, Any], answer)
    return named.keys() == expected.keys() and all(isinstance(each, np.ndarray) for each in named.values())


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
