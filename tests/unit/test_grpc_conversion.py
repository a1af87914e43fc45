"""The gRPC messages of the Open Inference Protocol: the generated modules, requests to arrays, arrays to responses."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor
from grpc import StatusCode
from tritonclient.grpc import model_config_pb2, service_pb2

from penstock.core.errors import (
    ComputeFailed,
    DeadlineImpossible,
    InvalidInput,
    Overloaded,
    RequestError,
    TooLarge,
    TooLate,
    UnknownRoute,
    UnsupportedContent,
)
from penstock.core.spec import PROTOCOL_DATATYPES, TensorSpec
from penstock.serve.grpc import oip_v2_pb2 as pb
from penstock.serve.grpc.conversion import (
    CONTENTS,
    MAX_DETAILS_BYTES,
    details_of,
    infer_response,
    parse_infer,
    retry_metadata,
    status_of,
)

ROOT = Path(__file__).parents[2]
FOUR = TensorSpec(dtype="float32", shape=(4,), meaning="four numbers", name="numbers")
SCORES = TensorSpec(dtype="float32", shape=(3,), meaning="scores", name="scores")
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def request_of(values: np.ndarray = ROWS, *, spec: TensorSpec = FOUR, raw: bool = True) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="doubler", id="seven")
    tensor = request.inputs.add(name=spec.name, datatype=spec.protocol_datatype, shape=values.shape)
    if raw:
        request.raw_input_contents.append(values.tobytes())
    else:
        getattr(tensor.contents, CONTENTS[spec.dtype][0]).extend(values.ravel().tolist())
    return request


def parsed(request: pb.ModelInferRequest, *, left_s: float | None = None) -> Any:
    return parse_infer(request, FOUR, SCORES, 4, left_s)


def test_the_generated_modules_are_what_the_proto_gives(tmp_path: Path) -> None:
    made = subprocess.run(
        ["make", "--old-file", "setup", "proto", f"OUT={tmp_path}"], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    for name in ("oip_v2_pb2.py", "oip_v2_pb2.pyi", "health_pb2.py", "health_pb2.pyi"):
        path = Path("penstock/serve/grpc") / name
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), "run `make proto` and commit what it writes"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_process_may_import_the_clients_messages_too(order: tuple[int, int]) -> None:
    imports = ("import penstock.serve.grpc.oip_v2_pb2 as ours", "import tritonclient.grpc.service_pb2 as theirs")
    code = "\n".join(imports[index] for index in order) + (
        "\nassert ours.ModelInferRequest is not theirs.ModelInferRequest"
        "\nraw = theirs.ModelInferRequest(model_name='a', raw_input_contents=[b'12']).SerializeToString()"
        "\nassert ours.ModelInferRequest.FromString(raw).SerializeToString() == raw"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def fields(message: Descriptor) -> dict[str, tuple[Any, ...]]:
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.message_type.full_name if field.message_type else None,
            field.containing_oneof.name if field.containing_oneof else None,
        )
        for field in message.fields
    }


def messages(of: Any) -> dict[str, Descriptor]:
    below = {} if isinstance(of, Descriptor) else dict(of.message_types_by_name)
    nested = [*of.nested_types] if isinstance(of, Descriptor) else [*below.values()]
    found = {message.full_name: message for message in nested}
    for message in nested:
        found |= messages(message)
    return found


def test_every_field_has_the_clients_number_and_type() -> None:
    theirs = messages(service_pb2.DESCRIPTOR) | messages(model_config_pb2.DESCRIPTOR)
    ours = messages(pb.DESCRIPTOR)
    assert len(ours) > 40
    for name, message in ours.items():
        assert fields(message).items() <= fields(theirs[name]).items(), name
    for name in ours.keys() & {message for message in theirs if ".ModelInfer" in message}:
        assert fields(ours[name]) == fields(theirs[name]), name
    values = model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    assert {name: values[name].number for name, _ in pb.DataType.items()} == dict(pb.DataType.items())
    assert {f"TYPE_{name}" for name in PROTOCOL_DATATYPES.values()} == {*pb.DataType.keys()} - {"TYPE_INVALID"}


def test_every_method_has_the_clients_messages() -> None:
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    ours = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert len(ours) == 15
    for name, method in ours.items():
        assert method.input_type.full_name == theirs[name].input_type.full_name
        assert method.output_type.full_name == theirs[name].output_type.full_name
        assert (method.client_streaming, method.server_streaming) == (
            theirs[name].client_streaming,
            theirs[name].server_streaming,
        )


@pytest.mark.parametrize("dtype", PROTOCOL_DATATYPES)
@pytest.mark.parametrize("raw", [True, False])
def test_every_dtype_there_and_back(dtype: str, raw: bool) -> None:
    spec = TensorSpec(dtype=dtype, shape=(2, 2), meaning="a square", name="square")
    values = np.array([[[0, 1], [1, 0]], [[1, 1], [0, 1]], [[0, 0], [1, 1]]]).astype(spec.numpy_dtype)
    if dtype == "float16" and not raw:
        request = request_of(values, spec=spec)
        del request.raw_input_contents[:]
        request.inputs[0].contents.fp32_contents.extend(values.ravel().tolist())
        with pytest.raises(InvalidInput, match="FP16 has no typed contents"):
            parse_infer(request, spec, spec, 4)
        return
    infer = parse_infer(request_of(values, spec=spec, raw=raw), spec, spec, 4)
    assert infer.chunks.dtype == spec.numpy_dtype
    np.testing.assert_array_equal(infer.chunks, values)
    response = infer_response(infer, infer.chunks, "same", "1", spec)
    tensor = response.outputs[0]
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("square", spec.protocol_datatype, [3, 2, 2])
    if raw:
        assert list(response.raw_output_contents) == [values.tobytes()]
    else:
        assert not response.raw_output_contents
        assert list(getattr(tensor.contents, CONTENTS[dtype][0])) == values.ravel().tolist()


def test_an_output_that_has_no_typed_contents_comes_raw() -> None:
    half = TensorSpec(dtype="float16", shape=(1,), meaning="a half", name="half")
    infer = parse_infer(request_of(raw=False), FOUR, half, 4)
    assert infer_response(infer, np.ones((2, 1), np.float16), "halved", "1", half).raw_output_contents


def test_without_the_batch_dimension_neither_has_the_response() -> None:
    infer = parsed(request_of(ROWS[0]))
    assert infer.chunks.shape == (1, 4)
    response = infer_response(infer, np.zeros((1, 3), np.float32), "doubler", "1", SCORES)
    assert list(response.outputs[0].shape) == [3]
    assert (response.model_name, response.model_version, response.id) == ("doubler", "1", "seven")


def test_timeout_and_the_deadline_of_the_call_are_the_budget() -> None:
    request = request_of()
    assert parsed(request).budget_ns is None
    assert parsed(request, left_s=0.25).budget_ns == 250_000_000
    assert parsed(request, left_s=1e9).budget_ns == 600_000_000_000
    assert parsed(request, left_s=-0.1).budget_ns == 1
    request.parameters["timeout"].int64_param = 2_000
    assert parsed(request).budget_ns == 2_000_000
    assert parsed(request, left_s=5).budget_ns == 2_000_000
    assert parsed(request, left_s=0.001).budget_ns == 1_000_000
    request.parameters["timeout"].int64_param = 0
    assert parsed(request).budget_ns is None


def test_the_priority_is_kept() -> None:
    request = request_of()
    assert parsed(request).priority == 0
    request.parameters["priority"].uint64_param = 3
    assert parsed(request).priority == 3


def name_of_the_input(request: pb.ModelInferRequest) -> None:
    request.inputs[0].name = "other"


def datatype(request: pb.ModelInferRequest) -> None:
    request.inputs[0].datatype = "FP64"


def shape(request: pb.ModelInferRequest) -> None:
    request.inputs[0].shape[:] = [2, 5]


def no_shape(request: pb.ModelInferRequest) -> None:
    del request.inputs[0].shape[:]


def no_rows(request: pb.ModelInferRequest) -> None:
    request.inputs[0].shape[:] = [0, 4]


def no_input(request: pb.ModelInferRequest) -> None:
    del request.inputs[:]


def bytes_too_few(request: pb.ModelInferRequest) -> None:
    request.raw_input_contents[0] = bytes(31)


def two_raw(request: pb.ModelInferRequest) -> None:
    request.raw_input_contents.append(bytes(32))


def no_data(request: pb.ModelInferRequest) -> None:
    del request.raw_input_contents[:]


def both(request: pb.ModelInferRequest) -> None:
    request.inputs[0].contents.fp32_contents.append(1)


def other_contents(request: pb.ModelInferRequest) -> None:
    del request.raw_input_contents[:]
    request.inputs[0].contents.int_contents.extend(range(8))


def two_contents(request: pb.ModelInferRequest) -> None:
    other_contents(request)
    request.inputs[0].contents.fp32_contents.extend(range(8))


def not_a_number(request: pb.ModelInferRequest) -> None:
    request.raw_input_contents[0] = np.full((2, 4), np.nan, np.float32).tobytes()


def shared_memory(request: pb.ModelInferRequest) -> None:
    request.inputs[0].parameters["shared_memory_region"].string_param = "region"


def other_output(request: pb.ModelInferRequest) -> None:
    request.outputs.add(name="other")


def classification(request: pb.ModelInferRequest) -> None:
    request.outputs.add(name="scores").parameters["classification"].int64_param = 2


def output_in_shared_memory(request: pb.ModelInferRequest) -> None:
    request.outputs.add(name="scores").parameters["shared_memory_region"].string_param = "region"


def timeout_in_words(request: pb.ModelInferRequest) -> None:
    request.parameters["timeout"].string_param = "soon"


def timeout_of_years(request: pb.ModelInferRequest) -> None:
    request.parameters["timeout"].int64_param = (1 << 63) - 1


def priority_below_zero(request: pb.ModelInferRequest) -> None:
    request.parameters["priority"].int64_param = -1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (name_of_the_input, "named 'other'; this model's is 'numbers'"),
        (datatype, "datatype is 'FP64'; 'numbers' is FP32"),
        (shape, r"shape is \[2, 5\]; 'numbers' takes \['n', 4\]"),
        (no_shape, r"shape is \[\]"),
        (no_rows, r"shape is \[0, 4\]"),
        (no_input, "has 0 inputs; it must have exactly one"),
        (bytes_too_few, r"has 31 bytes; 2 x float32\[4\] is one entry of 32"),
        (two_raw, r"has 32 \+ 32 bytes; 2 x float32\[4\] is one entry of 32"),
        (no_data, "has 0 fp32_contents; .* 8 numbers there, or its bytes in raw_input_contents"),
        (both, "both contents and raw_input_contents"),
        (other_contents, "0 fp32_contents and also int_contents"),
        (two_contents, "8 fp32_contents and also int_contents"),
        (not_a_number, "NaN or infinity"),
        (shared_memory, "takes no shared memory"),
        (other_output, "no output 'other'; this model has 'scores'"),
        (classification, "Classification"),
        (output_in_shared_memory, "takes no shared memory"),
        (timeout_in_words, "timeout is 'soon'"),
        (timeout_of_years, "microseconds up to 600,000,000"),
        (priority_below_zero, "priority is -1"),
    ],
)
def test_what_is_wrong_is_said(change: Any, sentence: str) -> None:
    request = request_of()
    change(request)
    with pytest.raises(InvalidInput, match=sentence):
        parsed(request)


def test_too_many_rows_are_too_large() -> None:
    with pytest.raises(TooLarge, match="5 rows; at most 4"):
        parsed(request_of(np.zeros((5, 4), np.float32)))


def test_a_number_that_does_not_fit_is_not_cut() -> None:
    bytes_ = TensorSpec(dtype="uint8", shape=(2,), meaning="two bytes", name="bytes")
    request = request_of(np.zeros((1, 2), np.uint8), spec=bytes_, raw=False)
    request.inputs[0].contents.uint_contents[1] = 256
    with pytest.raises(InvalidInput, match="bytes holds 256; it must be a whole number from 0 to 255"):
        parse_infer(request, bytes_, bytes_, 4)


def test_each_error_has_its_status() -> None:
    expected = {
        InvalidInput("x"): StatusCode.INVALID_ARGUMENT,
        TooLarge("x"): StatusCode.INVALID_ARGUMENT,
        UnknownRoute("x"): StatusCode.NOT_FOUND,
        Overloaded("x", 0.25): StatusCode.RESOURCE_EXHAUSTED,
        TooLate("x"): StatusCode.DEADLINE_EXCEEDED,
        DeadlineImpossible("x"): StatusCode.DEADLINE_EXCEEDED,
        ComputeFailed("x"): StatusCode.INTERNAL,
        UnsupportedContent("x"): StatusCode.INTERNAL,
        RequestError("x"): StatusCode.INTERNAL,
    }
    for error, status in expected.items():
        assert status_of(error) is status, error
    assert retry_metadata(Overloaded("x", 0.25)) == (("retry-after-ms", "250"),)
    assert retry_metadata(InvalidInput("x")) == ()


@pytest.mark.parametrize("character", ["x", "%", "\n", "é", "語", "😀", "\ud800"])
def test_details_are_cut_where_metadata_is_too_long_for_clients(character: str) -> None:
    assert details_of(InvalidInput("Give a number; 100 % of it.")) == "Give a number; 100 % of it."
    details = details_of(InvalidInput(character * 10_000))
    assert details.endswith("...")
    sent = quote(details.encode(), safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}~")
    assert MAX_DETAILS_BYTES - 12 <= len(sent) <= MAX_DETAILS_BYTES + 3


def test_a_client_gets_the_status_of_a_long_error() -> None:
    error = InvalidInput("é" * 10_000)

    async def refuse(request: bytes, context: Any) -> bytes:
        await context.abort(status_of(error), details_of(error))
        return b""

    async def scene() -> tuple[StatusCode, str]:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(cast(Any, refuse))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", {"C": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await cast(Any, channel.unary_unary("/a.B/C"))(b"", timeout=30)
        await server.stop(None)
        return raised.value.code(), raised.value.details() or ""

    assert asyncio.run(scene()) == (StatusCode.INVALID_ARGUMENT, details_of(error))
