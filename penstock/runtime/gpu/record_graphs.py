"""Graphs of networks of several tensors or of lengths that vary: uncaptured trials, capture, and memory."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.record import ChunkSpec
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.gpu.capture import capturing, graph_ms
from penstock.runtime.gpu.gpu_network import GpuNetwork
from penstock.runtime.gpu.graph_cache import GraphShapes, Shape
from penstock.runtime.gpu.record_buffers import Block, Transfers, memory


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordGraph:
    """The graph of one shape.

    Args:
        graph: Computes the outputs from the inputs.
        given: The places of the inputs by name.
        found: The places of the outputs by name.
        inputs: The block of the inputs on the GPU.
        outputs: The block of the outputs on the GPU.
        constants: Outputs on the host, which follow from the shape alone.
        ms: Its time alone on the GPU; infinite where it was not measured.
        network: Holds the constants of the graph where it is not the executor's own network.
    """

    graph: torch.cuda.CUDAGraph
    given: Block
    found: Block
    inputs: Tensor
    outputs: Tensor
    constants: dict[str, Array]
    ms: float = inf
    network: nn.Module | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """An uncaptured run.

    Args:
        seconds: Its time.
        peak_bytes: The most memory of its intermediate results.
        results: Its results; those on the GPU without their numbers.
    """

    seconds: float
    peak_bytes: int
    results: tuple[Tensor, ...]


@final
class RecordGraphs:
    """Makes the graphs of a network.

    Args:
        network: The network, on the device.
        input: One raw input chunk.
        output: One output chunk.
        shapes: The shapes of its batches.
        device: The GPU.
        timed: Measure each graph.
    """

    def __init__(
        self,
        network: GpuNetwork,
        input: ChunkSpec,
        output: ChunkSpec,
        shapes: GraphShapes,
        device: torch.device,
        *,
        timed: bool,
    ) -> None:
        self._network, self._input, self._output = network, input, output
        self._shapes, self._device, self._timed = shapes, device, timed

    def trial(self, shape: Shape, runs: int, aside: torch.cuda.Stream, network: nn.Module | None = None) -> Trial:
        """Run a shape uncaptured on an example of zeros, in a stream aside.

        Args:
            shape: The shape.
            runs: The last one is measured.
            aside: The stream.
            network: Runs in the network's place.
        """
        run = network or self._network
        current = torch.cuda.current_stream(self._device)
        aside.wait_stream(current)
        seconds = 0.0
        results: tuple[Tensor, ...] = ()
        try:
            with torch.cuda.stream(aside):
                feeds = self._zeros(shape)
                inputs = [torch.from_numpy(feeds[name]).to(self._device) for name in self._network.arguments]
                before = torch.cuda.memory_allocated(self._device)
                torch.cuda.reset_peak_memory_stats(self._device)
                for _ in range(runs):
                    start_s = time.perf_counter()
                    found = run(*inputs)
                    aside.synchronize()
                    seconds = time.perf_counter() - start_s
                    # Lengths that follow from the shape alone are on the host.
                    results = tuple(
                        torch.empty_like(each, device="meta") if each.device.type == self._device.type else each
                        for each in found
                    )
                    del found
                peak_bytes = torch.cuda.max_memory_allocated(self._device) - before
        finally:
            current.wait_stream(aside)
        return Trial(seconds=seconds, peak_bytes=peak_bytes, results=results)

    def make(
        self,
        shape: Shape,
        trial: Trial,
        pool: Any,
        *,
        network: nn.Module | None = None,
        aside: torch.cuda.Stream | None = None,
    ) -> RecordGraph:
        """Capture a shape that was warmed up.

        Args:
            shape: The shape.
            trial: Its trial.
            pool: Memory of the intermediate results; None for its own.
            network: Runs in the network's place.
            aside: Where it is captured and measured; by default where all graphs are.
        """
        feeds = self._zeros(shape)
        given = Block.of({name: (feeds[name].dtype, feeds[name].shape) for name in self._network.arguments})
        results = dict(zip(self._network.results, trial.results, strict=True))
        found = Block.of(
            {
                name: (torch.empty(0, dtype=each.dtype).numpy().dtype, tuple(each.shape))
                for name, each in results.items()
                if each.is_meta
            }
        )
        host = memory(given.nbytes, torch.device("cpu"))
        for name, array in given.arrays(host.numpy()).items():
            array[...] = feeds[name]
        bare = RecordGraph(
            graph=None,  # pyright: ignore[reportArgumentType]
            given=given,
            found=found,
            inputs=host.to(self._device),
            outputs=memory(found.nbytes, self._device),
            constants={name: each.numpy() for name, each in results.items() if not each.is_meta},
        )
        made = replace(bare, graph=self.capture(bare, pool, network, aside))
        if not self._timed:
            return made
        return replace(made, ms=graph_ms(made.graph, aside or torch.cuda.current_stream(self._device)))

    def capture(
        self, into: RecordGraph, pool: Any, network: nn.Module | None = None, aside: torch.cuda.Stream | None = None
    ) -> torch.cuda.CUDAGraph:
        """Capture what computes the outputs of a graph from its inputs; the arguments are those of `make`."""
        return captured(self._computing(into, network or self._network), pool, aside)

    def _computing(self, graph: RecordGraph, network: nn.Module) -> Callable[[], None]:
        given, found = graph.given.tensors(graph.inputs), graph.found.tensors(graph.outputs)

        def run() -> None:
            results = network(*(given[name] for name in self._network.arguments))
            for name, result in zip(self._network.results, results, strict=True):
                # A copy from the host could not be captured.
                if name in found:
                    found[name].copy_(result)

        return run

    def _zeros(self, shape: Shape) -> dict[str, Array]:
        """Inputs of a shape: one example of zeros in each row, of the largest lengths that the room has."""
        rooms = self._shapes.rooms(shape)
        lengths = {name: np.full(shape[0], room, np.int64) for name, room in rooms.items()}
        return {spec.name: _zeros(spec, shape[0], rooms) for spec in self._input.tensors} | lengths

    def own_bytes(self, shape: Shape) -> int:
        """Memory of the inputs and outputs of a shape."""
        return sum(self._side_bytes(shape))

    def peak_bytes(self, shape: Shape, trial: Trial) -> int:
        """Memory that a shape needs and shares with others."""
        # The stages, too, are as large as the largest graph needs.
        return trial.peak_bytes + Transfers.nbytes(*self._side_bytes(shape))

    def _side_bytes(self, shape: Shape) -> tuple[int, int]:
        """Memory of the inputs and of the outputs."""
        rooms = self._shapes.rooms(shape)

        def nbytes(tensors: Sequence[Any]) -> int:
            each = 0
            for spec in tensors:
                sizes = [rooms.get(getattr(size, "name", ""), int(size)) for size in spec.shape]
                each += int(np.prod(sizes, dtype=np.int64)) * spec.numpy_dtype.itemsize
            return shape[0] * each

        return nbytes(self._input.tensors), nbytes(self._output.tensors)


def _zeros(spec: TensorSpec, rows: int, rooms: Mapping[str, int]) -> Array:
    sizes = [rooms.get(getattr(size, "name", ""), int(size)) for size in spec.shape]
    # Zero may be beyond the limits of the numbers.
    least = 0 if spec.limits is None else min(max(0, spec.limits[0]), spec.limits[1])
    return np.full((rows, *sizes), least, spec.numpy_dtype)


def captured(run: Callable[[], None], pool: Any, aside: torch.cuda.Stream | None) -> torch.cuda.CUDAGraph:
    """Capture what a function launches, see `capturing`."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, pool, aside):
        run()
    return graph
