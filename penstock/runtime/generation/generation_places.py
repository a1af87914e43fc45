"""The state of answers in progress on a device, in buffers that never move: each row has a place.

A CUDA graph reads and writes fixed addresses. So the buffers have a place for the most rows, each with room for the
largest lengths, and a step runs on the first places and the room that the rows in progress need: a view. Rows join by
being written to free places; a row that leaves leaves a hole.

A step decides by itself which rows end with it: the network said so, a growing dimension is full, or no step is left.
The state of those stays what it was before that step, so that steps launched before the host knows of the end repeat
the last one, which is valid. So do holes.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from penstock.core.spec import Array
from penstock.core.state_layout import StateLayout
from penstock.runtime.generation.generating_network import GeneratingNetwork
from penstock.runtime.generation.generation_state import is_same

# B rows of a step, P places

# Sections of a packed buffer start at multiples of this.
ALIGNED = 16
# No name of an output.
DONE = "done "


@final
class Packing:
    """Several tensors in one buffer of bytes, which one transfer moves.

    Args:
        sections: Dtype and shape by name.
    """

    def __init__(self, sections: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._sections: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        start = 0
        for name, (dtype, shape) in sections.items():
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            self._sections[name] = (start, nbytes, dtype, shape)
            start += -(-nbytes // ALIGNED) * ALIGNED
        self.nbytes = start
        self._arrays = {
            name: (first, size, torch.empty(0, dtype=dtype).numpy().dtype, shape)
            for name, (first, size, dtype, shape) in self._sections.items()
        }

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a buffer, `[nbytes]` uint8 or more, by name."""
        return {
            name: buffer[start : start + nbytes].view(dtype).view(shape)
            for name, (start, nbytes, dtype, shape) in self._sections.items()
        }

    def arrays(self, buffer: Tensor) -> dict[str, Array]:
        """Return the same of a buffer on the host, as arrays."""
        whole = buffer.numpy()
        return {
            name: whole[start : start + nbytes].view(dtype).reshape(shape)
            for name, (start, nbytes, dtype, shape) in self._arrays.items()
        }


@final
class Places:
    """The buffers.

    Args:
        layout: The state of one row.
        like: The state of one example, `[1, ...]` by name, with all lengths: places that were never used have it.
        count: P, their number. One more is a scratch place, for rows that pad a batch.

    Attributes:
        left: Steps that each row has left, `[P + 1]`; 0 where there is none.
    """

    def __init__(self, layout: StateLayout, like: Mapping[str, Tensor], count: int) -> None:
        self.count = count
        self._layout = layout
        self._tensors: dict[str, Tensor] = {}
        for name, spec in layout.generate.state.items():
            self._tensors[name] = like[name].new_full((count + 1, *map(int, spec.shape)), self._fill(like[name]))
        for name in layout.dims:
            self._tensors[name] = like[name].new_zeros(count + 1)
        for name, given in like.items():
            target, given = self._overlapping(name, given)
            target.copy_(given)
        self.left = torch.zeros(count + 1, dtype=torch.int64, device=next(iter(like.values())).device)

    @property
    def nbytes(self) -> int:
        """Memory of the buffers."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def step(self, network: GeneratingNetwork, rows: int, room: Mapping[str, int]) -> dict[str, Tensor]:
        """Step the rows of the first places.

        Args:
            network: The network.
            rows: B, the number of places.
            room: Size of each dimension that varies, at least the longest length of these places, and one entry more
                where it grows.

        Returns:
            By name: the outputs, `DONE`, and the lengths of the dimensions that grow, `[B, ...]`.
        """
        before = {name: self._view(name, tensor[:rows], room) for name, tensor in self._tensors.items()}
        # A network may write small tensors in place, and those of a row that ends must stay.
        given = {name: tensor if self._layout.axes.get(name) else tensor.clone() for name, tensor in before.items()}
        outputs, after, done_B = network.step(given)
        full_B = torch.zeros_like(done_B)
        for name, dim in self._layout.growing.items():
            full_B = full_B | (after[name] >= int(dim))
        left_B = self.left[:rows]
        goes_on_B = (left_B > 1) & ~done_B & ~full_B
        for name, tensor in self._written(before, after).items():
            kept = before[name]
            if self._layout.axes.get(name):
                # Entries at or beyond a row's length are read only once the length has grown past them.
                kept.copy_(tensor)
            else:
                where_B = goes_on_B.reshape(-1, *[1] * (kept.ndim - 1))
                torch.where(where_B, tensor.to(kept.dtype), kept, out=kept)
        left_B.copy_(torch.where(goes_on_B, left_B - 1, 0))
        named = dict(zip(network.output_names, outputs, strict=True))
        return named | {DONE: done_B} | {name: after[name] for name in self._layout.growing}

    def write(self, tensors: Mapping[str, Tensor], to_B: Tensor, left_B: Tensor) -> None:
        """Write the state of rows that begin.

        Args:
            tensors: Their state, `[B, ...]`, with all lengths.
            to_B: Their places; P for rows that are padding.
            left_B: The steps that each may take.
        """
        for name, buffer in self._tensors.items():
            if self._layout.axes.get(name):
                # NaN that another row left behind would spread through a mask that only adds.
                buffer.index_fill_(0, to_B, self._fill(buffer))
            target, given = self._overlapping(name, tensors[name])
            if given.numel():
                target.index_copy_(0, to_B, given.to(target.dtype))
        self.left.index_copy_(0, to_B, left_B)

    def move(self, from_B: Tensor, to_B: Tensor) -> None:
        """Move rows to holes; their places become holes."""
        for tensor in self._tensors.values():
            tensor.index_copy_(0, to_B, tensor.index_select(0, from_B))
        self.left.index_copy_(0, to_B, self.left.index_select(0, from_B))
        self.stop(from_B)

    def fill_holes(self, from_B: Tensor, to_B: Tensor) -> None:
        """Give holes the lengths and small tensors of rows that are valid in less room."""
        for name, tensor in self._tensors.items():
            if not self._layout.axes.get(name):
                tensor.index_copy_(0, to_B, tensor.index_select(0, from_B))
        self.stop(to_B)

    def stop(self, at_B: Tensor) -> None:
        """End rows that the network did not end."""
        self.left.index_fill_(0, at_B, 0)

    def _written(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a step that are not written in place; copies of those that lie in another buffer."""
        buffers = {tensor.untyped_storage().data_ptr() for tensor in self._tensors.values()}
        return {
            name: tensor.clone() if tensor.untyped_storage().data_ptr() in buffers else tensor
            for name, tensor in after.items()
            if not is_same(tensor, before[name])
        }

    def _fill(self, tensor: Tensor) -> float:
        return self._layout.padding if tensor.is_floating_point() else 0

    def _view(self, name: str, tensor: Tensor, room: Mapping[str, int]) -> Tensor:
        for axis, dim in self._layout.axes.get(name, ()):
            tensor = tensor.narrow(axis, 0, room[dim])
        return tensor

    def _overlapping(self, name: str, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of a buffer and of a tensor in which both have room."""
        buffer = self._tensors[name]
        for axis, _ in self._layout.axes.get(name, ()):
            size = min(buffer.shape[axis], given.shape[axis])
            buffer, given = buffer.narrow(axis, 0, size), given.narrow(axis, 0, size)
        return buffer, given
