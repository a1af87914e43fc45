"""The listening side of a front-end: takes connections, ends silent ones, drains."""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import final

from penstock.core.errors import ServeError
from penstock.serve.connection import LINGER_S, Connection, Handler, Peer, Refuse, Shed
from penstock.serve.heard import heard
from penstock.serve.settings import Settings
from penstock.serve.wire import MAX_HEAD_BYTES, KnownHeads, RequestReader

log = logging.getLogger(__name__)

SWEEP_S = 1.0
# How long a drained server waits for requests that are in the sockets already.
GRACE_S = 0.25
BACKLOG = 1024
RETRY_S = 0.1


@final
class HttpServer:
    """The connections of one front-end.

    Args:
        settings: Limits and TLS.
        listener: The socket that clients connect to.
        handle: What answers a request.
        most_body_bytes: The largest body that any model takes now.
        refuse: What answers a request that cannot be read to its end.
        shed: What refuses requests at once, where that may pass by `handle`.

    Raises:
        ServeError: The TLS files are none.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        handle: Handler,
        most_body_bytes: Callable[[], int],
        refuse: Refuse,
        shed: Shed | None = None,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._handle = handle
        self._most_body_bytes = most_body_bytes
        self._refuse = refuse
        self._shed = shed
        self._tls = tls_of(settings)
        self._known = KnownHeads()
        self._connections: set[Peer] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._others: dict[int, socket.socket] = {}
        self._draining = False

    def forget_heads(self) -> None:
        """What answers to some name may be another now."""
        self._known.clear()
        for connection in self._connections:
            connection.allow(self._most_body_bytes() + MAX_HEAD_BYTES)

    def listen(self) -> None:
        """Take connections from now on."""
        loop = asyncio.get_running_loop()
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        loop.add_reader(self._listener, self._accept, self._listener)
        self._sweeper = loop.create_task(self._sweep())

    def stand_in(self, index: int, listener: socket.socket) -> None:
        """Take the connections of another front-end too, from its own socket."""
        self._others[index] = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def stand_back(self, index: int) -> None:
        """The other front-end takes its connections itself again."""
        listener = self._others.pop(index, None)
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def close_after_next(self) -> None:
        """Let every connection's next answer be its last."""
        self._draining = True
        for connection in list(self._connections):
            connection.close_after_next()

    async def drain(self, seconds: float, hurry: Callable[[], bool]) -> None:
        """Answer what was accepted and what still comes in on the way, then end every connection.

        Args:
            seconds: The longest that this may take.
            hurry: Says that nothing is waited for any more.
        """
        loop = asyncio.get_running_loop()
        end_s = time.monotonic() + seconds
        self.close_after_next()
        # Clients and balancers see that it is not ready any more, and those that talk on learn it from their answers.
        await asyncio.sleep(min(GRACE_S, seconds))
        # A listener that closes resets the connections that wait in it: take them all first.
        if self._sweeper is not None:
            self._accept(self._listener)
        loop.remove_reader(self._listener)
        self._listener.close()
        for index, listener in list(self._others.items()):
            self._accept(listener)
            self.stand_back(index)
        await asyncio.sleep(min(GRACE_S, seconds))
        for connection in list(self._connections):
            connection.close_when_idle()
        while self._connections and time.monotonic() < end_s and not hurry():
            await asyncio.sleep(0.005)
        self.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()

    def abort(self) -> None:
        """End every connection at once."""
        for connection in list(self._connections):
            connection.abort()

    def _accept(self, listener: socket.socket) -> None:
        # Every connection that waits, not one a turn of the loop: while a batch runs, many may come.
        loop = asyncio.get_running_loop()
        while True:
            try:
                waiting, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # No descriptors left, say: the socket stays readable, and to try again at once would take all the time.
                log.warning("connections cannot be accepted for %g s: %s", RETRY_S, error)
                loop.remove_reader(listener)
                loop.call_later(RETRY_S, self._accept_again, listener)
                return
            if len(self._connections) + len(self._connecting) >= self._settings.max_connections:
                waiting.close()
                continue
            task = loop.create_task(self._connected(waiting))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def _connected(self, waiting: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        waiting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made = partial(self._connection, waiting)
        try:
            if self._tls is None:
                await loop.connect_accepted_socket(made, waiting)
            else:
                await loop.connect_accepted_socket(
                    made,
                    waiting,
                    ssl=self._tls,
                    ssl_handshake_timeout=self._settings.begun_s,
                    # A client that does not say farewell is not waited for, least of all by a server that drains.
                    ssl_shutdown_timeout=LINGER_S,
                )
        except (OSError, ssl.SSLError) as error:
            log.info("a client was gone before it was accepted: %s", error)
            waiting.close()

    def _connection(self, client: socket.socket) -> Connection:
        # The parser keeps a body only up to the largest that any route takes.
        most = self._most_body_bytes() + MAX_HEAD_BYTES
        reader = RequestReader(most, self._known, max_headers=self._settings.max_headers)
        return Connection(
            self._handle,
            self._connections,
            reader,
            time.monotonic,
            self._refuse,
            lambda: self._draining,
            heard(client),
            self._shed,
        )

    async def _sweep(self) -> None:
        """End connections whose clients fell silent."""
        settings = self._settings
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for connection in list(self._connections):
                connection.sweep(now, settings.idle_s, settings.begun_s)


def listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """Bound sockets for so many front-ends; the kernel spreads the connections over those that listen.

    Raises:
        ServeError: The address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        first = _bound(family, host, port, shared=False)
        if count == 1:
            return [first]
        # Bound alone first: with SO_REUSEPORT another server's port would be taken without a word.
        port = first.getsockname()[1]
        first.close()
        return [_bound(family, host, port, shared=True) for _ in range(count)]
    except OSError as error:
        raise ServeError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port."
        ) from None


def free_grpc_port(settings: Settings) -> int | None:
    """The port of gRPC, chosen now where any free one will do, so that all front-ends share it.

    Raises:
        ServeError: It is taken. gRPC shares its port with whoever has it, so that this is found here and only here.
    """
    if settings.grpc_port is None:
        return None
    try:
        family = socket.getaddrinfo(settings.host, settings.grpc_port, type=socket.SOCK_STREAM)[0][0]
        with _bound(family, settings.host, settings.grpc_port, shared=False) as probe:
            return probe.getsockname()[1]
    except OSError as error:
        raise ServeError(
            f"cannot listen for gRPC on {settings.host}:{settings.grpc_port} ({error.strerror}); choose another --host "
            f"or --grpc-port."
        ) from None


def url_of(listener: socket.socket, tls: bool) -> str:
    """What a client on this machine calls the server."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}/"


def _bound(family: int, host: str, port: int, *, shared: bool) -> socket.socket:
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def tls_of(settings: Settings) -> ssl.SSLContext | None:
    """What connections are encrypted with, if they are.

    Raises:
        ServeError: The TLS files are none.
    """
    if settings.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password: without one, OpenSSL would ask for that of an encrypted key on the terminal, and wait.
        context.load_cert_chain(settings.tls_certificate, settings.tls_key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ServeError(
            f"the TLS certificate {settings.tls_certificate} with the key {settings.tls_key} cannot be used ({error})."
        ) from None
    return context
