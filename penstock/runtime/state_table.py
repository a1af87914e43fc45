"""The states of all streams: one tensor for each leaf of the state, slots first."""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from penstock.core.errors import ServeError
from penstock.nn.streaming import State, Streaming, leaves, map_state

# B rows of the batch, S bytes of a state

# Share of the free memory that states may take.
MAX_MEMORY_SHARE = 0.5


def affordable_slots(module: Streaming, slots: int, free_bytes: int) -> int:
    """Limit the number of slots by the free memory of the device.

    Raises:
        ServeError: There is no room for one.
    """
    each = sum(leaf.nbytes for leaf in leaves(module.initial_state(1)))
    fit = min(slots, int(free_bytes * MAX_MEMORY_SHARE) // each - 1) if each else slots
    if fit < 1:
        raise ServeError(
            f"one stream's state takes {each / 1e6:,.1f} MB, and {free_bytes / 1e6:,.0f} MB are free; use a machine "
            f"with more memory, or a network with a smaller state."
        )
    return fit


@final
class StateTable:
    """Gathers the states of a batch for a step and scatters them afterwards. A stream's state stays at its slot.

    Args:
        module: The network, on its device and in its precision.
        slots: The number of streams. One more row is for padding.
    """

    def __init__(self, module: Streaming, slots: int) -> None:
        self.slots = slots
        self._initial = module.initial_state(1)
        self._rows = map_state(lambda leaf: leaf.expand(slots + 1, *leaf.shape[1:]).clone(), self._initial)

    def gather(self, slot_B: Tensor, fresh_B: Tensor) -> State:
        """Gather the states of a batch's rows; where a stream begins, the initial state."""
        return _gather(self._rows, self._initial, slot_B, fresh_B)

    def scatter(self, slot_B: Tensor, state: State) -> None:
        """Scatter the states of a batch's rows."""
        for leaf, after in zip(leaves(self._rows), leaves(state), strict=True):
            leaf.index_copy_(0, slot_B, after.to(leaf.dtype))

    @property
    def row_bytes(self) -> int:
        """Bytes of one stream's state: S."""
        return sum(_row_bytes(leaf) for leaf in leaves(self._rows))

    @property
    def layout(self) -> str:
        """The type and shape of each leaf, in their order."""
        return " ".join(
            f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape[1:])}" for leaf in leaves(self._rows)
        )

    def pack(self, slot_B: Tensor) -> Tensor:
        """Copy the states of some streams into one tensor of bytes, `[B, S]`, on the same device."""
        rows = slot_B.shape[0]
        packed = [
            leaf.index_select(0, slot_B).reshape(rows, math.prod(leaf.shape[1:])).view(torch.uint8)
            for leaf in leaves(self._rows)
        ]
        return torch.cat(packed, 1)

    def unpack(self, slot_B: Tensor, packed_BS: Tensor) -> None:
        """Restore states that `pack` copied, of a table with the same `layout`; their next chunks must not be fresh."""
        at = 0
        for leaf in leaves(self._rows):
            size = _row_bytes(leaf)
            # A copy, because bytes in the middle of a row are not aligned.
            values = packed_BS[:, at : at + size].clone(memory_format=torch.contiguous_format).view(leaf.dtype)
            leaf.index_copy_(0, slot_B, values.reshape(len(values), *leaf.shape[1:]))
            at += size

    def save(self, slot: int) -> list[Tensor]:
        """Copy a stream's state to the host, leaf by leaf, to continue it elsewhere."""
        return [leaf[slot].clone().cpu() for leaf in leaves(self._rows)]

    def restore(self, slot: int, saved: Sequence[Tensor]) -> None:
        """Restore a state that `save` copied; the stream's next chunk must not be fresh."""
        with torch.inference_mode():
            for leaf, value in zip(leaves(self._rows), saved, strict=True):
                assert leaf.shape[1:] == value.shape, (leaf.shape, value.shape)
                leaf[slot] = value.to(leaf)


def _row_bytes(leaf: Tensor) -> int:
    return math.prod(leaf.shape[1:]) * leaf.itemsize


def _gather(table: State, initial: State, slot_B: Tensor, fresh_B: Tensor) -> State:
    if isinstance(table, Tensor):
        assert isinstance(initial, Tensor)
        rows = table.index_select(0, slot_B)
        # On a GPU, reading the mask on the host would take longer than the copy.
        if not fresh_B.is_cuda and not fresh_B.any():
            return rows
        return torch.where(fresh_B.reshape(-1, *[1] * (table.ndim - 1)), initial, rows)
    return tuple(_gather(part, begin, slot_B, fresh_B) for part, begin in zip(table, initial, strict=True))
