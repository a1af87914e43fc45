"""Losses and metrics of several named values."""

from collections.abc import Iterable, Mapping
from functools import reduce
from operator import add
from typing import Any, cast

from torch import Tensor

from penstock.core.errors import TrainError


def total_loss(found: Any, of: str = "") -> Tensor:
    """Return the loss to minimise: a scalar, or the sum of a mapping of scalars. The host reads no tensor.

    Args:
        found: The result of the loss function.
        of: What it was computed of, for messages.

    Raises:
        TrainError: The loss function gives something else.
    """
    return reduce(add, (value for _, value in _losses(found, of)))


def loss_values(found: Any) -> dict[str, float]:
    """Return the loss as `loss`, and each part of a mapping as `loss.part`. The host waits for the device.

    Raises:
        TrainError: As `total_loss`.
    """
    parts = {f"loss.{name}": value.item() for name, value in _losses(found, "") if name}
    return {"loss": total_loss(found).item(), **parts}


def metric_values(name: str, found: Any) -> dict[str, float]:
    """Return a metric under its name, or each value of a mapping as `name.key`.

    Raises:
        TrainError: The metric gives something else.
    """
    if not isinstance(found, Mapping):
        return {name: _number(name, found)}
    named = cast(Mapping[str, Any], found)
    return {f"{name}.{key}": _number(f"{name}.{key}", value) for key, value in named.items()}


def check_chosen(chosen: Iterable[str], values: Mapping[str, float]) -> None:
    """Check that the metrics by which weights are selected and trainings stop are among those of a validation.

    Raises:
        TrainError: One is not.
    """
    for name in chosen:
        if name not in values:
            raise TrainError(
                f"the recipe chooses by the metric {name!r}, and a validation gives {', '.join(values)}; choose one of "
                f"these."
            )


def _losses(found: Any, of: str) -> list[tuple[str, Tensor]]:
    named = dict(cast(Mapping[str, Any], found)) if isinstance(found, Mapping) else {"": found}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TrainError(
                f"the loss{f' {name!r}' if name else ''}{of} is {_described(value)}; it must be one number, the mean "
                f"over the batch, or a mapping of such scalar tensors by name, which are summed."
            )
    if not named:
        raise TrainError(f"the loss{of} is an empty mapping; give at least one scalar tensor by name.")
    return list(named.items())


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TrainError(
            f"the metric {name!r} is {_described(value)}; a metric gives a number, or a mapping of numbers by name."
        ) from None


def _described(value: Any) -> str:
    return f"a Tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
