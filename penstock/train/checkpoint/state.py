"""Convert sharded state to and from full state dicts.

A bundle has full tensors, a checkpoint the slices of each process: both load on any number of processes and with any
placements.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.core.errors import TrainError
from penstock.train.checkpoint.lazy_tensors import StoredTensor, read_tensors
from penstock.train.checkpoint.snapshot import SlicedTensor
from penstock.train.parallel.collectives import pad_rows, start_all_gather, unpad_ranks
from penstock.train.parallel.tensor_parallel import ParallelModel, WeightSlice
from penstock.train.parallel.world import World


@torch.no_grad()
def full_state(placed: ParallelModel, world: World, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather a full state dict on the CPU of rank 0; empty on other ranks. A collective call."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        whole = _whole(tensor, placed.slices.get(name), world, name)
        if world.is_rank_zero:
            found[placed.full_name(name)] = whole
    return found


def full_names(placed: ParallelModel) -> dict[str, str]:
    """Map the names of a state dict to those of the network without parallel layers."""
    return {name: placed.full_name(name) for name in placed.module.state_dict()}


def local_state(
    placed: ParallelModel, names: Mapping[str, str], state: Mapping[str, Tensor]
) -> dict[str, SlicedTensor]:
    """Collect this process's slices of a state dict, under full names.

    Args:
        placed: The network.
        names: The result of `full_names`.
        state: A state dict of the network.
    """
    return {
        names[name]: SlicedTensor(own=tensor.detach(), slices=placed.slices.get(name)) for name, tensor in state.items()
    }


def parts_of(placed: ParallelModel, world: World, state: Mapping[str, Tensor | StoredTensor]) -> dict[str, Tensor]:
    """Slice a full state dict for this process, under the names of the parallel network."""
    names = {whole: name for name, whole in full_names(placed).items()}
    return {
        names.get(name, name): _part(tensor, placed.slices.get(names.get(name, name)), world)
        for name, tensor in state.items()
    }


def _of_another(error: Exception) -> TrainError:
    # Torch lists every parameter that differs.
    said = " ".join(str(error).split())[:200].rstrip(".")
    return TrainError(f"the checkpoint does not fit the network ({said}); resume with its network, or start a new run.")


def load_full_state(placed: ParallelModel, world: World, state: Mapping[str, Tensor | StoredTensor]) -> None:
    """Load this process's slices of a full state dict.

    Raises:
        TrainError: It is the state of another network.
    """
    try:
        placed.module.load_state_dict(parts_of(placed, world, state))
    except RuntimeError as error:
        raise _of_another(error) from None


def local_optimizer_state(placed: ParallelModel, optimizer: Optimizer) -> dict[str, Any]:
    """Collect the optimizer's state dict with this process's slices of its tensors.

    Raises:
        TrainError: A tensor has another shape than its weight, and cannot be joined.
    """
    state = optimizer.state_dict()
    all_slices = _slices_by_index(placed, optimizer)
    found: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        part_slices, shape = all_slices[index]
        found[index] = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                found[index][name] = value
                continue
            if part_slices is not None and value.numel() > 1 and value.shape != shape:
                raise TrainError(
                    f"the optimizer keeps {name!r} of shape {list(value.shape)} for weight slices of shape "
                    f"{list(shape)}; choose another optimizer, or make the layer's placement 'data'."
                )
            found[index][name] = SlicedTensor(own=value.detach(), slices=part_slices if value.shape == shape else None)
    return {"state": found, "param_groups": state["param_groups"]}


def load_optimizer(placed: ParallelModel, world: World, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load this process's slices of a full optimizer state.

    Raises:
        TrainError: It is the state of another optimizer or network.
    """
    all_slices = _slices_by_index(placed, optimizer)
    parts: dict[int, dict[str, Any]] = {}
    try:
        for index, values in state["state"].items():
            part_slices = all_slices[index][0]
            parts[index] = {
                name: _part(value, part_slices if value.ndim else None, world)
                if isinstance(value, StoredTensor)
                else read_tensors(value)
                for name, value in values.items()
            }
        optimizer.load_state_dict({"state": parts, "param_groups": state["param_groups"]})
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        raise _of_another(error) from None


def _slices_by_index(placed: ParallelModel, optimizer: Optimizer) -> dict[int, tuple[WeightSlice | None, torch.Size]]:
    """Look up slices and shapes of an optimizer's parameters, by their index in its state dict."""
    names = {id(parameter): name for name, parameter in placed.module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        index: (placed.slices.get(names.get(id(parameter), "")), parameter.shape)
        for index, parameter in enumerate(parameters)
    }


def _whole(own: Tensor, part_slices: WeightSlice | None, world: World, name: str) -> Tensor:
    if part_slices is None or world.size == 1:
        # A copy, because the next step changes the tensor.
        return own.detach().to("cpu", copy=True)
    rows = own.detach().movedim(part_slices.dim, 0)
    gathered = start_all_gather(world, f"the all-gather of {name}", pad_rows(rows, part_slices.sizes))()
    whole = unpad_ranks(gathered.flatten(0, 1), part_slices.sizes).movedim(0, part_slices.dim)
    return whole.contiguous().cpu() if world.is_rank_zero else own


def _part(whole: Tensor | StoredTensor, part_slices: WeightSlice | None, world: World) -> Tensor:
    if isinstance(whole, Tensor):
        return whole if part_slices is None else part_slices.of(whole, world.rank)
    if part_slices is None:
        return whole.whole()
    return whole.part(part_slices.dim, sum(part_slices.sizes[: world.rank]), part_slices.sizes[world.rank])
