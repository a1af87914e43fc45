"""Connections in front of gRPC's library, which bound what it does not.

The library keeps all that it has read of a header block, however long that becomes. Here each client's bytes are passed
on as they are, to the library's own listener on a Unix socket, and the sizes in the heads of their frames are added up.
A connection whose header block is too large, or takes too long, is closed. Beyond the largest number of connections one
that does nothing makes room for a new one, see `OpenConnections`; where none does, a few more are open for two seconds,
for health checks. TLS ends here.
"""

import asyncio
import logging
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast, final

from penstock.core.errors import ServeError
from penstock.serve.exchange.open_connections import OpenConnections, has_bytes
from penstock.serve.exchange.reserved_places import ReservedPlaces
from penstock.serve.grpc.header_blocks import MAX_BLOCK_BYTES, HeaderBlocks
from penstock.serve.grpc.open_calls import AnswerFrames, OpenCalls, goaway
from penstock.serve.settings import LimitSettings
from penstock.serve.streams.quotas import address_block

log = logging.getLogger(__name__)

BACKLOG = 1024
# Pause after an error of accepting, and after the library could not be reached because its backlog was full.
RETRY_S, RECONNECT_S = 0.1, 0.01
SWEEP_S = 0.5
# Unfinished header blocks of all connections take this part of what may be unfinished: the library takes up to 20 times
# their size.
PART = 32
# Bytes that are read of a client at once; fewer, unless the last ones were the payload of large frames.
LARGE_READ_BYTES, READ_BYTES = 1 << 18, 1 << 15
# With more frames in them the client is not read again at once: all such clients together have one part in so many of
# the time, by what the head of a frame costs.
FEW_FRAMES, FRAME_S, SLOWER = 64, 0.5e-6, 4
# Time for what the library has answered to reach the clients of a server that ends.
FLUSH_S = 0.5
TLS_SHUTDOWN_S = 1.0
# Name of an abstract Unix socket.
_PEER = "unix-abstract:"


@final
class FrameGuard:
    """Passes connections on to gRPC, in the running event loop.

    Args:
        listener: The socket that clients connect to.
        limits: Limits and timeouts.
        tls: The TLS context; None for no TLS.
    """

    def __init__(self, listener: socket.socket, limits: LimitSettings, tls: ssl.SSLContext | None) -> None:
        self.limits = limits
        self._listener = listener
        self._inner = -1
        # All clients are read into it, one after the other.
        self.buffer = memoryview(bytearray(LARGE_READ_BYTES))
        self.small = self.buffer[:READ_BYTES]
        self._loop = asyncio.get_running_loop()
        self._tls: dict[str, Any] = {}
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
            self._tls = {
                "ssl": tls,
                "ssl_handshake_timeout": min(limits.request_timeout_s, limits.head_timeout_s),
                "ssl_shutdown_timeout": TLS_SHUTDOWN_S,
            }
        self._connecting: set[asyncio.Task[None]] = set()
        # By the name of the connection's own socket, which is the peer that the library sees.
        self._clients: dict[str, _Client] = {}
        self._open: OpenConnections[_Client] = OpenConnections(has_bytes)
        # Accepted, and waits for one that makes room.
        self._next: tuple[socket.socket, Any] | None = None
        # Those beyond the limit.
        self._reserved: ReservedPlaces[_Client] = ReservedPlaces(self._end_reserved, self._loop.call_later)
        # Those with an unfinished header block, its announced bytes and when it began, the oldest first.
        self._unfinished: dict[_Client, tuple[int, float]] = {}
        self._unfinished_bytes = 0
        self._max_unfinished_bytes = max(MAX_BLOCK_BYTES, (limits.max_unfinished_mib << 20) // PART)
        self._sweeping = False
        # When the next client with many frames is read.
        self._next_s = 0.0

    def bind(self, listen: Callable[[str], object]) -> None:
        """Have the library listen where nobody else can connect.

        Args:
            listen: Called with the address.

        Raises:
            ServeError: There is no place for the socket.
        """
        with TemporaryDirectory(prefix="penstock-grpc-") as folder:
            path = Path(folder) / "s"
            try:
                listen(f"unix:{path}")
                # The name is removed: the file descriptor alone leads to the socket.
                self._inner = os.open(path, os.O_PATH)
            except (RuntimeError, OSError) as error:
                raise ServeError(
                    f"gRPC cannot listen on {path} ({error}); set TMPDIR to a local folder with a short path."
                ) from None

    def start(self) -> None:
        """Accept connections."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._loop.add_reader(self._listener, self._accept)

    def stop_accepting(self) -> None:
        """Accept no further connection."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        if self._next is not None:
            self._next[0].close()
            self._next = None

    async def close(self) -> None:
        """Close the connections, once what the library has answered is on its way."""
        self.stop_accepting()
        end_s = self._loop.time() + FLUSH_S
        while (self._clients or self._connecting) and self._loop.time() < end_s:
            await asyncio.sleep(0.005)
        for task in list(self._connecting):
            task.cancel()
        for client in list(self._clients.values()):
            client.abort()
        if self._inner >= 0:
            os.close(self._inner)
            self._inner = -1

    def peer(self, seen: str) -> tuple[str, int] | None:
        """Return a client's address and port, for the peer that the library sees; None if it is not known."""
        client = self._clients.get(seen.removeprefix(_PEER))
        return None if client is None else client.address

    def hold(self, seen: str, calls: int) -> None:
        """Add to the calls that keep a connection open, for the peer that the library sees.

        Args:
            seen: The peer.
            calls: 1 for a stream that has a whole message, -1 at its end.
        """
        if (client := self._clients.get(seen.removeprefix(_PEER))) is not None:
            client.held += calls

    def _accept(self) -> None:
        # A connection waits once, for those behind it too.
        may_wait = self._next is None
        for _ in range(BACKLOG):
            waited, self._next = self._next, None
            try:
                waiting, address = waited or self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # For example no descriptors are left: the socket stays readable, so an immediate retry would spin.
                log.warning("connections of gRPC cannot be accepted for %g s: %s", RETRY_S, error)
                self._pause_accepting(RETRY_S)
                return
            has_room = self._has_room()
            if not has_room and may_wait and (wait_s := self._open.wait_s(time.monotonic_ns())):
                # The one that makes room is too young yet: all wait for it, for a tenth of a second at most.
                self._next = waiting, address
                self._pause_accepting(wait_s)
                return
            name = f"penstock-{secrets.token_hex(8)}"
            client = _Client(self, waiting, name, (str(address[0]), int(address[1])))
            if has_room:
                self._open.accept(client, waiting, address_block(client.address[0]), time.monotonic_ns())
            else:
                self._reserved.add(client)
            client.connecting = task = self._loop.create_task(self._connect(client))
            self._connecting.add(task)
            task.add_done_callback(partial(self._end_connecting, client))

    def _pause_accepting(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(seconds, self._accept_again)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)
            self._accept()

    def _has_room(self) -> bool:
        """Tell whether a new connection has room, after one that does nothing has made it, where there is none."""
        if self._open.count < self.limits.max_connections:
            return True
        found = self._open.evict(time.monotonic_ns())
        if found is None:
            return False
        client = cast(_Client, found[0])
        if client.transport is None:
            # It has not negotiated TLS.
            with suppress(OSError):
                found[1].shutdown(socket.SHUT_RDWR)
        client.make_room()
        return True

    def _end_reserved(self, client: "_Client") -> None:
        if client.transport is None:
            # It has not negotiated TLS, or the library has not accepted it.
            with suppress(OSError):
                client.socket.shutdown(socket.SHUT_RDWR)
            if client.connecting is not None:
                client.connecting.cancel()
        client.make_room()

    def is_reserved(self, seen: str) -> bool:
        """Tell whether a connection is one beyond the limit, for the peer that the library sees."""
        return self._clients.get(seen.removeprefix(_PEER)) in self._reserved

    async def _connect(self, client: "_Client") -> None:
        library = _Library(self.limits.body_timeout_s, client.answers)
        client.other, library.other = library, client
        inner: socket.socket | None = None
        try:
            client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            inner = socket.socket(socket.AF_UNIX)
            inner.setblocking(False)
            inner.bind(f"\0{client.name}")
            async with asyncio.timeout(self.limits.head_timeout_s):
                await self._reach(inner)
            self._clients[client.name] = client
            await self._loop.create_unix_connection(lambda: library, sock=inner)
            await self._loop.connect_accepted_socket(lambda: client, client.socket, **self._tls)
        except (OSError, ssl.SSLError) as error:
            log.info("a client could not be connected to gRPC: %s", error)
        finally:
            if client.transport is None:
                library.end()
                if inner is not None:
                    inner.close()

    def _end_connecting(self, client: "_Client", task: asyncio.Task[None]) -> None:
        """Forget a client that was not connected, also one whose task was cancelled before it began."""
        self._connecting.discard(task)
        if client.transport is None:
            self.forget(client)
            client.socket.close()

    async def _reach(self, inner: socket.socket) -> None:
        while True:
            try:
                return inner.connect(f"/proc/self/fd/{self._inner}")
            except BlockingIOError:
                await asyncio.sleep(RECONNECT_S)

    def forget(self, client: "_Client") -> None:
        """Drop a connection that is closed."""
        self._clients.pop(client.name, None)
        self._open.discard(client)
        self._reserved.discard(client)
        self.note(client, 0)

    def connected(self, client: "_Client") -> None:
        """Note that a connection is made, TLS included."""
        if not client.unwanted and client not in self._reserved:
            self._open.add(client)

    def note(self, client: "_Client", unfinished_bytes: int) -> None:
        """Note how much of a header block has come; connections that hold too much of them are closed."""
        held, begun_s = self._unfinished.get(client, (0, self._loop.time()))
        self._unfinished_bytes += unfinished_bytes - held
        if not unfinished_bytes:
            self._unfinished.pop(client, None)
            return
        self._unfinished[client] = (unfinished_bytes, begun_s)
        while self._unfinished_bytes > self._max_unfinished_bytes:
            self.drop(next(iter(self._unfinished)), "too many header blocks are unfinished")
        if not self._sweeping:
            self._sweeping = True
            self._loop.call_later(SWEEP_S, self._sweep)

    def wait_s(self, frames: int) -> float:
        """Return the time for which a client that sent so many frames at once is not read."""
        now_s = self._loop.time()
        self._next_s = max(now_s, self._next_s) + frames * FRAME_S * SLOWER
        return self._next_s - now_s

    def _sweep(self) -> None:
        now_s = self._loop.time()
        for client, (_, begun_s) in list(self._unfinished.items()):
            if now_s - begun_s <= self.limits.head_timeout_s:
                break
            self.drop(client, f"its header block was not whole after {self.limits.head_timeout_s:g} s")
        self._sweeping = bool(self._unfinished)
        if self._sweeping:
            self._loop.call_later(SWEEP_S, self._sweep)

    def drop(self, client: "_Client", reason: str) -> None:
        """Close a connection."""
        log.info("a connection of gRPC from %s was closed: %s", client.address[0], reason)
        self.note(client, 0)
        client.abort()


class _Side:
    """One of two connections; what comes is written to the other."""

    def __init__(self, flush_s: float) -> None:
        self.other: _Side = self
        self.transport: asyncio.Transport | None = None
        self._flush_s = flush_s
        # What came before this side was connected: the library's first frame.
        self._early: list[bytes] = []
        self._aborting: asyncio.TimerHandle | None = None
        # The other side has much to write.
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        for part in self._early:
            self.transport.write(part)
        self._early.clear()

    def write(self, data: bytes) -> None:
        """Write bytes, now or when it is connected."""
        if self.transport is None:
            self._early.append(data)
        elif not self.transport.is_closing():
            self.transport.write(data)

    def pause_writing(self) -> None:
        self.other.hold(full=True)

    def resume_writing(self) -> None:
        self.other.hold(full=False)

    def hold(self, *, full: bool) -> None:
        """Read this connection no further, or go on."""
        self._full = full
        if self.transport is None or self.transport.is_closing():
            return
        if full:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def end(self) -> None:
        """Close the connection when it has written all; one that is not read, after a while."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
            self._aborting = asyncio.get_running_loop().call_later(self._flush_s, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._aborting is not None:
            self._aborting.cancel()
        self.other.end()


@final
class _Library(_Side, asyncio.Protocol):
    """The connection to the library that belongs to a client's."""

    def __init__(self, flush_s: float, answers: AnswerFrames) -> None:
        super().__init__(flush_s)
        self._answers = answers

    def data_received(self, data: bytes) -> None:
        self._answers.feed(data)
        self.other.write(data)


@final
class _Client(_Side, asyncio.BufferedProtocol):
    """A client's connection, whose header blocks are bounded.

    Attributes:
        socket: Its socket.
        connecting: Its task until it is connected.
        held: Streams that keep it open, because they have a whole message.
        unwanted: It made room.
    """

    def __init__(self, guard: FrameGuard, client: socket.socket, name: str, address: tuple[str, int]) -> None:
        super().__init__(guard.limits.body_timeout_s)
        self.socket, self.name, self.address = client, name, address
        self.connecting: asyncio.Task[None] | None = None
        self._guard = guard
        self._calls = OpenCalls()
        self.answers = AnswerFrames(self._calls)
        self.held, self.unwanted = 0, False
        self._blocks = HeaderBlocks(self._calls)
        self._unfinished_bytes = 0
        self._large = False
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._guard.connected(self)
        library = self.other.transport
        if library is None or library.is_closing():
            self.end()
        elif self.unwanted:
            self.abort()

    def unused(self) -> tuple[int, bool] | None:
        """Tell since when there is no whole call, see `Evictable`."""
        calls = self._calls
        if self.transport is None:
            return calls.idle_since_ns, True  # TLS is not negotiated yet
        if calls.in_use or self.held or self._full or self._waiting is not None:
            return None
        if self.transport.get_write_buffer_size():
            return None
        begun_ns = calls.partial_since_ns
        return (calls.idle_since_ns, False) if begun_ns is None else (begun_ns, True)

    def make_room(self) -> None:
        """Close the connection; its client sends what was not answered over another one."""
        self.unwanted = True
        if self.transport is None or self.transport.is_closing():
            return
        if self.answers.at_boundary:
            self.transport.write(goaway(self._calls.last_taken))
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            self.transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._guard.buffer if self._large else self._guard.small

    def buffer_updated(self, nbytes: int) -> None:
        data, blocks = bytes(self._guard.buffer[:nbytes]), self._blocks
        if not blocks.feed(data):
            self._guard.drop(self, f"its header block has more than {MAX_BLOCK_BYTES:,} bytes")
            return
        self._large = nbytes >= READ_BYTES and blocks.begun <= FEW_FRAMES
        self.other.write(data)
        if blocks.unfinished_bytes != self._unfinished_bytes:
            self._unfinished_bytes = blocks.unfinished_bytes
            self._guard.note(self, self._unfinished_bytes)
        if blocks.begun > FEW_FRAMES and self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
            wait_s = self._guard.wait_s(blocks.begun)
            self._waiting = asyncio.get_running_loop().call_later(wait_s, self._go_on)

    def hold(self, *, full: bool) -> None:
        if full or self._waiting is None:
            super().hold(full=full)
        else:
            self._full = False

    def _go_on(self) -> None:
        self._waiting = None
        if not self._full:
            self.hold(full=False)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._guard.forget(self)
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()
