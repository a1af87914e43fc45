"""The short way of common requests: from the socket's bytes into a slot, and from the result into the socket.

A lane belongs to one head. It takes a request only if that needs nothing but its chunk: raw bytes, or JSON of one row;
and it rejects a request for which no room is left, by bytes that are made once. Whatever else comes with that head goes
the complete way of `PlainCall`, which does the same and more. The lane of the Open Inference Protocol is
`penstock.serve.http.oip_lane`.
"""

from dataclasses import replace
from typing import final

from penstock.core.errors import RequestError
from penstock.core.spec import Array
from penstock.serve.exchange.form import JSON
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Response
from penstock.serve.frontend.table_writer import Done, SlotHandle, TableWriter
from penstock.serve.http.encoding import SMALL, response_head, serialize_refusal
from penstock.serve.http.plain import PlainCall
from penstock.serve.http.plain_body import RAW, chunk_of
from penstock.serve.http.response_date import ResponseDate
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.table.slots import ANSWERED

# Larger bodies of JSON are read in threads or checked first.
MAX_READ_BYTES = 1 << 14
MAX_HEADS = 64


@final
class Lane:
    """The short way of the requests with one head.

    Args:
        call: The complete way, which must be `is_plain`.
        head: The head.
        models: The registry: a lane ends with its epoch.
        date: The date of responses.

    Attributes:
        request: Stands for each request of this lane; it has no body.
    """

    __slots__ = (
        "_budget_ns",
        "_call",
        "_content_type",
        "_date",
        "_dated",
        "_epoch",
        "_heads",
        "_low_priority",
        "_models",
        "_nbytes",
        "_raw",
        "_rejects_early",
        "_reply_type",
        "_served",
        "_small",
        "_writer",
        "request",
    )

    def __init__(self, call: PlainCall, head: Head, models: ModelRegistry, date: ResponseDate) -> None:
        served = call.served
        assert isinstance(served.writer, TableWriter), served.name
        # A copy, so that no cycle keeps the table of a retired model mapped.
        self.request = Request(replace(head, route=None, lane=False), b"")
        self._call, self._served, self._writer = call, served, served.writer
        self._budget_ns = served.budget_ns if call.budget_ns is None else call.budget_ns
        self._low_priority = call.low_priority
        self._rejects_early = call.rejects_early
        self._models, self._epoch = models, models.epoch
        self._raw, self._nbytes = call.raw_bytes, head.nbytes
        self._content_type, self._reply_type = call.content_type, RAW if call.raw_reply else JSON
        # Beyond this size, a response is compressed where the client takes that.
        self._small = SMALL if "accept-encoding" in head.headers else 1 << 62
        # Heads of responses by the size of the body, and their date.
        self._heads: dict[int, bytes] = {}
        self._date, self._dated = date, date.line

    @property
    def answering(self) -> "Lane":
        """This lane, which makes its own answers. It is not kept: that would be a cycle."""
        return self

    def reject(self, now_ns: int) -> bytes | None:
        """Reject a request for the last rejection, if that holds for one that came now; None otherwise."""
        if not (self._rejects_early and self._writer.refusing):
            return None
        if self._served.engine_lost or self._models.epoch != self._epoch:
            return None
        error = self._writer.reject(now_ns, self._budget_ns)
        return None if error is None else serialize_refusal(error, self._date.line)

    def submit(self, data: bytes, done: Done, arrival_ns: int, now_ns: int) -> SlotHandle | bytes | None:
        """Submit a request: its slot, or the bytes of its rejection.

        None if it must go the complete way, without a trace of this attempt.

        Args:
            data: The request: the head of this lane, and a body.
            done: Called with the result, see `SlotHandle`.
            arrival_ns: Its arrival time.
            now_ns: The current time.
        """
        writer = self._writer
        if self._served.engine_lost or self._models.epoch != self._epoch:
            return None
        if self._rejects_early and writer.refusing:
            # By the head alone.
            error = writer.reject(now_ns, arrival_ns + self._budget_ns - now_ns)
            if error is not None:
                return serialize_refusal(error, self._date.line)
        chunk: Array | bytes = data[self._nbytes :]
        if len(chunk) != self._raw:
            if len(chunk) > MAX_READ_BYTES:
                return None
            try:
                chunk = chunk_of(self._served, self._content_type, chunk)
            except RequestError:
                return None
        taken = writer.try_submit(chunk, done, arrival_ns, now_ns, self._budget_ns, self._low_priority)
        return serialize_refusal(taken, self._date.line) if isinstance(taken, RequestError) else taken

    def respond(self, output: Array) -> bytes | Response:
        """Make the response to a good result: its bytes, or one that the connection serializes.

        Args:
            output: The output, flat; valid only during the call.
        """
        if self._reply_type == RAW:
            body = output.tobytes()
            if len(body) > self._small:
                return self._call.respond(output)
            self._served.counts[ANSWERED] += 1
        else:
            response = self._call.respond(output)
            body = response.body
            if response.status != 200 or len(body) > self._small:
                return response
        date = self._date.line
        if date is not self._dated:
            self._heads.clear()
            self._dated = date
        head = self._heads.get(len(body))
        if head is None:
            head = response_head(200, self._reply_type, len(body), self._call.headers, date)
            if len(self._heads) < MAX_HEADS:
                self._heads[len(body)] = head
        return head + body

    def answer(self, answer: Answer, status: int, output: Array) -> None:
        """Answer with a result the complete way, see `PlainCall.finish`."""
        self._call.finish(answer, status, output, True)


def lane_of(call: PlainCall, head: Head, models: ModelRegistry, date: ResponseDate) -> Lane | None:
    """Make the lane of a head; None if its requests need the complete way."""
    if not head.nbytes or not call.is_plain or not isinstance(call.served.writer, TableWriter):
        return None
    return Lane(call, head, models, date)
