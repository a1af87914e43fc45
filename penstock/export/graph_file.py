"""A pack's graph as a file: its inputs and outputs are those that are declared, and browsers can run it."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from penstock.core.dim import Dim
from penstock.core.errors import PackError
from penstock.export.join_prepare import opset_of
from penstock.runtime.onnx.onnx_export import strip_notes

# The limit of onnxruntime-web; see docs/decisions/020-pack.md.
MAX_OPSET = 21
MAX_BYTES = 1 << 31

# Data type and shape of each input or output.
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def save_graph(program: Any, file: Path, inputs: Shapes, outputs: Shapes) -> None:
    """Save the exporter's program, with exactly these inputs and outputs.

    Args:
        program: The program.
        file: The ONNX file.
        inputs: The graph's inputs; those that the network does not use are added.
        outputs: The graph's outputs.

    Raises:
        PackError: An input or output is another one, or browsers do not run the graph.
    """
    program.save(file, external_data=False)
    model = onnx.load(file)
    opset = opset_of(model)
    foreign = sorted({entry.domain for entry in model.opset_import} - {"", "ai.onnx"})
    if opset > MAX_OPSET or foreign:
        raise PackError(
            f"the graph needs {', '.join([f'opset {opset}', *foreign])}; browsers run ONNX up to opset {MAX_OPSET}. "
            f"Use a torch whose exporter writes that."
        )
    made = {value.name: _signature(value) for value in model.graph.output}
    found = {value.name: _signature(value) for value in model.graph.input}
    symbols: dict[str, str] = {}
    for side, expected, actual in (("input", inputs, found), ("output", outputs, made)):
        # Inputs that the network does not use are fed all the same.
        checked = expected if side == "output" else {name: expected[name] for name in expected if name in actual}
        wrong = [name for name in (*checked, *actual) if not _fits(checked.get(name), actual.get(name), side, symbols)]
        if wrong:
            raise PackError(
                f"the exporter gave the graph's {side} {wrong[0]!r} as {actual.get(wrong[0])}, not as "
                f"{checked.get(wrong[0])}; the network's shapes must not depend on tensor values."
            )
    _name_sizes(model.graph, symbols)
    _forget_example(model.graph, inputs, outputs)
    for name in inputs.keys() - found.keys():
        dtype, shape = inputs[name]
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        sizes = [size.name if isinstance(size, Dim) else size for size in shape]
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, sizes))
    strip_notes(model)
    onnx.save(model, file)
    onnx.checker.check_model(file)
    if file.stat().st_size >= MAX_BYTES:
        raise PackError(f"the graph has {file.stat().st_size:,} bytes, more than one ONNX file can hold.")


def keep_outputs(file: Path, names: Collection[str]) -> None:
    """Leave the other outputs out of a graph."""
    model = onnx.load(file)
    kept = [value for value in model.graph.output if value.name in names]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, file)


def _fits(
    declared: tuple[str, tuple[int, ...]] | None,
    found: tuple[str, tuple[int | str, ...]] | None,
    side: str,
    symbols: dict[str, str],
) -> bool:
    """Compare one input or output with its declaration; record the exporter's symbols of named dimensions."""
    if declared is None or found is None or declared[0] != found[0] or len(declared[1]) != len(found[1]):
        return False
    for size, made in zip(declared[1], found[1], strict=True):
        if not isinstance(size, Dim):
            if size != made:
                return False
        elif isinstance(made, str):
            symbols.setdefault(made, size.name)
        elif side == "input" or made > size:
            # An output may have room for more than its length.
            return False
    return True


def _name_sizes(graph: Any, symbols: dict[str, str]) -> None:
    """Give varying sizes the names of the application's dimensions."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in symbols:
                size.dim_param = symbols[size.dim_param]


def _forget_example(graph: Any, inputs: Shapes, outputs: Shapes) -> None:
    """Leave open the sizes of outputs that vary with an input; the exporter may have given them as in its example."""
    varying = {size.name for _, shape in inputs.values() for size in shape if isinstance(size, Dim)}
    for value in graph.output:
        for declared, size in zip(outputs[value.name][1], value.type.tensor_type.shape.dim, strict=True):
            if isinstance(declared, Dim) and declared.name in varying and size.HasField("dim_value"):
                size.Clear()


def _signature(value: Any) -> tuple[str, tuple[int | str, ...]]:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "any" for dim in tensor.shape.dim)
    return onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, shape
