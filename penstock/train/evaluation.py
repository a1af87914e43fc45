"""A network run over a whole set by all processes, each its share of every batch."""

from collections.abc import Callable

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
    *,
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
    at_once = world.size * max(1, min(AT_ONCE, AT_ONCE_BYTES // max(1, examples.input_nbytes)))
    counts = [len(places.indices_B) for places in one_pass(len(examples), at_once)]
    order = equal_shares(one_pass(len(examples), at_once), world.rank, world.size)
    on_bad, device = recipe.bad_examples, world.device
    outputs_of: list[Tensor] = []
    targets_of: list[Tensor] = []
    with ReadFeed(examples, order, workers=workers, on_bad=on_bad, device=device, notice=notice) as feed:
        feed.bad = bad
        for count, (inputs, targets) in zip(counts, feed, strict=True):
            outputs = module(inputs).float()
            if world.size > 1:
                outputs = gather_rows(world, "the outputs", outputs)[:count]
                targets = gather_rows(world, "the targets", targets)[:count]
            if world.is_first:
                outputs_of.append(outputs.cpu())
                targets_of.append(targets.cpu())
    # The first process has them all, the others none.
    return Seen(torch.cat(outputs_of), torch.cat(targets_of)) if outputs_of else None
