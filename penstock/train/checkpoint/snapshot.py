"""Snapshot of a training state in host memory, in the layout of a safetensors file.

Every process writes its weight slices; replicated tensors are divided among the processes, about as many bytes to each.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from penstock.core.errors import TrainError
from penstock.train.parallel.tensor_parallel import WeightSlice

# Alignment of direct I/O.
BLOCK_BYTES = 4096
# The format's names of dtypes.
_BITS = {"float": (16, 32, 64), "int": (8, 16, 32, 64), "uint": (8, 16, 32, 64)}
_NUMBERS = {getattr(torch, f"{kind}{bits}"): f"{kind[0].upper()}{bits}" for kind in _BITS for bits in _BITS[kind]}
_OTHERS = {torch.bool: "BOOL", torch.bfloat16: "BF16", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3"}
_DTYPES = _NUMBERS | _OTHERS | {torch.float8_e5m2: "F8_E5M2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicedTensor:
    """A tensor of a state: this process's slice, or a replicated tensor.

    Args:
        own: The slice, or the whole tensor.
        slices: The slices of all processes; None if replicated.
    """

    own: Tensor
    slices: WeightSlice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        if self.slices is None:
            return tuple(self.own.shape)
        dim = self.slices.dim
        return (*self.own.shape[:dim], sum(self.slices.sizes), *self.own.shape[dim + 1 :])

    def nbytes(self, rank: int) -> int:
        """Count the bytes of a process's slice."""
        whole = self.own.element_size() * math.prod(self.shape)
        return whole if self.slices is None else whole // sum(self.slices.sizes) * self.slices.sizes[rank]


def writers_of(parts: Mapping[str, SlicedTensor], size: int) -> dict[str, tuple[int, ...]]:
    """Choose the ranks that write each tensor: all for a sliced tensor, else one. Every process chooses the same.

    Args:
        parts: By path.
        size: The number of processes.
    """
    found: dict[str, tuple[int, ...]] = {}
    loads = [0] * size
    for path, part in parts.items():
        if part.slices is not None:
            found[path] = tuple(range(size))
            loads = [load + part.nbytes(rank) for rank, load in enumerate(loads)]
    alike = [(-part.nbytes(0), path) for path, part in parts.items() if part.slices is None]
    for minus_bytes, path in sorted(alike):
        least = loads.index(min(loads))
        loads[least] -= minus_bytes
        found[path] = (least,)
    return found


def split(value: Any, path: str, parts: dict[str, SlicedTensor]) -> Any:
    """Convert a state to JSON values; its tensors are added to `parts` by path.

    Raises:
        TrainError: The state holds another value.
    """
    if isinstance(value, Tensor):
        value = SlicedTensor(own=value)
    if isinstance(value, SlicedTensor):
        if value.own.dtype not in _DTYPES:
            raise TrainError(
                f"{path} is a tensor of {value.own.dtype}, which a checkpoint cannot keep; choose another dtype."
            )
        parts[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        # A list of pairs, because an optimizer's state has integer keys.
        return {"items": [[key, split(item, f"{path}/{key}", parts)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [split(item, f"{path}/{index}", parts) for index, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TrainError(
        f"{path} holds a {type(value).__name__}, which a checkpoint cannot; keep tensors and plain values."
    )


@final
class HostCopy:
    """A copy of tensors in host memory, reused for the next copy.

    GPU tensors are copied asynchronously, on a second stream, into page-locked memory. Later work of the GPU waits for
    the copy, because a step overwrites the tensors.

    Args:
        device: The device of the tensors.

    Attributes:
        size: Bytes of the file.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._copied = torch.cuda.Event() if self._on_gpu else None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.size = 0

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors, replacing the last copy.

        Args:
            tensors: By their names in the file.
        """
        # Widest dtypes first: the format requires aligned tensors.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header, ends = _header({name: tensors[name] for name in order})
        self.size = len(header) + ends[-1]
        blocks = -(-self.size // BLOCK_BYTES) * BLOCK_BYTES
        if len(self._memory) != blocks:
            self._memory = torch.empty(0, dtype=torch.uint8)
            more = torch.empty(blocks + BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu)
            self._memory = more[-more.data_ptr() % BLOCK_BYTES :][:blocks]
        self._memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        data = self._memory[len(header) :]
        places = [
            data[first:end].view(tensors[name].dtype).view(tensors[name].shape)
            for name, first, end in zip(order, ends, ends[1:], strict=False)
        ]
        self._fill(places, [tensors[name] for name in order])

    def _fill(self, places: list[Tensor], tensors: list[Tensor]) -> None:
        if self._stream is None or self._copied is None:
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor)
            return
        steps = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(steps)
        with torch.cuda.stream(self._stream):
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
            self._copied.record()
        steps.wait_event(self._copied)

    def blocks(self) -> memoryview:
        """Wait for the copy and return the bytes of the safetensors file, padded to whole blocks."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._memory.numpy().data


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[int]]:
    """Make the header of a safetensors file, and the offsets of the tensors behind it."""
    ends = [0]
    fields: dict[str, Any] = {}
    for name, tensor in tensors.items():
        ends.append(ends[-1] + tensor.numel() * tensor.element_size())
        fields[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends[-2:]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ends
