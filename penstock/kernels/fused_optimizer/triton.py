"""Triton kernels that update all weights in one launch and read and write each number once.

The kernels take a table of addresses instead of tensors, and the tensor and block of each program.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fused_optimizer.rules import Adam, Sgd
from penstock.kernels.pointer_table import BLOCK

WARPS = 4
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def sgd(
    rule: Sgd, table: Tensor, parts_P2: Tensor, gradient_type: torch.dtype, copy_type: torch.dtype, rate: Tensor
) -> None:
    """Update all weights.

    Args:
        rule: The update rule.
        table: int64, a row per weight: the addresses of gradient, weight and copy (0 for none), that of the momentum if
            there is one, and the number of elements.
        parts_P2: int32, the tensor and block of each program.
        gradient_type: Type of all gradients.
        copy_type: Type of all copies.
        rate: The learning rate.
    """
    _sgd[(len(parts_P2),)](
        table, parts_P2, rate, rule.momentum, rule.decay, table.shape[1] == 5, rule.nesterov, _TYPES[gradient_type],
        _TYPES[copy_type], BLOCK, num_warps=WARPS,
    )  # fmt: skip


def adam(
    rule: Adam, table: Tensor, parts_P2: Tensor, gradient_type: torch.dtype, copy_type: torch.dtype, rate: Tensor
) -> None:
    """Update all weights.

    Args:
        rule: The update rule.
        table: int64, a row per weight: the addresses of gradient, weight, copy (0 for none), mean, square and step, and
            the number of elements.
        parts_P2: See `sgd`.
        gradient_type: See `sgd`.
        copy_type: See `sgd`.
        rate: See `sgd`.
    """
    first, second = rule.betas
    # log(0) is replaced by a number whose exponential is 0.
    logs = [math.log(beta) if beta else -1e9 for beta in rule.betas]
    _adam[(len(parts_P2),)](
        table, parts_P2, rate, first, 1 - first, logs[0], second, 1 - second, logs[1], rule.eps, rule.decay,
        rule.decoupled, _TYPES[gradient_type], _TYPES[copy_type], BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _sgd(
    table, parts, rate, momentum, decay,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, GRADIENT: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    WIDTH: tl.constexpr = 5 if MOMENTUM else 4
    row = table + tl.load(parts + 2 * program) * WIDTH
    first = tl.load(parts + 2 * program + 1).to(tl.int64) * BLOCK
    gradients, weights, copies, copy_at = _common(row, first, GRADIENT, COPY)
    momenta = weights
    if MOMENTUM:
        momenta = _numbers(row + 3, first)
    left = tl.load(row + WIDTH - 1) - first
    by = tl.load(rate)
    if left >= BLOCK:
        # Without a mask the compiler uses full-width vector loads and stores.
        _sgd_part(
            gradients, weights, momenta, copies, copy_at, by, momentum, decay, left, MOMENTUM, NESTEROV, False, BLOCK
        )
    else:
        _sgd_part(
            gradients, weights, momenta, copies, copy_at, by, momentum, decay, left, MOMENTUM, NESTEROV, True, BLOCK
        )


@triton.jit
def _sgd_part(
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
    _write(weights, copies, copy_at, weight - rate * step, offset, mask)


@triton.jit
def _adam(
    table, parts, rate, beta1, rest1, log1, beta2, rest2, log2, eps, decay,
    DECOUPLED: tl.constexpr, GRADIENT: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = table + tl.load(parts + 2 * program) * 7
    first = tl.load(parts + 2 * program + 1).to(tl.int64) * BLOCK
    gradients, weights, copies, copy_at = _common(row, first, GRADIENT, COPY)
    means, squares = _numbers(row + 3, first), _numbers(row + 4, first)
    count = tl.load(tl.load(row + 5).to(tl.pointer_type(tl.float32)))
    # float64, because the difference of numbers near 1 loses digits.
    full1 = (1.0 - tl.exp((count * log1).to(tl.float64))).to(tl.float32)
    full2 = (1.0 - tl.exp((count * log2).to(tl.float64))).to(tl.float32)
    left = tl.load(row + 6) - first
    by = tl.load(rate)
    if left >= BLOCK:
        _adam_part(
            gradients, weights, means, squares, copies, copy_at, by, by / full1, tl.sqrt(full2), beta1, rest1, beta2,
            rest2, eps, decay, left, DECOUPLED, False, BLOCK,
        )  # fmt: skip
    else:
        _adam_part(
            gradients, weights, means, squares, copies, copy_at, by, by / full1, tl.sqrt(full2), beta1, rest1, beta2,
            rest2, eps, decay, left, DECOUPLED, True, BLOCK,
        )  # fmt: skip


@triton.jit
def _adam_part(
    gradients, weights, means, squares, copies, copy_at, rate, rate1, root2, beta1, rest1, beta2, rest2, eps, decay,
    left, DECOUPLED: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.arange(0, BLOCK)
    mask = None
    if ENDS:
        mask = offset < left
    weight = tl.load(weights + offset, mask)
    step = tl.load(gradients + offset, mask).to(tl.float32)
    if DECOUPLED:
        weight -= rate * decay * weight
    else:
        step += decay * weight
    mean = beta1 * tl.load(means + offset, mask) + rest1 * step
    square = beta2 * tl.load(squares + offset, mask) + rest2 * step * step
    tl.store(means + offset, mean, mask)
    tl.store(squares + offset, square, mask)
    moved = weight - rate1 * mean / (tl.sqrt(square) / root2 + eps)
    _write(weights, copies, copy_at, moved, offset, mask)


@triton.jit
def _common(row, first, GRADIENT: tl.constexpr, COPY: tl.constexpr):
    """Pointers to a program's gradients, weights and copies, and the copy's address (0 for none)."""
    gradients = tl.multiple_of(tl.load(row).to(tl.pointer_type(GRADIENT)), 16) + first
    copy_at = tl.load(row + 2)
    copies = tl.multiple_of(copy_at.to(tl.pointer_type(COPY)), 16) + first
    return gradients, _numbers(row + 1, first), copies, copy_at


@triton.jit
def _numbers(place, first):
    return tl.multiple_of(tl.load(place).to(tl.pointer_type(tl.float32)), 16) + first


@triton.jit
def _write(weights, copies, copy_at, weight, offset, mask):
    tl.store(weights + offset, weight, mask)
    if copy_at != 0:
        tl.store(copies + offset, weight.to(copies.dtype.element_ty), mask)
