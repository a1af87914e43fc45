"""Errors of a device during training, as sentences that name the fix."""

import re
from collections.abc import Generator
from contextlib import contextmanager

import torch

from penstock.core.errors import TrainError
from penstock.train.parallel.world import World
from penstock.train.recipe import Recipe

# Messages of the CUDA and CPU allocators.
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_ON_CPU = "DefaultCPUAllocator"
_NOT_DETERMINISTIC = re.compile(r"(\S+)(?: with .*?)? does not have a deterministic implementation")


@contextmanager
def explained(recipe: Recipe, world: World) -> Generator[None]:
    """Turn errors of the device in the context into sentences.

    Args:
        recipe: The training recipe.
        world: The processes.

    Raises:
        TrainError: The device has too little memory, or no deterministic algorithm for an operation.
        RuntimeError: Any other error, unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if isinstance(error, torch.OutOfMemoryError) or _ON_CPU in said:
            raise TrainError(_memory_sentence(said, recipe, world)) from None
        found = _NOT_DETERMINISTIC.search(said)
        if found is None:
            raise
        raise TrainError(
            f"{found[1]} has no deterministic algorithm on {_where(world)}; give --no-deterministic, or "
            f"deterministic=False in the recipe: a resumed run then ends near the undisturbed one, not at it."
        ) from None


def _memory_sentence(said: str, recipe: Recipe, world: World) -> str:
    requested = _REQUESTED.search(said)
    who = "a step" if world.size == 1 else world.label
    more = f" (it requested {requested[1]} more)" if requested else ""
    return (
        f"{who} needs more memory than {_where(world)} has{more}; lower the batch size "
        f"(batch_size={recipe.batch_size:,}), compute it in more micro-batches (accumulation_steps="
        f"{recipe.execution.accumulation_steps}), or in fewer bits (precision={recipe.precision!r})."
    )


def _where(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "the CPU"
