"""Where tensors lie in a device's memory, as a table there: for a kernel that works on many of them by one launch."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from penstock.kernels.common import PRECISIONS

# What a program reads at once begins at such an address.
ALIGNED_BYTES = 16
# Numbers a program handles.
BLOCK = 2048

# T tensors, C columns, P programs


def is_laid_as(tensor: Tensor, other: Tensor) -> bool:
    """Whether a kernel can go through both of one shape at once, from the first address to the last."""
    # Of a dimension of one nobody takes the second step.
    steps = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    alike = all(own == others for size, own, others in steps if size > 1)
    return alike and tensor.data_ptr() % ALIGNED_BYTES == 0 and tensor.dtype in PRECISIONS


def is_plain(tensor: Tensor) -> bool:
    """Whether a kernel can go through it: its numbers lie one after the other, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return is_laid_as(tensor, tensor)


@final
class Addresses:
    """A table with a row for each of some tensors and what goes with them, of equal shapes.

    Args:
        tensors: Which; the table is on their device.

    Attributes:
        parts_P2: int32, of each program the tensor and which `BLOCK` of its numbers.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._counts = [tensor.numel() for tensor in tensors]
        parts = [(index, part) for index, count in enumerate(self._counts) for part in range(-(-count // BLOCK))]
        self.parts_P2 = torch.tensor(parts, dtype=torch.int32).to(tensors[0].device)
        self._table: Tensor | None = None
        self._later: Tensor | None = None

    def of(self, columns: Sequence[Sequence[Tensor | None]]) -> Tensor:
        """The table, int64 `[T, C + 1]`: addresses, 0 for none, and counts.

        While a CUDA graph is captured, it is that of the call before: it is right when the graph is replayed, after
        `settle`.

        Args:
            columns: For each, a tensor or none a row.
        """
        rows = [
            [*(0 if tensor is None else tensor.data_ptr() for tensor in row), count]
            for row, count in zip(zip(*columns, strict=True), self._counts, strict=True)
        ]
        assert not any(address % ALIGNED_BYTES for row in rows for address in row[:-1]), "a tensor is not aligned"
        table = torch.tensor(rows, dtype=torch.int64)
        if self._table is None:
            self._table = torch.empty_like(table, device=self.parts_P2.device)
        if torch.cuda.is_current_stream_capturing():
            # The graph's memory stays where it is.
            self._later = table
        else:
            self._later = None
            # Page-locked, so that the host does not wait.
            self._table.copy_(table.pin_memory(), non_blocking=True)
        return self._table

    def settle(self) -> None:
        """A CUDA graph was captured: tell its kernels where the tensors are that it was captured with."""
        if self._later is not None and self._table is not None:
            self._table.copy_(self._later)
            self._later = None
