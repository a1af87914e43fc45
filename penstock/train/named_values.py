"""Losses and metrics of several named values."""

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from operator import add
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from penstock.core.errors import PenstockError, TrainError, one_line

# torch's message on a CPU.
_NO_CLASS = re.compile(r"Target (-?\d+) is out of bounds")
# Losses of torch that only warn before they expand arguments of different shapes.
_EXPANDING = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)


def checked_loss(loss: Callable[..., Any], outputs: Any, targets: Any, *, sizes: bool = False) -> Any:
    """Call a loss function, and say in a sentence which target is no class, or that shapes do not fit.

    Args:
        loss: The function.
        outputs: Its first argument.
        targets: Its second one.
        sizes: Refuse a loss of torch that expands its input to the shape of the target. Most often it compares all
            pairs of a batch then, so that the network learns the mean of the targets.

    Raises:
        TrainError: A target is out of the range of the outputs' classes, as far as the device reports it; or shapes
            do not fit.
    """
    try:
        with noted("The loss", outputs, targets), _SameShapes() if sizes else nullcontext():
            return loss(outputs, targets)
    except IndexError as error:
        if (found := _NO_CLASS.search(str(error))) is None:
            raise
        count = outputs.shape[min(1, outputs.ndim - 1)] if isinstance(outputs, Tensor) and outputs.ndim else None
        if count is not None and 0 <= int(found[1]) < count:
            # The loss makes the classes itself, of an embedding for example.
            count = None
        classes = ", which is no class" if count is None else f", and the network gives {count:,} classes"
        least_to_most = "of its classes" if count is None else f"from 0 to {count - 1}"
        raise TrainError(
            f"a target is {found[1]}{classes}; give targets {least_to_most}, or a network with more outputs."
        ) from None


@contextmanager
def noted(what: str, outputs: Any, targets: Any) -> Generator[None]:
    """Add to an error of the user's function what it was given; the error and its traceback stay.

    Args:
        what: The function, for the note.
        outputs: Its first argument.
        targets: Its second one.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        error.add_note(f"{what} was given outputs {_form(outputs)} and targets {_form(targets)}.")
        raise


def described_error(error: Exception) -> str:
    """One line with the kind and the message of an error, and which function failed, as `noted` added."""
    kind = "" if isinstance(error, PenstockError) else f"{type(error).__name__}: "
    notes = [" ".join(note.split()).rstrip(".") for note in getattr(error, "__notes__", ())]
    return "; ".join([f"{kind}{one_line(error)}", *notes])


def _form(tree: Any) -> str:
    """The dtypes and shapes of tensors, as they are named."""
    if isinstance(tree, Tensor | np.ndarray):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
    if isinstance(tree, Mapping):
        named = cast(Mapping[object, Any], tree)
        return f"{{{', '.join(f'{name!r}: {_form(part)}' for name, part in named.items())}}}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(_form, cast(Sequence[Any], tree)))})"
    return f"a {type(tree).__name__}"


@final
class _SameShapes(TorchFunctionMode):
    """Refuse a loss of torch that expands its input.

    Torch warns of it, but warnings cannot be recorded here: their filters are shared by all threads, and those that
    decode pictures change them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _EXPANDING:
            given, target = args[:2]
            if _is_expanded(given.shape, target.shape):
                raise TrainError(
                    f"the loss compares outputs {list(given.shape)} with targets {list(target.shape)}, which torch "
                    f"would expand, most often to all pairs of a batch; give both the same shape, by squeeze(-1) or "
                    f"unsqueeze(-1), or by expand_as in the loss if that is meant."
                )
        return func(*args, **(kwargs or {}))


def _is_expanded(given: torch.Size, target: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(given, target) != given
    except RuntimeError:
        # Torch refuses these shapes itself.
        return False


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
                f"the loss{f' {name!r}' if name else ''}{of} is {_described(value)}; it must be one scalar tensor, the "
                f"mean over the batch, or a mapping of such scalar tensors by name, which are summed."
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
