"""Steps a streaming network for the streams of a batch: their states are joined for the step and parted again behind
it.

All states lie in one table, a tensor for each leaf of the state with the slots first, so that a stream's row of it is
found by its slot and never moves. A step gathers the rows of its batch, clears those of new streams, runs the network
and puts the rows back. On a CUDA GPU all of that is one graph for each batch size, and what is left for the host is
to write a few numbers and to start it.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ApplicationError
from penstock.core.spec import TensorSpec
from penstock.nn.streaming import State, Streaming, leaves, map_state
from penstock.runtime.executor import Batch, Executor, Result

# B rows of the batch, T frames of a chunk, U frames that come of them

# What is said of every row besides its chunk.
SLOT, LENGTH, FRESH, LAST = range(4)
# Runs of the network before a graph of it is captured: libraries choose their kernels then.
WARM_UPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bucket:
    """One batch size: where its rows are written, and what runs them.

    Args:
        told: `[4, B]` int64 on the host: slot, length, and whether a stream begins and ends.
        chunk: `[B, T, ...]` on the host.
        output: `[B, U, ...]` on the host.
        length: `[B]` on the host.
        graph: All of it, from the host and back; None where each step is started anew.
    """

    told: Tensor
    chunk: Tensor
    output: Tensor
    length: Tensor
    graph: torch.cuda.CUDAGraph | None


@final
class StreamingExecutor(Executor):
    """A streaming network and the states of all its streams.

    Args:
        module: The network; a copy of it is run, as it is when served, without gradients.
        input: One raw chunk, its frames first.
        output: What comes of one chunk at most, its frames first.
        slots: How many streams there may be.
        max_rows: The largest batch.
        device: Where the network runs.
        dtype: In which precision it and its states are; that of its parameters by default.

    Raises:
        ApplicationError: The network makes something else of a chunk than the output, or the device is not the
            process's current one.
    """

    def __init__(
        self,
        module: Streaming,
        input: TensorSpec,
        output: TensorSpec,
        *,
        slots: int,
        max_rows: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.input, self.output = input, output
        self.max_rows = min(max_rows, slots)
        self._device = torch.device(device)
        self._slots = slots
        self._module = copy.deepcopy(module).to(self._device, dtype).eval().requires_grad_(False)
        floats = [own.dtype for own in self._module.parameters() if own.is_floating_point()]
        self._precision = floats[0] if floats else torch.get_default_dtype()
        with torch.inference_mode():
            self._initial = self._module.initial_state(1)
            # One row more than there are slots, for the rows that fill a batch up.
            self._table = map_state(lambda leaf: leaf.expand(slots + 1, *leaf.shape[1:]).clone(), self._initial)
            self._check()
        self._sizes: Sequence[int] = ()
        self._buckets: dict[int, _Bucket] = {}
        if self._device.type == "cuda":
            if self._device.index not in (None, torch.cuda.current_device()):
                raise ApplicationError(
                    f"{self._device} is not the current device; an executor has a process of its own."
                )
            self._sizes = [1 << power for power in range(self.max_rows.bit_length()) if 1 << power < self.max_rows]
            self._sizes = [*self._sizes, self.max_rows]
            self._capture()

    @property
    def state_bytes(self) -> int:
        """What one stream's state takes."""
        return sum(leaf.nbytes for leaf in leaves(self._initial))

    @torch.inference_mode()
    def step(self, batch: Batch) -> Result:
        """See `Executor`."""
        rows = batch.slots_B.size
        assert rows <= self.max_rows, (rows, self.max_rows)
        size = next((size for size in self._sizes if size >= rows), rows)
        bucket = self._buckets.get(size) or self._bucket(size)
        told = bucket.told.numpy()
        told[SLOT, :rows], told[LENGTH, :rows], told[FRESH, :rows] = batch.slots_B, batch.length_B, batch.fresh_B
        told[LAST, :rows] = False if batch.last_B is None else batch.last_B
        told[SLOT, rows:], told[LENGTH:, rows:] = self._slots, 0
        bucket.chunk.numpy()[:rows] = batch.chunk_B
        if bucket.graph is None:
            self._run(bucket)
        else:
            bucket.graph.replay()
        if self._device.type == "cuda":
            # The one synchronisation of a tick.
            torch.cuda.current_stream(self._device).synchronize()
        return Result(output_B=bucket.output.numpy()[:rows], length_B=bucket.length.numpy()[:rows])

    def saved(self, slot: int) -> list[Tensor]:
        """A stream's state, leaf by leaf and on the host, to continue it elsewhere."""
        return [leaf[slot].clone().cpu() for leaf in leaves(self._table)]

    @torch.inference_mode()
    def restore(self, slot: int, saved: Sequence[Tensor]) -> None:
        """Continue in a slot what `saved` gave; the stream must not be fresh when it is stepped."""
        for leaf, value in zip(leaves(self._table), saved, strict=True):
            assert leaf.shape[1:] == value.shape, (leaf.shape, value.shape)
            leaf[slot] = value.to(leaf)

    def _run(self, bucket: _Bucket) -> None:
        told = bucket.told.to(self._device, non_blocking=True)
        chunk_BT = self._given(bucket.chunk)
        slot_B, fresh_B = told[SLOT], told[FRESH] != 0
        before = _merged(self._table, self._initial, slot_B, fresh_B)
        step = self._module.step(chunk_BT, told[LENGTH], before, told[LAST] != 0)
        for leaf, after in zip(leaves(self._table), leaves(step.state), strict=True):
            leaf.index_copy_(0, slot_B, after.to(leaf.dtype))
        bucket.output.copy_(step.output_BU, non_blocking=True)
        bucket.length.copy_(step.length_B, non_blocking=True)

    def _given(self, chunk_BT: Tensor) -> Tensor:
        chunk_BT = chunk_BT.to(self._device, non_blocking=True)
        # Whole numbers are samples or indices, of which the network makes what it wants.
        return chunk_BT.to(self._precision) if chunk_BT.is_floating_point() else chunk_BT

    def _bucket(self, size: int, graph: torch.cuda.CUDAGraph | None = None) -> _Bucket:
        pinned = self._device.type == "cuda"
        told = torch.zeros(4, size, dtype=torch.int64, pin_memory=pinned)
        told[SLOT] = self._slots
        kinds = (torch.from_numpy(np.zeros(0, spec.numpy_dtype)).dtype for spec in (self.input, self.output))
        chunk, output = (
            torch.zeros(size, *spec.shape, dtype=kind, pin_memory=pinned)
            for spec, kind in zip((self.input, self.output), kinds, strict=True)
        )
        length = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        return _Bucket(told=told, chunk=chunk, output=output, length=length, graph=graph)

    @torch.inference_mode()
    def _capture(self) -> None:
        # From the largest down, so that the smaller ones fit into its memory.
        pool = None
        for size in reversed(self._sizes):
            graph = torch.cuda.CUDAGraph()
            bucket = self._bucket(size, graph)
            aside = torch.cuda.Stream(self._device)
            aside.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    self._run(bucket)
            torch.cuda.current_stream(self._device).wait_stream(aside)
            with torch.cuda.graph(graph, pool=pool):
                self._run(bucket)
            pool = pool or graph.pool()
            self._buckets[size] = bucket

    def _check(self) -> None:
        bucket = self._bucket(1)
        chunk_BT = self._given(bucket.chunk)
        step = self._module.step(chunk_BT, torch.zeros(1, dtype=torch.int64, device=self._device), self._initial)
        if step.output_BU.shape[1:] != self.output.shape:
            raise ApplicationError(
                f"The network makes {list(step.output_BU.shape[1:])} of a chunk of {self.input.describe()}; the output "
                f"is {self.output.describe()}."
            )


def _merged(table: State, initial: State, slot_B: Tensor, fresh_B: Tensor) -> State:
    """The states of the batch's rows; where a stream begins, the initial one."""
    if isinstance(table, Tensor):
        assert isinstance(initial, Tensor)
        return torch.where(fresh_B.reshape(-1, *[1] * (table.ndim - 1)), initial, table[slot_B])
    return tuple(_merged(part, begin, slot_B, fresh_B) for part, begin in zip(table, initial, strict=True))
