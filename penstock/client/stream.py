"""A client's side of a live stream, for threads and for asyncio, over one protocol without sockets."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from math import ceil, prod
from typing import Any, Generic, Literal, Protocol, Self, TypeAlias, TypeVar, final

import numpy as np
import orjson
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.sync.client import ClientConnection

from penstock.client.kept_messages import END, FLUSH
from penstock.client.lasting_stream import AsyncLastingConnection, LastingConnection, Reconnect
from penstock.client.retry import Answer, ClientConfig, Steps
from penstock.client.stream_results import StreamResult, segment_result
from penstock.client.web_socket import open_connection, open_connection_async, opening, translated
from penstock.core.errors import InvalidInput, InvalidResponse, PenstockError, Unreachable
from penstock.core.spec import Array
from penstock.core.speech.hot_words import HotWord

# Attempts to begin a stream that reconnects, and the pause between them.
BEGINNINGS, BEGIN_PAUSE_S = 3, 0.2

Encoding = Literal["pcm_s16le", "pcm_f32le", "mulaw", "wav", "raw"]
Samples: TypeAlias = Array | bytes | bytearray | memoryview


class SyncWire(Protocol):
    """The connection of a stream: its own, or its part of a shared one."""

    def send(self, message: str | bytes, /) -> None:
        """Send a message."""

    def recv(self, timeout: float | None = None, /) -> str | bytes:
        """Wait for a message."""
        ...

    def close(self) -> None:
        """Close it."""


class AsyncWire(Protocol):
    """`SyncWire` for asyncio."""

    async def send(self, message: str | bytes, /) -> None:
        """Send a message."""

    async def recv(self) -> str | bytes:
        """Wait for a message."""
        ...

    async def close(self) -> None:
        """Close it."""


C = TypeVar("C", SyncWire, AsyncWire)

# Bytes of a WAV in one message: less than a second at any sample rate.
WAV_PIECE = 4_000
_DTYPES = {"pcm_s16le": np.dtype("<i2"), "pcm_f32le": np.dtype("<f4"), "mulaw": np.dtype("u1"), "wav": np.dtype("u1")}


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """Options of a stream, see `Client.stream`."""

    rate_hz: float | None
    encoding: Encoding | None
    events: Literal["json", "binary"]
    latency_ms: float | None
    hot_words: Sequence[HotWord | str] | None = None

    def start(self, *, tickets: bool = False, ticket: str | None = None) -> str:
        """The first message, as text.

        Args:
            tickets: Whether to ask for tickets.
            ticket: The ticket with which the stream goes on; None where it begins.
        """
        # Servers before tickets refuse a start with these fields.
        more: dict[str, Any] = {"tickets": True} if tickets else {}
        if ticket is not None:
            more["ticket"] = ticket
        return orjson.dumps({"type": "start"} | asdict(self) | more).decode()


@final
class StreamProtocol:
    """The client's side of one stream's protocol, without a socket.

    Attributes:
        ready: The server's description of the stream.
        window: Number of messages as the last one that may be unanswered where other streams share the connection.
        ended: Whether the client has sent its end.
    """

    def __init__(self, config: ClientConfig, options: StreamOptions, ready: str | bytes) -> None:
        self.config = config
        self.ready = _object_of(ready, config)
        if self.ready.get("type") != "ready":
            raise InvalidResponse(f"{config.url} answered a start with {str(ready)[:60]!r}; is it a Penstock server?")
        self._encoding: str = self.ready["encoding"]
        ratio = (options.rate_hz or self.ready["rate_hz"]) / self.ready["rate_hz"]
        self._piece_frames = max(1, ceil(self.ready["chunk_frames"] * ratio))
        # Of messages that hold a chunk at most, and of any.
        self._windows = max(self.ready["window"], int(1e3 / self.ready["chunk_ms"])), 1
        self.window = self._windows[0]
        self._next = 0
        self.ended = False

    @property
    def sent(self) -> int:
        """Number of messages so far that have a number."""
        return self._next

    @sent.setter
    def sent(self, count: int) -> None:
        self._next = count

    def messages(self, samples: Samples) -> Iterator[bytes]:
        """The messages that carry some samples."""
        if self.ended:
            raise InvalidInput("The stream has ended; open another one for more samples.")
        raw, size = self._raw(samples)
        for at in range(0, len(raw), size):
            yield self._next.to_bytes(4, "little") + raw[at : at + size]
            self._next += 1

    def flush(self) -> str:
        """The message that flushes the stream, which has a number as those with samples."""
        if self.ended:
            raise InvalidInput("The stream has ended; open another one for more samples.")
        self._next += 1
        return FLUSH

    def _raw(self, samples: Samples) -> tuple[memoryview, int]:
        frame_bytes = 1
        # Older servers do not describe a frame: any array of bytes may be sent to them.
        knows_frames = isinstance(samples, np.ndarray) and "frame" in self.ready
        if isinstance(samples, np.ndarray):
            self._check(samples)
            is_frame = list(samples.shape) == self.ready.get("frame")
            frame_bytes = samples.dtype.itemsize * prod(samples.shape if is_frame else samples.shape[1:])
            samples = samples.tobytes()
        elif self._encoding in _DTYPES:
            frame_bytes = _DTYPES[self._encoding].itemsize
        try:
            raw = memoryview(samples).cast("B")
        except TypeError:
            raise InvalidInput(f"The samples are a {type(samples).__name__}; send an array or bytes.") from None
        unknown_frames = self._encoding == "raw" and frame_bytes == 1 and not knows_frames
        self.window = self._windows[unknown_frames or self._encoding == "wav"]
        if self._encoding == "wav":
            return raw, WAV_PIECE
        if unknown_frames:
            return raw, max(1, len(raw))  # only the caller knows the frames of another signal
        return raw, self._piece_frames * frame_bytes

    def _check(self, samples: np.ndarray[Any, Any]) -> None:
        """Refuse an array whose bytes the server would take for other numbers."""
        wanted = _DTYPES.get(self._encoding)
        if wanted is not None and samples.dtype != wanted:
            raise InvalidInput(f"The samples are {samples.dtype}; {self._encoding} takes {wanted}.")
        if wanted is not None and self._encoding != "wav" and prod(samples.shape[1:]) > 1:
            raise InvalidInput(
                f"The samples are {samples.dtype}{list(samples.shape)}; send one channel, {wanted}[frames], such as "
                f"the mean of all."
            )
        if wanted is None and "frame" in self.ready:
            # Servers before these fields say nothing of other signals.
            dtype, frame = np.dtype(self.ready["dtype"]), self.ready["frame"]
            if samples.dtype != dtype or frame not in (list(samples.shape), list(samples.shape[1:])):
                taken = f"{dtype}[{', '.join(['frames', *map(str, frame)])}]"
                raise InvalidInput(
                    f"The samples are {samples.dtype}{list(samples.shape)}; {self.ready['app']!r} takes {taken}."
                )

    def result(self, message: str | bytes) -> StreamResult | None:
        """Read a message; None at the end of the stream."""
        if isinstance(message, bytes):
            return StreamResult(
                seq=int.from_bytes(message[:4], "little"), output=np.frombuffer(message, "<f4", -1, 8).copy()
            )
        fields = _object_of(message, self.config)
        if fields.get("type") == "end":
            return None
        try:
            if "segment" in fields:
                return segment_result(fields, self.config)
            return StreamResult(
                seq=fields["seq"],
                event=fields["event"],
                last=fields.get("last", False),
                flushed=fields.get("flushed", False),
            )
        except KeyError:
            raise InvalidResponse(f"{self.config.url} sent {message[:60]!r}; is it a Penstock server?") from None


class _Stream(Generic[C]):
    """The part that both streams share.

    Args:
        connection: Its connection.
        protocol: The protocol on it.
    """

    def __init__(self, connection: C, protocol: StreamProtocol) -> None:
        self._connection = connection
        self._protocol = protocol

    @property
    def ready(self) -> dict[str, Any]:
        """The server's description of the stream: `chunk_frames`, `chunk_ms`, `window` and so on."""
        return self._protocol.ready

    @property
    def _timeout_s(self) -> float | None:
        # Before the end the time of the next result is unknown: the client may pause.
        return self._protocol.config.timeout_s if self._protocol.ended else None

    def _translated(self) -> AbstractContextManager[None]:
        config = self._protocol.config
        return translated(config, f"sent nothing for {config.timeout_s:g} s; allow more with timeout_s")


@final
class ClientStream(_Stream[SyncWire]):
    """An open live stream, for one thread that sends and one that reads, or one that does both."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[StreamResult]:
        """Iterate over the results as they come, until the end of the stream."""
        with self._translated():
            while (result := self._protocol.result(self._recv())) is not None:
                yield result

    def _recv(self) -> str | bytes:
        # Another thread may end the stream during the wait: the next wait then has a limit.
        while (timeout_s := self._timeout_s) is None and not isinstance(self._connection, LastingConnection):
            with suppress(TimeoutError):
                return self._connection.recv(self._protocol.config.timeout_s)
        return self._connection.recv(timeout_s)

    def send(self, samples: Samples) -> None:
        """Send any number of samples: an array of the encoding's dtype, its bytes, or any piece of a WAV.

        Raises:
            RequestError: The server has ended the stream.
            ClientError: The connection broke.
        """
        with self._translated():
            for message in self._protocol.messages(samples):
                self._connection.send(message)

    def flush(self) -> int:
        """Have the network give all that it holds back of what was sent, and begin anew with what follows.

        Returns:
            The `seq` of the result that has the rest.

        Raises:
            RequestError: The server has ended the stream.
            ClientError: The connection broke.
        """
        with self._translated():
            self._connection.send(self._protocol.flush())
        return self._protocol.sent - 1

    def end(self) -> Iterator[StreamResult]:
        """End the stream; returns the results that are still to come."""
        self._protocol.ended = True
        with self._translated():
            self._connection.send(END)
        return iter(self)

    def close(self) -> None:
        """Close the connection, whether or not the stream has ended."""
        self._connection.close()


@final
class AsyncClientStream(_Stream[AsyncWire]):
    """`ClientStream` for asyncio: the same calls, to be awaited, and `async for`."""

    # Time limit of the wait for a result; None while no task waits.
    _limit: asyncio.Timeout | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[StreamResult]:
        """Iterate over the results as they come, until the end of the stream."""
        with self._translated():
            while True:
                try:
                    async with asyncio.timeout(self._timeout_s) as self._limit:
                        message = await self._connection.recv()
                finally:
                    self._limit = None
                if (result := self._protocol.result(message)) is None:
                    return
                yield result

    async def send(self, samples: Samples) -> None:
        """As `ClientStream.send`."""
        with self._translated():
            for message in self._protocol.messages(samples):
                await self._deliver(message, self._protocol.sent)

    async def flush(self) -> int:
        """As `ClientStream.flush`."""
        before = self._protocol.sent
        with self._translated():
            await self._deliver(self._protocol.flush(), before)
        return self._protocol.sent - 1

    async def _deliver(self, message: str | bytes, before: int) -> None:
        """Send a message that has a number, the first one after `before` others."""
        try:
            await self._connection.send(message)
        except asyncio.CancelledError:
            # A connection writes a message before it waits for room, so that its number is used.
            wire = self._connection
            if isinstance(wire, AsyncLastingConnection):
                self._protocol.sent = wire.sent
            else:
                self._protocol.sent = before + isinstance(wire, AsyncConnection)
            raise

    async def end(self) -> AsyncIterator[StreamResult]:
        """As `ClientStream.end`: `async for result in await stream.end()`."""
        self._protocol.ended = True
        if self._limit is not None:
            # Another task waits already, without a limit.
            self._limit.reschedule(asyncio.get_running_loop().time() + self._protocol.config.timeout_s)
        with self._translated():
            await self._connection.send(END)
        return aiter(self)

    async def close(self) -> None:
        """As `ClientStream.close`."""
        await self._connection.close()


def open_stream(
    config: ClientConfig,
    steps_of: Callable[[], Steps[Answer]],
    options: StreamOptions,
    tls: ssl.SSLContext | None,
    sleep: Callable[[float], None],
    reconnect: Reconnect | None = None,
) -> ClientStream:
    """Open a stream, with the attempts and waits of `steps_of`.

    Raises:
        RequestError: The server refused.
        ClientError: No response came.
    """

    asks = reconnect is not None and reconnect.tickets

    def begin(ticket: str | None = None) -> tuple[ClientConnection, str | bytes]:
        connection = open_connection(config, steps_of(), tls, sleep)
        try:
            with opening(config):
                connection.send(options.start(tickets=asks, ticket=ticket))
                return connection, connection.recv(config.timeout_s)
        except BaseException:
            connection.close_socket()
            raise

    # A server may go away while a stream begins, too.
    left = 1 if reconnect is None else BEGINNINGS
    while True:
        left -= 1
        try:
            connection, ready = begin()
            break
        except Unreachable:
            if not left:
                raise
        sleep(BEGIN_PAUSE_S)
    try:
        protocol = StreamProtocol(config, options, ready)
    except PenstockError:
        connection.close()
        raise
    if reconnect is None:
        return ClientStream(connection, protocol)
    return ClientStream(LastingConnection(connection, protocol.ready, begin, reconnect), protocol)


async def open_stream_async(
    config: ClientConfig,
    steps_of: Callable[[], Steps[Answer]],
    options: StreamOptions,
    tls: ssl.SSLContext | None,
    sleep: Callable[[float], Awaitable[None]],
    reconnect: Reconnect | None = None,
) -> AsyncClientStream:
    """Open a stream in asyncio, as `open_stream` does."""

    asks = reconnect is not None and reconnect.tickets

    async def begin(ticket: str | None = None) -> tuple[AsyncConnection, str | bytes]:
        connection = await open_connection_async(config, steps_of(), tls, sleep)
        try:
            with opening(config):
                await connection.send(options.start(tickets=asks, ticket=ticket))
                async with asyncio.timeout(config.timeout_s):
                    return connection, await connection.recv()
        except BaseException:
            connection.transport.abort()
            raise

    # A server may go away while a stream begins, too.
    left = 1 if reconnect is None else BEGINNINGS
    while True:
        left -= 1
        try:
            connection, ready = await begin()
            break
        except Unreachable:
            if not left:
                raise
        await sleep(BEGIN_PAUSE_S)
    try:
        protocol = StreamProtocol(config, options, ready)
    except PenstockError:
        await connection.close()
        raise
    if reconnect is None:
        return AsyncClientStream(connection, protocol)
    return AsyncClientStream(AsyncLastingConnection(connection, protocol.ready, begin, reconnect), protocol)


def _object_of(message: str | bytes, config: ClientConfig) -> dict[str, Any]:
    try:
        fields = orjson.loads(message)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidResponse(f"{config.url} sent {message[:60]!r}, which no Penstock server sends.")
    return fields
