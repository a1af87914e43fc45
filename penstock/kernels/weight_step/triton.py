"""The same by one launch for all weights: each number is read and written once.

The kernel is given a table of addresses instead of tensors, and a list of which part of which tensor each program has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers a program steps.
BLOCK = 2048
WARPS = 4
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def sgd(
    table_T5: Tensor,
    parts_P2: Tensor,
    gradient_type: torch.dtype,
    copy_type: torch.dtype,
    rate: Tensor,
    *,
    momentum: float,
    decay: float,
    nesterov: bool,
) -> None:
    """Step all weights.

    Args:
        table_T5: int64, of each tensor the addresses of gradient, weight, momentum and copy (0 for none), and how many
            numbers it has.
        parts_P2: int32, of each program the tensor and the part of it.
        gradient_type: Of all gradients.
        copy_type: Of all copies.
        rate: The learning rate.
        momentum: 0 for none; then there are no momenta.
        decay: See `reference.sgd`.
        nesterov: See there.
    """
    _sgd[(len(parts_P2),)](
        table_T5, parts_P2, rate, momentum, decay, momentum != 0.0, nesterov, _TYPES[gradient_type], _TYPES[copy_type],
        BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _sgd(
    table, parts, rate, momentum, decay,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, GRADIENT: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = table + tl.load(parts + 2 * program) * 5
    first = tl.load(parts + 2 * program + 1).to(tl.int64) * BLOCK
    gradients = tl.multiple_of(tl.load(row).to(tl.pointer_type(GRADIENT)), 16)
    weights = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16)
    momenta = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16)
    copy_at = tl.load(row + 3)
    copies = tl.multiple_of(copy_at.to(tl.pointer_type(COPY)), 16)
    left = tl.load(row + 4) - first
    by = tl.load(rate)
    if left >= BLOCK:
        # Without a mask whole vectors are read and written.
        _part(
            gradients + first, weights + first, momenta + first, copies + first, copy_at, by, momentum, decay, 0,
            MOMENTUM, NESTEROV, False, BLOCK,
        )  # fmt: skip
    else:
        _part(
            gradients + first, weights + first, momenta + first, copies + first, copy_at, by, momentum, decay, left,
            MOMENTUM, NESTEROV, True, BLOCK,
        )  # fmt: skip


@triton.jit
def _part(
    gradients, weights, momenta, copies, copy_at, rate, momentum, decay, left,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.arange(0, BLOCK)
    mask = None
    if ENDS:
        mask = offset < left
    weight = tl.load(weights + offset, mask)
    step = tl.load(gradients + offset, mask).to(tl.float32) + decay * weight
    if MOMENTUM:
        moved = momentum * tl.load(momenta + offset, mask) + step
        tl.store(momenta + offset, moved, mask)
        step = step + momentum * moved if NESTEROV else moved
    weight -= rate * step
    tl.store(weights + offset, weight, mask)
    if copy_at != 0:
        tl.store(copies + offset, weight.to(copies.dtype.element_ty), mask)
