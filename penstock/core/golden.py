"""Golden examples: recorded inputs and outputs, against which every executor is checked."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import GoldenMismatch
from penstock.core.spec import Array

# N examples, then the shape of one chunk

# Relative to the largest prepared number.
PREPARED_TOLERANCE = 1e-4
# Relative to the largest recorded output.
TOLERANCE_FP32 = 1e-4


def raw_names(count: int) -> list[str]:
    """The names of raw arrays in the files of golden examples."""
    return [f"raw.{index}" for index in range(count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """Examples recorded when the bundle was written.

    Args:
        inputs: Raw inputs, `[N, *input.shape]`; several tensors as records, see `RecordSpec`.
        outputs: The network's answers, `[N, *output.shape]`.
        tolerance: Largest allowed absolute difference from `outputs`.
        raws: The N raw arrays that `inputs` were prepared from; empty without a `prepare`.
        exact_whole: Whole numbers must be equal: the steps and tokens of answers that take steps.
    """

    inputs: Array
    outputs: Array
    tolerance: float
    raws: tuple[Array, ...] = ()
    exact_whole: bool = False

    @property
    def tolerances(self) -> dict[str, float]:
        """Largest allowed absolute difference of each output tensor, by name; empty for a single tensor."""
        scales = self._scales()
        whole = max(scales.values(), default=1.0)
        return {name: self.tolerance * scale / whole for name, scale in scales.items()}

    @property
    def prepared_tolerance(self) -> float:
        """Largest allowed absolute difference of prepared inputs."""
        return PREPARED_TOLERANCE * max(1.0, float(np.abs(self.inputs.astype(np.float64)).max(initial=0.0)))

    def check_prepared(self, prepare: Callable[[Array], Array]) -> float:
        """Prepare the raw arrays and return the largest absolute difference from `inputs`.

        Raises:
            GoldenMismatch: It exceeds the tolerance, or a shape differs.
        """
        differences = [0.0]
        for raw, recorded in zip(self.raws, self.inputs, strict=True):
            prepared = prepare(raw.copy())
            _check_shape(f"raw {list(raw.shape)} is prepared to", prepared, recorded)
            differences.append(float(np.abs(prepared.astype(np.float64) - recorded.astype(np.float64)).max()))
        return _checked("prepared inputs", float(np.max(differences)), self.prepared_tolerance)

    def check(self, predict: Callable[[Array], Array]) -> float:
        """Run the examples through `predict` and return the largest absolute difference.

        Raises:
            GoldenMismatch: It exceeds the tolerance, or the shape differs.
        """
        # A copy, because a network may modify its input in place.
        answers = predict(self.inputs.copy())
        _check_shape("the network answers with", answers, self.outputs)
        if self.exact_whole:
            self._check_whole(answers)
        return _checked("network's answers", self._difference(answers), self.tolerance)

    def _check_whole(self, answers: Array) -> None:
        for name in answers.dtype.names or ():
            differs = answers[name] != self.outputs[name]
            if answers[name].dtype.kind in "biu" and differs.any():
                row = int(differs.reshape(len(answers), -1).any(1).argmax())
                raise GoldenMismatch(
                    f"{name!r} of golden example {row} is not the recorded one: the application or a library changed, "
                    f"or the network depends on padding or on the other rows. Train again, or go back to those "
                    f"versions."
                )

    def _difference(self, answers: Array) -> float:
        """Return the largest difference of the tensors, each relative to the scale of its own numbers."""
        names = self.outputs.dtype.names
        if names is None:
            return _difference(answers, self.outputs)
        scales = self._scales()
        whole = max(scales.values())
        return max(_difference(answers[name], self.outputs[name]) * whole / scales[name] for name in names)

    def _scales(self) -> dict[str, float]:
        return {name: _scale(self.outputs[name]) for name in self.outputs.dtype.names or ()}


def _check_shape(found: str, array: Array, recorded: Array) -> None:
    if array.shape != recorded.shape:
        raise GoldenMismatch(
            f"{found} shape {list(array.shape)} where {list(recorded.shape)} was recorded; the application changed. "
            f"Train again, or use the application that wrote the bundle."
        )


def _checked(what: str, difference: float, tolerance: float) -> float:
    # Written so that NaN fails.
    if not difference <= tolerance:
        raise GoldenMismatch(
            f"the {what} differ from the recorded ones by {difference:.3g} where {tolerance:.3g} is allowed; the "
            f"application or a library changed. Train again, or go back to those versions."
        )
    return difference


def _scale(array: Array) -> float:
    return max(1.0, _largest(array))


def _largest(array: Array) -> float:
    return float(np.abs(array.astype(np.float64)).max(initial=0.0))


def largest_output(outputs: Array) -> float:
    """Return the largest absolute number of outputs, over all tensors."""
    names = outputs.dtype.names
    return max(map(_largest, [outputs] if names is None else map(outputs.__getitem__, names)))


def _difference(answers: Array, recorded: Array) -> float:
    if not np.isfinite(answers).all():
        raise GoldenMismatch("the network answers its golden examples with NaN or infinity; train again.")
    # Extended precision represents 64-bit integers exactly.
    errors = np.abs(answers.astype(np.longdouble) - recorded.astype(np.longdouble))
    return float(errors.max(initial=0.0))


def default_tolerance(outputs: Array) -> float:
    """Return 1e-4 of the largest recorded output, or 1e-4 where that is below 1."""
    return TOLERANCE_FP32 * max(1.0, largest_output(outputs))
