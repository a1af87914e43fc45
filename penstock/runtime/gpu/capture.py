"""The capture of CUDA graphs beside threads that replay others."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from penstock.core.errors import ServeError
from penstock.runtime.gpu.precision import ONE_AT_A_TIME

# Streams of one priority that torch has.
STREAMS = 32
# The shortest of these is the time of a graph.
TIMED_RUNS = 4


@dataclass(frozen=True, eq=False, weakref_slot=True, slots=True)
class ReservedStream:
    """A stream that is its owner's alone for as long as this object lives.

    Args:
        stream: The stream.
    """

    stream: torch.cuda.Stream


# torch's streams are the process's. No weak references to them: torch 2.11 does not clear those when a stream is freed.
_reserved: WeakSet[ReservedStream] = WeakSet()


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream | None = None) -> Generator[None]:
    """Capture the launches of the block; others may be replayed meanwhile, but not captured: torch has no two at once.

    Args:
        graph: What they become.
        pool: The memory of its intermediate results; None for its own.
        stream: Where they are captured; by default torch's own, the same for all graphs.
    """
    with (
        ONE_AT_A_TIME,
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        yield


def reserved_stream(device: torch.device, priority: int) -> ReservedStream:
    """Return a stream for what serves, which `stream_aside` never returns while the object is referenced."""
    with ONE_AT_A_TIME:
        if torch.cuda.graph.default_capture_stream is None:
            # As torch does at the first capture, which might then find a stream that is reserved.
            torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
        reserved = ReservedStream(_untaken(device, priority))
        _reserved.add(reserved)
    return reserved


def stream_aside(device: torch.device) -> torch.cuda.Stream:
    """Return a stream in which to run a network while graphs are replayed; use it within `ONE_AT_A_TIME`.

    Libraries have a workspace for each stream, which the graphs that are captured in it keep: what runs in such a
    stream changes the answers of these graphs. torch hands out a limited number of streams, in turn.
    """
    return _untaken(device, 0)


def _untaken(device: torch.device, priority: int) -> torch.cuda.Stream:
    taken = [torch.cuda.graph.default_capture_stream, *(each.stream for each in _reserved)]
    for _ in range(STREAMS):
        stream = torch.cuda.Stream(device, priority=priority)
        if stream not in taken:
            return stream
    raise ServeError(f"a process has no more than {STREAMS} streams of a GPU; serve fewer models in one.")


def graph_ms(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Replay a graph in a stream, and return its shortest time."""
    times_ms: list[float] = []
    with torch.cuda.stream(stream):
        while len(times_ms) < TIMED_RUNS:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            graph.replay()
            after.record()
            after.synchronize()
            times_ms.append(before.elapsed_time(after))
    return min(times_ms)
