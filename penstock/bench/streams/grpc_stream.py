"""A sent stream as a sequence of the Open Inference Protocol: one bidirectional ModelStreamInfer call each.

Protobuf messages may be concatenated: the fields of the stream and those of each chunk are serialised before the run,
and joined when the chunk is due.
"""

import secrets
from typing import final

from penstock.bench.streams.grpc_call import GrpcCall
from penstock.bench.streams.sender_socket import ConnectedStream
from penstock.bench.streams.stream_sender import (
    OpenStream,
    StreamSender,
    StreamSenderJob,
    StreamWorkload,
    address_of,
)
from penstock.core.errors import BenchError
from penstock.serve.grpc import oip_v2_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
END = "end"


def open_sequences(job: StreamSenderJob) -> OpenStream:
    """Serialise the chunks of a job, and return a function that opens a stream."""
    sounds = [job.workload.chunks(sound) for sound in job.workload.sounds]
    parts = [[_of_chunk(str(number), chunk) for number, chunk in enumerate(chunks)] for chunks in sounds]
    last = [_of_chunk(END, chunks[-1]) for chunks in sounds]
    return lambda sender, index: _SentSequence(sender, index, parts, last)


@final
class _SentSequence(ConnectedStream):
    def __init__(self, sender: StreamSender, index: int, parts: list[list[bytes]], last: list[bytes]) -> None:
        job = sender.job
        host, port = address_of(job.workload.url)
        self._call = GrpcCall(f"{host}:{port}", METHOD)
        super().__init__(sender, index, self._call.first)
        self._parts, self._last = parts[self.which], last[self.which]
        self._common = _of_stream(job.workload)
        self._ending = False
        # The answer to the first chunk shows that the sequence is admitted; the others are due from then on.
        self.write(self._call.message(self._common + _START + self._parts[0]))
        self.sent = 1

    def send_chunk(self, number: int) -> None:
        self.write(self._call.message(self._common + self._parts[number]))

    def finish(self) -> None:
        if self.live:
            self._ending = True
            self.sender.ending += 1
            self._end_when_answered()

    def received(self, data: bytes) -> None:
        messages, reply = self._call.feed(data)
        if reply:
            self.write(reply)
        for message in messages:
            if self.connected:
                self._handle(pb.ModelStreamInferResponse.FromString(message))
        if self._call.end_reason is not None:
            self.lost(self._call.end_reason)

    def close(self) -> None:
        self._ended()
        super().close()

    def _handle(self, answer: pb.ModelStreamInferResponse) -> None:
        response = answer.infer_response
        if response.id == END:
            self._ended()
        elif answer.error_message:
            # After a rejected chunk the signal has a gap. A sequence belongs to its number, not to this call, so the
            # end is sent too, in case the server still holds a slot for it.
            self.finish()
            end = self.lost if self.live else self.rejected
            end(answer.error_message)
        elif not response.id.isdecimal() or not response.raw_output_contents:
            raise BenchError(f"a request was answered without its id or its output's bytes: {str(answer)[:200]!r}.")
        else:
            if not self.live:
                self.sender.opened += 1
                self.begin()
            self.result(int(response.id), response.raw_output_contents[0])
            if self._ending:
                self._end_when_answered()

    def _end_when_answered(self) -> None:
        # Triton may reorder requests that arrive together, and rejects chunks after the end.
        if self.next_result == self.sent:
            self.write(self._call.message(self._common + _END + self._last))

    def _ended(self) -> None:
        self.sender.ending -= self._ending
        self._ending = False


def _of_stream(workload: StreamWorkload) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(
        name=workload.input.name,
        datatype=workload.input.protocol_datatype,
        shape=[1, *workload.input.shape],
    )
    # Unique over senders and over earlier runs that the server may still hold.
    sequence = pb.InferParameter(int64_param=1 + secrets.randbits(62))
    request = pb.ModelInferRequest(model_name=workload.model, inputs=[tensor], parameters={"sequence_id": sequence})
    return request.SerializeToString()


def _of_chunk(id: str, chunk: bytes) -> bytes:
    return pb.ModelInferRequest(id=id, raw_input_contents=[chunk]).SerializeToString()


def _flag(name: str) -> bytes:
    return pb.ModelInferRequest(parameters={name: pb.InferParameter(bool_param=True)}).SerializeToString()


_START, _END = _flag("sequence_start"), _flag("sequence_end")
