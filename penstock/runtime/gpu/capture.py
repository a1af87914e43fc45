"""The capture of CUDA graphs beside threads that replay others."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from penstock.runtime.gpu.precision import ONE_AT_A_TIME

# torch's streams are the process's.
_of_graphs: "WeakValueDictionary[int, torch.cuda.Stream]" = WeakValueDictionary()


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


def stream_of_graphs(device: torch.device, priority: int) -> torch.cuda.Stream:
    """Return a stream for graphs that serve, which `stream_aside` never returns while it is referenced."""
    with ONE_AT_A_TIME:
        stream = torch.cuda.Stream(device, priority=priority)
        _of_graphs[id(stream)] = stream
    return stream


def stream_aside(device: torch.device) -> torch.cuda.Stream:
    """Return a stream in which to run a network while graphs are replayed; use it within `ONE_AT_A_TIME`.

    Libraries have a workspace for each stream, which the graphs that are captured in it keep: what runs in such a
    stream changes the answers of these graphs. torch hands out a limited number of streams, in turn.
    """
    while (stream := torch.cuda.Stream(device)) in (torch.cuda.graph.default_capture_stream, *_of_graphs.values()):
        pass
    return stream
