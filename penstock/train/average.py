"""The running mean of the weights, which often does better than the last of them."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from penstock.core.errors import TrainError
from penstock.train.batch_norm import running_statistics

# Each is one operation on many tensors, on a GPU one or few launches.
_many: Any = cast(Any, torch)


@final
class Average:
    """`decay * mean + (1 - decay) * weights` after each step, from the first weights on.

    Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging", with weights that fall behind.
    Of the parameters and of the running statistics of batch norms, which belong to them; other buffers stay those of
    the network that is stepped. Nothing of it is read by the host, so that a CUDA graph can hold an update.

    Args:
        module: Whose weights.
        decay: The share of the mean that a step keeps, from 0 to below 1.
        warm_up: Keep less at first, `(1 + n) / (10 + n)` after n steps, so that the first weights are soon forgotten.

    Attributes:
        mean: By the name of the parameter or buffer.
    """

    def __init__(self, module: nn.Module, decay: float, *, warm_up: bool = False) -> None:
        self._own: dict[str, Tensor] = {**dict(module.named_parameters()), **running_statistics(module)}
        self._decay, self._warm_up = decay, warm_up
        self.mean: dict[str, Tensor] = {name: own.detach().clone() for name, own in self._own.items()}
        device = next((own.device for own in self._own.values()), None)
        self._steps = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self) -> None:
        """A step was taken."""
        mean, own = list(self.mean.values()), list(self._own.values())
        if self._warm_up:
            kept = ((1 + self._steps) / (10 + self._steps)).clamp(max=self._decay)
            # As a lerp, whose share cannot be a tensor for many at once.
            apart = _many._foreach_sub(own, mean)
            _many._foreach_mul_(apart, (1 - kept).float())
            _many._foreach_add_(mean, apart)
        else:
            _many._foreach_lerp_(mean, own, 1 - self._decay)
        self._steps += 1

    @contextmanager
    def swapped(self) -> Generator[None]:
        """While it is entered, the network has the mean as its weights, and `mean` holds its own."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self, parts: Callable[[Mapping[str, Tensor]], Mapping[str, Any]]) -> dict[str, Any]:
        """What a checkpoint needs to go on.

        Args:
            parts: Says of tensors which part of them this process has.
        """
        return {"mean": parts(self.mean), "steps": self._steps.clone()}

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Any], parts: Callable[[Mapping[str, Any]], dict[str, Tensor]]
    ) -> None:
        """Go back to where a checkpoint was written.

        Args:
            state: As `state_dict` gave it.
            parts: Takes this process's parts of whole tensors.

        Raises:
            TrainError: It is the mean of another network.
        """
        found = parts(state["mean"]) if "mean" in state else {}
        if found.keys() != self.mean.keys():
            other = min(found.keys() ^ self.mean.keys())
            raise TrainError(
                f"the checkpoint's running mean and this network's differ in {other!r}; it is of another network, or "
                f"of an earlier version of Penstock: begin a new run."
            )
        for name, tensor in found.items():
            self.mean[name].copy_(tensor)
        self._steps.copy_(state["steps"])

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._own.items():
            own = weight.clone()
            weight.copy_(self.mean[name])
            self.mean[name].copy_(own)
