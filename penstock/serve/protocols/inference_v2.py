"""The Open Inference Protocol, version 2, over HTTP: requests to arrays and arrays to responses, as pure functions.

With the binary tensor data extension: the JSON head's length stands in `Inference-Header-Content-Length`, and the raw
little-endian tensors follow it in the order in which the head names them.
"""

import re
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, cast

import numpy as np
import orjson

from penstock.core.errors import InvalidInput, TooLarge
from penstock.core.spec import Array, TensorSpec
from penstock.serve.protocols.plain import MAX_BUDGET_MS, json_of
from penstock.serve.wire import Request, Response

# n rows of one request

HEAD_LENGTH = "inference-header-content-length"
EXTENSIONS = ["binary_tensor_data"]
_SHARED_MEMORY = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Infer:
    """One inference request.

    Args:
        id: The client's own name for it, or None.
        chunks: `[n, *spec.shape]`.
        batched: Whether the request had the batch dimension; without it, neither has the response.
        binary: Whether the output is wanted as raw bytes.
        wanted: Whether the output is wanted at all.
        budget_ns: The latency budget that it names, or None.
    """

    id: str | None
    chunks: Array
    batched: bool
    binary: bool
    wanted: bool
    budget_ns: int | None


def parse_infer(request: Request, input: TensorSpec, output: TensorSpec, most_rows: int) -> Infer:
    """Read an inference request.

    Args:
        request: The HTTP request.
        input: The one input's spec.
        output: The one output's spec.
        most_rows: The most rows taken in one request.

    Raises:
        InvalidInput: It is not of the protocol, or not what the specs say.
        TooLarge: Too many rows.
    """
    head, tail = _head_and_tail(request)
    parameters = _dictionary(head.get("parameters", {}), "parameters")
    tensor = _input(head.get("inputs"), input)
    shape = _shape(tensor.get("shape"))
    batched = shape != input.shape
    if batched and (shape[1:] != input.shape or shape[0] < 1):
        takes = f"{input.name!r} takes {['n', *input.shape]} with n from 1"
        raise InvalidInput(f"The shape is {shown(list(shape))}; {takes}.")
    rows = shape[0] if batched else 1
    if rows > most_rows:
        raise TooLarge(f"The request has {rows:,} rows; at most {most_rows:,} are taken at once. Split it.")
    wanted, binary = _wanted(head.get("outputs"), output, bool(parameters.get("binary_data_output")))
    return Infer(
        id=_id(head.get("id")),
        chunks=_chunks(tensor, tail, input, rows),
        batched=batched,
        binary=binary,
        wanted=wanted,
        budget_ns=_timeout_ns(parameters.get("timeout")),
    )


def infer_response(infer: Infer, outputs: Array, name: str, spec: TensorSpec) -> Response:
    """The response to an inference request: `outputs` is `[n, *spec.shape]`."""
    head: dict[str, Any] = {"model_name": name, "model_version": "1", "outputs": []}
    if infer.id is not None:
        head["id"] = infer.id
    if not infer.wanted:
        return Response(200, orjson.dumps(head))
    outputs = outputs if infer.batched else outputs[0]
    tensor: dict[str, Any] = {"name": spec.name, "datatype": spec.protocol_datatype, "shape": list(outputs.shape)}
    head["outputs"].append(tensor)
    if not infer.binary:
        tensor["data"] = outputs.ravel().tolist()
        return Response(200, orjson.dumps(head))
    raw = outputs.tobytes()
    tensor["parameters"] = {"binary_data_size": len(raw)}
    start = orjson.dumps(head)
    return Response(
        200, start + raw, "application/octet-stream", (("Inference-Header-Content-Length", str(len(start))),)
    )


def model_metadata(name: str, input: TensorSpec, output: TensorSpec) -> dict[str, Any]:
    """`GET /v2/models/{name}`."""
    return {
        "name": name,
        "versions": ["1"],
        "platform": "penstock",
        "inputs": [_tensor_metadata(input)],
        "outputs": [_tensor_metadata(output)],
    }


def model_config(name: str, input: TensorSpec, output: TensorSpec, max_batch_size: int) -> dict[str, Any]:
    """`GET /v2/models/{name}/config`, as far as it means something here."""

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        return {"name": spec.name, "data_type": f"TYPE_{spec.protocol_datatype}", "dims": list(spec.shape)}

    return {
        "name": name,
        "platform": "penstock",
        "backend": "penstock",
        "max_batch_size": max_batch_size,
        "input": [tensor(input)],
        "output": [tensor(output)],
    }


def _tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.protocol_datatype, "shape": [-1, *spec.shape]}


def _head_and_tail(request: Request) -> tuple[dict[str, Any], memoryview]:
    body = request.body
    text = request.headers.get(HEAD_LENGTH)
    if text is None:
        return _dictionary(json_of(body), "the body"), memoryview(b"")
    length = int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
    if not 0 <= length <= len(body):
        raise InvalidInput(f"Inference-Header-Content-Length is {shown(text)}, but the body has {len(body):,} bytes.")
    return _dictionary(json_of(body[:length]), "the head"), memoryview(body)[length:]


def _input(inputs: Any, spec: TensorSpec) -> dict[str, Any]:
    if not isinstance(inputs, list) or len(cast(list[Any], inputs)) != 1:
        raise InvalidInput(f"The request must have exactly one entry in 'inputs', {spec.name!r}.")
    tensor = _dictionary(cast(list[Any], inputs)[0], "inputs[0]")
    name, datatype = tensor.get("name"), tensor.get("datatype")
    if name != spec.name:
        raise InvalidInput(f"The input is named {shown(name)}; this model's is {spec.name!r}.")
    if datatype != spec.protocol_datatype:
        raise InvalidInput(f"The datatype is {shown(datatype)}; {spec.name!r} is {spec.protocol_datatype}.")
    return tensor


def _chunks(tensor: dict[str, Any], tail: memoryview, spec: TensorSpec, rows: int) -> Array:
    parameters = _dictionary(tensor.get("parameters", {}), "inputs[0].parameters")
    if any(key in parameters for key in _SHARED_MEMORY):
        raise InvalidInput("Shared memory is not taken; send the tensor's data in the request.")
    size = parameters.get("binary_data_size")
    if size is None:
        if len(tail):
            raise InvalidInput(f"{len(tail):,} bytes follow the JSON head, but no input has a binary_data_size.")
        if "data" not in tensor:
            raise InvalidInput(f"{spec.name!r} has no 'data'; send its {rows * spec.size:,} numbers, flat or nested.")
        return spec.from_rows(tensor["data"], rows)
    if "data" in tensor:
        raise InvalidInput(f"{spec.name!r} has both 'data' and binary_data_size; send one of them.")
    expected = rows * spec.nbytes
    if size != expected or len(tail) != expected:
        raise InvalidInput(
            f"binary_data_size is {shown(size)} and {len(tail):,} bytes follow the head; "
            f"{rows} x {spec.describe()} has {expected:,}."
        )
    if not spec.takes_any_bytes:
        return np.stack([spec.from_bytes(tail[row : row + spec.nbytes]) for row in range(0, expected, spec.nbytes)])
    return np.frombuffer(tail, spec.numpy_dtype).reshape(rows, *spec.shape)


def _wanted(outputs: Any, spec: TensorSpec, binary: bool) -> tuple[bool, bool]:
    if outputs is None:
        return True, binary
    if not isinstance(outputs, list):
        raise InvalidInput("'outputs' must be a list.")
    wanted = False
    for entry in cast(list[Any], outputs):
        tensor = _dictionary(entry, "outputs[0]")
        if tensor.get("name") != spec.name:
            raise InvalidInput(f"There is no output {shown(tensor.get('name'))}; this model's is {spec.name!r}.")
        parameters = _dictionary(tensor.get("parameters", {}), "outputs[0].parameters")
        if parameters.get("classification"):
            raise InvalidInput("Classification of outputs is not done here; take the numbers and choose the largest.")
        if any(key in parameters for key in _SHARED_MEMORY):
            raise InvalidInput("Shared memory is not taken; the output comes in the response.")
        wanted, binary = True, bool(parameters.get("binary_data", binary))
    return wanted or not outputs, binary


def _timeout_ns(timeout: Any) -> int | None:
    if timeout is None:
        return None
    if isinstance(timeout, float) and timeout.is_integer():
        timeout = int(timeout)  # in JSON, 5.0 is a whole number
    if type(timeout) is not int or not 0 <= timeout <= MAX_BUDGET_MS * 1_000:
        raise InvalidInput(
            f"The timeout is {shown(timeout)}; it must be a whole number of microseconds up to "
            f"{MAX_BUDGET_MS * 1_000:,}."
        )
    return timeout * 1_000 or None


def _id(value: Any) -> str | None:
    if not isinstance(value, str | None):
        raise InvalidInput(f"The id is {shown(value)}; it must be a string.")
    return value or None


def _dictionary(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{what} must be a JSON object.")
    return cast(dict[str, Any], value)


def _shape(value: Any) -> tuple[int, ...]:
    sizes = cast(list[Any], value) if isinstance(value, list) else []
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise InvalidInput(f"The shape is {shown(value)}; it must be a list of whole numbers.")
    return tuple(sizes)
