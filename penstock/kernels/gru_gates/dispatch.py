"""Dispatch between kernel and reference."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from penstock.kernels.common import HAS_TRITON, logged, without_triton
from penstock.kernels.gru_gates import host, reference

SUBJECT = "the gates of GRUs are computed"

Gates = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def gru_gates(input_BG: Tensor, recurrent_BG: Tensor, hidden_BH: Tensor, valid_B: Tensor) -> Tensor:
    """See `reference.gru_gates`."""
    needs_gradient = torch.is_grad_enabled() and any(
        given.requires_grad for given in (input_BG, recurrent_BG, hidden_BH)
    )
    if torch.compiler.is_exporting():
        # The others work in place, read the batch's values, or are not operations of torch.
        return reference.gru_gates(input_BG, recurrent_BG, hidden_BH, valid_B)
    gates = chosen(hidden_BH.device.type, hidden_BH.dtype, needs_gradient)
    return gates(input_BG, recurrent_BG, hidden_BH, valid_B)


@cache
def chosen(device: str, dtype: torch.dtype, needs_gradient: bool) -> Gates:
    """Choose the implementation for a device and dtype; logged once."""
    if device == "cpu" and not needs_gradient:
        return logged(host.gru_gates, SUBJECT, "torch in place", "fewer passes over memory")
    if device != "cuda":
        return logged(reference.gru_gates, SUBJECT, "torch", "the others have no backward, or are for other devices")
    if dtype == torch.float64:
        return logged(reference.gru_gates, SUBJECT, "torch", "the kernel computes in float32")
    if needs_gradient:
        return logged(reference.gru_gates, SUBJECT, "torch", "the kernel has no backward")
    if not HAS_TRITON:
        return without_triton(reference.gru_gates, SUBJECT)
    from penstock.kernels.gru_gates import triton

    return logged(triton.gru_gates, SUBJECT, "Triton", "one pass over memory")
