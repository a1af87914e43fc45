"""Tensor-parallel linear layers, and the replacement of a network's layers by parallel ones."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from penstock.train.parallel.batch_norm import SynchronizedBatchNorm
from penstock.train.parallel.collectives import (
    all_gather_linear,
    all_to_all_rows,
    linear_reduce_scatter,
    pad_ranks,
    pad_rows,
    rows_per_rank,
    unpad_ranks,
    unpad_rows,
)
from penstock.train.parallel.fully_sharded import FullyShardedLayer
from penstock.train.parallel.world import World, split_rows
from penstock.train.placement import Placement

# M rows of this process, N rows of all, I inputs, O outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSlice:
    """Slices of a tensor, one for each process.

    Args:
        dim: The sliced dimension.
        sizes: The size of each process's slice.
    """

    dim: int
    sizes: tuple[int, ...]

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """View the slice of one process."""
        return whole.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank])


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelModel:
    """A network with parallel layers.

    Args:
        module: The network, with this process's weight slices.
        slices: By the name of each sliced parameter in `module`.
        vocab_parallel: True if it returns, in training, this process's classes for the whole batch.
    """

    module: nn.Module
    slices: Mapping[str, WeightSlice] = field(default_factory=dict)
    vocab_parallel: bool = False

    def full_name(self, name: str) -> str:
        """Translate the name of a parameter or buffer to its name in the network without parallel layers."""
        for path, layer in self.module.named_modules():
            if isinstance(layer, FullyShardedLayer) and name.startswith(f"{path}.{FullyShardedLayer.INNER}."):
                return f"{path}.{name[len(path) + len(FullyShardedLayer.INNER) + 2 :]}"
        return name


def parallelize(
    module: nn.Module, placements: Mapping[str, Placement], world: World, rows: Sequence[int]
) -> ParallelModel:
    """Replace layers of a network by parallel ones.

    Args:
        module: The whole network, with the same weights in every process.
        placements: Checked by `penstock.train.parallel.planner.check`.
        world: The processes.
        rows: Examples that each process computes at once in training.
    """
    slices: dict[str, WeightSlice] = {}
    for name, placement in placements.items():
        above, _, last = name.rpartition(".")
        layer = module.get_submodule(name)
        if placement.kind == "fully-sharded":
            made = FullyShardedLayer(layer, world, name, activation_checkpointing=placement.activation_checkpointing)
            inner = f"{name}.{FullyShardedLayer.INNER}"
            slices |= {f"{inner}.{own}": WeightSlice(dim=0, sizes=sizes) for own, sizes in made.sizes.items()}
        elif world.size > 1:
            assert isinstance(layer, nn.Linear), name
            made = _LAYERS[placement.kind](layer, world, name, placement.chunks, rows)
            slices |= {f"{name}.{own}": part for own, part in made.slices.items()}
        else:
            continue
        setattr(module.get_submodule(above), last, made)
    vocab_parallel = world.size > 1 and any(placement.kind == "vocab-parallel" for placement in placements.values())
    return ParallelModel(module=module, slices=slices, vocab_parallel=vocab_parallel)


class ParallelLinear(nn.Module, ABC):
    """A linear layer with a slice of the weights: of the outputs, or of the inputs if `dim` is 1."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    dim: ClassVar[int] = 0

    def __init__(self, whole: nn.Linear, world: World, name: str, chunks: int, rows: Sequence[int]) -> None:
        super().__init__()
        self.world = world
        self.name = name
        self.chunks = chunks
        self.rows = tuple(rows)
        self.slices = {"weight": WeightSlice(dim=self.dim, sizes=split_rows(whole.weight.shape[self.dim], world.size))}
        # A bias of sliced outputs is sliced with them; a bias of sums is added once, after the sum.
        if self.dim == 0:
            self.slices |= dict.fromkeys(whole.state_dict(), self.slices["weight"])
        for own, parameter in whole.named_parameters():
            given = parameter.detach()
            part = self.slices[own].of(given, world.rank).clone() if own in self.slices else given
            self.register_parameter(own, nn.Parameter(part, parameter.requires_grad))
        if "bias" not in whole.state_dict():
            self.register_parameter("bias", None)

    @abstractmethod
    def forward(self, given: Tensor) -> Tensor:
        """Compute the layer's output for the next layer."""

    def _rows_of_all(self, own: int) -> tuple[int, ...]:
        """Compute the rows of each process from this one's; in evaluation all have the same number."""
        if not self.training:
            return (own,) * self.world.size
        return rows_per_rank(self.rows, self.world.rank, own, self.name)

    def _chunks(self) -> int:
        return self.chunks if self.training else 1

    def _autocast(self, tensor: Tensor) -> Tensor:
        """Cast before the collective, which then moves half the bytes."""
        device = tensor.device.type
        return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor

    def _own_outputs(self, own_MI: Tensor, rows: Sequence[int]) -> Tensor:
        """Compute this process's outputs of all rows, padded."""
        given = pad_rows(self._autocast(own_MI), rows)
        return all_gather_linear(self.world, self.name, self._chunks(), given, self.weight, self.bias)


@final
class ColumnParallelLinear(ParallelLinear):
    """Takes each process's rows and gives this process's outputs of all rows."""

    def forward(self, given: Tensor) -> Tensor:
        """Map `[M, ..., I]` to `[N, ..., O / processes]`."""
        rows = self._rows_of_all(given.shape[0])
        return unpad_ranks(self._own_outputs(given, rows), rows)


@final
class RowParallelLinear(ParallelLinear):
    """Takes this process's inputs of all rows and gives all outputs of its rows."""

    dim: ClassVar[int] = 1

    def forward(self, given: Tensor) -> Tensor:
        """Map `[N, ..., I / processes]` to `[M, ..., O]`."""
        world, bias = self.world, self.bias
        all_rows, examples = given.shape[0], sum(self.rows) if self.training else world.size
        times = all_rows // examples
        own = times * (self.rows[world.rank] if self.training else 1)
        rows = self._rows_of_all(own)
        whole_NI = pad_ranks(self._autocast(given), rows)
        summed = unpad_rows(linear_reduce_scatter(world, self.name, self._chunks(), whole_NI, self.weight), own)
        return summed if bias is None else summed + self._autocast(bias)


@final
class ModelParallelLinear(ParallelLinear):
    """Takes and gives each process's rows; each process computes its slice of the outputs of all rows."""

    def forward(self, given: Tensor) -> Tensor:
        """Map `[M, ..., I]` to `[M, ..., O]`."""
        own = given.shape[0]
        return unpad_rows(all_to_all_rows(self.world, self.name, self._own_outputs(given, self._rows_of_all(own))), own)


@final
class VocabParallelLinear(ParallelLinear):
    """A last layer that gives, in training, this process's classes of all rows."""

    def forward(self, given: Tensor) -> Tensor:
        """Map `[M, I]` to `[N, O / processes]` in training, to `[M, O]` otherwise."""
        own = given.shape[0]
        rows = self._rows_of_all(own)
        logits = self._own_outputs(given, rows)
        if self.training:
            return unpad_ranks(logits, rows)
        return unpad_rows(all_to_all_rows(self.world, self.name, logits), own)


def layers_that_wait(module: nn.Module) -> list[nn.Module]:
    """List the layers whose forward pass waits for other processes."""
    kinds = ParallelLinear | FullyShardedLayer | SynchronizedBatchNorm
    return [layer for layer in module.modules() if isinstance(layer, kinds)]


_LAYERS = {
    "column-parallel": ColumnParallelLinear,
    "row-parallel": RowParallelLinear,
    "model": ModelParallelLinear,
    "vocab-parallel": VocabParallelLinear,
}
