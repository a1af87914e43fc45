"""Two lanes of a device: one for steps, and one for `begin` beside them. On a GPU each is a stream with its graphs."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar, final

import torch
from torch import Tensor

from penstock.runtime.gpu.capture import capturing, reserved_stream
from penstock.runtime.gpu.cuda_graph_executor import WARM_UPS

Found = TypeVar("Found")

STEPS, BEGINS = 0, 1


class Mark(Protocol):
    """A moment in the work of a lane."""

    def query(self) -> bool:
        """Return whether the work before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class Lanes(Protocol):
    """A device, as far as the executor needs it."""

    device: torch.device

    def on(self, lane: int) -> AbstractContextManager[Any]:
        """Put the work of a block into a lane."""
        ...

    def mark(self, lane: int) -> Mark:
        """Mark the end of a lane's work so far."""
        ...

    def follow(self, lane: int, mark: Mark) -> None:
        """Let a lane's further work wait for a mark."""
        ...

    def host(self, nbytes: int) -> Tensor:
        """Make a buffer of bytes on the host that the device can copy to and from while the host goes on."""
        ...

    def rehearse(self, lane: int, run: Callable[[], object]) -> int:
        """Run a function a few times in a lane; returns the most bytes that it takes meanwhile."""
        ...

    def captured(self, lane: int, run: Callable[[], Found]) -> Callable[[], Found]:
        """Capture a function, which was rehearsed; returns one that repeats its work, and its results."""
        ...


@final
class CudaLanes:
    """The lanes of a GPU.

    Args:
        device: torch's name of the GPU.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        # A step makes others wait, `begin` beside it does not.
        self._reserved = {lane: reserved_stream(self.device, -1 if lane == STEPS else 0) for lane in (0, 1)}
        self._streams = {lane: reserved.stream for lane, reserved in self._reserved.items()}
        # Graphs of one lane never run at once, so that they share memory. Handles of torch, without a public type.
        self._pools: dict[int, Any] = {}

    @contextmanager
    def on(self, lane: int) -> Generator[None]:
        """See `Lanes`."""
        with torch.cuda.stream(self._streams[lane]):
            yield

    def mark(self, lane: int) -> Mark:
        """See `Lanes`."""
        event = torch.cuda.Event()
        event.record(self._streams[lane])
        return event

    def follow(self, lane: int, mark: Mark) -> None:
        """See `Lanes`."""
        assert isinstance(mark, torch.cuda.Event), mark
        self._streams[lane].wait_event(mark)

    def host(self, nbytes: int) -> Tensor:
        """See `Lanes`."""
        # torch keeps page-locked memory, and uses it again only after the transfers that were launched with it.
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def rehearse(self, lane: int, run: Callable[[], object]) -> int:
        """See `Lanes`."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        with self.on(lane):
            for _ in range(WARM_UPS):
                run()
            self._streams[lane].synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def captured(self, lane: int, run: Callable[[], Found]) -> Callable[[], Found]:
        """See `Lanes`."""
        graph = torch.cuda.CUDAGraph()
        # The lane's own stream: libraries have a workspace for each, and both lanes run at once.
        with capturing(graph, self._pools.get(lane), self._streams[lane]):
            found = run()
        self._pools.setdefault(lane, graph.pool())

        def repeat() -> Found:
            graph.replay()
            return found

        return repeat
