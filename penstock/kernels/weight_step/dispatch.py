"""Which of the two runs; and where the kernel finds what it works on."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import final

import torch
from torch import Tensor

from penstock.kernels.weight_step import reference

HAS_TRITON = find_spec("triton") is not None
# What a program reads at once begins at such an address.
ALIGNED_BYTES = 16


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
        self._table_T5: Tensor | None = None
        self._parts_P2: Tensor | None = None
        self._later: Tensor | None = None

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

        table_T5, parts_P2 = self._aimed(gradients, triton.BLOCK)
        triton.sgd(
            table_T5,
            parts_P2,
            gradients[0].dtype,
            next((copy.dtype for copy in self._copies if copy is not None), torch.bfloat16),
            rate,
            momentum=momentum if self._momenta else 0.0,
            decay=decay,
            nesterov=nesterov,
        )

    def settle(self) -> None:
        """Tell the kernel, after a capture, where the gradients are that it was captured with."""
        if self._later is not None:
            assert self._table_T5 is not None
            self._table_T5.copy_(self._later)
            self._later = None

    def _aimed(self, gradients: Sequence[Tensor], block: int) -> tuple[Tensor, Tensor]:
        """The table of where everything is, and which part of which tensor each program has."""
        nothing: list[Tensor | None] = [None] * len(self._weights)
        columns = [gradients, self._weights, self._momenta or nothing, self._copies]
        rows = [
            [*(0 if tensor is None else tensor.data_ptr() for tensor in tensors), tensors[1].numel()]
            for tensors in zip(*columns, strict=True)
        ]
        assert not any(address % ALIGNED_BYTES for row in rows for address in row[:-1]), "a tensor is not aligned"
        table_T5 = torch.tensor(rows, dtype=torch.int64)
        if self._table_T5 is None or self._parts_P2 is None:
            device = self._weights[0].device
            parts = [(index, part) for index, row in enumerate(rows) for part in range(-(-row[-1] // block))]
            self._parts_P2 = torch.tensor(parts, dtype=torch.int32).to(device)
            self._table_T5 = torch.empty_like(table_T5, device=device)
        if torch.cuda.is_current_stream_capturing():
            # What is read when the graph is replayed is written after the capture: the addresses stay.
            self._later = table_T5
        else:
            self._later = None
            # Page-locked, so that the host does not wait.
            self._table_T5.copy_(table_T5.pin_memory(), non_blocking=True)
        return self._table_T5, self._parts_P2
