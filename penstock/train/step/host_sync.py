"""Host synchronization: the host waits for the device only every few steps, because that empties the device's queue."""

import time
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from penstock.train.parallel.world import World

# A synchronization costs some tenths of a millisecond; a user who stops the training waits for the next one.
SYNC_EVERY_S = 0.2
MAX_STEPS_BETWEEN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedStatus:
    """State shared by all processes after a synchronization.

    Args:
        losses: Loss of each step since the previous synchronization, over the global batch.
        stops: True if the user stopped any of the processes.
        due: True if a checkpoint is due by the first process's clock.
        failed: True if any of the processes failed to write a checkpoint.
    """

    losses: list[float]
    stops: bool
    due: bool
    failed: bool


@final
class HostSync:
    """Collect the losses of steps until the next synchronization, after the same number of steps in every process.

    Args:
        world: The processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._shares: list[Tensor] = []
        self._every = 1
        self._synced_s = time.monotonic()

    def step_taken(self, share: Tensor) -> None:
        """Add this process's share of a step's loss, on its device."""
        self._shares.append(share)

    @property
    def is_due(self) -> bool:
        """True if enough steps were taken."""
        return len(self._shares) >= self._every

    def wait(self, *, stops: bool, due: bool, failed: bool) -> SharedStatus:
        """Wait for the steps taken so far. Collective.

        Args:
            stops: True if the user stopped this process.
            due: True if a checkpoint is due by this process's clock; the first one's counts.
            failed: True if this process failed to write a checkpoint.
        """
        world, taken = self._world, len(self._shares)
        step_s = (time.monotonic() - self._synced_s) / taken
        every = min(max(int(SYNC_EVERY_S / max(step_s, 1e-9)), 1), MAX_STEPS_BETWEEN)
        shares = torch.stack(self._shares).double()
        is_rank_zero = world.is_rank_zero
        *losses, any_stops, is_due, any_failed, every = world.sum_on_host(
            *shares.unbind(), stops, due and is_rank_zero, failed, every * is_rank_zero
        )
        self._shares.clear()
        self._every, self._synced_s = int(every), time.monotonic()
        return SharedStatus(losses=losses, stops=any_stops > 0, due=is_due > 0, failed=any_failed > 0)
