"""A state at one moment: what of it this process keeps, and a copy of that from which it is written while steps go on.

What is cut is kept by every process, each its part; what all have alike is dealt out among them, about as many bytes to
each. A copy lies in memory as a safetensors file has it, so that nothing but writing is left to do.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from penstock.core.errors import TrainError
from penstock.train.placed import Shard

# What disks are written in without a copy of it in memory.
BLOCK_BYTES = 4096
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A tensor of a state as a process has it.

    Args:
        own: Its part; all of it where it is not cut.
        shard: How it is cut; None where all processes have it alike.
    """

    own: Tensor
    shard: Shard | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        if self.shard is None:
            return tuple(self.own.shape)
        dim = self.shard.dim
        return (*self.own.shape[:dim], sum(self.shard.sizes), *self.own.shape[dim + 1 :])

    def nbytes(self, rank: int) -> int:
        """Bytes of a process's part."""
        size = self.own.element_size()
        if self.shard is None:
            return size * self.own.numel()
        dim = self.shard.dim
        return size * self.shard.sizes[rank] * math.prod((*self.own.shape[:dim], *self.own.shape[dim + 1 :]))


def keepers(parts: Mapping[str, Part], size: int) -> dict[str, tuple[int, ...]]:
    """Which processes keep something of each tensor: all of one that is cut, else one. The same in every process.

    Args:
        parts: By path.
        size: How many processes there are.
    """
    found: dict[str, tuple[int, ...]] = {}
    loads = [0] * size
    for path, part in parts.items():
        if part.shard is not None:
            found[path] = tuple(range(size))
            loads = [load + part.nbytes(rank) for rank, load in enumerate(loads)]
    alike = [(-part.nbytes(0), path) for path, part in parts.items() if part.shard is None]
    for minus_bytes, path in sorted(alike):
        least = loads.index(min(loads))
        loads[least] -= minus_bytes
        found[path] = (least,)
    return found


def split(value: Any, path: str, parts: dict[str, Part]) -> Any:
    """A state as JSON values; its tensors go to `parts` by their paths.

    Raises:
        TrainError: It holds something else.
    """
    if isinstance(value, Tensor):
        value = Part(own=value)
    if isinstance(value, Part):
        if value.own.dtype not in _DTYPES:
            raise TrainError(
                f"{path} is a tensor of {value.own.dtype}, which a checkpoint cannot keep; choose another dtype."
            )
        parts[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        # JSON keys are text; an optimizer's state has whole numbers for keys.
        return {"items": [[key, split(item, f"{path}/{key}", parts)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [split(item, f"{path}/{index}", parts) for index, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TrainError(
        f"{path} holds a {type(value).__name__}, which a checkpoint cannot; keep tensors and plain values."
    )


@final
class Copy:
    """A copy of tensors in memory of the host, which is used again for the next copy.

    Of a GPU's tensors the copying goes on beside the host, on a stream of its own, into page-locked memory. What the
    GPU is asked for afterwards waits for it, for a step overwrites what is copied.

    Args:
        device: Where the tensors are.

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
        """Copy tensors in the place of those before.

        Args:
            tensors: By their names in the file.
        """
        # Widest numbers first, as the format wants it: each begins where its width divides the place.
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
        """The bytes of a safetensors file, filled up to whole blocks; for another thread than the one that steps."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._memory.numpy().data


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[int]]:
    """What a safetensors file begins with, and where each tensor begins behind it and the last one ends."""
    ends = [0]
    fields: dict[str, Any] = {}
    for name, tensor in tensors.items():
        ends.append(ends[-1] + tensor.numel() * tensor.element_size())
        fields[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends[-2:]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ends
