"""What streams play to a model that another server describes, where its bundle is not at hand."""

from typing import Any

import grpc

from penstock.bench.streams import LONGEST_OPENING_S, WARM_UP_S, Played, address_of, sounds_for
from penstock.core.errors import BenchError
from penstock.core.live import Live
from penstock.core.spec import PROTOCOL_DATATYPES, TensorSpec
from penstock.serve.protocols import grpc_v2_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelMetadata"
ANSWERS_S = 10.0
DTYPES = {datatype: dtype for dtype, datatype in PROTOCOL_DATATYPES.items()}


def played_to(url: str, model: str, *, rate_hz: float, frames: int | None, seconds: float) -> Played:
    """What streams play to a model of which only the metadata is known; nothing says which outputs are right.

    Args:
        url: Of the server's gRPC, `"host:port"`.
        model: What it calls the model.
        rate_hz: Frames of the signal in a second.
        frames: Of a chunk; by default as many as the model's input has.
        seconds: How long is measured.

    Raises:
        BenchError: The server does not answer, or the model does not take chunks of one signal.
    """
    chunk = input_of(_metadata(url, model), frames)
    sounds = sounds_for(chunk, Live(rate_hz=rate_hz), seconds + WARM_UP_S + LONGEST_OPENING_S)
    return Played(url=url, model=model, input=chunk, sounds=sounds, period_s=chunk.shape[0] / rate_hz, protocol="grpc")


def input_of(metadata: pb.ModelMetadataResponse, frames: int | None) -> TensorSpec:
    """One chunk, as a model's metadata describe it, of so many frames.

    Raises:
        BenchError: The model takes something else, or any number of frames where none is given.
    """
    described = [f"{tensor.name} {tensor.datatype}{list(tensor.shape)}" for tensor in metadata.inputs]
    tensor = metadata.inputs[0] if len(metadata.inputs) == 1 else None
    if tensor is None or len(tensor.shape) < 2 or tensor.datatype not in DTYPES:
        raise BenchError(
            f"model {metadata.name!r} takes {', '.join(described) or 'nothing'}; a stream has one input of numbers, "
            f"[1, frames, ...]."
        )
    # The first is of the batch.
    given, *rest = tensor.shape[1:]
    if given not in (-1, frames) and frames is not None:
        raise BenchError(
            f"model {metadata.name!r} takes chunks of {given:,} frames, not {frames:,}; leave out --frames."
        )
    shape = (given if frames is None else frames, *rest)
    if min(shape) < 1:
        raise BenchError(f"model {metadata.name!r} takes {described[0]}; say by --frames how many a chunk has.")
    return TensorSpec(dtype=DTYPES[tensor.datatype], shape=shape, meaning="a chunk", name=tensor.name)


def _metadata(url: str, model: str) -> pb.ModelMetadataResponse:
    host, port = address_of(url)
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        ask: Any = channel.unary_unary(
            METHOD,
            request_serializer=pb.ModelMetadataRequest.SerializeToString,
            response_deserializer=pb.ModelMetadataResponse.FromString,
        )
        try:
            return ask(pb.ModelMetadataRequest(name=model), timeout=ANSWERS_S)
        except grpc.RpcError as error:
            said: Any = error
            raise BenchError(f"{url} does not say what {model!r} takes: {said.details()}") from None
