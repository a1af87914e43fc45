"""What the kernels compute, in plain torch."""

from collections.abc import Sequence

from torch import Tensor


def sgd(
    weights: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    rate: Tensor,
    *,
    momentum: float,
    decay: float,
    nesterov: bool,
) -> None:
    """A step of `torch.optim.SGD`, in float32.

    Args:
        weights: float32; they are stepped.
        copies: In a shorter precision; they get the new weights. None for weights without one.
        gradients: Of the weights' shapes, in any precision.
        momenta: float32; they are moved. Empty where there is no momentum.
        rate: The learning rate, a scalar.
        momentum: The share of the momenta that is kept.
        decay: The share of the weights that is added to their gradients.
        nesterov: Whether the step looks ahead.
    """
    for index, (weight, copy, gradient) in enumerate(zip(weights, copies, gradients, strict=True)):
        step = gradient.float() + decay * weight
        if momenta:
            momenta[index].copy_(momentum * momenta[index] + step)
            step = step + momentum * momenta[index] if nesterov else momenta[index]
        _move(weight, copy, rate * step)


def adam(
    weights: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    rate: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    decoupled: bool,
) -> None:
    """A step of `torch.optim.Adam` or, decoupled, `torch.optim.AdamW`, in float32.

    Args:
        weights: As of `sgd`.
        copies: As of `sgd`.
        gradients: As of `sgd`.
        means: float32, running means of the gradients; they are moved.
        squares: float32, running means of their squares; they are moved.
        steps: float32, scalars: how many steps there were, this one counted.
        rate: The learning rate, a scalar.
        betas: The shares of the running means that are kept.
        eps: Added to the root of the squares.
        decay: The share of the weights that is added to their gradients or, decoupled, taken off them at the rate.
        decoupled: Which of the two.
    """
    for weight, copy, gradient, mean, square, count in zip(
        weights, copies, gradients, means, squares, steps, strict=True
    ):
        step = gradient.float()
        if not decoupled:
            step = step + decay * weight
        mean.copy_(betas[0] * mean + (1 - betas[0]) * step)
        square.copy_(betas[1] * square + (1 - betas[1]) * step * step)
        first, second = (1 - beta ** count.double() for beta in betas)
        root = (square / second.float()).sqrt() + eps
        decayed = rate * decay * weight if decoupled else 0.0
        _move(weight, copy, decayed + rate / first.float() * mean / root)


def _move(weight: Tensor, copy: Tensor | None, by: Tensor) -> None:
    weight.sub_(by)
    if copy is not None:
        copy.copy_(weight)
