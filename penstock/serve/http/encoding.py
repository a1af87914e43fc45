"""Decompression of bodies, and serialization of responses."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from penstock.core.errors import DeadlineImpossible, InvalidInput, Overloaded, TooLarge, UnsupportedContent
from penstock.serve.exchange.request import Request
from penstock.serve.exchange.response import Response, rejected, retry_after

# Bodies up to this size are not compressed.
SMALL = 256
# Up to this size a body is unpacked in the event loop.
QUICK_BYTES = 1 << 16
# What is unpacked is checked first at this size, and then whenever it has grown so much.
CHECKED_BYTES, GROWTH = 1 << 15, 4

# Raises a `RequestError` for the beginning of a body.
Check = Callable[[bytes], None]

_REASONS = {status.value: status.phrase for status in HTTPStatus}


def decompress(body: bytes, encoding: str, max_bytes: int, check: Check | None = None) -> bytes:
    """Decompress a gzip or deflate body, in bounded memory.

    Args:
        body: The compressed bytes.
        encoding: Its Content-Encoding.
        max_bytes: Most bytes of the result.
        check: Called with the beginning of the result at growing sizes; raises where it cannot be the beginning of what
            is taken, so that no more is unpacked.

    Raises:
        UnsupportedContent: The encoding is not supported.
        InvalidInput: The body is damaged or cut short.
        TooLarge: The result has more than `max_bytes` bytes.
        RequestError: What `check` raises.
    """
    coding = encoding.lower()
    if coding == "identity":
        return body
    if coding not in ("gzip", "deflate"):
        raise UnsupportedContent(f"Content-Encoding {encoding!r} is not read here; use gzip or deflate.")
    engine = zlib.decompressobj(wbits=47)  # detects gzip or zlib
    try:
        plain = _beginning_of(engine, body, max_bytes, check)
    except zlib.error:
        raise InvalidInput(f"The body is not {encoding}; send what Content-Encoding says.") from None
    if len(plain) > max_bytes:
        raise TooLarge(f"The body has more than {max_bytes:,} bytes once it is unpacked; that is the most taken.")
    if not engine.eof:
        raise InvalidInput(f"The {encoding} body is cut short; send it whole.")
    if engine.unused_data:
        raise InvalidInput(
            f"{len(engine.unused_data):,} bytes follow the {encoding} body's end; send one {encoding} stream alone."
        )
    return plain


def _beginning_of(engine: Any, body: bytes, max_bytes: int, check: Check | None) -> bytes:
    """Decompress up to one byte more than so many."""
    if check is None:
        return engine.decompress(body, max_bytes + 1)
    size = CHECKED_BYTES
    plain = engine.decompress(body, min(size, max_bytes + 1))
    while len(plain) == size <= max_bytes and not engine.eof:
        check(plain)
        size = min(GROWTH * size, max_bytes + 1)
        plain += engine.decompress(engine.unconsumed_tail, size - len(plain))
    return plain


def is_quick(body: bytes, encoding: str) -> bool:
    """True if a compressed body is unpacked at once: it is small, or damaged."""
    engine = zlib.decompressobj(wbits=47)
    try:
        return len(body) <= QUICK_BYTES and len(engine.decompress(body, QUICK_BYTES)) < QUICK_BYTES
    except zlib.error:
        return True


def serialize(response: Response, request: Request | None, date: bytes, *, close: bool) -> bytes:
    """Serialize a response.

    Args:
        response: The response.
        request: Its request; None if that could not be read.
        date: The line of the header `Date`, see `ResponseDate`.
        close: Whether the connection is closed after it.
    """
    body, headers = response.body, response.headers
    if len(body) > SMALL and request is not None and (accepts := request.head.headers.get("accept-encoding")):
        body, encoding = _compress(body, accepts)
        if encoding:
            headers = (("Content-Encoding", encoding), ("Vary", "Accept-Encoding"), *headers)
    if close:
        headers = (*headers, ("Connection", "close"))
    head = response_head(response.status, response.content_type, len(body), headers, date)
    return head if request is not None and request.head.method == "HEAD" else head + body


def serialize_refusal(
    error: Overloaded | DeadlineImpossible, date: bytes, headers: tuple[tuple[str, str], ...] = ()
) -> bytes:
    """Serialize the rejection of a request that is read whole, on a connection that stays open."""
    return _refusal(str(error), retry_after(error) if isinstance(error, Overloaded) else None, headers, date)


@lru_cache(1024)
def _refusal(text: str, retry_after_s: int | None, headers: tuple[tuple[str, str], ...], date: bytes) -> bytes:
    response = rejected(DeadlineImpossible(text) if retry_after_s is None else Overloaded(text, retry_after_s))
    return serialize(replace(response, headers=response.headers + headers), None, date, close=False)


def serialize_head(response: Response, date: bytes, *, chunked: bool = True) -> bytes:
    """Serialize the head of a response whose body follows in parts: in chunks, or up to the end of the connection."""
    framing = ("Transfer-Encoding", "chunked") if chunked else ("Connection", "close")
    headers = (("Content-Type", response.content_type), framing, *response.headers)
    return _head(response.status, headers, date)


def serialize_upgrade(response: Response, date: bytes) -> bytes:
    """Serialize the response that ends HTTP on a connection."""
    return _head(HTTPStatus.SWITCHING_PROTOCOLS, response.headers, date)


@lru_cache(256)
def response_head(
    status: int, content_type: str, length: int, headers: tuple[tuple[str, str], ...], date: bytes
) -> bytes:
    """Serialize the head of a response with a body of this length."""
    if status != HTTPStatus.NO_CONTENT:  # whose responses have no Content-Length (RFC 9110, section 8.6)
        headers = (("Content-Type", content_type), ("Content-Length", str(length)), *headers)
    return _head(status, headers, date)


def _head(status: int, headers: tuple[tuple[str, str], ...], date: bytes) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    start = f"HTTP/1.1 {status:d} {_REASONS.get(status, '')}\r\n"
    return b"%b%b%b\r\n" % (start.encode("latin-1"), date, lines.encode("latin-1"))


def _compress(body: bytes, accepts: str) -> tuple[bytes, str]:
    entries = [entry.partition(";") for entry in accepts.lower().replace(" ", "").split(",")]
    wanted = {name for name, _, weight in entries if weight.rstrip("0") not in ("q=", "q=0.")}
    for name, wbits in (("gzip", 31), ("deflate", 15)):
        if name in wanted:
            engine = zlib.compressobj(1, wbits=wbits)
            return engine.compress(body) + engine.flush(), name
    return body, ""
