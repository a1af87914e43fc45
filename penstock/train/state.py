"""The state of a network that is laid out over processes, under the names of the network that is not.

A bundle has whole tensors, a checkpoint each process's parts and how they were cut: both fit any number of processes
and any placements.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.core.errors import TrainError
from penstock.train.collectives import padded, start_gather, whole_batch
from penstock.train.placed import Placed, Shard
from penstock.train.snapshot import Part
from penstock.train.stepper import ELEMENTWISE, is_elementwise
from penstock.train.stored import Stored, read_whole
from penstock.train.world import World


@torch.no_grad()
def whole_state(placed: Placed, world: World, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the network, whole, on the CPU: of the first process; the others' is empty, but all must ask."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        whole = _whole(tensor, placed.shards.get(name), world, name)
        if world.is_first:
            found[placed.whole_name(name)] = whole
    return found


def whole_names(placed: Placed) -> dict[str, str]:
    """What the network that is not laid out calls each tensor of the network's state, by its name there."""
    return {name: placed.whole_name(name) for name in placed.module.state_dict()}


def own_state(placed: Placed, names: Mapping[str, str], state: Mapping[str, Tensor]) -> dict[str, Part]:
    """This process's parts of the network's state, under whole names.

    Args:
        placed: The network.
        names: As `whole_names` gives them.
        state: By the names that the network has it by.
    """
    return {names[name]: Part(own=tensor.detach(), shard=placed.shards.get(name)) for name, tensor in state.items()}


def parts_of(placed: Placed, world: World, state: Mapping[str, Tensor | Stored]) -> dict[str, Tensor]:
    """This process's part of a whole state, under the names that the network has it by."""
    names = {whole: name for name, whole in whole_names(placed).items()}
    return {
        names.get(name, name): _part(tensor, placed.shards.get(names.get(name, name)), world)
        for name, tensor in state.items()
    }


def _of_another(error: Exception) -> TrainError:
    # Torch names every parameter that differs; the first one says enough.
    said = " ".join(str(error).split())[:200].rstrip(".")
    return TrainError(
        f"the checkpoint does not fit the network ({said}); go on with the network that it is of, or begin a new run."
    )


def load_whole(placed: Placed, world: World, state: Mapping[str, Tensor | Stored]) -> None:
    """Give a network its part of a whole state.

    Raises:
        TrainError: It is the state of another network.
    """
    try:
        placed.module.load_state_dict(parts_of(placed, world, state))
    except RuntimeError as error:
        raise _of_another(error) from None


def check_optimizer(optimizer: Optimizer, shards: Mapping[str, Shard]) -> None:
    """See that an optimizer does to parts of weights what it would do to whole ones.

    Args:
        optimizer: Of torch or Penstock, or one of your own whose class has `elementwise = True`.
        shards: What is cut, by parameter name.

    Raises:
        TrainError: It looks at whole weights, or nothing is known of it.
    """
    kind = type(optimizer)
    if not shards or is_elementwise(optimizer) or hasattr(kind, "over_parts"):
        return
    raise TrainError(
        f"the optimizer {kind.__name__} may look at whole weights, and each process has only a part of "
        f"{next(iter(shards))!r}; place all layers by 'data', or choose one of {', '.join(ELEMENTWISE)}, LARS, LAMB. "
        f"If each weight's step depends on its own gradients alone, give the class 'elementwise = True'."
    )


def tell_optimizer(optimizer: Optimizer, placed: Placed, world: World) -> None:
    """Let an optimizer that needs the norms of whole weights know which are cut, and how to sum over their parts.

    Args:
        optimizer: One whose class has `over_parts(cut, total)`, as LARS and LAMB; of others nothing becomes.
        placed: The network.
        world: The processes.
    """
    if world.size > 1 and hasattr(optimizer, "over_parts"):
        weights = dict(placed.module.named_parameters())

        def total(own: Tensor) -> Tensor:
            return world.summed(own, "the norms of the optimizer's weights")

        cast(Any, optimizer).over_parts([weights[name] for name in placed.shards], total)


def own_optimizer(placed: Placed, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dict with this process's parts of its tensors.

    Raises:
        TrainError: It keeps tensors of other shapes than the weights', which cannot be put together.
    """
    state = optimizer.state_dict()
    shards = _shards_by_index(placed, optimizer)
    found: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        shard, shape = shards[index]
        found[index] = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                found[index][name] = value
                continue
            if shard is not None and value.numel() > 1 and value.shape != shape:
                raise TrainError(
                    f"the optimizer keeps {name!r} of shape {list(value.shape)} for weights of shape {list(shape)}, of "
                    f"which each process has a part; choose another optimizer, or place the layer by data."
                )
            found[index][name] = Part(own=value.detach(), shard=shard if value.shape == shape else None)
    return {"state": found, "param_groups": state["param_groups"]}


def load_optimizer(placed: Placed, world: World, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give an optimizer its part of a whole state.

    Raises:
        TrainError: It is the state of another optimizer or network.
    """
    shards = _shards_by_index(placed, optimizer)
    parts: dict[int, dict[str, Any]] = {}
    try:
        for index, values in state["state"].items():
            shard = shards[index][0]
            parts[index] = {
                name: _part(value, shard if value.ndim else None, world)
                if isinstance(value, Stored)
                else read_whole(value)
                for name, value in values.items()
            }
        optimizer.load_state_dict({"state": parts, "param_groups": state["param_groups"]})
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        raise _of_another(error) from None


def _shards_by_index(placed: Placed, optimizer: Optimizer) -> dict[int, tuple[Shard | None, torch.Size]]:
    """How an optimizer's parameters are cut, by the numbers under which its state dict has them."""
    names = {id(parameter): name for name, parameter in placed.module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        index: (placed.shards.get(names.get(id(parameter), "")), parameter.shape)
        for index, parameter in enumerate(parameters)
    }


def _whole(own: Tensor, shard: Shard | None, world: World, name: str) -> Tensor:
    if shard is None or world.size == 1:
        # A copy: the next step changes what is read here.
        return own.detach().to("cpu", copy=True)
    rows = own.detach().movedim(shard.dim, 0)
    gathered = start_gather(world, f"the gather of {name}", padded(rows, shard.sizes))()
    whole = whole_batch(gathered.flatten(0, 1), shard.sizes).movedim(0, shard.dim)
    return whole.contiguous().cpu() if world.is_first else own


def _part(whole: Tensor | Stored, shard: Shard | None, world: World) -> Tensor:
    if isinstance(whole, Tensor):
        return whole if shard is None else shard.of(whole, world.rank)
    if shard is None:
        return whole.whole()
    return whole.part(shard.dim, sum(shard.sizes[: world.rank]), shard.sizes[world.rank])
