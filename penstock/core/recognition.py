"""What is said of a classifier's probabilities: the general class first, then the kind within it, or "unsure".

The offline web app says the same by the same arithmetic in JavaScript; `tests/data/recognition.json` holds both to it.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from penstock.core.errors import ApplicationError, BundleCorrupt, InvalidInput
from penstock.core.spec import Array

# L labels, G groups

TOP = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Recognition:
    """How a classifier's probabilities become an answer, and how answers are steadied over a video's frames.

    Args:
        labels: Names of the kinds, one for each probability.
        groups: `groups[i]` is the general class of `labels[i]`; where left out, each kind is a class of its own.
        unsure_below: A class with a smaller probability is not named, nor a kind with a smaller share of its class's.
        half_life_s: After so many seconds what was seen counts half.
        enter: The smoothed probability from which another class is shown.
        leave: The smoothed probability down to which the class that is shown stays.

    Raises:
        ApplicationError: A field is out of range.
    """

    labels: tuple[str, ...]
    groups: tuple[str, ...] | None = None
    unsure_below: float = 0.5
    half_life_s: float = 0.3
    enter: float = 0.6
    leave: float = 0.4
    _names_G: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _group_L: Array = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _are_names(self.labels) or not self.labels or len(set(self.labels)) != len(self.labels):
            raise ApplicationError(
                f"Recognition has labels {self.labels!r:.80}; they must be a tuple of different names."
            )
        if self.groups is not None and (not _are_names(self.groups) or len(self.groups) != len(self.labels)):
            raise ApplicationError(
                f"Recognition has groups {self.groups!r:.80}; give the general class of each of the "
                f"{len(self.labels):,} labels."
            )
        for name in ("unsure_below", "enter", "leave"):
            if not _is_number(getattr(self, name)) or not 0 <= getattr(self, name) <= 1:
                raise ApplicationError(
                    f"Recognition has {name}={getattr(self, name)!r}; it must be a probability, 0 to 1."
                )
        if self.leave > self.enter:
            raise ApplicationError(
                f"Recognition has leave={self.leave} above enter={self.enter}; what is shown would flicker."
            )
        if not _is_number(self.half_life_s) or not 0 < self.half_life_s < float("inf"):
            raise ApplicationError(
                f"Recognition has half_life_s={self.half_life_s!r}; it must be a number of seconds above 0."
            )
        names = tuple(dict.fromkeys(self.group_of))
        object.__setattr__(self, "_names_G", names)
        object.__setattr__(self, "_group_L", np.array([names.index(name) for name in self.group_of]))

    @property
    def group_of(self) -> tuple[str, ...]:
        """The general class of each label: the label itself where there are none."""
        return self.labels if self.groups is None else self.groups

    def answer(self, probabilities: Array) -> dict[str, Any]:
        """What is said of probabilities.

        The class with the largest summed probability comes first, then the likeliest kind within it; of equals, the
        first.

        Args:
            probabilities: `[labels]`, of any float dtype.

        Returns:
            `group` and `label`, either None where it is unsure; `probability` of the likeliest kind and
            `group_probability` of its class, whether or not they are named; `unsure`, whether not even the class is;
            and `top`, up to 5 pairs of label and probability.

        Raises:
            InvalidInput: There is not one number for each label, or one is not finite.
        """
        probability_L = np.asarray(probabilities, np.float64)
        if probability_L.shape != (len(self.labels),) or not np.isfinite(probability_L).all():
            raise InvalidInput(
                f"probabilities have shape {list(probability_L.shape)}; give one finite number for each of the "
                f"{len(self.labels):,} labels."
            )
        # Summed from the first to the last, as JavaScript does.
        group_G = np.bincount(self._group_L, probability_L)
        group = int(group_G.argmax())
        kind = int(np.where(self._group_L == group, probability_L, -np.inf).argmax())
        group_probability, probability = float(group_G[group]), float(probability_L[kind])
        sure = group_probability >= self.unsure_below
        named = sure and probability >= self.unsure_below * group_probability
        top = np.argsort(-probability_L, kind="stable")[:TOP]
        return {
            "label": self.labels[kind] if named else None,
            "group": self._names_G[group] if sure else None,
            "probability": probability,
            "group_probability": group_probability,
            "unsure": not sure,
            "top": [[self.labels[index], float(probability_L[index])] for index in top],
        }

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values, with a class for every label."""
        return {
            "labels": list(self.labels),
            "groups": list(self.group_of),
            "unsure_below": self.unsure_below,
            "half_life_s": self.half_life_s,
            "enter": self.enter,
            "leave": self.leave,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The record that `to_json` wrote.

        Raises:
            BundleCorrupt: A field is missing, unknown or wrong.
        """
        try:
            tuples: dict[str, Any] = {key: tuple(fields[key]) for key in ("labels", "groups")}
            return cls(**(fields | tuples))
        except (ApplicationError, KeyError, TypeError) as error:
            raise BundleCorrupt(f"what is said of probabilities is not readable ({error}); write it again.") from None


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
