"""Outputs and targets of a validation batch, gathered from all processes."""

from typing import Any

import torch
from torch import Tensor

from penstock.train.data.collate import padded, widened
from penstock.train.data.trees import Tree, leaves, mapped
from penstock.train.parallel.collectives import all_gather_rows
from penstock.train.parallel.world import World

# B examples of this rank


def rows_of_outputs(outputs: Any, count: int) -> tuple[Tree, list[bool]]:
    """Return a network's outputs in float32 or more, each with a row for every example.

    Args:
        outputs: What the network gives. What is no tensor becomes None.
        count: Examples of the batch.

    Returns:
        The tree of tensors `[B, ...]`; and for each, True if it is one number of the batch, repeated.
    """
    tensors = mapped(lambda part: part if isinstance(part, Tensor) else None, outputs)
    scalars = [part.ndim == 0 for part in leaves(tensors)]

    def rows(part: Tensor) -> Tensor:
        part = part.to(torch.promote_types(part.dtype, torch.float32)) if part.is_floating_point() else part
        return part.to(torch.promote_types(part.dtype, torch.float32)).expand(count) if part.ndim == 0 else part

    return mapped(rows, tensors), scalars


def gathered(world: World, name: str, tree: Tree, count: int, *, fills: bool) -> Tree:
    """All-gather tensors `[B, ...]` of a tree, padded to the longest of all ranks.

    Args:
        world: The processes.
        name: Of the tensors, for errors.
        tree: This rank's tensors, equally many rows on each rank.
        count: Examples of the batch; the rows after them are left out.
        fills: As of `joined_tensors`.
    """
    # Outputs may have a length of their own, such as the most boxes in a batch, where the inputs are of fixed size.
    shapes = iter(zip(*world.all_gather_objects([tuple(part.shape[1:]) for part in leaves(tree)]), strict=True))

    def rows(part_B: Tensor) -> Tensor:
        of_ranks = next(shapes)
        if len(set(of_ranks)) > 1:
            room = [max(sizes) for sizes in zip(*of_ranks, strict=True)]
            part_B = padded(widened(part_B, fills), room, fills)
        return all_gather_rows(world, name, part_B.contiguous())[:count]

    return mapped(rows, tree)
