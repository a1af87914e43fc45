"""`GET /v1/apps/{name}/stream`: checks of the upgrade to a WebSocket, and its response, or the rejection of a page."""

import asyncio
import base64
import binascii
import time
from collections.abc import Callable
from typing import NoReturn

from websockets.utils import accept_key

from penstock.core.errors import InvalidInput, Overloaded, RequestError, WrongVersion
from penstock.serve.exchange.access import SUBPROTOCOLS, Access
from penstock.serve.exchange.local_client import address_of
from penstock.serve.exchange.peer import Peer
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Switched
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_chain import Served, ServedChain
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.streams.quotas import StreamClient
from penstock.serve.websocket.closing import RejectedConnection
from penstock.serve.websocket.generate_connection import GenerateConnection
from penstock.serve.websocket.stream_connection import StreamConnection

SUBPROTOCOL = "penstock"
VERSION = "13"


def upgrade_to_stream(
    served: Served,
    request: Request,
    answer: Answer,
    *,
    models: ModelRegistry,
    access: Access,
    generating: Callable[[ServedModel], GenerateConnection] | None = None,
) -> None:
    """Upgrade a request's connection to a live stream, or to an answer that takes steps.

    Args:
        served: The model.
        request: The upgrade.
        answer: Takes the response.
        models: All models; a draining server takes no streams.
        access: The sites whose pages may open streams.
        generating: Makes the connection of an answer that takes steps.

    Raises:
        RequestError: The request is no upgrade to WebSocket, the model is not live, or no stream is admitted now.
    """
    head = request.head
    key = _key_of(head)
    access.check_origin(head)
    generates = isinstance(served, ServedModel) and served.application.generate is not None
    streams = served.streams
    if streams is None and not (generates and generating):
        raise InvalidInput(f"{served.name!r} takes single requests, not streams; POST to /v1/apps/{served.name}.")
    if models.draining:
        raise Overloaded("The server is shutting down; retry elsewhere.", 5.0)
    served.reject_lost()
    if isinstance(served, ServedModel) and generating is not None and streams is None:
        headers = (*_headers(head, key), *served.version_headers)
        answer(Switched(status=101, headers=headers, take=generating(served).take_over))
        return
    assert streams is not None
    chain = served if isinstance(served, ServedChain) else None
    client = StreamClient(access.client(head) or "", address_of(request.transport))
    connection = streams.admit_stream(
        lambda one: StreamConnection(one, time.monotonic, chain), streams.budget_ns, client
    )
    version = () if isinstance(served, ServedChain) else served.version_headers
    answer(Switched(status=101, headers=(*_headers(head, key), *version), take=connection.take_over))


def reject_page(error: RequestError, request: Request, *, access: Access) -> Switched | None:
    """Open a WebSocket that closes with the reason of a rejection, for a page: browsers show pages no HTTP response.

    Args:
        error: The reason.
        request: The rejected request.
        access: The sites whose pages may read the reason.

    Returns:
        The response that opens it; None for clients that read HTTP responses, and for pages of other sites.
    """
    head = request.head
    if SUBPROTOCOL not in _subprotocols_of(head) or head.method != "GET":
        return None
    try:
        key = _key_of(head)
        access.check_origin(head)
    except RequestError:
        return None

    def take(transport: asyncio.Transport, rest: bytes, peers: set[Peer]) -> None:
        rejected = RejectedConnection(error, transport, peers, time.monotonic)
        transport.set_protocol(rejected)
        if transport.is_closing():
            rejected.connection_lost(None)
        elif rest:
            rejected.data_received(rest)

    return Switched(status=error.status, headers=_headers(head, key), take=take, error=error)


def _subprotocols_of(head: Head) -> list[str]:
    return [name.strip() for name in head.headers.get(SUBPROTOCOLS, "").split(",")]


def _headers(head: Head, key: str) -> tuple[tuple[str, str], ...]:
    headers = (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept_key(key)))
    return (*headers, ("Sec-WebSocket-Protocol", SUBPROTOCOL)) if SUBPROTOCOL in _subprotocols_of(head) else headers


def _key_of(head: Head) -> str:
    headers = head.headers
    wants = [token.strip().lower() for token in headers.get("connection", "").split(",")]
    if headers.get("upgrade", "").lower() != "websocket" or "upgrade" not in wants or head.keep_alive:
        _reject("a GET with 'Upgrade: websocket' and 'Connection: Upgrade'")
    if headers.get("sec-websocket-version") != VERSION:
        raise WrongVersion(f"A stream is a WebSocket of Sec-WebSocket-Version {VERSION}; use that one.", VERSION)
    key = headers.get("sec-websocket-key", "")
    try:
        good = len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        good = False
    if not good:
        _reject("a Sec-WebSocket-Key of 16 bytes in base64")
    return key


def _reject(wanted: str) -> NoReturn:
    raise InvalidInput(f"A stream is a WebSocket (RFC 6455), which begins with {wanted}; use ws:// and a library.")
