"""What a device refuses while a network is trained, in sentences that say what to change."""

import re
from collections.abc import Generator
from contextlib import contextmanager

import torch

from penstock.core.errors import TrainError
from penstock.train.recipe import Recipe
from penstock.train.world import World

# CUDA's and the CPU's allocators.
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_ON_CPU = "DefaultCPUAllocator"
_NOT_DETERMINISTIC = re.compile(r"(\S+)(?: with .*?)? does not have a deterministic implementation")


@contextmanager
def explained(recipe: Recipe, world: World) -> Generator[None]:
    """What is done inside trains a network; where its device has no memory or no algorithm for that, it is said.

    Args:
        recipe: How it is trained.
        world: The processes.

    Raises:
        TrainError: The device has too little memory, or no deterministic algorithm for an operation.
        RuntimeError: What else failed, as it was raised.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if isinstance(error, torch.OutOfMemoryError) or _ON_CPU in said:
            raise TrainError(_of_memory(said, recipe, world)) from None
        found = _NOT_DETERMINISTIC.search(said)
        if found is None:
            raise
        raise TrainError(
            f"{found[1]} has no deterministic algorithm on {_where(world)}; give --no-deterministic, or "
            f"deterministic=False in the recipe: a resumed run then ends near the undisturbed one, not at it."
        ) from None


def _of_memory(said: str, recipe: Recipe, world: World) -> str:
    asked = _ASKED.search(said)
    who = "a step" if world.size == 1 else world.named
    more = f" (it asked for {asked[1]} more)" if asked else ""
    return (
        f"{who} needs more memory than {_where(world)} has{more}; lower the batch size "
        f"(batch_size={recipe.batch_size:,}), compute it in more parts (accumulate={recipe.accumulate}), or in fewer "
        f"bits (precision={recipe.precision!r})."
    )


def _where(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "the CPU"
