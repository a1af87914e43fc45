"""Networks of several tensors or of lengths that vary, as CUDA graphs by rows and length.

At start the graphs of the grid are captured, from the largest down, within limits of time and memory. While serving, a
batch is padded to the rows and rooms of its shape. A shape without a graph runs uncaptured; at its third use it is
captured, at most one shape a second, so that the requests of others wait for one uncaptured pass of launches more.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.named_arrays import chunks_of, feeds_of
from penstock.core.record import ChunkSpec, Lengths, RecordSpec
from penstock.core.spec import Array
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.runtime.gpu.capture import capturing, stream_aside
from penstock.runtime.gpu.cuda_graph_executor import WARM_UPS, device_errors
from penstock.runtime.gpu.gpu_network import GpuNetwork
from penstock.runtime.gpu.graph_cache import GraphCache, GraphShapes, Shape, size_of
from penstock.runtime.gpu.precision import ONE_AT_A_TIME

# B rows of the batch

log = logging.getLogger(__name__)

# Time for the graphs of the grid at start.
CAPTURE_S = 15.0
# At each length, larger batches than the first that takes this long gain nothing from a graph.
MAX_CAPTURED_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class _RecordGraph:
    """The graph of one shape.

    Args:
        graph: Computes the outputs from the inputs.
        inputs: On the GPU, by name.
        outputs: On the GPU, in the order of the results.
        host_inputs: Page-locked, by name.
        host_outputs: Page-locked.
    """

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    outputs: list[Tensor]
    host_inputs: dict[str, Tensor]
    host_outputs: list[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """An uncaptured run: its time, and the most memory of its intermediate results."""

    seconds: float
    peak_bytes: int


@final
class RecordGraphExecutor(Executor):
    """A one-shot network of several tensors, or of lengths that vary, on a GPU.

    Args:
        network: The network, on the device.
        input: One raw input chunk.
        output: One output chunk.
        max_rows: The largest batch.
        device: torch's name of the device.
        limit_bytes: Memory of the graphs.

    Attributes:
        uncaptured_batches: Batches that ran without a graph.
        reason: Why nothing is captured; None where graphs are.
    """

    pads_to_edges = True

    def __init__(
        self,
        network: GpuNetwork,
        input: ChunkSpec,
        output: ChunkSpec,
        *,
        max_rows: int,
        device: str,
        limit_bytes: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.input, self.output, self.max_rows = input, output, max_rows
        self._network = network
        self._device = torch.device(device)
        self._dims = list(input.dims) if isinstance(input, RecordSpec) else []
        dims = input.dims.values() if isinstance(input, RecordSpec) else ()
        self._shapes = GraphShapes(dims, max_rows)
        self._cache: GraphCache[_RecordGraph] = GraphCache(limit_bytes)
        # A handle of torch, whose type has no public name.
        self._pool: Any = None
        self._clock_s = clock_s
        self._limit_said = False
        self.uncaptured_batches = 0
        self.reason: str | None = None

    @property
    def graphs(self) -> int:
        """Number of graphs."""
        return len(self._cache)

    def step(self, batch: StepInput) -> StepOutput:
        """Run the network once for the rows of the batch.

        Raises:
            DeviceLost: The GPU failed.
        """
        return StepOutput(output_B=self._predict(batch.chunk_B))

    def predict(self, chunk_B: Array) -> Array:
        """Run raw inputs `[B, *input.shape]`; returns outputs `[B, *output.shape]`, which are the caller's."""
        return self._predict(chunk_B).copy()

    def _predict(self, chunk_B: Array) -> Array:
        with torch.cuda.device(self._device), torch.inference_mode():
            shape = self._shape_of(chunk_B)
            graph = self._cache.get(shape)
            if graph is None and self.reason is None and self._cache.due(shape, self._clock_s()):
                graph = self._captured(shape, self._trial(shape, 1))
            feeds, lengths = self._feeds(chunk_B, shape)
            named = self._run_uncaptured(feeds) if graph is None else self._replay(graph, feeds, len(chunk_B))
        return chunks_of(self.output, named, lengths)

    def capture_for(self, chunk_B: Array) -> bool:
        """Capture the shape of a batch now; returns whether there is a graph of it."""
        with torch.cuda.device(self._device), torch.inference_mode():
            shape = self._shape_of(chunk_B)
            if self._cache.get(shape) is None and self.reason is None:
                self._captured(shape, self._trial(shape, WARM_UPS))
            return self._cache.get(shape) is not None

    def capture_grid(self, limit_s: float = CAPTURE_S) -> None:
        """Capture equally long rooms with every number of rows, within a limit of time."""
        end_s = self._clock_s() + limit_s
        with torch.cuda.device(self._device), torch.inference_mode():
            trials = self._trials(end_s - limit_s / 2)
            for shape in sorted(trials, key=size_of, reverse=True):
                if self.reason is not None:
                    return
                if self._clock_s() > end_s:
                    log.info("%d of %d CUDA graphs captured within %g s", self.graphs, len(trials), limit_s)
                    return
                # Graphs that are used must not be dropped for some that may never be.
                if self._cache.get(shape) is None and self._fits(shape, trials[shape]):
                    self._captured(shape, trials[shape])
        log.info("%d CUDA graphs take about %d MB", self.graphs, self._cache.nbytes >> 20)

    def _trials(self, end_s: float) -> dict[Shape, _Trial]:
        """Warm up the shapes that memory and time allow, so that libraries have chosen their kernels."""
        trials: dict[Shape, _Trial] = {}
        for column in self._shapes.columns():
            for shape in column:
                if trials and self._clock_s() > end_s:
                    return trials
                trial = self._trial(shape, WARM_UPS)
                if trial is None:
                    break
                trials[shape] = trial
                if trial.seconds > MAX_CAPTURED_S:
                    break
        torch.cuda.empty_cache()
        return trials

    def _trial(self, shape: Shape, runs: int) -> _Trial | None:
        """Run a shape uncaptured on an example of zeros; returns None, and gives the shape up, where that fails."""
        with ONE_AT_A_TIME:
            return self._trial_in(stream_aside(self._device), shape, runs)

    def _trial_in(self, aside: torch.cuda.Stream, shape: Shape, runs: int) -> _Trial | None:
        aside.wait_stream(torch.cuda.current_stream(self._device))
        seconds = 0.0
        try:
            with torch.cuda.stream(aside):
                inputs = self._inputs(shape)
                before = torch.cuda.memory_allocated(self._device)
                torch.cuda.reset_peak_memory_stats(self._device)
                for _ in range(runs):
                    start_s = time.perf_counter()
                    self._run(inputs)
                    aside.synchronize()
                    seconds = time.perf_counter() - start_s
                peak_bytes = torch.cuda.max_memory_allocated(self._device) - before
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._give_up_shape(shape, "the memory of the GPU does not suffice")
            return None
        except Exception as error:  # noqa: BLE001
            # The network is the application's code, which may raise anything on zeros; requests have other numbers.
            self._give_up_shape(shape, f"the network raised on an example of zeros: {_cause(error)}")
            return None
        finally:
            torch.cuda.current_stream(self._device).wait_stream(aside)
        return _Trial(seconds=seconds, peak_bytes=peak_bytes)

    def _fits(self, shape: Shape, trial: _Trial) -> bool:
        fits = self._cache.fits(self._own_bytes(shape), trial.peak_bytes)
        if not fits:
            self._say_limit()
        return fits

    def _captured(self, shape: Shape, trial: _Trial | None) -> _RecordGraph | None:
        if trial is None:
            return None
        own_bytes = self._own_bytes(shape)
        gone = self._cache.make_room(own_bytes, trial.peak_bytes)
        if gone is None:
            self._cache.give_up(shape)
            self._say_limit()
            return None
        if gone:
            self._say_limit()
            for each in gone:
                each.graph.reset()
            del gone
        if not self.graphs:
            self._pool = None
        inputs = self._inputs(shape)
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._pool):
                outputs = self._run(inputs)
        except torch.cuda.OutOfMemoryError:
            self._cache.give_up(shape)
            self._say_limit()
            return None
        except RuntimeError as error:
            # The network ran uncaptured; here it synchronizes with the host, or does something else that graphs lack.
            self._give_up(error)
            return None
        self._pool = self._pool or graph.pool()
        made = _RecordGraph(
            graph=graph,
            inputs=inputs,
            outputs=outputs,
            host_inputs={name: _pinned(tensor) for name, tensor in inputs.items()},
            host_outputs=[_pinned(tensor) for tensor in outputs],
        )
        self._cache.put(shape, made, own_bytes, trial.peak_bytes)
        return made

    def _give_up(self, error: RuntimeError) -> None:
        self.reason = _cause(error)
        self._cache.clear()
        self._pool = None
        self.fallback = (
            f"the network runs without CUDA graphs, because it cannot be captured ({self.reason}); keep its numbers on "
            f"the GPU."
        )
        log.warning("%s", self.fallback)

    def _give_up_shape(self, shape: Shape, reason: str) -> None:
        self._cache.give_up(shape)
        sizes = {"rows": shape[0], **self._shapes.rooms(shape)}
        of = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        said = f"batches of {of} run without a CUDA graph ({reason})"
        self.fallback = self.fallback or f"{said}."
        log.warning("%s", said)

    def _say_limit(self) -> None:
        if not self._limit_said:
            self._limit_said = True
            log.warning(
                "CUDA graphs reached their limit of memory with %d graphs: the least recently used are dropped, and "
                "batches without a graph run uncaptured; raise --graph-memory, or lower --max-batch",
                self.graphs,
            )

    def _shape_of(self, chunk_B: Array) -> Shape:
        longest = {name: int(chunk_B[name].max(initial=1)) for name in self._dims}
        return self._shapes.holding(len(chunk_B), longest)

    def _feeds(self, chunk_B: Array, shape: Shape) -> tuple[dict[str, Array], dict[str, Lengths]]:
        if not isinstance(self.input, RecordSpec):
            return feeds_of(self.input, chunk_B)[0], {}
        lengths = self.input.lengths(chunk_B)
        return self.input.batch(chunk_B, self._shapes.rooms(shape)) | lengths, lengths

    def _inputs(self, shape: Shape) -> dict[str, Tensor]:
        """Inputs of a shape on the GPU: one example of zeros in each row, of the largest lengths that the room has."""
        rooms = self._shapes.rooms(shape)
        lengths = {name: np.full(shape[0], room, np.int64) for name, room in rooms.items()}
        arrays = {spec.name: self._zeros(spec.name, shape[0], rooms) for spec in self.input.tensors} | lengths
        return {name: torch.from_numpy(arrays[name]).to(self._device) for name in self._network.arguments}

    def _zeros(self, name: str, rows: int, rooms: Mapping[str, int]) -> Array:
        spec = next(each for each in self.input.tensors if each.name == name)
        sizes = [rooms.get(getattr(size, "name", ""), int(size)) for size in spec.shape]
        # Zero may be beyond the limits of the numbers.
        least = 0 if spec.limits is None else min(max(0, spec.limits[0]), spec.limits[1])
        return np.full((rows, *sizes), least, spec.numpy_dtype)

    def _own_bytes(self, shape: Shape) -> int:
        rooms = self._shapes.rooms(shape)
        both = (*self.input.tensors, *self.output.tensors)
        each = 0
        for spec in both:
            sizes = [rooms.get(getattr(size, "name", ""), int(size)) for size in spec.shape]
            each += int(np.prod(sizes, dtype=np.int64)) * spec.numpy_dtype.itemsize
        return shape[0] * each

    def _run(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        # Lengths that follow from the shape alone are on the host; a copy to the GPU could not be captured.
        return [*self._network(*(inputs[name] for name in self._network.arguments))]

    def _run_uncaptured(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self.uncaptured_batches += 1
        inputs = {name: torch.from_numpy(feeds[name]).to(self._device) for name in self._network.arguments}
        results = self._run(inputs)
        return dict(zip(self._network.results, (result.cpu().numpy() for result in results), strict=True))

    def _replay(self, graph: _RecordGraph, feeds: Mapping[str, Array], rows: int) -> dict[str, Array]:
        with device_errors():
            for name, host in graph.host_inputs.items():
                array = host.numpy()
                array[:rows] = feeds[name]
                # Padding rows repeat a real one, whose numbers are valid.
                array[rows:] = array[0]
                graph.inputs[name].copy_(host, non_blocking=True)
            graph.graph.replay()
            for host, output in zip(graph.host_outputs, graph.outputs, strict=True):
                host.copy_(output, non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
        results = (host.numpy()[:rows] for host in graph.host_outputs)
        return dict(zip(self._network.results, results, strict=True))


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200].rstrip('.')}"


def _pinned(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)
