"""Network steps as CUDA graphs, one for each batch size, that read and write the slot table directly.

A graph reads the chunks of its rows from the slot table in page-locked host memory, gathers the states, runs the
network, scatters the states and writes the outputs into the slot table. The host only writes a few numbers per row and
launches the graph. The next batch is prepared while one runs, and the chunks of a late stream run back to back. Many
bytes, such as pictures, are staged: a kernel in a stream of its own brings them to the GPU while the batch before runs,
and the graph reads them there.
"""

import logging
import time
import weakref
from bisect import bisect_left
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import DeviceLost, ServeError
from penstock.core.spec import Array, TensorSpec
from penstock.kernels.table_rows import gather_rows, scatter_rows
from penstock.nn.streaming import mask_of
from penstock.runtime.executor import Executor, Rows, StepInput, StepOutput
from penstock.runtime.gpu.capture import capturing, graph_ms, stream_aside
from penstock.runtime.gpu.graph_cache import row_sizes
from penstock.runtime.gpu.precision import ONE_AT_A_TIME
from penstock.runtime.gpu.staged_rows import StagedRows
from penstock.runtime.streaming_executor import RunStep, StatefulNetwork

# B rows of the batch, E entries of the table, T frames of a chunk, U frames that come of them, S bytes of a state

log = logging.getLogger(__name__)

# Row metadata.
SLOT, LENGTH, FRESH, LAST, FROM, TO = range(6)
# Runs of the network before its graph is captured, in which libraries choose their kernels.
WARM_UPS = 2
# Batches that may be in flight at once.
IN_FLIGHT = 8
# A batch that takes longer without a graph is too large for any budget.
MAX_BATCH_S = 0.5
# Rows from this size on are staged, in batches that have at least so many bytes: below, a graph reads them in less time
# than a launch more takes.
STAGED_ROW_BYTES, STAGED_BATCH_BYTES = 16 << 10, 1 << 20
OUT_OF_MEMORY = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """Page-locked host buffers of one batch in flight.

    Args:
        metadata: `[6, B]` int64, by row: slot, length, first chunk, last chunk, input entry, output entry.
        status: `[2, B]` int64, by row: valid frames, and whether they are finite.
        entries: `[B]` int64: the input entries of rows that are staged.
        done: Recorded behind the batch.
    """

    metadata: Tensor
    status: Tensor
    entries: Tensor
    done: torch.cuda.Event


@dataclass(frozen=True, kw_only=True, slots=True)
class _GraphBucket:
    """The graph of one batch size.

    Args:
        metadata: As the stage's, on the GPU.
        status: As the stage's, on the GPU.
        graph: Computes the status and the outputs from the metadata and the chunks.
        stages: Used round-robin.
        ms: Its time alone on the GPU.
        network: What was captured, whose memory the graph reads.
    """

    metadata: Tensor
    status: Tensor
    graph: torch.cuda.CUDAGraph
    stages: tuple[_Stage, ...]
    ms: float
    network: StatefulNetwork


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFlight:
    stage: _Stage
    rows: int
    in_table: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _StateRead:
    """States on their way to the host.

    Args:
        host_BS: Page-locked.
        done: Recorded behind the copy.
    """

    host_BS: Tensor
    done: torch.cuda.Event


@final
class CudaGraphExecutor(Executor):
    """A network and the states of all its streams on a GPU.

    Args:
        network: The network with the states, on the GPU.
        max_rows: The largest batch.
        exact: Pad every batch to the largest, see `StreamingExecutor`.
        timed: Measure each graph, for `offer`.
        limit_s: Larger batches than the first that takes longer uncaptured have no graph.
    """

    runs_ahead = overlaps = True

    def __init__(
        self,
        network: StatefulNetwork,
        *,
        max_rows: int,
        exact: bool = False,
        timed: bool = False,
        limit_s: float = MAX_BATCH_S,
    ) -> None:
        self.input, self.output = network.input, network.output
        self.max_rows = min(max_rows, network.states.slots)
        self._timed, self._limit_s = timed, min(limit_s, MAX_BATCH_S)
        self._slots = network.states.slots
        self._device = network.device
        self._network = network
        self.state_bytes, self.state_layout = network.states.row_bytes, network.state_layout
        # Copies states to the host beside the next batch; made by the first.
        self._reading: torch.cuda.Stream | None = None
        self._chunks = _locked(self.max_rows, self.input)
        self._outputs = _locked(self.max_rows, self.output)
        self._adopted = self._serves = False
        self._staging: StagedRows | None = None
        self._sizes = [max_rows] if exact else row_sizes(self.max_rows)
        self._buckets: dict[int, _GraphBucket] = {}
        # In the order of the sizes: the size whose graph runs.
        self._fastest: list[int] = []
        # Those that others replaced: a batch of one may be under way.
        self._replaced: list[_GraphBucket] = []
        # A handle of torch, whose type has no public name.
        self._pool: Any = None
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
        bucket = self._buckets[self._fastest[bisect_left(self._sizes, rows)]]
        self._serves = True
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
        self._pad(metadata[:, rows:])
        staging = self._staging if rows * self.input.nbytes >= STAGED_BATCH_BYTES else None
        if staging is not None:
            stage.entries.numpy()[:rows] = metadata[FROM, :rows]
            metadata[FROM, :rows] = -1 - staging.stage(stage.entries[:rows]) - np.arange(rows)
        bucket.metadata.copy_(stage.metadata, non_blocking=True)
        bucket.graph.replay()
        if staging is not None:
            staging.mark_read()
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

    def done(self, begun: Any) -> bool:
        """See `Executor`."""
        assert isinstance(begun, _InFlight), begun
        with device_errors():
            return begun.stage.done.query()

    @torch.inference_mode()
    def begin_read(self, slots_B: Rows) -> Any:
        """See `Executor`: one gather behind the batches that were begun, and one copy beside those after it.

        Raises:
            DeviceLost: The GPU failed.
        """
        with torch.cuda.device(self._device), device_errors():
            packed_BS = self._network.states.pack(self._on_device(torch.from_numpy(slots_B)))
            host_BS = torch.empty(packed_BS.shape, dtype=torch.uint8, pin_memory=True)
            done = torch.cuda.Event()
            self._reading = self._reading or torch.cuda.Stream()
            self._reading.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._reading):
                host_BS.copy_(packed_BS, non_blocking=True)
                done.record()
            # Its memory is used again only once it was copied.
            packed_BS.record_stream(self._reading)
        return _StateRead(host_BS=host_BS, done=done)

    def read_done(self, begun: Any) -> bool:
        """See `Executor`."""
        assert isinstance(begun, _StateRead), begun
        with device_errors():
            return begun.done.query()

    def finish_read(self, begun: Any) -> Array:
        """See `Executor`."""
        assert isinstance(begun, _StateRead), begun
        with device_errors():
            begun.done.synchronize()
        return begun.host_BS.numpy()

    @torch.inference_mode()
    def write_states(self, slots_B: Rows, state_BS: Array) -> None:
        """See `Executor`.

        Raises:
            DeviceLost: The GPU failed.
        """
        with torch.cuda.device(self._device), device_errors():
            slot_B, packed_BS = (self._on_device(torch.from_numpy(each)) for each in (slots_B, state_BS))
            self._network.states.unpack(slot_B, packed_BS)

    def _on_device(self, host: Tensor) -> Tensor:
        return host.pin_memory().to(self._device, non_blocking=True)

    @property
    def graph_rows(self) -> list[int]:
        """The batch sizes that have a graph."""
        return sorted(self._buckets)

    @torch.inference_mode()
    def offer(self, rows: int, run: RunStep) -> float | None:
        """Replace the graph of a batch size by that of another `step`, if it is faster; from any thread.

        Args:
            rows: One of `graph_rows`, whose graph was not replaced before.
            run: Gives the same answers as the network.

        Returns:
            Its time in milliseconds; None if it is not faster.
        """
        network = self._network.run_by(run)
        with torch.cuda.device(self._device), ONE_AT_A_TIME:
            aside = stream_aside(self._device)
            metadata, status = self._buffers(rows)
            with torch.cuda.stream(aside):
                for each in (self._network, *[network] * WARM_UPS):
                    self._run(each, metadata, status)
            aside.synchronize()
            # In memory of its own and with the workspaces of another stream, because a graph of the shared pool, or one
            # that was offered before, may run meanwhile.
            present, trial = (self._captured(each, rows, None, aside) for each in (self._network, network))
            # Both now, because requests that are served meanwhile slow both down.
            share = trial.ms / present.ms
            if share >= 1:
                return None
            made = replace(self._captured(network, rows, self._pool), ms=share * self._buckets[rows].ms)
            self._replaced.append(self._buckets[rows])
            self._buckets[rows] = made
            self._choose_fastest()
        return made.ms

    def _run(self, network: StatefulNetwork, metadata: Tensor, status: Tensor) -> None:
        rows = metadata.shape[1]
        staged_SR = None if self._staging is None else self._staging.rows_SR
        chunk_BT = gather_rows(_flat(self._chunks), metadata[FROM], staged_SR).reshape(rows, *self.input.shape)
        step = network.step(chunk_BT, metadata[SLOT], metadata[LENGTH], metadata[FRESH] != 0, metadata[LAST] != 0)
        output_BU = step.output_BU.to(self._outputs.dtype).contiguous()
        scatter_rows(output_BU.reshape(rows, -1), metadata[TO], _flat(self._outputs))
        status[0] = step.length_B
        status[1] = _finite(output_BU, step.length_B)

    @torch.inference_mode()
    def _capture(self) -> None:
        with torch.cuda.device(self._device):
            sizes = self._warm_up()
            if self._adopted and self.input.nbytes >= STAGED_ROW_BYTES:
                self._stage(sizes)
            # From the largest down: the smaller graphs then fit into its memory pool.
            for size in reversed(sizes):
                self._buckets[size] = made = self._captured(self._network, size, self._pool)
                self._pool = self._pool or made.graph.pool()
        self._sizes = sizes
        self._choose_fastest()
        self.max_rows = min(self.max_rows, sizes[-1])

    def _stage(self, sizes: list[int]) -> None:
        try:
            self._staging = StagedRows(_flat(self._chunks), sizes[-1], self._device)
        except torch.cuda.OutOfMemoryError:
            log.info("rows are read in the table, because the memory of the GPU does not suffice to stage them")
            torch.cuda.empty_cache()
            return
        self.staging_ns = self._staging.row_ns()
        # Compile the kernel that reads it, before the capture.
        self._warm_up_s(sizes[0], stream_aside(self._device))

    def _choose_fastest(self) -> None:
        """For each batch size, choose the fastest graph that holds it: a larger one may have been replaced already."""
        fastest = list(self._sizes)
        for index in reversed(range(len(fastest) - 1)):
            after = fastest[index + 1]
            if self._buckets[after].ms < self._buckets[fastest[index]].ms:
                fastest[index] = after
        # One assignment, because another thread may run batches.
        self._fastest = fastest

    def _captured(
        self, network: StatefulNetwork, size: int, pool: Any, aside: torch.cuda.Stream | None = None
    ) -> _GraphBucket:
        """Capture a warm network; without a pool, in memory of its own, and in a stream aside."""
        metadata, status = self._buffers(size)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool, aside):
            self._run(network, metadata, status)
        # Once the executor serves, a graph in the shared pool must not be replayed by another thread.
        timed = self._timed and (aside is not None or not self._serves)
        ms = graph_ms(graph, aside or torch.cuda.current_stream()) if timed else inf
        stages = tuple(_stage(size) for _ in range(IN_FLIGHT))
        return _GraphBucket(metadata=metadata, status=status, graph=graph, stages=stages, ms=ms, network=network)

    def _warm_up(self) -> list[int]:
        """Warm up the sizes that memory and time allow, so that libraries have chosen their kernels."""
        affordable: list[int] = []
        # One for all sizes, because memory that was freed in a stream is used again in that one alone.
        aside = stream_aside(self._device)
        for size in self._sizes:
            try:
                taken_s = self._warm_up_s(size, aside)
            except torch.cuda.OutOfMemoryError:
                if not affordable:
                    raise
                break
            affordable.append(size)
            if taken_s > self._limit_s:
                break
        torch.cuda.empty_cache()
        return affordable

    def _warm_up_s(self, size: int, aside: torch.cuda.Stream) -> float:
        metadata, status = self._buffers(size)
        taken_s = 0.0
        with ONE_AT_A_TIME:
            aside.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    start_s = time.perf_counter()
                    self._run(self._network, metadata, status)
                    aside.synchronize()
                    taken_s = time.perf_counter() - start_s
            torch.cuda.current_stream(self._device).wait_stream(aside)
        return taken_s

    def _pad(self, metadata: Array) -> None:
        """Padding rows: the scratch slot behind the last, no frames, no output entry; staged, if that is the faster."""
        metadata[SLOT], metadata[LENGTH:TO], metadata[TO] = self._slots, 0, -1
        if self._staging is not None:
            metadata[FROM] = -1

    def _buffers(self, size: int) -> tuple[Tensor, Tensor]:
        metadata = torch.zeros(6, size, dtype=torch.int64)
        self._pad(metadata.numpy())
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
        entries=torch.zeros(size, dtype=torch.int64, pin_memory=True),
        done=torch.cuda.Event(),
    )


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
