"""Cross-entropy that can be computed where no process has the scores of all classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from penstock.core.errors import TrainError
from penstock.kernels.class_scores import class_gradient, class_sums
from penstock.train.collectives import Waited, once_differentiable, padded, start_gather, whole_batch
from penstock.train.world import World

# B examples of this rank, N of all ranks, C classes of this rank, K of all ranks


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The mean cross-entropy of logits `[n, classes]` and labels `[n]`, or shares of classes, for a recipe's `loss`.

    It is `torch.nn.functional.cross_entropy`, and what a last layer placed by `"classes"` needs. There every label must
    be a class: none is ignored (-100), and on a GPU, where the host does not look at labels, any other makes the loss
    NaN.

    Args:
        smoothing: The share of a target that is spread evenly over all classes (Szegedy et al. 2016, section 7).

    Raises:
        TrainError: It is not from 0 to below 1.
    """

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise TrainError(f"the smoothing is {self.smoothing}; it must be from 0 to below 1.")

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the examples."""
        return F.cross_entropy(logits, labels, label_smoothing=self.smoothing)

    def over_classes(
        self,
        world: World,
        logits_NC: Tensor,
        targets_B: Tensor,
        rows: Sequence[int],
        targets_of_all: Waited | None = None,
    ) -> Tensor:
        """The mean over this rank's examples, where each rank has its part of the classes for all examples.

        The gradient that comes back to it must be its share of all examples (`rows[rank] / sum(rows)`) times what is
        the same in every process: then no process has to tell it to the others.

        Args:
            world: Who has the other classes, in the order of the ranks.
            logits_NC: This rank's.
            targets_B: Of this rank's examples, labels among all classes, or shares of all classes `[B, K]`.
            rows: How many examples each rank has.
            targets_of_all: What `start_targets` gave, if they were sent before.

        Raises:
            TrainError: The targets are neither, or a label is none of the classes.
        """
        classes = logits_NC.shape[1] * world.size
        shares = targets_B.is_floating_point()
        if tuple(targets_B.shape[1:]) != ((classes,) if shares else ()):
            raise TrainError(
                f"a last layer of {classes:,} classes, placed by classes, needs labels as whole numbers [n] or shares "
                f"as floats [n, {classes}], not {targets_B.dtype} {list(targets_B.shape)}; change the data or the "
                f"augmentation, or place the layer by 'model'."
            )
        if not shares and targets_B.device.type == "cpu":
            strange = targets_B[(targets_B < 0) | (targets_B >= classes)]
            if len(strange):
                raise TrainError(
                    f"a label is {int(strange[0])}; a last layer placed by classes takes 0..{classes - 1:,}, and "
                    f"ignores none. Mend the labels, or place the layer by 'model'."
                )
        waited = targets_of_all or start_targets(world, targets_B, rows)
        return cast(Tensor, _OverClasses.apply(world, logits_NC, waited(), rows, self.smoothing))


def start_targets(world: World, targets_B: Tensor, rows: Sequence[int]) -> Waited:
    """Begin to gather the targets of every rank; what is returned waits for `[N, ...]`."""
    waited = start_gather(world, "the gather of the targets", padded(targets_B, rows), beside=True)
    return lambda: whole_batch(waited().flatten(0, 1), rows)


@final
class _OverClasses(Function):
    @staticmethod
    def forward(
        ctx: Any, world: World, logits_NC: Tensor, targets_N: Tensor, rows: Sequence[int], smoothing: float
    ) -> Tensor:
        classes = logits_NC.shape[1]
        own = _own_targets(targets_N, world.rank * classes, classes)
        own_5N = class_sums(logits_NC, own)
        of_ranks_R5N = start_gather(world, "the sums over all classes", own_5N)()
        most_RN, part_RN, wanted_RN, sum_RN, share_RN = of_ranks_R5N.unbind(1)
        # All is relative to each rank's own largest score; now to that of all ranks.
        below_RN = most_RN - most_RN.amax(0)
        whole_N = (part_RN * below_RN.exp()).sum(0)
        wanted_N = (wanted_RN + share_RN * below_RN).sum(0)
        share_N = share_RN.sum(0)
        if not targets_N.is_floating_point():
            # A label that is nobody's: the host finds the loss not finite, without having looked at labels.
            share_N = share_N.masked_fill(share_N == 0, torch.nan)
        weight_N = (1 - smoothing) * share_N + smoothing
        loss_N = weight_N * whole_N.log() - (1 - smoothing) * wanted_N
        ctx.even = smoothing / (classes * world.size)
        if smoothing:
            loss_N -= ctx.even * (sum_RN + classes * below_RN).sum(0)
        of_all_N = weight_N * below_RN[world.rank].exp() / whole_N
        ctx.save_for_backward(logits_NC, own, own_5N[0], of_all_N)
        ctx.rows, ctx.wanted = rows[world.rank], 1 - smoothing
        first = sum(rows[: world.rank])
        return loss_N[first : first + rows[world.rank]].mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits_NC, own, most_N, of_all_N = ctx.saved_tensors
        logits_grad = class_gradient(logits_NC, own, most_N, of_all_N, grad / ctx.rows, ctx.even, ctx.wanted)
        return None, logits_grad, None, None, None


def _own_targets(targets_N: Tensor, first: int, classes: int) -> Tensor:
    """What is wanted of this rank's classes: labels counted from its first, or shares `[N, C]`."""
    return targets_N[:, first : first + classes] if targets_N.is_floating_point() else targets_N.long() - first
