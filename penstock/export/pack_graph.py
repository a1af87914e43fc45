"""Write the graph of a pack and check it against its bundle: `python -m penstock.export.pack_graph BUNDLE FILE`.

A separate process, see `penstock.runtime.onnx.exporter_process`. Its report is written beside the graph as JSON, see
`penstock.export.graph_report`.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import PackError
from penstock.core.json_record import record_json
from penstock.core.named_arrays import feeds_of
from penstock.core.packs.pack import STEP
from penstock.core.packs.pack_live import PackLive, PackState
from penstock.core.packs.pack_tensors import dims_of
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.export.generation_graph import GenerationGraphs
from penstock.export.graph_file import Shapes, keep_outputs, save_graph
from penstock.export.graph_report import GraphReport
from penstock.export.join_prepare import CHUNK, join_prepare
from penstock.export.pack_check import check_generation, check_live, check_network_outputs, check_oneshot, resized
from penstock.nn.streaming import Streaming, leaves
from penstock.runtime.load import Predictor, as_streaming
from penstock.runtime.named_network import NamedNetwork, served_function
from penstock.runtime.onnx.exporter_process import exporter_main
from penstock.runtime.onnx.onnx_export import (
    dynamic_dims,
    exported_program,
    graph_output,
    load_named_bundle,
    step_program,
)
from penstock.runtime.onnx.onnx_step import LAST, LENGTH, OUTPUT_LENGTH, next_name, state_name

# B batch (of one), T frames of a chunk

EMBEDDING = "embedding"
# The exporter takes lengths of 0 and 1 for constants.
TRACED_LENGTH = 5


@final
class _OneShot(nn.Module):
    """The served function of a network, and its embedding if it has one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, chunk_B: Tensor) -> list[Tensor]:
        answers = [served_function(self.module)(chunk_B)]
        embed: Any = getattr(self.module, "embed", None)
        return answers if embed is None else [*answers, embed(chunk_B)]


def write_graph(predictor: Predictor, file: Path) -> GraphReport:
    """Write the graph of a pack, and check its dimensions and its answers.

    Raises:
        PackError: Its inputs or outputs differ from the declared ones, or its answers from the bundle's.
    """
    if predictor.application.live is not None:
        return _write_live(predictor, file)
    if predictor.application.generate is not None:
        return _write_generation(predictor, file)
    return _write_oneshot(predictor, file)


def _write_oneshot(predictor: Predictor, file: Path) -> GraphReport:
    application = predictor.application
    several = isinstance(application.input, RecordSpec) or isinstance(application.output, RecordSpec)
    if several or application.finish is not None:
        program, made = _named_program(predictor)
    else:
        program, made = _plain_program(predictor)
    outputs: Shapes = {spec.name: (spec.dtype, (1, *spec.shape)) for spec in made}
    given = dims_of(application.input)
    outputs |= {name: ("int64", (1,)) for name in dims_of(graph_output(application)) if name not in given}
    report = _save_with_inputs(predictor, program, outputs, file)
    report = replace(report, outputs=tuple(made), sets=application.row_sets)
    finished = None
    if application.finish is not None:
        finished = check_network_outputs(predictor, replace(report, answers=len(made)), file)
        # They are in the graph for that comparison alone.
        report = replace(report, outputs=tuple(application.outputs.values()))
        keep_outputs(file, report.tensors.names)
    return replace(report, difference=check_oneshot(predictor, report, file, finished))


def _write_generation(predictor: Predictor, file: Path) -> GraphReport:
    graphs = GenerationGraphs(predictor, _traced_chunk(predictor))
    report = _save_with_inputs(predictor, *graphs.begin_program(), file=file)
    graphs.write_step(file.with_name(STEP))
    return replace(report, difference=check_generation(predictor, report, file))


def _save_with_inputs(predictor: Predictor, program: Any, outputs: Shapes, file: Path) -> GraphReport:
    """Save a program that takes the application's inputs, behind its `prepare` if there is one."""
    application, prepare = predictor.application, predictor.files.prepare
    given = tuple(application.inputs.values())
    # A name that cannot clash with those of `prepare`.
    renamed = {} if prepare is None else {application.input_tensor.name: CHUNK}
    inputs: Shapes = {renamed.get(spec.name, spec.name): (spec.dtype, (1, *spec.shape)) for spec in given}
    inputs |= dict.fromkeys(dims_of(application.input), ("int64", (1,)))
    for value in program.model.graph.inputs:
        value.name = renamed.get(value.name, value.name)
    save_graph(program, file, inputs, outputs)
    report = GraphReport(
        inputs=given,
        outputs=tuple(application.outputs.values()),
        answers=len(application.outputs),
        generate=application.generate,
    )
    if prepare is None or application.prepare is None:
        return report
    nodes = join_prepare(file, prepare, application.input_tensor)
    return replace(report, raw=application.prepare.raw, inputs=(), prepare_nodes=nodes)


def _plain_program(predictor: Predictor) -> tuple[Any, list[TensorSpec]]:
    """The program of a network of one tensor of fixed size, and its outputs."""
    application = predictor.application
    chunk_B = torch.from_numpy(predictor.files.golden.inputs[:1].copy())
    network = _OneShot(predictor.module).eval()
    with torch.inference_mode():
        answers = network(chunk_B)
    outputs = [application.output_tensor, *map(_embedding, answers[1:])]
    if len(outputs) > 1 and application.output_tensor.name == EMBEDDING:
        raise PackError(f"the output and the network's embed are both named {EMBEDDING!r}; rename the output.")
    names = [output.name for output in outputs]
    return exported_program(network, (chunk_B,), [application.input_tensor.name], names), outputs


def _named_program(predictor: Predictor) -> tuple[Any, list[TensorSpec]]:
    """The program of a network of several tensors or of varying lengths, and its outputs."""
    application = predictor.application
    made = graph_output(application)
    network = NamedNetwork(predictor.module, application.input, made)
    feeds, lengths_B = feeds_of(application.input, _traced_chunk(predictor))
    given = {name: torch.from_numpy(array) for name, array in (feeds | lengths_B).items()}
    dynamic = {spec.name: dynamic_dims(spec) for spec in application.inputs.values()}
    program = exported_program(
        network,
        tuple(given[name] for name in network.arguments),
        network.arguments,
        network.results,
        (tuple(dynamic.get(name, {}) for name in network.arguments),),
    )
    return program, list(made.tensors)


def _traced_chunk(predictor: Predictor) -> Array:
    """One input, `[1, ...]`, with different lengths, so that none is taken for another one."""
    spec, chunk_B = predictor.application.input, predictor.files.golden.inputs[:1]
    if not isinstance(spec, RecordSpec):
        return chunk_B
    dims = spec.dims.items()
    lengths = {name: min(max(dim.min, TRACED_LENGTH + at), int(dim)) for at, (name, dim) in enumerate(dims)}
    return resized(spec, chunk_B[0, ...], lengths)[None]


def _write_live(predictor: Predictor, file: Path) -> GraphReport:
    application = predictor.application
    assert application.live is not None
    network = as_streaming(application, predictor.module)
    given, made = application.input_tensor, application.output_tensor
    states = _states(network)
    program = step_program(network, given, rows=1)
    program.model.graph.inputs[0].name, program.model.graph.outputs[0].name = given.name, made.name
    inputs: Shapes = {given.name: (given.dtype, (1, *given.shape)), LENGTH: ("int64", (1,)), LAST: ("bool", (1,))}
    outputs: Shapes = {made.name: (made.dtype, (1, *made.shape)), OUTPUT_LENGTH: ("int64", (1,))}
    inputs |= {state.input: (state.dtype, state.shape) for state in states}
    outputs |= {state.output: (state.dtype, state.shape) for state in states}
    save_graph(program, file, inputs, outputs)
    live = PackLive(
        rate_hz=float(application.live.rate_hz),
        chunk=given.shape[0],
        states=states,
        length=LENGTH,
        last=LAST,
        output_length=OUTPUT_LENGTH,
    )
    return GraphReport(
        inputs=(given,),
        outputs=(made,),
        live=live,
        difference=check_live(predictor, network, file),
    )


def _embedding(embedding_B: Tensor) -> TensorSpec:
    if embedding_B.ndim != 2 or embedding_B.dtype != torch.float32:
        raise PackError(
            f"the network's embed gives {_dtype(embedding_B)}{list(embedding_B.shape)} for one input; it must give one "
            f"float32 vector for each, [1, E]."
        )
    shape = (int(embedding_B.shape[1]),)
    return TensorSpec(name=EMBEDDING, dtype="float32", shape=shape, meaning="feature vector, to compare inputs by")


def _states(network: Streaming) -> tuple[PackState, ...]:
    states: list[PackState] = []
    for index, leaf in enumerate(leaves(network.initial_state(1))):
        values = leaf.unique().tolist() or [0]
        if len(values) > 1:
            raise PackError(
                f"state {index} of the network has several initial values; a pack holds one per state tensor. "
                f"Initialise it with zeros and add the rest in `step`."
            )
        if not math.isfinite(values[0]):
            raise PackError(
                f"state {index} of the network has the initial value {values[0]}, which JSON cannot hold; use a "
                f"finite number."
            )
        name = state_name(index), next_name(index)
        shape = tuple(leaf.shape)
        states.append(PackState(input=name[0], output=name[1], dtype=_dtype(leaf), shape=shape, initial=values[0]))
    return tuple(states)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _write(predictor: Predictor, file: Path) -> None:
    report = write_graph(predictor, file)
    file.with_suffix(".json").write_text(json.dumps(record_json(report)))


def main() -> None:
    """Run the exporter process."""
    exporter_main(__doc__, load_named_bundle, _write)


if __name__ == "__main__":
    main()
