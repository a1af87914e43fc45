"""When the host looks at what the device has done: it has to wait for that, so it does not do it after each step."""

import time
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from penstock.train.world import World

# A look empties the device's queue, which costs some tenths of a millisecond; a person who asks to stop waits for it.
LOOK_EVERY_S = 0.2
STEPS_BETWEEN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What all processes know after a look.

    Args:
        losses: Of each step since the look before, over the global batch.
        asked: Whether somebody asked any of the processes to stop.
        due: Whether the first process's clock asks for a checkpoint.
        failed: Whether any of the processes could not write one.
    """

    losses: list[float]
    asked: bool
    due: bool
    failed: bool


@final
class Looks:
    """Collects the losses of steps until the host looks, after equally many steps in every process.

    Args:
        world: The processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._shares: list[Tensor] = []
        self._every = 1
        self._looked_s = time.monotonic()

    def taken(self, share: Tensor) -> None:
        """A step was taken, and this is the process's share of its loss, on its device."""
        self._shares.append(share)

    @property
    def are_due(self) -> bool:
        """Whether it is time to look."""
        return len(self._shares) >= self._every

    def look(self, *, asked: bool, due: bool, failed: bool) -> Seen:
        """Wait for the steps taken so far. All processes must look, and the first one's clock counts.

        Args:
            asked: Whether this process was asked to stop.
            due: Whether a checkpoint is due by this process's clock.
            failed: Whether this process could not write a checkpoint.
        """
        world, taken = self._world, len(self._shares)
        step_s = (time.monotonic() - self._looked_s) / taken
        every = min(max(int(LOOK_EVERY_S / max(step_s, 1e-9)), 1), STEPS_BETWEEN)
        shares = torch.stack(self._shares).double()
        of_first = world.is_first
        *losses, wished, wanted, lost, every = world.total(
            *shares.unbind(), asked, due and of_first, failed, every * of_first
        )
        self._shares.clear()
        self._every, self._looked_s = int(every), time.monotonic()
        return Seen(losses=losses, asked=wished > 0, due=wanted > 0, failed=lost > 0)
