"""A network run over a whole set by all processes, each its share of every batch."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from penstock.train.collectives import gather_rows
from penstock.train.data import equal_shares, one_pass
from penstock.train.examples import Examples
from penstock.train.feed import ReadFeed
from penstock.train.recipe import Recipe, Seen
from penstock.train.world import World

AT_ONCE = 1024
AT_ONCE_BYTES = 1 << 26


def seen_of(
    module: nn.Module,
    examples: Examples,
    world: World,
    recipe: Recipe,
    workers: int,
    bad: dict[str, int],
    notice: Callable[[str], object] | None,
) -> Seen | None:
    """What a network makes of a whole set, in the first process; all must ask, and the others get None.

    Args:
        module: The network, as it is to be run.
        examples: The set.
        world: The processes.
        recipe: Says what becomes of examples that are damaged.
        workers: Threads that read.
        bad: What this process could not read, by name, is counted here.
        notice: Called with a sentence when an example is first found to be damaged.
    """
    parts = list(_parts(module, examples, world, recipe, workers, bad, notice))
    # The first process has them all, the others none.
    return Seen(*(torch.cat(part) for part in zip(*parts, strict=True))) if parts else None


def _parts(
    module: nn.Module,
    examples: Examples,
    world: World,
    recipe: Recipe,
    workers: int,
    bad: dict[str, int],
    notice: Callable[[str], object] | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The network's outputs and the targets, on the CPU; in the first process, the others help."""
    at_once = world.size * max(1, min(AT_ONCE, AT_ONCE_BYTES // max(1, examples.input_nbytes)))
    counts = [len(places.indices_B) for places in one_pass(len(examples), at_once)]
    order = equal_shares(one_pass(len(examples), at_once), world.rank, world.size)
    on_bad, device = recipe.bad_examples, world.device
    with ReadFeed(examples, order, workers=workers, on_bad=on_bad, device=device, notice=notice) as feed:
        feed.bad = bad
        for count, (inputs, targets) in zip(counts, feed, strict=True):
            outputs = module(inputs).float()
            if world.size > 1:
                outputs = gather_rows(world, "the outputs", outputs)[:count]
                targets = gather_rows(world, "the targets", targets)[:count]
            if world.is_first:
                yield outputs.cpu(), targets.cpu()
