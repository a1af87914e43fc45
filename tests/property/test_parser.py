"""HTTP without sockets: any bytes in any pieces, and the same requests however they are cut."""

import gzip
import zlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput, RequestError, TooLarge
from penstock.serve.exchange.request import MAX_HEAD_BYTES, Head, Request
from penstock.serve.exchange.response import Response
from penstock.serve.http.encoding import decompress, serialize
from penstock.serve.http.parser import RequestParser
from tests.support.generated import examples

MOST = 10_000
DATE = b"Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"
HOSTS = ("", "a", "a.example:8000", "127.0.0.1:", "[::1]:80", "[fe80::1%25eth0]", "a_b", "%41")
WRONG_HOSTS = ("a b", "a/../b", "a@b", "a:b", "[a", "a%2", "\x80")

bodies = st.binary(max_size=300)
names = st.sampled_from(["X-One", "Accept", "Content-Type", "Penstock-Latency-Ms"])
values = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, Request]:
    body, chunked = draw(bodies), draw(st.booleans())
    headers = draw(st.dictionaries(names, values, max_size=3))
    path = draw(st.sampled_from(["/", "/v1/apps/x", "/v2/models/a/infer"]))
    head = f"POST {path}?query=1 HTTP/1.1\r\nHost: a\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in headers.items()
    )
    if chunked:
        middle = draw(st.integers(0, len(body)))
        parts = [part for part in (body[:middle], body[middle:]) if part]
        coded = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        data = head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + coded
    else:
        data = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    known = {name.lower(): value for name, value in headers.items()}
    return data, Request(Head("POST", path, known), body)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(edges)]


@given(st.lists(requests(), min_size=1, max_size=4), st.lists(st.integers(0, 10**6), max_size=30))
@settings(max_examples=examples(150), deadline=None)
def test_however_requests_are_cut_they_arrive_whole_and_in_order(
    sent: list[tuple[bytes, Request]], places: list[int]
) -> None:
    reader = RequestParser(lambda head: MOST)
    arrived: list[Request] = []
    for piece in cut(b"".join(data for data, _ in sent), places):
        complete, refusal = reader.feed(piece)
        assert refusal is None
        arrived += complete
    assert len(arrived) == len(sent)
    for request, (_, expected) in zip(arrived, sent, strict=True):
        assert (request.head.method, request.head.path) == (expected.head.method, expected.head.path)
        assert request.body == expected.body
        assert expected.head.headers.items() <= request.head.headers.items()
        assert request.head.keep_alive


@given(st.binary(max_size=600), st.lists(st.integers(0, 10**6), max_size=10))
@settings(max_examples=examples(300), deadline=None)
def test_no_bytes_do_more_than_refuse(data: bytes, places: list[int]) -> None:
    reader = RequestParser(lambda head: MOST)
    refused = False
    for piece in cut(data, places):
        complete, refusal = reader.feed(piece)
        assert not (refused and complete)
        assert refusal is None or isinstance(refusal, RequestError)
        refused = refusal is not None


@given(requests(), st.integers(0, 2**31), st.integers(0, 255))
@settings(max_examples=examples(300), deadline=None)
def test_one_changed_byte_does_no_more_than_refuse(sent: tuple[bytes, Request], place: int, byte: int) -> None:
    data = bytearray(sent[0])
    data[place % len(data)] = byte
    _, refusal = RequestParser(lambda head: MOST).feed(bytes(data))
    assert refusal is None or isinstance(refusal, RequestError)


def test_a_body_is_refused_before_it_is_kept() -> None:
    _, refusal = RequestParser(lambda head: 10).feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 11\r\n\r\n")
    assert isinstance(refusal, TooLarge)
    reader = RequestParser(lambda head: 10)
    reader.feed(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert isinstance(reader.feed(b"b\r\n" + bytes(11) + b"\r\n")[1], TooLarge)


def test_a_head_without_end_is_refused() -> None:
    reader = RequestParser(lambda head: 10)
    refusal = None
    sent = 0
    while refusal is None and sent < 10 * MAX_HEAD_BYTES:
        _, refusal = reader.feed(b"GET / HTTP/1.1\r\nHost: a\r\n" if not sent else b"A" * 1000)
        sent += 1000
    assert isinstance(refusal, TooLarge | InvalidInput)
    assert sent <= 2 * MAX_HEAD_BYTES


@given(st.binary(max_size=2000))
def test_compressed_bodies_come_back(body: bytes) -> None:
    assert decompress(gzip.compress(body), "gzip", 2000) == body
    assert decompress(zlib.compress(body), "deflate", 2000) == body
    assert decompress(body, "identity", 0) == body


def test_what_unpacks_to_too_much_is_stopped_early() -> None:
    with pytest.raises(TooLarge):
        decompress(gzip.compress(bytes(10_000_000)), "gzip", 1000)


def test_answers_say_how_long_they_are_and_compress_where_asked() -> None:
    request = Request(Head("GET", "/", {"accept-encoding": "gzip, br"}), b"")
    answer = serialize(Response(200, b"x" * 1000), request, DATE, close=True)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Content-Encoding: gzip" in head
    assert b"Connection: close" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert gzip.decompress(body) == b"x" * 1000
    head_only = serialize(Response(200, b"xyz"), Request(Head("HEAD", "/", {}), b""), DATE, close=False)
    assert head_only.endswith(b"Content-Length: 3\r\n\r\n")


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("method", ["OPTIONS", "HEAD"])
def test_a_response_without_content_has_no_length(method: str, close: bool) -> None:
    """RFC 9110, section 8.6."""
    sent = serialize(
        Response(204, b"", headers=(("Vary", "Origin"),)), Request(Head(method, "/", {}), b""), DATE, close=close
    )
    assert sent.startswith(b"HTTP/1.1 204 No Content\r\n" + DATE + b"Vary: Origin\r\n")
    assert b"Content-" not in sent
    assert sent.endswith(b"\r\n\r\n")


def parsed(data: bytes, pieces: int = 1) -> tuple[list[Request], RequestError | None]:
    """Everything of some bytes, fed in pieces of so many; each piece is parsed to its end."""
    reader = RequestParser(lambda head: MOST)
    found: list[Request] = []
    for at in range(0, len(data), pieces):
        complete, refusal = reader.feed(data[at : at + pieces])
        while reader.unparsed and refusal is None:
            more, refusal = reader.feed(b"")
            complete += more
        found += complete
        if refusal is not None:
            return found, refusal
    return found, None


@pytest.mark.parametrize("pieces", [1, 1 << 20])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET / HTTP/1.1\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n", 400),
        ("GET / HTTP/2.0\r\nHost: a\r\n", 505),
        ("GET / HTTP/0.9\r\nHost: a\r\n", 505),
        ("GET / HTTP/1.2\r\nHost: a\r\n", 505),
        ("GET / HTTP/9.9\r\nHost: a\r\n", 505),
        ("GET / HTTP/x.y\r\nHost: a\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n", 501),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", 501),
        ("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", 400),
        *((f"GET / HTTP/1.1\r\nHost: {host}\r\n", 400) for host in WRONG_HOSTS),
        ("GET / HTTP/1.0\r\nHost: a b\r\n", 400),
        ("CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n", 501),
        ("GET / HTTP/1.1\r\nHost: a\r\nPenstock-Latency-Ms: 5\r\npenstock-latency-ms: 6\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a\r\nPenstock-Priority: background\r\nPenstock-Priority: interactive\r\n", 400),
    ],
)
def test_heads_that_the_standard_rejects(head: str, status: int, pieces: int) -> None:
    complete, refusal = parsed(f"{head}\r\n".encode(), pieces)
    assert refusal is not None
    assert (complete, refusal.status) == ([], status), refusal


@pytest.mark.parametrize("pieces", [1, 1 << 20])
@pytest.mark.parametrize(
    ("head", "path"),
    [
        ("GET http://a/v1/stats HTTP/1.1\r\nHost: b\r\n", "/v1/stats"),
        ("GET HTTPS://a:8000/v1/stats?x=/y HTTP/1.1\r\nHost: b\r\n", "/v1/stats"),
        ("GET http://a HTTP/1.1\r\nHost: b\r\n", "/"),
        ("GET http://a?x HTTP/1.1\r\nHost: b\r\n", "/"),
        ("GET /http://a/b HTTP/1.1\r\nHost: b\r\n", "/http://a/b"),
        ("GET /old HTTP/1.0\r\n", "/old"),
        ("POST /x HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: Chunked\r\nContent-Type: a\r\n\r\n0\r\n", "/x"),
    ],
)
def test_targets_may_be_whole_urls(head: str, path: str, pieces: int) -> None:
    complete, refusal = parsed(f"{head}\r\n".encode(), pieces)
    assert (refusal, [request.head.path for request in complete]) == (None, [path])


def test_one_call_parses_a_bounded_number_of_chunks_and_the_next_ones_the_rest() -> None:
    reader = RequestParser(lambda head: 1 << 20)
    body = b"x" * 20_000
    data = (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * len(body) + b"0\r\n\r\n"
    )
    complete, refusal = reader.feed(data)
    assert (complete, refusal) == ([], None)
    assert len(reader.unparsed) > len(data) - 10_000
    calls = 0
    while not complete:
        assert reader.in_message
        assert reader.known(data) is None
        left = len(reader.unparsed)
        complete, refusal = reader.feed(b"")
        assert refusal is None
        assert left - len(reader.unparsed) < 10_000
        calls += 1
    assert complete[0].body == body
    assert calls > 10
    assert not reader.in_message
    # What is known from one piece is known again.
    assert reader.feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")[0][0].head.method == "GET"


@pytest.mark.parametrize("pieces", [1, 1 << 20])
@pytest.mark.parametrize("host", HOSTS)
def test_a_host_may_be_a_name_or_an_address_with_a_port(host: str, pieces: int) -> None:
    # Two budgets that agree are one.
    budgets = "Penstock-Latency-Ms: 5\r\n" * 2
    complete, refusal = parsed(f"GET / HTTP/1.1\r\nHost: {host}\r\n{budgets}\r\n".encode(), pieces)
    assert refusal is None
    assert complete[0].head.headers == {"host": host, "penstock-latency-ms": "5"}


def test_one_call_parses_a_bounded_number_of_requests() -> None:
    reader = RequestParser(lambda head: MOST)
    one = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    complete, refusal = reader.feed(one * 5_000)
    assert (refusal, 0 < len(complete) < 100) == (None, True)
    while reader.unparsed:
        more, refusal = reader.feed(b"")
        assert (refusal, 0 < len(more) < 100) == (None, True)
        complete += more
    assert len(complete) == 5_000


def test_a_body_of_known_length_is_parsed_at_once() -> None:
    reader = RequestParser(lambda head: 1 << 22)
    body = bytes(1 << 22)
    complete, _ = reader.feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert [request.body for request in complete] == [body]
