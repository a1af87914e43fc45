"""How a WebSocket says why it is closed: to a page that gets no stream, whose browser hides every other answer."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest
from websockets.frames import Close, Frame, Opcode

from penstock.core.errors import (
    ComputeFailed,
    DeadlineImpossible,
    InvalidInput,
    Overloaded,
    RequestError,
    TooLate,
    Unauthorized,
    UnknownRoute,
)
from penstock.serve.exchange.access import Access
from penstock.serve.exchange.peer import Peer
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Response, Switched
from penstock.serve.http.encoding import serialize_upgrade
from penstock.serve.messages import ModelState
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.websocket.closing import LINGER_S, MAX_REJECTED_BYTES, RejectedConnection, code_of, reason_of
from penstock.serve.websocket.frames import MAX_REASON_BYTES, close_frame
from tests.support.clock import Clock
from tests.support.routes import routes_of

SITE = "https://site.example"
HANDSHAKE = {
    "host": "here.example",
    "upgrade": "websocket",
    "connection": "Upgrade",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    "sec-websocket-protocol": "key.of-somebody, penstock",
}


@dataclass
class Wire:
    """A transport."""

    written: bytes = b""
    ended: str = ""
    protocol: Any = None

    def write(self, data: bytes) -> None:
        self.written += data

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = self.ended or "close"

    def abort(self) -> None:
        self.ended = "abort"


def answered(
    name: str = "nobody",
    access: Access | None = None,
    changed: dict[str, str | None] | None = None,
    method: str = "GET",
) -> Response:
    """What a server that only loads the model `late` answers to a page."""
    models = ModelRegistry(cast(Any, None), loading=False)
    models.set_state(ModelState(name="late", version="1", state="LOADING"))
    headers = {key: value for key, value in (HANDSHAKE | (changed or {})).items() if value is not None}
    answers: list[Response] = []
    head = Head(method, f"/v1/apps/{name}/stream", headers, keep_alive=False)
    routes_of(models, access or Access()).handle(Request(head, b""), answers.append)
    (answer,) = answers
    return answer


def told(answer: Response, wire: Wire, peers: set[Peer] | None = None, rest: bytes = b"") -> Close:
    """The close that a page sees."""
    assert isinstance(answer, Switched), answer
    answer.take(cast(asyncio.Transport, wire), rest, set() if peers is None else peers)
    assert wire.written[0] == 0x88
    assert wire.written[1] == len(wire.written) - 2
    return Close.parse(wire.written[2:])


def test_a_page_is_told_by_a_close() -> None:
    answer = answered()
    assert told(answer, Wire()) == Close(4404, "There is no model 'nobody' here; there is none.")
    sent = serialize_upgrade(answer, b"Date: Thu, 01 Jan 1970 00:00:00 GMT\r\n")
    assert sent.startswith(b"HTTP/1.1 101 Switching Protocols\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n")
    assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in sent
    assert b"Sec-WebSocket-Protocol: penstock\r\n" in sent
    # The log and traces learn what it would have been.
    assert answer.status == 404


def test_a_page_is_told_when_to_come_back() -> None:
    assert told(answered("late"), Wire()) == Close(
        1013, "Model 'late' is being loaded; come back later. Retry after 3 s."
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"sec-websocket-protocol": None},
        {"sec-websocket-protocol": "penstock2, key.penstock"},
        {"sec-websocket-key": "short"},
        {"sec-websocket-version": "8"},
        {"upgrade": None},
        {"origin": SITE},
        {"origin": "null"},
    ],
)
def test_everybody_else_and_pages_of_other_sites_are_told_by_http(changed: dict[str, str | None]) -> None:
    answer = answered(changed=changed)
    assert not isinstance(answer, Switched)
    assert isinstance(answer.error, UnknownRoute)
    assert answer.status == 404


def test_a_handshake_is_a_get() -> None:
    answer = answered(method="POST")
    assert not isinstance(answer, Switched)
    assert answer.error is not None


def test_pages_of_this_server_and_of_listed_sites_are_told() -> None:
    listed = Access(origins=(SITE,))
    for access, origin in ((None, "https://here.example"), (listed, SITE)):
        assert told(answered(access=access, changed={"origin": origin}), Wire()).code == 4404


def test_the_client_closes_first_and_what_it_said_before_is_dropped() -> None:
    wire, peers = Wire(), set[Peer]()
    start = Frame(Opcode.TEXT, b'{"type":"start"}').serialize(mask=True)
    told(answered(), wire, peers, rest=start[:3])
    assert len(peers) == 1
    wire.protocol.data_received(start[3:])
    assert wire.ended == ""
    wire.protocol.data_received(Frame(Opcode.CLOSE, Close(4404, "").serialize()).serialize(mask=True))
    assert wire.ended == "close"
    wire.protocol.connection_lost(None)
    assert peers == set()


def test_who_does_not_close_or_speaks_no_websocket_is_ended() -> None:
    wire, clock = Wire(), Clock()
    last = RejectedConnection(UnknownRoute("Nothing."), cast(asyncio.Transport, wire), set(), clock)
    last.sweep(clock() + LINGER_S, 0, 0)
    assert wire.ended == ""
    last.sweep(clock() + LINGER_S + 0.1, 0, 0)
    assert wire.ended == "abort"
    wire = Wire()
    RejectedConnection(UnknownRoute("Nothing."), cast(asyncio.Transport, wire), set(), clock).data_received(
        b"GET / HTTP/1.1"
    )
    assert wire.ended == "close"


def test_who_goes_on_sending_is_not_listened_to() -> None:
    wire = Wire()
    last = RejectedConnection(UnknownRoute("Nothing."), cast(asyncio.Transport, wire), set(), Clock())
    nothing = Frame(Opcode.TEXT, b"").serialize(mask=True)
    sent = 0
    while not wire.ended:
        assert sent < 2 * MAX_REJECTED_BYTES
        last.data_received(nothing * 100)
        sent += len(nothing) * 100
    assert wire.ended == "close"


def test_a_client_that_was_gone_is_forgotten() -> None:
    wire, peers = Wire(ended="close"), set[Peer]()
    answer = answered()
    assert isinstance(answer, Switched)
    answer.take(cast(asyncio.Transport, wire), b"", peers)
    assert peers == set()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInput("No."), 1007),
        (DeadlineImpossible("No."), 1008),
        (RequestError("No."), 1011),
        (ComputeFailed("No."), 1011),
        (Overloaded("No.", 2.0), 1013),
        (TooLate("No."), 1013),
        (Unauthorized("No."), 4401),
        (UnknownRoute("No."), 4404),
    ],
)
def test_every_refusal_has_its_code(error: RequestError, code: int) -> None:
    assert code_of(error) == code


def test_the_time_to_come_back_is_never_cut() -> None:
    assert reason_of(Overloaded("No.", 0.2)) == "No. Retry after 1 s."
    for sentence in ("x" * 300, "ä" * 300):
        reason = reason_of(Overloaded(sentence, 12.4))
        assert reason.endswith("… Retry after 12 s.")
        assert len(reason.encode()) in (MAX_REASON_BYTES, MAX_REASON_BYTES - 1)
        assert close_frame(1013, reason)[4:].decode() == reason
    assert reason_of(InvalidInput("y" * 300)) == "y" * (MAX_REASON_BYTES - 3) + "…"
