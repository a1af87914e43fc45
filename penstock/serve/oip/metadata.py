"""Metadata and configuration of a model in the Open Inference Protocol, as JSON values."""

from typing import Any

from penstock.core.spec import TensorSpec
from penstock.serve.registry.served_model import ServedModel


def model_metadata(served: ServedModel) -> dict[str, Any]:
    """`GET /v2/models/{name}`."""
    application = served.application

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        batch = -1 if served.sequences is None else 1
        return {"name": spec.name, "datatype": spec.protocol_datatype, "shape": [batch, *_dims(served, spec)]}

    return {
        "name": served.name,
        "versions": [served.version],
        "platform": "penstock",
        "inputs": [tensor(application.input)],
        "outputs": [tensor(application.output)],
    }


def model_config(served: ServedModel) -> dict[str, Any]:
    """`GET /v2/models/{name}/config`, as far as it applies here."""
    application, sequences = served.application, served.sequences

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        return {"name": spec.name, "data_type": f"TYPE_{spec.protocol_datatype}", "dims": _dims(served, spec)}

    config = {
        "name": served.name,
        "platform": "penstock",
        "backend": "penstock",
        "max_batch_size": served.max_rows if sequences is None else 1,
        "input": [tensor(application.input)],
        "output": [tensor(application.output)],
    }
    if sequences is None:
        return config
    return config | {"sequence_batching": {"max_sequence_idle_microseconds": sequences.idle_ns // 1_000, "direct": {}}}


def _dims(served: ServedModel, spec: TensorSpec) -> list[int]:
    # The number of frames of a live chunk and of its output varies.
    return list(spec.shape) if served.sequences is None else [-1, *spec.shape[1:]]
