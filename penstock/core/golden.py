"""Golden examples: recorded inputs and outputs, against which every executor is checked."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import GoldenMismatch
from penstock.core.spec import Array

# N examples, then the shape of one chunk

# Relative to the largest prepared number.
PREPARED_TOLERANCE = 1e-4


def raw_names(count: int) -> list[str]:
    """The names of raw arrays in the files of golden examples."""
    return [f"raw.{index}" for index in range(count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """Examples recorded when the bundle was written.

    Args:
        inputs: Raw inputs, `[N, *input.shape]`.
        outputs: The network's answers, `[N, *output.shape]`.
        tolerance: Largest allowed absolute difference from `outputs`.
        raws: The N raw arrays that `inputs` were prepared from; empty without a `prepare`.
    """

    inputs: Array
    outputs: Array
    tolerance: float
    raws: tuple[Array, ...] = ()

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
            if prepared.shape != recorded.shape:
                raise GoldenMismatch(
                    f"raw {list(raw.shape)} is prepared to shape {list(prepared.shape)} where {list(recorded.shape)} "
                    f"was recorded; the application changed. Train again, or use the application that wrote the bundle."
                )
            differences.append(float(np.abs(prepared.astype(np.float64) - recorded.astype(np.float64)).max()))
        largest = float(np.max(differences))
        # Written so that NaN fails.
        if not largest <= self.prepared_tolerance:
            raise GoldenMismatch(
                f"the prepared inputs differ from the recorded ones by {largest:.3g} where "
                f"{self.prepared_tolerance:.3g} is allowed; the application or a library changed. Train again, or go "
                f"back to those versions."
            )
        return largest

    def check(self, predict: Callable[[Array], Array]) -> float:
        """Run the examples through `predict` and return the largest absolute difference.

        Raises:
            GoldenMismatch: It exceeds the tolerance, or the shape differs.
        """
        # A copy, because a network may modify its input in place.
        answers = predict(self.inputs.copy())
        if answers.shape != self.outputs.shape:
            raise GoldenMismatch(
                f"the network answers with shape {list(answers.shape)} where {list(self.outputs.shape)} was recorded; "
                f"the application changed. Train again, or use the application that wrote the bundle."
            )
        if not np.isfinite(answers).all():
            raise GoldenMismatch("the network answers its golden examples with NaN or infinity; train again.")
        # Extended precision represents 64-bit integers exactly.
        errors = np.abs(answers.astype(np.longdouble) - self.outputs.astype(np.longdouble))
        difference = float(errors.max(initial=0.0))
        if not difference <= self.tolerance:
            raise GoldenMismatch(
                f"the network's answers differ from the recorded ones by {difference:.3g} where {self.tolerance:.3g} "
                f"is allowed; the application or a library changed. Train again, or go back to those versions."
            )
        return difference
