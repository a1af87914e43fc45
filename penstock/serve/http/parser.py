"""HTTP/1.1 without sockets: bytes in, whole requests out, or one rejection that ends the connection."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final
from urllib.parse import unquote

import httptools

from penstock.core.errors import InvalidInput, RequestError, TooLarge
from penstock.serve.exchange.request import MAX_HEAD_BYTES, Head, Request

MAX_HEADERS = 64

# With one of these headers, the end of the body is not known from Content-Length alone.
_DOUBTFUL = {"transfer-encoding", "content-encoding", "expect", "upgrade"}


@final
class HeadCache:
    """Cache of parsed heads, by their bytes: most requests of a client differ only in their bodies.

    Only heads with a plain Content-Length are kept: nothing chunked, compressed or upgraded.
    """

    MAX_HEADS = 1024
    MAX_BYTES = 2048

    def __init__(self) -> None:
        self._heads: dict[bytes, tuple[Head, int]] = {}

    def head(self, data: bytes) -> Head | None:
        """Return the cached head if the bytes are exactly one request with it; None otherwise."""
        known = self._heads.get(data[: data.find(b"\r\n\r\n") + 4])
        return known[0] if known is not None and known[1] == len(data) else None

    def clear(self) -> None:
        """Forget all heads, with the routes cached on them."""
        self._heads.clear()

    def learn(self, data: bytes, request: Request) -> None:
        """Cache the head of a request that was parsed from exactly these bytes."""
        end = data.find(b"\r\n\r\n") + 4
        headers = request.head.headers
        length = len(data) - end
        sure = not headers.keys() & _DOUBTFUL and headers.get("content-length", "0") == str(length)
        if sure and request.head.keep_alive and 4 <= end <= self.MAX_BYTES:
            if len(self._heads) >= self.MAX_HEADS:
                self._heads.clear()
            request.head.nbytes = end
            self._heads[data[:end]] = request.head, len(data)


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
        expects_continue: Whether the client waits for a status 100 before it sends the body.
        rest: Bytes after a request to upgrade; None without one.
    """

    max_body_bytes: Callable[[Head], int]
    cache: HeadCache = field(default_factory=HeadCache)
    max_headers: int = field(default=MAX_HEADERS, kw_only=True)
    in_message: bool = field(default=False, init=False)
    expects_continue: bool = field(default=False, init=False)
    rest: bytes | None = field(default=None, init=False)
    _now: _Pending = field(default=_NOTHING, init=False)
    _complete: list[Request] = field(default_factory=list[Request], init=False)
    _rejection: RequestError | None = field(default=None, init=False)
    _head_is_whole: bool = field(default=True, init=False)
    _silent_bytes: int = field(default=0, init=False)
    # Made for the first unknown head; most connections never need it.
    _parser: Any = field(default=None, init=False)

    def known(self, data: bytes) -> Head | None:
        """Return the cached head if the bytes are exactly one request and nothing is left over; None otherwise."""
        if self.in_message or self._rejection is not None or self.rest is not None:
            return None
        return self.cache.head(data)

    def feed(self, data: bytes) -> tuple[list[Request], RequestError | None]:
        """Parse bytes.

        Returns:
            The requests that are complete now, in order, and the rejection that ends the connection, or None.
        """
        if self.rest is not None:
            self._keep(data)
            return [], self._rejection
        # At the start of a request.
        fresh = not self.in_message and self._rejection is None
        if self._rejection is None:
            self.in_message = True
            self._silent_bytes += len(data)
            if self._parser is None:
                self._parser = httptools.HttpRequestParser(self)
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._rejection is None:
                    self.rest = b""
                    self._keep(data[upgrade.args[0] :])
            except (httptools.HttpParserError, UnicodeDecodeError, ValueError) as error:
                self._reject(InvalidInput(f"The request is not HTTP/1.1 ({error}); send it whole and well-formed."))
            # The parser buffers an endless header or trailer without a callback: bound the bytes between callbacks.
            if self._silent_bytes > MAX_HEAD_BYTES:
                self._reject(_head_too_large())
        complete, self._complete = self._complete, []
        if fresh and len(complete) == 1 and not self.in_message and self._rejection is None:
            self.cache.learn(data, complete[0])
        return complete, self._rejection

    @property
    def head(self) -> Head:
        """The part of the last head that was parsed, for a rejection."""
        head = self._now.head
        return replace(head, path=head.path.partition("?")[0])

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._now = _Pending()
        self._silent_bytes = 0
        self._head_is_whole = False
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
        if self._head_is_whole:
            return  # a trailer: it comes after what it could change (RFC 9110, section 6.5.1)
        now.head.headers[name.decode("ascii").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        """Check the complete head."""
        now, head = self._now, self._now.head
        self._head_is_whole = True
        self._silent_bytes = 0
        head.method = self._parser.get_method().decode("ascii")
        head.path = unquote(head.path.partition("?")[0])
        if self._rejection is not None:
            return
        upgrade = self._parser.should_upgrade()
        if upgrade and not _is_websocket(head):
            self._reject(InvalidInput("This server upgrades to WebSocket alone; leave out the Upgrade header."))
        # After an upgrade no other request can follow.
        head.keep_alive = self._parser.should_keep_alive() and not upgrade
        try:
            now.max_body_bytes = self.max_body_bytes(head)
        except RequestError as error:
            self._reject(error)
            return
        length = head.headers.get("content-length", "")
        if length.isdigit():
            self._check_body(int(length))
        self.expects_continue = head.headers.get("expect", "").lower() == "100-continue"

    def on_body(self, part: bytes) -> None:
        """Append to the body."""
        now = self._now
        self._silent_bytes = 0
        if self._rejection is not None:
            return
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
        self.expects_continue = self.in_message = False
        self._silent_bytes = 0
        if self._rejection is not None:
            return
        self._complete.append(Request(self._now.head, bytes(self._now.body)))
        # A connection that waits must not keep the route of its last request, and with it the table of a retired model.
        self._now.head = replace(self._now.head, route=None)

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


def _is_websocket(head: Head) -> bool:
    headers = head.headers
    bodied = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    return head.method == "GET" and headers.get("upgrade", "").lower() == "websocket" and not bodied


def _head_too_large() -> TooLarge:
    return TooLarge(f"The request's head is larger than {MAX_HEAD_BYTES:,} bytes; send fewer headers.")
