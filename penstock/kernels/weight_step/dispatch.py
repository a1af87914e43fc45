"""Which of the two runs; and where the kernel finds what it works on."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from penstock.kernels.addresses import HAS_TRITON, Addresses
from penstock.kernels.weight_step import reference


@final
class Weights:
    """Weights that are stepped together, by one launch.

    Args:
        weights: float32, dense in memory in whatever order of dimensions.
        momenta: float32, laid in memory as the weights are; empty where there is no momentum.
        copies: Of a shorter precision, laid likewise; None for weights without one. All of one type.
    """

    def __init__(self, weights: Sequence[Tensor], momenta: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
        self._weights, self._momenta, self._copies = list(weights), list(momenta), list(copies)
        self._by_kernel = weights[0].is_cuda and HAS_TRITON
        self._addresses: Addresses | None = None

    @torch.no_grad()
    def sgd(self, gradients: Sequence[Tensor], rate: Tensor, *, momentum: float, decay: float, nesterov: bool) -> None:
        """See `reference.sgd`. What is captured in a CUDA graph is complete only after `settle`.

        Args:
            gradients: Laid in memory as the weights are, all of one type.
            rate: float32, a scalar on the device.
            momentum: See there.
            decay: See there.
            nesterov: See there.
        """
        if not self._by_kernel:
            reference.sgd(
                self._weights,
                gradients,
                self._momenta,
                self._copies,
                rate,
                momentum=momentum,
                decay=decay,
                nesterov=nesterov,
            )
            return
        # Only here: it is not installed where there is no GPU.
        from penstock.kernels.weight_step import triton

        if self._addresses is None:
            counts = [weight.numel() for weight in self._weights]
            self._addresses = Addresses(counts, triton.BLOCK, self._weights[0].device)
        nothing: list[Tensor | None] = [None] * len(self._weights)
        triton.sgd(
            self._addresses.of([gradients, self._weights, self._momenta or nothing, self._copies]),
            self._addresses.parts_P2,
            gradients[0].dtype,
            next((copy.dtype for copy in self._copies if copy is not None), torch.bfloat16),
            rate,
            momentum=momentum if self._momenta else 0.0,
            decay=decay,
            nesterov=nesterov,
        )

    def settle(self) -> None:
        """Tell the kernel, after a capture, where the gradients are that it was captured with."""
        if self._addresses is not None:
            self._addresses.settle()
