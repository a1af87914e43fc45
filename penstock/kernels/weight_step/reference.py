"""What the kernel computes, in plain torch."""

from collections.abc import Sequence

from torch import Tensor


def sgd(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    rate: Tensor,
    *,
    momentum: float,
    decay: float,
    nesterov: bool,
) -> None:
    """A step of `torch.optim.SGD`, in float32.

    Args:
        weights: float32; they are stepped.
        gradients: Of the weights' shapes, in any precision.
        momenta: float32; they are moved. Empty where there is no momentum.
        copies: In a shorter precision; they get the new weights. None for weights without one.
        rate: The learning rate, a scalar.
        momentum: The share of the momenta that is kept.
        decay: The share of the weights that is added to their gradients.
        nesterov: Whether the step looks ahead.
    """
    for index, (weight, gradient, copy) in enumerate(zip(weights, gradients, copies, strict=True)):
        step = gradient.float() + decay * weight
        if momenta:
            momenta[index].copy_(momentum * momenta[index] + step)
            step = step + momentum * momenta[index] if nesterov else momenta[index]
        weight.sub_(rate * step)
        if copy is not None:
            copy.copy_(weight)
