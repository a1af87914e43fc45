"""Cross-entropy, also over vocab-parallel logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from penstock.core.errors import TrainError
from penstock.kernels.vocab_parallel_loss import class_gradient, class_sums
from penstock.train.parallel.collectives import Pending, once_differentiable, pad_rows, start_all_gather, unpad_ranks
from penstock.train.parallel.world import World

# B examples of this rank, N of all ranks, C classes of this rank, K of all ranks


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The mean cross-entropy of logits `[n, classes]` and labels `[n]` or class probabilities `[n, classes]`.

    It is `torch.nn.functional.cross_entropy`, and the loss that a vocab-parallel last layer needs. There every label
    must be a class: no label is ignored (-100), and on a GPU, where the host does not read labels, any other makes the
    loss NaN.

    Args:
        smoothing: The part of a target that is spread evenly over all classes; 0.1 is usual with 1,000 classes (Szegedy
            et al. 2016, "Rethinking the Inception architecture", section 7).

    Raises:
        TrainError: The smoothing is not from 0 to below 1.
    """

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise TrainError(f"the smoothing is {self.smoothing}; it must be from 0 to below 1.")

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean over the examples."""
        return F.cross_entropy(logits, labels, label_smoothing=self.smoothing)

    def vocab_parallel(
        self,
        world: World,
        logits_NC: Tensor,
        targets_B: Tensor,
        rows: Sequence[int],
        targets_of_all: Pending | None = None,
    ) -> Tensor:
        """Compute the mean over this rank's examples from vocab-parallel logits.

        The incoming gradient must be this rank's share of the examples (`rows[rank] / sum(rows)`) times a factor that
        is equal on all ranks: then no rank needs another one's gradient.

        Args:
            world: The processes, each with its classes in the order of the ranks.
            logits_NC: This rank's classes for all examples.
            targets_B: Of this rank's examples, labels among all classes, or class probabilities `[B, K]`.
            rows: The number of examples of each rank.
            targets_of_all: The result of `start_targets`, if it was called before.

        Raises:
            TrainError: The targets are neither, or a label is not a class.
        """
        classes = logits_NC.shape[1] * world.size
        are_probabilities = targets_B.is_floating_point()
        if tuple(targets_B.shape[1:]) != ((classes,) if are_probabilities else ()):
            raise TrainError(
                f"a vocab-parallel last layer of {classes:,} classes needs labels as whole numbers [n] or "
                f"probabilities as floats [n, {classes}], not {targets_B.dtype} {list(targets_B.shape)}; change the "
                f"data or the augmentation, or make the layer's placement 'model'."
            )
        if not are_probabilities and targets_B.device.type == "cpu":
            strange = targets_B[(targets_B < 0) | (targets_B >= classes)]
            if len(strange):
                raise TrainError(
                    f"a label is {int(strange[0])}; a vocab-parallel last layer takes 0..{classes - 1:,}, and ignores "
                    f"none. Correct the labels, or make the layer's placement 'model'."
                )
        pending = targets_of_all or start_targets(world, targets_B, rows)
        return cast(Tensor, _VocabParallelLoss.apply(world, logits_NC, pending(), rows, self.smoothing))


def start_targets(world: World, targets_B: Tensor, rows: Sequence[int]) -> Pending:
    """Start to all-gather the targets; calling the result waits and returns `[N, ...]`."""
    pending = start_all_gather(world, "the all-gather of the targets", pad_rows(targets_B, rows), overlapped=True)
    return lambda: unpad_ranks(pending().flatten(0, 1), rows)


@final
class _VocabParallelLoss(Function):
    @staticmethod
    def forward(
        ctx: Any, world: World, logits_NC: Tensor, targets_N: Tensor, rows: Sequence[int], smoothing: float
    ) -> Tensor:
        classes = logits_NC.shape[1]
        own = _own_targets(targets_N, world.rank * classes, classes)
        own_5N = class_sums(logits_NC, own)
        of_ranks_R5N = start_all_gather(world, "the all-gather of class sums", own_5N)()
        max_logit_RN, part_RN, target_score_RN, sum_RN, share_RN = of_ranks_R5N.unbind(1)
        # Each rank's sums are relative to its own largest logit; rescale them to the largest of all ranks.
        below_RN = max_logit_RN - max_logit_RN.amax(0)
        whole_N = (part_RN * below_RN.exp()).sum(0)
        target_score_N = (target_score_RN + share_RN * below_RN).sum(0)
        share_N = share_RN.sum(0)
        if not targets_N.is_floating_point():
            # A label that no rank has makes the loss NaN, which the host checks; it does not read labels.
            share_N = share_N.masked_fill(share_N == 0, torch.nan)
        weight_N = (1 - smoothing) * share_N + smoothing
        loss_N = weight_N * whole_N.log() - (1 - smoothing) * target_score_N
        ctx.smoothing_per_class = smoothing / (classes * world.size)
        if smoothing:
            loss_N -= ctx.smoothing_per_class * (sum_RN + classes * below_RN).sum(0)
        softmax_scale_N = weight_N * below_RN[world.rank].exp() / whole_N
        ctx.save_for_backward(logits_NC, own, own_5N[0], softmax_scale_N)
        ctx.rows, ctx.target_weight = rows[world.rank], 1 - smoothing
        first = sum(rows[: world.rank])
        return loss_N[first : first + rows[world.rank]].mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits_NC, own, max_logit_N, softmax_scale_N = ctx.saved_tensors
        logits_grad = class_gradient(
            logits_NC, own, max_logit_N, softmax_scale_N, grad / ctx.rows, ctx.smoothing_per_class, ctx.target_weight
        )
        return None, logits_grad, None, None, None


def _own_targets(targets_N: Tensor, first: int, classes: int) -> Tensor:
    """Convert targets to this rank's classes: labels counted from its first class, or probabilities `[N, C]`."""
    return targets_N[:, first : first + classes] if targets_N.is_floating_point() else targets_N.long() - first
