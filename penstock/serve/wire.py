"""HTTP/1.1 without sockets: bytes in, complete requests out, or the one refusal after which the connection ends."""

import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import Any, final
from urllib.parse import unquote

import httptools

from penstock.core.errors import InvalidInput, RequestError, TooLarge, UnsupportedContent
from penstock.serve.heard import Heard

MAX_HEAD_BYTES = 16_384
MAX_HEADERS = 64
# A body of at most so many bytes is not worth compressing.
SMALL = 256

# With one of these, the bytes alone do not say what the body is.
_DOUBTFUL = {"transfer-encoding", "content-encoding", "expect", "upgrade"}
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES = {status: f"HTTP/1.1 {status} {phrase}\r\n".encode() for status, phrase in _REASONS.items()}


@dataclass(slots=True)
class Head:
    """What stands before a request's body.

    Args:
        method: `"POST"`.
        path: Decoded, without the query.
        headers: By lower-case name; of a header that comes twice, the last.
        keep_alive: Whether the client wants the connection to stay.
        plan: What the routes remember of how to answer it; theirs alone.
        nbytes: Of a known head, its bytes with the empty line.
    """

    method: str
    path: str
    headers: dict[str, str]
    keep_alive: bool = True
    plan: Any = None
    nbytes: int = field(default=0, compare=False)


@dataclass(slots=True)
class Request:
    """One request, whole.

    Args:
        head: What stands before the body; shared by requests with the same head, so nobody changes it.
        body: Decompressed.
        heard: Says for how long, at most, it has been there, in nanoseconds.
    """

    head: Head
    body: bytes
    heard: Heard | None = field(default=None, compare=False)

    @property
    def method(self) -> str:
        """`"POST"`."""
        return self.head.method

    @property
    def path(self) -> str:
        """Decoded, without the query."""
        return self.head.path

    @property
    def headers(self) -> dict[str, str]:
        """By lower-case name; of a header that comes twice, the last."""
        return self.head.headers


@final
class KnownHeads:
    """Heads that were parsed before, by their bytes: a client's requests mostly differ in their bodies alone.

    Only what leaves no doubt where the body ends is kept: a Content-Length, nothing chunked, coded or upgraded.
    """

    MOST = 1024
    MOST_BYTES = 2048

    def __init__(self) -> None:
        self._heads: dict[bytes, tuple[Head, int]] = {}

    def head(self, data: bytes) -> Head | None:
        """The head of the one whole request that the bytes are, if it is known."""
        known = self._heads.get(data[: data.find(b"\r\n\r\n") + 4])
        return known[0] if known is not None and known[1] == len(data) else None

    def clear(self) -> None:
        """Remember none: what the routes made of them may be another now."""
        self._heads.clear()

    def learn(self, data: bytes, request: Request) -> None:
        """Remember the head of the one whole request that the bytes were parsed as."""
        end = data.find(b"\r\n\r\n") + 4
        headers = request.headers
        length = len(data) - end
        sure = not headers.keys() & _DOUBTFUL and headers.get("content-length", "0") == str(length)
        if sure and request.head.keep_alive and 4 <= end <= self.MOST_BYTES:
            if len(self._heads) >= self.MOST:
                self._heads.clear()
            request.head.nbytes = end
            self._heads[data[:end]] = request.head, len(data)


@dataclass(slots=True)
class Response:
    """What goes back.

    Args:
        status: The HTTP status.
        body: Its bytes.
        content_type: Of the body.
        headers: More headers, each name and value without line ends.
    """

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class _Pending:
    method: str = ""
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes | bytearray = b""
    head_bytes: int = 0
    count: int = 0


# Of a connection on which no head was parsed; never written, as a message begins with one of its own.
_NOTHING = _Pending()


@final
class RequestReader:
    """Assembles requests from the bytes of one connection.

    Args:
        max_body_bytes: A larger body is refused before it is kept.
        known: Heads that were parsed before, on any connection.
        max_headers: A head with more of them is refused.
    """

    __slots__ = (
        "_complete",
        "_head_is_whole",
        "_known",
        "_max_headers",
        "_now",
        "_parser",
        "_refusal",
        "_unheard_bytes",
        "begun",
        "expects_continue",
        "max_body_bytes",
        "rest",
    )

    def __init__(self, max_body_bytes: int, known: KnownHeads | None = None, *, max_headers: int = MAX_HEADERS) -> None:
        self.max_body_bytes = max_body_bytes
        self._known = known or KnownHeads()
        self._max_headers = max_headers
        # Made for the first head that is not known, which most connections never send.
        self._parser: Any = None
        self._now = _NOTHING
        self._complete: list[Request] = []
        self._refusal: RequestError | None = None
        self._head_is_whole = True
        self._unheard_bytes = 0
        self.expects_continue = False
        self.begun = False
        # What followed a request that wants to go on in another protocol; None until there is one.
        self.rest: bytes | None = None

    def known(self, data: bytes) -> Head | None:
        """The head of the request that the bytes are, if they are one and whole, and nothing is left over."""
        if self.begun or self._refusal is not None or self.rest is not None:
            return None
        return self._known.head(data)

    def feed(self, data: bytes) -> tuple[list[Request], RequestError | None]:
        """Take bytes in.

        Returns:
            The requests that are whole now, in order, and the refusal that ends the connection, if there is one.
        """
        if self.rest is not None:
            self._keep(data)
            return [], self._refusal
        # At the start of a request, nothing being left over from the one before.
        fresh = not self.begun and self._refusal is None
        if self._refusal is None:
            self.begun = True
            self._unheard_bytes += len(data)
            if self._parser is None:
                self._parser = httptools.HttpRequestParser(self)
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._refusal is None:
                    self.rest = b""
                    self._keep(data[upgrade.args[0] :])
            except (httptools.HttpParserError, UnicodeDecodeError, ValueError) as error:
                self._refuse(InvalidInput(f"The request is not HTTP/1.1 ({error}); send it whole and well-formed."))
            # A header or a trailer that never ends is kept by the parser without a word to us: count what we hear
            # nothing of.
            if self._unheard_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())
        complete, self._complete = self._complete, []
        if fresh and len(complete) == 1 and not self.begun and self._refusal is None:
            self._known.learn(data, complete[0])
        return complete, self._refusal

    @property
    def head(self) -> Head:
        """As much as was understood of the head that was read last, for who refuses the rest."""
        now = self._now
        return Head(now.method, now.path.partition("?")[0], now.headers, keep_alive=False)

    def on_message_begin(self) -> None:
        """httptools': a request begins."""
        self._now = _Pending()
        self._unheard_bytes = 0
        self._head_is_whole = False
        self.begun = True

    def on_url(self, url: bytes) -> None:
        """httptools': a part of the target."""
        self._unheard_bytes = 0
        self._now.path += url.decode("ascii")
        self._grow_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools': one header."""
        now = self._now
        now.count += 1
        self._unheard_bytes = 0
        self._grow_head(len(name) + len(value) + 4)
        if now.count > self._max_headers:
            self._refuse(TooLarge(f"The request has more than {self._max_headers} headers; send fewer."))
            return
        if self._head_is_whole:
            return  # a trailer: it comes after what it could change (RFC 9110, section 6.5.1)
        now.headers[name.decode("ascii").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        """httptools': the head is whole."""
        now = self._now
        self._head_is_whole = True
        self._unheard_bytes = 0
        now.method = self._parser.get_method().decode("ascii")
        if self._parser.should_upgrade() and not _is_websocket(now):
            self._refuse(InvalidInput("This server upgrades to WebSocket alone; leave out the Upgrade header."))
        length = now.headers.get("content-length")
        if length is not None and length.isdigit() and int(length) > self.max_body_bytes:
            self._refuse(self._body_too_large(int(length)))
        self.expects_continue = now.headers.get("expect", "").lower() == "100-continue"

    def on_body(self, part: bytes) -> None:
        """httptools': a part of the body."""
        now = self._now
        self._unheard_bytes = 0
        if self._refusal is not None:
            return
        if len(now.body) + len(part) > self.max_body_bytes:
            self._refuse(self._body_too_large(len(now.body) + len(part)))
            now.body = b""
        elif not now.body:
            now.body = part
        else:
            # Not a list of parts: a chunk of one byte would take a hundred.
            if isinstance(now.body, bytes):
                now.body = bytearray(now.body)
            now.body += part

    def on_message_complete(self) -> None:
        """httptools': the request is whole."""
        self.expects_continue = self.begun = False
        self._unheard_bytes = 0
        if self._refusal is not None:
            return
        now = self._now
        path = now.path.partition("?")[0]
        if "%" in path:
            path = unquote(path)
        # Where the parser has given up, no other request can follow.
        keep_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        head = Head(now.method, path, now.headers, keep_alive)
        self._complete.append(Request(head, bytes(now.body)))

    def _keep(self, data: bytes) -> None:
        assert self.rest is not None
        if len(self.rest) + len(data) > MAX_HEAD_BYTES:
            self._refuse(TooLarge("Too much came before the upgrade was answered; wait for the answer."))
        elif self._refusal is None:
            self.rest += data

    def _grow_head(self, count: int) -> None:
        self._now.head_bytes += count
        if self._now.head_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    def _body_too_large(self, count: int) -> TooLarge:
        return TooLarge(f"The body has {count:,} bytes or more; at most {self.max_body_bytes:,} are taken.")

    def _refuse(self, error: RequestError) -> None:
        if self._refusal is None:
            self._refusal = error


def _is_websocket(now: _Pending) -> bool:
    headers = now.headers
    bodied = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    return now.method == "GET" and headers.get("upgrade", "").lower() == "websocket" and not bodied


def _head_too_large() -> TooLarge:
    return TooLarge(f"The request's head is larger than {MAX_HEAD_BYTES:,} bytes; send fewer headers.")


def decompressed(body: bytes, encoding: str, most: int) -> bytes:
    """A gzip or deflate body, in bounded memory.

    Raises:
        UnsupportedContent: Another encoding.
        InvalidInput: Not what the encoding says, or cut short.
        TooLarge: More than `most` bytes come out.
    """
    coding = encoding.lower()
    if coding == "identity":
        return body
    if coding not in ("gzip", "deflate"):
        raise UnsupportedContent(f"Content-Encoding {encoding!r} is not read here; use gzip or deflate.")
    engine = zlib.decompressobj(wbits=47)  # either wrapping, told from the first bytes
    try:
        plain = engine.decompress(body, most + 1)
    except zlib.error:
        raise InvalidInput(f"The body is not {encoding}; send what Content-Encoding says.") from None
    if len(plain) > most:
        raise TooLarge(f"The body has more than {most:,} bytes once it is unpacked; that is the most taken.")
    if not engine.eof:
        raise InvalidInput(f"The {encoding} body is cut short; send it whole.")
    if engine.unused_data:
        raise InvalidInput(
            f"{len(engine.unused_data):,} bytes follow the {encoding} body's end; send one {encoding} stream alone."
        )
    return plain


def serialised(response: Response, request: Request | None, *, close: bool) -> bytes:
    """The bytes of a response to a request (None where none could be read)."""
    body = response.body
    if request is not None and not close and len(body) <= SMALL and request.head.method != "HEAD":
        return _small_head(response.status, response.content_type, len(body), response.headers) + body
    parts = [_STATUS_LINES.get(response.status) or f"HTTP/1.1 {response.status} \r\n".encode()]
    accepts = request.headers.get("accept-encoding") if request is not None else None
    if accepts and len(body) > SMALL:
        body, encoding = _compressed(body, accepts)
        if encoding:
            parts.append(f"Content-Encoding: {encoding}\r\nVary: Accept-Encoding\r\n".encode())
    parts.append(f"Content-Type: {response.content_type}\r\nContent-Length: {len(body)}\r\n".encode())
    parts.extend(f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers)
    parts.append(b"Connection: close\r\n\r\n" if close else b"\r\n")
    if request is None or request.method != "HEAD":
        parts.append(body)
    return b"".join(parts)


def upgraded(response: Response) -> bytes:
    """The bytes of a response after which another protocol is spoken."""
    lines = (f"{name}: {value}\r\n" for name, value in response.headers)
    return _STATUS_LINES[101] + "".join(lines).encode("latin-1") + b"\r\n"


@lru_cache(256)
def _small_head(status: int, content_type: str, length: int, headers: tuple[tuple[str, str], ...]) -> bytes:
    line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n".encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return line + f"Content-Type: {content_type}\r\nContent-Length: {length}\r\n{more}\r\n".encode("latin-1")


def _compressed(body: bytes, accepts: str) -> tuple[bytes, str]:
    entries = [entry.partition(";") for entry in accepts.lower().replace(" ", "").split(",")]
    wanted = {name for name, _, weight in entries if weight.rstrip("0") not in ("q=", "q=0.")}
    for name, wbits in (("gzip", 31), ("deflate", 15)):
        if name in wanted:
            engine = zlib.compressobj(1, wbits=wbits)
            return engine.compress(body) + engine.flush(), name
    return body, ""
