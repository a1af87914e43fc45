"""The same over the bus: the GPU reads and writes the host's page-locked memory itself.

The host then neither gathers rows nor copies them, and a CUDA graph that was captured once serves whatever rows its
numbers name.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Words a program moves: one program a row leaves the bus idle where rows are long, and many small ones are slow too.
BLOCK = 1024
# Programs that stage rows: enough to keep the bus busy, few enough to leave the processors to what runs meanwhile.
STAGING = 32


def gather_rows(table_ER: Tensor, row_B: Tensor, staged_SR: Tensor | None = None) -> Tensor:
    """As the reference; the table's memory is page-locked."""
    out_BR = torch.empty(row_B.shape[0], table_ER.shape[1], dtype=table_ER.dtype, device=row_B.device)
    source, target = _words(table_ER), _words(out_BR)
    words = source.shape[1]
    grid = (row_B.shape[0], triton.cdiv(words, BLOCK))
    if staged_SR is None:
        _gather[grid](source, row_B, target, words, BLOCK)
    else:
        _gather_both[grid](source, _words(staged_SR), row_B, target, words, BLOCK)
    return out_BR


def stage_rows(table_ER: Tensor, row_B: Tensor, out_BR: Tensor) -> None:
    """As the reference; the table's memory is page-locked."""
    source, target = _words(table_ER), _words(out_BR)
    words = source.shape[1]
    tiles = triton.cdiv(words, BLOCK)
    _stage[(STAGING,)](source, row_B, target, words, row_B.shape[0] * tiles, tiles, STAGING, BLOCK)


def scatter_rows(values_BR: Tensor, row_B: Tensor, table_ER: Tensor) -> None:
    """As the reference; the table's memory is page-locked. The host sees the rows once the stream is through."""
    source, target = _words(values_BR), _words(table_ER)
    words = source.shape[1]
    _scatter[(row_B.shape[0], triton.cdiv(words, BLOCK))](source, row_B, target, words, BLOCK)


def _words(rows: Tensor) -> Tensor:
    """The widest whole numbers of which rows are made."""
    assert rows.is_contiguous(), rows.stride()
    nbytes = rows.shape[1] * rows.element_size()
    kind = next(kind for kind in (torch.int64, torch.int32, torch.int16, torch.int8) if nbytes % kind.itemsize == 0)
    return rows.view(kind)


@triton.jit
def _gather(table, row_B, out, words, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_B + index)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    tl.store(out + index * words + word, tl.load(table + row * words + word, inside), inside)


@triton.jit
def _gather_both(table, staged, row_B, out, words, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_B + index)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    if row >= 0:
        tl.store(out + index * words + word, tl.load(table + row * words + word, inside), inside)
    else:
        tl.store(out + index * words + word, tl.load(staged + (-1 - row) * words + word, inside), inside)


# One kernel for batches of all sizes, which is compiled before it serves.
@triton.jit(do_not_specialize=["count", "tiles"])
def _stage(table, row_B, out, words, count, tiles, STAGING: tl.constexpr, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), count, STAGING):
        index = (tile // tiles).to(tl.int64)
        row = tl.load(row_B + index)
        word = tile % tiles * BLOCK + tl.arange(0, BLOCK)
        inside = word < words
        tl.store(out + index * words + word, tl.load(table + row * words + word, inside), inside)


@triton.jit
def _scatter(values, row_B, table, words, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_B + index)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (word < words) & (row >= 0)
    tl.store(table + row * words + word, tl.load(values + index * words + word, inside), inside)
