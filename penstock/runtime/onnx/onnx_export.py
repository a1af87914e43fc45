"""Export a bundle's network as an ONNX graph: `python -m penstock.runtime.onnx.onnx_export BUNDLE FILE`."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.core.application import Application
from penstock.core.dim import Dim
from penstock.core.named_arrays import feeds_of
from penstock.core.record import ChunkSpec, chunk_spec
from penstock.core.spec import TensorSpec
from penstock.nn.streaming import Streaming, leaves, map_state
from penstock.runtime.load import Predictor, as_streaming, load
from penstock.runtime.named_network import NamedNetwork
from penstock.runtime.onnx.exporter_process import exporter_main, first_cause
from penstock.runtime.onnx.onnx_executor import steady_graph
from penstock.runtime.onnx.onnx_step import (
    CHUNK,
    COUNTS,
    GIVEN,
    LAST,
    LENGTH,
    OUTPUT,
    OUTPUT_LENGTH,
    next_name,
    state_name,
)

# Two, because the exporter treats a batch of one as a constant.
EXAMPLES = 2
BATCH = torch.export.Dim("batch")
VARYING = torch.export.Dim.DYNAMIC
RECURRENT = ("GRU", "LSTM", "RNN")
# Whole chunks after which the number of buffered frames in every layer is constant, or never.
STEPS_TO_STEADY = 64


@final
class _FlatStep(nn.Module):
    """One step of a streaming network, with its state as a list of leaves."""

    def __init__(self, network: Streaming) -> None:
        super().__init__()
        self.network = network
        self._state = network.initial_state(1)

    def forward(self, chunk_BT: Tensor, length_B: Tensor, last_B: Tensor, state: list[Tensor]) -> list[Tensor]:
        given = iter(state)
        step = self.network.step(chunk_BT, length_B, map_state(lambda _: next(given), self._state), last_B)
        return [step.output_BU, step.length_B, *leaves(step.state)]


@final
class _SteadyStep(nn.Module):
    """One step of whole chunks with constant counts in the state; gives the output and the other leaves."""

    def __init__(self, network: Streaming, frames: int, counts: dict[int, int]) -> None:
        super().__init__()
        self.network = network
        self._frames = frames
        self._counts = counts
        self._state = network.initial_state(1)

    def forward(self, chunk_BT: Tensor, state: list[Tensor]) -> list[Tensor]:
        others = iter(state)
        numbered = iter(range(len(leaves(self._state))))
        # Counts are Python ints, so that layers can branch on them while they are traced.
        known: Any = map_state(lambda _: self._leaf(next(numbered), others), self._state)
        step = self.network.step(chunk_BT, torch.full(chunk_BT.shape[:1], self._frames), known)
        return [step.output_BU, *(leaf for at, leaf in enumerate(leaves(step.state)) if at not in self._counts)]

    def _leaf(self, at: int, others: Iterator[Tensor]) -> Any:
        return self._counts[at] if at in self._counts else next(others)


def export_graph(predictor: Predictor, file: Path) -> None:
    """Export the network of a loaded bundle as an ONNX graph with a dynamic batch dimension."""
    application = predictor.application
    if application.live is not None:
        export_step(as_streaming(application, predictor.module), application.input_tensor, file)
        return
    network = NamedNetwork(predictor.module, application.input, graph_output(application))
    feeds, lengths = feeds_of(application.input, predictor.files.golden.inputs[[0] * EXAMPLES])
    given = {name: torch.from_numpy(array) for name, array in (feeds | lengths).items()}
    dynamic = {spec.name: {0: BATCH} | dynamic_dims(spec) for spec in application.input.tensors}
    exported_program(
        network,
        tuple(given[name] for name in network.arguments),
        network.arguments,
        network.results,
        (tuple(dynamic.get(name, {0: BATCH}) for name in network.arguments),),
    ).save(file)


def graph_output(application: Application) -> ChunkSpec:
    """Outputs of an exported graph: the application's, and with a `finish` also those of the network alone.

    The latter is compared with the recorded numbers, which a comparison of finished outputs cannot replace: the numbers
    behind a row that was left out are not in them.
    """
    between = () if application.finish is None else application.finish.tensors
    return chunk_spec((*application.outputs.values(), *between))


def dynamic_dims(spec: TensorSpec) -> dict[int, Any]:
    """Return the dimensions of a batch of a tensor whose length varies, for `torch.onnx.export`."""
    return {dim: VARYING for dim, size in enumerate(spec.shape, start=1) if isinstance(size, Dim)}


def export_step(network: Streaming, input: TensorSpec, file: Path) -> None:
    """Export one step of a network in evaluation mode, for `penstock.runtime.onnx.onnx_step`.

    Args:
        network: The network, on the CPU.
        input: One raw chunk, frames first.
        file: The ONNX file. The graph of steady batches, if any, goes beside it.
    """
    step_program(network, input).save(file)
    with torch.inference_mode():
        steady = _steady(network, input)
    if steady is not None:
        try:
            _export_steady_step(network, input, *steady, steady_graph(file))
        except torch.onnx.OnnxExporterError as error:
            # A layer of the application may need its counts as tensors.
            print(f"no graph for steady batches: {first_cause(error)}", file=sys.stderr)


def step_program(network: Streaming, input: TensorSpec, rows: int | None = None) -> Any:
    """Export one step of a network in evaluation mode, for a batch of `rows`, or of any size by default.

    Returns:
        The exporter's program. Its inputs are the chunk, its valid frames, the rows whose stream ends, and the leaves
        of the state in order; its outputs are the output, its valid frames, and the leaves of the new state.
    """
    given = rows or EXAMPLES
    state = [leaf.clone() for leaf in leaves(network.initial_state(given))]
    length_B = torch.full((given,), input.shape[0])
    batch = {0: BATCH}
    return exported_program(
        _FlatStep(network),
        (_zeros(input, given), length_B, length_B == 0, state),
        [CHUNK, LENGTH, LAST, *map(state_name, range(len(state)))],
        [OUTPUT, OUTPUT_LENGTH, *map(next_name, range(len(state)))],
        (batch, batch, batch, [batch] * len(state)) if rows is None else None,
    )


def _export_steady_step(network: Streaming, input: TensorSpec, counts: dict[int, int], given: int, file: Path) -> None:
    others = {at: leaf.clone() for at, leaf in enumerate(leaves(network.initial_state(EXAMPLES))) if at not in counts}
    program = exported_program(
        _SteadyStep(network, input.shape[0], counts),
        (_zeros(input, EXAMPLES), list(others.values())),
        [CHUNK, *map(state_name, others)],
        None,
        ({0: BATCH}, [{0: BATCH}] * len(others)),
    )
    program.model.metadata_props.update({COUNTS: json.dumps(counts), GIVEN: str(given)})
    program.save(file)


def _steady(network: Streaming, input: TensorSpec) -> tuple[dict[int, int], int] | None:
    """Find the counts of the state that stay constant over whole chunks, and the frames that each chunk gives."""
    chunk_BT, state = _zeros(input, 1), network.initial_state(1)
    length_B = torch.full((1,), input.shape[0])
    before: dict[int, int] = {}
    for _ in range(STEPS_TO_STEADY):
        step = network.step(chunk_BT, length_B, state)
        state = step.state
        counts = {
            at: int(leaf) for at, leaf in enumerate(leaves(state)) if leaf.dtype == torch.int64 and leaf.ndim == 1
        }
        if counts and counts == before:
            return counts, int(step.length_B)
        before = counts
    return None


def _zeros(input: TensorSpec, batch: int) -> Tensor:
    return torch.zeros(batch, *input.shape, dtype=getattr(torch, input.dtype))


def exported_program(
    module: nn.Module, given: tuple[Any, ...], inputs: list[str], outputs: list[str] | None, dynamic: Any = None
) -> Any:
    """Run torch's exporter on a module in evaluation mode.

    Args:
        module: The module.
        given: Example arguments.
        inputs: Names of the graph's inputs.
        outputs: Names of its outputs.
        dynamic: Dimensions of any size, as `dynamic_shapes` of `torch.onnx.export`.
    """
    # Fused attention has other strides than what the exporter makes of it, so that a reshape behind it fails.
    with sdpa_kernel(SDPBackend.MATH):
        program = torch.onnx.export(
            module.eval(),
            given,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=dynamic,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    _forget_shapes(program.model.graph)
    return program


def _forget_shapes(graph: Any) -> None:
    """Remove the shapes of values behind recurrent layers.

    torch 2.13 gives them the lengths of the example, also where lengths vary. ONNX Runtime trusts them when it fuses
    operations, and finds those that it needs by itself.
    """
    behind: set[Any] = set()
    outputs = set(graph.outputs)
    for node in graph:
        if node.op_type in RECURRENT or behind.intersection(node.inputs):
            behind.update(node.outputs)
    for value in behind - outputs:
        value.shape = None


def strip_notes(model: Any) -> None:
    """Remove the exporter's notes, such as source files and lines of each operation."""
    graph = model.graph
    del model.metadata_props[:]
    del graph.metadata_props[:]
    for entries in (graph.node, graph.input, graph.output, graph.value_info, graph.initializer):
        for entry in entries:
            entry.doc_string = ""
            del entry.metadata_props[:]


def load_named_bundle(given: argparse.Namespace) -> Predictor:
    """Load the bundle that the command line names."""
    return load(given.source, app=given.app, accept_changed=given.accept_changed_app)


def main() -> None:
    """Run the exporter process."""
    exporter_main(__doc__, load_named_bundle, export_graph)


if __name__ == "__main__":
    main()
