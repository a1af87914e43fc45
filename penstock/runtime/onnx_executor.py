"""Exported networks, run by ONNX Runtime on the CPU without torch."""

from pathlib import Path
from typing import Any, final

from penstock.core.errors import BundleError
from penstock.core.onnx_session import onnx_errors, onnx_session
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.executor import Executor, StepInput, StepOutput

# B rows of the batch


@final
class OnnxExecutor(Executor):
    """A one-shot network on the CPU: any number of rows, no padding.

    Args:
        graph: The exported network, an ONNX file with one input and one output whose first dimension is the batch.
        input: One raw input chunk.
        output: One output chunk.
        threads: CPU threads for one step.
        max_rows: The largest batch.

    Raises:
        BundleError: The graph has another number of inputs or outputs.
    """

    def __init__(
        self, graph: Path, input: TensorSpec, output: TensorSpec, *, threads: int, max_rows: int = 1024
    ) -> None:
        self.input = input
        self.output = output
        self.max_rows = max_rows
        self._session = open_graph(graph, threads)
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1:
            raise BundleError(f"the exported graph {graph} is not that of a one-shot network; delete it.")
        self._name: str = inputs[0].name

    def step(self, batch: StepInput) -> StepOutput:
        """Run the network once for the rows of the batch."""
        return StepOutput(output_B=self.predict(batch.chunk_B))

    def predict(self, chunk_B: Array) -> Array:
        """Run raw inputs `[B, *input.shape]`; returns outputs `[B, *output.shape]`."""
        return self._session.run(None, {self._name: chunk_B})[0]


def steady_graph(graph: Path) -> Path:
    """Path of the optional second graph, for steady batches of live streams."""
    return graph.with_suffix(".steady")


def open_graph(graph: Path, threads: int, *, any_batch: bool = True) -> Any:
    """Open an exported graph.

    Args:
        graph: An ONNX file; the first dimension of every input is the batch.
        threads: CPU threads for one run.
        any_batch: Whether it must take a batch of any size.

    Raises:
        BundleError: It cannot be loaded, or does not take a batch of any size.
    """
    try:
        session = onnx_session(graph, threads=threads)
    except onnx_errors() as error:
        raise BundleError(f"the exported graph {graph} cannot be loaded ({error}); delete it.") from None
    if any_batch and any(isinstance(given.shape[0], int) for given in session.get_inputs()):
        raise BundleError(f"the exported graph {graph} does not take a batch of any size; delete it.")
    return session
