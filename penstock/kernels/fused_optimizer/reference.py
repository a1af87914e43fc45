"""Reference implementation in plain torch."""

from collections.abc import Sequence

from torch import Tensor

from penstock.kernels.fused_optimizer.rules import Adam, Sgd


def sgd(
    rule: Sgd,
    weights: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
    rate: Tensor,
    momenta: Sequence[Tensor],
) -> None:
    """Update weights by SGD, in float32.

    Args:
        rule: The update rule.
        weights: float32; updated.
        copies: Compute copies in a lower precision; they get the new weights. None for weights without one.
        gradients: In the weights' shapes, in any precision.
        rate: The learning rate, a scalar.
        momenta: float32; updated. Empty without momentum.
    """
    for index, (weight, copy, gradient) in enumerate(zip(weights, copies, gradients, strict=True)):
        step = gradient.to(weight.dtype, copy=True).add_(weight, alpha=rule.decay)
        if momenta:
            momentum = momenta[index].mul_(rule.momentum).add_(step)
            step = step.add_(momentum, alpha=rule.momentum) if rule.nesterov else momentum
        _move(weight, copy, step, rate)


def adam(
    rule: Adam,
    weights: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
    rate: Tensor,
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
) -> None:
    """Update weights by Adam or AdamW, in float32.

    Args:
        rule: The update rule.
        weights: See `sgd`.
        copies: See `sgd`.
        gradients: See `sgd`.
        rate: See `sgd`.
        means: float32, running means of the gradients; updated.
        squares: float32, running means of their squares; updated.
        steps: float32 scalars: number of steps, this one included.
    """
    each = zip(weights, copies, gradients, means, squares, steps, strict=True)
    for weight, copy, gradient, mean, square, count in each:
        step = gradient.to(weight.dtype, copy=True)
        if not rule.decoupled:
            step.add_(weight, alpha=rule.decay)
        kept, kept_square = rule.betas
        mean.mul_(kept).add_(step, alpha=1 - kept)
        square.mul_(kept_square).addcmul_(step, step, value=1 - kept_square)
        first, second = (1 - beta ** count.double() for beta in rule.betas)
        if rule.decoupled:
            weight.mul_(1 - rate * rule.decay)
        root = (square / second.float()).sqrt_().add_(rule.eps)
        _move(weight, copy, mean / root, rate / first.float())


def _move(weight: Tensor, copy: Tensor | None, step: Tensor, rate: Tensor) -> None:
    weight.addcmul_(step, rate, value=-1)
    if copy is not None:
        copy.copy_(weight)
