"""Networks compiled by Inductor for one batch size, kept in a file without the weights.

The operations of a run are recorded on fake tensors, as a CUDA graph records launches: control flow in Python is fixed,
and any network that can be captured can be recorded. What Inductor makes of them is stored; loading it needs neither
the recording nor a compiler. `torch._inductor.standalone_compile` exists in torch 2.11 to 2.13, as far as is known;
without it, networks run uncompiled, which is said.
"""

import os
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import ServeError
from penstock.runtime.gpu.precision import ONE_AT_A_TIME, libraries_in
from penstock.runtime.gpu.recorded import recorded, state_of
from penstock.runtime.gpu.rewrite_graph import rewrite_graph


def on_device(device: str) -> AbstractContextManager[Any]:
    """Make a GPU the current one; nothing for a CPU."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()


def compile_network(network: nn.Module, given: Sequence[Tensor], file: Path) -> None:
    """Compile a network for the shapes of an example, and write it atomically.

    Args:
        network: Takes tensors by position, and returns a tuple of them.
        given: The example.
        file: Where it goes.

    Raises:
        Exception: The network cannot be recorded or compiled; anything.
    """
    inductor: Any = __import__("torch._inductor", fromlist=["standalone_compile"])
    graph, flat = recorded(network, given), [*state_of(network).values(), *given]
    rewrite_graph(graph)
    with torch.no_grad():
        compiled = inductor.standalone_compile(graph, flat, dynamic_shapes="from_example_inputs", options={})
        # Kernels are tuned at their first run.
        compiled(*flat)
    beside = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    try:
        compiled.save(path=str(beside), format="binary")
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


@final
class CompiledNetwork(nn.Module):
    """A compiled network with the weights of the one that it was made of.

    Args:
        file: What `compile_network` wrote.
        network: The network, on the same device.
        precision: As in `GpuWay`.

    Raises:
        ServeError: The file cannot be used.
    """

    def __init__(self, file: Path, network: nn.Module, precision: str) -> None:
        super().__init__()
        self._precision = precision
        try:
            inductor: Any = __import__("torch._inductor", fromlist=["CompiledArtifact"])
            # It changes a variable of the environment meanwhile.
            with ONE_AT_A_TIME:
                self._compiled = inductor.CompiledArtifact.load(path=str(file), format="binary")
        except Exception as error:
            # A truncated file, or one of another torch; the loader raises anything.
            raise ServeError(f"{file} cannot be loaded ({type(error).__name__}: {error})") from error
        # A plain list: the weights belong to the other network.
        self._state = list(state_of(network).values())

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Run the network with tensors of the shapes that it was compiled for."""
        with libraries_in(self._precision, tuned=True):
            return tuple(self._compiled(*self._state, *given))
