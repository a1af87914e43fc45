"""Tensors of a batch: examples as they were read become a tensor, or tensors by name, equally padded."""

from collections.abc import Mapping
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.record import Lengths, RecordSpec
from penstock.core.spec import Array
from penstock.train.data.columns import IGNORED
from penstock.train.data.examples import Examples
from penstock.train.data.trees import Tree, mapped

# n examples, B examples of a batch

_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


@final
class Collate:
    """Makes tensors of read examples.

    Args:
        examples: The set.
        to_max: Pad every batch to the largest lengths that are declared, so that all batches have one shape; otherwise
            each batch to its longest example.
    """

    def __init__(self, examples: Examples, *, to_max: bool = False) -> None:
        self.record, self.axes, self._to_max = examples.record, examples.target_axes, to_max

    def tensors(self, inputs_B: Array | Tensor, targets_B: Tree) -> tuple[Tree, Tree]:
        """Return the inputs and the targets of a batch as tensors.

        Args:
            inputs_B: Raw inputs, a tensor, or records `[B]`.
            targets_B: The tree of targets, arrays `[B, ...]`.

        Returns:
            The inputs: the tensor, or by name each tensor of the records and the lengths `[B]` of each dimension. The
            targets: tensors in a tree of the same form.
        """
        if self.record is None or isinstance(inputs_B, Tensor):
            return inputs_B, mapped(torch.from_numpy, targets_B)
        lengths = self.record.lengths(inputs_B)
        room = self.room(lengths)
        inputs = mapped(torch.from_numpy, self.record.batch(inputs_B, room) | lengths)
        return inputs, mapped(torch.from_numpy, cut(targets_B, self.axes, room))

    def room(self, lengths: Mapping[str, Lengths]) -> dict[str, int]:
        """Return the length of each dimension in a batch of examples of these lengths `[B]`."""
        return room_of(self.record, None if self._to_max else lengths)


def room_of(record: RecordSpec | None, lengths: Mapping[str, Lengths] | None) -> dict[str, int]:
    """Return the largest length of each dimension of a record, or of some examples of these lengths `[n]`."""
    dims = {} if record is None else record.dims
    return {name: int(dim) if lengths is None else max(1, int(lengths[name].max())) for name, dim in dims.items()}


def traced_tensors(inputs_B: Array, record: RecordSpec | None) -> Tree:
    """Return raw inputs as tensors to trace a network with: records by name, as long as they may be."""
    if record is None:
        return torch.from_numpy(inputs_B)
    return mapped(torch.from_numpy, record.batch(inputs_B, room_of(record, None)) | record.lengths(inputs_B))


def cut(tree: Tree, axes: Any, room: Mapping[str, int]) -> Tree:
    """Cut arrays or tensors `[B, ...]` of a tree to the lengths of a batch.

    Args:
        tree: The tree.
        axes: Of `Examples.target_axes`.
        room: The length of each dimension.
    """
    if axes is None:
        return tree
    if isinstance(tree, Mapping):
        return {name: cut(part, axes[name], room) for name, part in cast(Mapping[str, Any], tree).items()}
    if isinstance(tree, tuple):
        return tuple(cut(part, own, room) for part, own in zip(cast(tuple[Any, ...], tree), axes, strict=True))
    sizes = [slice(None) if name is None else slice(room[name]) for name in axes]
    part = tree[(slice(None), *sizes)]
    return np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part.contiguous()


def joined_tensors(trees: list[Tree], fills: bool) -> Tree:
    """Concatenate tensors `[B, ...]` at the same place of some trees, padded to the longest.

    Args:
        trees: The trees.
        fills: Pad whole numbers with -100, as targets, and not with 0.
    """

    def join(*parts_B: Tensor) -> Tensor:
        shapes = {part.shape[1:] for part in parts_B}
        if len(shapes) > 1:
            room = [max(sizes) for sizes in zip(*shapes, strict=True)]
            parts_B = tuple(padded(widened(part, fills), room, fills) for part in parts_B)
        return torch.cat(parts_B)

    return mapped(join, *trees)


def widened(part_B: Tensor, fills: bool) -> Tensor:
    """Return unsigned whole numbers as int64, which can hold -100, if `fills`."""
    return part_B.long() if fills and part_B.dtype in _UNSIGNED else part_B


def padded(part_B: Tensor, room: list[int], fills: bool) -> Tensor:
    """Pad a tensor `[B, ...]` to a shape `[B, *room]`; `fills` as of `joined_tensors`."""
    if list(part_B.shape[1:]) == room:
        return part_B
    whole = not (part_B.is_floating_point() or part_B.dtype == torch.bool)
    wide_B = part_B.new_full((len(part_B), *room), IGNORED if fills and whole else 0)
    wide_B[(slice(None), *(slice(size) for size in part_B.shape[1:]))] = part_B
    return wide_B
