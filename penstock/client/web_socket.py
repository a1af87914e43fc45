"""WebSocket connections of the clients: opened with the attempts of a call, and their errors as the clients' own."""

import re
import ssl
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from penstock.client.retry import Answer, Attempt, ClientConfig, NoAnswer, Outcome, Steps, run, run_async
from penstock.core.errors import (
    ComputeFailed,
    InvalidInput,
    InvalidTicket,
    Overloaded,
    RequestError,
    TimedOut,
    TooLarge,
    TooSlow,
    Unreachable,
    UnsupportedContent,
)

_ERRORS: dict[int, type[RequestError]] = {
    CloseCode.INVALID_DATA: InvalidInput,
    CloseCode.PROTOCOL_ERROR: InvalidInput,
    CloseCode.POLICY_VIOLATION: InvalidInput,
    CloseCode.UNSUPPORTED_DATA: UnsupportedContent,
    CloseCode.MESSAGE_TOO_BIG: TooLarge,
    CloseCode.INTERNAL_ERROR: ComputeFailed,
    CloseCode.SERVICE_RESTART: Overloaded,
    CloseCode.TRY_AGAIN_LATER: Overloaded,
    CloseCode.GOING_AWAY: Overloaded,
    4408: TooSlow,
    4412: InvalidTicket,
}
# At the end of a close's reason.
RETRY = re.compile(r"Retry after (\d+) s\.$")
# Failures of a connection or a handshake without an HTTP response.
_GONE = (OSError, EOFError, InvalidHandshake)


def open_connection(
    config: ClientConfig, steps: Steps[Answer], tls: ssl.SSLContext | None, sleep: Callable[[float], None]
) -> ClientConnection:
    """Open a connection, with the attempts and waits of `steps`.

    Raises:
        RequestError: The server refused.
        ClientError: No response came.
    """
    connections: list[ClientConnection] = []

    def send(attempt: Attempt) -> Outcome:
        try:
            # Entered at once; the caller closes it.
            connections.append(connect(**_connect_options(config, attempt, tls)).__enter__())
        except _GONE as error:
            return _outcome(error)
        return OPENED

    run(steps, send, sleep)
    (connection,) = connections
    return connection


async def open_connection_async(
    config: ClientConfig, steps: Steps[Answer], tls: ssl.SSLContext | None, sleep: Callable[[float], Awaitable[None]]
) -> AsyncConnection:
    """Open a connection in asyncio, as `open_connection` does."""
    connections: list[AsyncConnection] = []

    async def send(attempt: Attempt) -> Outcome:
        try:
            connections.append(await connect_async(**_connect_options(config, attempt, tls)))
        except _GONE as error:
            return _outcome(error)
        return OPENED

    await run_async(steps, send, sleep)
    (connection,) = connections
    return connection


OPENED = Answer(200, {}, b"")


def _connect_options(config: ClientConfig, attempt: Attempt, tls: ssl.SSLContext | None) -> dict[str, Any]:
    scheme, _, rest = config.url.rstrip("/").partition("://")
    url = f"{'wss' if scheme.lower() == 'https' else 'ws'}://{rest}{attempt.call.path}"
    headers = {name: value for name, value in attempt.call.headers.items() if name != "Accept-Encoding"}
    # Environment variables are not read. Compression costs the server more than it saves of the network.
    return {
        "uri": url,
        "ssl": tls,
        "additional_headers": headers,
        "open_timeout": attempt.timeout_s,
        "compression": None,
        "proxy": None,
        "max_size": None,
        "max_queue": None,
        # Under backpressure the server reads no pings either; a missing pong must not end the stream.
        "ping_interval": None,
    }


def _outcome(error: Exception) -> Outcome:
    if isinstance(error, InvalidStatus):
        headers = {name.lower(): value for name, value in error.response.headers.raw_items()}
        return Answer(error.response.status_code, headers, bytes(error.response.body or b""))
    return NoAnswer(str(error) or type(error).__name__, isinstance(error, TimeoutError))


def opening(config: ClientConfig) -> AbstractContextManager[None]:
    """`translated`, of what the server answers to a start."""
    return translated(config, f"was not ready within {config.timeout_s:g} s")


@contextmanager
def translated(config: ClientConfig, overdue: str) -> Generator[None]:
    """Raise the errors of a WebSocket as the client's.

    Args:
        config: The client's.
        overdue: What the server did where it is late.
    """
    try:
        yield
    except TimeoutError:
        raise TimedOut(f"{config.url} {overdue}.") from None
    except ConnectionClosed as error:
        received = error.rcvd
        if received is None:
            raise Unreachable(f"{config.url} hung up in the middle of a stream; is it still running?") from None
        kind = _ERRORS.get(received.code, RequestError)
        message = received.reason or f"The server ended the stream with code {received.code}."
        retry = RETRY.search(message)
        if kind is Overloaded and retry is not None:
            raise Overloaded(message, float(retry[1])) from None
        raise kind(message) from None
