"""Networks of several tensors or of lengths that vary, as CUDA graphs by rows and length.

At start the graphs of the grid are captured, from the largest down, within limits of time and memory. While serving, a
batch is padded to the rows and rooms of its shape; the next one is prepared and copied while it runs. A shape without a
graph runs uncaptured; at its third use it is captured, at most one shape a second, so that the requests of others wait
for one uncaptured pass of launches more. Compiled shapes replace graphs one by one, where faster.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from penstock.core.named_arrays import chunks_of, feeds_of, fill
from penstock.core.record import ChunkSpec, Lengths, RecordSpec
from penstock.core.spec import Array
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.runtime.gpu.capture import stream_aside
from penstock.runtime.gpu.cuda_graph_executor import WARM_UPS, device_errors
from penstock.runtime.gpu.gpu_network import GpuNetwork
from penstock.runtime.gpu.graph_cache import GraphCache, GraphShapes, Shape, fastest_holding, size_of
from penstock.runtime.gpu.precision import ONE_AT_A_TIME
from penstock.runtime.gpu.record_buffers import Stage, Transfers
from penstock.runtime.gpu.record_graphs import RecordGraph, RecordGraphs, Trial

# B rows of the batch

log = logging.getLogger(__name__)

# Time for the graphs of the grid at start.
CAPTURE_S = 15.0
# At each length, larger batches than the first that takes this long gain nothing from a graph.
MAX_CAPTURED_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFlight:
    stage: Stage
    graph: RecordGraph
    rows: int
    lengths: dict[str, Lengths]


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
        timed: Measure each graph, for `offer`.

    Attributes:
        uncaptured_batches: Batches that ran without a graph.
        reason: Why nothing is captured; None where graphs are.
        shapes: The shapes of batches.
    """

    pads_to_edges = runs_ahead = overlaps = True

    def __init__(
        self,
        network: GpuNetwork,
        input: ChunkSpec,
        output: ChunkSpec,
        *,
        max_rows: int,
        device: str,
        limit_bytes: int,
        timed: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.input, self.output, self.max_rows = input, output, max_rows
        self._network = network
        self._device = torch.device(device)
        self._dims = list(input.dims) if isinstance(input, RecordSpec) else []
        self.shapes = GraphShapes(input.dims.values() if isinstance(input, RecordSpec) else (), max_rows)
        self._graphs = RecordGraphs(network, input, output, self.shapes, self._device, timed=timed)
        self._cache: GraphCache[RecordGraph] = GraphCache(limit_bytes)
        # The shape whose graph runs, by shape.
        self._fastest: dict[Shape, Shape] = {}
        self._transfers = Transfers(self._device)
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

    @property
    def graph_shapes(self) -> dict[Shape, int]:
        """Uses of each shape that has a graph; from any thread."""
        return {shape: self._cache.uses[shape] for shape in self._cache.graphs}

    def step(self, batch: StepInput) -> StepOutput:
        """Run the network once for the rows of the batch.

        Raises:
            DeviceLost: The GPU failed.
        """
        return self.finish(self.begin(batch))

    def predict(self, chunk_B: Array) -> Array:
        """Run raw inputs `[B, *input.shape]`; returns outputs `[B, *output.shape]`, which are the caller's."""
        with torch.cuda.device(self._device), torch.inference_mode():
            return self.finish(self._begun(chunk_B)).output_B.copy()

    def begin(self, batch: StepInput) -> Any:
        """See `Executor`; a batch without a graph is computed here.

        Raises:
            DeviceLost: The GPU failed.
        """
        with torch.cuda.device(self._device), torch.inference_mode():
            return self._begun(batch.chunk_B)

    def done(self, begun: Any) -> bool:
        """See `Executor`."""
        with device_errors():
            return not isinstance(begun, _InFlight) or begun.stage.done.query()

    def finish(self, begun: Any) -> StepOutput:
        """See `Executor`.

        Raises:
            DeviceLost: The GPU failed.
        """
        if isinstance(begun, StepOutput):
            return begun
        assert isinstance(begun, _InFlight), begun
        with device_errors():
            # The only host synchronization of a batch.
            begun.stage.done.synchronize()
        self._transfers.give_back(begun.stage)
        found = begun.graph.found.arrays(begun.stage.received.host.numpy()) | begun.graph.constants
        named = {name: array[: begun.rows] for name, array in found.items()}
        return StepOutput(output_B=chunks_of(self.output, named, begun.lengths))

    def _begun(self, chunk_B: Array) -> StepOutput | _InFlight:
        # Copies, because the chunks of the next batch replace these while it runs.
        lengths = {name: chunk_B[name].copy() for name in self._dims}
        shape = self._shape_of(chunk_B)
        graph = self._graph_for(shape)
        if graph is None:
            return self._run_uncaptured(chunk_B, shape)
        return self._replay(graph, chunk_B, lengths)

    def _shape_of(self, chunk_B: Array) -> Shape:
        longest = {name: max(1, int(chunk_B[name].max())) for name in self._dims}
        return self.shapes.holding(len(chunk_B), longest)

    def _graph_for(self, shape: Shape) -> RecordGraph | None:
        self._cache.uses[shape] += 1
        graph = self._cache.get(self._fastest.get(shape, shape)) or self._cache.get(shape)
        if graph is not None or self.reason is not None or not self._cache.due(shape, self._clock_s()):
            return graph
        with ONE_AT_A_TIME:
            graph = self._captured(shape, self._trial(shape, 1))
        self._choose_fastest()
        return graph

    def _replay(self, graph: RecordGraph, chunk_B: Array, lengths: dict[str, Lengths]) -> _InFlight:
        rows = len(chunk_B)
        with device_errors(), self._transfers.taken(graph.given.nbytes, graph.found.nbytes) as stage:
            arrays = graph.given.arrays(stage.sent.host.numpy())
            if isinstance(self.input, RecordSpec):
                fill(self.input, chunk_B, arrays)
            else:
                arrays[self.input.name][:rows] = chunk_B
            for name in lengths.keys() & arrays.keys():
                arrays[name][:rows] = lengths[name]
            for array in arrays.values():
                # Padding rows repeat a real one, whose numbers are valid.
                array[rows:] = array[0]
            self._transfers.send(stage, graph.inputs)
            graph.graph.replay()
            self._transfers.receive(stage, graph.outputs)
        return _InFlight(stage=stage, graph=graph, rows=rows, lengths=lengths)

    def _run_uncaptured(self, chunk_B: Array, shape: Shape) -> StepOutput:
        self.uncaptured_batches += 1
        feeds, lengths = self._feeds(chunk_B, shape)
        inputs = [torch.from_numpy(feeds[name]).to(self._device) for name in self._network.arguments]
        named = {
            name: result.cpu().numpy()
            for name, result in zip(self._network.results, self._network(*inputs), strict=True)
        }
        return StepOutput(output_B=chunks_of(self.output, named, lengths))

    def capture_for(self, chunk_B: Array) -> bool:
        """Capture the shape of a batch now; returns whether there is a graph of it."""
        with torch.cuda.device(self._device), torch.inference_mode(), ONE_AT_A_TIME:
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
                    break
                # Graphs that are used must not be dropped for some that may never be.
                if self._cache.get(shape) is None and self._fits(shape, trials[shape]):
                    self._captured(shape, trials[shape])
        self._choose_fastest()
        log.info("%d CUDA graphs take about %d MB", self.graphs, self._cache.nbytes >> 20)

    def offer(self, shape: Shape, compiled: nn.Module) -> float | None:
        """Replace the graph of a shape by that of another network, if it is faster; from any thread.

        Args:
            shape: A shape whose graph was not replaced before.
            compiled: Gives the same answers as the network, and takes and gives the same tensors.

        Returns:
            Its time in milliseconds; None if it is not faster, or there is no such graph any more.
        """
        with torch.cuda.device(self._device), torch.inference_mode(), ONE_AT_A_TIME:
            present = self._cache.graphs.get(shape)
            if present is None:
                return None
            aside = stream_aside(self._device)
            # Both, so that the libraries of neither allocate a workspace for this stream in the memory of a graph.
            self._graphs.trial(shape, 1, aside)
            trial = self._graphs.trial(shape, WARM_UPS, aside, compiled)
            # In memory of its own and with the workspaces of another stream, because graphs of the shared pool run
            # meanwhile. Both now, because requests that are served meanwhile slow both down.
            other, plain = (
                self._graphs.make(shape, trial, None, network=each, aside=aside) for each in (compiled, None)
            )
            share = other.ms / plain.ms
            if share >= 1:
                return None
            if not self._cache.fits(0, self._graphs.peak_bytes(shape, trial)):
                self._say_limit()
                return None
            graph = self._graphs.capture(present, self._pool, compiled)
            made = replace(present, graph=graph, ms=share * present.ms, network=compiled)
            self._cache.replace(shape, made, self._graphs.peak_bytes(shape, trial))
            self._choose_fastest()
        return made.ms

    def _choose_fastest(self) -> None:
        # One assignment, because another thread may run batches.
        self._fastest = fastest_holding({shape: graph.ms for shape, graph in self._cache.graphs.items()})

    def _trials(self, end_s: float) -> dict[Shape, Trial]:
        """Warm up the shapes that memory and time allow, so that libraries have chosen their kernels."""
        trials: dict[Shape, Trial] = {}
        for column in self.shapes.columns():
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

    def _trial(self, shape: Shape, runs: int) -> Trial | None:
        """Run a shape uncaptured on an example of zeros; returns None, and gives the shape up, where that fails."""
        with ONE_AT_A_TIME:
            try:
                return self._graphs.trial(shape, runs, stream_aside(self._device))
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                self._give_up_shape(shape, "the memory of the GPU does not suffice")
            except Exception as error:  # noqa: BLE001
                # The network is the application's code, which may raise anything on zeros; requests have other numbers.
                self._give_up_shape(shape, f"the network raised on an example of zeros: {_cause(error)}")
        return None

    def _fits(self, shape: Shape, trial: Trial) -> bool:
        fits = self._cache.fits(self._graphs.own_bytes(shape), self._graphs.peak_bytes(shape, trial))
        if not fits:
            self._say_limit()
        return fits

    def _captured(self, shape: Shape, trial: Trial | None) -> RecordGraph | None:
        if trial is None:
            return None
        own_bytes, peak_bytes = self._graphs.own_bytes(shape), self._graphs.peak_bytes(shape, trial)
        gone = self._cache.make_room(own_bytes, peak_bytes)
        if gone is None:
            self._cache.give_up(shape)
            self._say_limit()
            return None
        if gone:
            self._say_limit()
            # A batch of one may be under way.
            torch.cuda.current_stream(self._device).synchronize()
            for each in gone:
                each.graph.reset()
            del gone
        if not self.graphs:
            self._pool = None
        try:
            made = self._graphs.make(shape, trial, self._pool)
        except torch.cuda.OutOfMemoryError:
            self._cache.give_up(shape)
            self._say_limit()
            return None
        except RuntimeError as error:
            # The network ran uncaptured; here it synchronizes with the host, or does something else that graphs lack.
            self._give_up(error)
            return None
        self._pool = self._pool or made.graph.pool()
        self._cache.put(shape, made, own_bytes, peak_bytes)
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
        sizes = {"rows": shape[0], **self.shapes.rooms(shape)}
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

    def _feeds(self, chunk_B: Array, shape: Shape) -> tuple[dict[str, Array], dict[str, Lengths]]:
        if not isinstance(self.input, RecordSpec):
            return feeds_of(self.input, chunk_B)[0], {}
        lengths = self.input.lengths(chunk_B)
        return self.input.batch(chunk_B, self.shapes.rooms(shape)) | lengths, lengths


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200].rstrip('.')}"
