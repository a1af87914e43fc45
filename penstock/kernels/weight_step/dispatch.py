"""Which of the two runs; and where the kernels find what they work on."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from penstock.kernels.addresses import HAS_TRITON, Addresses
from penstock.kernels.weight_step import reference


@final
class Weights:
    """Weights that are stepped together, by one launch.

    What is captured in a CUDA graph is complete only after `settle`.

    Args:
        weights: float32, dense in memory in whatever order of dimensions.
        copies: Of a shorter precision, laid in memory as the weights are; None for weights without one. All of one
            type.
    """

    def __init__(self, weights: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
        self._weights, self._copies = list(weights), list(copies)
        self._by_kernel = weights[0].is_cuda and HAS_TRITON
        self._addresses: Addresses | None = None

    @torch.no_grad()
    def sgd(
        self,
        gradients: Sequence[Tensor],
        momenta: Sequence[Tensor],
        rate: Tensor,
        *,
        momentum: float,
        decay: float,
        nesterov: bool,
    ) -> None:
        """See `reference.sgd`.

        Args:
            gradients: Laid in memory as the weights are, all of one type.
            momenta: Laid likewise; empty where there is no momentum.
            rate: float32, a scalar on the device.
            momentum: See there.
            decay: See there.
            nesterov: See there.
        """
        if not self._by_kernel:
            reference.sgd(
                self._weights,
                self._copies,
                gradients,
                momenta,
                rate,
                momentum=momentum,
                decay=decay,
                nesterov=nesterov,
            )
            return
        # Only here: it is not installed where there is no GPU.
        from penstock.kernels.weight_step import triton

        types = gradients[0].dtype, self._copy_type
        state = [momenta] if momenta else []
        kept = momentum if momenta else 0.0
        triton.sgd(*self._aimed(gradients, state), *types, rate, momentum=kept, decay=decay, nesterov=nesterov)

    @torch.no_grad()
    def adam(
        self,
        gradients: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        steps: Sequence[Tensor],
        rate: Tensor,
        *,
        betas: tuple[float, float],
        eps: float,
        decay: float,
        decoupled: bool,
    ) -> None:
        """See `reference.adam`.

        Args:
            gradients: Laid in memory as the weights are, all of one type.
            means: Laid likewise.
            squares: Laid likewise.
            steps: See there.
            rate: float32, a scalar on the device.
            betas: See there.
            eps: See there.
            decay: See there.
            decoupled: See there.
        """
        if not self._by_kernel:
            reference.adam(
                self._weights,
                self._copies,
                gradients,
                means,
                squares,
                steps,
                rate,
                betas=betas,
                eps=eps,
                decay=decay,
                decoupled=decoupled,
            )
            return
        from penstock.kernels.weight_step import triton

        aimed = self._aimed(gradients, [means, squares, steps])
        types = gradients[0].dtype, self._copy_type
        triton.adam(*aimed, *types, rate, betas=betas, eps=eps, decay=decay, decoupled=decoupled)

    def settle(self) -> None:
        """Tell the kernel, after a capture, where the tensors are that it was captured with."""
        if self._addresses is not None:
            self._addresses.settle()

    @property
    def _copy_type(self) -> torch.dtype:
        return next((copy.dtype for copy in self._copies if copy is not None), torch.bfloat16)

    def _aimed(self, gradients: Sequence[Tensor], state: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
        """The kernel's table, and which part of which tensor each program has."""
        from penstock.kernels.weight_step.triton import BLOCK

        if self._addresses is None:
            counts = [weight.numel() for weight in self._weights]
            self._addresses = Addresses(counts, BLOCK, self._weights[0].device)
        table = self._addresses.of([gradients, self._weights, self._copies, *state])
        return table, self._addresses.parts_P2
