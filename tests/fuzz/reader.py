"""Parsing of requests: the result must not depend on the cuts of the stream."""

import re
import tracemalloc
from dataclasses import dataclass
from itertools import pairwise

from penstock.core.errors import RequestError, TooLarge
from penstock.serve.exchange.request import MAX_HEAD_BYTES, Request
from penstock.serve.http.parser import MAX_HEADERS, RequestParser

MOST_BODY = 1_000
MOST_STREAM = 1 << 18
CUTS = 8
# Short streams are fed byte by byte, longer ones in pieces of a length that divides nothing.
SHORT = 600
PIECE = 997
# Python's own objects around what is kept, and what a parser holds of a header: a few times its bytes.
KEPT_BYTES = 8 * (MAX_HEAD_BYTES + MOST_BODY) + 300 * MAX_HEADERS
_REPEAT = re.compile(rb"\xff(.)(.{1,64}?)\xfe", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parsed:
    requests: list[Request]
    refusal: RequestError | None


def reader(data: bytes) -> None:
    """`RequestParser.feed`. The first 16 bytes say where the stream is cut; then `FF n text FE` is 64 n times the text.

    The repetition lets a few bytes reach the limits of a head and a body.
    """
    places, stream = data[: 2 * CUTS], _unfolded(data[2 * CUTS :])
    whole = heard(stream, [])
    chosen = [int.from_bytes(places[at : at + 2]) for at in range(0, len(places), 2)]
    agree(stream, whole, heard(stream, chosen))
    agree(stream, whole, heard(stream, list(range(0, len(stream), 1 if len(stream) <= SHORT else PIECE))))


def _unfolded(stream: bytes) -> bytes:
    unfolded = _REPEAT.sub(lambda found: found[2] * (64 * found[1][0]), stream[:4096])
    return unfolded[:MOST_STREAM]


def heard(stream: bytes, places: list[int]) -> Parsed:
    """Parse a stream that is cut at some places."""
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    measured = len(stream) > 2 * MAX_HEAD_BYTES and len(places) > 0
    reader = RequestParser(lambda head: MOST_BODY)
    requests: list[Request] = []
    refusal, taken = None, 0
    if measured:
        tracemalloc.start()
    try:
        for start, end in pairwise(edges):
            complete, refusal = reader.feed(stream[start:end])
            while reader.unparsed and refusal is None:
                more, refusal = reader.feed(b"")
                complete += more
            for request in complete:
                _is_one_request(request)
                taken += _taken_bytes(request)
            requests += complete
            del complete
            if measured:
                kept = tracemalloc.get_traced_memory()[0] - 2 * taken - 2 * (end - start)
                assert kept <= KEPT_BYTES, f"{kept:,} bytes are kept of an unfinished request"
            if refusal is not None:
                assert 400 <= refusal.status < 500 or refusal.status in (501, 505), refusal
                assert reader.feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") == ([], refusal)
                break
    finally:
        tracemalloc.stop()
    return Parsed(requests, refusal)


def _is_one_request(request: Request) -> None:
    assert len(request.body) <= MOST_BODY, len(request.body)
    assert request.head.method != "CONNECT"
    assert "in-a-trailer" not in request.head.headers, "a trailer is no header"
    fields = request.head.headers
    upgrades = "upgrade" in fields and "upgrade" in fields.get("connection", "").lower().split(", ")
    assert not upgrades, "what is refused must not be answered too"


def _taken_bytes(request: Request) -> int:
    headers = sum(len(name) + len(value) for name, value in request.head.headers.items())
    return 1_000 + len(request.body) + 2 * len(request.head.path) + 300 * len(request.head.headers) + headers


def agree(stream: bytes, whole: Parsed, pieces: Parsed) -> None:
    """Assert that all cuts of a stream give the same requests and the same rejection."""
    for one in (whole, pieces):
        assert "head is larger" not in str(one.refusal) or _has_a_long_head(stream), one.refusal
    if _said(whole.refusal) == _said(pieces.refusal):
        assert whole.requests == pieces.requests, (whole, pieces)
        return
    # A head that is too long may be refused before it ends, or, if it comes at once, when it ends: no two cuts need to
    # agree on when, but on what came before.
    late, early = sorted((whole, pieces), key=lambda one: isinstance(one.refusal, TooLarge))
    assert isinstance(early.refusal, TooLarge), (whole, pieces)
    assert _has_a_long_head(stream), (whole, pieces)
    assert early.requests == late.requests[: len(early.requests)]


def _said(refusal: RequestError | None) -> str:
    # How much of a body was there when it was refused depends on the cut.
    return "" if refusal is None else type(refusal).__name__ + re.sub(r"[\d,]+", "#", str(refusal))


def _has_a_long_head(stream: bytes) -> bool:
    # A body before a head, each byte of it a chunk of its own, is the most that may stand before the head's own bytes.
    longest = max(map(len, re.split(rb"(?<=[^\r\n])\r?\n\r?\n", stream)))
    return longest > MAX_HEAD_BYTES - 7 * MOST_BODY
