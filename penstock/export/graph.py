"""Writes the graph of a pack and checks it against its bundle: `python -m penstock.export.graph BUNDLE FILE`.

A process of its own, for the exporter's sake (see `penstock.runtime.export_graph`) and so that whoever asks for a pack
need not load torch. What it found out is put beside the graph as JSON, see `penstock.export.described`.
"""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from penstock.core.errors import PackError, PenstockError
from penstock.core.pack import PackLive, PackState
from penstock.core.prepare import RawSpec
from penstock.core.spec import TensorSpec
from penstock.export.checked import check_live, check_oneshot
from penstock.export.described import Described
from penstock.export.joined import CHUNK, prepare_before
from penstock.nn.streaming import Streaming, leaves
from penstock.runtime.export_graph import exporter_asked, first_cause, step_program
from penstock.runtime.exported_step import LAST, LENGTH, OUTPUT_LENGTH, next_name, state_name
from penstock.runtime.graph import NOT_EXPORTABLE
from penstock.runtime.load import Predictor, load, streaming_of
from penstock.runtime.prepared import RAW
from penstock.runtime.torch_executor import served_function

# B batch (of one), T frames of a chunk

EMBEDDING = "embedding"
# What onnxruntime-web runs; see docs/decisions/020-pack.md.
LATEST_OPSET = 21
LARGEST_BYTES = 1 << 31


@final
class _OneShot(nn.Module):
    """What is served of a network, and its embedding where it has one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, chunk_B: Tensor) -> list[Tensor]:
        answers = [served_function(self.module)(chunk_B)]
        embed: Any = getattr(self.module, "embed", None)
        return answers if embed is None else [*answers, embed(chunk_B)]


def write_graph(predictor: Predictor, file: Path) -> Described:
    """Write the graph of a pack, its dimensions asserted and its answers checked.

    Raises:
        PackError: It is not the graph that was asked for, or gives other answers than the bundle.
    """
    if predictor.application.live is not None:
        return _write_live(predictor, file)
    return _write_oneshot(predictor, file)


def _write_oneshot(predictor: Predictor, file: Path) -> Described:
    application, prepare = predictor.application, predictor.files.prepare
    given = application.input
    chunk_B = torch.from_numpy(predictor.files.golden.inputs[:1].copy())
    network = _OneShot(predictor.module).eval()
    with torch.inference_mode():
        answers = network(chunk_B)
    outputs = [application.output, *map(_embedding, answers[1:])]
    # Not by a name that could be one of what is prepared before it.
    name = given.name if prepare is None else CHUNK
    program: Any = torch.onnx.export(
        network,
        (chunk_B,),
        input_names=[name],
        output_names=[output.name for output in outputs],
        dynamo=True,
        verbose=False,
    )
    inputs = {name: (given.dtype, (1, *given.shape))}
    _save(program, file, inputs, {output.name: (output.dtype, (1, *output.shape)) for output in outputs})
    described = Described(
        input=_raw(given),
        input_name=name,
        outputs=tuple(outputs),
        live=None,
        prepared_by=(),
        difference=0.0,
    )
    if prepare is not None:
        raw = application.prepare
        assert raw is not None
        prepared_by = prepare_before(file, prepare, given)
        described = replace(described, input=raw.raw, input_name=RAW, prepared_by=prepared_by)
    return replace(described, difference=check_oneshot(predictor, described, file))


def _write_live(predictor: Predictor, file: Path) -> Described:
    application = predictor.application
    assert application.live is not None
    network = streaming_of(application, predictor.module)
    given, made = application.input, application.output
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
    return Described(
        input=_raw(given),
        input_name=given.name,
        outputs=(made,),
        live=live,
        prepared_by=(),
        difference=check_live(predictor, network, file, live),
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
                f"state {index} of the network begins with several numbers; a pack holds one for each tensor of it. "
                f"Begin it with zeros and add the rest in `step`."
            )
        if not math.isfinite(values[0]):
            raise PackError(
                f"state {index} of the network begins with {values[0]}, which JSON cannot say; begin it with a number."
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
    opset = max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    foreign = sorted({entry.domain for entry in model.opset_import} - {"", "ai.onnx"})
    if opset > LATEST_OPSET or foreign:
        raise PackError(
            f"the graph needs {', '.join([f'opset {opset}', *foreign])}; browsers run ONNX up to opset {LATEST_OPSET}. "
            f"Use a torch whose exporter writes that."
        )
    found = {value.name: _described(value) for value in model.graph.input}
    for name in inputs.keys() - found.keys():
        # What the network does not need is fed all the same.
        dtype, shape = inputs[name]
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, shape))
        found[name] = inputs[name]
    made = {value.name: _described(value) for value in model.graph.output}
    for side, asked, is_there in (("input", inputs, found), ("output", outputs, made)):
        if asked != is_there:
            wrong = next(name for name in (*asked, *is_there) if asked.get(name) != is_there.get(name))
            raise PackError(
                f"the exporter gave the graph's {side} {wrong!r} as {is_there.get(wrong)}, not as {asked.get(wrong)}; "
                f"the network's shapes must not depend on its numbers."
            )
    _without_notes(model)
    onnx.save(model, file)
    onnx.checker.check_model(file)
    if file.stat().st_size >= LARGEST_BYTES:
        raise PackError(f"the graph has {file.stat().st_size:,} bytes, more than one ONNX file can hold.")


def _described(value: Any) -> tuple[str, tuple[int | str, ...]]:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "any" for dim in tensor.shape.dim)
    return onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, shape


def _without_notes(model: Any) -> None:
    """Take out what the exporter wrote for people: the files and lines that each operation came from."""
    del model.metadata_props[:]
    graph = model.graph
    del graph.metadata_props[:]
    for part in (graph.node, graph.input, graph.output, graph.value_info, graph.initializer):
        for entry in part:
            entry.doc_string = ""
            del entry.metadata_props[:]


def main() -> None:
    """Write the graph, or say on standard error why not."""
    given = exporter_asked("python -m penstock.export.graph", __doc__)
    try:
        predictor = load(given.bundle, app=given.app, accept_changed=given.accept_changed_app)
        described = write_graph(predictor, given.file)
        given.file.with_suffix(".json").write_text(json.dumps(described.to_json()))
    except PenstockError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"the graph {given.file} cannot be written ({error.strerror or error}); mend that and export again.")
    except Exception as error:  # noqa: BLE001 - the exporter raises whatever it meets; this is the process's top
        print(first_cause(error), file=sys.stderr)
        sys.exit(NOT_EXPORTABLE)


if __name__ == "__main__":
    main()
