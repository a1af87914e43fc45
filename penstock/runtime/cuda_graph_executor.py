"""Network steps as CUDA graphs, one for each batch size, that read and write the slot table directly.

A graph reads the chunks of its rows from the slot table in page-locked host memory, gathers the states, runs the
network, scatters the states and writes the outputs into the slot table. The host only writes a few numbers per row and
launches the graph. The next batch is prepared while one runs, and the chunks of a late stream run back to back.
"""

import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import DeviceLost, ServeError
from penstock.core.spec import Array, TensorSpec
from penstock.kernels.table_rows import gather_rows, scatter_rows
from penstock.nn.streaming import mask_of
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.runtime.graph_cache import row_sizes
from penstock.runtime.streaming_executor import StatefulNetwork

# B rows of the batch, E entries of the table, T frames of a chunk, U frames that come of them

# Row metadata.
SLOT, LENGTH, FRESH, LAST, FROM, TO = range(6)
# Runs of the network before its graph is captured, in which libraries choose their kernels.
WARM_UPS = 2
# Batches that may be in flight at once.
IN_FLIGHT = 8
# A batch that takes longer without a graph is too large for any budget.
MAX_BATCH_S = 0.5
OUT_OF_MEMORY = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """Page-locked host buffers of one batch in flight.

    Args:
        metadata: `[6, B]` int64, by row: slot, length, first chunk, last chunk, input entry, output entry.
        status: `[2, B]` int64, by row: valid frames, and whether they are finite.
        done: Recorded behind the batch.
    """

    metadata: Tensor
    status: Tensor
    done: torch.cuda.Event


@dataclass(frozen=True, kw_only=True, slots=True)
class _GraphBucket:
    """The graph of one batch size.

    Args:
        metadata: As the stage's, on the GPU.
        status: As the stage's, on the GPU.
        graph: Computes the status and the outputs from the metadata and the chunks.
        stages: Used round-robin.
    """

    metadata: Tensor
    status: Tensor
    graph: torch.cuda.CUDAGraph
    stages: tuple[_Stage, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFlight:
    stage: _Stage
    rows: int
    in_table: bool


@final
class CudaGraphExecutor(Executor):
    """A network and the states of all its streams on a GPU.

    Args:
        network: The network with the states, on the GPU.
        max_rows: The largest batch.
        exact: Pad every batch to the largest, see `StreamingExecutor`.
    """

    runs_ahead = True

    def __init__(self, network: StatefulNetwork, *, max_rows: int, exact: bool = False) -> None:
        self.input, self.output = network.input, network.output
        self.max_rows = min(max_rows, network.states.slots)
        self._slots = network.states.slots
        self._device = network.device
        self._network = network
        self._chunks = _locked(self.max_rows, self.input)
        self._outputs = _locked(self.max_rows, self.output)
        self._adopted = False
        self._sizes = [max_rows] if exact else row_sizes(self.max_rows)
        self._buckets: dict[int, _GraphBucket] = {}
        self._next_stage = 0

    def adopt(self, input_E: Array, output_E: Array) -> bool:
        """See `Executor`.

        Raises:
            ServeError: The memory cannot be page-locked.
        """
        assert not self._buckets, "adopt the table before the first step"
        for column in (input_E, output_E):
            _lock(column)
        self._chunks, self._outputs = torch.from_numpy(input_E), torch.from_numpy(output_E)
        self._adopted = True
        self._capture()
        return True

    def step(self, batch: StepInput) -> StepOutput:
        """See `Executor`."""
        return self.finish(self.begin(batch))

    @torch.inference_mode()
    def begin(self, batch: StepInput) -> Any:
        """See `Executor`.

        Raises:
            DeviceLost: The GPU failed.
        """
        if not self._buckets:
            self._capture()
        with torch.cuda.device(self._device), device_errors():
            return self._begun(batch)

    def _begun(self, batch: StepInput) -> _InFlight:
        rows = batch.slots_B.size
        assert rows <= self.max_rows, (rows, self.max_rows)
        bucket = self._buckets[next(size for size in self._sizes if size >= rows)]
        self._next_stage = (self._next_stage + 1) % IN_FLIGHT
        stage = bucket.stages[self._next_stage]
        metadata = stage.metadata.numpy()
        metadata[SLOT, :rows], metadata[LENGTH, :rows], metadata[FRESH, :rows] = (
            batch.slots_B,
            batch.length_B,
            batch.fresh_B,
        )
        metadata[LAST, :rows] = False if batch.last_B is None else batch.last_B
        if batch.from_B is None:
            assert not self._adopted, "an adopted table's rows have entries"
            self._chunks.numpy()[:rows] = batch.chunk_B
            metadata[FROM, :rows] = metadata[TO, :rows] = np.arange(rows)
        else:
            metadata[FROM, :rows], metadata[TO, :rows] = batch.from_B, -1 if batch.to_B is None else batch.to_B
        _pad(metadata[:, rows:], self._slots)
        bucket.metadata.copy_(stage.metadata, non_blocking=True)
        bucket.graph.replay()
        stage.status.copy_(bucket.status, non_blocking=True)
        stage.done.record()
        return _InFlight(stage=stage, rows=rows, in_table=batch.from_B is not None)

    def finish(self, begun: Any) -> StepOutput:
        """See `Executor`.

        Raises:
            DeviceLost: The GPU failed.
        """
        assert isinstance(begun, _InFlight), begun
        with device_errors():
            # The only host synchronization of a batch.
            begun.stage.done.synchronize()
        length_B, finite_B = begun.stage.status.numpy()[:, : begun.rows]
        return StepOutput(
            output_B=self._outputs.numpy()[: 0 if begun.in_table else begun.rows],
            length_B=length_B,
            finite_B=finite_B != 0,
        )

    def _run(self, metadata: Tensor, status: Tensor) -> None:
        rows = metadata.shape[1]
        chunk_BT = gather_rows(_flat(self._chunks), metadata[FROM]).reshape(rows, *self.input.shape)
        step = self._network.step(chunk_BT, metadata[SLOT], metadata[LENGTH], metadata[FRESH] != 0, metadata[LAST] != 0)
        output_BU = step.output_BU.to(self._outputs.dtype).contiguous()
        scatter_rows(output_BU.reshape(rows, -1), metadata[TO], _flat(self._outputs))
        status[0] = step.length_B
        status[1] = _finite(output_BU, step.length_B)

    @torch.inference_mode()
    def _capture(self) -> None:
        with torch.cuda.device(self._device):
            sizes = self._warm_up()
            # From the largest down: the smaller graphs then fit into its memory pool.
            pool = None
            for size in reversed(sizes):
                metadata, status = self._buffers(size)
                graph = torch.cuda.CUDAGraph()
                # Another thread of this process serves other models meanwhile.
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._run(metadata, status)
                pool = pool or graph.pool()
                stages = tuple(_stage(size) for _ in range(IN_FLIGHT))
                self._buckets[size] = _GraphBucket(metadata=metadata, status=status, graph=graph, stages=stages)
        self._sizes = sizes
        self.max_rows = min(self.max_rows, sizes[-1])

    def _warm_up(self) -> list[int]:
        """Warm up the sizes that memory and time allow, so that libraries have chosen their kernels."""
        affordable: list[int] = []
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        for size in self._sizes:
            metadata, status = self._buffers(size)
            taken_s = 0.0
            try:
                with torch.cuda.stream(aside):
                    for _ in range(WARM_UPS):
                        start_s = time.perf_counter()
                        self._run(metadata, status)
                        aside.synchronize()
                        taken_s = time.perf_counter() - start_s
            except torch.cuda.OutOfMemoryError:
                if not affordable:
                    raise
                break
            affordable.append(size)
            if taken_s > MAX_BATCH_S:
                break
        torch.cuda.current_stream(self._device).wait_stream(aside)
        torch.cuda.empty_cache()
        return affordable

    def _buffers(self, size: int) -> tuple[Tensor, Tensor]:
        metadata = torch.zeros(6, size, dtype=torch.int64)
        _pad(metadata.numpy(), self._slots)
        return metadata.to(self._device), torch.zeros(2, size, dtype=torch.int64, device=self._device)


@contextmanager
def device_errors() -> Generator[None]:
    """Turn an error of CUDA into `DeviceLost`."""
    try:
        yield
    except RuntimeError as error:
        cause = " ".join(str(error).split())[:200].rstrip(".")
        raise DeviceLost(f"the GPU failed ({cause}); restart the process.") from error


def _stage(size: int) -> _Stage:
    return _Stage(
        metadata=torch.zeros(6, size, dtype=torch.int64, pin_memory=True),
        status=torch.zeros(2, size, dtype=torch.int64, pin_memory=True),
        done=torch.cuda.Event(),
    )


def _pad(metadata: Array, slots: int) -> None:
    """Padding rows: the scratch slot behind the last, no frames, no output entry."""
    metadata[SLOT], metadata[LENGTH:TO], metadata[TO] = slots, 0, -1


def _finite(output_BU: Tensor, length_B: Tensor) -> Tensor | bool:
    if not output_BU.is_floating_point():
        return True
    finite = torch.isfinite(output_BU)
    if output_BU.ndim > 1:
        valid_BU = mask_of(length_B, output_BU.shape[1])
        finite |= ~valid_BU.reshape(*valid_BU.shape, *[1] * (output_BU.ndim - 2))
    return finite.flatten(1).all(1) if output_BU.ndim > 1 else finite


def _flat(column: Tensor) -> Tensor:
    return column.reshape(column.shape[0], -1)


def _locked(rows: int, spec: TensorSpec) -> Tensor:
    return torch.zeros(rows, *spec.shape, dtype=getattr(torch, spec.dtype), pin_memory=True)


def _lock(column: Array) -> None:
    """Page-lock an array for access by the GPU, until it is freed."""
    runtime: Any = torch.cuda.cudart()
    address = column.ctypes.data
    problem = int(runtime.cudaHostRegister(address, column.nbytes, 0))
    if problem:
        why = "allow more locked memory (ulimit -l)" if problem == OUT_OF_MEMORY else "serve it with --device cpu"
        raise ServeError(
            f"{column.nbytes >> 20:,} MB of the slot table cannot be page-locked (CUDA error {problem}); {why}."
        )
    weakref.finalize(column, runtime.cudaHostUnregister, address)
