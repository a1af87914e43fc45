"""Evaluate a network on a whole set; each process computes its share of every batch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from penstock.train.data.examples import Examples
from penstock.train.data.loader import ReadingLoader
from penstock.train.data.sampler import equal_shares, one_pass
from penstock.train.parallel.collectives import all_gather_rows
from penstock.train.parallel.world import World
from penstock.train.recipe import Predictions, Recipe

MAX_ROWS_PER_RANK = 1024
MAX_BYTES_PER_RANK = 1 << 26


def predict(
    module: nn.Module,
    examples: Examples,
    world: World,
    recipe: Recipe,
    *,
    workers: int,
    bad: dict[str, int],
    notify: Callable[[str], object] | None,
) -> Predictions | None:
    """Return a network's predictions for a whole set, in the first process; the others get None. Collective.

    Args:
        module: The network, in the mode in which it runs.
        examples: The set.
        world: The processes.
        recipe: Its `loading.bad_examples` applies to damaged examples.
        workers: Threads that read.
        bad: Counts of the examples that this process could not read, by name; updated.
        notify: Called with a sentence when an example is first found to be damaged.
    """
    batch_rows = world.size * max(1, min(MAX_ROWS_PER_RANK, MAX_BYTES_PER_RANK // max(1, examples.input_nbytes)))
    counts = [len(places.indices_B) for places in one_pass(len(examples), batch_rows)]
    order = equal_shares(one_pass(len(examples), batch_rows), world.rank, world.size)
    on_bad, device = recipe.loading.bad_examples, world.device
    all_outputs: list[Tensor] = []
    all_targets: list[Tensor] = []
    with ReadingLoader(examples, order, workers=workers, on_bad=on_bad, device=device, notify=notify) as loader:
        loader.bad = bad
        for count, (inputs, targets) in zip(counts, loader, strict=True):
            outputs = module(inputs).float()
            if world.size > 1:
                outputs = all_gather_rows(world, "the outputs", outputs)[:count]
                targets = all_gather_rows(world, "the targets", targets)[:count]
            if world.is_rank_zero:
                all_outputs.append(outputs.cpu())
                all_targets.append(targets.cpu())
    # Only the first process has outputs.
    return Predictions(torch.cat(all_outputs), torch.cat(all_targets)) if all_outputs else None
