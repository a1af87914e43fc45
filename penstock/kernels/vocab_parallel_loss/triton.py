"""Triton kernels: one pass over the logits forward, one pass backward that reads them and writes their gradient.

Rows are few and long, so several programs share a row. Forward, each writes the sums of its part, relative to the
part's own largest logit (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"); a second, small
kernel combines the parts of a row. Loads are vectorized where the number of classes is a multiple of 16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# N rows, C classes of this process, P parts of a row

# Elements of a program and of a warp: enough loads in flight, and several programs for each multiprocessor.
BLOCK = 8192
OF_WARP = 1024
# The lowest finite number stands for -inf, because -inf - -inf is NaN.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def class_sums(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """As the reference, of labels; computed in float32."""
    logits_NC, labels_N = logits_NC.contiguous(), labels_N.contiguous()
    rows, classes = logits_NC.shape
    block, parts, warps = _cut(classes)
    parts_N3P = torch.empty((rows, 3, parts), dtype=torch.float32, device=logits_NC.device)
    sums_5N = parts_N3P.new_empty((5, rows))
    _parts[(rows * parts,)](logits_NC, parts_N3P, classes, parts, block, num_warps=warps)
    most_parts = triton.next_power_of_2(parts)
    _whole[(rows,)](logits_NC, labels_N, parts_N3P, sums_5N, rows, classes, parts, block, most_parts, num_warps=1)
    return sums_5N


def class_gradient(
    logits_NC: Tensor,
    labels_N: Tensor,
    max_logit_N: Tensor,
    softmax_scale_N: Tensor,
    scale: Tensor,
    smoothing_per_class: float,
    target_weight: float,
) -> Tensor:
    """As the reference, of labels; computed in float32."""
    logits_NC, labels_N = logits_NC.contiguous(), labels_N.contiguous()
    max_logit_N, softmax_scale_N = max_logit_N.contiguous(), softmax_scale_N.contiguous()
    rows, classes = logits_NC.shape
    block, parts, warps = _cut(classes)
    grad_NC = torch.empty_like(logits_NC)
    _gradient[(rows * parts,)](
        logits_NC, labels_N, max_logit_N, softmax_scale_N, scale, grad_NC, classes, parts, smoothing_per_class,
        target_weight, block, num_warps=warps,
    )  # fmt: skip
    return grad_NC


def _cut(classes: int) -> tuple[int, int, int]:
    """Choose the elements of a part, the parts of a row, and the warps of a program."""
    block = min(triton.next_power_of_2(classes), BLOCK)
    return block, triton.cdiv(classes, block), max(1, block // OF_WARP)


@triton.jit
def _parts(logits, parts_N3P, classes, parts, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    part = program % parts
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < classes
    logit = tl.load(logits + row * classes + column, inside, float("-inf")).to(tl.float32)
    most = tl.maximum(tl.max(logit), LOWEST)
    score = logit - most
    target = parts_N3P + row * 3 * parts + part
    tl.store(target, most)
    tl.store(target + parts, tl.sum(tl.exp(score)))
    tl.store(target + 2 * parts, tl.sum(tl.where(inside, score, 0.0)))


@triton.jit
def _whole(
    logits, labels_N, parts_N3P, sums_5N, rows, classes, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    inside = part < parts
    source = parts_N3P + row * 3 * parts + part
    most_P = tl.load(source, inside, LOWEST)
    most = tl.max(most_P)
    below_P = most_P - most
    exponents_P = tl.load(source + parts, inside, 0.0) * tl.exp(below_P)
    count_P = tl.minimum(classes - part * BLOCK, BLOCK)
    scores_P = tl.load(source + 2 * parts, inside, 0.0) + count_P * below_P
    label = tl.load(labels_N + row)
    mine = (label >= 0) & (label < classes)
    target_score = tl.load(logits + row * classes + label, mine, 0.0).to(tl.float32) - most
    tl.store(sums_5N + row, most)
    tl.store(sums_5N + rows + row, tl.sum(exponents_P))
    tl.store(sums_5N + 2 * rows + row, tl.where(mine, target_score, 0.0))
    tl.store(sums_5N + 3 * rows + row, tl.sum(tl.where(inside, scores_P, 0.0)))
    tl.store(sums_5N + 4 * rows + row, mine.to(tl.float32))


@triton.jit
def _gradient(
    logits, labels_N, max_logit_N, softmax_scale_N, scale, grad_NC, classes, parts, smoothing_per_class, target_weight,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    column = (program % parts) * BLOCK + tl.arange(0, BLOCK)
    inside = column < classes
    # Compared in 64 bits: a truncated label could become a valid class.
    label = tl.load(labels_N + row)
    label = tl.where((label >= 0) & (label < classes), label, -1).to(tl.int32)
    logit = tl.load(logits + row * classes + column, inside, float("-inf")).to(tl.float32)
    probability = tl.exp(logit - tl.load(max_logit_N + row)) * tl.load(softmax_scale_N + row)
    grad = (probability - smoothing_per_class - tl.where(column == label, target_weight, 0.0)) * tl.load(scale)
    tl.store(grad_NC + row * classes + column, grad.to(grad_NC.dtype.element_ty), inside)
