"""The comparison of an answer with the expected one, which every place uses: executors, packs, servers, devices.

Numbers are compared by a tolerance, relative to the scale of their tensor. The rows that a `finish` keeps are compared
as a set: matched one to one, in any order; a row whose score is within the tolerance of the cut-off may be missing.
"""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ApplicationError
from penstock.core.json_record import JsonRecord
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array

# N examples, F found rows, E expected rows

Matrix = npt.NDArray[np.float64]

# The likeliest cause where the outputs of a finish without sets differ, and the fix.
NO_SETS = (
    "the outputs of its finish are compared number by number. If rows with equal scores swapped, as in a top-k, "
    "declare the number of rows as a Dim that no input has, such as Dim('rows', max=5, min=5), so that they are "
    "compared as a set."
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RowSets(JsonRecord):
    """The dimensions whose rows are compared as sets.

    Args:
        dims: Their names.
        score: The output that decides which rows are kept; empty if none does.
        threshold: Rows with a smaller score are left out; None without one.
    """

    unreadable = "the sets of rows are not readable ({}); write the bundle again."
    dims: tuple[str, ...]
    score: str = ""
    threshold: float | None = None

    @property
    def fix(self) -> str:
        """The fix for rows that only swapped, for messages; empty where they are compared as sets."""
        return "" if self.dims else NO_SETS


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Worst:
    """The largest difference of several answers.

    Args:
        difference: Absolute, of the tensor with the largest numbers; that of other tensors is scaled accordingly. NaN
            if a number is, infinite if a row has no partner or a whole number that must be equal is not.
        example: Index of the answer.
        tensor: The output; empty if there is one tensor.
        is_whole: Whether it is of whole numbers that must be equal.
        element: Index of the number in the answer; None for sets of rows.
        found: The number there.
        expected: The one that was expected.
        scaled: What the difference of its tensor was multiplied by.
    """

    difference: float = 0.0
    example: int = 0
    tensor: str = ""
    is_whole: bool = False
    element: tuple[int, ...] | None = None
    found: float = 0.0
    expected: float = 0.0
    scaled: float = 1.0

    def numbers(self) -> str:
        """`, element [2, 0]: 0.51 instead of 0.5`, for messages; empty where no element is known."""
        if self.element is None:
            return ""
        return f", element {list(self.element)}: {self.found:.6g} instead of {self.expected:.6g}"

    def place(self) -> str:
        """`in 'boxes' of example 3`, for messages."""
        return f"in {self.tensor!r} of example {self.example}" if self.tensor else f"in example {self.example}"

    def beyond(self, allowed: float) -> str:
        """`by 0.01 where 0.001 is allowed`, or the kind of mismatch where there is no number, for messages.

        Args:
            allowed: The largest difference of the tensor with the largest numbers; the message has that of its own.
        """
        if self.is_whole:
            return "in whole numbers, which must be equal"
        if self.difference == inf:
            return "by a row that only one of them has"
        return f"by {self.difference / self.scaled:.3g} where {allowed / self.scaled:.3g} is allowed"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """The rule by which answers agree.

    Args:
        output: One answer; needed for sets only.
        sets: Rows that are compared as sets; None if there are none.
        tolerance: Largest allowed difference of the tensor with the largest numbers.
        scales: Largest absolute number of each tensor by name, at least 1; of a single tensor under the empty name.
        exact_whole: Whole numbers must be equal: the steps and tokens of answers that take steps.
    """

    output: ChunkSpec | None
    sets: RowSets | None
    tolerance: float
    scales: dict[str, float]
    exact_whole: bool = False

    @property
    def tolerances(self) -> dict[str, float]:
        """Largest allowed absolute difference of each tensor."""
        whole = max(self.scales.values())
        output = self.output if self.exact_whole and isinstance(self.output, RecordSpec) else RecordSpec(())
        exact = {*output.dims, *(spec.name for spec in output.tensors if spec.numpy_dtype.kind in "biu")}
        return {name: 0.0 if name in exact else self.tolerance * scale / whole for name, scale in self.scales.items()}

    def unequal(self, answers: Array, expected: Array) -> Worst | None:
        """Return the first tensor of whole numbers that must be equal and are not; None if there is none."""
        for name in (expected.dtype.names or ()) if self.exact_whole else ():
            differs = answers[name] != expected[name]
            if expected[name].dtype.kind in "biu" and differs.any():
                at = np.unravel_index(int(differs.argmax()), differs.shape)
                return _worst_at(at, inf, name, answers[name], expected[name], is_whole=True)
        return None

    def worst(self, answers: Array, expected: Array) -> Worst:
        """Return the largest difference of answers `[N, ...]` from the expected ones, of the same shape."""
        if self.sets is not None and self.sets.dims and isinstance(self.output, RecordSpec):
            return self._worst_of_sets(self.output, answers, expected)
        names, whole = expected.dtype.names, max(self.scales.values())
        if names is None:
            return _largest("", answers, expected, 1.0)
        if (unequal := self.unequal(answers, expected)) is not None:
            return unequal
        each = [_largest(name, answers[name], expected[name], whole / self.scales[name]) for name in names]
        return max(each, key=lambda one: inf if np.isnan(one.difference) else one.difference)

    def _worst_of_sets(self, output: RecordSpec, answers: Array, expected: Array) -> Worst:
        worst, whole = Worst(), max(self.scales.values())
        for example in range(len(expected)):
            named = output.unpack(answers[example, ...]), output.unpack(expected[example, ...])
            for tensor, difference in self.differences(*named).items():
                # Written so that NaN is the worst.
                if not difference * whole / self.scales[tensor] <= worst.difference:
                    scaled = whole / self.scales[tensor]
                    worst = Worst(difference=difference * scaled, example=example, tensor=tensor, scaled=scaled)
        return worst

    def agree(self, found: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
        """Check one answer, its tensors by name."""
        tolerances = self.tolerances
        return all(difference <= tolerances[name] for name, difference in self.differences(found, expected).items())

    def differences(self, found: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, float]:
        """Return the largest absolute difference of each tensor of one answer, by name; infinite for another shape."""
        tolerances, output = self.tolerances, self.output
        in_sets: dict[str, float] = {}
        if self.sets is not None and isinstance(output, RecordSpec):
            for dim in self.sets.dims:
                axes = {
                    spec.name: [getattr(size, "name", "") for size in spec.shape].index(dim)
                    for spec in output.tensors
                    if dim in (size.name for size in spec.dims)
                }
                room = int(output.dims[dim])
                in_sets |= _set_differences(found, expected, axes, self.sets, tolerances, room)
        return in_sets | {name: _difference(found[name], expected[name]) for name in expected if name not in in_sets}


def scales_of(outputs: Array) -> dict[str, float]:
    """Return the scale of each tensor of answers `[N, ...]`, see `Agreement`."""
    names = outputs.dtype.names
    if names is None:
        return {"": _scale(outputs)}
    return {name: _scale(outputs[name]) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedAnswers(ABC):
    """The recorded answers of a bundle or a pack.

    Args:
        outputs: The answers, `[N, ...]`; records where there are several outputs or lengths vary.
        tolerance: Largest allowed absolute difference from `outputs`.
        output: One answer; needed for `sets` and `exact_whole` only.
        sets: Rows of the outputs that are compared as sets; None without a `finish`.
        exact_whole: Whole numbers must be equal: the steps and tokens of answers that take steps.
    """

    outputs: Array
    tolerance: float
    output: ChunkSpec | None = None
    sets: RowSets | None = None
    exact_whole: bool = False

    @property
    def agreement(self) -> Agreement:
        """The rule by which answers agree with `outputs`."""
        return Agreement(
            output=self.output,
            sets=self.sets,
            tolerance=self.tolerance,
            scales=scales_of(self.outputs),
            exact_whole=self.exact_whole,
        )

    @property
    def shown(self) -> float:
        """The factor of differences and tolerances that are shown: they are then those of the largest output.

        Both are kept relative to the largest number of all tensors, which may be a length, as no reader expects.
        """
        scales = scales_of(self.outputs)
        lengths = self.output.dims if isinstance(self.output, RecordSpec) else {}
        return max((scales[name] for name in scales if name not in lengths), default=1.0) / max(scales.values())


def _scale(array: Array) -> float:
    return max(1.0, float(np.abs(array.astype(np.longdouble)).max(initial=0.0)))


def _difference(found: Array, expected: Array) -> float:
    if found.shape != expected.shape:
        return inf
    # Extended precision represents 64-bit integers exactly.
    return float(np.abs(found.astype(np.longdouble) - expected.astype(np.longdouble)).max(initial=0.0))


def _largest(tensor: str, answers: Array, expected: Array, factor: float) -> Worst:
    errors = np.abs(answers.astype(np.longdouble) - expected.astype(np.longdouble)) * factor
    if not errors.size:
        return Worst(tensor=tensor)
    # argmax finds NaN first.
    at = np.unravel_index(int(errors.argmax()), errors.shape)
    return replace(_worst_at(at, float(errors[at]), tensor, answers, expected), scaled=factor)


def _worst_at(
    at: tuple[Any, ...], difference: float, tensor: str, answers: Array, expected: Array, *, is_whole: bool = False
) -> Worst:
    return Worst(
        difference=difference,
        example=int(at[0]),
        tensor=tensor,
        is_whole=is_whole,
        element=tuple(int(each) for each in at[1:]),
        found=float(answers[at]),
        expected=float(expected[at]),
    )


def _set_differences(
    found: Mapping[str, Array],
    expected: Mapping[str, Array],
    axes: Mapping[str, int],
    sets: RowSets,
    tolerances: Mapping[str, float],
    room: int,
) -> dict[str, float]:
    """The largest difference of each tensor over matched rows; infinite in one of them where a row has no partner."""
    pairs: dict[str, Matrix] = {}
    for name, axis in axes.items():
        rows_F, rows_E = (np.moveaxis(np.asarray(side[name]), axis, 0) for side in (found, expected))
        if rows_F.shape[1:] != rows_E.shape[1:]:
            return dict.fromkeys(axes, inf)
        pairs[name] = _row_differences(rows_F, rows_E)
    if len({pair.shape for pair in pairs.values()}) != 1:
        return dict.fromkeys(axes, inf)
    rows = _matched(pairs, tolerances)
    lone_F, lone_E = (sorted(set(range(count)) - taken) for count, taken in _taken(pairs, rows))
    if sets.score in axes:
        score_F, score_E, near = found[sets.score], expected[sets.score], tolerances[sets.score]
        # A row is left out of the other list if it is at the other's cut-off.
        limits_F, limits_E = (_cut_offs(scores, sets.threshold, room) for scores in (score_F, score_E))
        lone_F = [row for row in lone_F if not _is_near(score_F[row], limits_E, near)]
        lone_E = [row for row in lone_E if not _is_near(score_E[row], limits_F, near)]
    rows += _nearest(pairs, tolerances, lone_F, lone_E)
    largest = {name: max((float(pair[row]) for row in rows), default=0.0) for name, pair in pairs.items()}
    if len(lone_F) != len(lone_E):
        largest[sets.score if sets.score in axes else next(iter(axes))] = inf
    return largest


def _row_differences(rows_F: Array, rows_E: Array) -> Matrix:
    if not rows_F.size or not rows_E.size:
        return np.zeros((len(rows_F), len(rows_E)))
    wide_F, wide_E = (rows.astype(np.longdouble).reshape(len(rows), -1) for rows in (rows_F, rows_E))
    # One column at a time, as rows may be many and long.
    differences = np.zeros((len(rows_F), len(rows_E)))
    for column in range(wide_F.shape[1]):
        each = np.abs(wide_F[:, column, None] - wide_E[None, :, column]).astype(np.float64)
        np.maximum(differences, np.where(np.isnan(each), inf, each), out=differences)
    return differences


def _matched(pairs: Mapping[str, Matrix], tolerances: Mapping[str, float]) -> list[tuple[int, int]]:
    """A largest matching of rows that agree in every tensor, the nearest first."""
    agree = np.logical_and.reduce([pair <= tolerances[name] for name, pair in pairs.items()])
    cost = _cost(pairs, tolerances)
    found = np.argwhere(agree)
    partner_F: dict[int, int] = {}
    partner_E: dict[int, int] = {}
    for row, other in found[np.argsort(cost[agree], kind="stable")].tolist():
        if row not in partner_F and other not in partner_E:
            partner_F[row], partner_E[other] = other, row
    for row in sorted(set(found[:, 0].tolist()) - partner_F.keys()):
        _augment(agree, row, partner_F, partner_E)
    return list(partner_F.items())


def _augment(agree: Array, start: int, partner_F: dict[int, int], partner_E: dict[int, int]) -> None:
    """Give a row a partner by moving other rows to other partners, if that is possible (Berge, 1957)."""
    came_from: dict[int, int] = {}
    waiting = [start]
    while waiting:
        row = waiting.pop(0)
        for other in np.flatnonzero(agree[row]).tolist():
            if other in came_from:
                continue
            came_from[other] = row
            if other in partner_E:
                waiting.append(partner_E[other])
                continue
            end: int | None = other
            while end is not None:
                row = came_from[end]
                before = partner_F.get(row)
                partner_F[row], partner_E[end] = end, row
                end = before
            return


def _nearest(
    pairs: Mapping[str, Matrix], tolerances: Mapping[str, float], lone_F: list[int], lone_E: list[int]
) -> list[tuple[int, int]]:
    """Pair the rows that are left with the nearest ones, to say by how much they differ."""
    if not lone_F or not lone_E:
        return []
    cost = _cost(pairs, tolerances)[np.ix_(lone_F, lone_E)]
    made: list[tuple[int, int]] = []
    for at in np.argsort(cost, axis=None, kind="stable").tolist():
        row, other = lone_F[at // len(lone_E)], lone_E[at % len(lone_E)]
        if row not in (one for one, _ in made) and other not in (two for _, two in made):
            made.append((row, other))
    return made


def _cost(pairs: Mapping[str, Matrix], tolerances: Mapping[str, float]) -> Matrix:
    return np.add.reduce([pair / (tolerances[name] or 1.0) for name, pair in pairs.items()])


def _taken(pairs: Mapping[str, Matrix], rows: list[tuple[int, int]]) -> list[tuple[int, set[int]]]:
    shape = next(iter(pairs.values())).shape
    return [(shape[0], {one for one, _ in rows}), (shape[1], {two for _, two in rows})]


def _cut_offs(scores: Array, threshold: float | None, room: int) -> list[float]:
    """The threshold, and the smallest score of a list that is full."""
    full = [float(scores.min())] if len(scores) == room else []
    return full if threshold is None else [threshold, *full]


def _is_near(score: Any, limits: list[float], tolerance: float) -> bool:
    return any(abs(float(score) - limit) <= tolerance for limit in limits)


def check_threshold(output: ChunkSpec, sets: RowSets, outputs: Array, tolerance: float) -> None:
    """Check that no recorded row has a score below the declared threshold.

    Raises:
        ApplicationError: One has.
    """
    if sets.threshold is None or not isinstance(output, RecordSpec):
        return
    for row in range(len(outputs)):
        scores = output.unpack(outputs[row, ...])[sets.score]
        if scores.size and float(scores.min()) < sets.threshold - tolerance:
            raise ApplicationError(
                f"the finish keeps a row with {sets.score!r} {float(scores.min()):.3g}, but declares the threshold "
                f"{sets.threshold:g}; declare the one that it uses."
            )
