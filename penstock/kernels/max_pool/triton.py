"""Triton kernels, channels last, in one pass forward and one backward.

The forward kernel stores the position of each window's maximum in 8 bits. The backward kernel sums, for every input,
the gradients of the windows whose maximum it is; it needs no atomic additions.
"""

import triton
import triton.language as tl
from torch import Tensor

# Elements of a program: some pixels with all their channels, or with a part of them.
BLOCK = 2048
MAX_CHANNELS = 128


def pool(x_BCHW: Tensor, out_BCHW: Tensor, place_BCHW: Tensor, kernel: int, stride: int, padding: int) -> None:
    """Compute the maxima and their positions within their windows; all channels last."""
    batch, channels, high, wide = out_BCHW.shape
    pixels = batch * high * wide
    part, block = _blocks(channels)
    _forward[(triton.cdiv(pixels, block), triton.cdiv(channels, part))](
        x_BCHW,
        out_BCHW,
        place_BCHW,
        pixels,
        channels,
        *x_BCHW.shape[2:],
        high,
        wide,
        kernel,
        stride,
        padding,
        block,
        part,
    )


def spread(grad_BCHW: Tensor, place_BCHW: Tensor, out_BCHW: Tensor, kernel: int, stride: int, padding: int) -> None:
    """Compute the gradient of the input; all channels last."""
    batch, channels, height, width = out_BCHW.shape
    pixels = batch * height * width
    part, block = _blocks(channels)
    _backward[(triton.cdiv(pixels, block), triton.cdiv(channels, part))](
        grad_BCHW, place_BCHW, out_BCHW, pixels, channels, height, width, *grad_BCHW.shape[2:], kernel, stride, padding,
        block, part,
    )  # fmt: skip


def _blocks(channels: int) -> tuple[int, int]:
    """Channels and pixels of a program."""
    part = min(triton.next_power_of_2(channels), MAX_CHANNELS)
    return part, BLOCK // part


@triton.jit
def _forward(
    x, out, place, pixels, channels, height, width, high, wide,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(1) * PART + tl.arange(0, PART)[None, :]
    row = pixel // wide
    left = (pixel - row * wide) * STRIDE - PADDING
    picture = row // high
    top = (row - picture * high) * STRIDE - PADDING
    inside = pixel < pixels
    best = tl.full((BLOCK, PART), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK, PART), tl.int8)
    for i in tl.static_range(KERNEL):
        for j in tl.static_range(KERNEL):
            h, w = top + i, left + j
            there = inside & (h >= 0) & (h < height) & (w >= 0) & (w < width)
            source = ((picture.to(tl.int64) * height + h) * width + w) * channels
            mask = there[:, None] & (channel < channels)
            value = tl.load(x + source[:, None] + channel, mask, float("-inf")).to(tl.float32)
            larger = (value > best) | (value != value)
            best = tl.where(larger, value, best)
            where = tl.where(larger, i * KERNEL + j, where).to(tl.int8)
    target = pixel.to(tl.int64)[:, None] * channels + channel
    mask = inside[:, None] & (channel < channels)
    tl.store(out + target, best.to(out.dtype.element_ty), mask)
    tl.store(place + target, where, mask)


@triton.jit
def _backward(
    grad, place, out, pixels, channels, height, width, high, wide,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(1) * PART + tl.arange(0, PART)[None, :]
    row = pixel // width
    w = pixel - row * width + PADDING
    picture = row // height
    h = row - picture * height + PADDING
    inside = pixel < pixels
    total = tl.zeros((BLOCK, PART), tl.float32)
    for a in tl.static_range((KERNEL + STRIDE - 1) // STRIDE):
        for b in tl.static_range((KERNEL + STRIDE - 1) // STRIDE):
            # The windows that contain this element, from the last one backwards, and its position in each.
            y, x = h // STRIDE - a, w // STRIDE - b
            i, j = h - y * STRIDE, w - x * STRIDE
            there = inside & (y >= 0) & (y < high) & (i < KERNEL) & (x >= 0) & (x < wide) & (j < KERNEL)
            source = (((picture.to(tl.int64) * high + y) * wide + x) * channels)[:, None] + channel
            mask = there[:, None] & (channel < channels)
            largest = tl.load(place + source, mask, -1) == (i * KERNEL + j)[:, None]
            total += tl.where(largest, tl.load(grad + source, mask, 0.0).to(tl.float32), 0.0)
    target = pixel.to(tl.int64)[:, None] * channels + channel
    tl.store(out + target, total.to(out.dtype.element_ty), inside[:, None] & (channel < channels))
