"""Tensors of a checkpoint on disk; each process reads only the slices that it needs."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast, final

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.core.errors import TrainError


@final
class CheckpointFiles:
    """The files of a checkpoint, each opened at its first read."""

    def __init__(self, place: Path) -> None:
        self._open = cache(lambda file: cast(Any, safe_open)(place / file, framework="pt"))

    def read(self, file: str, path: str, where: tuple[slice, ...]) -> Tensor:
        """Read a slice of a tensor into new memory."""
        opened = self._open(file)
        # A scalar has no slices. The clone detaches the result from the mapped file.
        found = opened.get_slice(path)[where] if where else opened.get_tensor(path)
        return found.clone()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Args:
        at: The files of the checkpoint.
        path: The name of the tensor in them.
        shape: The shape of the whole tensor.
        dim: The sliced dimension.
        sizes: The size of each file's slice.
        files: The names of the files with its slices, in order.
    """

    at: CheckpointFiles
    path: str
    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]
    files: tuple[str, ...]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def whole(self) -> Tensor:
        """Read the whole tensor."""
        return self.part(0, 0, self.shape[0]) if self.shape else self.at.read(self.files[0], self.path, ())

    def part(self, dim: int, first: int, size: int) -> Tensor:
        """Read a slice along any dimension.

        Raises:
            TrainError: The tensor is smaller.
        """
        if dim >= self.ndim or first + size > self.shape[dim]:
            raise TrainError(
                f"the checkpoint does not fit the network: {self.path} has the shape {list(self.shape)}, and the "
                f"network needs {first}..{first + size} along dimension {dim}; resume with its own network."
            )
        found: list[Tensor] = []
        begins = 0
        where = [slice(None)] * self.ndim
        for file, here in zip(self.files, self.sizes, strict=True):
            low, high = first, first + size
            if dim == self.dim:
                low, high = max(first - begins, 0), min(first + size - begins, here)
            where[dim] = slice(low, high)
            if here and (low < high or dim != self.dim):
                found.append(self.at.read(file, self.path, tuple(where)))
            begins += here
        if not found:
            return self.at.read(self.files[0], self.path, tuple([slice(None)] * self.ndim)).narrow(dim, 0, 0)
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)


def read_tensors(value: Any) -> Any:
    """Read all tensors of a state."""
    if isinstance(value, StoredTensor):
        return value.whole()
    if isinstance(value, dict):
        return {key: read_tensors(item) for key, item in value.items()}
    return [read_tensors(item) for item in value] if isinstance(value, list) else value
