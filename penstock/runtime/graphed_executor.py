"""Steps a network on a CUDA GPU: one graph for each batch size, and chunks and outputs stay where they are.

A graph reads the rows' chunks from the slot table in the host's page-locked memory, joins the states, runs the network,
parts the states and puts the outputs into the slot table. What is left for the host is to write a few numbers a row and
to start it, so that the next batch is prepared while one runs, and a late stream's chunks can follow one another
without a wait in between.
"""

import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import DeviceLost, ServeError
from penstock.core.spec import Array, TensorSpec
from penstock.kernels.table_rows import gather_rows, scatter_rows
from penstock.nn.streaming import Streaming, mask_of
from penstock.runtime.executor import Batch, Executor, Result
from penstock.runtime.streaming_executor import JoinedNetwork

# B rows of the batch, E entries of the table, T frames of a chunk, U frames that come of them

# What is said of every row.
SLOT, LENGTH, FRESH, LAST, FROM, TO = range(6)
# Runs of the network before a graph of it is captured: libraries choose their kernels then.
WARM_UPS = 2
# Batches that may be under way at once.
IN_FLIGHT = 8
# A batch that takes longer than this, without a graph, is larger than any budget wants.
LONGEST_S = 0.5
OUT_OF_MEMORY = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """The host's side of one batch under way.

    Args:
        told: `[6, B]` int64: slot, length, whether a stream begins and ends, from and to which entry.
        answered: `[2, B]` int64: valid frames, and whether they are finite.
        done: Passed once it is through.
    """

    told: Tensor
    answered: Tensor
    done: torch.cuda.Event


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bucket:
    """One batch size.

    Args:
        told: As the stage's, on the GPU.
        answered: As the stage's, on the GPU.
        graph: From the one to the other.
        stages: Taken in turn.
    """

    told: Tensor
    answered: Tensor
    graph: torch.cuda.CUDAGraph
    stages: tuple[_Stage, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    stage: _Stage
    rows: int
    put: bool


@final
class GraphedExecutor(Executor):
    """A network and the states of all its streams on a GPU.

    Args:
        module: The network; a copy of it is run, as it is when served, without gradients.
        input: One raw chunk.
        output: What comes of one chunk at most.
        slots: How many streams there may be.
        max_rows: The largest batch.
        device: The GPU.
        dtype: In which precision the network and its states are; that of its parameters by default.
        exact: Fill every batch up to the largest, see `StreamingExecutor`.

    Raises:
        ApplicationError: The network makes something else of a chunk than the output.
    """

    runs_ahead = True

    def __init__(
        self,
        module: Streaming,
        input: TensorSpec,
        output: TensorSpec,
        *,
        slots: int,
        max_rows: int,
        device: torch.device | str = "cuda",
        dtype: torch.dtype | None = None,
        exact: bool = False,
    ) -> None:
        self.input, self.output = input, output
        self.max_rows = min(max_rows, slots)
        self._slots = slots
        # Named, because the current device is each thread's own.
        self._device = torch.device("cuda", torch.device(device).index or 0)
        self._network = JoinedNetwork(module, input, output, slots=slots, device=self._device, dtype=dtype)
        self._chunks = _locked(self.max_rows, input)
        self._outputs = _locked(self.max_rows, output)
        self._adopted = False
        self._sizes = [max_rows] if exact else _sizes(self.max_rows)
        self._buckets: dict[int, _Bucket] = {}
        self._turn = 0

    @property
    def state_bytes(self) -> int:
        """What one stream's state takes."""
        return self._network.states.nbytes_each

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

    def step(self, batch: Batch) -> Result:
        """See `Executor`."""
        return self.finish(self.begin(batch))

    @torch.inference_mode()
    def begin(self, batch: Batch) -> Any:
        """See `Executor`.

        Raises:
            DeviceLost: The GPU failed.
        """
        if not self._buckets:
            self._capture()
        with torch.cuda.device(self._device), _lost():
            return self._begun(batch)

    def _begun(self, batch: Batch) -> _Begun:
        rows = batch.slots_B.size
        assert rows <= self.max_rows, (rows, self.max_rows)
        bucket = self._buckets[next(size for size in self._sizes if size >= rows)]
        self._turn = (self._turn + 1) % IN_FLIGHT
        stage = bucket.stages[self._turn]
        told = stage.told.numpy()
        told[SLOT, :rows], told[LENGTH, :rows], told[FRESH, :rows] = batch.slots_B, batch.length_B, batch.fresh_B
        told[LAST, :rows] = False if batch.last_B is None else batch.last_B
        if batch.from_B is None:
            assert not self._adopted, "an adopted table's rows have entries"
            self._chunks.numpy()[:rows] = batch.chunk_B
            told[FROM, :rows] = told[TO, :rows] = np.arange(rows)
        else:
            told[FROM, :rows], told[TO, :rows] = batch.from_B, -1 if batch.to_B is None else batch.to_B
        _fill(told[:, rows:], self._slots)
        bucket.told.copy_(stage.told, non_blocking=True)
        bucket.graph.replay()
        stage.answered.copy_(bucket.answered, non_blocking=True)
        stage.done.record()
        return _Begun(stage=stage, rows=rows, put=batch.from_B is not None)

    def finish(self, begun: Any) -> Result:
        """See `Executor`.

        Raises:
            DeviceLost: The GPU failed.
        """
        assert isinstance(begun, _Begun), begun
        with _lost():
            # The one synchronisation of a batch.
            begun.stage.done.synchronize()
        length_B, finite_B = begun.stage.answered.numpy()[:, : begun.rows]
        return Result(
            output_B=self._outputs.numpy()[: 0 if begun.put else begun.rows],
            length_B=length_B,
            finite_B=finite_B != 0,
        )

    def saved(self, slot: int) -> list[Tensor]:
        """See `StateTable`."""
        return self._network.states.saved(slot)

    def restore(self, slot: int, saved: Sequence[Tensor]) -> None:
        """See `StateTable`."""
        self._network.states.restore(slot, saved)

    def _run(self, told: Tensor, answered: Tensor) -> None:
        rows = told.shape[1]
        chunk_BT = gather_rows(_flat(self._chunks), told[FROM]).reshape(rows, *self.input.shape)
        step = self._network.step(chunk_BT, told[SLOT], told[LENGTH], told[FRESH] != 0, told[LAST] != 0)
        output_BU = step.output_BU.to(self._outputs.dtype).contiguous()
        scatter_rows(output_BU.reshape(rows, -1), told[TO], _flat(self._outputs))
        answered[0] = step.length_B
        answered[1] = _finite(output_BU, step.length_B)

    @torch.inference_mode()
    def _capture(self) -> None:
        with torch.cuda.device(self._device):
            sizes = self._affordable()
            # From the largest down, so that the smaller ones fit into its memory.
            pool = None
            for size in reversed(sizes):
                told, answered = self._asked(size)
                graph = torch.cuda.CUDAGraph()
                # Other models of this process go on being served meanwhile, in another thread.
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._run(told, answered)
                pool = pool or graph.pool()
                stages = tuple(_stage(size) for _ in range(IN_FLIGHT))
                self._buckets[size] = _Bucket(told=told, answered=answered, graph=graph, stages=stages)
        self._sizes = sizes
        self.max_rows = min(self.max_rows, sizes[-1])

    def _affordable(self) -> list[int]:
        """The sizes that memory and time allow, each of them run, so that libraries have chosen their kernels."""
        affordable: list[int] = []
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        for size in self._sizes:
            told, answered = self._asked(size)
            taken_s = 0.0
            try:
                with torch.cuda.stream(aside):
                    for _ in range(WARM_UPS):
                        start_s = time.perf_counter()
                        self._run(told, answered)
                        aside.synchronize()
                        taken_s = time.perf_counter() - start_s
            except torch.cuda.OutOfMemoryError:
                if not affordable:
                    raise
                break
            affordable.append(size)
            if taken_s > LONGEST_S:
                break
        torch.cuda.current_stream(self._device).wait_stream(aside)
        torch.cuda.empty_cache()
        return affordable

    def _asked(self, size: int) -> tuple[Tensor, Tensor]:
        told = torch.zeros(6, size, dtype=torch.int64)
        _fill(told.numpy(), self._slots)
        return told.to(self._device), torch.zeros(2, size, dtype=torch.int64, device=self._device)


def _sizes(most: int) -> list[int]:
    """Powers of two, and from 64 on the middles between them, so that little of a batch is only filled up."""
    powers = [1 << power for power in range(most.bit_length())]
    middles = [power * 3 // 2 for power in powers if power >= 64]
    return [*sorted(size for size in (*powers, *middles) if size < most), most]


@contextmanager
def _lost() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        cause = " ".join(str(error).split())[:200].rstrip(".")
        raise DeviceLost(f"the GPU failed ({cause}); another process must be started.") from error


def _stage(size: int) -> _Stage:
    return _Stage(
        told=torch.zeros(6, size, dtype=torch.int64, pin_memory=True),
        answered=torch.zeros(2, size, dtype=torch.int64, pin_memory=True),
        done=torch.cuda.Event(),
    )


def _fill(told: Array, slots: int) -> None:
    """The rows that fill a batch up: of the slot behind the last, without frames, and put nowhere."""
    told[SLOT], told[LENGTH:TO], told[TO] = slots, 0, -1


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
    """Lock memory in its pages until the array is gone, so that the GPU reaches it."""
    runtime: Any = torch.cuda.cudart()
    address = column.ctypes.data
    problem = int(runtime.cudaHostRegister(address, column.nbytes, 0))
    if problem:
        why = "allow more locked memory (ulimit -l)" if problem == OUT_OF_MEMORY else "serve it with --device cpu"
        raise ServeError(
            f"{column.nbytes >> 20:,} MB of the slot table cannot be page-locked (CUDA error {problem}); {why}."
        )
    weakref.finalize(column, runtime.cudaHostUnregister, address)
