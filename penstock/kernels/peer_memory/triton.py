"""Triton kernels of the collectives: programs write to and read from the memory of other GPUs over NVLink.

Program b of every rank does the same part of the work and synchronizes with program b of the other ranks only: each
writes an increasing number into the others' flags and waits for theirs. All kernels of one table have the same number
of programs and alternate between two halves of the memory: a program that has synchronized in one launch knows that the
others have finished the launch before, whose half is then free.
"""

import triton
import triton.language as tl
from torch import Tensor

# Elements that a program moves at once over all ranks, and the maximum for one rank: small enough that programs of two
# launches fit on a multiprocessor. An all-reduce holds two of these.
TILE_BYTES, LONGEST = 1 << 15, 4096
WARPS = 16
# Alignment of a rank's part of a sum, for vectorized loads.
ALIGNED = 64

# R ranks, B programs


def all_gather(own: Tensor, whole_R: Tensor, table: Tensor, sequence_B: Tensor, rank: int) -> None:
    """All-gather `own` into `whole_R`, in the order of the ranks.

    Args:
        own: This rank's tensor, contiguous.
        whole_R: The output, contiguous.
        table: int64 `[3, R]`: for each rank the addresses of the halves of its memory, and of its flags.
        sequence_B: int32, twice the number of launches of each program.
        rank: This rank.
    """
    ranks, lanes, block = _sizes(own, table)
    _peer_gather[(len(sequence_B),)](
        own, whole_R, table, sequence_B, own.numel(), rank, ranks, lanes, block, num_warps=WARPS
    )  # fmt: skip


def reduce_scatter(parts_R: Tensor, own: Tensor, table: Tensor, sequence_B: Tensor, rank: int) -> None:
    """Reduce-scatter: sum the ranks' `parts_R[rank]` into `own`. Other arguments as of `all_gather`."""
    ranks, lanes, block = _sizes(own, table)
    _peer_scatter[(len(sequence_B),)](
        parts_R, own, table, sequence_B, own.numel(), rank, ranks, lanes, block, num_warps=WARPS
    )  # fmt: skip


def all_reduce(flat: Tensor, table: Tensor, sequence_B: Tensor, rank: int) -> None:
    """All-reduce `flat` in place. Other arguments as of `all_gather`."""
    ranks, lanes, block = _sizes(flat, table, TILE_BYTES // 2)
    part = part_of(flat.numel(), ranks)
    _peer_total[(len(sequence_B),)](
        flat, table, sequence_B, flat.numel(), part, rank, ranks, lanes, block, num_warps=WARPS
    )  # fmt: skip


def part_of(count: int, ranks: int) -> int:
    """Compute the number of elements that one rank sums for all."""
    return triton.cdiv(count, ranks * ALIGNED) * ALIGNED


def _sizes(tensor: Tensor, table: Tensor, tile_bytes: int = TILE_BYTES) -> tuple[int, int, int]:
    ranks = table.shape[1]
    lanes = triton.next_power_of_2(ranks)
    return ranks, lanes, min(LONGEST, tile_bytes // (lanes * tensor.element_size()))


@triton.jit
def _barrier(table, sequence_number, program, rank, RANKS: tl.constexpr, LANES: tl.constexpr):
    # All threads of the program must have written before the flags change.
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    there = tl.load(table + 2 * RANKS + lane, lane < RANKS, 0).to(tl.pointer_type(tl.int32)) + program * RANKS + rank
    tl.atomic_xchg(there, sequence_number, lane < RANKS, sem="release", scope="sys")
    here = tl.load(table + 2 * RANKS + rank).to(tl.pointer_type(tl.int32)) + program * RANKS + lane
    waits = True
    while waits:
        seen = tl.atomic_add(here, 0, lane < RANKS, sem="acquire", scope="sys")
        waits = tl.min(tl.where(lane < RANKS, seen - sequence_number, 0), 0) < 0
    tl.debug_barrier()


@triton.jit
def _own_half(table, sequence_number, rank, KIND: tl.constexpr, RANKS: tl.constexpr):
    address = tl.load(table + (sequence_number // 2 & 1) * RANKS + rank)
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 16)


@triton.jit
def _halves(table, sequence_number, KIND: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    addresses = tl.load(table + (sequence_number // 2 & 1) * RANKS + lane, lane < RANKS, 0)
    return tl.multiple_of(addresses.to(tl.pointer_type(KIND)), [16])


@triton.jit(do_not_specialize=["rank"])
def _peer_gather(
    own, whole, table, sequence_numbers, count, rank,
    RANKS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    KIND: tl.constexpr = own.dtype.element_ty
    program = tl.program_id(0)
    sequence_number = tl.load(sequence_numbers + program) + 2
    mine = _own_half(table, sequence_number, rank, KIND, RANKS)
    step = tl.num_programs(0) * BLOCK
    for first in range(program * BLOCK, count, step):
        offset = tl.multiple_of(first, BLOCK) + tl.arange(0, BLOCK)
        numbers = tl.load(own + offset, offset < count)
        tl.store(mine + offset, numbers, offset < count)
        tl.store(whole + rank.to(tl.int64) * count + offset, numbers, offset < count)
    _barrier(table, sequence_number, program, rank, RANKS, LANES)
    bases = _halves(table, sequence_number, KIND, RANKS, LANES)[:, None]
    lane = tl.arange(0, LANES)[:, None]
    others = (lane < RANKS) & (lane != rank)
    for first in range(program * BLOCK, count, step):
        offset = tl.multiple_of(first, BLOCK) + tl.arange(0, BLOCK)[None, :]
        mask = others & (offset < count)
        tl.store(whole + lane.to(tl.int64) * count + offset, tl.load(bases + offset, mask), mask)
    tl.store(sequence_numbers + program, sequence_number)


@triton.jit(do_not_specialize=["rank"])
def _peer_scatter(
    parts, own, table, sequence_numbers, count, rank,
    RANKS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    KIND: tl.constexpr = own.dtype.element_ty
    program = tl.program_id(0)
    sequence_number = tl.load(sequence_numbers + program) + 2
    bases = _halves(table, sequence_number, KIND, RANKS, LANES)[:, None]
    lane = tl.arange(0, LANES)[:, None]
    others = (lane < RANKS) & (lane != rank)
    step = tl.num_programs(0) * BLOCK
    mine = rank.to(tl.int64) * count
    for first in range(program * BLOCK, count, step):
        offset = tl.multiple_of(first, BLOCK) + tl.arange(0, BLOCK)[None, :]
        mask = others & (offset < count)
        tl.store(bases + mine + offset, tl.load(parts + lane.to(tl.int64) * count + offset, mask), mask)
    _barrier(table, sequence_number, program, rank, RANKS, LANES)
    come = _own_half(table, sequence_number, rank, KIND, RANKS)
    for first in range(program * BLOCK, count, step):
        offset = tl.multiple_of(first, BLOCK) + tl.arange(0, BLOCK)
        mask = others & (offset[None, :] < count)
        summed = tl.sum(tl.load(come + lane.to(tl.int64) * count + offset[None, :], mask, 0).to(tl.float32), 0)
        summed += tl.load(parts + mine + offset, offset < count, 0).to(tl.float32)
        tl.store(own + offset, summed.to(KIND), offset < count)
    tl.store(sequence_numbers + program, sequence_number)


@triton.jit(do_not_specialize=["rank"])
def _peer_total(
    flat, table, sequence_numbers, count, part, rank,
    RANKS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    KIND: tl.constexpr = flat.dtype.element_ty
    program = tl.program_id(0)
    sequence_number = tl.load(sequence_numbers + program) + 2
    bases = _halves(table, sequence_number, KIND, RANKS, LANES)[:, None]
    come = _own_half(table, sequence_number, rank, KIND, RANKS)
    lane = tl.arange(0, LANES)[:, None]
    others = (lane < RANKS) & (lane != rank)
    step = tl.num_programs(0) * BLOCK
    for first in range(program * BLOCK, part, step):
        offset = tl.multiple_of(first, BLOCK) + tl.arange(0, BLOCK)[None, :]
        mask = others & (offset < part) & (lane * part + offset < count)
        tl.store(bases + rank * part + offset, tl.load(flat + lane * part + offset, mask), mask)
    _barrier(table, sequence_number - 1, program, rank, RANKS, LANES)
    # Sums are stored behind the received data.
    behind = RANKS * part
    for first in range(program * BLOCK, part, step):
        offset = tl.multiple_of(first, BLOCK) + tl.arange(0, BLOCK)
        inside = (offset < part) & (rank * part + offset < count)
        came = tl.load(come + lane * part + offset[None, :], others & inside[None, :], 0)
        summed = tl.sum(came.to(tl.float32), 0) + tl.load(flat + rank * part + offset, inside, 0).to(tl.float32)
        summed = summed.to(KIND)
        tl.store(flat + rank * part + offset, summed, inside)
        tl.store(
            bases + behind + rank * part + offset[None, :],
            tl.broadcast_to(summed[None, :], LANES, BLOCK),
            others & inside[None, :],
        )
    _barrier(table, sequence_number, program, rank, RANKS, LANES)
    for first in range(program * BLOCK, part, step):
        offset = tl.multiple_of(first, BLOCK) + tl.arange(0, BLOCK)[None, :]
        mask = others & (offset < part) & (lane * part + offset < count)
        tl.store(flat + lane * part + offset, tl.load(come + behind + lane * part + offset, mask), mask)
    tl.store(sequence_numbers + program, sequence_number)
