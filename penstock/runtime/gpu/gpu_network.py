"""One-shot networks as a GPU runs them: in a precision, with tensors in a declared order."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.named_arrays import feeds_of
from penstock.core.record import ChunkSpec
from penstock.nn.streaming import State, Step, Streaming
from penstock.runtime.gpu.compiled_files import remember_folds, remembered_folds
from penstock.runtime.gpu.fold_norms import find_folds, fold_norms
from penstock.runtime.gpu.precision import GpuWay, computing, libraries_in, reduced
from penstock.runtime.load import Predictor
from penstock.runtime.named_network import NamedNetwork
from penstock.runtime.streaming_executor import RunStep, Stateless

# B rows of a batch

log = logging.getLogger(__name__)


@final
class GpuNetwork(nn.Module):
    """A one-shot network in a precision.

    Args:
        module: The network, in evaluation mode; see `reduced`.
        input: One raw input chunk.
        output: One output chunk.
        precision: As in `GpuWay`.

    Attributes:
        arguments: As those of `NamedNetwork`.
        results: Likewise.

    Raises:
        ApplicationError: The network does not take tensors of these names.
    """

    def __init__(self, module: nn.Module, input: ChunkSpec, output: ChunkSpec, precision: str) -> None:
        super().__init__()
        self.network = NamedNetwork(module, input, output)
        self.precision = precision
        self.arguments, self.results = self.network.arguments, self.network.results
        self._dtypes = {spec.name: getattr(torch, spec.dtype) for spec in output.tensors}

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Run the network with the tensors of `arguments`; returns those of `results`."""
        with computing(self.precision, given[0].device.type):
            results = self.network(*given)
        # Autocast gives its own dtype; the outputs have the declared one.
        named = zip(self.results, results, strict=True)
        return tuple(result.to(self._dtypes.get(name, result.dtype)).contiguous() for name, result in named)


def gpu_network(module: nn.Module, input: ChunkSpec, output: ChunkSpec, way: GpuWay, device: str) -> GpuNetwork:
    """Make a network of its own for a device.

    Raises:
        ApplicationError: The network does not take tensors of these names.
    """
    return GpuNetwork(reduced(module, way), input, output, way.precision).to(device).eval()


def with_folded_norms(predictor: Predictor, place: Path) -> Predictor:
    """Fold the batch norms of a one-shot network into its convolutions, in a copy of it.

    Args:
        predictor: The network.
        place: The folder that remembers which norms are folded: to record a run takes seconds.
    """
    application = predictor.application
    module = copy.deepcopy(predictor.module).eval().requires_grad_(False)
    whole = GpuNetwork(module, application.input, application.output, "fp32")
    folds = remembered_folds(place)
    try:
        if folds is not None:
            fold_norms(whole, folds)
    except AttributeError as error:
        log.warning("%s: the remembered batch norms are looked for anew (%s)", application.name, error)
        folds = None
    if folds is None:
        # Two, because some networks treat a batch of one in another way.
        feeds, lengths = feeds_of(application.input, np.repeat(predictor.files.golden.inputs[:1], 2, 0))
        given = feeds | lengths
        folds = find_folds(whole, [torch.from_numpy(given[name]) for name in whole.arguments])
        fold_norms(whole, folds)
        if folds:
            # None may have been found because a run could not be recorded this time.
            remember_folds(place, folds)
    log.info("%s: %d batch norms are folded into convolutions", application.name, len(folds))
    return replace(predictor, module=module)


@final
class OneTensor(nn.Module):
    """A network with one input and one output, as a function of one tensor.

    Args:
        network: The network.
    """

    def __init__(self, network: GpuNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, chunk_B: Tensor) -> Tensor:
        """The output for a batch of raw inputs."""
        return self.network(chunk_B)[0]


@final
class LiveNetwork(Streaming):
    """A live network whose products round as its precision asks; its dtype is converted elsewhere.

    Args:
        network: The network.
        precision: As in `GpuWay`.
    """

    def __init__(self, network: Streaming, precision: str) -> None:
        super().__init__()
        self.network = network
        self.precision = precision

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """See `Streaming`."""
        with libraries_in(self.precision):
            return self.network(whole_BT, length_B)

    def output_lengths(self, length_B: Tensor) -> Tensor:
        """See `Streaming`."""
        return self.network.output_lengths(length_B)

    def initial_state(self, batch: int) -> State:
        """See `Streaming`."""
        return self.network.initial_state(batch)

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`."""
        with libraries_in(self.precision):
            return self.network.step(chunk_BT, length_B, state, last_B)


def stateless_step(network: Stateless, compiled: nn.Module | None = None) -> RunStep:
    """Make the step of a one-shot network.

    Args:
        network: The network.
        compiled: Runs in its place, with the same arguments.
    """

    def step(chunk_B: Tensor, length_B: Tensor, _state: object, _last_B: Tensor) -> Step:
        output_B = network(chunk_B) if compiled is None else compiled(chunk_B)[0]
        return Step(output_B, network.output_lengths(length_B), ())

    return step
