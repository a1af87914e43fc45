"""What an optimizer does with a gradient, as torch names it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """As `torch.optim.SGD`.

    Args:
        momentum: The share of the momenta that is kept; 0 for none.
        decay: The share of the weights that is added to their gradients.
        nesterov: Whether the step looks ahead.
    """

    momentum: float
    decay: float
    nesterov: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """As `torch.optim.Adam` or, decoupled, `torch.optim.AdamW`.

    Args:
        betas: The shares of the running means that are kept.
        eps: Added to the root of the squares.
        decay: The share of the weights that is added to their gradients or, decoupled, taken off them at the rate.
        decoupled: Which of the two.
    """

    betas: tuple[float, float]
    eps: float
    decay: float
    decoupled: bool
