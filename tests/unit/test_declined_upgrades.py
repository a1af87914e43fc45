"""Requests that offer another protocol than WebSocket, as those of `curl --http2` and of Java's client do."""

import pytest

from penstock.core.errors import UnsupportedVersion
from penstock.serve.http.parser import RequestParser

OFFER = b"POST /a HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
NEXT = b"GET /b HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
@pytest.mark.parametrize(
    ("rest", "body"),
    [
        (b"Content-Length: 9\r\n\r\n[1,2,3,4]", b"[1,2,3,4]"),
        (b"Transfer-Encoding: chunked\r\n\r\n4\r\n[1,2\r\n5\r\n,3,4]\r\n0\r\n\r\n", b"[1,2,3,4]"),
        (b"Content-Length: 0\r\n\r\n", b""),
        (b"\r\n", b""),
    ],
)
def test_an_offer_is_declined_and_the_request_read(rest: bytes, body: bytes, size: int) -> None:
    parser, data = RequestParser(lambda head: 1_000), (OFFER + rest) * 2 + NEXT
    requests = []
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        while piece or parser.unparsed:
            complete, rejection = parser.feed(piece)
            assert rejection is None, rejection
            requests += complete
            piece = b""
    found = [(request.head.path, request.body, request.head.keep_alive) for request in requests]
    assert found == [("/a", body, True), ("/a", body, True), ("/b", b"", True)]
    assert not parser.in_message


def test_the_preface_of_http_2_is_named() -> None:
    _, rejection = RequestParser(lambda head: 0).feed(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert isinstance(rejection, UnsupportedVersion)
    assert str(rejection) == "The request is of HTTP/2.0; this server speaks HTTP/1.1."
