"""What the kernels compute, in plain torch."""

from collections.abc import Sequence

from torch import Tensor

from penstock.kernels.weight_step.rules import Adam, Sgd


def sgd(
    rule: Sgd,
    weights: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
    rate: Tensor,
    momenta: Sequence[Tensor],
) -> None:
    """Step, in float32.

    Args:
        rule: How.
        weights: float32; they are stepped.
        copies: In a shorter precision; they get the new weights. None for weights without one.
        gradients: Of the weights' shapes, in any precision.
        rate: The learning rate, a scalar.
        momenta: float32; they are moved. Empty where there is no momentum.
    """
    for index, (weight, copy, gradient) in enumerate(zip(weights, copies, gradients, strict=True)):
        step = gradient.float() + rule.decay * weight
        if momenta:
            momenta[index].copy_(rule.momentum * momenta[index] + step)
            step = step + rule.momentum * momenta[index] if rule.nesterov else momenta[index]
        _move(weight, copy, rate * step)


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
    """Step, in float32.

    Args:
        rule: How.
        weights: As of `sgd`.
        copies: As of `sgd`.
        gradients: As of `sgd`.
        rate: As of `sgd`.
        means: float32, running means of the gradients; they are moved.
        squares: float32, running means of their squares; they are moved.
        steps: float32, scalars: how many steps there were, this one counted.
    """
    each = zip(weights, copies, gradients, means, squares, steps, strict=True)
    for weight, copy, gradient, mean, square, count in each:
        step = gradient.float()
        if not rule.decoupled:
            step = step + rule.decay * weight
        kept, kept_square = rule.betas
        mean.copy_(kept * mean + (1 - kept) * step)
        square.copy_(kept_square * square + (1 - kept_square) * step * step)
        first, second = (1 - beta ** count.double() for beta in rule.betas)
        root = (square / second.float()).sqrt() + rule.eps
        decayed = rate * rule.decay * weight if rule.decoupled else 0.0
        _move(weight, copy, decayed + rate / first.float() * mean / root)


def _move(weight: Tensor, copy: Tensor | None, by: Tensor) -> None:
    weight.sub_(by)
    if copy is not None:
        copy.copy_(weight)
