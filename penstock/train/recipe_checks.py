"""Checks of a recipe's fields: each error names the field, its value and what to give."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast

from penstock.core.errors import TrainError

# Functions of a recipe: name, whether it may be None, and what to give.
_FUNCTIONS = (
    ("data", True, "a function that returns Data(train=..., validation=...)"),
    ("loss", False, "torch.nn.functional.cross_entropy, for example"),
    ("optimizer", False, "Optimizer('adamw', lr=1e-3), for example, or a function that makes an optimizer"),
    ("schedule", True, "Schedule('cosine', warmup=0.05), for example"),
    ("augment", True, "a function of the inputs, the targets and a generator"),
    ("calibrate", True, "a function of the run's folder and the predictions"),
    ("raw_examples", True, "a function that returns a few arrays"),
)


def check_functions(recipe: Any) -> None:
    """Check that each field that must be a function is one, and that metrics are functions by name.

    Raises:
        TrainError: One is not.
    """
    for name, optional, example in _FUNCTIONS:
        value = getattr(recipe, name)
        if not callable(value) and not (optional and value is None):
            raise TrainError(f"the recipe has {name} {value!r}, which is not a function; give {example}.")
    metrics = recipe.metrics
    if not isinstance(metrics, Mapping) or not all(map(callable, cast(Mapping[Any, Any], metrics).values())):
        raise TrainError(
            f"the recipe has metrics {metrics!r}; give functions by name, such as {{'accuracy': accuracy}}."
        )


def check_records(recipe: Any, records: Iterable[tuple[str, type, bool]]) -> None:
    """Check that each field that must be a record is one of its class.

    Args:
        recipe: The recipe.
        records: For each such field its name, its class, and whether it may be None.

    Raises:
        TrainError: One is not.
    """
    for name, kind, optional in records:
        value = getattr(recipe, name)
        if not isinstance(value, kind) and not (optional and value is None):
            raise TrainError(f"the recipe has {name} {value!r}; give {kind.__name__}(...), of penstock.train.recipe.")


def check_positive(name: str, value: Any) -> None:
    """Check that a number, if it is given, is above 0 and finite."""
    if value is not None and not (isinstance(value, Real) and 0 < float(value) < math.inf):
        raise TrainError(f"the recipe has {name} {value!r}; it must be a number above 0.")


def check_patterns(freeze: Any, lr_scale: Any) -> None:
    """Check the patterns of `freeze` and `lr_scale`."""
    if not isinstance(freeze, list | tuple) or not all(isinstance(each, str) for each in cast(Sequence[Any], freeze)):
        raise TrainError(f'the recipe has freeze {freeze!r}; it must be a list of patterns, such as ["backbone.*"].')
    if not isinstance(lr_scale, Mapping):
        raise TrainError(f"the recipe has lr_scale {lr_scale!r}; give factors by patterns, such as {{'head': 10.0}}.")
    for pattern, scale in cast(Mapping[Any, Any], lr_scale).items():
        if not isinstance(pattern, str) or type(scale) not in (int, float) or not 0 < scale < math.inf:
            raise TrainError(
                f"the recipe has the lr_scale {pattern!r}: {scale!r}; it must be a number above 0; "
                f"freeze the parameter instead of 0."
            )


def check_whole(name: str, value: Any, *, optional: bool = False) -> None:
    """Check that a number is whole, or None if it is `optional`."""
    if not isinstance(value, int) and not (optional and value is None):
        # The files of a run are JSON, which has no numbers of NumPy.
        kind = "an int, not a number of NumPy" if isinstance(value, Integral) else "a whole number"
        raise TrainError(f"the recipe has {name} {value!r}; it must be {kind}.")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Check that a value is one of the choices."""
    if value not in choices:
        raise TrainError(f"the recipe has {name} {value!r}; choose one of {', '.join(choices)}.")
