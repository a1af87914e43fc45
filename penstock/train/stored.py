"""Tensors of a checkpoint that still lie on the disk: each process reads what it needs of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.core.errors import TrainError


@final
class StoredFiles:
    """The files of a checkpoint, each opened when it is first read."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._open: dict[str, Any] = {}

    def read(self, file: str, path: str, where: tuple[slice, ...]) -> Tensor:
        """Some of a tensor, in memory of its own."""
        if file not in self._open:
            self._open[file] = cast(Any, safe_open)(self._place / file, framework="pt")
        opened = self._open[file]
        # Without dimensions there is nothing to take some of; what was read is still the file.
        found = opened.get_slice(path)[where] if where else opened.get_tensor(path)
        return found.clone()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor of a checkpoint, cut or whole.

    Args:
        at: The files of the checkpoint.
        path: Its name there.
        shape: Of the whole.
        dim: Along which it is cut.
        sizes: How much each file has along that.
        files: In which it lies, in their order.
    """

    at: StoredFiles
    path: str
    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]
    files: tuple[str, ...]

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def whole(self) -> Tensor:
        """All of it."""
        return self.part(0, 0, self.shape[0]) if self.shape else self.at.read(self.files[0], self.path, ())

    def part(self, dim: int, first: int, size: int) -> Tensor:
        """Some of it, along any dimension.

        Raises:
            TrainError: It has not so much.
        """
        if dim >= self.ndim or first + size > self.shape[dim]:
            raise TrainError(
                f"the checkpoint does not fit the network: {self.path} has the shape {list(self.shape)}, of which "
                f"{first}..{first + size} along dimension {dim} are asked for."
            )
        found: list[Tensor] = []
        begins = 0
        for file, here in zip(self.files, self.sizes, strict=True):
            where = [slice(None)] * self.ndim
            low, high = 0, here
            if dim == self.dim:
                low, high = max(first - begins, 0), min(first + size - begins, here)
                where[dim] = slice(low, high)
            else:
                where[dim] = slice(first, first + size)
            if low < high:
                found.append(self.at.read(file, self.path, tuple(where)))
            begins += here
        if not found:
            return self.at.read(self.files[0], self.path, tuple([slice(None)] * self.ndim)).narrow(dim, 0, 0)
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)


def read_whole(value: Any) -> Any:
    """A state with its tensors read, all of each."""
    if isinstance(value, Stored):
        return value.whole()
    if isinstance(value, dict):
        return {key: read_whole(item) for key, item in value.items()}
    return [read_whole(item) for item in value] if isinstance(value, list) else value
