"""A network compiled by torch, in parts, so that gradients leave each part as soon as it has made them.

What is compiled as one gives all of its gradients at the end of its backward pass. To let the last layers' gradients
travel while the first layers' are still made, chains of layers are compiled in parts that end where buckets do.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

# What gradients travel a second between the GPUs of a host, and the share of a device's peak that networks reach: of
# both the order is enough.
TRAVEL_BYTES_S, REACHED = 200e9, 0.35
# Where a part ends, what the compiler would have joined is written and read once more: a 25th of ResNet-50's step. Of
# AlexNet's at a global batch of 1,024 on four H200 less than its gradients take to travel, which is this.
WORTHWHILE = 0.02


def worth_parting(travel_bytes: int, least_s: float | None) -> bool:
    """Whether gradients take so long to travel that it pays to hide that, although parts are slower than the whole.

    Args:
        travel_bytes: Of all gradients that are summed over the processes.
        least_s: What the step's arithmetic takes at the device's peak; None where that is not known.
    """
    return least_s is None or travel_bytes / TRAVEL_BYTES_S > WORTHWHILE * least_s / REACHED


def compiled(
    module: nn.Module, firsts: Sequence[nn.Parameter], eager: Iterable[nn.Module], *, backend: Any = "inductor"
) -> Callable[[Tensor], Tensor]:
    """The network, compiled. It keeps its own layers, names and state.

    Args:
        module: The network.
        firsts: Where parts begin: at the layers that have these parameters, where those are in an `nn.Sequential`.
        eager: Layers that stay as they are: those that wait for other processes.
        backend: Of torch's compiler.
    """
    left = list(eager)
    for layer in left:
        layer.forward = torch.compiler.disable(layer.forward)
    cut = _cuts(module, firsts, left)
    for chain, cuts in cut.items():
        chain.forward = cast(Any, torch.compiler.disable(_Chain(chain, cuts, left, backend)))
    # Only here: to import it takes seconds.
    from torch._dynamo import config

    # Parts share their forward, of which torch compiles only so many: as many more as there are.
    config.recompile_limit = max(config.recompile_limit, 2 * sum(len(cuts) + 1 for cuts in cut.values()))
    return torch.compile(module, dynamic=False, backend=backend)


def _cuts(
    module: nn.Module, firsts: Sequence[nn.Parameter], eager: Sequence[nn.Module]
) -> dict[nn.Sequential, set[int]]:
    """The outermost chains that are cut, and before which of their layers: the compiler does not cut loops itself."""
    wanted, left = {id(parameter) for parameter in firsts}, {id(layer) for layer in eager}
    cuts: dict[nn.Sequential, set[int]] = {}
    for chain in _outermost_chains(module):
        for index, layer in enumerate(chain):
            if any(id(parameter) in wanted for parameter in layer.parameters()):
                cuts.setdefault(chain, set()).add(index)
            if any(id(part) in left for part in layer.modules()):
                cuts.setdefault(chain, set()).update((index, index + 1))
    return cuts


def _outermost_chains(module: nn.Module) -> list[nn.Sequential]:
    # One with a forward of its own is more than its layers one after the other.
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return [module]
    return [chain for child in module.children() for chain in _outermost_chains(child)]


@final
class _Chain:
    """Layers one after the other, compiled in parts while they are trained.

    What is validated comes in batches of other sizes, each of which would be compiled anew.
    """

    def __init__(self, chain: nn.Sequential, cuts: set[int], eager: Sequence[nn.Module], backend: Any) -> None:
        left = {id(layer) for layer in eager}
        layers = list(chain)
        places = sorted({0, len(layers), *cuts} & set(range(len(layers) + 1)))
        self._chain = chain
        self._parts: list[Callable[[Any], Any]] = []
        for begin, end in itertools.pairwise(places):
            part = layers[begin:end]
            alone = len(part) == 1 and id(part[0]) in left
            self._parts.append(part[0] if alone else torch.compile(_Part(part), dynamic=False, backend=backend))

    def __call__(self, given: Any) -> Any:
        for part in self._parts if self._chain.training else self._chain:
            given = part(given)
        return given


@final
class _Part(nn.Module):
    """Some layers of a chain. They stay the chain's, so this is not among its modules."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, given: Any) -> Any:
        for layer in self.layers:
            given = layer(given)
        return given
