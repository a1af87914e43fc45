"""HTTP/1.1 without sockets: bytes in, whole requests out, or one rejection that ends the connection."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final
from urllib.parse import unquote

import httptools

from penstock.core.errors import (
    InvalidInput,
    Overloaded,
    RequestError,
    TooLarge,
    Unimplemented,
    UnsupportedVersion,
)
from penstock.serve.exchange.budget import BUDGET_HEADER, PRIORITY_HEADER
from penstock.serve.exchange.request import MAX_HEAD_BYTES, Head, Request

MAX_HEADERS = 64
# Bytes parsed at once: of a head, and of a chunked body, whose chunks may be of one byte. A body of known length costs
# the same in one piece or in many, so all of it that is there is parsed.
HEAD_STEP, CHUNKED_STEP = 1_024, 4_096
# One `feed` ends after so many parts of bodies or whole requests.
MAX_PARTS, MAX_REQUESTS = 256, 16

# With one of these headers, the end of the body is not known from Content-Length alone.
_DOUBTFUL = {"transfer-encoding", "content-encoding", "expect", "upgrade"}
# Headers of which two must agree: a client that sends two others meant one of them.
_ONE_VALUE = {BUDGET_HEADER: "Penstock-Latency-Ms", PRIORITY_HEADER: "Penstock-Priority"}
# What the parser says of a version that it does not know.
_OTHER_VERSION = "Invalid HTTP version"
# And of the preface of HTTP/2 (RFC 9113, section 3.4).
_PREFACE = "Pause on PRI/Upgrade"
# Host and port of RFC 3986, section 3.2; the host may be empty (RFC 9110, section 7.2).
_HOST = re.compile(r"(\[[0-9A-Za-z:.%\-_~!$&'()*+,;=]+\]|([0-9A-Za-z\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})*)(:[0-9]*)?")


@final
@dataclass(slots=True, eq=False)
class KnownHead:
    """A cached head.

    Args:
        head: The head; None once the cache has forgotten it, so that no connection keeps a route.
        text: Its bytes.
        length: Bytes of a request with it.
    """

    head: Head | None
    text: bytes
    length: int


@final
class HeadCache:
    """Cache of parsed heads, by their bytes: most requests of a client differ only in their bodies.

    Only heads with a plain Content-Length are kept: nothing chunked, compressed or upgraded.
    """

    MAX_HEADS = 1024
    MAX_BYTES = 2048

    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}

    def head(self, data: bytes) -> KnownHead | None:
        """Return the cached head if the bytes are exactly one request with it; None otherwise."""
        known = self._heads.get(data[: data.find(b"\r\n\r\n") + 4])
        return known if known is not None and known.length == len(data) else None

    def clear(self) -> None:
        """Forget all heads, with the routes cached on them."""
        for known in self._heads.values():
            known.head = None
        self._heads.clear()

    def learn(self, data: bytes, request: Request) -> None:
        """Cache the head of a request that was parsed from exactly these bytes."""
        end = data.find(b"\r\n\r\n") + 4
        headers = request.head.headers
        length = len(data) - end
        sure = not headers.keys() & _DOUBTFUL and headers.get("content-length", "0") == str(length)
        if sure and request.head.keep_alive and 4 <= end <= self.MAX_BYTES:
            if len(self._heads) >= self.MAX_HEADS:
                self.clear()
            request.head.nbytes = end
            known = KnownHead(request.head, data[:end], len(data))
            before = self._heads.get(known.text)
            if before is not None:
                before.head = None
            self._heads[known.text] = known


@dataclass(slots=True, eq=False)
class _Pending:
    head: Head = field(default_factory=lambda: Head("", "", {}))
    body: bytes | bytearray = b""
    max_body_bytes: int = 0
    head_bytes: int = 0
    count: int = 0


# Initial value of a connection; never written, because each message begins with a new one.
_NOTHING = _Pending()


@final
@dataclass(slots=True, eq=False)
class RequestParser:
    """Parses requests from the bytes of one connection.

    Args:
        max_body_bytes: Returns the maximum size of a body, from its head; raises `RequestError` to reject it.
        cache: Cache of heads, shared by all connections.
        max_headers: Maximum number of headers.

    Attributes:
        in_message: Whether a request is partly read.
        head_is_whole: Whether the head of that request is read, so that its body is.
        unparsed: Bytes that the next `feed` parses: each `feed` is bounded, for fairness to other connections.
        expects_continue: Whether the client waits for a status 100 before it sends the body.
        rest: Bytes after a request to upgrade; None without one.
    """

    max_body_bytes: Callable[[Head], int]
    cache: HeadCache = field(default_factory=HeadCache)
    max_headers: int = MAX_HEADERS
    in_message: bool = field(default=False, init=False)
    head_is_whole: bool = field(default=True, init=False)
    unparsed: bytes = field(default=b"", init=False)
    expects_continue: bool = field(default=False, init=False)
    rest: bytes | None = field(default=None, init=False)
    _now: _Pending = field(default=_NOTHING, init=False)
    _complete: list[Request] = field(default_factory=list[Request], init=False)
    _rejection: RequestError | None = field(default=None, init=False)
    _silent_bytes: int = field(default=0, init=False)
    # Bytes of the body that must still come; -1 where that is not known.
    _body_left: int = field(default=0, init=False)
    _parts: int = field(default=0, init=False)
    _last: KnownHead | None = field(default=None, init=False)
    # Made for the first unknown head; most connections never need it.
    _parser: Any = field(default=None, init=False)

    def known(self, data: bytes) -> Head | None:
        """Return the cached head if the bytes are exactly one request and nothing is left over; None otherwise."""
        if self.in_message or self.unparsed or self._rejection is not None or self.rest is not None:
            return None
        last = self._last
        # Most requests of a client have the head of the one before.
        if last is None or last.head is None or len(data) != last.length or not data.startswith(last.text):
            last = self._last = self.cache.head(data)
        return None if last is None else last.head

    @property
    def held_bytes(self) -> int:
        """Memory of the request that is partly read, and of what is not parsed yet, in bytes."""
        now = self._now
        if not self.in_message:
            return len(self.unparsed)
        # Names and values of headers are objects; a body that grows has room to grow further.
        return len(self.unparsed) + 2 * now.head_bytes + len(now.body) * 9 // 8

    @property
    def body_left(self) -> int:
        """Bytes of the body that must still come, as far as its head says."""
        return max(0, self._body_left)

    def keep(self, data: bytes) -> None:
        """Keep bytes for the next `feed`."""
        self.unparsed += data

    def feed(self, data: bytes, most: int = MAX_REQUESTS) -> tuple[list[Request], RequestError | None]:
        """Parse bytes, or a part of them; the rest is kept in `unparsed`.

        Args:
            data: The bytes.
            most: Whole requests after which it ends.

        Returns:
            The requests that are complete now, in order, and the rejection that ends the connection, or None.
        """
        if self.rest is not None:
            self._keep(data)
            return [], self._rejection
        # At the start of a request.
        fresh = not self.in_message and self._rejection is None
        if self._rejection is None:
            if fresh:
                self.in_message, self.head_is_whole = True, False
            if self.unparsed:
                data, self.unparsed = self.unparsed + data, b""
            if self._parser is None:
                self._parser = httptools.HttpRequestParser(self)
            self._parse(data, most)
        complete, self._complete = self._complete, []
        if fresh and len(complete) == 1 and not self.in_message and self._rejection is None:
            self.cache.learn(data, complete[0])
        return complete, self._rejection

    def _parse(self, data: bytes, most: int) -> None:
        at, end, self._parts = 0, len(data), 0
        while at < end and self._rejection is None:
            if self._parts >= MAX_PARTS or len(self._complete) >= most:
                self.unparsed, self.in_message = data[at:], True
                return
            step = self._body_left or HEAD_STEP
            piece = data[at : at + (CHUNKED_STEP if step < 0 else step)]
            self._silent_bytes += len(piece)
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                if not _is_websocket(self._now.head):
                    at += upgrade.args[0]
                    self._read_declined_body()
                    continue
                if self._rejection is None:
                    self.rest = b""
                    self._keep(data[at + upgrade.args[0] :])
                return
            except (httptools.HttpParserError, UnicodeDecodeError, ValueError, MemoryError) as error:
                other = self._parser.get_http_version() if str(error) == _OTHER_VERSION else ""
                version = "2.0" if str(error) == _PREFACE else other
                self._reject(_unsupported(version) if version else _unreadable(error))
                return
            # The parser buffers an endless header or trailer without a callback: bound the bytes between callbacks.
            if self._silent_bytes > MAX_HEAD_BYTES:
                self._reject(_head_too_large())
            at += len(piece)

    @property
    def head(self) -> Head:
        """The part of the last head that was parsed, for a rejection."""
        head = self._now.head
        return replace(head, path=head.path.partition("?")[0])

    def forget(self) -> None:
        """Drop what was read of a request that is rejected."""
        self._now, self.unparsed = _NOTHING, b""

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._now = _Pending()
        self._silent_bytes = 0
        self._body_left = 0
        self.head_is_whole = False
        self.in_message = True

    def on_url(self, url: bytes) -> None:
        """Append to the target."""
        self._silent_bytes = 0
        self._now.head.path += url.decode("ascii")
        self._grow_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header."""
        now = self._now
        now.count += 1
        self._silent_bytes = 0
        self._grow_head(len(name) + len(value) + 4)
        if now.count > self.max_headers:
            self._reject(TooLarge(f"The request has more than {self.max_headers} headers; send fewer."))
            return
        if self.head_is_whole:
            return  # a trailer: it comes after what it could change (RFC 9110, section 6.5.1)
        key, text = name.decode("ascii").lower(), value.decode("latin-1").strip()
        headers = now.head.headers
        if key in headers:
            if key == "host":
                self._reject(InvalidInput("The request has two Host headers; send one (RFC 9112, section 3.2)."))
            elif key == "transfer-encoding":
                text = f"{headers[key]}, {text}"
            elif key in _ONE_VALUE and headers[key] != text:
                given = f"{headers[key][:80]!r} and {text[:80]!r}"
                self._reject(InvalidInput(f"The request has two {_ONE_VALUE[key]} headers, {given}; send one."))
        headers[key] = text

    def on_headers_complete(self) -> None:
        """Check the complete head."""
        now, head = self._now, self._now.head
        self.head_is_whole = True
        self._silent_bytes = 0
        head.method = self._parser.get_method().decode("ascii")
        path, _, head.query = _origin_form(head.path).partition("?")
        head.path = unquote(path)
        if self._rejection is not None:
            return
        # Any other upgrade is declined by an answer without one (RFC 9110, section 7.8): some clients offer HTTP/2 with
        # each request.
        upgrade = self._parser.should_upgrade() and _is_websocket(head)
        head.version = self._parser.get_http_version()
        # After an upgrade no other request can follow. Of HTTP/1.0, clients would have to be told that it is kept.
        head.keep_alive = self._parser.should_keep_alive() and not upgrade and head.version != "1.0"
        try:
            if head.method == "CONNECT":
                raise Unimplemented("CONNECT is not served: this server is no proxy; send the request itself.")
            _check_framing(head, head.version)
            if self._parser.should_upgrade() and not upgrade and _names_websocket(head):
                raise InvalidInput("A WebSocket begins with a GET without a body (RFC 6455, section 4.1); send that.")
            now.max_body_bytes = self.max_body_bytes(head)
        except RequestError as error:
            self._reject(error)
            return
        length = head.headers.get("content-length", "")
        if length.isdigit():
            self._body_left = int(length)
            self._check_body(self._body_left)
        elif "transfer-encoding" in head.headers:
            self._body_left = -1
        # RFC 9110, section 10.1.1: a client of HTTP/1.0 would take it for the answer.
        self.expects_continue = head.version != "1.0" and head.headers.get("expect", "").lower() == "100-continue"

    def on_body(self, part: bytes) -> None:
        """Append to the body."""
        now = self._now
        self._silent_bytes = 0
        self._parts += 1
        if self._rejection is not None:
            return
        if self._body_left > 0:
            self._body_left -= len(part)
        self._check_body(len(now.body) + len(part))
        if self._rejection is not None:
            now.body = b""
        elif not now.body:
            now.body = part
        else:
            # Not a list of parts: a part of one byte would take a hundred.
            if isinstance(now.body, bytes):
                now.body = bytearray(now.body)
            now.body += part

    def on_message_complete(self) -> None:
        """Finish a request."""
        if self._body_left and self._parser.should_upgrade():
            return  # its body follows, see `_read_declined_body`
        self.expects_continue = self.in_message = False
        self._silent_bytes = self._body_left = 0
        if self._rejection is not None:
            return
        self._complete.append(Request(self._now.head, bytes(self._now.body)))
        # A connection that waits must not keep the route of its last request, and with it the table of a retired model.
        self._now.head = replace(self._now.head, route=None)

    def _read_declined_body(self) -> None:
        """Read on with the body of a request whose upgrade is declined.

        httptools takes such a request for whole after its head. Another parser, which gets a substitute head, reads the
        body and what follows.
        """
        if self._body_left and self._rejection is None:
            framing = b"Content-Length: %d" % self._body_left if self._body_left > 0 else b"Transfer-Encoding: chunked"
            ends = b"" if self._now.head.keep_alive else b"\r\nConnection: close"
            self._parser = httptools.HttpRequestParser(_BodyCallbacks(self))
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + ends + b"\r\n\r\n")

    def _keep(self, data: bytes) -> None:
        assert self.rest is not None
        if len(self.rest) + len(data) > MAX_HEAD_BYTES:
            self._reject(TooLarge("Too much came before the upgrade was answered; wait for the answer."))
        elif self._rejection is None:
            self.rest += data

    def _grow_head(self, count: int) -> None:
        self._now.head_bytes += count
        if self._now.head_bytes > MAX_HEAD_BYTES:
            self._reject(_head_too_large())

    def _check_body(self, count: int) -> None:
        most = self._now.max_body_bytes
        if count > most:
            self._reject(TooLarge(f"The body has {count:,} bytes or more; at most {most:,} are taken."))

    def _reject(self, error: RequestError) -> None:
        if self._rejection is None:
            self._rejection = error


@final
class _BodyCallbacks:
    """Forward the callbacks of a parser, except those of the substitute head in front of a body.

    Args:
        to: Their receiver.
    """

    def __init__(self, to: RequestParser) -> None:
        self._to, self._passed = to, False

    def on_message_begin(self) -> None:
        if self._passed:
            self._to.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._passed:
            self._to.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._passed:
            self._to.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._passed:
            self._to.on_headers_complete()
        self._passed = True

    def on_body(self, part: bytes) -> None:
        self._to.on_body(part)

    def on_message_complete(self) -> None:
        self._to.on_message_complete()


def _check_framing(head: Head, version: str) -> None:
    """Check what the parser leaves to its caller (RFC 9112, sections 2.3, 3.2 and 6.1)."""
    if version not in ("1.1", "1.0"):
        raise _unsupported(version)
    headers = head.headers
    if version == "1.1" and "host" not in headers:
        raise InvalidInput("The request has no Host header; HTTP/1.1 needs one (RFC 9112, section 3.2).")
    host = headers.get("host")
    if host is not None and _HOST.fullmatch(host) is None:
        raise InvalidInput(f"The Host header is {host[:80]!r}; it must be a host and a port (RFC 9112, section 3.2).")
    coding = headers.get("transfer-encoding")
    if coding is None:
        return
    if version == "1.0":
        raise InvalidInput("HTTP/1.0 has no Transfer-Encoding; send a Content-Length.")
    if coding.lower() != "chunked":
        raise Unimplemented(f"Transfer-Encoding {coding[:80]!r} is not read here; use chunked alone.")


def _origin_form(target: str) -> str:
    """Path and query of a target, which may be a whole URL (RFC 9112, section 3.2.2)."""
    if target.startswith("/"):
        return target
    scheme, separator, rest = target.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return target
    authority_end = min((place for place in map(rest.find, "/?") if place >= 0), default=len(rest))
    path = rest[authority_end:]
    return path if path.startswith("/") else f"/{path}"


def _is_websocket(head: Head) -> bool:
    headers = head.headers
    bodied = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    return head.method == "GET" and _names_websocket(head) and not bodied


def _names_websocket(head: Head) -> bool:
    return head.headers.get("upgrade", "").lower() == "websocket"


def _unsupported(version: str) -> UnsupportedVersion:
    return UnsupportedVersion(f"The request is of HTTP/{version}; this server speaks HTTP/1.1.")


def _unreadable(error: Exception) -> RequestError:
    # The context is the exception of a callback.
    if isinstance(error, MemoryError) or isinstance(error.__context__, MemoryError):
        return Overloaded("This server has no memory for the request; come back later.")
    return InvalidInput(f"The request is not HTTP/1.1 ({error}); send it whole and well-formed.")


def _head_too_large() -> TooLarge:
    return TooLarge(f"The request's head is larger than {MAX_HEAD_BYTES:,} bytes; send fewer headers.")
