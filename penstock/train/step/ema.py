"""The exponential moving average (EMA) of the weights, which often does better than the last weights."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from penstock.core.errors import TrainError
from penstock.train.parallel.batch_norm import running_statistics

# torch._foreach functions: one operation on many tensors, one or few kernel launches on a GPU.
_many: Any = cast(Any, torch)


@final
class EMA:
    """`decay * mean + (1 - decay) * weights` after each step, from the initial weights on.

    Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging", with exponential weights. It
    covers the parameters and the running statistics of batch norms; other buffers stay the network's own. The host
    reads no tensor, so that a CUDA graph can capture an update.

    Args:
        module: The network.
        decay: The share of the mean that a step keeps, from 0 to below 1.
        warm_up: Keep less at first, `(1 + n) / (10 + n)` after n steps, so that the initial weights fade soon.

    Attributes:
        mean: The averages, by the name of the parameter or buffer.
    """

    def __init__(self, module: nn.Module, decay: float, *, warm_up: bool = False) -> None:
        self._own: dict[str, Tensor] = {**dict(module.named_parameters()), **running_statistics(module)}
        self._decay, self._warm_up = decay, warm_up
        self.mean: dict[str, Tensor] = {name: own.detach().clone() for name, own in self._own.items()}
        device = next((own.device for own in self._own.values()), None)
        self._steps = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self) -> None:
        """Include the weights of one more step."""
        mean, own = list(self.mean.values()), list(self._own.values())
        if self._warm_up:
            kept = ((1 + self._steps) / (10 + self._steps)).clamp(max=self._decay)
            # _foreach_lerp_ accepts no tensor as its weight.
            apart = _many._foreach_sub(own, mean)
            _many._foreach_mul_(apart, (1 - kept).float())
            _many._foreach_add_(mean, apart)
        else:
            _many._foreach_lerp_(mean, own, 1 - self._decay)
        self._steps += 1

    @contextmanager
    def swapped(self) -> Generator[None]:
        """Exchange the network's weights and `mean` while the context is open."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self, parts: Callable[[Mapping[str, Tensor]], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state for a checkpoint.

        Args:
            parts: Marks which part of each tensor this process has.
        """
        return {"mean": parts(self.mean), "steps": self._steps.clone()}

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Any], parts: Callable[[Mapping[str, Any]], dict[str, Tensor]]
    ) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The state.
            parts: Reads this process's parts of whole tensors.

        Raises:
            TrainError: The state belongs to another network.
        """
        found = parts(state["mean"]) if "mean" in state else {}
        if found.keys() != self.mean.keys():
            other = min(found.keys() ^ self.mean.keys())
            raise TrainError(
                f"the checkpoint's EMA and this network's differ in {other!r}; it belongs to another network: begin a "
                f"new run."
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
