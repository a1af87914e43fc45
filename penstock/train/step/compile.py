"""Compile a network in parts, so that the all-reduce of gradients overlaps with the backward pass.

A compiled graph returns all its gradients at the end of its backward pass. Chains of layers are therefore compiled in
parts that end at bucket boundaries: the last layers' gradients are reduced while the first layers' are computed.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

# All-reduce bandwidth between the GPUs of a host, and the share of a device's peak that networks reach, both roughly.
ALL_REDUCE_BYTES_S, REACHED_SHARE = 200e9, 0.35
# At the end of a part, tensors that the compiler would have fused are written and read once more. That costs a 25th of
# ResNet-50's step. For AlexNet at a global batch of 1,024 on four H200 it costs less than the all-reduce, which takes
# this share of the step.
MIN_ALL_REDUCE_SHARE = 0.02


def should_split(all_reduce_bytes: int, least_s: float | None) -> bool:
    """Return True if overlapping the all-reduce saves more time than compiling in parts costs.

    Args:
        all_reduce_bytes: Size of all gradients that are all-reduced.
        least_s: Duration of the step's arithmetic at the device's peak; None if unknown.
    """
    return least_s is None or all_reduce_bytes / ALL_REDUCE_BYTES_S > MIN_ALL_REDUCE_SHARE * least_s / REACHED_SHARE


def compiled(
    module: nn.Module, segment_starts: Sequence[nn.Parameter], eager: Iterable[nn.Module], *, backend: Any = "inductor"
) -> Callable[[Tensor], Tensor]:
    """Compile the network. It keeps its layers, names and state.

    Args:
        module: The network.
        segment_starts: A segment begins at each layer of an `nn.Sequential` that has one of these parameters.
        eager: Layers that are not compiled: those that wait for other processes.
        backend: Backend of torch's compiler.
    """
    eager_layers = list(eager)
    for layer in eager_layers:
        layer.forward = torch.compiler.disable(layer.forward)
    cuts_by_chain = _cuts(module, segment_starts, eager_layers)
    for chain, cuts in cuts_by_chain.items():
        chain.forward = cast(Any, torch.compiler.disable(_Chain(chain, cuts, eager_layers, backend)))
    # Imported here, because the import takes seconds.
    from torch._dynamo import config

    # All segments share one forward function, and torch limits the number of compilations of a function.
    config.recompile_limit = max(config.recompile_limit, 2 * sum(len(cuts) + 1 for cuts in cuts_by_chain.values()))
    return torch.compile(module, dynamic=False, backend=backend)


def _cuts(
    module: nn.Module, segment_starts: Sequence[nn.Parameter], eager: Sequence[nn.Module]
) -> dict[nn.Sequential, set[int]]:
    """Map each outermost chain to the indices of its cuts; the compiler does not cut loops itself."""
    first_ids, eager_ids = {id(parameter) for parameter in segment_starts}, {id(layer) for layer in eager}
    cuts: dict[nn.Sequential, set[int]] = {}
    for chain in _outermost_chains(module):
        for index, layer in enumerate(chain):
            if any(id(parameter) in first_ids for parameter in layer.parameters()):
                cuts.setdefault(chain, set()).add(index)
            if any(id(part) in eager_ids for part in layer.modules()):
                cuts.setdefault(chain, set()).update((index, index + 1))
    return cuts


def _outermost_chains(module: nn.Module) -> list[nn.Sequential]:
    # A subclass with its own forward does more than run its layers in order.
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return [module]
    return [chain for child in module.children() for chain in _outermost_chains(child)]


@final
class _Chain:
    """Layers in sequence, compiled in parts for training.

    Validation batches have other sizes, and each size would be compiled anew.
    """

    def __init__(self, chain: nn.Sequential, cuts: set[int], eager: Sequence[nn.Module], backend: Any) -> None:
        eager_ids = {id(layer) for layer in eager}
        layers = list(chain)
        bounds = sorted({0, len(layers), *cuts} & set(range(len(layers) + 1)))
        self._chain = chain
        self._parts: list[Callable[[Any], Any]] = []
        for begin, end in itertools.pairwise(bounds):
            part = layers[begin:end]
            is_eager = len(part) == 1 and id(part[0]) in eager_ids
            self._parts.append(
                part[0] if is_eager else torch.compile(nn.Sequential(*part), dynamic=False, backend=backend)
            )

    def __call__(self, x: Any) -> Any:
        for part in self._parts if self._chain.training else self._chain:
            x = part(x)
        return x
