"""Dispatch between kernel and reference, and the address table of the kernel.

Torch's foreach copy assigns 65,536 elements to a program: a dozen small tensors occupy a dozen of a GPU's hundred
multiprocessors, and take as long as large ones.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from penstock.kernels.common import HAS_TRITON, PRECISIONS
from penstock.kernels.multi_tensor_copy import reference
from penstock.kernels.pointer_table import Addresses, is_traversable_with


@final
class Copies:
    """Repeated copies into the same tensors.

    Args:
        targets: Dense in memory in whatever order of dimensions; all of one type.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self._targets = list(targets)
        by_kernel = targets[0].is_cuda and HAS_TRITON and targets[0].dtype in PRECISIONS
        self._addresses = Addresses(targets) if by_kernel else None

    @torch.no_grad()
    def fill(self, sources: Sequence[Tensor]) -> None:
        """See `reference.copy_many`. A captured CUDA graph is complete only after `finish_capture`.

        Args:
            sources: All of one type. Torch copies them if one has other strides than its target.
        """
        if self._addresses is None or not all(map(is_traversable_with, sources, self._targets)):
            reference.copy_many(self._targets, sources)
            return
        # Imported here, because Triton is not installed on machines without a GPU.
        from penstock.kernels.multi_tensor_copy import triton

        table_T3 = self._addresses.of([sources, self._targets])
        triton.copy_many(table_T3, self._addresses.parts_P2, sources[0].dtype, self._targets[0].dtype)

    def finish_capture(self) -> None:
        """Write the addresses of the captured sources into the kernel's table, after a capture."""
        if self._addresses is not None:
            self._addresses.finish_capture()
