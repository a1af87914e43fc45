"""The short way of the Open Inference Protocol's inference requests of one row, see `penstock.serve.http.lane`.

The JSON before binary tensors is the same in most requests of a client: it is read once, and found by its bytes from
then on. Other bodies up to 16 KiB are read each time, as on the complete way.
"""

import re
from dataclasses import replace
from typing import final

import numpy as np

from penstock.core.errors import RequestError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Response, rejected
from penstock.serve.frontend.table_writer import Done, SlotHandle, TableWriter
from penstock.serve.http.encoding import SMALL, response_head, serialize_refusal
from penstock.serve.http.lane import MAX_READ_BYTES
from penstock.serve.http.oip_http import HEAD_LENGTH, OipCall, infer_response, parse_infer
from penstock.serve.http.response_date import ResponseDate
from penstock.serve.oip import inference
from penstock.serve.oip.inference import HIGHEST, Infer
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.table.slots import ANSWERED, OK

# Forms of JSON that are kept for each head.
MAX_READ = 16

Headers = tuple[tuple[str, str], ...]


@final
class OipAnswer:
    """Makes the answers to requests with equal JSON.

    Args:
        request: Stands for each of them; it has no body.
        served: The model.
        infer: What the JSON says; without chunks.
        headers: Added to every response.
        date: The date of responses.
    """

    __slots__ = ("_answer", "_date", "_dated", "_headers", "_infer", "_served", "_small", "_start", "request")

    def __init__(
        self, request: Request, served: ServedModel, infer: Infer, headers: Headers, date: ResponseDate
    ) -> None:
        self.request, self._served, self._infer, self._headers = request, served, infer, headers
        self._answer = served.application.answer
        self._small = SMALL if "accept-encoding" in request.head.headers else 1 << 62
        # Head and JSON of the response, where only its raw bytes differ from one to the next, and their date.
        self._start: bytes | None = None
        self._date, self._dated = date, date.line

    def respond(self, output: Array) -> bytes | Response:
        """Make the response to a good result, see `Lane.respond`."""
        self._served.counts[ANSWERED] += 1
        date = self._date.line
        if self._start is not None:
            if date is not self._dated:
                self._start = self._start.replace(self._dated, date, 1)
                self._dated = date
            return self._start + output.tobytes()
        response = self._response(output)
        body = response.body
        if len(body) > self._small:
            return response
        head = response_head(200, response.content_type, len(body), response.headers, date)
        # The length of a record's outputs may differ; a single tensor is the end of the body.
        if not isinstance(self._answer, RecordSpec) and all(self._infer.wanted.values()):
            self._start, self._dated = head + body[: len(body) - self._answer.nbytes], date
        return head + body

    def answer(self, answer: Answer, status: int, output: Array) -> None:
        """Answer with a result, whatever it is, by a response that the connection serializes."""
        if status == OK:
            self._served.counts[ANSWERED] += 1
            answer(self._response(output))
            return
        error = self._served.error_of(status, None)
        self._served.count_rejection(error)
        response = rejected(error)
        answer(replace(response, headers=response.headers + self._headers))

    def _response(self, output: Array) -> Response:
        served = self._served
        outputs = output.reshape(1, *self._answer.shape)
        response = infer_response(self._infer, outputs, served.name, served.version, self._answer)
        return replace(response, headers=response.headers + self._headers)


@final
class OipLane:
    """The short way of the inference requests with one head.

    Args:
        call: The complete way, which must be `is_plain`.
        head: The head.
        models: The registry: a lane ends with its epoch.
        headers: Added to every response.
        date: The date of responses.

    Attributes:
        answering: Makes the answer of the request that was submitted last.
    """

    answering: OipAnswer

    __slots__ = (
        "_budget_ns",
        "_date",
        "_epoch",
        "_headers",
        "_json_end",
        "_models",
        "_nbytes",
        "_read",
        "_request",
        "_served",
        "_spec",
        "_terms",
        "_writer",
        "answering",
    )

    def __init__(self, call: OipCall, head: Head, models: ModelRegistry, headers: Headers, date: ResponseDate) -> None:
        served = call.served
        assert isinstance(served, ServedModel), served.name
        assert isinstance(served.writer, TableWriter), served.name
        # A copy, so that no cycle keeps the table of a retired model mapped.
        self._request = Request(replace(head, route=None, lane=False), b"")
        self._served, self._writer, self._budget_ns = served, served.writer, served.budget_ns
        self._models, self._epoch, self._headers, self._date = models, models.epoch, headers, date
        self._terms = inference.terms_of(served)
        spec = served.application.input
        length = head.headers.get(HEAD_LENGTH, "")
        self._nbytes = head.nbytes
        # The only tensor, and where its raw bytes begin; None and -1 if the JSON does not say all about them.
        self._spec = None if isinstance(spec, RecordSpec) or re.fullmatch("[0-9]{1,4}", length) is None else spec
        self._json_end = -1 if self._spec is None else head.nbytes + int(length)
        # Answers by the JSON before the raw bytes, whose number is that of the head.
        self._read: dict[bytes, OipAnswer] = {}

    def reject(self, now_ns: int) -> bytes | None:
        """Reject nothing without its body, which may have a budget of its own."""
        return None

    def submit(self, data: bytes, done: Done, arrival_ns: int, now_ns: int) -> SlotHandle | bytes | None:
        """Submit a request, see `Lane.submit`."""
        if self._served.engine_lost or self._models.epoch != self._epoch:
            return None
        writer = self._writer
        chunk: Array | bytes
        spec = self._spec
        short = None if spec is None else self._read.get(data[self._nbytes : self._json_end])
        if short is None or spec is None:
            infer = self._infer_of(data[self._nbytes :])
            if infer is None:
                return None
            chunk = infer.chunks[0]
            infer = replace(infer, chunks=np.empty(0))
            short = OipAnswer(self._request, self._served, infer, self._headers, self._date)
            # The JSON may hold the numbers itself.
            if spec is not None and len(data) - self._json_end == spec.nbytes:
                if len(self._read) >= MAX_READ:
                    self._read.clear()
                self._read[data[self._nbytes : self._json_end]] = short
        else:
            chunk = data[self._json_end :]
            if not spec.takes_any_bytes:
                try:
                    chunk = spec.from_bytes(chunk)
                except RequestError:
                    return None
        self.answering = short
        if writer.refusing:
            error = writer.reject(now_ns, arrival_ns + self._budget_ns - now_ns)
            if error is not None:
                return serialize_refusal(error, self._date.line, self._headers)
        taken = writer.try_submit(chunk, done, arrival_ns, now_ns, self._budget_ns, False)
        return serialize_refusal(taken, self._date.line, self._headers) if isinstance(taken, RequestError) else taken

    def _infer_of(self, body: bytes) -> Infer | None:
        """Read a body; None if it needs the complete way."""
        if self._spec is None and len(body) > MAX_READ_BYTES:
            return None
        try:
            infer = parse_infer(Request(self._request.head, body), *self._terms)
        except RequestError:
            return None
        default = infer.budget_ns is None and infer.priority <= HIGHEST and infer.place is None and not infer.shared
        return infer if default and len(infer.chunks) == 1 else None


def oip_lane_of(
    call: OipCall, head: Head, models: ModelRegistry, headers: Headers, date: ResponseDate
) -> OipLane | None:
    """Make the lane of a head; None if its requests need the complete way."""
    if not head.nbytes or not call.is_plain:
        return None
    return OipLane(call, head, models, headers, date)
