"""A front-end under overload decodes no body for an answer that is late; time is the test's."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from penstock.core.application import Application
from penstock.core.errors import Overloaded
from penstock.core.spec import Array, TensorSpec
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Response
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.http.plain import PlainCall
from penstock.serve.moving_average import MovingAverage
from penstock.serve.registry.served_model import Replica, ServedModel
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import OFFERED, SlotTable, TableLayout

MS = 1_000_000
BUDGET_NS = 50 * MS
DECODE_NS = 10 * MS
KIND = "text/x-slow"
INPUT = TensorSpec(dtype="float32", shape=(1,), meaning="a number")
OUTPUT = TensorSpec(dtype="float32", shape=(1,), meaning="a number", name="output")


class Server:
    """One model whose bodies take `DECODE_NS` to decode; batches of 20 ms that nobody runs."""

    def __init__(self, slots: int = 8) -> None:
        self.now_ns = 1_000 * MS
        self.decoded = 0
        self.answers: list[Response] = []
        table = SlotTable.private(TableLayout(slots=slots, chunks=1, input=INPUT, output=OUTPUT))
        Costs([1], [20.0 * MS]).publish(table)
        writer = TableWriter(table, budget_ns=BUDGET_NS, wake=lambda: None)
        application = Application(
            name="slow", input=INPUT, output=OUTPUT, decode=self.decode, accepts=(KIND,), model="nobody:asks"
        )
        self.served = ServedModel(
            name="slow",
            version="1",
            label="slow",
            application=application,
            manifest=cast(Any, None),
            bundle=Path(),
            replica=Replica(
                engine=0, device="cpu", runs_by="torch", fallback="", writer=writer, table=table, streams=None
            ),
            several=False,
            budget_ns=BUDGET_NS,
            idle_ns=10**12,
            now_ns=lambda: self.now_ns,
        )
        self.head = Head("POST", "/v1/apps/slow", {"content-type": KIND})
        self.call = PlainCall(self.served, self.head)

    def decode(self, body: bytes, content_type: str) -> Array:
        self.decoded += 1
        self.now_ns += DECODE_NS
        return np.array([float(body)], np.float32)

    def post(self, age_ns: int) -> None:
        self.call.handle(Request(self.head, b"1", self.now_ns - age_ns), self.answers.append)


def test_a_body_that_would_be_late_is_not_decoded() -> None:
    server = Server()
    server.post(0)
    # Another one is in the table: 10 ms to decode, 20 ms for each of the two batches.
    with pytest.raises(Overloaded, match=r"decoded 45 ms after it came, too late for an answer within 50 ms"):
        server.post(35 * MS)
    assert server.decoded == 1
    assert server.served.counts[OFFERED] == 2


def test_a_fresh_request_is_tried_however_long_bodies_take() -> None:
    server = Server()
    server.served.decode_ns.add(1_000 * MS)
    server.post(24 * MS)
    assert server.decoded == 1
    assert server.served.decode_ns.value == pytest.approx(901 * MS)


def test_an_idle_engine_tries_what_can_be_decoded_in_time() -> None:
    server = Server()
    server.served.decode_ns.add(DECODE_NS)
    # Its batches have been slow so far, which only one that runs can correct.
    assert server.served.late_rejection(server.now_ns - 39 * MS) is None
    assert server.served.late_rejection(server.now_ns - 41 * MS) is not None


def test_nothing_is_late_before_a_body_was_decoded() -> None:
    server = Server()
    assert server.served.late_rejection(server.now_ns - 49 * MS) is None


def test_a_budget_of_its_own_counts() -> None:
    server = Server()
    server.served.decode_ns.add(DECODE_NS)
    assert server.served.late_rejection(server.now_ns - 95 * MS, 100 * MS) is not None
    assert server.served.late_rejection(server.now_ns - 45 * MS, 100 * MS) is None


@pytest.mark.parametrize(("kind", "decodes"), [(KIND, True), ("application/octet-stream", False), ("", False)])
def test_only_files_are_refused_by_their_head(kind: str, decodes: bool) -> None:
    server = Server()
    assert PlainCall(server.served, Head("POST", "/v1/apps/slow", {"content-type": kind})).decodes == decodes


def test_the_usual_time_follows() -> None:
    time_ns = MovingAverage(0.1)
    time_ns.add(10 * MS)
    assert time_ns.value == 10 * MS
    for _ in range(100):
        time_ns.add(2 * MS)
    assert time_ns.value == pytest.approx(2 * MS, rel=0.01)
