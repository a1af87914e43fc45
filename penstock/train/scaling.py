"""Losses made larger for fp16, whose smallest numbers are too large for many gradients, by a factor that is found."""

from collections.abc import Sequence
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.train.world import World

FIRST_SCALE = 65536.0
GROWTH, BACK_OFF, GROWS_AFTER = 2.0, 0.5, 2000


@final
class LossScale:
    """The factor by which the loss, and so every gradient, is larger than it is.

    Micikevicius et al. 2018, "Mixed precision training", section 3.2, with the factor moving: where a gradient
    overflows, the step is left out and the factor halved; after 2,000 steps without, it is doubled. As
    `torch.amp.GradScaler` does it, but over all processes, and with nothing read by the host.

    Args:
        world: The processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._scale = torch.full((), FIRST_SCALE, device=world.device)
        self._grown = torch.zeros((), dtype=torch.int32, device=world.device)
        self.found_inf = torch.zeros((), device=world.device)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss whose gradients are made."""
        return loss * self._scale

    @torch.no_grad()
    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Bring gradients back to their size, and see in `found_inf` whether one of any process overflowed."""
        self.found_inf.zero_()
        found = self.found_inf.view(1)
        cast(Any, torch)._amp_foreach_non_finite_check_and_unscale_(list(gradients), found, 1 / self._scale)
        if self._world.size > 1:
            with self._world.operation("the search for gradients that overflowed"):
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._world.group)

    @torch.no_grad()
    def move(self) -> None:
        """Halve or double the factor where that is due."""
        cast(Any, torch)._amp_update_scale_(self._scale, self._grown, self.found_inf, GROWTH, BACK_OFF, GROWS_AFTER)

    def state_dict(self) -> dict[str, Tensor]:
        """What the next step depends on."""
        return {"scale": self._scale.clone(), "grown": self._grown.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go back to there."""
        self._scale.copy_(state["scale"])
        self._grown.copy_(state["grown"])
