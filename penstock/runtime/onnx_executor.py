"""Networks run by ONNX Runtime on the CPU: the exported graph, without torch."""

from pathlib import Path
from typing import Any, final

import onnxruntime

from penstock.core.errors import BundleError
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.executor import Batch, Executor, Result

# B rows of the batch

QUIET = 3  # ONNX Runtime's severity: errors alone


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
        BundleError: It is not such a graph.
    """

    def __init__(
        self, graph: Path, input: TensorSpec, output: TensorSpec, *, threads: int, max_rows: int = 1024
    ) -> None:
        self.input = input
        self.output = output
        self.max_rows = max_rows
        self._session = session_of(graph, threads)
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1:
            raise BundleError(f"the exported graph {graph} is not that of a one-shot network; delete it.")
        self._name: str = inputs[0].name

    def step(self, batch: Batch) -> Result:
        """Run the network once for the rows of the batch."""
        return Result(output_B=self.predict(batch.chunk_B))

    def predict(self, chunk_B: Array) -> Array:
        """The network's outputs `[B, *output.shape]` for raw inputs `[B, *input.shape]`."""
        return self._session.run(None, {self._name: chunk_B})[0]


def steady_graph(graph: Path) -> Path:
    """Where the graph for steady batches of live streams is kept beside the one for all, if there is one."""
    return graph.with_suffix(".steady")


def session_of(graph: Path, threads: int) -> Any:
    """ONNX Runtime's session of an exported graph.

    Args:
        graph: An ONNX file; the first dimension of all that goes in is the batch.
        threads: CPU threads for one run.

    Raises:
        BundleError: It cannot be loaded, or does not take a batch of any size.
    """
    try:
        session: Any = onnxruntime.InferenceSession(graph, quiet_options(threads), providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's own errors share no class but this
        raise BundleError(f"the exported graph {graph} cannot be loaded ({error}); delete it.") from None
    if any(isinstance(given.shape[0], int) for given in session.get_inputs()):
        raise BundleError(f"the exported graph {graph} does not take a batch of any size; delete it.")
    return session


def quiet_options(threads: int) -> Any:
    """How ONNX Runtime runs beside others: on so many threads, which do not spin, and without a word but of errors."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = QUIET
    # Threads that spin while they wait take the time of whoever shares their cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options
