"""A client's side of a live stream, for threads and for asyncio; what they say and hear is in `_Talk`."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from math import ceil, prod
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, final

import numpy as np
import orjson
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from penstock.core.errors import (
    ComputeFailed,
    InvalidInput,
    NotUnderstood,
    Overloaded,
    PenstockError,
    RequestError,
    TimedOut,
    TooLarge,
    TooSlow,
    Unreachable,
    UnsupportedContent,
)
from penstock.core.spec import Array
from penstock.serve import frames
from penstock.serve.exchange import Answer, Attempt, Lost, Outcome, Steps, Terms

Encoding = Literal["pcm_s16le", "pcm_f32le", "mulaw", "wav", "raw"]

# Bytes of a WAV in one message: less than a second of any that there is.
WAV_PIECE = 4_000
_DTYPES = {"pcm_s16le": np.dtype("<i2"), "pcm_f32le": np.dtype("<f4"), "mulaw": np.dtype("u1"), "wav": np.dtype("u1")}
_ERRORS: dict[int, type[RequestError]] = {
    frames.INVALID: InvalidInput,
    frames.BROKEN: InvalidInput,
    frames.POLICY: InvalidInput,
    frames.UNSUPPORTED: UnsupportedContent,
    frames.TOO_BIG: TooLarge,
    frames.FAILED: ComputeFailed,
    frames.RESTART: Overloaded,
    frames.TRY_LATER: Overloaded,
    frames.GOING_AWAY: Overloaded,
    frames.IDLE: TooSlow,
}
# What a connection or a handshake ends with where there is no answer of HTTP.
_GONE = (OSError, EOFError, InvalidHandshake)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamResult:
    """What came of one message.

    Args:
        seq: Its number, from 0; of what the stream's end releases, the number after the last.
        event: What the application makes of its output; None for nothing.
        output: With binary events, the output's frames, float32, flat.
        last: Whether the stream ends with it.
    """

    seq: int
    event: Any = None
    output: Array | None = None
    last: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What a client wants of a stream, see `Client.stream`."""

    rate_hz: float | None
    encoding: Encoding | None
    events: Literal["json", "binary"]
    latency_ms: float | None

    def start(self) -> str:
        """The first message."""
        return orjson.dumps({"type": "start"} | asdict(self)).decode()


@final
class _Talk:
    """What is said and heard on one stream, without its socket."""

    def __init__(self, terms: Terms, wishes: Wishes, ready: str | bytes) -> None:
        self.terms = terms
        self.ready = _json_of(ready, terms)
        if self.ready.get("type") != "ready":
            raise NotUnderstood(f"{terms.url} answered a start with {str(ready)[:60]!r}; is it a Penstock server?")
        self._encoding: str = self.ready["encoding"]
        ratio = (wishes.rate_hz or self.ready["rate_hz"]) / self.ready["rate_hz"]
        self._piece_frames = max(1, ceil(self.ready["chunk_frames"] * ratio))
        self._next = 0
        self.ended = False

    def messages(self, samples: Array | bytes | bytearray | memoryview) -> Iterator[bytes]:
        """The messages that carry some samples."""
        if self.ended:
            raise InvalidInput("The stream has ended; open another one for more samples.")
        raw, size = self._raw(samples)
        for at in range(0, len(raw), size):
            yield self._next.to_bytes(4, "little") + raw[at : at + size]
            self._next += 1

    def _raw(self, samples: Array | bytes | bytearray | memoryview) -> tuple[memoryview, int]:
        frame_bytes = 1
        if isinstance(samples, np.ndarray):
            wanted = _DTYPES.get(self._encoding, samples.dtype)
            if samples.dtype != wanted:
                raise InvalidInput(f"The samples are {samples.dtype}; {self._encoding} takes {wanted}.")
            frame_bytes = samples.dtype.itemsize * prod(samples.shape[1:])
            samples = samples.tobytes()
        elif self._encoding in _DTYPES:
            frame_bytes = _DTYPES[self._encoding].itemsize
        raw = memoryview(samples).cast("B")
        if self._encoding == "wav":
            return raw, WAV_PIECE
        if self._encoding == "raw" and frame_bytes == 1:
            return raw, max(1, len(raw))  # whoever sends bytes of another signal knows its frames
        return raw, self._piece_frames * frame_bytes

    def result(self, message: str | bytes) -> StreamResult | None:
        """What a message says; None where the server has ended the stream."""
        if isinstance(message, bytes):
            return StreamResult(
                seq=int.from_bytes(message[:4], "little"), output=np.frombuffer(message, "<f4", -1, 8).copy()
            )
        said = _json_of(message, self.terms)
        if said.get("type") == "end":
            return None
        try:
            return StreamResult(seq=said["seq"], event=said["event"], last=said.get("last", False))
        except KeyError:
            raise NotUnderstood(f"{self.terms.url} said {message[:60]!r}; is it a Penstock server?") from None

    def lost(self, error: ConnectionClosed) -> NoReturn:
        """Say why a connection ended before its stream did."""
        _lost(error, self.terms)

    def late(self) -> NoReturn:
        """Say that nothing came."""
        seconds = self.terms.timeout_s
        raise TimedOut(f"{self.terms.url} said nothing for {seconds:g} s; allow more with timeout_s.") from None


@final
class ClientStream:
    """A live stream that is open, for one thread that sends and one that reads, or one that does both.

    Args:
        connection: The WebSocket.
        talk: What is said on it.
    """

    def __init__(self, connection: ClientConnection, talk: _Talk) -> None:
        self._connection = connection
        self._talk = talk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[StreamResult]:
        """The results as they come, until the stream has ended."""
        talk = self._talk
        while True:
            try:
                message = self._connection.recv(talk.terms.timeout_s if talk.ended else None)
            except ConnectionClosed as error:
                talk.lost(error)
            except TimeoutError:
                talk.late()
            result = talk.result(message)
            if result is None:
                return
            yield result

    @property
    def ready(self) -> dict[str, Any]:
        """What the server said of the stream: `chunk_frames`, `chunk_ms`, `window` and so on."""
        return self._talk.ready

    def send(self, samples: Array | bytes | bytearray | memoryview) -> None:
        """Send samples, of any number: an array of the encoding's dtype, or its bytes; of a WAV, any piece.

        Raises:
            RequestError: The server has ended the stream.
            ClientError: The connection broke.
        """
        try:
            for message in self._talk.messages(samples):
                self._connection.send(message)
        except ConnectionClosed as error:
            self._talk.lost(error)

    def end(self) -> Iterator[StreamResult]:
        """Say that no more samples come; gives the results that are still to come."""
        self._talk.ended = True
        try:
            self._connection.send('{"type":"end"}')
        except ConnectionClosed as error:
            self._talk.lost(error)
        return iter(self)

    def close(self) -> None:
        """Leave, whether or not the stream has ended."""
        self._connection.close()


@final
class AsyncClientStream:
    """`ClientStream` for asyncio: the same calls, to be awaited, and `async for`.

    Args:
        connection: The WebSocket.
        talk: What is said on it.
    """

    def __init__(self, connection: AsyncConnection, talk: _Talk) -> None:
        self._connection = connection
        self._talk = talk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[StreamResult]:
        """The results as they come, until the stream has ended."""
        talk = self._talk
        while True:
            try:
                async with asyncio.timeout(talk.terms.timeout_s if talk.ended else None):
                    message = await self._connection.recv()
            except ConnectionClosed as error:
                talk.lost(error)
            except TimeoutError:
                talk.late()
            result = talk.result(message)
            if result is None:
                return
            yield result

    @property
    def ready(self) -> dict[str, Any]:
        """As `ClientStream.ready`."""
        return self._talk.ready

    async def send(self, samples: Array | bytes | bytearray | memoryview) -> None:
        """As `ClientStream.send`."""
        try:
            for message in self._talk.messages(samples):
                await self._connection.send(message)
        except ConnectionClosed as error:
            self._talk.lost(error)

    async def end(self) -> AsyncIterator[StreamResult]:
        """As `ClientStream.end`: `async for result in await stream.end()`."""
        self._talk.ended = True
        try:
            await self._connection.send('{"type":"end"}')
        except ConnectionClosed as error:
            self._talk.lost(error)
        return aiter(self)

    async def close(self) -> None:
        """As `ClientStream.close`."""
        await self._connection.close()


def opened(
    terms: Terms, steps: Steps[Answer], wishes: Wishes, tls: ssl.SSLContext | None, sleep: Callable[[float], None]
) -> ClientStream:
    """Open a stream, with the attempts and waits of `steps`.

    Raises:
        RequestError: The server refused.
        ClientError: No answer came.
    """
    outcome: Outcome | None = None
    connection: ClientConnection | None = None
    while True:
        try:
            attempt = next(steps) if outcome is None else steps.send(outcome)
        except StopIteration:
            break
        if attempt.wait_s > 0:
            sleep(attempt.wait_s)
        try:
            # Entered at once; whoever gets the stream leaves it.
            connection = connect(**_options(terms, attempt, tls), max_queue=None).__enter__()
            outcome = _WELL
        except (*_GONE, TimeoutError) as error:
            outcome = _outcome(error)
    assert connection is not None
    try:
        connection.send(wishes.start())
        return ClientStream(connection, _Talk(terms, wishes, connection.recv(terms.timeout_s)))
    except (ConnectionClosed, TimeoutError, PenstockError) as error:
        connection.close()
        _refused(error, terms)


async def opened_async(
    terms: Terms,
    steps: Steps[Answer],
    wishes: Wishes,
    tls: ssl.SSLContext | None,
    sleep: Callable[[float], Awaitable[None]],
) -> AsyncClientStream:
    """`opened` for asyncio."""
    outcome: Outcome | None = None
    connection: AsyncConnection | None = None
    while True:
        try:
            attempt = next(steps) if outcome is None else steps.send(outcome)
        except StopIteration:
            break
        if attempt.wait_s > 0:
            await sleep(attempt.wait_s)
        try:
            connection = await connect_async(**_options(terms, attempt, tls), max_queue=None)
            outcome = _WELL
        except (*_GONE, TimeoutError) as error:
            outcome = _outcome(error)
    assert connection is not None
    try:
        await connection.send(wishes.start())
        async with asyncio.timeout(terms.timeout_s):
            ready = await connection.recv()
        return AsyncClientStream(connection, _Talk(terms, wishes, ready))
    except (ConnectionClosed, TimeoutError, PenstockError) as error:
        await connection.close()
        _refused(error, terms)


_WELL = Answer(200, {}, b"")


def _options(terms: Terms, attempt: Attempt, tls: ssl.SSLContext | None) -> dict[str, Any]:
    url = terms.url.rstrip("/").replace("http", "ws", 1) + attempt.call.path
    headers = {name: value for name, value in attempt.call.headers.items() if name != "Accept-Encoding"}
    # Environment variables are not read, and what is compressed would cost the server more than the network saves.
    return {
        "uri": url,
        "ssl": tls,
        "additional_headers": headers,
        "open_timeout": attempt.timeout_s,
        "compression": None,
        "proxy": None,
        "max_size": None,
        # A stream that is slowed reads no pings either, and must not be ended for want of a pong.
        "ping_interval": None,
    }


def _outcome(error: Exception) -> Outcome:
    if isinstance(error, InvalidStatus):
        headers = {name.lower(): value for name, value in error.response.headers.raw_items()}
        return Answer(error.response.status_code, headers, bytes(error.response.body or b""))
    return Lost(str(error) or type(error).__name__, isinstance(error, TimeoutError))


def _refused(error: Exception, terms: Terms) -> NoReturn:
    if isinstance(error, ConnectionClosed):
        _lost(error, terms)
    if isinstance(error, TimeoutError):
        raise TimedOut(f"{terms.url} did not say that it is ready within {terms.timeout_s:g} s.") from None
    raise error


def _lost(error: ConnectionClosed, terms: Terms) -> NoReturn:
    received = error.rcvd
    if received is None:
        raise Unreachable(f"{terms.url} hung up in the middle of a stream; is it still running?") from None
    kind = _ERRORS.get(received.code, RequestError)
    raise kind(received.reason or f"The server ended the stream with code {received.code}.") from None


def _json_of(message: str | bytes, terms: Terms) -> dict[str, Any]:
    try:
        said = orjson.loads(message)
    except orjson.JSONDecodeError:
        said = None
    if not isinstance(said, dict):
        raise NotUnderstood(f"{terms.url} said {message[:60]!r}, which no Penstock server says.")
    return said
