"""Dispatch between kernel and reference, and the address tables of the kernels."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from penstock.kernels.common import HAS_TRITON
from penstock.kernels.fused_optimizer import reference
from penstock.kernels.fused_optimizer.rules import Adam, Sgd
from penstock.kernels.pointer_table import Addresses, is_traversable


@final
class Weights:
    """Weights updated by one kernel launch.

    A captured CUDA graph is complete only after `finish_capture`.

    Args:
        weights: float32.
        copies: Compute copies in a lower precision, all of one type, with the weights' memory format; None for weights
            without one.
    """

    def __init__(self, weights: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
        self._weights, self._copies = list(weights), list(copies)
        # Weights of torch's recurrent layers are unaligned views of one buffer.
        by_kernel = weights[0].is_cuda and HAS_TRITON and all(map(is_traversable, weights))
        self._addresses = Addresses(weights) if by_kernel else None

    @torch.no_grad()
    def step(self, rule: Sgd | Adam, gradients: Sequence[Tensor], rate: Tensor, *state: Sequence[Tensor]) -> None:
        """See `reference.sgd` and `reference.adam`.

        Args:
            rule: The update rule.
            gradients: All of one type, with the weights' memory format.
            rate: Learning rate, float32, a scalar on the device.
            state: Optimizer state in the reference's order: momenta; or means, squares and steps. Same memory format.
        """
        if self._addresses is None:
            update: Any = reference.sgd if isinstance(rule, Sgd) else reference.adam
            update(rule, self._weights, self._copies, gradients, rate, *state)
            return
        # Imported here, because Triton is not installed on machines without a GPU.
        from penstock.kernels.fused_optimizer import triton

        # SGD without momentum has no momenta.
        columns = [gradients, self._weights, self._copies, *(kept for kept in state if kept)]
        table, parts_P2 = self._addresses.of(columns), self._addresses.parts_P2
        copy_type = next((copy.dtype for copy in self._copies if copy is not None), torch.bfloat16)
        kernel: Any = triton.sgd if isinstance(rule, Sgd) else triton.adam
        kernel(rule, table, parts_P2, gradients[0].dtype, copy_type, rate)
        # Torch does not see the kernel's writes; the version counters must change for autograd's check.
        torch.autograd.graph.increment_version([*self._weights, *(copy for copy in self._copies if copy is not None)])

    def finish_capture(self) -> None:
        """Write the addresses of the captured tensors into the kernel's table, after a capture."""
        if self._addresses is not None:
            self._addresses.finish_capture()
