"""Metadata and configuration of a model in the Open Inference Protocol, as JSON values."""

from typing import Any

from penstock.core.application import Application
from penstock.core.dim import Dim
from penstock.core.spec import TensorSpec
from penstock.serve.oip.inference import output_datatypes
from penstock.serve.registry.served_chain import Served


def model_metadata(served: Served, versions: list[str]) -> dict[str, Any]:
    """`GET /v2/models/{name}`, with all versions that are served."""
    application = served.application

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        batch = -1 if served.sequences is None else 1
        return {"name": spec.name, "datatype": spec.protocol_datatype, "shape": [batch, *_dims(served, spec)]}

    return {
        "name": served.name,
        "versions": versions,
        "platform": "penstock",
        "inputs": [tensor(spec) for spec in application.inputs.values()],
        "outputs": [tensor(spec) for spec in _outputs(application)],
    }


def model_config(served: Served) -> dict[str, Any]:
    """`GET /v2/models/{name}/config`, as far as it applies here."""
    application, sequences = served.application, served.sequences

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        return {"name": spec.name, "data_type": f"TYPE_{spec.protocol_datatype}", "dims": _dims(served, spec)}

    config = {
        "name": served.name,
        "platform": "penstock",
        "backend": "penstock",
        "max_batch_size": served.max_rows if sequences is None else 1,
        "input": [tensor(spec) for spec in application.inputs.values()],
        "output": [tensor(spec) for spec in _outputs(application)],
    }
    if sequences is None:
        return config
    return config | {"sequence_batching": {"max_sequence_idle_microseconds": sequences.idle_ns // 1_000, "direct": {}}}


def _dims(served: Served, spec: TensorSpec) -> list[int]:
    dims = [-1 if isinstance(size, Dim) else size for size in spec.shape]
    # The number of frames of a live chunk and of its output varies.
    return dims if served.sequences is None else [-1, *dims[1:]]


def _outputs(application: Application) -> list[TensorSpec]:
    # The lengths of dimensions that no input has are outputs too.
    tensors = application.answer.tensors
    lengths = output_datatypes(application.input, application.answer).keys() - application.outputs.keys()
    counts = (TensorSpec(name=name, dtype="int64", shape=(), meaning=f"number of {name}") for name in sorted(lengths))
    return [*tensors, *counts]
