"""The same in one pass over memory: of each unit seven numbers are read and one is written."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def gru_gates(input_BG: Tensor, recurrent_BG: Tensor, hidden_BH: Tensor, valid_B: Tensor) -> Tensor:
    """As the reference; computed in float32 and rounded once."""
    rows, hidden = hidden_BH.shape
    after_BH = torch.empty_like(hidden_BH, memory_format=torch.contiguous_format)
    assert recurrent_BG.stride() == (3 * hidden, 1), recurrent_BG.stride()
    assert input_BG.stride(1) == hidden_BH.stride(1) == 1, (input_BG.stride(), hidden_BH.stride())
    assert valid_B.stride() == (1,), valid_B.stride()
    _gates[(rows, triton.cdiv(hidden, BLOCK))](
        input_BG, recurrent_BG, hidden_BH, valid_B, after_BH, input_BG.stride(0), hidden_BH.stride(0), hidden, BLOCK
    )
    return after_BH


@triton.jit
def _gates(
    input_BG, recurrent_BG, hidden_BH, valid_B, after_BH, input_stride, hidden_stride, hidden, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < hidden
    before = tl.load(hidden_BH + row * hidden_stride + unit, inside)
    if tl.load(valid_B + row):
        x = input_BG + row * input_stride + unit
        h = recurrent_BG + row * 3 * hidden + unit
        reset = tl.sigmoid(tl.load(x, inside).to(tl.float32) + tl.load(h, inside).to(tl.float32))
        update = tl.sigmoid(tl.load(x + hidden, inside).to(tl.float32) + tl.load(h + hidden, inside).to(tl.float32))
        wanted = tl.load(x + 2 * hidden, inside).to(tl.float32)
        wanted += reset * tl.load(h + 2 * hidden, inside).to(tl.float32)
        # tanh by the logistic function, which Triton has everywhere.
        new = 2 * tl.sigmoid(2 * wanted) - 1
        after = new + update * (before.to(tl.float32) - new)
        tl.store(after_BH + row * hidden + unit, after.to(before.dtype), inside)
    else:
        tl.store(after_BH + row * hidden + unit, before, inside)
