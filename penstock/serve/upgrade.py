"""`GET /v1/apps/{name}/stream`: whether a request may become a live stream, and what answers it, or refuses a page."""

import asyncio
import base64
import binascii
import time
from typing import NoReturn

from penstock.core.errors import InvalidInput, Overloaded, RequestError, WrongVersion
from penstock.serve.access import SUBPROTOCOLS, Access
from penstock.serve.closing import NoStream
from penstock.serve.connection import UNREAD_BYTES, Answer, Peer, Switched
from penstock.serve.frames import accept_of
from penstock.serve.models import Models
from penstock.serve.served import RESTART_S, Served
from penstock.serve.stream_socket import StreamSocket
from penstock.serve.wire import Head, Request

SUBPROTOCOL = "penstock"
VERSION = "13"


def stream_of(served: Served, models: Models, access: Access, request: Request, answer: Answer) -> None:
    """Open a stream and go on with it on the request's connection.

    Args:
        served: The model.
        models: Know whether the server goes down.
        access: Whose pages may.
        request: The upgrade.
        answer: Takes the response.

    Raises:
        RequestError: It is no upgrade to WebSocket, the model is not live, or no stream is taken in now.
    """
    head = request.head
    key = _key_of(head)
    access.check_origin(head)
    if served.streams is None:
        raise InvalidInput(f"{served.name!r} takes single requests, not streams; POST to /v1/apps/{served.name}.")
    if models.draining:
        raise Overloaded("The server is going down; ask another one.", 5.0)
    if served.engine_lost:
        raise Overloaded("The engine stopped and is being started again; come back later.", RESTART_S)
    stream = served.streams.open()

    def take(transport: asyncio.Transport, rest: bytes, peers: set[Peer]) -> None:
        if transport.get_extra_info("sslcontext") is None:
            transport.set_write_buffer_limits(0)
        else:
            transport.set_write_buffer_limits(UNREAD_BYTES)
        socket = StreamSocket(stream, transport, peers, time.monotonic)
        transport.set_protocol(socket)
        if transport.is_closing():
            socket.connection_lost(None)
        elif rest:
            socket.data_received(rest)

    answer(Switched(status=101, headers=_headers(head, key), take=take))


def no_stream_of(error: RequestError, access: Access, request: Request) -> Switched | None:
    """A WebSocket whose close says why there is no stream, for a page: a browser shows it no answer of HTTP.

    Args:
        error: Why.
        access: Whose pages may be told.
        request: What was refused.

    Returns:
        The response that opens it; None for whoever reads an answer of HTTP, or is a page of another site's.
    """
    head = request.head
    if SUBPROTOCOL not in _offered(head) or head.method != "GET":
        return None
    try:
        key = _key_of(head)
        access.check_origin(head)
    except RequestError:
        return None

    def take(transport: asyncio.Transport, rest: bytes, peers: set[Peer]) -> None:
        last = NoStream(error, transport, peers, time.monotonic)
        transport.set_protocol(last)
        if transport.is_closing():
            last.connection_lost(None)
        elif rest:
            last.data_received(rest)

    return Switched(status=error.status, headers=_headers(head, key), take=take, error=error)


def _offered(head: Head) -> list[str]:
    return [name.strip() for name in head.headers.get(SUBPROTOCOLS, "").split(",")]


def _headers(head: Head, key: str) -> tuple[tuple[str, str], ...]:
    headers = (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept_of(key)))
    return (*headers, ("Sec-WebSocket-Protocol", SUBPROTOCOL)) if SUBPROTOCOL in _offered(head) else headers


def _key_of(head: Head) -> str:
    headers = head.headers
    wants = [token.strip().lower() for token in headers.get("connection", "").split(",")]
    if headers.get("upgrade", "").lower() != "websocket" or "upgrade" not in wants or head.keep_alive:
        _refuse("a GET with 'Upgrade: websocket' and 'Connection: Upgrade'")
    if headers.get("sec-websocket-version") != VERSION:
        raise WrongVersion(f"A stream is a WebSocket of Sec-WebSocket-Version {VERSION}; use that one.", VERSION)
    key = headers.get("sec-websocket-key", "")
    try:
        good = len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        good = False
    if not good:
        _refuse("a Sec-WebSocket-Key of 16 bytes in base64")
    return key


def _refuse(wanted: str) -> NoReturn:
    raise InvalidInput(f"A stream is a WebSocket (RFC 6455), which begins with {wanted}; use ws:// and a library.")
