"""Triton kernel: one launch, a program for every few thousand elements."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.pointer_table import BLOCK

WARPS = 4
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def copy_many(table_T3: Tensor, parts_P2: Tensor, source_type: torch.dtype, target_type: torch.dtype) -> None:
    """Copy each source into its target by one launch.

    Args:
        table_T3: int64, per tensor: the addresses of source and target, and the element count.
        parts_P2: int32, per program: the tensor and the block in it.
        source_type: Type of all sources.
        target_type: Type of all targets.
    """
    _copy[(len(parts_P2),)](
        table_T3, parts_P2, _TYPES[source_type], _TYPES[target_type], BLOCK, num_warps=WARPS
    )  # fmt: skip


@triton.jit
def _copy(table, parts, SOURCE: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = table + tl.load(parts + 2 * program) * 3
    first = tl.load(parts + 2 * program + 1).to(tl.int64) * BLOCK
    sources = tl.multiple_of(tl.load(row).to(tl.pointer_type(SOURCE)), 16) + first
    targets = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(TARGET)), 16) + first
    left = tl.load(row + 2) - first
    offset = tl.arange(0, BLOCK)
    if left >= BLOCK:
        # Without a mask whole vectors are read and written.
        tl.store(targets + offset, tl.load(sources + offset).to(TARGET))
    else:
        mask = offset < left
        tl.store(targets + offset, tl.load(sources + offset, mask).to(TARGET), mask)
