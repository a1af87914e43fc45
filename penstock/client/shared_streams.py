"""Many live streams on one connection, for threads and for asyncio: `Client.streams` and `AsyncClient.streams`."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal, Self, final

from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.exceptions import ConnectionClosed, ConnectionClosedError
from websockets.frames import Close, CloseCode
from websockets.sync.client import ClientConnection

from penstock.client.calls import Calls
from penstock.client.retry import Attempt, ClientConfig, NoAnswer, Outcome, run, run_async
from penstock.client.shared_parts import SharedParts, answer_of_close
from penstock.client.stream import AsyncClientStream, ClientStream, Encoding, StreamOptions, StreamProtocol
from penstock.client.web_socket import OPENED, opening
from penstock.core.errors import InvalidInput
from penstock.core.speech.hot_words import HotWord
from penstock.core.streams.stream_entries import messages_of


@final
class SharedStreams:
    """A connection that any number of live streams share; each stream is a `ClientStream`, for any thread.

    The server answers and ends each alone. `send` waits while too many messages of its stream are unanswered, and holds
    up no other stream. `Client.streams` opens it; use it in a `with`.

    Args:
        config: Configuration of the client.
        calls: Its calls.
        connection: The WebSocket.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self, config: ClientConfig, calls: Calls, connection: ClientConnection, sleep: Callable[[float], None]
    ) -> None:
        self._config, self._calls, self._connection, self._sleep = config, calls, connection, sleep
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._parts = SharedParts()
        self._gathered = threading.local()
        self._reader = threading.Thread(target=self._read, name="penstock-streams", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(
        self,
        name: str,
        *,
        rate_hz: float | None = None,
        encoding: Encoding | None = None,
        events: Literal["json", "binary"] = "json",
        latency_ms: float | None = None,
        hot_words: Sequence[HotWord | str] | None = None,
    ) -> ClientStream:
        """Open a live stream to an application on this connection; the arguments are those of `Client.stream`.

        Raises:
            RequestError: The server refused.
            ClientError: No response came, or the connection broke.
        """
        options = StreamOptions(
            rate_hz=rate_hz, encoding=encoding, events=events, latency_ms=latency_ms, hot_words=hot_words
        )
        opened: list[ClientStream] = []

        def send(attempt: Attempt) -> Outcome:
            part = _Part(self._parts, self._lock, self._put, self._flush)
            try:
                with self._writing:
                    start = part.begin(name, options)
                    self._connection.send(start)
                ready = part.recv(attempt.timeout_s)
            except TimeoutError:
                part.close()
                return NoAnswer("", timed_out=True)
            except ConnectionClosed as error:
                if self._parts.lost is not None:
                    raise
                return answer_of_close(error)
            protocol = part.state.protocol = StreamProtocol(self._config, options, ready)
            opened.append(ClientStream(part, protocol))
            return OPENED

        with opening(self._config):
            run(self._calls.shared(), send, self._sleep)
        return opened[0]

    @contextmanager
    def together(self) -> Generator[None]:
        """Send what this thread sends meanwhile, in any of the streams, in as few messages as hold it.

        with shared.together():
            for stream, piece in zip(streams, pieces):
                stream.send(piece)
        """
        if getattr(self._gathered, "entries", None) is not None:
            # Within another `together`, which sends it.
            yield
            return
        self._gathered.entries = []
        try:
            yield
        finally:
            with opening(self._config):
                self._flush()
            del self._gathered.entries

    def close(self) -> None:
        """Close the connection, and with it all streams."""
        self._connection.close()
        self._reader.join()

    def _put(self, entry: bytes) -> None:
        gathered: list[bytes] | None = getattr(self._gathered, "entries", None)
        if gathered is None:
            with self._writing:
                self._connection.send(entry)
        else:
            gathered.append(entry)

    def _flush(self) -> None:
        """Send what this thread has gathered: it may have to wait."""
        gathered: list[bytes] = getattr(self._gathered, "entries", [])
        if gathered:
            with self._writing:
                for message in messages_of(gathered):
                    self._connection.send(message)
            gathered.clear()

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                with self._lock:
                    self._parts.receive(message)
        except ConnectionClosed as error:
            lost = error
        except InvalidInput:
            self._connection.close(CloseCode.INVALID_DATA)
            lost = _UNREADABLE
        with self._lock:
            self._parts.lose(lost)


@final
class _Part:
    """One stream's part of a connection, as its wire."""

    def __init__(
        self,
        parts: SharedParts,
        lock: threading.Lock,
        put: Callable[[bytes], None],
        flush: Callable[[], None],
    ) -> None:
        self._parts, self._put, self._flush = parts, put, flush
        self._changed = threading.Condition(lock)

    def begin(self, name: str, options: StreamOptions) -> bytes:
        """Join the connection; returns the start."""
        with self._changed:
            self.state = self._parts.begin(self._changed.notify_all)
        return self.state.start(name, options)

    def send(self, message: str | bytes, /) -> None:
        """Send a message, when there is room for it."""
        state = self.state
        with self._changed:
            waits = not (state.error or state.has_room)
        if waits:
            self._flush()
        with self._changed:
            self._changed.wait_for(lambda: state.error or state.has_room)
            state.raise_error()
            entry = state.entry(message)
        self._put(entry)

    def recv(self, timeout: float | None = None, /) -> str | bytes:
        """Wait for a message."""
        state = self.state
        self._flush()
        with self._changed:
            if not self._changed.wait_for(lambda: state.inbox or state.error, timeout):
                raise TimeoutError
            if not state.inbox:
                state.raise_error()
            return state.inbox.popleft()

    def close(self) -> None:
        """Close it, if it is open."""
        with self._changed:
            is_open = self._parts.forget(self.state)
            self.state.lose(_CLOSED)
        if is_open:
            with suppress(ConnectionClosed):
                self._put(self.state.cancel())


@final
class AsyncSharedStreams:
    """`SharedStreams` for asyncio. What several streams send in one iteration of the loop goes out as one message.

    Args:
        config: Configuration of the client.
        calls: Its calls.
        connection: The WebSocket.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self, config: ClientConfig, calls: Calls, connection: AsyncConnection, sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._config, self._calls, self._connection, self._sleep = config, calls, connection, sleep
        self._parts = SharedParts()
        self._unwritten: list[bytes] = []
        self._due = asyncio.Event()
        self._reader = asyncio.create_task(self._read())
        self._writer = asyncio.create_task(self._write())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(
        self,
        name: str,
        *,
        rate_hz: float | None = None,
        encoding: Encoding | None = None,
        events: Literal["json", "binary"] = "json",
        latency_ms: float | None = None,
        hot_words: Sequence[HotWord | str] | None = None,
    ) -> AsyncClientStream:
        """As `SharedStreams.open`."""
        options = StreamOptions(
            rate_hz=rate_hz, encoding=encoding, events=events, latency_ms=latency_ms, hot_words=hot_words
        )
        opened: list[AsyncClientStream] = []

        async def send(attempt: Attempt) -> Outcome:
            part = _AsyncPart(self._parts, self._put)
            try:
                self._put(part.state.start(name, options))
                async with asyncio.timeout(attempt.timeout_s):
                    ready = await part.recv()
            except TimeoutError:
                await part.close()
                return NoAnswer("", timed_out=True)
            except asyncio.CancelledError:
                # Nobody would end it: it would hold its slot until the server's idle timeout.
                await part.close()
                raise
            except ConnectionClosed as error:
                if self._parts.lost is not None:
                    raise
                return answer_of_close(error)
            protocol = part.state.protocol = StreamProtocol(self._config, options, ready)
            opened.append(AsyncClientStream(part, protocol))
            return OPENED

        with opening(self._config):
            await run_async(self._calls.shared(), send, self._sleep)
        return opened[0]

    async def close(self) -> None:
        """Close the connection, and with it all streams."""
        self._writer.cancel()
        await self._connection.close()
        await asyncio.wait([self._reader, self._writer])

    def _put(self, entry: bytes) -> None:
        self._unwritten.append(entry)
        self._due.set()

    async def _write(self) -> None:
        with suppress(ConnectionClosed):
            while True:
                await self._due.wait()
                self._due.clear()
                entries, self._unwritten = self._unwritten, []
                for message in messages_of(entries):
                    await self._connection.send(message)

    async def _read(self) -> None:
        try:
            while True:
                self._parts.receive(await self._connection.recv())
        except ConnectionClosed as error:
            lost = error
        except InvalidInput:
            await self._connection.close(CloseCode.INVALID_DATA)
            lost = _UNREADABLE
        self._parts.lose(lost)


@final
class _AsyncPart:
    """`_Part` for asyncio."""

    def __init__(self, parts: SharedParts, put: Callable[[bytes], None]) -> None:
        self._parts, self._put = parts, put
        self._changed = asyncio.Event()
        self.state = parts.begin(self._changed.set)

    async def send(self, message: str | bytes, /) -> None:
        """Send a message."""
        while not (self.state.error or self.state.has_room):
            await self._change()
        self.state.raise_error()
        self._put(self.state.entry(message))

    async def recv(self) -> str | bytes:
        """Wait for a message."""
        while not (self.state.inbox or self.state.error):
            await self._change()
        if not self.state.inbox:
            self.state.raise_error()
        return self.state.inbox.popleft()

    async def close(self) -> None:
        """Close it, if it is open."""
        if self._parts.forget(self.state):
            self._put(self.state.cancel())
        self.state.lose(_CLOSED)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


_CLOSED = ConnectionClosedError(Close(CloseCode.NORMAL_CLOSURE, "The stream is closed."), None)
_UNREADABLE = ConnectionClosedError(Close(CloseCode.INVALID_DATA, "The server sent what holds no entries."), None)
