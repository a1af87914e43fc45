"""Dispatch between kernel and reference."""

from functools import cache

import torch
from torch import Tensor

from penstock.kernels.common import HAS_TRITON, NO_TRITON, PRECISIONS, log_kernel
from penstock.kernels.max_pool import reference
from penstock.kernels.max_pool.operations import pooled

# The position of the maximum within its window is kept in 8 bits.
LARGEST_KERNEL = 11


def max_pool(x_BCHW: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """See `reference.max_pool`."""
    # Export runs on a CPU and needs torch's own operations.
    if not x_BCHW.is_cuda:
        return reference.max_pool(x_BCHW, kernel, stride, padding)
    why = _why_not(x_BCHW.dtype, kernel, stride, backward=torch.is_grad_enabled())
    if not torch.compiler.is_compiling():
        _say(why)
    if why:
        return reference.max_pool(x_BCHW, kernel, stride, padding)
    return pooled(x_BCHW, kernel, stride, padding)[0]


def _why_not(dtype: torch.dtype, kernel: int, stride: int, *, backward: bool) -> str:
    # A server saves the import of Triton, 3 s of its start.
    if not backward:
        return "without gradients, torch reads memory once too"
    if kernel <= stride:
        return "windows that do not overlap are faster when the compiler fuses them with the neighbouring operations"
    if dtype not in PRECISIONS:
        return f"the kernel does not compute in {dtype}"
    if kernel > LARGEST_KERNEL:
        return f"a window of {kernel} x {kernel} is larger than the kernel's"
    return "" if HAS_TRITON else NO_TRITON


@cache
def _say(why: str) -> None:
    log_kernel("max pooling runs on", "one pass over memory, forward and backward", why)
