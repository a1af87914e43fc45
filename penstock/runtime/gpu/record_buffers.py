"""Inputs and outputs of batches in single blocks of memory, and their copies between host and GPU.

Each side of a batch is one block, in which every tensor has its place, so that it takes one copy whatever the number
of tensors. Batch n+1 is written into page-locked memory of its own while batch n is computed. Large blocks are copied
in streams of their own, to and from memory on the GPU beside that of the graph; a copy on the GPU, in the order of the
graphs, then replaces the graph's inputs.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.spec import Array
from penstock.runtime.gpu.capture import reserved_stream

# Compiled code asks for aligned tensors.
ALIGNMENT = 256
# Batches that are begun and not finished.
IN_FLIGHT = 2
# Larger blocks are copied beside graphs; a smaller one takes less time than the order of two streams does.
BESIDE_BYTES = 1 << 20


class _Place(NamedTuple):
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    start: int
    end: int


@final
@dataclass(frozen=True, slots=True)
class Block:
    """The places of named tensors in one block of memory.

    Args:
        places: By name.
        nbytes: Size of the block.
    """

    places: dict[str, _Place]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[np.dtype[np.generic], tuple[int, ...]]]) -> Self:
        """Lay out tensors.

        Args:
            tensors: The dtype and shape of each.
        """
        places: dict[str, _Place] = {}
        end = 0
        for name, (dtype, shape) in tensors.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            places[name] = _Place(dtype, shape, start, end)
        return cls(places, max(end, 1))

    def arrays(self, memory: Array) -> dict[str, Array]:
        """Return the tensors in a block `[nbytes]` of uint8 on the host."""
        return {
            name: memory[place.start : place.end].view(place.dtype).reshape(place.shape)
            for name, place in self.places.items()
        }

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the tensors in a block `[nbytes]` of uint8 on any device."""
        return {
            name: memory[place.start : place.end].view(torch_dtype(place.dtype)).view(place.shape)
            for name, place in self.places.items()
        }


def torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    """Return torch's name of a dtype of NumPy."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def copy(to: Tensor, given: Tensor) -> None:
    """Queue a copy in the current stream."""
    to.copy_(given, non_blocking=True)


def memory(nbytes: int, device: torch.device, *, locked: bool = False) -> Tensor:
    """Allocate a block; `locked`: on the host, page-locked."""
    if locked:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


@final
class Stage:
    """Page-locked blocks of one batch in flight, and for large ones blocks on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.sent, self.received = _Side(), _Side()
        self.copied, self.computed, self.done = (torch.cuda.Event() for _ in range(3))

    def grow(self, sent_bytes: int, received_bytes: int) -> None:
        """Make room for blocks of these sizes; the stage holds no batch that is in flight."""
        self.sent.grow(sent_bytes, self._device)
        self.received.grow(received_bytes, self._device)


@final
class _Side:
    """Memory of the inputs, or of the outputs."""

    def __init__(self) -> None:
        self.host = torch.empty(0, dtype=torch.uint8)
        self.device = torch.empty(0, dtype=torch.uint8)

    def grow(self, nbytes: int, device: torch.device) -> None:
        if self.host.nbytes < nbytes:
            self.host = memory(nbytes, device, locked=True)
        if nbytes > BESIDE_BYTES and self.device.nbytes < nbytes:
            self.device = memory(nbytes, device)
            # What had this memory before may still run, in the stream of the graphs.
            torch.cuda.current_stream(device).synchronize()


@final
class Transfers:
    """The stages of a network's batches, and the streams of their copies.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free = [Stage(device) for _ in range(IN_FLIGHT)]
        # Nothing else may run in them: it would be captured, or delay the copies.
        self._reserved = [reserved_stream(device, 0) for _ in range(2)]
        self._sending, self._receiving = (each.stream for each in self._reserved)

    @staticmethod
    def nbytes(sent_bytes: int, received_bytes: int) -> int:
        """Memory on the GPU of the stages of batches of these sizes."""
        return IN_FLIGHT * sum(nbytes for nbytes in (sent_bytes, received_bytes) if nbytes > BESIDE_BYTES)

    @contextmanager
    def taken(self, sent_bytes: int, received_bytes: int) -> Generator[Stage]:
        """Take a stage that no batch has; where the block raises, it is free again."""
        assert self._free, "more batches were begun than an executor holds"
        stage = self._free.pop(0)
        try:
            stage.grow(sent_bytes, received_bytes)
            yield stage
        except BaseException:
            self.give_back(stage)
            raise

    def give_back(self, stage: Stage) -> None:
        """Take the stage of a batch that is finished; its outputs stay until another batch takes it."""
        self._free.append(stage)

    def send(self, stage: Stage, inputs: Tensor) -> None:
        """Queue the copy of the stage's inputs into those of a graph, behind the graphs before it."""
        nbytes = inputs.nbytes
        if nbytes <= BESIDE_BYTES:
            copy(inputs, stage.sent.host[:nbytes])
            return
        with torch.cuda.stream(self._sending):
            copy(stage.sent.device[:nbytes], stage.sent.host[:nbytes])
            stage.copied.record()
        torch.cuda.current_stream(self._device).wait_event(stage.copied)
        copy(inputs, stage.sent.device[:nbytes])

    def receive(self, stage: Stage, outputs: Tensor) -> None:
        """Queue the copy of a graph's outputs into those of the stage, and mark its end."""
        nbytes = outputs.nbytes
        if nbytes <= BESIDE_BYTES:
            copy(stage.received.host[:nbytes], outputs)
            stage.done.record()
            return
        copy(stage.received.device[:nbytes], outputs)
        stage.computed.record()
        with torch.cuda.stream(self._receiving):
            self._receiving.wait_event(stage.computed)
            copy(stage.received.host[:nbytes], stage.received.device[:nbytes])
            stage.done.record()
