"""Where the memory lies that GPUs of a host share, and what is done over it."""

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.kernels.addresses import ALIGNED_BYTES
from penstock.kernels.common import HAS_TRITON, PRECISIONS

# Blocks of a launch; fewer leave the links idle. They wait for each other, so that all must find room on the GPU at
# once, beside those of a second launch and of NCCL: two of them share a multiprocessor.
PROGRAMS, PER_MULTIPROCESSOR = 64, 0.5
LEAST_ROOM = 4 << 20
# What travels longer is not waiting for the start of it, and NCCL needs no second copy. Room once made is kept.
MOST_BYTES = 32 << 20

# As a profile of a step names them.
KERNELS = ("_peer_gather", "_peer_scatter", "_peer_total")

Wait = Callable[[], None]

# R ranks


def why_no_peer_memory(device: torch.device, processes: int) -> str | None:
    """Why so many processes of a host cannot share their GPUs' memory, or None if they can.

    Args:
        device: This one's.
        processes: Each has the GPU of its number.
    """
    if device.type != "cuda":
        return "they have no GPUs"
    if not HAS_TRITON:
        return "Triton is not installed"
    others = [other for other in range(processes) if other != device.index]
    if not all(torch.cuda.can_device_access_peer(device.index, other) for other in others):
        return "the GPUs do not reach each other's memory"
    return None


@final
class PeerMemory:
    """Memory on each of a host's GPUs that the others read and write, and collectives over it.

    A collective is one launch, in the current stream if it is waited for at once: NCCL's have a stream of their own,
    and what goes there and comes back waits twice. A sum is rounded once.

    All ranks call the same ones in the same order. They may be captured in CUDA graphs, whose replays count as calls.

    Args:
        group: The processes, all of one host.
        device: This one's.

    Raises:
        RuntimeError: The GPUs do not reach each other's memory after all.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._rank, self._size = group, device, group.rank(), group.size()
        self._kept: list[Any] = []
        programs = self._programs()
        self._flags: list[int] = self._shared(4 * programs * self._size)
        self._turns_B = torch.zeros(programs, dtype=torch.int32, device=device)
        self._table_3R, self._room = self._tables(LEAST_ROOM), LEAST_ROOM
        self._beside = torch.cuda.Stream(device, priority=-1)
        self._last: torch.cuda.Stream | None = None

    def gather(self, own: Tensor, whole_R: Tensor, *, beside: bool = False) -> Wait | None:
        """`[...]` of every rank into `[R, ...]`.

        Args:
            own: This rank's, contiguous.
            whole_R: Contiguous.
            beside: Whether this stream has other work until it waits.

        Returns:
            What lets the current stream wait for it; None where it has to go another way, on all ranks alike.
        """
        if not self._fits(own, own.nbytes):
            return None
        return self._launched(_kernels().gather, own, whole_R, beside=beside)

    def scatter(self, parts_R: Tensor, own: Tensor, *, beside: bool = False) -> Wait | None:
        """The sum over ranks of `[R, ...]`, this rank's part of it, into `[...]`. See `gather`."""
        if not self._fits(own, parts_R.nbytes):
            return None
        return self._launched(_kernels().scatter, parts_R, own, beside=beside)

    def total(self, flat: Tensor, *, beside: bool = False) -> Wait | None:
        """The sum over ranks, in its place. See `gather`."""
        part = _kernels().part_of(flat.numel(), self._size)
        if not self._fits(flat, 2 * self._size * part * flat.element_size()):
            return None
        return self._launched(_kernels().total, flat, beside=beside)

    def _programs(self) -> int:
        """As many as the smallest of the GPUs has room for."""
        count = torch.cuda.get_device_properties(self._device).multi_processor_count
        return self._least(min(PROGRAMS, int(count * PER_MULTIPROCESSOR)))

    def _launched(self, kernel: Callable[..., None], *tensors: Tensor, beside: bool) -> Wait:
        stream = torch.cuda.current_stream(self._device)
        if beside:
            self._beside.wait_stream(stream)
            stream = self._beside
        with torch.cuda.stream(stream):
            self._follow()
            kernel(*tensors, self._table_3R, self._turns_B, self._rank)
        if not beside:
            return lambda: None
        done = stream.record_event()

        # What it works on lives as long as this function does, which whoever waits has.
        def wait(_tensors: object = tensors) -> None:
            torch.cuda.current_stream(self._device).wait_event(done)

        return wait

    def _follow(self) -> None:
        """Let the current stream wait for the launch before, in whatever stream that was: they meet in their order."""
        current, last = torch.cuda.current_stream(self._device), self._last
        # No capture waits for what was before it, nor anything for a capture that is over.
        if last is not None and last != current and _is_captured(last) == _is_captured(current):
            current.wait_stream(last)
        self._last = current

    def _fits(self, part: Tensor, nbytes: int) -> bool:
        if nbytes > MOST_BYTES or part.dtype not in PRECISIONS or part.nbytes % ALIGNED_BYTES:
            return False
        if nbytes > self._room:
            if torch.cuda.is_current_stream_capturing():
                return False
            room = 1 << (nbytes - 1).bit_length()
            self._table_3R, self._room = self._tables(room), room
        return True

    def _tables(self, room: int) -> Tensor:
        halves = self._shared(2 * room)
        rows = [halves, [half + room for half in halves], self._flags]
        table_3R = torch.tensor(rows, dtype=torch.int64).to(self._device)
        self._kept.append(table_3R)
        return table_3R

    def _shared(self, nbytes: int) -> list[int]:
        """Where zeros lie in each rank's memory.

        Raises:
            RuntimeError: A rank has no room for them; all raise it.
        """
        # Only here: it is of no use without GPUs.
        import torch.distributed._symmetric_memory as symmetric_memory

        memory: Any = None
        failed = RuntimeError("another process has no memory left to share")
        try:
            memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self._device)
            memory.zero_()
        except RuntimeError as error:
            failed = error
        # Nobody waits for one that has none, and nobody writes before all are zero.
        if self._least(memory is not None) == 0:
            raise failed
        handle = symmetric_memory.rendezvous(memory, self._group)
        # What was captured in a graph goes on using what was there.
        self._kept += [memory, handle]
        self._least(True)
        return list(handle.buffer_ptrs)

    def _least(self, own: int) -> int:
        """The least number that a rank has; who knows it knows that all are as far as this."""
        least = torch.tensor(int(own), device=self._device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        return int(least)


def _kernels() -> Any:
    # Only here: Triton is not installed where there is no GPU.
    from penstock.kernels.peer_memory import triton

    return triton


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
