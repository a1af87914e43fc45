"""Update rules of optimizers, with torch's names."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """The rule of `torch.optim.SGD`.

    Args:
        momentum: Decay rate of the momenta; 0 for none.
        decay: Share of the weights that is added to their gradients.
        nesterov: True for Nesterov momentum.
    """

    momentum: float
    decay: float
    nesterov: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """The rule of `torch.optim.Adam` or, decoupled, `torch.optim.AdamW`.

    Args:
        betas: Decay rates of the running means.
        eps: Added to the root of the mean square.
        decay: Share of the weights that is added to their gradients or, decoupled, subtracted at the learning rate.
        decoupled: True for AdamW's decoupled weight decay.
    """

    betas: tuple[float, float]
    eps: float
    decay: float
    decoupled: bool
