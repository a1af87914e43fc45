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
    most_N = logits_NC.amax(1).to(dtype).clamp(min=torch.finfo(dtype).min)
    scores_NC = logits_NC - most_N[:, None]
    if targets.is_floating_point():
        shares_NC = targets.to(scores_NC)
        share_N, wanted_N = shares_NC.sum(1), (shares_NC * scores_NC).sum(1)
    else:
        own_N, mine_N = _own(targets, logits_NC.shape[1])
        share_N = mine_N.to(scores_NC)
        wanted_N = scores_NC.gather(1, own_N[:, None])[:, 0].masked_fill(~mine_N, 0)
    sum_N = scores_NC.sum(1)
    return torch.stack([most_N, scores_NC.exp_().sum(1), wanted_N, sum_N, share_N])


def class_gradient(
    logits_NC: Tensor,
    targets: Tensor,
    most_N: Tensor,
    of_all_N: Tensor,
    scale: Tensor,
    even: float,
    wanted: float,
) -> Tensor:
    """`(exp(logit - most) * of_all - even - wanted * target) * scale`, `[N, C]`, in the logits' type, rounded once.

    Args:
        logits_NC: This process's classes.
        targets: As of `class_sums`.
        most_N: The largest logits, as of `class_sums`.
        of_all_N: The factor that turns exp(score) into a probability over all classes.
        scale: A scalar on the logits' device.
        even: The smoothed target of every class.
        wanted: The weight of the given target.
    """
    grad_NC = (logits_NC - most_N[:, None]).exp_().mul_(of_all_N[:, None]).sub_(even)
    if targets.is_floating_point():
        grad_NC.add_(targets.to(grad_NC), alpha=-wanted)
    else:
        own_N, mine_N = _own(targets, logits_NC.shape[1])
        grad_NC.scatter_add_(1, own_N[:, None], (-wanted * mine_N).to(grad_NC)[:, None])
    return grad_NC.mul_(scale).to(logits_NC.dtype)


def _own(labels_N: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Clamp labels to valid indices, and mark those of this process's classes."""
    return labels_N.clamp(0, classes - 1), (labels_N >= 0) & (labels_N < classes)
