"""Fine-tuning by the parameters' names: frozen parameters and layers, and factors on learning rates."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from penstock.core.errors import TrainError
from penstock.train.parallel.batch_norm import BATCH_NORMS
from penstock.train.parallel.tensor_parallel import ParallelModel
from penstock.train.recipe import Recipe

_NEAR, _LISTED = 3, 8


def freeze(module: nn.Module, recipe: Recipe) -> frozenset[str]:
    """Freeze the parameters that a recipe's `freeze` matches, so that they require no gradients.

    Args:
        module: The network, whole.
        recipe: The training recipe.

    Returns:
        Names of the batch norms that keep their running statistics: those whose parameters are all frozen, or that have
        none and lie in a frozen layer; none if the recipe has `frozen_statistics="update"`.

    Raises:
        TrainError: A pattern matches no parameter, or no parameter is left to train.
    """
    # A tied parameter has several names.
    named = list(module.named_parameters(remove_duplicate=False))
    for pattern in recipe.freeze:
        matched = [weight for name, weight in named if _matches(name, pattern)]
        if not matched:
            raise _unmatched("freeze", pattern, [name for name, _ in named])
        for weight in matched:
            weight.requires_grad_(False)
    if recipe.freeze and not any(weight.requires_grad for _, weight in named):
        raise TrainError(f"freeze={list(recipe.freeze)} leaves no parameter to train; freeze fewer.")
    if recipe.frozen_statistics == "update" or not recipe.freeze:
        return frozenset()
    norms = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, BATCH_NORMS)]
    return frozenset(name for name, layer in norms if _is_frozen(name, layer, recipe.freeze))


def scale_rates(optimizer: Optimizer, model: ParallelModel, scales: Mapping[str, float]) -> None:
    """Multiply learning rates by the names of parameters: split the optimizer's groups, unscaled parameters first.

    Args:
        optimizer: The optimizer, before its first step.
        model: The network.
        scales: Factors by patterns of names.

    Raises:
        TrainError: A pattern matches no parameter that is trained, or two match one parameter.
    """
    if not scales:
        return
    named = [(model.full_name(name), weight) for name, weight in model.module.named_parameters(remove_duplicate=False)]
    trained = [(name, weight) for name, weight in named if weight.requires_grad]
    scale_of: dict[int, tuple[str, float]] = {}
    for pattern, scale in scales.items():
        matched = [(name, weight) for name, weight in trained if _matches(name, pattern)]
        if not matched:
            frozen = any(_matches(name, pattern) for name, _ in named)
            raise _unmatched("lr_scale", pattern, [name for name, _ in trained], frozen=frozen)
        for name, weight in matched:
            other = scale_of.setdefault(id(weight), (pattern, scale))[0]
            if other != pattern:
                raise TrainError(f"lr_scale has {other!r} and {pattern!r}, which both match {name!r}; leave one.")
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        factors = [scale_of.get(id(weight), ("", 1.0))[1] for weight in group["params"]]
        for factor in sorted(set(factors), key=lambda each: (each != 1, each)):
            places = [place for place, each in enumerate(factors) if each == factor]
            part = {
                name: [group[name][place] for place in places] for name in ("params", "param_names") if name in group
            }
            groups.append({**group, **part, "lr": group["lr"] * factor})
    optimizer.param_groups[:] = groups


def check_scaled(optimizer: Optimizer, before: Sequence[float], schedule: object) -> None:
    """Check that a schedule scales the rate of each group instead of setting it.

    Args:
        optimizer: The optimizer, after the schedule was made.
        before: The rate of each group before that.
        schedule: The schedule, for the error.

    Raises:
        TrainError: It sets the rates, so that `lr_scale` would have no effect.
    """
    if [group.get("initial_lr", rate) for group, rate in zip(optimizer.param_groups, before, strict=True)] != [*before]:
        raise TrainError(
            f"the schedule {type(schedule).__name__} sets the learning rate of every group, so that lr_scale has no "
            f"effect; use a Schedule, such as Schedule('one-cycle')."
        )


def layers_of(model: ParallelModel, names: Collection[str]) -> list[nn.Module]:
    """Find layers by their names in the network without parallel layers."""
    found: list[nn.Module] = []
    for name, layer in model.module.named_modules():
        # The name of a parameter of the layer, because only these are translated.
        if isinstance(layer, BATCH_NORMS) and model.full_name(f"{name}.weight").removesuffix(".weight") in names:
            found.append(layer)
    return found


def _is_frozen(name: str, layer: nn.Module, patterns: Iterable[str]) -> bool:
    own = list(layer.parameters(recurse=False))
    if own:
        return not any(weight.requires_grad for weight in own)
    return any(_matches(f"{name}.running_mean", pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    """Check that a pattern matches a parameter's name or the name of a layer that contains it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _unmatched(field: str, pattern: str, names: Sequence[str], *, frozen: bool = False) -> TrainError:
    if frozen:
        return TrainError(f"{field} has {pattern!r}, whose parameters are all frozen; leave it out, or freeze fewer.")
    near = difflib.get_close_matches(pattern, names, _NEAR, 0.4)
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    advice = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(names[:_LISTED])}{more}"
    return TrainError(f"{field} has {pattern!r}, which matches no parameter of the network; {advice}.")
