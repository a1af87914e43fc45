"""Reference implementation in plain torch."""

import torch
from torch import Tensor

# N examples, C classes of this process


def class_sums(logits_NC: Tensor, targets: Tensor) -> Tensor:
    """Compute five numbers for each row, `[5, N]`, in float32, or in float64 for float64 logits.

    With scores = logits - largest logit: the largest logit; the sum of exp(score); the score of the target; the sum of
    scores; and the target's probability on this process.

    Args:
        logits_NC: This process's classes. The largest logit of a row of -inf is the lowest finite number.
        targets: Labels `[N]`, int64; those outside 0..C - 1 belong to other processes. Or probabilities `[N, C]`.
    """
    dtype = torch.promote_types(logits_NC.dtype, torch.float32)
    max_logit_N = logits_NC.amax(1).to(dtype).clamp(min=torch.finfo(dtype).min)
    scores_NC = logits_NC - max_logit_N[:, None]
    if targets.is_floating_point():
        shares_NC = targets.to(scores_NC)
        share_N, target_score_N = shares_NC.sum(1), (shares_NC * scores_NC).sum(1)
    else:
        own_N, mine_N = _own(targets, logits_NC.shape[1])
        share_N = mine_N.to(scores_NC)
        target_score_N = scores_NC.gather(1, own_N[:, None])[:, 0].masked_fill(~mine_N, 0)
    sum_N = scores_NC.sum(1)
    return torch.stack([max_logit_N, scores_NC.exp_().sum(1), target_score_N, sum_N, share_N])


def class_gradient(
    logits_NC: Tensor,
    targets: Tensor,
    max_logit_N: Tensor,
    softmax_scale_N: Tensor,
    scale: Tensor,
    smoothing_per_class: float,
    target_weight: float,
) -> Tensor:
    """Compute the gradient of the logits, `[N, C]`, in their type, rounded once.

    It is `(exp(logit - max_logit) * softmax_scale - smoothing_per_class - target_weight * target) * scale`.

    Args:
        logits_NC: This process's classes.
        targets: As of `class_sums`.
        max_logit_N: The largest logits, as of `class_sums`.
        softmax_scale_N: The factor that turns exp(score) into a probability over all classes.
        scale: A scalar on the logits' device.
        smoothing_per_class: The smoothed target of every class.
        target_weight: The weight of the given target.
    """
    grad_NC = (logits_NC - max_logit_N[:, None]).exp_().mul_(softmax_scale_N[:, None]).sub_(smoothing_per_class)
    if targets.is_floating_point():
        grad_NC.add_(targets.to(grad_NC), alpha=-target_weight)
    else:
        own_N, mine_N = _own(targets, logits_NC.shape[1])
        grad_NC.scatter_add_(1, own_N[:, None], (-target_weight * mine_N).to(grad_NC)[:, None])
    return grad_NC.mul_(scale).to(logits_NC.dtype)


def _own(labels_N: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Clamp labels to valid indices, and mark those of this process's classes."""
    return labels_N.clamp(0, classes - 1), (labels_N >= 0) & (labels_N < classes)
