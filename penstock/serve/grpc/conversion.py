"""The Open Inference Protocol's gRPC messages: requests to arrays and arrays to responses, as pure functions."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from grpc import StatusCode

from penstock.core import errors
from penstock.core.errors import InvalidInput, RequestError
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import PROTOCOL_DATATYPES, Array, TensorSpec
from penstock.core.wording.counted import counted
from penstock.serve.exchange.budget import MAX_BUDGET_MS
from penstock.serve.grpc import oip_v2_pb2 as pb
from penstock.serve.oip import inference
from penstock.serve.oip.inference import Infer
from penstock.serve.oip.shared_memory import PARAMETERS, Lookup, SharedPart, no_regions

M = TypeVar("M", bound=Message)

# Half of the metadata that clients take by default.
MAX_DETAILS_BYTES = 4096

# gRPC status of each error: the entry of its class, or of the nearest class above it.
STATUS: dict[type[RequestError], StatusCode] = {
    RequestError: StatusCode.INTERNAL,
    InvalidInput: StatusCode.INVALID_ARGUMENT,
    errors.TooLarge: StatusCode.INVALID_ARGUMENT,
    errors.Unauthorized: StatusCode.UNAUTHENTICATED,
    errors.Forbidden: StatusCode.PERMISSION_DENIED,
    errors.UnknownRoute: StatusCode.NOT_FOUND,
    errors.QuotaExceeded: StatusCode.RESOURCE_EXHAUSTED,
    errors.Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    errors.TooSlow: StatusCode.DEADLINE_EXCEEDED,
    errors.TooLate: StatusCode.DEADLINE_EXCEEDED,
    errors.DeadlineImpossible: StatusCode.DEADLINE_EXCEEDED,
}

# Field of InferTensorContents that holds a dtype's numbers, and the field's own dtype.
CONTENTS = {
    "bool": ("bool_contents", np.bool_),
    "int8": ("int_contents", np.int32),
    "int16": ("int_contents", np.int32),
    "int32": ("int_contents", np.int32),
    "int64": ("int64_contents", np.int64),
    "uint8": ("uint_contents", np.uint32),
    "uint16": ("uint_contents", np.uint32),
    "uint32": ("uint_contents", np.uint32),
    "uint64": ("uint64_contents", np.uint64),
    "float32": ("fp32_contents", np.float32),
    "float64": ("fp64_contents", np.float64),
}


def status_of(error: RequestError) -> StatusCode:
    """The gRPC status of an error."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def details_of(error: RequestError) -> str:
    """The text of an error for the trailing metadata, in which it is percent-encoded; cut at `MAX_DETAILS_BYTES`.

    Clients take 8 KB of metadata by default. They report more of it as `RESOURCE_EXHAUSTED` instead of its status.
    """
    # Half of a surrogate pair, as JSON may have it, is no text that can be sent.
    text = str(error).encode(errors="replace").decode()
    left = MAX_DETAILS_BYTES
    for at, character in enumerate(text):
        left -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if left < 0:
            return text[:at] + "..."
    return text


def parsed(kind: type[M], raw: bytes) -> M:
    """Parse a message.

    Raises:
        InvalidInput: The bytes are no such message.
    """
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise InvalidInput(f"{len(raw):,} bytes are not a {kind.__name__}; send that message, as protobuf.") from None


def retry_metadata(error: RequestError) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of an error: `retry-after-ms` if a retry helps."""
    return (("retry-after-ms", f"{error.retry_after_s * 1e3:.0f}"),) if isinstance(error, errors.Overloaded) else ()


def parse_infer(
    request: pb.ModelInferRequest,
    input: ChunkSpec,
    output: ChunkSpec,
    max_rows: int,
    left_s: float | None = None,
    count: inference.Count = inference.rows_of,
    lookup: Lookup = no_regions,
) -> Infer:
    """Read an inference request.

    Args:
        request: The message.
        input: Spec of one row.
        output: Spec of one row of the output.
        max_rows: Maximum number of rows in one request.
        left_s: Seconds until the deadline of the RPC; None if it has none.
        count: Counts the rows: `rows_of`, or `frames_of` where they are the frames of one chunk.
        lookup: Finds tensors in shared memory.

    Raises:
        InvalidInput: The message violates the protocol or the specs.
        TooLarge: Too many rows.
    """
    parameters = _values(request.parameters)
    if isinstance(input, RecordSpec):
        chunks, batched = inference.records_of(_given(request, lookup), input, max_rows)
    else:
        if len(request.inputs) != 1:
            raise InvalidInput(
                f"The request has {len(request.inputs)} inputs; it must have exactly one, {input.name!r}."
            )
        tensor = request.inputs[0]
        rows, batched = count(tensor.name, tensor.datatype, tuple(tensor.shape), input, max_rows)
        chunks = _chunks(tensor, request.raw_input_contents, lookup, input, rows)
    names = inference.output_datatypes(input, output)
    shared: dict[str, SharedPart] = {}
    inference.check_output_count(len(request.outputs), names)
    for wanted in request.outputs:
        parameters_of_output = _values(wanted.parameters)
        inference.check_output(wanted.name, parameters_of_output, names)
        if (part := lookup(parameters_of_output)) is not None:
            shared[wanted.name] = part
    # The response has the form of the request; raw if the protocol has no other form for a dtype.
    raw = bool(request.raw_input_contents or shared) or any(PARAMETERS[0] in each.parameters for each in request.inputs)
    binary = raw or any(spec.dtype not in CONTENTS for spec in output.tensors)
    return Infer(
        id=request.id or None,
        chunks=chunks,
        batched=batched,
        wanted=dict.fromkeys([wanted.name for wanted in request.outputs] or names, binary),
        budget_ns=_shorter(inference.timeout_ns_of(parameters), left_s),
        priority=inference.priority_of(parameters),
        place=inference.place_of(parameters),
        shared=shared,
    )


def infer_response(infer: Infer, outputs: Array, name: str, version: str, output: ChunkSpec) -> pb.ModelInferResponse:
    """The response to an inference request: `outputs` is `[n, *output.shape]`.

    Raises:
        InvalidInput: An output does not fit into its part of shared memory.
    """
    arrays = inference.output_arrays(output, outputs)
    response = pb.ModelInferResponse(model_name=name, model_version=version, id=infer.id or "")
    for wanted, binary in infer.wanted.items():
        array = arrays[wanted] if infer.batched else arrays[wanted][0]
        dtype = array.dtype.name
        tensor = response.outputs.add(name=wanted, datatype=PROTOCOL_DATATYPES[dtype], shape=array.shape)
        part = infer.shared.get(wanted)
        if part is not None:
            raw = array.tobytes()
            part.write(raw)
            tensor.parameters[PARAMETERS[0]].string_param = part.region.name
            tensor.parameters[PARAMETERS[2]].int64_param = len(raw)
            # Clients count the entries.
            response.raw_output_contents.append(b"")
        elif binary:
            response.raw_output_contents.append(array.tobytes())
        else:
            getattr(tensor.contents, CONTENTS[dtype][0]).extend(array.ravel().tolist())
    return response


def _given(request: pb.ModelInferRequest, lookup: Lookup) -> list[inference.GivenTensor]:
    raw = request.raw_input_contents
    inline = [tensor for tensor in request.inputs if PARAMETERS[0] not in tensor.parameters]
    if raw and len(raw) != len(inline):
        raise InvalidInput(
            f"raw_input_contents has {counted(len(raw), 'entry', 'entries')} for {counted(len(inline), 'input')}; send "
            f"one for each."
        )
    given: list[inference.GivenTensor] = []
    entries = iter(raw)
    for tensor in request.inputs:
        # Triton's clients send no entry for an input in shared memory.
        own = [] if PARAMETERS[0] in tensor.parameters else list(islice(entries, 1))
        read = partial(_chunks, tensor, own, lookup)
        given.append(inference.GivenTensor(tensor.name, tensor.datatype, tuple(tensor.shape), read))
    return given


def _chunks(
    tensor: pb.ModelInferRequest.InferInputTensor, raw: Sequence[bytes], lookup: Lookup, spec: TensorSpec, rows: int
) -> Array:
    filled = [field.name for field, _ in tensor.contents.ListFields()]
    part = lookup(_values(tensor.parameters))
    if part is not None:
        if raw or filled:
            raise InvalidInput(f"{spec.name!r} has both shared memory and contents; send one of them.")
        return inference.shared_chunks(part, rows, spec)
    if raw and filled:
        raise InvalidInput(f"{spec.name!r} has both contents and raw_input_contents; send one of them.")
    if raw:
        expected = rows * spec.nbytes
        if len(raw) != 1 or len(raw[0]) != expected:
            raise InvalidInput(
                f"raw_input_contents has {' + '.join(f'{len(part):,}' for part in raw)} bytes; {rows} x "
                f"{spec.describe()} is one entry of {expected:,}."
            )
        return inference.chunks_of(raw[0], rows, spec)
    if spec.dtype not in CONTENTS:
        raise InvalidInput(f"{spec.protocol_datatype} has no typed contents; send its bytes in raw_input_contents.")
    field, wide = CONTENTS[spec.dtype]
    numbers = getattr(tensor.contents, field)
    others = ", ".join(name for name in filled if name != field)
    if filled != [field] * bool(rows * spec.size) or len(numbers) != rows * spec.size:
        raise InvalidInput(
            f"{spec.name!r} has {len(numbers):,} {field}{others and f' and also {others}'}; {rows} x "
            f"{spec.describe()} is {rows * spec.size:,} numbers there, or its bytes in raw_input_contents."
        )
    return spec.cast(np.fromiter(numbers, wide, len(numbers))).reshape(rows, *spec.shape)


def _values(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    return {
        key: getattr(value, value.WhichOneof("parameter_choice") or "int64_param") for key, value in parameters.items()
    }


def _shorter(budget_ns: int | None, left_s: float | None) -> int | None:
    if left_s is None:
        return budget_ns
    # A deadline that has just passed is the shortest budget, not the absence of one.
    left_ns = max(1, int(min(left_s, MAX_BUDGET_MS / 1e3) * 1e9))
    return left_ns if budget_ns is None else min(budget_ns, left_ns)
