"""Turn a classifier's probabilities into an answer: a group, a label within the group, or "unsure".

`device/web/recognition.js` computes the same; `tests/data/recognition.json` tests both.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.core.errors import ApplicationError, InvalidInput
from penstock.core.json_record import JsonRecord
from penstock.core.spec import Array

# L labels, G groups

TOP = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Recognition(JsonRecord):
    """Labels, groups and thresholds of a classifier's answers, for single inputs and for frames of a video.

    Args:
        labels: One name for each probability.
        groups: `groups[i]` is the general class of `labels[i]`; by default each label is a group of its own.
        unsure_below: A group with a smaller probability is not named, nor a label with a smaller share of its group.
        half_life_s: Time after which a video frame counts half.
        enter: Smoothed probability from which another group is shown.
        leave: Smoothed probability down to which the shown group stays.

    Raises:
        ApplicationError: A field is out of range.
    """

    unreadable = "a recognition is not readable ({}); write it again."
    labels: tuple[str, ...]
    groups: tuple[str, ...] | None = None
    unsure_below: float = 0.5
    half_life_s: float = 0.3
    enter: float = 0.6
    leave: float = 0.4
    group_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
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
                f"Recognition has leave={self.leave} above enter={self.enter}; the shown group would flicker."
            )
        if not _is_number(self.half_life_s) or not 0 < self.half_life_s < float("inf"):
            raise ApplicationError(
                f"Recognition has half_life_s={self.half_life_s!r}; it must be a number of seconds above 0."
            )
        names = tuple(dict.fromkeys(self.group_of))
        object.__setattr__(self, "group_names", names)
        object.__setattr__(self, "_group_L", np.array([names.index(name) for name in self.group_of]))

    @property
    def group_of(self) -> tuple[str, ...]:
        """The group of each label."""
        return self.labels if self.groups is None else self.groups

    def group_sums(self, probability_L: Array) -> Array:
        """The summed probability of each group, float64 `[G]`, in the order of `group_names`."""
        # bincount adds from the first to the last, as JavaScript does.
        return np.bincount(self._group_L, probability_L)

    def answer(self, probabilities: Array) -> dict[str, Any]:
        """Name the group with the largest summed probability, and the likeliest label within it; of equals, the first.

        Args:
            probabilities: `[labels]`, of any float dtype.

        Returns:
            `group` and `label`, either None if unsure; `probability` of the likeliest label and `group_probability` of
            its group, named or not; `unsure`: whether no group is named; `top`: up to 5 pairs of label and probability.

        Raises:
            InvalidInput: There is not one number for each label, or one is not finite.
        """
        probability_L = np.asarray(probabilities, np.float64)
        if probability_L.shape != (len(self.labels),) or not np.isfinite(probability_L).all():
            raise InvalidInput(
                f"probabilities have shape {list(probability_L.shape)}; give one finite number for each of the "
                f"{len(self.labels):,} labels."
            )
        sums_G = self.group_sums(probability_L)
        group = int(sums_G.argmax())
        return self.answer_with_group(probability_L, sums_G, group, sure=bool(sums_G[group] >= self.unsure_below))

    def answer_with_group(self, probability_L: Array, sums_G: Array, group: int, *, sure: bool) -> dict[str, Any]:
        """The fields of `answer` for a group that is already chosen.

        Args:
            probability_L: Of each label, float64.
            sums_G: From `group_sums`.
            group: Index of the group.
            sure: Whether the group is named.
        """
        index = int(np.where(self._group_L == group, probability_L, -np.inf).argmax())
        probability, group_probability = float(probability_L[index]), float(sums_G[group])
        named = sure and probability >= self.unsure_below * group_probability
        top = np.argsort(-probability_L, kind="stable")[:TOP]
        return {
            "label": self.labels[index] if named else None,
            "group": self.group_names[group] if sure else None,
            "probability": probability,
            "group_probability": group_probability,
            "unsure": not sure,
            "top": [[self.labels[at], float(probability_L[at])] for at in top],
        }

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values, with a group for every label."""
        return JsonRecord.to_json(self) | {"groups": list(self.group_of)}


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def kinds_and_groups(labels: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Derive the display name and the general class of each label.

    Args:
        labels: `"cat"`, `"dog/terrier"`.

    Returns:
        `"cat"`, `"terrier"` (the whole label where two classes have a kind of that name); and `"cat"`, `"dog"`.
    """
    names = [label.rpartition("/")[2] for label in labels]
    often = Counter(names)
    kinds = tuple(name if often[name] == 1 else label for name, label in zip(names, labels, strict=True))
    return kinds, tuple(label.partition("/")[0] for label in labels)
