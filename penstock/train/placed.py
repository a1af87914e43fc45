"""Layers of which each process has a part of the weights, and how they take the place of whole ones."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from penstock.train.batch_norm import SynchronisedBatchNorm
from penstock.train.collectives import (
    gathered_linear,
    own_count,
    own_rows,
    padded,
    padded_batch,
    scattered_linear,
    to_rows,
    whole_batch,
)
from penstock.train.placements import Placement
from penstock.train.sharded import Sharded
from penstock.train.world import World, split_rows

# M rows of this process, N rows of all, I inputs, O outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Which part of a whole tensor each process has.

    Args:
        dim: Along which it is cut.
        sizes: Of each process's part.
    """

    dim: int
    sizes: tuple[int, ...]

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """The part of one process."""
        return whole.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank])


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A network laid over the processes.

    Args:
        module: It, with this process's parts.
        shards: What is cut, by parameter name as `module` has it.
        head: Whether its outputs are this process's classes of the whole batch while it trains.
    """

    module: nn.Module
    shards: Mapping[str, Shard] = field(default_factory=dict)
    head: bool = False

    def whole_name(self, name: str) -> str:
        """What the network that is not laid out calls a parameter or buffer."""
        for path, layer in self.module.named_modules():
            if isinstance(layer, Sharded) and name.startswith(f"{path}.{Sharded.INNER}."):
                return f"{path}.{name[len(path) + len(Sharded.INNER) + 2 :]}"
        return name


def place(module: nn.Module, placements: Mapping[str, Placement], world: World, rows: Sequence[int]) -> Placed:
    """Put layers of which this process has its part into a network, in the place of whole ones.

    Args:
        module: The network, whole, with the same weights in every process.
        placements: As `penstock.train.placements.check` let them pass.
        world: The processes.
        rows: How many examples each of them computes at once while it trains.
    """
    shards: dict[str, Shard] = {}
    for name, placement in placements.items():
        above, _, last = name.rpartition(".")
        layer = module.get_submodule(name)
        if placement.kind == "sharded":
            made = Sharded(layer, world, name, recompute=placement.recompute)
            cut = {f"{name}.{Sharded.INNER}.{own}": Shard(dim=0, sizes=sizes) for own, sizes in made.sizes.items()}
        elif world.size > 1:
            assert isinstance(layer, nn.Linear), name
            made = _LAYERS[placement.kind](layer, world, name, placement.chunks, rows)
            cut = {f"{name}.{own}": shard for own, shard in made.cut.items()}
        else:
            continue
        setattr(module.get_submodule(above), last, made)
        shards |= cut
    head = world.size > 1 and any(placement.kind == "classes" for placement in placements.values())
    return Placed(module=module, shards=shards, head=head)


class Part(nn.Module, ABC):
    """A linear layer of which each process has a part."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, whole: nn.Linear, world: World, name: str, chunks: int, rows: Sequence[int], *, dim: int
    ) -> None:
        super().__init__()
        self.world = world
        self.name = name
        self.chunks = chunks
        self.rows = tuple(rows)
        self.cut = {"weight": Shard(dim=dim, sizes=split_rows(whole.weight.shape[dim], world.size))}
        # What each process adds to its own outputs is cut with them; what is added to sums is added once.
        if "bias" in whole.state_dict() and dim == 0:
            self.cut["bias"] = self.cut["weight"]
        for own, parameter in whole.named_parameters():
            given = parameter.detach()
            part = self.cut[own].of(given, world.rank).clone() if own in self.cut else given
            self.register_parameter(own, nn.Parameter(part, parameter.requires_grad))
        if "bias" not in whole.state_dict():
            self.register_parameter("bias", None)

    @abstractmethod
    def forward(self, given: Tensor) -> Tensor:
        """What the network has from it."""

    def _rows_of_all(self, own: int) -> tuple[int, ...]:
        """How many rows each process has where this one has so many; outside of training all have equally many."""
        if not self.training:
            return (own,) * self.world.size
        return own_count(self.rows, self.world.rank, own, self.name)

    def _chunks(self) -> int:
        return self.chunks if self.training else 1

    def _computed(self, tensor: Tensor) -> Tensor:
        """In the precision of autocast, so that no more than that travels."""
        device = tensor.device.type
        return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor

    def _own_outputs(self, own_MI: Tensor, rows: Sequence[int]) -> Tensor:
        """This process's outputs of all rows, each process's filled up to the most that one has."""
        given = padded(self._computed(own_MI), rows)
        return gathered_linear(self.world, self.name, self._chunks(), given, self.weight, self.bias)


@final
class Columns(Part):
    """Takes each process's rows, gives this process's outputs of all rows."""

    def __init__(self, whole: nn.Linear, world: World, name: str, chunks: int, rows: Sequence[int]) -> None:
        super().__init__(whole, world, name, chunks, rows, dim=0)

    def forward(self, given: Tensor) -> Tensor:
        """`[M, ..., I]` to `[N, ..., O / processes]`."""
        rows = self._rows_of_all(given.shape[0])
        return whole_batch(self._own_outputs(given, rows), rows)


@final
class Rows(Part):
    """Takes this process's inputs of all rows, gives all outputs of its own rows."""

    def __init__(self, whole: nn.Linear, world: World, name: str, chunks: int, rows: Sequence[int]) -> None:
        super().__init__(whole, world, name, chunks, rows, dim=1)

    def forward(self, given: Tensor) -> Tensor:
        """`[N, ..., I / processes]` to `[M, ..., O]`."""
        world, bias = self.world, self.bias
        all_rows, examples = given.shape[0], sum(self.rows) if self.training else world.size
        times = all_rows // examples
        own = times * (self.rows[world.rank] if self.training else 1)
        rows = self._rows_of_all(own)
        whole_NI = padded_batch(self._computed(given), rows)
        summed = own_rows(scattered_linear(world, self.name, self._chunks(), whole_NI, self.weight), own)
        return summed if bias is None else summed + self._computed(bias)


@final
class Model(Part):
    """Takes and gives each process's rows with all features, and has its part of the outputs in between."""

    def __init__(self, whole: nn.Linear, world: World, name: str, chunks: int, rows: Sequence[int]) -> None:
        super().__init__(whole, world, name, chunks, rows, dim=0)

    def forward(self, given: Tensor) -> Tensor:
        """`[M, ..., I]` to `[M, ..., O]`."""
        own = given.shape[0]
        return own_rows(to_rows(self.world, self.name, self._own_outputs(given, self._rows_of_all(own))), own)


@final
class Classes(Part):
    """A last layer: while it trains, this process's classes of all rows, for a loss over classes."""

    def __init__(self, whole: nn.Linear, world: World, name: str, chunks: int, rows: Sequence[int]) -> None:
        super().__init__(whole, world, name, chunks, rows, dim=0)

    def forward(self, given: Tensor) -> Tensor:
        """`[M, I]` to `[N, O / processes]` in training, to `[M, O]` otherwise."""
        own = given.shape[0]
        rows = self._rows_of_all(own)
        logits = self._own_outputs(given, rows)
        return whole_batch(logits, rows) if self.training else own_rows(to_rows(self.world, self.name, logits), own)


def layers_that_wait(module: nn.Module) -> list[nn.Module]:
    """The layers of a network that wait for other processes."""
    return [layer for layer in module.modules() if isinstance(layer, Part | Sharded | SynchronisedBatchNorm)]


_LAYERS = {"columns": Columns, "rows": Rows, "model": Model, "classes": Classes}
