"""Persistent Triton kernels: one launch runs all frames forward, and one all frames backward.

The programs of a group share `ROWS` rows. Each has `UNITS` hidden units and keeps their part of the recurrent weight
in shared memory. In every frame the programs of a group exchange numbers through global memory, and each number says
itself that it is there: a program that reads loads its tile again until all 32-bit words were written. This saves the
fence and the counter of a barrier, two of three passes through the L2 cache. The programs wait for one another, so
the launch is cooperative: all of them are resident, or the launch fails.

Forward, the programs exchange the hidden states, in the output itself, which is filled with a pattern before. Backward,
each program multiplies the gradients of its own gates by their weights, which gives a part of the gradient of every
hidden state, and sends each part to the program of those units. A ring of two frames holds the parts; the lowest bit of
each word alternates, so that the ring is never cleared. Program A overwrites a part that program B has read, because
A has received B's part of the next frame, which B computed from it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gru_layer.operations import ROWS, UNITS

# B rows, T frames, H hidden units, G the three gates of all units, S what the backward pass needs of all units

# One group of warps, and no pipelining of loads by Triton: the kernels place them. A cooperative launch fails where not
# all programs are resident together.
LAUNCH = {"num_warps": 4, "num_stages": 1, "launch_cooperative_grid": True}


def forward(
    input_BTG: Tensor, weight_GH: Tensor, input_bias_G: Tensor, recurrent_bias_G: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the hidden states `[B, T, H]`, and what the backward pass needs, `[B, T, S]`.

    Args:
        input_BTG: Input part of the gates without its bias, contiguous, bf16 or fp16.
        weight_GH: Recurrent weight, contiguous, of the same dtype.
        input_bias_G: Bias of the input part, float32.
        recurrent_bias_G: Bias of the recurrent part, float32.
    """
    rows, frames, _ = input_BTG.shape
    hidden = weight_GH.shape[1]
    hidden_BTH = input_BTG.new_empty(rows, frames, hidden)
    # No number is stored as -1, a NaN.
    hidden_BTH.view(torch.int16).fill_(-1)
    saved_BTS = input_BTG.new_empty(rows, frames, 4 * hidden)
    _forward[(triton.cdiv(rows, ROWS) * (hidden // UNITS),)](
        input_BTG, weight_GH, input_bias_G, recurrent_bias_G, hidden_BTH.view(torch.uint16),
        hidden_BTH.view(torch.uint32), saved_BTS, rows, frames, hidden, ROWS, UNITS, **LAUNCH,
    )  # fmt: skip
    return hidden_BTH, saved_BTS


def backward(
    grad_BTH: Tensor, hidden_BTH: Tensor, saved_BTS: Tensor, weight_GH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the gates.

    Args:
        grad_BTH: Gradient of the hidden states, contiguous.
        hidden_BTH: Hidden states.
        saved_BTS: What the forward pass has kept.
        weight_GH: Recurrent weight, contiguous.

    Returns:
        The gradients `[B, T, G]` of the input parts and of the recurrent parts of the gates, the latter zero in the
        first frame; and those of the two biases, float32 `[2, G]`.
    """
    rows, frames, hidden = hidden_BTH.shape
    groups, programs = triton.cdiv(rows, ROWS), hidden // UNITS
    input_grad_BTG = hidden_BTH.new_empty(rows, frames, 3 * hidden)
    recurrent_grad_BTG = torch.empty_like(input_grad_BTG)
    # Two frames, groups, receiver, sender, rows, words of two units.
    ring = hidden_BTH.new_zeros((2, groups, programs, programs, ROWS, UNITS // 2), dtype=torch.int32)
    sums_NS = hidden_BTH.new_empty((groups, 4 * hidden), dtype=torch.float32)
    _backward[(groups * programs,)](
        grad_BTH, weight_GH, hidden_BTH, saved_BTS, input_grad_BTG, recurrent_grad_BTG, ring.view(torch.uint32),
        ring.view(torch.uint16), sums_NS, rows, frames, hidden, ROWS, UNITS, **LAUNCH,
    )  # fmt: skip
    reset, update, new, recurrent_new = sums_NS.sum(0).chunk(4)
    bias_grad_2G = torch.cat((reset, update, new, reset, update, recurrent_new)).view(2, 3 * hidden)
    return input_grad_BTG, recurrent_grad_BTG, bias_grad_2G


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _tanh(number, dtype: tl.constexpr):
    # The error of the approximation, 2^-11 of the number, is below the rounding of bf16, and not below that of fp16.
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [number], tl.float32, is_pure=True, pack=1)
    else:
        return 2 * tl.sigmoid(2 * number) - 1


@triton.jit
def _sigmoid(number, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        return 0.5 + 0.5 * _tanh(0.5 * number, dtype)
    else:
        return tl.sigmoid(number)


@triton.jit
def _hidden_received(words, expected, dtype: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr):
    """Load a hidden state of all units, once it was written; zeros where none is expected."""
    tile = tl.load(words, expected, 0, volatile=True)
    while tl.reduce(tile, None, _largest) == 0xFFFFFFFF:
        tile = tl.load(words, expected, 0, volatile=True)
    low = (tile & 0xFFFF).to(tl.uint16)
    high = (tile >> 16).to(tl.uint16)
    return tl.join(low, high).reshape(ROWS, HIDDEN).to(dtype, bitcast=True)


@triton.jit
def _forward(
    x, weight, input_bias, recurrent_bias, y, y_words, saved, rows, frames,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = weight.dtype.element_ty
    PROGRAMS: tl.constexpr = HIDDEN // UNITS
    unit = tl.program_id(0) % PROGRAMS * UNITS + tl.arange(0, UNITS)
    first = tl.program_id(0) // PROGRAMS * ROWS
    row = tl.arange(0, ROWS)
    inside = (row < rows - first)[:, None]
    # Rows after the last one repeat it, so that loads need no mask.
    row = tl.minimum(row, rows - first - 1)[:, None]
    weights = weight + unit[:, None] * HIDDEN + tl.arange(0, HIDDEN)[None, :]
    weight_r = tl.load(weights)
    weight_z = tl.load(weights + HIDDEN * HIDDEN)
    weight_n = tl.load(weights + 2 * HIDDEN * HIDDEN)
    bias_r = (tl.load(input_bias + unit) + tl.load(recurrent_bias + unit))[None, :]
    bias_z = (tl.load(input_bias + HIDDEN + unit) + tl.load(recurrent_bias + HIDDEN + unit))[None, :]
    bias_n = tl.load(input_bias + 2 * HIDDEN + unit)[None, :]
    bias_m = tl.load(recurrent_bias + 2 * HIDDEN + unit)[None, :]
    start = first.to(tl.int64) * frames
    x += start * 3 * HIDDEN
    y += start * HIDDEN
    y_words += start * (HIDDEN // 2)
    saved += start * 4 * HIDDEN
    own = row * frames * HIDDEN + unit[None, :]
    own_x = row * frames * 3 * HIDDEN + unit[None, :]
    own_saved = row * frames * 4 * HIDDEN + unit[None, :]
    every_word = row * frames * (HIDDEN // 2) + tl.arange(0, HIDDEN // 2)[None, :]
    hidden = tl.zeros((ROWS, UNITS), tl.float32)
    x_r = tl.load(x + own_x)
    x_z = tl.load(x + HIDDEN + own_x)
    x_n = tl.load(x + 2 * HIDDEN + own_x)
    for frame in range(frames):
        r = x_r.to(tl.float32) + bias_r
        z = x_z.to(tl.float32) + bias_z
        n = x_n.to(tl.float32) + bias_n
        before = tl.trans(_hidden_received(y_words - HIDDEN // 2 + every_word, frame > 0, dtype, ROWS, HIDDEN))
        x += 3 * HIDDEN
        more = frame + 1 < frames
        x_r = tl.load(x + own_x, more, 0.0)
        x_z = tl.load(x + HIDDEN + own_x, more, 0.0)
        x_n = tl.load(x + 2 * HIDDEN + own_x, more, 0.0)
        r += tl.trans(tl.dot(weight_r, before))
        z += tl.trans(tl.dot(weight_z, before))
        # The recurrent part of the new state, before the reset gate.
        m = tl.trans(tl.dot(weight_n, before)) + bias_m
        r = _sigmoid(r, dtype)
        z = _sigmoid(z, dtype)
        n = _tanh(n + r * m, dtype)
        hidden = n + z * (hidden - n)
        bits = hidden.to(dtype).to(tl.uint16, bitcast=True)
        # A NaN is stored as the positive one, because the other one means that nothing was written.
        tl.store(y + own, tl.where(bits == 0xFFFF, 0x7FFF, bits).to(tl.uint16), inside)
        tl.store(saved + own_saved, r.to(dtype), inside)
        tl.store(saved + HIDDEN + own_saved, z.to(dtype), inside)
        tl.store(saved + 2 * HIDDEN + own_saved, n.to(dtype), inside)
        tl.store(saved + 3 * HIDDEN + own_saved, m.to(dtype), inside)
        y += HIDDEN
        y_words += HIDDEN // 2
        saved += 4 * HIDDEN


@triton.jit
def _sum_received(words, expected, tag, dtype: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Sum the parts of all programs, once all have the tag; zeros where none are expected."""
    wrong = tl.where(expected, tag, 0).to(tl.uint32)
    tile = tl.load(words, expected, 0, volatile=True)
    while (tl.reduce(tile ^ wrong, None, _either) & 1) != 0:
        tile = tl.load(words, expected, 0, volatile=True)
    low = (tile & 0xFFFE).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    high = (tile >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return tl.join(tl.sum(low, 1), tl.sum(high, 1)).reshape(ROWS, UNITS)


@triton.jit
def _backward(
    grad, weight, y, saved, input_grad, recurrent_grad, ring_words, ring, sums, rows, frames,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = weight.dtype.element_ty
    PROGRAMS: tl.constexpr = HIDDEN // UNITS
    PART: tl.constexpr = ROWS * UNITS
    program = tl.program_id(0) % PROGRAMS
    group = tl.program_id(0) // PROGRAMS
    unit = program * UNITS + tl.arange(0, UNITS)
    every = tl.arange(0, HIDDEN)
    row = tl.arange(0, ROWS)
    inside = (row < rows - group * ROWS)[:, None]
    # Rows after the last one repeat it, so that loads need no mask.
    own_row = tl.minimum(row, rows - group * ROWS - 1)[:, None] * frames
    # From all units to the gates of these units.
    weights = weight + unit[:, None] * HIDDEN + every[None, :]
    weight_r = tl.trans(tl.load(weights))
    weight_z = tl.trans(tl.load(weights + HIDDEN * HIDDEN))
    weight_n = tl.trans(tl.load(weights + 2 * HIDDEN * HIDDEN))
    # The last frame of the group's first row.
    start = (group.to(tl.int64) * ROWS + 1) * frames - 1
    grad += start * HIDDEN
    y += start * HIDDEN
    saved += start * 4 * HIDDEN
    input_grad += start * 3 * HIDDEN
    recurrent_grad += start * 3 * HIDDEN
    own = own_row * HIDDEN + unit[None, :]
    own_gates = own_row * 3 * HIDDEN + unit[None, :]
    own_saved = own_row * 4 * HIDDEN + unit[None, :]
    slot = tl.num_programs(0) * PROGRAMS * PART
    ring_words += group * PROGRAMS * PROGRAMS * (PART // 2)
    ring += group * PROGRAMS * PROGRAMS * PART
    # Senders are the second dimension, so that Triton gives all of them to one thread, which sums them.
    received = (program * PROGRAMS + tl.arange(0, PROGRAMS)[None, :, None]) * (PART // 2)
    received += row[:, None, None] * (UNITS // 2) + tl.arange(0, UNITS // 2)[None, None, :]
    sent = (every // UNITS * PROGRAMS + program) * PART + every % UNITS
    sent = sent[None, :] + row[:, None] * UNITS
    tagged = (every % 2 == 0)[None, :]
    kept_bits = tl.where(every % 2 == 0, 0xFFFE, 0xFFFF).to(tl.uint16)[:, None]
    sum_r = tl.zeros((ROWS, UNITS), tl.float32)
    sum_z = tl.zeros((ROWS, UNITS), tl.float32)
    sum_n = tl.zeros((ROWS, UNITS), tl.float32)
    sum_m = tl.zeros((ROWS, UNITS), tl.float32)
    carried = tl.zeros((ROWS, UNITS), tl.float32)
    grad_h = tl.load(grad + own)
    r = tl.load(saved + own_saved)
    z = tl.load(saved + HIDDEN + own_saved)
    n = tl.load(saved + 2 * HIDDEN + own_saved)
    m = tl.load(saved + 3 * HIDDEN + own_saved)
    before = tl.load(y - HIDDEN + own, frames > 1, 0.0)
    for back in range(frames):
        reset = r.to(tl.float32)
        update = z.to(tl.float32)
        new = n.to(tl.float32)
        to_n = (1 - update) * (1 - new * new)
        to_r = m.to(tl.float32) * (1 - reset)
        to_z = (before.to(tl.float32) - new) * update * (1 - update)
        d_h = grad_h.to(tl.float32) + carried
        words = ring_words + (back + 1) % 2 * (slot // 2) + received
        d_h += _sum_received(words, back > 0, (back + 1) // 2 % 2, dtype, ROWS, UNITS)
        d_n = d_h * to_n
        d_m = d_n * reset
        d_r = d_m * to_r
        d_z = d_h * to_z
        carried = d_h * update
        gate_r = d_r.to(dtype)
        gate_z = d_z.to(dtype)
        gate_m = d_m.to(dtype)
        parts = tl.dot(weight_r, tl.trans(gate_r))
        parts = tl.dot(weight_z, tl.trans(gate_z), parts)
        parts = tl.dot(weight_n, tl.trans(gate_m), parts)
        bits = tl.trans(parts.to(dtype).to(tl.uint16, bitcast=True) & kept_bits)
        tag = tl.where(tagged, (back // 2 + 1) % 2, 0).to(tl.uint16)
        tl.store(ring + back % 2 * slot + sent, bits | tag)
        # The first frame has no hidden state before it: its part of the weights' gradient is zero.
        last = back + 1 == frames
        tl.store(recurrent_grad + own_gates, tl.where(last, 0.0, gate_r), inside)
        tl.store(recurrent_grad + HIDDEN + own_gates, tl.where(last, 0.0, gate_z), inside)
        tl.store(recurrent_grad + 2 * HIDDEN + own_gates, tl.where(last, 0.0, gate_m), inside)
        tl.store(input_grad + own_gates, gate_r, inside)
        tl.store(input_grad + HIDDEN + own_gates, gate_z, inside)
        tl.store(input_grad + 2 * HIDDEN + own_gates, d_n.to(dtype), inside)
        input_grad -= 3 * HIDDEN
        recurrent_grad -= 3 * HIDDEN
        sum_r += d_r
        sum_z += d_z
        sum_n += d_n
        sum_m += d_m
        grad -= HIDDEN
        y -= HIDDEN
        saved -= 4 * HIDDEN
        more = back + 1 < frames
        grad_h = tl.load(grad + own, more, 0.0)
        r = tl.load(saved + own_saved, more, 0.0)
        z = tl.load(saved + HIDDEN + own_saved, more, 0.0)
        n = tl.load(saved + 2 * HIDDEN + own_saved, more, 0.0)
        m = tl.load(saved + 3 * HIDDEN + own_saved, more, 0.0)
        before = tl.load(y - HIDDEN + own, back + 2 < frames, 0.0)
    target = sums + group * 4 * HIDDEN + unit
    tl.store(target, tl.sum(tl.where(inside, sum_r, 0.0), 0))
    tl.store(target + HIDDEN, tl.sum(tl.where(inside, sum_z, 0.0), 0))
    tl.store(target + 2 * HIDDEN, tl.sum(tl.where(inside, sum_n, 0.0), 0))
    tl.store(target + 3 * HIDDEN, tl.sum(tl.where(inside, sum_m, 0.0), 0))
