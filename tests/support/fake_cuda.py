"""Streams, events and graphs that compute on a CPU, as late as their order allows."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any, final

import pytest
import torch
from torch import Tensor

from penstock.runtime.gpu import record_buffers, record_graph_executor, record_graphs


@final
class FakeEvent:
    """A place in a stream."""

    def __init__(self, **_given: Any) -> None:
        self.stream: FakeStream | None = None
        self.end = 0

    def record(self, stream: "FakeStream | None" = None) -> None:
        self.stream = stream or FakeCuda.current[-1]
        self.end = self.stream.begun + len(self.stream.queued)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.end)

    def query(self) -> bool:
        return self.stream is None or self.stream.begun >= self.end


@final
class FakeStream:
    """Work that is queued, and runs when somebody waits for it."""

    def __init__(self, *_given: Any, **_named: Any) -> None:
        self.queued: list[Callable[[], None]] = []
        self.begun = 0

    def run(self, end: int) -> None:
        while self.begun < end:
            self.begun += 1
            self.queued.pop(0)()

    def synchronize(self) -> None:
        self.run(self.begun + len(self.queued))

    def wait_event(self, event: FakeEvent) -> None:
        place = FakeEvent()
        place.stream, place.end = event.stream, event.end
        self.queued.append(place.synchronize)

    def wait_stream(self, stream: "FakeStream") -> None:
        event = FakeEvent()
        event.record(stream)
        self.wait_event(event)


@final
class FakeGraph:
    """Computes again what was captured."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run: Callable[[], None] | None = run
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

        def compute() -> None:
            assert self.run is not None, "a graph was reset before it ran"
            with torch.inference_mode():
                self.run()

        FakeCuda.current[-1].queued.append(compute)

    def reset(self) -> None:
        self.run = None

    def pool(self) -> str:
        return "pool"


@final
class FakeCuda:
    """A GPU that is a CPU; `device` is `"cpu"`.

    Args:
        monkeypatch: Undoes it.

    Attributes:
        ms: Time of a graph by the number of its rows, of plain and of other networks.
    """

    current: list[FakeStream]

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeCuda.current = [FakeStream()]
        self.graphs: list[FakeGraph] = []
        self.ms: Callable[[FakeGraph], float] = lambda graph: 1.0
        fakes: dict[str, Any] = {
            "Stream": FakeStream,
            "Event": FakeEvent,
            "stream": _stream,
            "current_stream": lambda _device=None: FakeCuda.current[-1],
            "device": lambda _device: nullcontext(),
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda _device: None,
            "memory_allocated": lambda _device: 0,
            "max_memory_allocated": lambda _device: 0,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(record_buffers, "copy", _copy)
        for module in (record_buffers, record_graphs):
            monkeypatch.setattr(module, "memory", _memory)
        monkeypatch.setattr(record_graphs, "captured", self._captured)
        monkeypatch.setattr(record_graphs, "graph_ms", lambda graph, _stream: self.ms(graph))
        monkeypatch.setattr(record_graph_executor, "stream_aside", FakeStream)

    def _captured(self, run: Callable[[], None], pool: Any, stream: Any = None) -> FakeGraph:
        self.graphs.append(FakeGraph(run))
        return self.graphs[-1]


@contextmanager
def _stream(stream: FakeStream) -> Generator[None]:
    FakeCuda.current.append(stream)
    yield
    FakeCuda.current.pop()


def _copy(to: Tensor, given: Tensor) -> None:
    def copy() -> None:
        with torch.inference_mode():
            to.copy_(given)

    FakeCuda.current[-1].queued.append(copy)


def _memory(nbytes: int, _device: torch.device, *, locked: bool = False) -> Tensor:
    # What is never written is no valid number.
    return torch.full((nbytes,), 255, dtype=torch.uint8)
