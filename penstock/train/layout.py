"""A network laid over the processes of a world: the same weights everywhere, then each layer in its place."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.core.errors import TrainError
from penstock.train.batch_norm import has_batch_norm, norm_without_spread, synchronise
from penstock.train.flow import seen_in
from penstock.train.placed import Placed, place
from penstock.train.placements import Placement, check, choose, named_layers
from penstock.train.recipe import Recipe
from penstock.train.world import World, split_rows

# Enough to see where tensors go.
EXAMPLES_SEEN = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A network laid out, and what is said of it.

    Args:
        placed: The network with this process's parts, on its device.
        placements: By layer, what is not data-parallel.
        rows: How many examples of a batch each process computes at once.
        sentences: What was chosen, and why.
    """

    placed: Placed
    placements: dict[str, Placement]
    rows: tuple[int, ...]
    sentences: list[str]


def check_trainable(module: nn.Module) -> None:
    """See that a network has weights to train, and such that small steps do not get lost in them.

    Raises:
        TrainError: None of its parameters requires gradients, or one that does is of half precision.
    """
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    if not trained:
        raise TrainError("the network has no parameters that can be trained; see that some require gradients.")
    for name, weight in trained.items():
        if weight.dtype in (torch.bfloat16, torch.float16):
            kind = str(weight.dtype).removeprefix("torch.")
            raise TrainError(
                f"the parameter {name!r} is {kind}, in which most steps of an optimizer are too small to change it; "
                f"give the network in float32 (network.float()) and the recipe precision='bf16', which computes in "
                f"bf16 with weights of float32."
            )


def rows_of(recipe: Recipe, world: World) -> tuple[int, ...]:
    """How many examples each process computes at once.

    Raises:
        TrainError: A process would have none, or they cannot be accumulated in equal parts.
    """
    shares = split_rows(recipe.batch_size, world.size)
    if min(shares) < recipe.accumulate:
        parts = f" in {recipe.accumulate} parts" if recipe.accumulate > 1 else ""
        raise TrainError(
            f"a batch of {recipe.batch_size:,}{parts} is less than an example for each of "
            f"{world.size} processes; give a larger batch, or fewer processes."
        )
    if any(share % recipe.accumulate for share in shares):
        raise TrainError(
            f"a batch of {recipe.batch_size:,} over {world.size} processes is {min(shares):,} to {max(shares):,} "
            f"examples each, which are not accumulated in {recipe.accumulate} equal parts; change the batch size."
        )
    return tuple(share // recipe.accumulate for share in shares)


def lay_out(module: nn.Module, recipe: Recipe, world: World, examples_B: Tensor) -> Layout:
    """Lay a network over the processes.

    Args:
        module: The network; it is changed, and goes to the world's device.
        recipe: How it is trained.
        world: The processes.
        examples_B: Some raw inputs, `[B, ...]`, by which is found which layer feeds which.

    Raises:
        TrainError: The network's weights cannot be trained, a placement does not fit the network, the batch or the
            processes, or a batch norm would see one number at once.
    """
    check_trainable(module)
    rows = rows_of(recipe, world)
    module.to(world.device)
    if world.device.type == "cuda":
        # As its convolutions want them; else they turn them around in every step.
        module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if min(rows) == 1 and not (recipe.batch_norm == "synchronised" and world.size > 1):
        _check_spread(module, recipe, world, examples_B[:1].to(world.device))
    world.same([*module.parameters(), *module.buffers()], "the first weights")
    sentences: list[str] = []
    placements: dict[str, Placement] = {}
    if recipe.placements == "auto" and world.size > 1:
        seen = seen_in(module, examples_B[:EXAMPLES_SEEN].to(world.device))
        choice = choose(seen, sum(rows), world.size, recipe.loss)
        placements = choice.placements
        sentences += [f"Placement of {reason}" for reason in choice.reasons]
    elif recipe.placements and recipe.placements != "auto":
        seen = seen_in(module, examples_B[:EXAMPLES_SEEN].to(world.device))
        placements = named_layers(module, recipe.placements)
        check(module, placements, seen, rows, recipe.loss)
        sentences += [f"Placement of {name}: {placement.kind}." for name, placement in placements.items()]
    if world.size > 1 and has_batch_norm(module):
        sentences.append(_batch_norm(module, recipe, world, rows))
    placed = place(module, placements, world, rows)
    if world.size > 1 and world.device.type == "cuda":
        why = world.share_memory(recipe.peer_memory)
        way = f"by NCCL: {why}" if why else "over the GPUs' own memory where that takes it, else by NCCL"
        sentences.append(f"What layers exchange goes {way}.")
    return Layout(placed=placed, placements=placements, rows=rows, sentences=sentences)


def _check_spread(module: nn.Module, recipe: Recipe, world: World, example_B: Tensor) -> None:
    name = norm_without_spread(module, example_B)
    if name is None:
        return
    of = f"{recipe.batch_size:,}"
    of += f" over {world.size} processes" if world.size > 1 else ""
    of += f" in {recipe.accumulate} parts" if recipe.accumulate > 1 else ""
    or_else = ", or batch_norm='synchronised'" if world.size > 1 else ""
    raise TrainError(
        f"a batch of {of} gives the batch norm {name!r} one example at once, of which it has a single number a channel "
        f"and no spread to normalise by; give a batch size of {2 * world.size * recipe.accumulate:,} or more{or_else}."
    )


def _batch_norm(module: nn.Module, recipe: Recipe, world: World, rows: Sequence[int]) -> str:
    if recipe.batch_norm == "synchronised":
        synchronise(module, world, rows)
        return f"Batch norm by the {sum(rows):,} examples of all processes together."
    return (
        f"Batch norm by each process's own {min(rows):,} examples; batch_norm='synchronised' takes those of all "
        f"{sum(rows):,}."
    )


def cast_of(recipe: Recipe, device: torch.device) -> torch.autocast:
    """The precision in which a recipe's network is computed."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision)
    return torch.autocast(device.type, half, enabled=half is not None)
