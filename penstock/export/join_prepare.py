"""Join a bundle's `prepare` and its network in one graph, with the operations that the server's front-end runs."""

from pathlib import Path
from typing import Any

import onnx
from onnx import compose, helper

from penstock.core.errors import PackError
from penstock.core.spec import TensorSpec
from penstock.runtime.onnx.prepare_session import PREPARED, RAW

# The network's input in the joined graph.
CHUNK = "network_input"
PREFIX = "prepare/"
_AXIS = f"{PREFIX}batch_axis"


def join_prepare(file: Path, prepare: Path, input: TensorSpec) -> tuple[str, ...]:
    """Put the graph of a bundle's `prepare` before the network's graph, whose input is named `CHUNK`.

    Args:
        file: The network's graph, which is replaced.
        prepare: The graph of `prepare`, for one raw array without a batch dimension.
        input: One prepared chunk.

    Returns:
        Names of the nodes of `prepare`.

    Raises:
        PackError: The two graphs have different versions of ONNX.
    """
    network, before = (
        onnx.load(file),
        compose.add_prefix(onnx.load(prepare), PREFIX, rename_inputs=False, rename_outputs=False),
    )
    versions = [(model.ir_version, opset_of(model)) for model in (before, network)]
    if versions[0] != versions[1]:
        raise PackError(
            f"the bundle's prepare.onnx is of ONNX {versions[0]}, its network now of {versions[1]}; train again, or "
            f"export with the torch that wrote the bundle."
        )
    axis = helper.make_tensor(_AXIS, onnx.TensorProto.INT64, [1], [0])
    before.graph.initializer.append(axis)
    before.graph.node.append(helper.make_node("Unsqueeze", [PREPARED, _AXIS], [f"{PREFIX}{CHUNK}"], f"{PREFIX}batch"))
    kind = before.graph.output[0].type.tensor_type.elem_type
    del before.graph.output[:]
    before.graph.output.append(helper.make_tensor_value_info(f"{PREFIX}{CHUNK}", kind, [1, *input.shape]))
    joined: Any = compose.merge_models(before, network, io_map=[(f"{PREFIX}{CHUNK}", CHUNK)])
    # Merging adds the default domain under both of its names.
    del joined.opset_import[:]
    joined.opset_import.append(helper.make_opsetid("", versions[0][1]))
    assert [value.name for value in joined.graph.input] == [RAW], joined.graph.input
    onnx.checker.check_model(joined, full_check=True)
    onnx.save(joined, file)
    return tuple(node.name for node in before.graph.node)


def opset_of(model: Any) -> int:
    """Version of the default operator set of a graph."""
    return max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
