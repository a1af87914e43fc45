"""The processes that train one network together: rank, device, process groups, and collectives of the host.

A world of one process has no process group and its collectives return their input, so one definition of the step serves
any number of processes.
"""

import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, final
from weakref import WeakMethod

import torch
import torch.distributed as dist

# Its functions take the group of all processes as a default when it is imported. torch imports it while it compiles:
# after the group was made, the defaults would keep that to the end of the process.
import torch.distributed.nn.functional  # pyright: ignore[reportUnusedImport]
from torch import Tensor

from penstock.core.errors import PeersLost, TrainError
from penstock.kernels.peer_memory import PeerMemory, why_no_peer_memory
from penstock.train.parallel.rank_assignment import RankAssignment

T = TypeVar("T")

TIMEOUT_S = 600.0
POLL_S = 1.0
# Source position that gloo puts before an error.
_SOURCE_POSITION = re.compile(r"^\[\S+:\d+\] ")
_CONNECTION_WORDS = ("gloo", "connection", "timed out", "timeout", "socket", "broken pipe")


@final
@dataclass(eq=False)
class World:
    """The processes that train together.

    Args:
        rank: The rank of this process.
        size: The number of processes.
        device: The device of this process; the CPU by default.
        group: The process group; None for a single process.
        timeout_s: The limit of a wait for other processes.
        local_size: The number of processes on this machine.
        gradient_group: The process group of gradient buckets, by default the same. On GPUs it has a stream of its own,
            so that no layer's collective queues behind them.

    Attributes:
        peer_memory: Peer memory for the layers' collectives, where the GPUs of one host share theirs; see
            `share_memory`.
        gradient_peer_memory: Peer memory for small gradient buckets.
        activity: The current activity of this process, for the message if it hangs.
        progress_at_s: The last time of progress, by the monotonic clock.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None
    timeout_s: float = TIMEOUT_S
    local_size: int = 1
    gradient_group: dist.ProcessGroup | None = None
    peer_memory: PeerMemory | None = field(default=None, init=False)
    gradient_peer_memory: PeerMemory | None = field(default=None, init=False)
    _peer_memories: tuple[PeerMemory, PeerMemory] | None = field(default=None, init=False)
    _leave_callbacks: list[WeakMethod[Callable[[], None]]] = field(default_factory=list, init=False)
    activity: str = field(default="starting", init=False)
    progress_at_s: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        assert (self.size == 1) == (self.group is None), (self.size, self.group)
        self.gradient_group = self.gradient_group or self.group

    @property
    def is_rank_zero(self) -> bool:
        """True for the process that writes files."""
        return self.rank == 0

    @property
    def label(self) -> str:
        """`rank 0 of 4`."""
        return f"rank {self.rank} of {self.size}"

    def describe(self) -> str:
        """Describe the devices for people."""
        one = "the CPU"
        if self.device.type == "cuda":
            one = torch.cuda.get_device_name(self.device)
        return one if self.size == 1 else f"{self.size} processes, each on {one}"

    def share_memory(self, wanted: bool = True) -> str | None:
        """Turn collectives over peer memory on or off; a collective call.

        Returns:
            The reason why they are off, or None.
        """
        self.peer_memory = self.gradient_peer_memory = None
        if not wanted:
            return "the recipe has peer_memory=False"
        if self._peer_memories is None:
            several = self.local_size != self.size
            why = "the GPUs are on several hosts" if several else why_no_peer_memory(self.device, self.size)
            if any(self.sum_on_host(why is not None)):
                return why or "another process cannot"
            assert self.group is not None
            assert self.gradient_group is not None
            try:
                memories = PeerMemory(self.group, self.device), PeerMemory(self.gradient_group, self.device)
            except RuntimeError as error:
                memories, why = None, " ".join(str(error).split())[:200]
            if any(self.sum_on_host(memories is None)):
                return why or "another process cannot"
            self._peer_memories = memories
        assert self._peer_memories is not None
        self.peer_memory, self.gradient_peer_memory = self._peer_memories
        return None

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Call a bound method, held weakly, before the process groups are destroyed."""
        self._leave_callbacks.append(WeakMethod(callback))

    def leave(self) -> None:
        """Run the callbacks of `on_leave`: NCCL cannot shut down while a CUDA graph holds a captured collective."""
        for reference in self._leave_callbacks:
            callback = reference()
            if callback is not None:
                callback()
        self._leave_callbacks.clear()
        # Graphs that other code captured.
        gc.collect()

    def forget_groups(self) -> None:
        """Drop the references to the process groups; no collective can follow."""
        self.group = self.gradient_group = None
        self.peer_memory = self.gradient_peer_memory = self._peer_memories = None

    def mark_progress(self) -> None:
        """Tell the watchdog that this process does not hang."""
        self.progress_at_s = time.monotonic()

    @contextmanager
    def operation(self, name: str) -> Generator[None]:
        """Name a wait for other processes; a failure in it names the rank and the operation.

        Raises:
            PeersLost: Another process ended, or did not arrive within the timeout.
            RuntimeError: Any other failure, of this process's GPU for example, as it was raised.
        """
        before, self.activity = self.activity, name
        try:
            yield
        except RuntimeError as error:
            if not _is_connection_error(error):
                raise
            said = _SOURCE_POSITION.sub("", " ".join(str(error).split()))[:200]
            raise PeersLost(
                f"{self.label} waited in {name} for the other processes, which did not arrive ({said}); see their logs."
            ) from error
        self.activity = before
        self.mark_progress()

    def sum_on_host(self, *values: Tensor | float) -> list[float]:
        """Sum numbers over all processes and return them on the host: a host synchronization."""
        parts = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        # Stacked, so that the host reads the device once.
        return self.all_reduce(torch.stack(parts), "the sum of the losses").tolist()

    def all_reduce(self, own: Tensor, name: str) -> Tensor:
        """Sum a tensor over all processes in place, without a host synchronization on a GPU."""
        if self.size > 1:
            with self.operation(name):
                dist.all_reduce(own, group=self.group)
        return own

    def broadcast_on_host(self, values: Sequence[float]) -> list[float]:
        """Return rank 0's numbers in every process."""
        return self.sum_on_host(*(value if self.is_rank_zero else 0.0 for value in values))

    def all_gather_objects(self, own: T) -> list[T]:
        """Gather a record from each rank."""
        if self.group is None:
            return [own]
        found: list[Any] = [None] * self.size
        with self.operation("the all-gather of records"):
            dist.all_gather_object(found, own, group=self.group)
        return found

    def sum_counts(self, own: Mapping[str, int]) -> dict[str, int]:
        """Sum counts by name over all processes."""
        return dict(sum(self.all_gather_objects(Counter(own)), Counter[str]()))

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], what: str) -> None:
        """Copy rank 0's values into the tensors of every process."""
        if self.group is None:
            return
        with self.operation(f"the broadcast of {what}"):
            for tensor in tensors:
                whole = tensor.contiguous()
                dist.broadcast(whole, src=0, group=self.group)
                tensor.copy_(whole)


def _is_connection_error(error: RuntimeError) -> bool:
    # Errors of this process's own GPU surface in a collective too, where the host waits for it.
    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
        return False
    # Gloo raises a plain RuntimeError.
    said = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in said for word in _CONNECTION_WORDS)


def split_rows(count: int, parts: int) -> tuple[int, ...]:
    """Split rows over processes as evenly as possible; the first ones get one more."""
    return tuple(count // parts + (part < count % parts) for part in range(parts))


def device_of(assignment: RankAssignment | None, *, cuda: bool, wanted: int = 1) -> torch.device:
    """Choose the device of a process.

    Args:
        assignment: The rank of the process; None for a single process.
        cuda: True for a GPU.
        wanted: The number of GPUs that all processes of this machine need.

    Raises:
        TrainError: This machine has fewer GPUs.
    """
    if not cuda:
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if assignment is not None and assignment.has_own_gpu and there == 1:
        return torch.device("cuda", 0)
    if wanted > there:
        raise TrainError(f"{wanted} GPUs are requested and torch sees {there}; request fewer, or make them visible.")
    return torch.device("cuda", assignment.local_rank if assignment else 0)


@contextmanager
def join_world(
    assignment: RankAssignment | None, device: torch.device, timeout_s: float = TIMEOUT_S
) -> Generator[World]:
    """Join the process groups, and leave them at the end.

    Args:
        assignment: The rank of this process; None for a single process.
        device: The device; NCCL connects GPUs, gloo CPUs.
        timeout_s: The limit of a wait for other processes, at the start and in each collective.

    Raises:
        PeersLost: The other processes did not arrive.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if assignment is None or assignment.size == 1:
        yield World(device=device, timeout_s=timeout_s)
        return
    group_timeout_s = longest_timeout_s(timeout_s) if device.type == "cuda" else timeout_s
    timeout = timedelta(seconds=group_timeout_s)
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{assignment.address}:{assignment.port}",
            rank=assignment.rank,
            world_size=assignment.size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
            pg_options=_group_options(device, timeout),
        )
        gradient_group: Any = None
        if device.type == "cuda":
            gradient_group = dist.new_group(timeout=timeout, pg_options=_group_options(device, timeout))
    except (RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise PeersLost(
            f"rank {assignment.rank} of {assignment.size} did not reach the other processes at "
            f"{assignment.address}:{assignment.port} within {group_timeout_s:g} s ({said}); check that all were "
            f"started and can reach that address."
        ) from None
    world = World(
        assignment.rank, assignment.size, device, dist.group.WORLD, timeout_s, assignment.local_size, gradient_group
    )
    yield world
    # Not after an error: the other processes may be gone, and the shutdown would wait for them.
    world.leave()
    gradient_group = None
    world.forget_groups()
    dist.destroy_process_group()
    # Gloo's threads end with the last reference to their group. At the end of the interpreter they would wait for its
    # lock, and end the process by SIGABRT or never.
    gc.collect()


def _group_options(device: torch.device, timeout: timedelta) -> Any:
    if device.type != "cuda":
        return None
    # Collectives run before other kernels of the GPU: other processes wait for them.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # pyright: ignore[reportPrivateUsage]
    return options


def longest_timeout_s(timeout_s: float) -> float:
    """Return the longer of two timeouts, so that of watchdog and process group the intended one fires first."""
    return 1.25 * timeout_s + 2 * POLL_S
