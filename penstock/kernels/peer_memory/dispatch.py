"""Peer memory of the GPUs of one host, and collectives over it."""

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.kernels.common import HAS_TRITON, PRECISIONS
from penstock.kernels.pointer_table import ALIGNED_BYTES

# Programs of a launch; fewer leave the links idle. They wait for each other, so all must be resident at once, together
# with those of a second launch and of NCCL: two of them share a multiprocessor.
PROGRAMS, PER_MULTIPROCESSOR = 64, 0.5
MIN_ROOM = 4 << 20
# For larger tensors latency does not matter, and NCCL needs no second copy. Allocated buffers are kept.
MAX_BYTES = 32 << 20

# The kernels' names in a profile.
KERNELS = ("_peer_gather", "_peer_scatter", "_peer_total")

Wait = Callable[[], None]

# R ranks


def why_no_peer_memory(device: torch.device, processes: int) -> str | None:
    """Explain why the GPUs of a host cannot share memory; None if they can.

    Args:
        device: The device of this process.
        processes: The number of processes; each uses the GPU of its local rank.
    """
    if device.type != "cuda":
        return "they have no GPUs"
    if not HAS_TRITON:
        return "Triton is not installed"
    if torch.cuda.device_count() < processes:
        return "each process sees its own GPU alone"
    others = [other for other in range(processes) if other != device.index]
    if not all(torch.cuda.can_device_access_peer(device.index, other) for other in others):
        return "the GPUs do not reach each other's memory"
    return None


@final
class PeerMemory:
    """Memory on each GPU of a host that the others read and write, and collectives over it.

    A collective is one kernel launch. Without overlap it runs in the current stream; NCCL's run in a second stream and
    pay for two stream synchronizations. A sum is rounded once.

    All ranks call the same collectives in the same order. They may be captured in CUDA graphs, whose replays count as
    calls.

    Args:
        group: The processes, all on one host.
        device: The device of this process.

    Raises:
        RuntimeError: The GPUs cannot access each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._rank, self._size = group, device, group.rank(), group.size()
        self._kept: list[Any] = []
        programs = self._programs()
        self._flags: list[int] = self._shared(4 * programs * self._size)
        self._sequence_B = torch.zeros(programs, dtype=torch.int32, device=device)
        self._table_3R, self._room = self._tables(MIN_ROOM), MIN_ROOM
        self._overlap_stream = torch.cuda.Stream(device, priority=-1)
        self._last: torch.cuda.Stream | None = None

    def all_gather(self, own: Tensor, whole_R: Tensor, *, overlapped: bool = False) -> Wait | None:
        """All-gather `[...]` of every rank into `[R, ...]`.

        Args:
            own: This rank's tensor, contiguous.
            whole_R: The output, contiguous.
            overlapped: True if the current stream has other work before the wait.

        Returns:
            A function that lets the current stream wait; None, on all ranks alike, if NCCL must be used.
        """
        if not self._fits(own, own.nbytes):
            return None
        return self._launched(_kernels().all_gather, own, whole_R, overlapped=overlapped)

    def reduce_scatter(self, parts_R: Tensor, own: Tensor, *, overlapped: bool = False) -> Wait | None:
        """Reduce-scatter `[R, ...]` into this rank's `[...]`. Other arguments as of `all_gather`."""
        if not self._fits(own, parts_R.nbytes):
            return None
        return self._launched(_kernels().reduce_scatter, parts_R, own, overlapped=overlapped)

    def all_reduce(self, flat: Tensor, *, overlapped: bool = False) -> Wait | None:
        """All-reduce in place. Other arguments as of `all_gather`."""
        part = _kernels().part_of(flat.numel(), self._size)
        if not self._fits(flat, 2 * self._size * part * flat.element_size()):
            return None
        return self._launched(_kernels().all_reduce, flat, overlapped=overlapped)

    def _programs(self) -> int:
        """Choose the number of programs that fits on every GPU."""
        count = torch.cuda.get_device_properties(self._device).multi_processor_count
        return self._least(min(PROGRAMS, int(count * PER_MULTIPROCESSOR)))

    def _launched(self, kernel: Callable[..., None], *tensors: Tensor, overlapped: bool) -> Wait:
        stream = torch.cuda.current_stream(self._device)
        if overlapped:
            self._overlap_stream.wait_stream(stream)
            stream = self._overlap_stream
        with torch.cuda.stream(stream):
            self._follow()
            kernel(*tensors, self._table_3R, self._sequence_B, self._rank)
        if not overlapped:
            return lambda: None
        done = stream.record_event()

        # The default argument keeps the tensors alive until the wait.
        def wait(_tensors: object = tensors) -> None:
            torch.cuda.current_stream(self._device).wait_event(done)

        return wait

    def _follow(self) -> None:
        """Let the current stream wait for the previous launch, so that launches run in order on all ranks."""
        current, last = torch.cuda.current_stream(self._device), self._last
        # A capture cannot wait for work before it, nor later work for a finished capture.
        if last is not None and last != current and _is_captured(last) == _is_captured(current):
            current.wait_stream(last)
        self._last = current

    def _fits(self, part: Tensor, nbytes: int) -> bool:
        if nbytes > MAX_BYTES or part.dtype not in PRECISIONS or part.nbytes % ALIGNED_BYTES:
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
        """Allocate zeroed shared memory on each rank; return its addresses.

        Raises:
            RuntimeError: A rank is out of memory; all raise it.
        """
        # Imported here, because it is useless without GPUs.
        import torch.distributed._symmetric_memory as symmetric_memory

        memory: Any = None
        failed = RuntimeError("another process has no memory left to share")
        try:
            memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self._device)
            memory.zero_()
        except RuntimeError as error:
            failed = error
        # All fail together, and no rank writes before all memory is zeroed.
        if self._least(memory is not None) == 0:
            raise failed
        handle = symmetric_memory.rendezvous(memory, self._group)
        # Captured graphs keep using earlier buffers.
        self._kept += [memory, handle]
        self._least(True)
        return list(handle.buffer_ptrs)

    def _least(self, own: int) -> int:
        """Compute the minimum over the ranks; also a barrier."""
        least = torch.tensor(int(own), device=self._device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        return int(least)


def _kernels() -> Any:
    # Imported here, because Triton is not installed on machines without a GPU.
    from penstock.kernels.peer_memory import triton

    return triton


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
