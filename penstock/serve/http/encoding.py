"""Decompression of bodies, and serialization of responses."""

import zlib
from functools import lru_cache
from http import HTTPStatus

from penstock.core.errors import InvalidInput, TooLarge, UnsupportedContent
from penstock.serve.exchange.request import Request
from penstock.serve.exchange.response import Response

# Bodies up to this size are not compressed.
SMALL = 256

_REASONS = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES = {status: f"HTTP/1.1 {status} {phrase}\r\n".encode() for status, phrase in _REASONS.items()}


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a gzip or deflate body, in bounded memory.

    Raises:
        UnsupportedContent: The encoding is not supported.
        InvalidInput: The body is damaged or cut short.
        TooLarge: The result has more than `max_bytes` bytes.
    """
    coding = encoding.lower()
    if coding == "identity":
        return body
    if coding not in ("gzip", "deflate"):
        raise UnsupportedContent(f"Content-Encoding {encoding!r} is not read here; use gzip or deflate.")
    engine = zlib.decompressobj(wbits=47)  # detects gzip or zlib
    try:
        plain = engine.decompress(body, max_bytes + 1)
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


def serialize(response: Response, request: Request | None, *, close: bool) -> bytes:
    """Serialize a response; `request` is None if it could not be read."""
    body = response.body
    if request is not None and not close and len(body) <= SMALL and request.head.method != "HEAD":
        return _small_head(response.status, response.content_type, len(body), response.headers) + body
    parts = [_STATUS_LINES.get(response.status) or f"HTTP/1.1 {response.status} \r\n".encode()]
    accepts = request.headers.get("accept-encoding") if request is not None else None
    if accepts and len(body) > SMALL:
        body, encoding = _compress(body, accepts)
        if encoding:
            parts.append(f"Content-Encoding: {encoding}\r\nVary: Accept-Encoding\r\n".encode())
    parts.append(f"Content-Type: {response.content_type}\r\nContent-Length: {len(body)}\r\n".encode())
    parts.extend(f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers)
    parts.append(b"Connection: close\r\n\r\n" if close else b"\r\n")
    if request is None or request.method != "HEAD":
        parts.append(body)
    return b"".join(parts)


def serialize_upgrade(response: Response) -> bytes:
    """Serialize the response that ends HTTP on a connection."""
    lines = (f"{name}: {value}\r\n" for name, value in response.headers)
    return _STATUS_LINES[101] + "".join(lines).encode("latin-1") + b"\r\n"


@lru_cache(256)
def _small_head(status: int, content_type: str, length: int, headers: tuple[tuple[str, str], ...]) -> bytes:
    line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n".encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return line + f"Content-Type: {content_type}\r\nContent-Length: {length}\r\n{more}\r\n".encode("latin-1")


def _compress(body: bytes, accepts: str) -> tuple[bytes, str]:
    entries = [entry.partition(";") for entry in accepts.lower().replace(" ", "").split(",")]
    wanted = {name for name, _, weight in entries if weight.rstrip("0") not in ("q=", "q=0.")}
    for name, wbits in (("gzip", 31), ("deflate", 15)):
        if name in wanted:
            engine = zlib.compressobj(1, wbits=wbits)
            return engine.compress(body) + engine.flush(), name
    return body, ""
