"""Responses, rejections, and the functions that answer requests."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson

from penstock.core.errors import ComputeFailed, Overloaded, RequestError, Unauthorized, WrongMethod, WrongVersion
from penstock.serve.exchange.peer import Take
from penstock.serve.exchange.request import Head, Request


@dataclass(slots=True)
class Response:
    """An HTTP response.

    Args:
        status: The HTTP status.
        body: The body's bytes.
        content_type: The body's media type.
        headers: Further headers as names and values, without line ends.
        error: The reason why the request has no result; None if it has one.
    """

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    error: RequestError | None = None


Answer = Callable[[Response], None]
Cancel = Callable[[], None]
Handler = Callable[[Request, Answer], Cancel | None]
Rejecter = Callable[[RequestError, Head], "Response"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Handlers:
    """Functions that answer the requests of a server.

    Args:
        handle: Answers a request, now or later, exactly once; returns a function that cancels it, if it can be.
        reject: Makes the response to a request that could not be read to its end, from as much of the head as was read.
        reject_early: Given a head and the arrival time, returns the bytes of a rejection if the request is certain to
            be rejected whatever its body is; None otherwise.
        lane: Given a head whose request was answered, returns its lane; None if there is none.
    """

    handle: Handler
    reject: Rejecter
    reject_early: Callable[[Head, int], bytes | None] | None = None
    lane: "Callable[[Head], ShortWay | None] | None" = None


@dataclass(slots=True, kw_only=True)
class Switched(Response):
    """The last HTTP response of a connection that changes protocol.

    The client receives status 101; `status` is for logs and traces.

    Args:
        take: Takes the connection over.
    """

    take: Take


class ShortAnswer(Protocol):
    """Makes the answers of requests that went a short way, see `penstock.serve.http.lane`."""

    @property
    def request(self) -> Request:
        """Stands for each of them; it has no body."""
        ...

    def respond(self, output: Any) -> bytes | Response:
        """Make the response to a good result."""
        ...

    def answer(self, answer: Answer, status: int, output: Any) -> None:
        """Answer with a result the complete way."""


class ShortWay(Protocol):
    """The short way of requests with one head, see `penstock.serve.http.lane`."""

    @property
    def answering(self) -> ShortAnswer:
        """Makes the answer of the request that was submitted last."""
        ...

    def reject(self, now_ns: int) -> bytes | None:
        """Return the refusal of a request if it is certain whatever its body and its age; None otherwise."""

    def submit(self, data: bytes, done: Any, arrival_ns: int, now_ns: int) -> Any:
        """Submit a request; its slot, or the bytes of its refusal, or None if it must go the complete way."""


class Body(Protocol):
    """The body of a response that is written in parts."""

    def write(self, data: bytes) -> None:
        """Send a part; a client that leaves too much of it unread is cut off."""

    def end(self) -> None:
        """End the response."""


@dataclass(slots=True, kw_only=True)
class Streamed(Response):
    """A response whose body is written in parts, after its head. The request can be cancelled until the body's end.

    Args:
        opened: Given the body, at once, if the client is still there.
    """

    opened: Callable[[Body], None]


def with_headers(headers: tuple[tuple[str, str], ...], answer: Answer) -> Answer:
    """Return a function that answers with further headers."""
    return lambda response: answer(replace(response, headers=response.headers + headers))


def internal_error() -> ComputeFailed:
    """The error of a request on which the server itself failed."""
    return ComputeFailed("The server failed on this request; its log says how.")


def retry_after(error: Overloaded) -> int:
    """Return the time until a retry in whole seconds, at least 1."""
    return max(1, round(error.retry_after_s))


def rejected(error: RequestError) -> Response:
    """Make the response to a request that is rejected."""
    headers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded):
        headers = (("Retry-After", str(retry_after(error))),)
    elif isinstance(error, WrongMethod):
        headers = (("Allow", error.allowed),)
    elif isinstance(error, Unauthorized):
        headers = (("WWW-Authenticate", "Bearer"),)
    elif isinstance(error, WrongVersion):
        headers = (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Version", error.supported))
    return Response(status=error.status, body=orjson.dumps({"error": str(error)}), headers=headers, error=error)
