"""The header Date: made once a second, and in every response once."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.core.errors import Overloaded, RequestError
from penstock.core.spec import TensorSpec
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.request_bounds import RequestBounds
from penstock.serve.exchange.response import Answer, Body, Handlers, Response, Streamed, Switched, rejected
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.http.connection import Connection
from penstock.serve.http.encoding import serialize_refusal
from penstock.serve.http.lane import Lane
from penstock.serve.http.oip_lane import OipAnswer
from penstock.serve.http.parser import RequestParser
from penstock.serve.http.plain_body import RAW
from penstock.serve.http.response_date import AFTER_S, ResponseDate
from penstock.serve.oip.inference import Infer
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import SlotTable, TableLayout
from tests.support.clock import Clock, idle_loop
from tests.unit.test_connection import Transport

# The example of RFC 9110, section 5.6.7.
EXAMPLE_S, EXAMPLE = 784_111_777.25, b"Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"
SPEC = TensorSpec(dtype="float32", shape=(2,), meaning="two numbers", name="scores")
NEXT = EXAMPLE.replace(b"37", b"38")


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.now_s = EXAMPLE_S
    return clock


def test_the_line_is_that_of_the_rfc_and_is_made_once_a_second(clock: Clock) -> None:
    date = ResponseDate(clock)
    line = date.line
    assert line == EXAMPLE
    clock.now_s += 0.5
    assert date.renew() == pytest.approx(0.25 + AFTER_S)
    assert date.line is line
    clock.now_s += 0.25
    assert date.renew() == pytest.approx(1 + AFTER_S)
    assert date.line == NEXT


def test_a_line_whose_second_is_over_is_renewed_before_the_timer(clock: Clock) -> None:
    date = ResponseDate(clock, clock.ns)
    line = date.line
    clock.now_s += 0.7
    date.renew_if_due(clock.ns())
    assert date.line is line
    clock.now_s += 0.1
    date.renew_if_due(clock.ns())
    assert date.line == NEXT
    # A wall clock that is set back is that of the next second.
    clock.now_s -= 3_600
    assert date.renew() == pytest.approx(0.95 + AFTER_S)
    assert date.line == EXAMPLE.replace(b"08:49:37", b"07:49:38")


def test_a_request_that_came_while_the_process_stopped_has_the_date_of_its_answer(clock: Clock) -> None:
    """A loop calls the readers of sockets before its timers."""
    assert sent(clock, Response(), timer=False).startswith(b"HTTP/1.1 200 OK\r\n" + NEXT)


def sent(
    clock: Clock, answer: Response, request: bytes = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", *, timer: bool = True
) -> bytes:
    """What a connection writes, to a request that a handler answers."""

    def handle(request: Request, answered: Answer) -> None:
        answered(answer)

    def refuse(error: RequestError, head: Head) -> Response:
        return rejected(error)

    transport, parser = Transport(), RequestParser(lambda head: 1 << 20)
    handlers, loop, bounds = Handlers(handle=handle, reject=refuse), idle_loop(clock.ns), RequestBounds()
    date = ResponseDate(clock, clock.ns)
    connection = Connection(handlers, set(), parser, loop, clock.ns, lambda: False, bounds=bounds, date=date)
    connection.connection_made(cast(asyncio.Transport, transport))
    clock.now_s += 1
    if timer:
        date.renew()
    connection.data_received(request)
    return transport.written


def opened(body: Body) -> None:
    body.write(b"data: 1\n\n")


@pytest.mark.parametrize(
    "answer",
    [
        Response(200, b"[1]"),
        Response(204),
        rejected(Overloaded("full")),
        Streamed(200, content_type="text/event-stream", opened=opened),
        Switched(101, take=lambda transport, rest, peers: None),
    ],
    ids=["ok", "no content", "refused", "events", "websocket"],
)
def test_every_response_has_it_once_after_the_status_line(clock: Clock, answer: Response) -> None:
    upgrade = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    written = sent(clock, answer, upgrade) if isinstance(answer, Switched) else sent(clock, answer)
    status, _, rest = written.partition(b"\r\n")
    assert status.startswith(f"HTTP/1.1 {answer.status} ".encode())
    assert rest.startswith(NEXT)
    assert written.count(b"Date: ") == 1


def test_a_request_that_cannot_be_read_has_it_and_an_interim_response_does_not(clock: Clock) -> None:
    refused = sent(clock, Response(), b"\x00\x00")
    assert refused.startswith(b"HTTP/1.1 400 Bad Request\r\nDate: ")
    expecting = b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n"
    assert sent(clock, Response(), expecting) == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_a_refusal_that_is_made_once_has_the_date_of_its_second() -> None:
    error = Overloaded("full")
    first, second = serialize_refusal(error, EXAMPLE), serialize_refusal(error, NEXT)
    assert first.startswith(b"HTTP/1.1 503 Service Unavailable\r\n" + EXAMPLE)
    assert second == first.replace(EXAMPLE, NEXT)
    assert serialize_refusal(error, EXAMPLE) is first


def test_the_heads_of_a_lane_are_those_of_the_second(clock: Clock) -> None:
    table = SlotTable.private(TableLayout(slots=1, chunks=1, input=SPEC, output=SPEC))
    Costs([1], [1e6]).publish(table)
    writer = TableWriter(table, budget_ns=1, wake=lambda: None)
    served = SimpleNamespace(writer=writer, counts=[0] * 16, budget_ns=1)
    call = SimpleNamespace(
        served=served,
        raw_bytes=4,
        content_type=RAW,
        raw_reply=True,
        headers=(("Penstock-Version", "1"),),
        budget_ns=None,
        low_priority=False,
        rejects_early=True,
    )
    date = ResponseDate(clock)
    lane = Lane(cast(Any, call), Head("POST", "/", {}), cast(Any, SimpleNamespace(epoch=0)), date)
    output = np.zeros(4, np.uint8)
    first = lane.respond(output)
    assert isinstance(first, bytes)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n" + EXAMPLE)
    assert lane.respond(output) == first
    clock.now_s += 1
    date.renew()
    assert lane.respond(output) == first.replace(EXAMPLE, NEXT)


def test_the_start_of_answers_in_the_open_protocol_is_that_of_the_second(clock: Clock) -> None:
    served: Any = SimpleNamespace(application=SimpleNamespace(answer=SPEC), counts=[0] * 16, name="x", version="1")
    infer = Infer(
        id=None, chunks=np.empty(0), batched=True, wanted={"scores": True}, budget_ns=None, priority=0, place=None
    )
    date = ResponseDate(clock)
    answers = OipAnswer(Request(Head("POST", "/", {}), b""), served, infer, (), date)
    first = answers.respond(np.ones(2, np.float32))
    assert isinstance(first, bytes)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n" + EXAMPLE)
    assert answers.respond(np.ones(2, np.float32)) == first
    for _ in range(2):
        clock.now_s += 1
        date.renew()
    later = answers.respond(np.ones(2, np.float32))
    assert later == first.replace(EXAMPLE, date.line)
