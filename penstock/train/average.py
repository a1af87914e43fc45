"""The running mean of the weights, which often does better than the last of them."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor, nn


@final
class Average:
    """`decay * mean + (1 - decay) * weights` after each step, from the first weights on.

    Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging", with weights that fall behind.
    Of the parameters alone: buffers, as the statistics of batch norms, stay those of the network that is stepped.

    Args:
        module: Whose weights.
        decay: The share of the mean that a step keeps, from 0 to below 1.

    Attributes:
        mean: By parameter name.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._own = dict(module.named_parameters())
        self._decay = decay
        self.mean: dict[str, Tensor] = {name: weight.detach().clone() for name, weight in self._own.items()}

    @torch.no_grad()
    def update(self) -> None:
        """A step was taken."""
        together = cast(Any, torch)._foreach_lerp_
        together(list(self.mean.values()), list(self._own.values()), 1 - self._decay)

    @contextmanager
    def swapped(self) -> Generator[None]:
        """While it is entered, the network has the mean as its weights, and `mean` holds its own."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._own.items():
            own = weight.clone()
            weight.copy_(self.mean[name])
            self.mean[name].copy_(own)
