"""A played stream as a sequence of the Open Inference Protocol: a bidirectional ModelStreamInfer for each.

Protobuf messages may be concatenated: what a request has of the stream and what it has of its chunk are serialised
before the run, and joined when the chunk is due.
"""

import secrets
from typing import final

from penstock.bench.grpc_call import GrpcCall
from penstock.bench.stream_player import Open, Player, Stream, StreamJob
from penstock.core.errors import BenchError
from penstock.serve.protocols import grpc_v2_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
END = "end"


def open_sequences(job: StreamJob) -> Open:
    """Serialise what a job sends, and give what opens a stream."""
    parts = [[_of_chunk(str(number), chunk) for number, chunk in enumerate(job.chunks(sound))] for sound in job.sounds]
    last = [_of_chunk(END, job.chunks(sound)[-1]) for sound in job.sounds]
    return lambda player, index: _Sequence(player, index, parts, last)


@final
class _Sequence(Stream):
    def __init__(self, player: Player, index: int, parts: list[list[bytes]], last: list[bytes]) -> None:
        job = player.job
        self._call = GrpcCall(f"{job.host}:{job.port}", METHOD)
        super().__init__(player, index, self._call.first)
        self._parts, self._last = parts[self.which], last[self.which]
        self._common = _of_stream(job)
        self._leaving = False
        # The answer to the first chunk says that the sequence is taken in; the others are due from then on.
        self.write(self._call.message(self._common + _START + self._parts[0]))
        self.sent = 1

    def say(self, number: int) -> None:
        self.write(self._call.message(self._common + self._parts[number]))

    def finish(self) -> None:
        if self.live:
            self._leaving = True
            self.player.leaving += 1
            self._end_when_answered()

    def received(self, data: bytes) -> None:
        messages, said = self._call.feed(data)
        if said:
            self.write(said)
        for message in messages:
            if self.connected:
                self._heard(pb.ModelStreamInferResponse.FromString(message))
        if self._call.over is not None:
            self.over(self._call.over)

    def close(self) -> None:
        self._left()
        super().close()

    def _heard(self, answer: pb.ModelStreamInferResponse) -> None:
        response = answer.infer_response
        if response.id == END:
            self._left()
        elif answer.error_message:
            # What follows a chunk that was refused would be another signal. A sequence belongs to its number, not to
            # this call, so that the server hears of the end where it may still hold a slot for it.
            self.finish()
            end = self.over if self.live else self.refused
            end(answer.error_message)
        elif not response.id.isdecimal() or not response.raw_output_contents:
            raise BenchError(f"a request was answered without its id or its output's bytes: {str(answer)[:200]!r}.")
        else:
            if not self.live:
                self.player.opened += 1
                self.begin()
            self.result(int(response.id), response.raw_output_contents[0])
            if self._leaving:
                self._end_when_answered()

    def _end_when_answered(self) -> None:
        # Triton takes requests of a stream that come at once in any order, and what comes behind the end is refused.
        if self.next_result == self.sent:
            self.write(self._call.message(self._common + _END + self._last))

    def _left(self) -> None:
        self.player.leaving -= self._leaving
        self._leaving = False


def _of_stream(job: StreamJob) -> bytes:
    """What every request of a stream says."""
    tensor = pb.ModelInferRequest.InferInputTensor(
        name=job.input.name, datatype=job.input.protocol_datatype, shape=[1, *job.input.shape]
    )
    # No other player's, nor one's of an earlier run that the server may still know.
    sequence = pb.InferParameter(int64_param=1 + secrets.randbits(62))
    request = pb.ModelInferRequest(model_name=job.model, inputs=[tensor], parameters={"sequence_id": sequence})
    return request.SerializeToString()


def _of_chunk(id: str, chunk: bytes) -> bytes:
    return pb.ModelInferRequest(id=id, raw_input_contents=[chunk]).SerializeToString()


def _flag(name: str) -> bytes:
    return pb.ModelInferRequest(parameters={name: pb.InferParameter(bool_param=True)}).SerializeToString()


_START, _END = _flag("sequence_start"), _flag("sequence_end")
