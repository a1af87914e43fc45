"""Exported networks, run by ONNX Runtime on the CPU without torch."""

from pathlib import Path
from typing import Any, final

from penstock.core.errors import BundleError
from penstock.core.machine.onnx_session import onnx_errors, onnx_session
from penstock.core.named_arrays import chunks_of, feeds_of
from penstock.core.record import ChunkSpec
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.executor import Executor, StepInput, StepOutput

# B rows of the batch


@final
class OnnxExecutor(Executor):
    """A one-shot network on the CPU: any number of rows, padded to the longest of them.

    Args:
        graph: The exported network, an ONNX file; the first dimension of every tensor is the batch.
        input: One raw input chunk.
        output: One output chunk.
        threads: CPU threads for one step.
        max_rows: The largest batch.
        network: Spec of the inputs of a `finish`, which the graph outputs too, for comparisons; None without one.

    Raises:
        BundleError: The graph has other inputs or outputs.
    """

    def __init__(
        self,
        graph: Path,
        input: ChunkSpec,
        output: ChunkSpec,
        *,
        threads: int,
        max_rows: int = 1024,
        network: ChunkSpec | None = None,
    ) -> None:
        self.input = input
        self.output = output
        self.max_rows = max_rows
        self._session = open_graph(graph, threads, any_size=bool(input.dims))
        self._arguments = [given.name for given in self._session.get_inputs()]
        results = [made.name for made in self._session.get_outputs()]
        compared = set() if network is None else _names(network)
        self._network = network
        # Outputs that are not wanted are not copied.
        self._results = [name for name in results if name in _names(output) or name not in compared]
        self._compared = [name for name in results if name in compared]
        # An input that does not change the outputs is no input of the graph.
        tensors = {spec.name for spec in output.tensors}
        if not (set(self._arguments) <= _names(input) and tensors <= set(self._results) <= _names(output)):
            raise BundleError(f"the exported graph {graph} is not that of a one-shot network; delete it.")
        # One array in and one out, the most frequent case.
        one = len(self._arguments) == len(self._results) == 1
        self._is_plain = one and isinstance(input, TensorSpec) and isinstance(output, TensorSpec)

    def step(self, batch: StepInput) -> StepOutput:
        """Run the network once for the rows of the batch."""
        return StepOutput(output_B=self.predict(batch.chunk_B))

    def predict(self, chunk_B: Array) -> Array:
        """Run raw inputs `[B, *input.shape]`; returns outputs `[B, *output.shape]`."""
        if self._is_plain:
            return self._session.run(self._results, {self._arguments[0]: chunk_B})[0]
        feeds, lengths = feeds_of(self.input, chunk_B)
        given = feeds | lengths
        results = self._session.run(self._results, {name: given[name] for name in self._arguments})
        return chunks_of(self.output, dict(zip(self._results, results, strict=True)), lengths)

    def predict_network(self, chunk_B: Array) -> Array:
        """Run raw inputs; returns the inputs of `finish`, for comparisons."""
        assert self._network is not None, "without a finish, predict gives the network's outputs"
        feeds, lengths = feeds_of(self.input, chunk_B)
        given = feeds | lengths
        results = self._session.run(self._compared, {name: given[name] for name in self._arguments})
        return chunks_of(self._network, dict(zip(self._compared, results, strict=True)), lengths)


def _names(spec: ChunkSpec) -> set[str]:
    return {tensor.name for tensor in spec.tensors} | {dim.name for tensor in spec.tensors for dim in tensor.dims}


def steady_graph(graph: Path) -> Path:
    """Path of the optional second graph, for steady batches of live streams."""
    return graph.with_suffix(".steady")


def open_graph(graph: Path, threads: int, *, any_batch: bool = True, any_size: bool = False) -> Any:
    """Open an exported graph.

    Args:
        graph: An ONNX file; the first dimension of every input is the batch.
        threads: CPU threads for one run.
        any_batch: Whether it must take a batch of any size.
        any_size: Tensors vary in length, so that memory is not planned for each of their shapes.

    Raises:
        BundleError: It cannot be loaded, or does not take a batch of any size.
    """
    try:
        session = onnx_session(graph, threads=threads, any_size=any_size)
    except onnx_errors() as error:
        raise BundleError(f"the exported graph {graph} cannot be loaded ({error}); delete it.") from None
    if any_batch and any(isinstance(given.shape[0], int) for given in session.get_inputs()):
        raise BundleError(f"the exported graph {graph} does not take a batch of any size; delete it.")
    return session
