"""A stream workload from the metadata of a served model, where its bundle is not available."""

from typing import Any

import grpc

from penstock.bench.streams.stream_generator import MAX_OPENING_S, WARM_UP_S, sounds_for
from penstock.bench.streams.stream_sender import StreamWorkload, address_of
from penstock.core.errors import BenchError
from penstock.core.spec import PROTOCOL_DATATYPES, TensorSpec
from penstock.core.streams.live import Live
from penstock.serve.grpc import oip_v2_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelMetadata"
TIMEOUT_S = 10.0
DTYPES = {datatype: dtype for dtype, datatype in PROTOCOL_DATATYPES.items()}


def metadata_workload(url: str, model: str, *, rate_hz: float, frames: int | None, seconds: float) -> StreamWorkload:
    """Make a workload for a served model; its outputs are not checked.

    Args:
        url: Address of the server's gRPC service, `"host:port"`.
        model: Name of the model.
        rate_hz: Frames a second.
        frames: Frames a chunk; by default those of the model's input.
        seconds: Duration of the measurement.

    Raises:
        BenchError: The server does not answer, or the model does not take chunks of one signal.
    """
    chunk = input_of(_metadata(url, model), frames)
    sounds = sounds_for(chunk, Live(rate_hz=rate_hz), seconds + WARM_UP_S + MAX_OPENING_S)
    return StreamWorkload(
        url=url, model=model, input=chunk, sounds=sounds, period_s=chunk.shape[0] / rate_hz, protocol="grpc"
    )


def input_of(metadata: pb.ModelMetadataResponse, frames: int | None) -> TensorSpec:
    """Return the spec of one chunk from a model's metadata.

    Raises:
        BenchError: The model takes something else, or any number of frames and none is given.
    """
    described = [f"{tensor.name} {tensor.datatype}{list(tensor.shape)}" for tensor in metadata.inputs]
    tensor = metadata.inputs[0] if len(metadata.inputs) == 1 else None
    if tensor is None or len(tensor.shape) < 2 or tensor.datatype not in DTYPES:
        raise BenchError(
            f"model {metadata.name!r} takes {', '.join(described) or 'nothing'}; a stream has one input of numbers, "
            f"[1, frames, ...]."
        )
    # The first dimension is the batch.
    given, *rest = tensor.shape[1:]
    if given not in (-1, frames) and frames is not None:
        raise BenchError(
            f"model {metadata.name!r} takes chunks of {given:,} frames, not {frames:,}; leave out --frames."
        )
    shape = (given if frames is None else frames, *rest)
    if min(shape) < 1:
        raise BenchError(f"model {metadata.name!r} takes {described[0]}; give the frames of a chunk by --frames.")
    return TensorSpec(dtype=DTYPES[tensor.datatype], shape=shape, meaning="a chunk", name=tensor.name)


def _metadata(url: str, model: str) -> pb.ModelMetadataResponse:
    host, port = address_of(url)
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        call: Any = channel.unary_unary(
            METHOD,
            request_serializer=pb.ModelMetadataRequest.SerializeToString,
            response_deserializer=pb.ModelMetadataResponse.FromString,
        )
        try:
            return call(pb.ModelMetadataRequest(name=model), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            status: Any = error
            raise BenchError(f"{url} gives no metadata of {model!r}: {status.details()}") from None
