"""A bundle's `prepare` before its network, in one graph: the very operations that the server's front-end runs."""

from pathlib import Path
from typing import Any

import onnx
from onnx import compose, helper

from penstock.core.errors import PackError
from penstock.core.spec import TensorSpec
from penstock.runtime.prepared import PREPARED, RAW

# What goes into the network where something is prepared before it.
CHUNK = "network_input"
PREFIX = "prepare/"
_AXIS = f"{PREFIX}batch_axis"


def prepare_before(file: Path, prepare: Path, input: TensorSpec) -> tuple[str, ...]:
    """Put the graph of a bundle's `prepare` before that of its network, whose input is called `CHUNK`.

    Args:
        file: The network's graph, which is replaced.
        prepare: That of `prepare`, of one raw array and without a batch.
        input: What is prepared, one chunk.

    Returns:
        The names of the nodes that come before the network.

    Raises:
        PackError: The two are of different versions of ONNX.
    """
    network, before = (
        onnx.load(file),
        compose.add_prefix(onnx.load(prepare), PREFIX, rename_inputs=False, rename_outputs=False),
    )
    versions = [(model.ir_version, _opset(model)) for model in (before, network)]
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
    # Merging adds the default domain once under each of its two names.
    del joined.opset_import[:]
    joined.opset_import.append(helper.make_opsetid("", versions[0][1]))
    assert [value.name for value in joined.graph.input] == [RAW], joined.graph.input
    onnx.checker.check_model(joined, full_check=True)
    onnx.save(joined, file)
    return tuple(node.name for node in before.graph.node)


def _opset(model: Any) -> int:
    return max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
