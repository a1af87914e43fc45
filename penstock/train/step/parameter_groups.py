"""Parameter groups of an optimizer by the parameters' names: layer decay, no weight decay of norms and biases."""

import inspect
import re
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from penstock.core.errors import TrainError
from penstock.train.parallel.tensor_parallel import ParallelModel
from penstock.train.recipe import Recipe

# A recipe's optimizer function with a first parameter of this name gets names too.
NAMED = "named_parameters"

NamedParameters = Iterable[tuple[str, nn.Parameter]]

# A numbered layer, "encoder.layers.3.norm.weight" or "encoder_layer_3.norm.weight".
_NUMBERED = re.compile(r"^(?:(.*?)[._])?(\d+)\.")
# Layers of these names are the last ones of a network.
HEADS = ("head", "heads", "classifier", "fc", "lm_head", "score")


def optimizer_of(recipe: Recipe, model: ParallelModel) -> Optimizer:
    """Make a recipe's optimizer from the parameters that require gradients, with names if its function takes them."""
    make, module = recipe.optimizer, model.module
    named = [(model.full_name(name), weight) for name, weight in module.named_parameters() if weight.requires_grad]
    return _made(make, named if takes_names(make) else [weight for _, weight in named])


def _made(make: Any, given: Any) -> Optimizer:
    try:
        return make(given)
    except ValueError as error:
        if "more than one parameter group" not in str(error):
            raise
        raise TrainError("the recipe's optimizer has a parameter in two groups; put each in one.") from None


def left_out(optimizer: Optimizer, model: ParallelModel) -> list[str]:
    """Say which parameters that require gradients are in no group of the optimizer."""
    grouped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    named = [(model.full_name(name), weight) for name, weight in model.module.named_parameters()]
    names = [name for name, weight in named if weight.requires_grad and id(weight) not in grouped]
    if not names:
        return []
    others = "" if len(names) == 1 else f" and {len(names) - 1:,} more"
    return [f"The optimizer leaves {names[0]!r}{others} as they are: no parameter group has them."]


def untrained_loss_notices(loss: Any) -> list[str]:
    """Say which parameters of a loss are not trained: those of a network alone are."""
    while isinstance(loss, partial):
        loss = cast(Any, loss).func
    module = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)
    if not isinstance(module, nn.Module):
        return []
    names = [name for name, weight in module.named_parameters() if weight.requires_grad]
    if not names:
        return []
    others = "" if len(names) == 1 else f" and {len(names) - 1:,} more"
    return [
        f"The loss has the parameters {names[0]!r}{others}, which are not trained: only parameters of the network are. "
        f"Make them a part of the network, which gives them to the loss; or let them require no gradients."
    ]


def takes_names(make: Any) -> bool:
    """Check that the first parameter of a recipe's optimizer function is called `named_parameters`."""
    try:
        return next(iter(inspect.signature(make).parameters), None) == NAMED
    except (TypeError, ValueError):
        return False


def parameter_groups(
    named_parameters: NamedParameters,
    *,
    lr: float,
    weight_decay: float = 0.0,
    layer_decay: float = 1.0,
    decay_vectors: bool = False,
) -> list[dict[str, Any]]:
    """Group parameters for an optimizer: `AdamW(parameter_groups(named_parameters, lr=3e-4, weight_decay=0.05))`.

    Args:
        named_parameters: Names and parameters, as a recipe's `optimizer` gets them whose parameter is called
            `named_parameters`. Those that require no gradients are left out.
        lr: The learning rate of the last layers.
        weight_decay: The weight decay of matrices and larger weights.
        layer_decay: Factor on the learning rate from each numbered layer (`layers.3`) to the one before, as in Clark et
            al. 2020, "ELECTRA", section 3.1. Parameters before the first numbered layer are one layer lower, those
            after the last one are one higher.
        decay_vectors: True for weight decay of parameters of fewer than two dimensions too, which are biases and the
            weights of norms.

    Returns:
        A dictionary for each group, the highest layers first.

    Raises:
        TrainError: No parameter requires gradients, `layer_decay` is not above 0 and at most 1, or it is below 1 and
            the names do not tell the order of the layers.
    """
    if not 0 < layer_decay <= 1:
        raise TrainError(f"layer_decay is {layer_decay}; it must be above 0 and at most 1.")
    named = list(named_parameters)
    depths = _depths([name for name, _ in named]) if layer_decay < 1 else [0] * len(named)
    if layer_decay < 1 and max(depths, default=0) == 0:
        raise TrainError("layer_decay needs numbered layers, such as 'layers.3.weight', and the network has none.")
    found: dict[tuple[int, float], list[nn.Parameter]] = {}
    for (_, weight), depth in zip(named, depths, strict=True):
        if weight.requires_grad:
            decay = weight_decay if weight.ndim > 1 or decay_vectors else 0.0
            found.setdefault((depth if layer_decay < 1 else 0, decay), []).append(weight)
    if not found:
        raise TrainError("no parameter requires gradients; let some require them.")
    highest = max(depths) if layer_decay < 1 else 0
    return [
        {"params": weights, "lr": lr * layer_decay ** (highest - depth), "weight_decay": decay}
        for (depth, decay), weights in sorted(found.items(), key=lambda item: (-item[0][0], -item[0][1]))
    ]


def _depths(names: list[str]) -> list[int]:
    """Number the layers of parameters from 0; the numbered layers are those of the chain with the most parameters."""
    chains = [(match[1], int(match[2])) if (match := _NUMBERED.match(name)) else None for name in names]
    counts: dict[str | None, int] = {}
    for chain in chains:
        if chain is not None:
            counts[chain[0]] = counts.get(chain[0], 0) + 1
    if not counts:
        return [0] * len(names)
    longest, *others = sorted(counts, key=lambda chain: -counts[chain])
    if others and 2 * counts[others[0]] >= counts[longest]:
        raise TrainError(
            f"layer_decay finds numbered layers in {longest or 'the network'!r} and in {others[0] or 'the network'!r}, "
            f"and cannot tell their order; make the groups by hand."
        )
    first = next(place for place, chain in enumerate(chains) if chain is not None and chain[0] == longest)
    for name in names[:first]:
        if name.split(".")[0] in HEADS:
            raise TrainError(
                f"layer_decay takes {name!r} for a lowest layer, because the network makes it before its numbered "
                f"layers; make it after them, or make the groups by hand."
            )
    numbers = sorted({chain[1] for chain in chains if chain is not None and chain[0] == longest})
    rank = {number: place for place, number in enumerate(numbers, start=1)}
    depths: list[int] = []
    reached = 0
    for chain in chains:
        if chain is not None and chain[0] == longest:
            depths.append(rank[chain[1]])
            reached = 1
        else:
            depths.append((len(numbers) + 1) * reached)
    return depths
