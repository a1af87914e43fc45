"""`GET /v1/apps/{name}/stream` and `GET /v1/streams`: the upgrade to a WebSocket, or the rejection of a page."""

import asyncio
import base64
import binascii
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from websockets.utils import accept_key

from penstock.core.errors import InvalidInput, Overloaded, RequestError, UnsupportedVersion, WrongVersion
from penstock.serve.exchange.access import SUBPROTOCOLS, Access
from penstock.serve.exchange.local_client import address_of
from penstock.serve.exchange.peer import Peer
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.request_bounds import RequestBounds
from penstock.serve.exchange.response import Answer, Switched
from penstock.serve.registry.generated import answers_in_steps
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_chain import Served, ServedChain
from penstock.serve.streams.quotas import StreamClient
from penstock.serve.streams.stream_balancer import StreamBalancer
from penstock.serve.streams.streams import Streams
from penstock.serve.websocket.closing import RejectedConnection
from penstock.serve.websocket.generate_connection import GenerateConnection
from penstock.serve.websocket.live_stream import LiveStream
from penstock.serve.websocket.shared_connection import AdmitNamed, Make, SharedConnection
from penstock.serve.websocket.stream_connection import StreamConnection

SUBPROTOCOL = "penstock"
# Of pages of OpenAI's and Deepgram's clients.
SERVICE_SUBPROTOCOLS = ("realtime", "token")
VERSION = "13"


def upgrade_to_stream(
    served: Served,
    request: Request,
    answer: Answer,
    *,
    models: ModelRegistry,
    access: Access,
    bounds: RequestBounds | None = None,
    generating: Callable[[Served], GenerateConnection] | None = None,
) -> None:
    """Upgrade a request's connection to a live stream, or to an answer that takes steps.

    Args:
        served: The model.
        request: The upgrade.
        answer: Takes the response.
        models: All models; a draining server takes no streams.
        access: The sites whose pages may open streams.
        bounds: Bounds of starts that may bring a ticket.
        generating: Makes the connection of an answer that takes steps.

    Raises:
        RequestError: The request is no upgrade to WebSocket, the model is not live, or no stream is admitted now.
    """
    head = request.head
    key = key_of(head)
    access.check_origin(head)
    if generating and answers_in_steps(served) and served.streams is None:
        reject_draining(models)
        served.reject_lost()
        headers = (*switched_headers(head, key), *_version_of(served))
        answer(Switched(status=101, headers=headers, take=generating(served).take_over))
        return
    streams, chain = _streams_of(served, models)
    client = StreamClient(access.client(head) or "", address_of(request.transport))
    admit = partial(streams.admit_stream, budget_ns=streams.budget_ns, client=client)
    connection = StreamConnection(admit, time.monotonic, chain, start_bounds=bounds, client=client.key)
    headers = (*switched_headers(head, key), *_version_of(served))
    answer(Switched(status=101, headers=headers, take=connection.take_over))


def _version_of(served: Served) -> tuple[tuple[str, str], ...]:
    return () if isinstance(served, ServedChain) else served.version_headers


def upgrade_to_shared(
    request: Request,
    answer: Answer,
    *,
    models: ModelRegistry,
    access: Access,
    make: Callable[[AdmitNamed], SharedConnection],
) -> None:
    """Upgrade a request's connection to one that many live streams share, of any models.

    Args:
        request: The upgrade.
        answer: Takes the response.
        models: All models; a draining server takes no streams.
        access: The sites whose pages may open streams.
        make: Makes the connection.

    Raises:
        RequestError: The request is no upgrade to WebSocket, or the server drains.
    """
    head = request.head
    key = key_of(head)
    access.check_origin(head)
    reject_draining(models)
    client = StreamClient(access.client(head) or "", address_of(request.transport))

    def admit(name: str, stream_of: Make) -> LiveStream:
        served = models.named(name)
        try:
            streams, chain = _streams_of(served, models)
            return streams.admit_stream(lambda one: stream_of(one, chain), streams.budget_ns, client)
        except RequestError as error:
            served.count_rejection(error)
            raise

    answer(Switched(status=101, headers=switched_headers(head, key), take=make(admit).take_over))


def _streams_of(served: Served, models: ModelRegistry) -> tuple[Streams | StreamBalancer, ServedChain | None]:
    streams = served.streams
    if streams is None:
        raise InvalidInput(f"{served.name!r} takes single requests, not streams; POST to /v1/apps/{served.name}.")
    reject_draining(models)
    served.reject_lost()
    return streams, served if isinstance(served, ServedChain) else None


def reject_draining(models: ModelRegistry) -> None:
    """Reject streams while the server drains.

    Raises:
        Overloaded: It does.
    """
    if models.draining:
        raise Overloaded("The server is shutting down; retry elsewhere.", 5.0)


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
        key = key_of(head)
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

    return Switched(status=error.status, headers=switched_headers(head, key), take=take, error=error)


def _subprotocols_of(head: Head) -> list[str]:
    return [name.strip() for name in head.headers.get(SUBPROTOCOLS, "").split(",")]


def switched_headers(head: Head, key: str) -> tuple[tuple[str, str], ...]:
    """The headers of the response that upgrades a connection."""
    headers = (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept_key(key)))
    offered = _subprotocols_of(head)
    chosen = next((name for name in (SUBPROTOCOL, *SERVICE_SUBPROTOCOLS) if name in offered), None)
    return headers if chosen is None else (*headers, ("Sec-WebSocket-Protocol", chosen))


def key_of(head: Head) -> str:
    """The key of a request to upgrade to WebSocket.

    Raises:
        RequestError: It is no such request.
    """
    headers = head.headers
    if head.version == "1.0":
        raise UnsupportedVersion(
            "The request is of HTTP/1.0, which has no WebSockets; let the proxy speak HTTP/1.1 to this server."
        )
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
