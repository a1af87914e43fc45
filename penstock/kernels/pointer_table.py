"""Tables of tensor addresses in device memory, for kernels that process many tensors in one launch."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from penstock.kernels.common import PRECISIONS

# Alignment of vectorized loads.
ALIGNED_BYTES = 16
# Elements of a program.
BLOCK = 2048

# T tensors, C columns, P programs


def is_traversable_with(tensor: Tensor, other: Tensor) -> bool:
    """Return True if a kernel can traverse two tensors of one shape together, in memory order."""
    # The stride of a dimension of size 1 is never used.
    steps = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    alike = all(own == others for size, own, others in steps if size > 1)
    return alike and tensor.data_ptr() % ALIGNED_BYTES == 0 and tensor.dtype in PRECISIONS


def is_traversable(tensor: Tensor) -> bool:
    """Return True if a kernel can traverse the tensor: dense memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return is_traversable_with(tensor, tensor)


@final
class Addresses:
    """A table with a row of addresses for each tensor and its companions of equal shape.

    Args:
        tensors: The tensors; the table is on their device.

    Attributes:
        parts_P2: int32, the tensor and the block of `BLOCK` elements of each program.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._counts = [tensor.numel() for tensor in tensors]
        parts = [(index, part) for index, count in enumerate(self._counts) for part in range(-(-count // BLOCK))]
        self.parts_P2 = torch.tensor(parts, dtype=torch.int32).to(tensors[0].device)
        self._table: Tensor | None = None
        self._later: Tensor | None = None

    def of(self, columns: Sequence[Sequence[Tensor | None]]) -> Tensor:
        """Fill the table, int64 `[T, C + 1]`: addresses, 0 for none, and element counts.

        During the capture of a CUDA graph the table is not written; `finish_capture` writes it before the first replay.

        Args:
            columns: For each column a tensor or None for each row.
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
            # Tensors in the graph's memory pool keep their addresses.
            self._later = table
        else:
            self._later = None
            # Page-locked, so that the copy is asynchronous.
            self._table.copy_(table.pin_memory(), non_blocking=True)
        return self._table

    def finish_capture(self) -> None:
        """Write the addresses of the captured tensors, after a capture."""
        if self._later is not None and self._table is not None:
            self._table.copy_(self._later)
            self._later = None
