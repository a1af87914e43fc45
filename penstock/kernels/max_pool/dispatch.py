"""Which of the two runs, and why."""

import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from penstock.kernels.max_pool import reference

log = logging.getLogger(__name__)

# A window's place of the largest number is kept in 8 bits.
LARGEST_KERNEL = 11
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


def max_pool(x_BCHW: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """See `reference.max_pool`."""
    # What is exported, which is done on a CPU, is made of torch's own operations.
    if not x_BCHW.is_cuda:
        return reference.max_pool(x_BCHW, kernel, stride, padding)
    why = _why_not(x_BCHW.dtype, kernel)
    if not torch.compiler.is_compiling():
        _say(why)
    if why:
        return reference.max_pool(x_BCHW, kernel, stride, padding)
    # Only here: it is not installed where there is no GPU.
    from penstock.kernels.max_pool import triton

    return triton.max_pool(x_BCHW, kernel, stride, padding)


def _why_not(dtype: torch.dtype, kernel: int) -> str:
    if dtype not in PRECISIONS:
        return f"the kernel does not compute in {dtype}"
    if kernel > LARGEST_KERNEL:
        return f"a window of {kernel} x {kernel} is larger than the kernel's"
    return "" if find_spec("triton") is not None else "the package triton is not installed"


@cache
def _say(why: str) -> None:
    by = f"torch: {why}" if why else "Triton: one pass over memory, forward and backward"
    log.info("the largest numbers of windows are found by %s", by)
