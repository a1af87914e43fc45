"""Random changes to training batches, drawn from the given generator."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import TrainError

# B batch, K classes

# Inputs and targets are trees where the examples have several tensors.
Augment = Callable[[Any, Any, torch.Generator], tuple[Any, Any]]


def mixup(classes: int, alpha: float = 0.2) -> Augment:
    """Each example mixed with another of its batch, input and target alike.

    Zhang et al. 2018, "mixup: beyond empirical risk minimization", section 2. The targets become shares of
    classes, `[B, K]`, which `penstock.train.parallel.losses.CrossEntropy` takes.

    Args:
        classes: How many there are.
        alpha: Of the Beta distribution of the shares: the larger, the more evenly are two examples mixed.

    Raises:
        TrainError: Alpha is not above 0.
    """
    if not alpha > 0:
        raise TrainError(f"mixup has alpha {alpha}; it must be above 0.")

    def mix(inputs_B: Tensor, targets_B: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        _check_tensors("mixup", inputs_B, targets_B)
        count, device = len(inputs_B), inputs_B.device
        # Torch draws from a Beta distribution, but from no generator that one could give it.
        seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
        shares_B = torch.from_numpy(np.random.default_rng(seed).beta(alpha, alpha, count)).float().to(device)
        others_B = torch.randperm(count, generator=generator, device=generator.device).to(device)
        share = shares_B.view(-1, *[1] * (inputs_B.ndim - 1))
        mixed_B = torch.lerp(inputs_B[others_B].float(), inputs_B.float(), share)
        targets_BK = targets_B if targets_B.ndim == 2 else _shares_of(targets_B, classes)
        return mixed_B, torch.lerp(targets_BK[others_B].float(), targets_BK.float(), shares_B[:, None])

    return mix


def _shares_of(targets_B: Tensor, classes: int) -> Tensor:
    try:
        return F.one_hot(targets_B.long(), classes)
    except RuntimeError:
        least, most = int(targets_B.min()), int(targets_B.max())
        raise TrainError(
            f"mixup has {classes:,} classes, and a batch has targets from {least} to {most}; give targets from 0 to "
            f"{classes - 1:,}, none that is ignored, or mixup(classes) with the number of the network's outputs."
        ) from None


def random_flip(dim: int = 2) -> Augment:
    """Half of the inputs mirrored.

    Args:
        dim: Of the batch: 2 is the width of pictures `[B, H, W]` and `[B, H, W, 3]`, 3 of `[B, 3, H, W]`.
    """

    def flip(inputs_B: Tensor, targets_B: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        _check_tensors("random_flip", inputs_B)
        if dim not in (*range(1, inputs_B.ndim), *range(1 - inputs_B.ndim, 0)):
            raise TrainError(
                f"random_flip has dim={dim}, and a batch of inputs is {list(inputs_B.shape)}; give that of the width, "
                f"which is not the first."
            )
        drawn_B = torch.rand(len(inputs_B), generator=generator, device=generator.device) < 0.5
        flipped_B = drawn_B.to(inputs_B.device).view(-1, *[1] * (inputs_B.ndim - 1))
        return torch.where(flipped_B, inputs_B.flip(dim), inputs_B), targets_B

    return flip


def on_tensors(augment: Augment, *, input: str = "", target: str = "") -> Augment:
    """A change to one tensor among several: `on_tensors(random_flip(), input="picture")`.

    Args:
        augment: Changes one input tensor, and may change one target.
        input: Name of the input tensor; empty where the examples have one.
        target: Name of the target; empty for the targets as they are, for a change that leaves them alone.

    Raises:
        TrainError: Neither is named; or a batch has no tensor of that name.
    """
    if not input and not target:
        raise TrainError("on_tensors names neither an input nor a target; give one, or the augment by itself.")

    def change(inputs: Any, targets: Any, generator: torch.Generator) -> tuple[Any, Any]:
        changed, wanted = augment(_named("input", inputs, input), _named("target", targets, target), generator)
        return _with(inputs, input, changed), _with(targets, target, wanted)

    return change


def _named(kind: str, tree: Any, name: str) -> Any:
    if not name:
        return tree
    if not isinstance(tree, Mapping) or name not in tree:
        names = ", ".join(map(repr, tree)) if isinstance(tree, Mapping) else "one without a name"  # pyright: ignore
        raise TrainError(f"on_tensors has {kind}={name!r}, and the examples have {names}; give one of their names.")
    return tree[name]  # pyright: ignore[reportUnknownVariableType]


def _with(tree: Any, name: str, changed: Any) -> Any:
    return {**tree, name: changed} if name else changed


def in_turn(*augments: Augment) -> Augment:
    """Several changes, one after the other.

    Args:
        augments: In the order in which they are made.
    """

    def each(inputs_B: Tensor, targets_B: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        for augment in augments:
            inputs_B, targets_B = augment(inputs_B, targets_B, generator)
        return inputs_B, targets_B

    return each


def _check_tensors(name: str, *parts: Any) -> None:
    if not all(isinstance(part, Tensor) for part in parts):
        raise TrainError(
            f"{name} changes one tensor, and the examples have several; name it by on_tensors, or write an augment for "
            f"them."
        )
