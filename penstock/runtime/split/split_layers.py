"""Linear layers with a slice of their weights, in place of the whole ones.

A layer's outputs are sliced (column-parallel) and all-gathered: every process has what the whole layer would give, so
that whatever stands before and behind it stays as it is. Where an `nn.Sequential` has two linear layers with nothing
but elementwise layers between, the slices go on into the second (row-parallel), whose sums are all-reduced.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor, nn

from penstock.runtime.split.split_group import SplitGroup

# Smaller layers take less time than their exchange, and little memory.
MIN_WEIGHTS = 1 << 12
# Layers that act on each number alone.
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.Tanh, nn.Sigmoid),
    *(nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Dropout, nn.Identity),
)
# Modules that use the weights of layers within them without calling these.
_TAKES_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitWeights:
    """Weights of a network after the split.

    Args:
        layers: Names of the layers that are split.
        whole_bytes: The weights of the whole network.
        own_bytes: Those of one process.
    """

    layers: tuple[str, ...]
    whole_bytes: int
    own_bytes: int


@final
class ColumnSlice(nn.Module):
    """A slice of a linear layer's outputs.

    Args:
        whole: The layer.
        group: The processes.
        gather: Whether all outputs are gathered; else a `RowSlice` follows.
    """

    def __init__(self, whole: nn.Linear, group: SplitGroup, *, gather: bool) -> None:
        super().__init__()
        self._group, self._gather = group, gather
        self.weight = _slice(whole.weight, 0, group)
        # torch's types do not say that a layer may have none.
        bias = cast("nn.Parameter | None", whole.bias)
        self.bias = None if bias is None else _slice(bias, 0, group)

    def forward(self, given: Tensor) -> Tensor:
        """Map `[..., inputs]` to `[..., outputs]`, or to this process's slice of them."""
        own = nn.functional.linear(given, self.weight, self.bias)
        return self._group.all_gather(own) if self._gather else own


@final
class RowSlice(nn.Module):
    """A linear layer for a slice of its inputs.

    Args:
        whole: The layer.
        group: The processes.
    """

    def __init__(self, whole: nn.Linear, group: SplitGroup) -> None:
        super().__init__()
        self._group = group
        self.weight = _slice(whole.weight, 1, group)
        self.bias = cast("nn.Parameter | None", whole.bias)

    def forward(self, given: Tensor) -> Tensor:
        """Map this process's slice of `[..., inputs]` to `[..., outputs]`."""
        total = self._group.all_reduce(nn.functional.linear(given, self.weight))
        return total if self.bias is None else total + self.bias.to(total.dtype)


def split_network(module: nn.Module, group: SplitGroup) -> SplitWeights:
    """Replace the large linear layers of a network by this process's slices, in place.

    Args:
        module: The network, on the CPU; every process has the same.
        group: The processes.
    """
    whole_bytes = _bytes_of(module)
    users: dict[int, int] = {}
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    taken = [path for path, layer in module.named_modules() if isinstance(layer, _TAKES_WEIGHTS)]

    def is_split(path: str, layer: nn.Module) -> bool:
        # A subclass may compute something else, and a weight that layers share is whole for the other one.
        if type(layer) is not nn.Linear or users[id(layer.weight)] > 1 or layer.weight.numel() < MIN_WEIGHTS:
            return False
        inside = any(path.startswith(f"{above}.") for above in taken)
        return not inside and layer.out_features % group.size == 0

    pairs = _pairs(module, is_split, group.size)
    replaced: dict[str, nn.Module] = {}
    # A layer that the network has under two names is one layer.
    for path, layer in list(module.named_modules()):
        if path in pairs.values():
            assert isinstance(layer, nn.Linear), path
            replaced[path] = RowSlice(layer, group)
        elif is_split(path, layer):
            assert isinstance(layer, nn.Linear), path
            replaced[path] = ColumnSlice(layer, group, gather=path not in pairs)
    for path, made in replaced.items():
        above, _, last = path.rpartition(".")
        setattr(module.get_submodule(above), last, made)
    return SplitWeights(layers=tuple(replaced), whole_bytes=whole_bytes, own_bytes=_bytes_of(module))


def _pairs(module: nn.Module, is_split: Callable[[str, nn.Module], bool], size: int) -> dict[str, str]:
    """Find pairs of layers of which the second takes the slices of the first, by path."""
    pairs: dict[str, str] = {}
    names = [id(layer) for _, layer in module.named_modules(remove_duplicate=False)]
    for path, sequence in module.named_modules():
        if type(sequence) is not nn.Sequential:
            continue
        first = ""
        for name, layer in sequence.named_children():
            own = f"{path}.{name}" if path else name
            once = names.count(id(layer)) == 1
            if first and once and type(layer) is nn.Linear and layer.in_features % size == 0:
                # One that is small is no whole layer here, since it gets slices.
                pairs[first], first = own, ""
            elif once and is_split(own, layer):
                first = own
            elif not isinstance(layer, _ELEMENTWISE):
                first = ""
    return pairs


def _slice(whole: Tensor, dim: int, group: SplitGroup) -> nn.Parameter:
    # A copy, so that the whole weight is freed.
    part = whole.detach().chunk(group.size, dim)[group.rank].clone()
    return nn.Parameter(part, requires_grad=False)


def _bytes_of(module: nn.Module) -> int:
    # Without duplicates: layers may share a weight.
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    return sum(tensor.nbytes for tensor in tensors)
