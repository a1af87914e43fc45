"""Batch normalization folded into the convolution before it: one operation and one pass over memory less.

In evaluation mode a batch norm scales and shifts each channel, as other weights of the convolution do (Jacob et al.
2018, "Quantization and training of neural networks for efficient integer-arithmetic-only inference", section 3.2).
Which norm follows which convolution is read from a recorded run, not from the order of the modules.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from penstock.runtime.gpu.recorded import recorded, state_of

log = logging.getLogger(__name__)

aten: Any = torch.ops.aten
_CONVOLUTIONS = (aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_NORMS = (
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.batch_norm.default,
)
# Subclasses may do more than that.
_NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTION_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Fold(NamedTuple):
    """A batch norm that can be folded.

    Args:
        convolution: Path of the convolution before it.
        norm: Its own path.
    """

    convolution: str
    norm: str


def find_folds(network: nn.Module, given: Sequence[Tensor]) -> list[Fold]:
    """Find the batch norms that can be folded; none where a run cannot be recorded.

    Args:
        network: The network, in evaluation mode, on the CPU.
        given: Example arguments.
    """
    if not any(type(layer) in _NORM_LAYERS for layer in network.modules()):
        return []
    try:
        graph = recorded(network, given)
    except Exception as error:  # noqa: BLE001 - the network is the application's code
        log.info("no batch norm is folded, because a run cannot be recorded (%s)", type(error).__name__)
        return []
    names = list(state_of(network))
    inputs: list[Any] = [node for node in graph.graph.nodes if node.op == "placeholder"]
    # By node: the weights that a run takes.
    of_node = dict(zip(inputs, names, strict=False))
    uses = Counter(of_node[used] for node in graph.graph.nodes for used in node.all_input_nodes if used in of_node)
    found: list[Fold] = []
    for node in graph.graph.nodes:
        if node.target not in _NORMS or node.args[0].target not in _CONVOLUTIONS or len(node.args[0].users) != 1:
            continue
        convolution = _layer(network, of_node.get(node.args[0].args[1]), _CONVOLUTION_LAYERS, uses, subclasses=True)
        norm = _layer(network, of_node.get(node.args[1]), _NORM_LAYERS, uses, subclasses=False)
        if convolution is not None and norm is not None:
            found.append(Fold(convolution, norm))
    return found


def fold_norms(network: nn.Module, folds: Sequence[Fold]) -> None:
    """Fold batch norms into convolutions, in place.

    Args:
        network: The network.
        folds: What `find_folds` found for it.

    Raises:
        AttributeError: It has no such layers.
    """
    layers = [(network.get_submodule(each.convolution), each.norm, network.get_submodule(each.norm)) for each in folds]
    for convolution, path, norm in layers:
        _fold(network, convolution, path, norm)


def _layer(
    network: nn.Module, weight: str | None, kinds: tuple[type, ...], uses: Counter[str], *, subclasses: bool
) -> str | None:
    """Find the path of the layer that owns a weight, and that is run once."""
    path, _, name = (weight or "").rpartition(".")
    if weight is None or name != "weight" or uses[weight] != 1:
        return None
    layer = network.get_submodule(path)
    if not (isinstance(layer, kinds) if subclasses else type(layer) in kinds):
        return None
    # Hooks, such as those that compute the weight anew for each run, would see or undo the change.
    hooks = ("_forward_hooks", "_forward_pre_hooks", "parametrizations")
    return None if any(getattr(layer, name, None) for name in hooks) else path


def _fold(network: nn.Module, convolution: Any, path: str, norm: Any) -> None:
    with torch.no_grad():
        weight, bias = fuse_conv_bn_weights(
            convolution.weight, convolution.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        )
    convolution.weight = nn.Parameter(weight.detach(), requires_grad=False)
    convolution.bias = nn.Parameter(bias.detach(), requires_grad=False)
    parent, _, name = path.rpartition(".")
    network.get_submodule(parent).register_module(name, nn.Identity())
