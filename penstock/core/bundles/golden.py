"""Golden examples: recorded inputs and outputs, against which every executor is checked."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.core.agreement import Agreement, RecordedAnswers, Worst, scales_of
from penstock.core.errors import GoldenMismatch, WholeNumberMismatch
from penstock.core.spec import Array

# N examples, then the shape of one chunk

# Relative to the largest prepared number.
PREPARED_TOLERANCE = 1e-4
# The likeliest cause where an output of whole numbers differs by one, and the fix.
WHOLE_NUMBERS = (
    "most likely a fraction next to a border is rounded up in one place and down in another. Declare the fractions as "
    "the output, in float32, and round them in `reply`."
)
_CHANGED = "the application or a library changed. Train again, or go back to those versions."
# Relative to the largest recorded output.
TOLERANCE_FP32 = 1e-4


def raw_names(count: int) -> list[str]:
    """The names of raw arrays in the files of golden examples."""
    return [f"raw.{index}" for index in range(count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden(RecordedAnswers):
    """Examples recorded when the bundle was written; for the answers see `RecordedAnswers`.

    Args:
        inputs: Raw inputs, `[N, *input.shape]`; several tensors as records, see `RecordSpec`.
        raws: The N raw arrays that `inputs` were prepared from; empty without a `prepare`.
        network: With a `finish`, the network's own outputs for the first M inputs, `[M, ...]`, M up to N.
    """

    inputs: Array
    raws: tuple[Array, ...] = ()
    network: Array | None = None

    @property
    def prepared_tolerance(self) -> float:
        """Largest allowed absolute difference of prepared inputs."""
        return PREPARED_TOLERANCE * max(1.0, float(np.abs(self.inputs.astype(np.float64)).max(initial=0.0)))

    def check_prepared(self, prepare: Callable[[Array], Array]) -> float:
        """Prepare the raw arrays and return the largest absolute difference from `inputs`.

        Raises:
            GoldenMismatch: It exceeds the tolerance, or a shape differs.
        """
        worst = Worst()
        for number, (raw, recorded) in enumerate(zip(self.raws, self.inputs, strict=True)):
            prepared = prepare(raw.copy())
            _check_shape(f"raw {list(raw.shape)} is prepared to", prepared, recorded)
            difference = float(np.abs(prepared.astype(np.float64) - recorded.astype(np.float64)).max())
            # Written so that NaN is the worst.
            if not difference <= worst.difference:
                worst = Worst(difference=difference, example=number)
        return _checked("prepared inputs", worst, self.prepared_tolerance)

    def check(self, predict: Callable[[Array], Array]) -> float:
        """Run the examples through `predict` and return the largest absolute difference.

        Raises:
            GoldenMismatch: It exceeds the tolerance, or the shape differs.
        """
        # A copy, because a network may modify its input in place.
        answers = predict(self.inputs.copy())
        _check_shape("the network answers with", answers, self.outputs)
        rule = self.agreement
        if (unequal := rule.unequal(answers, self.outputs)) is not None:
            raise GoldenMismatch(
                f"{unequal.tensor!r} of golden example {unequal.example} is not the recorded one{unequal.numbers()}; "
                f"the application or a library changed, or the network depends on padding or on the other rows. Train "
                f"again, or go back to those versions."
            )
        _check_finite(answers)
        worst = rule.worst(answers, self.outputs)
        if self.sets is not None and self.sets.fix:
            fix = f"{self.sets.fix} If no rows swapped, {_CHANGED}"
        else:
            self._check_whole(worst)
            fix = _CHANGED
        return _checked("network's answers", worst, self.tolerance, fix)

    def _check_whole(self, worst: Worst) -> None:
        """Raise an error with the likeliest cause if whole numbers differ by one."""
        numbers = self.outputs[worst.tensor] if worst.tensor else self.outputs
        difference = worst.difference / worst.scaled
        if numbers.dtype.kind in "iu" and worst.difference > self.tolerance and round(difference, 6) == 1:
            raise WholeNumberMismatch(
                f"the network's answers differ from the recorded ones by 1 in whole numbers, most {worst.place()}"
                f"{worst.numbers()}; {WHOLE_NUMBERS}"
            )

    def check_network(self, predict: Callable[[Array], Array]) -> float:
        """Run the examples through the network without its `finish`; returns the largest absolute difference.

        Raises:
            GoldenMismatch: It exceeds the tolerance, or the shape differs.
        """
        if self.network is None:
            return 0.0
        answers = predict(self.inputs[: len(self.network)].copy())
        _check_shape("the network gives its finish", answers, self.network)
        _check_finite(answers)
        # The same share of the largest number as for the outputs.
        tolerance = self.tolerance / max(scales_of(self.outputs).values()) * max(scales_of(self.network).values())
        rule = Agreement(output=None, sets=None, tolerance=tolerance, scales=scales_of(self.network))
        return _checked("network's outputs before its finish", rule.worst(answers, self.network), tolerance)


def _check_shape(found: str, array: Array, recorded: Array) -> None:
    if array.shape != recorded.shape:
        raise GoldenMismatch(
            f"{found} shape {list(array.shape)} where {list(recorded.shape)} was recorded; the application changed. "
            f"Train again, or use the application that wrote the bundle."
        )


def _checked(what: str, worst: Worst, tolerance: float, fix: str = _CHANGED) -> float:
    # Written so that NaN fails.
    if not worst.difference <= tolerance:
        raise GoldenMismatch(
            f"the {what} differ from the recorded ones {worst.beyond(tolerance)}, most "
            f"{worst.place()}{worst.numbers()}; {fix}"
        )
    return worst.difference


def _check_finite(answers: Array) -> None:
    for name in answers.dtype.names or [...]:
        if not np.isfinite(answers[name]).all():
            raise GoldenMismatch("the network answers its golden examples with NaN or infinity; train again.")


def largest_output(outputs: Array) -> float:
    """Return the largest absolute number of outputs, over all tensors."""
    return max(
        float(np.abs(outputs[name].astype(np.float64)).max(initial=0.0)) for name in outputs.dtype.names or [...]
    )


def default_tolerance(outputs: Array) -> float:
    """Return 1e-4 of the largest recorded output, or 1e-4 where that is below 1."""
    return TOLERANCE_FP32 * max(1.0, largest_output(outputs))
