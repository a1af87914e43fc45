"""Which of the two runs; and where the kernel finds what it works on.

Torch's own copy of many tensors gives a program 65,536 numbers: a dozen small tensors keep a dozen of a device's
hundred multiprocessors busy, and take as long as if they were large.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from penstock.kernels.addresses import Addresses, is_laid_as
from penstock.kernels.common import HAS_TRITON, PRECISIONS
from penstock.kernels.copy_many import reference


@final
class Copies:
    """Copies into the same tensors again and again.

    Args:
        targets: Dense in memory in whatever order of dimensions; all of one type.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self._targets = list(targets)
        by_kernel = targets[0].is_cuda and HAS_TRITON and targets[0].dtype in PRECISIONS
        self._addresses = Addresses(targets) if by_kernel else None

    @torch.no_grad()
    def fill(self, sources: Sequence[Tensor]) -> None:
        """See `reference.copy_many`. What is captured in a CUDA graph is complete only after `settle`.

        Args:
            sources: All of one type. Where one is laid in memory otherwise than its target, torch copies them.
        """
        if self._addresses is None or not all(map(is_laid_as, sources, self._targets)):
            reference.copy_many(self._targets, sources)
            return
        # Only here: it is not installed where there is no GPU.
        from penstock.kernels.copy_many import triton

        table_T3 = self._addresses.of([sources, self._targets])
        triton.copy_many(table_T3, self._addresses.parts_P2, sources[0].dtype, self._targets[0].dtype)

    def settle(self) -> None:
        """Tell the kernel, after a capture, where the sources are that it was captured with."""
        if self._addresses is not None:
            self._addresses.settle()
