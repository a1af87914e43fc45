"""Layout of a network over the processes: equal weights everywhere, then each layer by its placement."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from penstock.core.errors import TrainError
from penstock.core.wording.counted import counted
from penstock.train.data.trees import Tree
from penstock.train.parallel.batch_norm import has_batch_norm, norm_of_single_numbers, synchronize
from penstock.train.parallel.dataflow import Call, first_rows, linear_uses, plain_call
from penstock.train.parallel.planner import check, choose, named_layers
from penstock.train.parallel.tensor_parallel import ParallelModel, parallelize
from penstock.train.parallel.world import World, split_rows
from penstock.train.placement import Placement
from penstock.train.recipe import Recipe

# Examples of the forward pass that traces the dataflow.
TRACED_EXAMPLES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A network laid out.

    Args:
        model: The network with this process's weight slices, on its device.
        placements: By layer name; layers left out are data-parallel.
        rows: Examples of a batch that each process computes at once.
        notices: The choices with their reasons, for people.
    """

    model: ParallelModel
    placements: dict[str, Placement]
    rows: tuple[int, ...]
    notices: list[str]


def check_trainable(module: nn.Module) -> None:
    """Check that a network has parameters to train, in full precision.

    Raises:
        TrainError: No parameter requires gradients, or one that does has half precision.
    """
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    if not trained:
        raise TrainError("the network has no parameters to train; let some require gradients.")
    for name, weight in trained.items():
        if weight.dtype in (torch.bfloat16, torch.float16):
            kind = str(weight.dtype).removeprefix("torch.")
            raise TrainError(
                f"the parameter {name!r} is {kind}, in which most optimizer steps are too small to change it; keep the "
                f"network in float32 (network.float()) and give the recipe precision='bf16', which computes in bf16 "
                f"with float32 weights."
            )


def rows_of(recipe: Recipe, world: World) -> tuple[int, ...]:
    """Compute how many examples each process computes at once.

    Raises:
        TrainError: A process would have none, or gradients cannot be accumulated over equal parts.
    """
    shares, parts = split_rows(recipe.batch_size, world.size), recipe.execution.accumulation_steps
    if min(shares) < parts:
        in_parts = f" in {parts} parts" if parts > 1 else ""
        raise TrainError(
            f"a batch of {recipe.batch_size:,}{in_parts} is less than an example for each of "
            f"{counted(world.size, 'process', 'processes')}; give a larger batch, or fewer processes."
        )
    if any(share % parts for share in shares):
        least, most = min(shares), max(shares)
        each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        raise TrainError(
            f"a batch of {recipe.batch_size:,} over {counted(world.size, 'process', 'processes')} is {each} examples "
            f"each, which do not divide into {parts} equal parts (execution.accumulation_steps={parts}); change the "
            f"batch size or the number of parts."
        )
    return tuple(share // parts for share in shares)


def lay_out(
    module: nn.Module,
    recipe: Recipe,
    world: World,
    examples_B: Tree,
    call: Call = plain_call,
    frozen_norms: Collection[str] = (),
) -> Layout:
    """Lay a network out over the processes.

    Args:
        module: The network; modified and moved to the world's device.
        recipe: The training's recipe.
        world: The processes.
        examples_B: Some raw inputs, `[B, ...]`, to trace which layer feeds which.
        call: Calls the network with them.
        frozen_norms: Names of batch norms that use their running statistics.

    Raises:
        TrainError: The network cannot be trained, a placement does not fit the network, the batch or the processes, or
            a batch norm would get a single number for each channel.
    """
    check_trainable(module)
    rows = rows_of(recipe, world)
    module.to(world.device)
    if world.device.type == "cuda":
        # The memory format of cuDNN's convolutions, which otherwise transpose in every step.
        module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if min(rows) == 1 and not (recipe.parallel.batch_norm == "synchronized" and world.size > 1):
        _check_spread(module, recipe, world, first_rows(examples_B, 1, world.device), call, frozen_norms)
    world.broadcast([*module.parameters(), *module.buffers()], "the first weights")
    notices: list[str] = []
    placements: dict[str, Placement] = {}
    if recipe.parallel.placements == "auto" and world.size > 1:
        uses = linear_uses(module, first_rows(examples_B, TRACED_EXAMPLES, world.device), call)
        choice = choose(uses, sum(rows), world.size, recipe.loss)
        placements = choice.placements
        notices += [f"Placement of {reason}" for reason in choice.reasons]
    elif recipe.parallel.placements and recipe.parallel.placements != "auto":
        uses = linear_uses(module, first_rows(examples_B, TRACED_EXAMPLES, world.device), call)
        placements = named_layers(module, recipe.parallel.placements)
        check(module, placements, uses, rows, recipe.loss)
        notices += [f"Placement of {name}: {placement.kind}." for name, placement in placements.items()]
    if world.size > 1 and has_batch_norm(module):
        notices.append(_batch_norm(module, recipe, world, rows))
    model = parallelize(module, placements, world, rows)
    if world.size > 1 and world.device.type == "cuda":
        why = world.share_memory(recipe.parallel.peer_memory)
        way = f"NCCL: {why}" if why else "peer memory for small tensors, NCCL for others"
        notices.append(f"Collectives of layers use {way}.")
    return Layout(model=model, placements=placements, rows=rows, notices=notices)


def _check_spread(
    module: nn.Module, recipe: Recipe, world: World, example_B: Tree, call: Call, frozen_norms: Collection[str]
) -> None:
    name = norm_of_single_numbers(module, example_B, call, frozen_norms)
    if name is None:
        return
    of, parts = f"{recipe.batch_size:,}", recipe.execution.accumulation_steps
    of += f" over {world.size} processes" if world.size > 1 else ""
    of += f" in {parts} parts" if parts > 1 else ""
    or_else = ", or batch_norm='synchronized'" if world.size > 1 else ""
    raise TrainError(
        f"a batch of {of} gives the batch norm {name!r} a single number for each channel, whose variance is 0; give a "
        f"batch size of {2 * world.size * parts:,} or more{or_else}."
    )


def _batch_norm(module: nn.Module, recipe: Recipe, world: World, rows: Sequence[int]) -> str:
    if recipe.parallel.batch_norm == "synchronized":
        synchronize(module, world, rows)
        return f"Batch norm over the {sum(rows):,} examples of all processes."
    return (
        f"Batch norm over each process's own {min(rows):,} examples; batch_norm='synchronized' uses all {sum(rows):,}."
    )


def cast_of(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Create the autocast context of a recipe's precision."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision)
    return torch.autocast(device.type, half, enabled=half is not None)
