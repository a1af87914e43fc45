"""A server over gRPC, as one of the backends."""

from collections.abc import Callable
from typing import Any, Self, final

import numpy as np

from penstock.client.record_calls import RecordCalls, RequestRows
from penstock.core.errors import PackError, one_line
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import PROTOCOL_DATATYPES, Array
from penstock.runtime.load import Predictor
from penstock.verify.backends import TIMEOUT_S, Backend, named_input
from penstock.verify.verify_inputs import Example

METHOD = "/inference.GRPCInferenceService/ModelInfer"
# Messages may be as large as the server takes.
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@final
class GrpcBackend(Backend):
    """A server, by the Open Inference Protocol over gRPC; to be used as a context.

    Args:
        address: `host:port` of its gRPC service.
        model: Name of the application or the chain.
        input: Its input.
        answer: Its whole answer.
        single: Whether that is given as one array, and not by the names of its tensors.
        chunk_of: Makes a chunk of the input of an example.

    Raises:
        PackError: The packages of gRPC are missing.
    """

    name = "gRPC"

    def __init__(
        self,
        address: str,
        model: str,
        *,
        input: ChunkSpec,
        answer: ChunkSpec,
        single: bool,
        chunk_of: Callable[[Example], Array] = lambda example: example.raw,
    ) -> None:
        try:
            import grpc
        except ImportError:
            raise PackError("gRPC is not installed; pip install 'penstock-nn[grpc]'.") from None
        self._model, self._address, self._single, self._chunk_of = model, address, single, chunk_of
        self._calls = RecordCalls(name=model, input=input, output=answer)
        self._channel = grpc.insecure_channel(address, options=OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def answer(self, example: Example) -> Any:
        """Run the example.

        Raises:
            PackError: The server does not answer, or its answer is not that of this application.
        """
        import grpc

        (request,), _ = self._calls.requests(named_input(self._calls.input, self._chunk_of(example)))
        call = self._channel.unary_unary(METHOD)
        try:
            message: Any = call(_request(self._model, request), timeout=TIMEOUT_S)
            (found,) = self._calls.outputs_of(_tensors(message), request)
        except grpc.RpcError as error:
            call_error: Any = error
            raise PackError(
                f"the server at {self._address} does not answer {example.name} over gRPC: "
                f"{one_line(call_error.details())}"
            ) from None
        except ValueError as error:
            raise PackError(f"{self._address} does not serve this application ({error}).") from None
        answer = self._calls.output
        return next(iter(found.values())) if self._single and isinstance(answer, RecordSpec) else found


def model_over_grpc(address: str, predictor: Predictor) -> GrpcBackend:
    """A bundle on a server, over gRPC; raw arrays are prepared here, since the protocol carries chunks.

    Raises:
        PackError: The application is live.
    """
    application = predictor.application
    if application.live is not None:
        raise PackError(f"{application.name!r} is live, and --grpc sends single requests; use --server alone.")

    def chunk_of(example: Example) -> Array:
        return example.raw if application.prepare is None else predictor.prepare(example.raw)

    return GrpcBackend(
        address,
        application.name,
        input=application.input,
        answer=application.answer,
        single=not isinstance(application.output, RecordSpec),
        chunk_of=chunk_of,
    )


def _request(model: str, request: RequestRows) -> bytes:
    from penstock.serve.grpc import oip_v2_pb2 as pb

    inputs = [
        pb.ModelInferRequest.InferInputTensor(
            name=name, datatype=PROTOCOL_DATATYPES[array.dtype.name], shape=list(array.shape)
        )
        for name, array in request.arrays.items()
    ]
    contents = [np.ascontiguousarray(array).tobytes() for array in request.arrays.values()]
    return pb.ModelInferRequest(model_name=model, inputs=inputs, raw_input_contents=contents).SerializeToString()


def _tensors(message: bytes) -> dict[str, Array]:
    from penstock.serve.grpc import oip_v2_pb2 as pb

    dtypes = {datatype: dtype for dtype, datatype in PROTOCOL_DATATYPES.items()}
    response = pb.ModelInferResponse.FromString(message)
    return {
        output.name: np.frombuffer(raw, np.dtype(dtypes[output.datatype]).newbyteorder("<")).reshape(
            tuple(output.shape)
        )
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
