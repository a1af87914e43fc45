"""Clients and proxies that speak HTTP/1.0: no chunks, no WebSockets."""

import asyncio
from typing import Any, cast

import pytest

from penstock.core.errors import UnsupportedVersion
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Body, Handlers, Streamed
from penstock.serve.websocket.handshake import upgrade_to_shared
from tests.support.clock import Clock
from tests.unit.test_connection import Transport, connection_of, refuse


def streamed(head: bytes) -> Transport:
    """Send the head of a request whose answer comes in two parts."""
    bodies: list[Body] = []

    def handle(request: Request, answer: Answer) -> None:
        answer(Streamed(200, content_type="text/event-stream", opened=bodies.append))

    transport = Transport()
    connection = connection_of(Handlers(handle=handle, reject=refuse), Clock())
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.data_received(head)
    bodies[0].write(b"one")
    bodies[0].write(b"two")
    bodies[0].end()
    return transport


@pytest.mark.parametrize("keeps", [b"", b"Connection: keep-alive\r\n"])
def test_an_answer_in_parts_ends_with_the_connection(keeps: bytes) -> None:
    transport = streamed(b"GET / HTTP/1.0\r\n" + keeps + b"\r\n")
    head, _, body = transport.written.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    assert b"Connection: close" in head
    assert body == b"onetwo"
    assert transport.said[-1] == "close"


def test_in_http_1_1_it_has_chunks() -> None:
    transport = streamed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    head, _, body = transport.written.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head
    assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    assert "close" not in transport.said


def test_a_websocket_through_a_proxy_of_http_1_0_is_refused_with_the_reason() -> None:
    head = Head("GET", "/v1/streams", {}, version="1.0")
    nothing = cast(Any, None)
    with pytest.raises(UnsupportedVersion, match=r"HTTP/1\.0, which has no WebSockets; let the proxy speak HTTP/1\.1"):
        upgrade_to_shared(Request(head, b""), nothing, models=nothing, access=nothing, make=nothing)
