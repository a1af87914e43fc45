"""The operations of a network's run, recorded on fake tensors, as a CUDA graph records launches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx


def state_of(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, in the order in which a recorded run takes them."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def recorded(network: nn.Module, given: Sequence[Tensor]) -> GraphModule:
    """Record a run for the shapes of an example; its arguments are the state, then those of the network.

    Args:
        network: Takes tensors by position.
        given: The example.

    Raises:
        Exception: The network cannot be recorded; anything.
    """
    state = state_of(network)
    names = list(state)

    def run(*flat: Tensor) -> Any:
        return functional_call(network, dict(zip(names, flat, strict=False)), tuple(flat[len(names) :]))

    with torch.no_grad():
        # The last argument: tensors that are neither parameters nor buffers are constants.
        record: Any = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)
        return record(*state.values(), *given)
