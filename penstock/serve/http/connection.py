"""One client's connection: the short way of common requests, and the complete way for all others.

`data_received` tries, in this order: the lane of a head that was answered before; a cached rejection; the complete way
(`penstock.serve.http.complete_connection`), which takes any bytes.
"""

from typing import final

from penstock.core.spec import Array
from penstock.serve.exchange.request import Request
from penstock.serve.frontend.table_writer import SlotHandle
from penstock.serve.http.complete_connection import VAGUE_NS, CompleteConnection
from penstock.serve.table.slots import OK

# A client whose request arrives so soon after the refusal of its last one sends again at once.
AGAIN_NS = 8_000_000


@final
class Connection(CompleteConnection):
    """HTTP/1.1 with one client."""

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        now_ns = self.last_active_ns = self.clock_ns()
        if self.batch_loop.run_if_overdue(now_ns):
            if self._transport is None or self._transport.is_closing():
                return  # the batch answered this connection's last request
            now_ns = self.clock_ns()
        self.date.renew_if_due(now_ns)
        if self._rejection is not None:
            return  # drop what follows a rejection; the client still has to read it
        usage = self.usage
        if usage.unusual and usage.waits:
            # Others come first.
            self.parser.keep(data)
            self._pause()
            self._schedule()
            self._hold_unfinished()
            return
        begin_cpu_ns = usage.begin()
        free = self._current is None and not self._waiting and not self._unread
        if not free or not self._take_known(data, now_ns, begin_cpu_ns):
            self._parse(data)
        if begin_cpu_ns:
            usage.end(begin_cpu_ns)

    def _take_known(self, data: bytes, now_ns: int, begin_cpu_ns: int) -> bool:
        """Take the common case: one whole request on its own, with a head that was parsed before; False for others."""
        head = self.parser.known(data)
        if head is None:
            return False
        lane = None if self._closing else head.lane
        arrival_ns = self.batch_loop.arrival_ns(now_ns)
        if now_ns - arrival_ns > VAGUE_NS and self.age is not None:
            arrival_ns = max(arrival_ns, self.batch_loop.sampled_arrival_ns(now_ns, self.age))
            # By what is known of one that came now, where that is enough.
            if lane and (refusal := lane.reject(now_ns)) is not None:
                self._refuse(refusal, lane.answering.request, now_ns, arrival_ns, begin_cpu_ns)
                return True
        if not self._closing:
            if lane:
                taken = lane.submit(data, self._take_result, arrival_ns, now_ns)
                if type(taken) is SlotHandle:
                    short = lane.answering
                    self._current, self._short, self._handle = short.request, short, taken
                    return True
                if taken is not None:
                    self._refuse(taken, lane.answering.request, now_ns, arrival_ns, begin_cpu_ns)
                    return True
            reject_early = self.handlers.reject_early
            if reject_early is not None and (cached := reject_early(head, arrival_ns)) is not None:
                self._refuse(cached, Request(head, b""), now_ns, arrival_ns, begin_cpu_ns)
                return True
        self._start(Request(head, data[head.nbytes :], arrival_ns))
        if head.lane is None and self.handlers.lane is not None:
            head.lane = self.handlers.lane(head) or False
        if self._current is None:
            self._proceed()
        return True

    def _refuse(self, refusal: bytes, request: Request, now_ns: int, arrival_ns: int, begin_cpu_ns: int) -> None:
        """Answer with the bytes of a refusal, now or when the refusals' share of the time allows it."""
        refusals = self.refusals
        if refusals is not None and not refusals.admit(now_ns):
            if arrival_ns - self._refused_ns < AGAIN_NS:
                self._current = request
                refusals.hold(self, refusal, now_ns)
                return
            refusals.count()
        self._refused_ns = now_ns
        self._write(refusal)
        if begin_cpu_ns and refusals is not None:
            refusals.observe(self._turns.cpu_ns() - begin_cpu_ns)

    def write_refusal(self, refusal: bytes) -> None:
        """Answer a request whose refusal was held, see `Refused`."""
        request, transport = self._current, self._transport
        if transport is None or request is None:
            return
        self._current = None
        self._refused_ns = self.clock_ns()
        close = self._closing and not self._waiting
        transport.write(refusal.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1) if close else refusal)
        self._finish(transport, close)

    def _take_result(self, status: int, output: Array, last: bool) -> None:
        """Answer the request that went down a lane."""
        short, transport = self._short, self._transport
        self._short = self._handle = None
        assert short is not None, status
        if status != OK or self._closing or transport is None:
            short.answer(self._answer, status, output)
            return
        response = short.respond(output)
        if isinstance(response, bytes):
            self._current = None
            transport.write(response)
            self._proceed()
        else:
            self._answer(response)
