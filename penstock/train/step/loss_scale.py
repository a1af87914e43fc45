"""Dynamic loss scaling for fp16, whose smallest numbers are too large for many gradients."""

from collections.abc import Sequence
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.train.parallel.world import World

FIRST_SCALE = 65536.0
GROWTH, BACK_OFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
# No gradient that is finite overflows at this factor: they are NaN or infinite before they are scaled.
LEAST_SCALE = 2.0**-24


@final
class LossScale:
    """The factor that the loss, and so every gradient, is multiplied by.

    Micikevicius et al. 2018, "Mixed precision training", section 3.2, with a dynamic factor: where a gradient
    overflows, the step is skipped and the factor halved; after 2,000 steps without overflow, it is doubled. Like
    `torch.amp.GradScaler`, but over all processes, and the host reads no tensor.

    Args:
        world: The processes.

    Attributes:
        found_inf: A float on the device, above 0 where a gradient of any process overflowed.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._scale = torch.full((), FIRST_SCALE, device=world.device)
        self._growth = torch.zeros((), dtype=torch.int32, device=world.device)
        self.found_inf = torch.zeros((), device=world.device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to compute gradients of."""
        return loss * self._scale

    @torch.no_grad()
    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the factor, and set `found_inf`."""
        self.found_inf.zero_()
        found = self.found_inf.view(1)
        cast(Any, torch)._amp_foreach_non_finite_check_and_unscale_(list(gradients), found, 1 / self._scale)
        if self._world.size > 1:
            with self._world.operation("the search for gradients that overflowed"):
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._world.group)

    @torch.no_grad()
    def update(self) -> None:
        """Halve or double the factor where that is due."""
        growth, found = self._growth, self.found_inf
        cast(Any, torch)._amp_update_scale_(self._scale, growth, found, GROWTH, BACK_OFF, GROWTH_INTERVAL)

    @property
    def is_lost(self) -> Tensor:
        """A bool on the device: True once the factor is so small that no later step will be taken either."""
        return self._scale < LEAST_SCALE

    def state_dict(self) -> dict[str, Tensor]:
        """Return the factor and the steps since its last change."""
        return {"scale": self._scale.clone(), "growth": self._growth.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self._scale.copy_(state["scale"])
        self._growth.copy_(state["growth"])
