"""Arrays as words and as JSON."""

from typing import Any

import numpy as np

from penstock.core.scores import are_scores, score_text
from penstock.core.spec import Array, TensorSpec

MAX_NUMBERS = 8
# Of a float32.
DIGITS = 7


def numbers_json(array: Array) -> Any:
    """An array as nested lists, floats with seven digits."""
    if array.dtype.kind != "f":
        return array.tolist()
    return _rounded(array.astype(np.float64).tolist())


def tensor_line(spec: TensorSpec, array: Array) -> str:
    """A tensor in words: the likeliest label, numbers with their names, or the first of many numbers."""
    if are_scores(spec) and array.ndim == 1:
        best = int(array.argmax())
        return f"{spec.labels[best]} ({score_text(spec, float(array[best]))})"
    units = spec.units and f" {spec.units}"
    if spec.labels and array.ndim == 1:
        return ", ".join(f"{label} {value:.4g}{units}" for label, value in zip(spec.labels, array, strict=True))
    flat = array.ravel()
    shown = ", ".join(f"{value:.4g}" if array.dtype.kind == "f" else str(value) for value in flat[:MAX_NUMBERS])
    more = f", ... ({flat.size:,} in all)" if flat.size > MAX_NUMBERS else ""
    return f"{shown}{more}{units}" if flat.size else "none"


def _rounded(numbers: Any) -> Any:
    if isinstance(numbers, list):
        return [_rounded(each) for each in numbers]
    return float(f"{numbers:.{DIGITS}g}")
