"""The states of all streams: a tensor for each leaf of the state, the slots first."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from penstock.core.errors import ServeError
from penstock.nn.streaming import State, Streaming, leaves, map_state

# B rows of the batch

# Of the memory that is free, at most so much for states.
SHARE_OF_MEMORY = 0.5


def affordable_slots(module: Streaming, slots: int, free_bytes: int) -> int:
    """How many of so many slots' states fit into a share of the memory that is free where the network is.

    Raises:
        ServeError: Not one does.
    """
    each = sum(leaf.nbytes for leaf in leaves(module.initial_state(1)))
    fit = min(slots, int(free_bytes * SHARE_OF_MEMORY) // each - 1) if each else slots
    if fit < 1:
        raise ServeError(
            f"one stream's state takes {each / 1e6:,.1f} MB, and {free_bytes / 1e6:,.0f} MB are free; use a machine "
            f"with more memory, or a network that remembers less."
        )
    return fit


@final
class StateTable:
    """Where states are joined for a step and parted again: a stream's rows are found by its slot and never move.

    Args:
        module: The network, where it runs and in its precision.
        slots: How many streams there may be. There is one row more, for what fills a batch up.
    """

    def __init__(self, module: Streaming, slots: int) -> None:
        self.slots = slots
        self._initial = module.initial_state(1)
        self._rows = map_state(lambda leaf: leaf.expand(slots + 1, *leaf.shape[1:]).clone(), self._initial)

    @property
    def nbytes_each(self) -> int:
        """What one stream's state takes."""
        return sum(leaf.nbytes for leaf in leaves(self._initial))

    def joined(self, slot_B: Tensor, fresh_B: Tensor) -> State:
        """The states of the batch's rows; where a stream begins, the initial one."""
        return _merged(self._rows, self._initial, slot_B, fresh_B)

    def part(self, slot_B: Tensor, state: State) -> None:
        """Put the states of the batch's rows back."""
        for leaf, after in zip(leaves(self._rows), leaves(state), strict=True):
            leaf.index_copy_(0, slot_B, after.to(leaf.dtype))

    def saved(self, slot: int) -> list[Tensor]:
        """A stream's state, leaf by leaf and on the host, to continue it elsewhere."""
        return [leaf[slot].clone().cpu() for leaf in leaves(self._rows)]

    def restore(self, slot: int, saved: Sequence[Tensor]) -> None:
        """Continue in a slot what `saved` gave; the stream must not be fresh when it is stepped."""
        with torch.inference_mode():
            for leaf, value in zip(leaves(self._rows), saved, strict=True):
                assert leaf.shape[1:] == value.shape, (leaf.shape, value.shape)
                leaf[slot] = value.to(leaf)


def _merged(table: State, initial: State, slot_B: Tensor, fresh_B: Tensor) -> State:
    if isinstance(table, Tensor):
        assert isinstance(initial, Tensor)
        rows = table.index_select(0, slot_B)
        # A GPU is not asked: to hear its answer would take longer.
        if not fresh_B.is_cuda and not fresh_B.any():
            return rows
        return torch.where(fresh_B.reshape(-1, *[1] * (table.ndim - 1)), initial, rows)
    return tuple(_merged(part, begin, slot_B, fresh_B) for part, begin in zip(table, initial, strict=True))
