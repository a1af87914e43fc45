"""Outputs and targets of a validation batch, gathered from all processes."""

from typing import Any

from torch import Tensor

from penstock.train.data.collate import padded
from penstock.train.data.trees import Tree, leaves, mapped
from penstock.train.parallel.collectives import all_gather_rows
from penstock.train.parallel.world import World

# B examples of this rank


def rows_of_outputs(outputs: Any, count: int) -> tuple[Tree, list[bool]]:
    """Return a network's outputs in full precision, each with a row for every example.

    Args:
        outputs: What the network gives. What is no tensor becomes None.
        count: Examples of the batch.

    Returns:
        The tree of tensors `[B, ...]`; and for each, True if it is one number of the batch, repeated.
    """
    if isinstance(outputs, Tensor):
        return outputs.float(), [False]
    tensors = mapped(lambda part: part if isinstance(part, Tensor) else None, outputs)
    scalars = [part.ndim == 0 for part in leaves(tensors)]

    def rows(part: Tensor) -> Tensor:
        part = part.float() if part.is_floating_point() else part
        return part.float().expand(count) if part.ndim == 0 else part

    return mapped(rows, tensors), scalars


def gathered(world: World, name: str, tree: Tree, count: int, *, varies: bool, fills: bool) -> Tree:
    """All-gather tensors `[B, ...]` of a tree.

    Args:
        world: The processes.
        name: Of the tensors, for errors.
        tree: This rank's tensors, equally many rows on each rank.
        count: Examples of the batch; the rows after them are left out.
        varies: The tensors of the ranks may have different lengths; they are padded to the longest.
        fills: As of `joined_tensors`.
    """
    if not varies:
        return mapped(lambda part: all_gather_rows(world, name, part)[:count], tree)
    shapes = world.all_gather_objects([tuple(part.shape[1:]) for part in leaves(tree)])
    rooms = iter([[max(sizes) for sizes in zip(*of_ranks, strict=True)] for of_ranks in zip(*shapes, strict=True)])
    return mapped(
        lambda part: all_gather_rows(world, name, padded(part, next(rooms), fills).contiguous())[:count], tree
    )
