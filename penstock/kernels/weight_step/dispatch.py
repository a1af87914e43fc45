"""Which of the two runs; and where the kernels find what they work on."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from penstock.kernels.addresses import Addresses, is_plain
from penstock.kernels.common import HAS_TRITON
from penstock.kernels.weight_step import reference
from penstock.kernels.weight_step.rules import Adam, Sgd


@final
class Weights:
    """Weights that are stepped together, by one launch.

    What is captured in a CUDA graph is complete only after `settle`.

    Args:
        weights: float32.
        copies: Of a shorter precision, laid in memory as the weights are; None for weights without one. All of one
            type.
    """

    def __init__(self, weights: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
        self._weights, self._copies = list(weights), list(copies)
        # Those of torch's recurrent layers lie in one piece of memory, where they begin anywhere.
        by_kernel = weights[0].is_cuda and HAS_TRITON and all(map(is_plain, weights))
        self._addresses = Addresses(weights) if by_kernel else None

    @torch.no_grad()
    def step(self, rule: Sgd | Adam, gradients: Sequence[Tensor], rate: Tensor, *state: Sequence[Tensor]) -> None:
        """See `reference.sgd` and `reference.adam`.

        Args:
            rule: How.
            gradients: Laid in memory as the weights are, all of one type.
            rate: float32, a scalar on the device.
            state: What the optimizer keeps, as they have it: momenta; or means, squares and steps. Laid likewise.
        """
        if self._addresses is None:
            if isinstance(rule, Sgd):
                reference.sgd(rule, self._weights, self._copies, gradients, rate, *state)
            else:
                reference.adam(rule, self._weights, self._copies, gradients, rate, *state)
            return
        # Only here: it is not installed where there is no GPU.
        from penstock.kernels.weight_step import triton

        # SGD has no momenta where there is no momentum.
        columns = [gradients, self._weights, self._copies, *(kept for kept in state if kept)]
        table, parts_P2 = self._addresses.of(columns), self._addresses.parts_P2
        copy_type = next((copy.dtype for copy in self._copies if copy is not None), torch.bfloat16)
        if isinstance(rule, Sgd):
            triton.sgd(rule, table, parts_P2, gradients[0].dtype, copy_type, rate)
        else:
            triton.adam(rule, table, parts_P2, gradients[0].dtype, copy_type, rate)
        # Torch does not see what a kernel writes; whoever kept one of these for later is to be told.
        torch.autograd.graph.increment_version([*self._weights, *(copy for copy in self._copies if copy is not None)])

    def settle(self) -> None:
        """Tell the kernel, after a capture, where the tensors are that it was captured with."""
        if self._addresses is not None:
            self._addresses.settle()
