"""The Open Inference Protocol, version 2, over HTTP: conversion of requests and responses, as pure functions.

The binary tensor data extension is supported: `Inference-Header-Content-Length` is the length of the JSON head, and the
raw little-endian tensors follow it in the order of the head.
"""

import re
from collections.abc import Collection, Sequence
from functools import partial
from reprlib import repr as shown
from typing import Any, cast, final

import orjson

from penstock.core.errors import InvalidInput, RequestError
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import PROTOCOL_DATATYPES, Array, TensorSpec
from penstock.serve.exchange.budget import options_of
from penstock.serve.exchange.json_bound import check_json
from penstock.serve.exchange.local_client import Connected, address_of
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Cancel, Response, rejected
from penstock.serve.exchange.timing import Timing, is_timed
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.http.generated_answer import ended_headers
from penstock.serve.http.plain_body import json_of
from penstock.serve.oip import inference
from penstock.serve.oip.inference import Infer
from penstock.serve.oip.shared_memory import Lookup, Regions, SharedPart, no_regions
from penstock.serve.registry.generated import ENDED
from penstock.serve.registry.served_chain import Served
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.registry.whole_answer import Ends, ends_text

HEAD_LENGTH = "inference-header-content-length"
EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "sequence", "statistics"]


@final
class OipCall:
    """Answers the inference requests with one head.

    Args:
        served: The model.
        head: The head.
        owner: Name of the client, by its API key.
        regions: The regions of shared memory.

    Raises:
        InvalidInput: The budget or the priority is malformed.
    """

    def __init__(self, served: Served, head: Head, owner: str, regions: Regions) -> None:
        self.served = served
        self._owner = owner
        self._regions = regions
        self._budget_ns, self._low_priority = options_of(head)
        self._timed = is_timed(head)

    @property
    def is_plain(self) -> bool:
        """True if requests are rows of one model in one engine, and the head sets no terms of its own."""
        served = self.served
        if not isinstance(served, ServedModel) or not isinstance(served.writer, TableWriter):
            return False
        default = self._budget_ns is None and not (self._low_priority or self._timed)
        return default and served.sequences is None and served.application.generate is None

    def handle(self, request: Request, answer: Answer) -> Cancel:
        """Submit the rows, and answer when all their results have come; returns a function that cancels them.

        Raises:
            RequestError: The request is malformed, does not fit the model, or is rejected.
        """
        return self.submit(self.read(request), request, answer)

    def read(self, request: Request) -> Infer:
        """Read the body, see `handle`."""
        lookup = no_regions
        if self._regions.enabled:
            lookup = self._regions.lookup(Connected.over_http(request.transport, request.head.headers), self._owner)
        return parse_infer(request, *inference.terms_of(self.served), lookup=lookup)

    def submit(self, infer: Infer, request: Request, answer: Answer) -> Cancel:
        """Submit what was read, see `handle`."""
        served = self.served
        timing, ends = Timing() if self._timed else None, Ends()

        def finished(result: Array | RequestError) -> None:
            if isinstance(result, RequestError):
                answer(rejected(result))
                return
            try:
                response = infer_response(infer, result, served.name, served.version, served.application.answer, ends)
            except RequestError as error:
                answer(rejected(error))
                return
            answer(response if timing is None else timing.added_to(response))

        if request.usage is not None:
            request.usage.add_rows(len(infer.chunks))
            # Another process does not know the sequence.
            request.usage.stays = request.usage.stays or infer.place is not None
        return inference.submit(
            served,
            infer,
            finished,
            arrival_ns=request.arrival_ns,
            owner=self._owner,
            address="" if infer.place is None or not infer.place.start else address_of(request.transport),
            budget_ns=infer.budget_ns or self._budget_ns,
            low_priority=self._low_priority,
            observe=request.observe_step,
            timing=timing,
            ends=ends,
        )


def parse_infer(
    request: Request,
    input: ChunkSpec,
    output: ChunkSpec,
    max_rows: int,
    count: inference.Count = inference.rows_of,
    lookup: Lookup = no_regions,
) -> Infer:
    """Read an inference request.

    Args:
        request: The HTTP request.
        input: The spec of a row.
        output: The spec of a row of the output.
        max_rows: Maximum number of rows in one request.
        count: Counts them: `rows_of`, or `frames_of` for the frames of one chunk.
        lookup: Finds tensors in shared memory.

    Raises:
        InvalidInput: It is malformed, or does not fit the specs.
        TooLarge: Too many rows.
    """
    head, tail = _head_and_tail(request, input, max_rows)
    parameters = _dictionary(head.get("parameters", {}), "parameters")
    inputs = head.get("inputs")
    if not isinstance(inputs, list):
        raise InvalidInput("The request has no 'inputs'; they must be a list of tensors.")
    tensors = [_dictionary(entry, f"inputs[{at}]") for at, entry in enumerate(cast(list[Any], inputs))]
    if isinstance(input, RecordSpec):
        chunks, batched = inference.records_of(_given(tensors, tail, lookup), input, max_rows)
    else:
        if len(tensors) != 1:
            raise InvalidInput(f"The request must have exactly one entry in 'inputs', {input.name!r}.")
        tensor = tensors[0]
        shape = _shape(tensor.get("shape"))
        rows, batched = count(tensor.get("name"), tensor.get("datatype"), shape, input, max_rows)
        if batched and count is inference.frames_of:
            tensor = tensor | _of_the_only(tensor.get("data"))
        chunks = _chunks(tensor, tail, lookup, input, rows)
    names = inference.output_datatypes(input, output)
    wanted, shared = _wanted(head.get("outputs"), names, bool(parameters.get("binary_data_output")), lookup)
    return Infer(
        id=_id(head.get("id")),
        chunks=chunks,
        batched=batched,
        wanted=wanted,
        budget_ns=inference.timeout_ns_of(parameters),
        priority=inference.priority_of(parameters),
        place=inference.place_of(parameters),
        shared=shared,
    )


def infer_response(
    infer: Infer, outputs: Array, name: str, version: str, output: ChunkSpec, ends: Sequence[str] = ()
) -> Response:
    """Make the response to an inference request from `outputs`, `[n, *output.shape]`.

    Args:
        infer: The request.
        outputs: Its outputs.
        name: Name of the model.
        version: Version of the model.
        output: The spec of a row of the output.
        ends: Why the answer of each row ended; none where answers take one step.

    Raises:
        InvalidInput: An output does not fit into its part of shared memory.
    """
    head: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": []}
    if infer.id is not None:
        head["id"] = infer.id
    if ends:
        head["parameters"] = {ENDED: ends_text(ends)}
    arrays = inference.output_arrays(output, outputs)
    parts: list[bytes] = []
    for wanted, binary in infer.wanted.items():
        array = arrays[wanted] if infer.batched else arrays[wanted][0]
        datatype = PROTOCOL_DATATYPES[array.dtype.name]
        tensor: dict[str, Any] = {"name": wanted, "datatype": datatype, "shape": list(array.shape)}
        head["outputs"].append(tensor)
        part = infer.shared.get(wanted)
        if part is not None:
            raw = array.tobytes()
            part.write(raw)
            tensor["parameters"] = {"shared_memory_region": part.region.name, "shared_memory_byte_size": len(raw)}
        elif binary:
            parts.append(array.tobytes())
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            tensor["data"] = array.ravel().tolist()
    start = orjson.dumps(head)
    if not parts:
        return Response(200, start, headers=ended_headers(ends))
    length = (("Inference-Header-Content-Length", str(len(start))), *ended_headers(ends))
    return Response(200, b"".join([start, *parts]), "application/octet-stream", length)


def _head_and_tail(request: Request, input: ChunkSpec, max_rows: int) -> tuple[dict[str, Any], memoryview]:
    body = request.body
    text = request.head.headers.get(HEAD_LENGTH)
    if text is None:
        check_json(body, input, max_rows)
        return _dictionary(json_of(body), "the body"), memoryview(b"")
    length = int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
    if not 0 <= length <= len(body):
        raise InvalidInput(f"Inference-Header-Content-Length is {shown(text)}, but the body has {len(body):,} bytes.")
    start = body[:length]
    check_json(start, input, max_rows)
    return _dictionary(json_of(start), "the head"), memoryview(body)[length:]


def _id(value: Any) -> str | None:
    if not isinstance(value, str | None):
        raise InvalidInput(f"The id is {shown(value)}; it must be a string.")
    return value or None


def _given(tensors: list[dict[str, Any]], tail: memoryview, lookup: Lookup) -> list[inference.GivenTensor]:
    """Give each tensor its bytes of the tail, which follow one another in the order of the head."""
    given: list[inference.GivenTensor] = []
    at = 0
    for tensor in tensors:
        size = _dictionary(tensor.get("parameters", {}), "an input's parameters").get("binary_data_size")
        end = at + size if type(size) is int and 0 <= size <= len(tail) - at else at
        part, at = tail[at:end], end
        read = partial(_chunks, tensor, part, lookup)
        given.append(
            inference.GivenTensor(tensor.get("name"), tensor.get("datatype"), _shape(tensor.get("shape")), read)
        )
    if at != len(tail):
        raise InvalidInput(
            f"{len(tail):,} bytes follow the JSON head; the inputs' binary_data_size are {at:,} of them."
        )
    return given


def _chunks(tensor: dict[str, Any], tail: memoryview, lookup: Lookup, spec: TensorSpec, rows: int) -> Array:
    parameters = _dictionary(tensor.get("parameters", {}), "inputs[0].parameters")
    shared = lookup(parameters)
    if shared is not None:
        if len(tail) or "data" in tensor:
            raise InvalidInput(f"{spec.name!r} has both shared memory and data; send one of them.")
        return inference.shared_chunks(shared, rows, spec)
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
    return inference.chunks_of(tail, rows, spec)


def _of_the_only(data: Any) -> dict[str, Any]:
    # Nested lists with the batch dimension; flat ones have none.
    nested = isinstance(data, list) and len(cast(list[Any], data)) == 1 and isinstance(data[0], list)
    return {"data": data[0]} if nested else {}


def _wanted(
    outputs: Any, names: Collection[str], binary: bool, lookup: Lookup
) -> tuple[dict[str, bool], dict[str, SharedPart]]:
    if not isinstance(outputs, list | None):
        raise InvalidInput("'outputs' must be a list.")
    wanted: dict[str, bool] = {}
    shared: dict[str, SharedPart] = {}
    entries = cast(list[Any], outputs or [])
    inference.check_output_count(len(entries), names)
    for at, entry in enumerate(entries):
        tensor = _dictionary(entry, f"outputs[{at}]")
        parameters = _dictionary(tensor.get("parameters", {}), f"outputs[{at}].parameters")
        inference.check_output(tensor.get("name"), parameters, names)
        wanted[tensor["name"]] = bool(parameters.get("binary_data", binary))
        if (part := lookup(parameters)) is not None:
            shared[tensor["name"]] = part
    return wanted or dict.fromkeys(names, binary), shared


def region_of(body: bytes) -> tuple[Any, Any, Any]:
    """Read the body of a request to register a region: its key, offset and byte_size, unchecked.

    Raises:
        InvalidInput: It is no JSON object.
    """
    given = _dictionary(json_of(body), "the body")
    return given.get("key"), given.get("offset", 0), given.get("byte_size")


def reject_overrides(body: bytes) -> None:
    """Read the body of a request to load or unload a model.

    Raises:
        InvalidInput: It is malformed, or overrides the configuration or files of the model.
    """
    head = _dictionary(json_of(body), "the body") if body.strip() else {}
    parameters = _dictionary(head.get("parameters", {}), "parameters")
    unknown = sorted(parameters.keys() - {"unload_dependents"})
    if unknown:
        raise InvalidInput(f"The parameter {unknown[0]!r} is not taken; a model is loaded as its bundle says.")


def _dictionary(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{what} must be a JSON object.")
    return cast(dict[str, Any], value)


def _shape(value: Any) -> tuple[int, ...]:
    sizes = cast(list[Any], value) if isinstance(value, list) else []
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise InvalidInput(f"The shape is {shown(value)}; it must be a list of whole numbers.")
    return tuple(sizes)
