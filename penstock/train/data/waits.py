"""Times that steps wait for their batches, on the clock of the device that takes the steps."""

import time
from collections import deque
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, final

import torch


class Waits(Protocol):
    """Waits of a loader's steps."""

    @property
    def total_s(self) -> float:
        """Seconds of all waits so far."""
        ...

    def count(self) -> AbstractContextManager[None]:
        """Count the context, in which the next batch is waited for."""
        ...


@final
class HostWaits:
    """Waits of steps that run on the host."""

    def __init__(self) -> None:
        self.total_s = 0.0

    @contextmanager
    def count(self) -> Generator[None]:
        """See `Waits`."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.total_s += time.perf_counter() - began_s


@final
class DeviceWaits:
    """Waits of steps that run on a GPU, which still works on earlier steps while the host waits for a batch.

    The time from the end of the earlier steps to the arrival of the batch is measured by two events in the stream of
    the steps: near zero if the batch came first.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total_s = 0.0
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def total_s(self) -> float:
        """Seconds of all waits that have ended on the GPU."""
        self._add_ended()
        return self._total_s

    @contextmanager
    def count(self) -> Generator[None]:
        """See `Waits`."""
        stream = torch.cuda.current_stream(self._device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        yield
        ended.record(stream)
        self._under_way.append((began, ended))
        # Otherwise the events of a whole epoch would be kept.
        self._add_ended()

    def _add_ended(self) -> None:
        while self._under_way and self._under_way[0][1].query():
            began, ended = self._under_way.popleft()
            self._total_s += 1e-3 * began.elapsed_time(ended)
