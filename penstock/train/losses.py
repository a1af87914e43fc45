"""Cross-entropy that can be computed where no process has the scores of all classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from penstock.core.errors import TrainError
from penstock.train.collectives import once_differentiable, padded, start_gather, whole_batch
from penstock.train.world import World

# B examples of this rank, N of all ranks, C classes of this rank


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The mean cross-entropy of logits `[n, classes]` and labels `[n]`, or shares of classes, for a recipe's `loss`.

    It is `torch.nn.functional.cross_entropy`, and what a last layer placed by `"classes"` needs.

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

    def over_classes(self, world: World, logits_NC: Tensor, labels_B: Tensor, rows: Sequence[int]) -> Tensor:
        """The mean over this rank's examples, where each rank has its part of the classes for all examples.

        Args:
            world: Who has the other classes, in the order of the ranks.
            logits_NC: This rank's.
            labels_B: Of this rank's examples, among all classes.
            rows: How many examples each rank has.

        Raises:
            TrainError: The labels are no whole numbers.
        """
        if labels_B.is_floating_point() or labels_B.ndim != 1:
            raise TrainError(
                f"a last layer placed by classes needs labels as whole numbers [n], not {labels_B.dtype} "
                f"{list(labels_B.shape)}."
            )
        loss_B = cast(Tensor, _OverClasses.apply(world, logits_NC, labels_B, rows, self.smoothing))
        return loss_B.mean()


@final
class _OverClasses(Function):
    @staticmethod
    def forward(
        ctx: Any, world: World, logits_NC: Tensor, labels_B: Tensor, rows: Sequence[int], smoothing: float
    ) -> Tensor:
        classes = logits_NC.shape[1]
        labels_N = _of_all(world, "the gather of the labels", labels_B, rows)
        scores_NC = logits_NC.float() if logits_NC.dtype != torch.float64 else logits_NC.clone()
        most_N = scores_NC.amax(1)
        with world.operation("the largest score of all classes"):
            dist.all_reduce(most_N, op=dist.ReduceOp.MAX, group=world.group)
        scores_NC = scores_NC - most_N[:, None]
        own_N = labels_N - world.rank * classes
        mine_N = (own_N >= 0) & (own_N < classes)
        own_N = own_N.clamp(0, classes - 1)
        wanted_N = scores_NC.gather(1, own_N[:, None])[:, 0] * mine_N
        sum_N = scores_NC.sum(1)
        chances_NC = scores_NC.exp_()
        sums_3N = torch.stack([chances_NC.sum(1), wanted_N, sum_N])
        with world.operation("the sums over all classes"):
            dist.all_reduce(sums_3N, group=world.group)
        whole_N, wanted_N, sum_N = sums_3N
        all_classes = classes * world.size
        loss_N = whole_N.log() - (1 - smoothing) * wanted_N - smoothing / all_classes * sum_N
        ctx.save_for_backward(chances_NC.div_(whole_N[:, None]), own_N, mine_N)
        ctx.world, ctx.rows, ctx.smoothing, ctx.dtype = world, rows, smoothing, logits_NC.dtype
        first = sum(rows[: world.rank])
        return loss_N[first : first + rows[world.rank]].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> Any:
        chances_NC, own_N, mine_N = ctx.saved_tensors
        world: World = ctx.world
        grad_N = _of_all(world, "the gather of the loss's gradients", grad_B, ctx.rows)
        logits_grad = chances_NC - ctx.smoothing / (chances_NC.shape[1] * world.size)
        logits_grad.scatter_add_(1, own_N[:, None], ((ctx.smoothing - 1) * mine_N).to(logits_grad)[:, None])
        return None, logits_grad.mul_(grad_N[:, None]).to(ctx.dtype), None, None, None


def _of_all(world: World, name: str, own_B: Tensor, rows: Sequence[int]) -> Tensor:
    return whole_batch(start_gather(world, name, padded(own_B, rows))().flatten(0, 1), rows)
