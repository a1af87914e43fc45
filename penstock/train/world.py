"""The processes that train one network together: which of them this one is, on which device, and what it waits for.

A world of one process has no process group, and every collective of it gives back what it was given: one definition of
the step serves any number of processes.
"""

import gc
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, final
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.errors import OthersLost, TrainError
from penstock.kernels.peer_memory import PeerMemory, why_no_peer_memory

TIMEOUT_S = 600.0
EXIT_HANGS = 3
LOOK_S = 1.0
# Where in its sources gloo raised an error.
_PLACE = re.compile(r"^\[\S+:\d+\] ")
_OF_CONNECTIONS = ("gloo", "connection", "timed out", "timeout", "socket", "broken pipe")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where a process sits among those that train together, as its starter says.

    Args:
        rank: Which it is, from 0, among all.
        size: How many there are.
        local_rank: Which it is on its own machine.
        local_size: How many there are on its own machine.
        address: Where the first one listens for the others.
        port: The port there.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            raise TrainError(
                f"the environment says rank {self.rank} of {self.size} and local rank {self.local_rank} of "
                f"{self.local_size}; ranks begin at 0 and stay below the counts."
            )


@final
class World:
    """The processes that train together.

    Args:
        rank: This one, from 0.
        size: How many there are.
        device: Where this one computes.
        group: What joins them; None for one alone.
        beside: What joins them for what travels beside all else, the sums of gradients: on GPUs it has a stream of its
            own, so that no layer waits for these. By default the same group.
        timeout_s: How long one waits for the others.
        local_size: How many there are on this machine.

    Attributes:
        memory: Over which the layers' collectives go, where GPUs of one host share theirs; see `share_memory`.
        memory_beside: Over which small sums of gradients go.
        doing: What this process does now, in words, for the message if it hangs.
        got_on_s: When it last got on, by the monotonic clock.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = TIMEOUT_S,
        local_size: int = 1,
        beside: dist.ProcessGroup | None = None,
    ) -> None:
        assert (size == 1) == (group is None), (size, group)
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")
        self.group = group
        self.beside = beside or group
        self.timeout_s = timeout_s
        self.local_size = local_size
        self.memory: PeerMemory | None = None
        self.memory_beside: PeerMemory | None = None
        self._memories: tuple[PeerMemory, PeerMemory] | None = None
        self._held: list[WeakMethod[Callable[[], None]]] = []
        self.doing = "starting"
        self.got_on_s = time.monotonic()

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    @property
    def named(self) -> str:
        """`rank 0 of 4`."""
        return f"rank {self.rank} of {self.size}"

    def describe(self) -> str:
        """What computes, for people."""
        one = "the CPU"
        if self.device.type == "cuda":
            one = torch.cuda.get_device_name(self.device)
        return one if self.size == 1 else f"{self.size} processes, each on {one}"

    def share_memory(self, wanted: bool = True) -> str | None:
        """Let the GPUs read and write each other's memory for what travels between them, or not; all must ask.

        Returns:
            Why they do not, or None.
        """
        self.memory = self.memory_beside = None
        if not wanted:
            return "the recipe has peer_memory=False"
        if self._memories is None:
            several = self.local_size != self.size
            why = "they are of several hosts" if several else why_no_peer_memory(self.device, self.size)
            if any(self.total(why is not None)):
                return why or "another process cannot"
            assert self.group is not None
            assert self.beside is not None
            try:
                memories = PeerMemory(self.group, self.device), PeerMemory(self.beside, self.device)
            except RuntimeError as error:
                memories, why = None, " ".join(str(error).split())[:200]
            if any(self.total(memories is None)):
                return why or "another process cannot"
            self._memories = memories
        assert self._memories is not None
        self.memory, self.memory_beside = self._memories
        return None

    def hold(self, let_go: Callable[[], None]) -> None:
        """Have something let go before the process leaves the others; a bound method, which keeps nothing alive."""
        self._held.append(WeakMethod(let_go))

    def before_leaving(self) -> None:
        """Let go of captured collectives: NCCL does not leave as long as there is a graph that has one."""
        for held in self._held:
            let_go = held()
            if let_go is not None:
                let_go()
        self._held.clear()
        # Of graphs that somebody else captured.
        gc.collect()

    def got_on(self) -> None:
        """Say that this process does not hang."""
        self.got_on_s = time.monotonic()

    @contextmanager
    def operation(self, name: str) -> Generator[None]:
        """What is done inside waits for the others; if that fails, the error says who waited and in what.

        Raises:
            OthersLost: Another process ended, or did not come within the timeout.
            RuntimeError: What else failed, this process's GPU say, as it was raised.
        """
        before, self.doing = self.doing, name
        try:
            yield
        except RuntimeError as error:
            if not _is_of_others(error):
                raise
            said = _PLACE.sub("", " ".join(str(error).split()))[:200]
            raise OthersLost(
                f"{self.named} waited for the others in {name}, and they did not come ({said}); see what became of "
                f"them."
            ) from error
        self.doing = before
        self.got_on()

    def total(self, *values: Tensor | float) -> list[float]:
        """The sums of numbers over all processes. The host waits for them: once a step, and marked."""
        parts = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        summed = torch.stack(parts)
        if self.size == 1:
            # All at once: each look at a number of a GPU is a wait of its own.
            return summed.tolist()
        with self.operation("the sum of the losses"):
            dist.all_reduce(summed, group=self.group)
            return summed.tolist()

    def summed(self, own: Tensor, what: str) -> Tensor:
        """The sum of a tensor over all processes, in its place, on its device; the host reads nothing."""
        if self.size > 1:
            with self.operation(what):
                dist.all_reduce(own, group=self.group)
        return own

    def of_first(self, values: Sequence[float]) -> list[float]:
        """The first process's numbers, in every process."""
        return self.total(*(value if self.is_first else 0.0 for value in values))

    def texts(self, own: str) -> list[str]:
        """What each process has to say, which is never nothing, by rank, in every process."""
        if self.group is None:
            return [own]
        said = own.encode()
        sizes = self.total(*(len(said) if rank == self.rank else 0 for rank in range(self.size)))
        texts = torch.zeros(self.size, int(max(sizes)), dtype=torch.uint8)
        texts[self.rank, : len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        texts = texts.to(self.device)
        with self.operation("the exchange of what is said"):
            dist.all_reduce(texts, group=self.group)
        return [text[: int(size)].numpy().tobytes().decode() for text, size in zip(texts.cpu(), sizes, strict=True)]

    def counts(self, own: Mapping[str, int]) -> dict[str, int]:
        """What all processes counted together, by name."""
        whole: Counter[str] = Counter()
        for text in self.texts(json.dumps(own)):
            whole.update(json.loads(text))
        return dict(whole)

    @torch.no_grad()
    def same(self, tensors: Sequence[Tensor], what: str) -> None:
        """Give tensors of every process, on its device, the first one's values."""
        if self.group is None:
            return
        with self.operation(f"the broadcast of {what}"):
            for tensor in tensors:
                whole = tensor.contiguous()
                dist.broadcast(whole, src=0, group=self.group)
                tensor.copy_(whole)


def _is_of_others(error: RuntimeError) -> bool:
    """Whether an error of a collective comes of the other processes; where the host waits, its own GPU's come too."""
    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
        return False
    # Gloo's have no type of their own.
    said = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in said for word in _OF_CONNECTIONS)


def split_rows(count: int, parts: int) -> tuple[int, ...]:
    """How many of so many rows each process has: as even as can be, the first ones one more."""
    return tuple(count // parts + (part < count % parts) for part in range(parts))


def device_of(seat: Seat | None, *, cuda: bool, wanted: int = 1) -> torch.device:
    """The device of a process.

    Args:
        seat: Where the process sits; None for one alone.
        cuda: Whether it computes on a GPU.
        wanted: How many GPUs of this machine are needed for all.

    Raises:
        TrainError: There are fewer.
    """
    if not cuda:
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if wanted > there:
        raise TrainError(f"{wanted} GPUs are asked for and torch sees {there}; ask for fewer, or make them visible.")
    return torch.device("cuda", seat.local_rank if seat else 0)


@contextmanager
def joined(seat: Seat | None, device: torch.device, timeout_s: float = TIMEOUT_S) -> Generator[World]:
    """The world that a process joins, and leaves at the end.

    Args:
        seat: As its starter says; None for a process alone.
        device: Where it computes; NCCL joins GPUs, gloo CPUs.
        timeout_s: How long it waits for the others, at the start and in each collective.

    Raises:
        TrainError: The others did not come.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if seat is None or seat.size == 1:
        yield World(device=device, timeout_s=timeout_s)
        return
    gives_up_s = _longest_s(timeout_s) if device.type == "cuda" else timeout_s
    waits = timedelta(seconds=gives_up_s)
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{seat.address}:{seat.port}",
            rank=seat.rank,
            world_size=seat.size,
            timeout=waits,
            device_id=device if device.type == "cuda" else None,
            pg_options=_at_once(device, waits),
        )
        beside: Any = None
        if device.type == "cuda":
            beside = dist.new_group(timeout=waits, pg_options=_at_once(device, waits))
    except (RuntimeError, ValueError) as error:
        raise TrainError(
            f"rank {seat.rank} of {seat.size} did not find the others at {seat.address}:{seat.port} within "
            f"{gives_up_s:g} s ({' '.join(str(error).split())[:200]}); see that all were started, and reach that place."
        ) from None
    world = World(seat.rank, seat.size, device, dist.group.WORLD, timeout_s, seat.local_size, beside)
    yield world
    # After an error the others may be gone, and leaving would wait for them; this process ends then.
    world.before_leaving()
    dist.destroy_process_group()


def _at_once(device: torch.device, waits: timedelta) -> Any:
    """How a group begins its work: on a GPU before all that is not waited for."""
    if device.type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = waits  # pyright: ignore[reportPrivateUsage]
    return options


def _longest_s(timeout_s: float) -> float:
    """How long the later one of the watchdog and what joins the processes waits, so that the other one is first."""
    return 1.25 * timeout_s + 2 * LOOK_S


@final
class Watchdog:
    """Ends this process when it has not got on for too long, or when the one that started it is gone.

    A collective of NCCL whose other side is gone keeps the host waiting, and a captured one is watched by nobody else.

    Args:
        world: Says what this process was doing.
        parent: The process that started this one, if its end is this one's too.
    """

    def __init__(self, world: World, parent: int | None = None) -> None:
        self._world = world
        self._parent = parent
        # Gloo gives up after the timeout by itself, with an error that is better than an end; NCCL aborts the process
        # without a word of where it was, and not at all in a captured step.
        self._limit_s = world.timeout_s if world.device.type == "cuda" else _longest_s(world.timeout_s)
        self._waits = True
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._world.size > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def beat(self, doing: str) -> None:
        """This process has got on, and does this next."""
        self._world.got_on()
        self._world.doing = doing
        self._waits = True

    def alone(self, doing: str) -> None:
        """This process does what no other waits for, nor it for any other: it may take as long as it takes."""
        self._world.doing = doing
        self._waits = False

    def _watch(self) -> None:
        while not self._done.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """End this process if it is time for that."""
        if self._parent is not None and os.getppid() != self._parent:
            os._exit(EXIT_HANGS)
        silent_s = time.monotonic() - self._world.got_on_s
        if self._waits and silent_s > self._limit_s:
            sys.stderr.write(
                f"penstock: {self._world.named} has not got on for {silent_s:.0f} s in {self._world.doing}; "
                f"it is ended.\n"
            )
            sys.stderr.flush()
            os._exit(EXIT_HANGS)
