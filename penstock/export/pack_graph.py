"""Write the graph of a pack and check it against its bundle: `python -m penstock.export.pack_graph BUNDLE FILE`.

A separate process, see `penstock.runtime.exporter_process`. Its report is written beside the graph as JSON, see
`penstock.export.graph_report`.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from penstock.core.errors import PackError
from penstock.core.json_record import record_json
from penstock.core.pack import PackLive, PackState
from penstock.core.prepare import RawSpec
from penstock.core.spec import TensorSpec
from penstock.export.graph_report import GraphReport
from penstock.export.join_prepare import CHUNK, join_prepare, opset_of
from penstock.export.pack_check import check_live, check_oneshot
from penstock.nn.streaming import Streaming, leaves
from penstock.runtime.exporter_process import exporter_main
from penstock.runtime.load import Predictor, as_streaming
from penstock.runtime.named_network import served_function
from penstock.runtime.onnx_export import exported_program, load_named_bundle, step_program, strip_notes
from penstock.runtime.onnx_step import LAST, LENGTH, OUTPUT_LENGTH, next_name, state_name
from penstock.runtime.prepare_session import RAW

# B batch (of one), T frames of a chunk

EMBEDDING = "embedding"
# The limit of onnxruntime-web; see docs/decisions/020-pack.md.
MAX_OPSET = 21
MAX_BYTES = 1 << 31


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
    return _write_oneshot(predictor, file)


def _write_oneshot(predictor: Predictor, file: Path) -> GraphReport:
    application, prepare = predictor.application, predictor.files.prepare
    given = application.input_tensor
    chunk_B = torch.from_numpy(predictor.files.golden.inputs[:1].copy())
    network = _OneShot(predictor.module).eval()
    with torch.inference_mode():
        answers = network(chunk_B)
    outputs = [application.output_tensor, *map(_embedding, answers[1:])]
    # A name that cannot clash with those of `prepare`.
    name = given.name if prepare is None else CHUNK
    program = exported_program(network, (chunk_B,), [name], [output.name for output in outputs])
    inputs = {name: (given.dtype, (1, *given.shape))}
    _save(program, file, inputs, {output.name: (output.dtype, (1, *output.shape)) for output in outputs})
    report = GraphReport(input=_raw(given), input_name=name, outputs=tuple(outputs))
    if prepare is not None:
        raw = application.prepare
        assert raw is not None
        nodes = join_prepare(file, prepare, given)
        report = replace(report, input=raw.raw, input_name=RAW, prepare_nodes=nodes)
    return replace(report, difference=check_oneshot(predictor, report, file))


def _write_live(predictor: Predictor, file: Path) -> GraphReport:
    application = predictor.application
    assert application.live is not None
    network = as_streaming(application, predictor.module)
    given, made = application.input_tensor, application.output_tensor
    states = _states(network)
    program = step_program(network, given, rows=1)
    program.model.graph.inputs[0].name, program.model.graph.outputs[0].name = given.name, made.name
    inputs = {given.name: (given.dtype, (1, *given.shape)), LENGTH: ("int64", (1,)), LAST: ("bool", (1,))}
    outputs = {made.name: (made.dtype, (1, *made.shape)), OUTPUT_LENGTH: ("int64", (1,))}
    inputs |= {state.input: (state.dtype, state.shape) for state in states}
    outputs |= {state.output: (state.dtype, state.shape) for state in states}
    _save(program, file, inputs, outputs)
    live = PackLive(
        rate_hz=float(application.live.rate_hz),
        chunk=given.shape[0],
        states=states,
        length=LENGTH,
        last=LAST,
        output_length=OUTPUT_LENGTH,
    )
    return GraphReport(
        input=_raw(given),
        input_name=given.name,
        outputs=(made,),
        live=live,
        difference=check_live(predictor, network, file),
    )


def _raw(spec: TensorSpec) -> RawSpec:
    if not spec.shape:
        raise PackError(f"the input {spec.name!r} is a single number; a pack takes arrays. Give it shape (1,).")
    return RawSpec(dtype=spec.dtype, shape=spec.shape, meaning=spec.meaning, units=spec.units)


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


def _save(
    program: Any,
    file: Path,
    inputs: dict[str, tuple[str, tuple[int, ...]]],
    outputs: dict[str, tuple[str, tuple[int, ...]]],
) -> None:
    program.save(file, external_data=False)
    model = onnx.load(file)
    opset = opset_of(model)
    foreign = sorted({entry.domain for entry in model.opset_import} - {"", "ai.onnx"})
    if opset > MAX_OPSET or foreign:
        raise PackError(
            f"the graph needs {', '.join([f'opset {opset}', *foreign])}; browsers run ONNX up to opset {MAX_OPSET}. "
            f"Use a torch whose exporter writes that."
        )
    found = {value.name: _signature(value) for value in model.graph.input}
    for name in inputs.keys() - found.keys():
        # Inputs that the network does not use are fed all the same.
        dtype, shape = inputs[name]
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, shape))
        found[name] = inputs[name]
    made = {value.name: _signature(value) for value in model.graph.output}
    for side, expected, actual in (("input", inputs, found), ("output", outputs, made)):
        if expected != actual:
            wrong = next(name for name in (*expected, *actual) if expected.get(name) != actual.get(name))
            raise PackError(
                f"the exporter gave the graph's {side} {wrong!r} as {actual.get(wrong)}, not as {expected.get(wrong)}; "
                f"the network's shapes must not depend on tensor values."
            )
    strip_notes(model)
    onnx.save(model, file)
    onnx.checker.check_model(file)
    if file.stat().st_size >= MAX_BYTES:
        raise PackError(f"the graph has {file.stat().st_size:,} bytes, more than one ONNX file can hold.")


def _signature(value: Any) -> tuple[str, tuple[int | str, ...]]:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "any" for dim in tensor.shape.dim)
    return onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, shape


def _write(predictor: Predictor, file: Path) -> None:
    report = write_graph(predictor, file)
    file.with_suffix(".json").write_text(json.dumps(record_json(report)))


def main() -> None:
    """Run the exporter process."""
    exporter_main(__doc__, load_named_bundle, _write)


if __name__ == "__main__":
    main()
