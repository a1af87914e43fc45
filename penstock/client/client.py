"""Clients of a server: `Client` for threads, `AsyncClient` for asyncio. `calls` holds the requests of both.

A request is sent again at most `retries` times, and always within `timeout_s`:

- after status 503: after the seconds of `Retry-After` and up to a quarter more; without that header after a back-off;
- without a whole response, and after status 502 of a proxy: after a back-off;
- after status 500: once, after a back-off; a second one means that the application fails on this input;
- after any other status, such as 4xx and 504 (the budget is shorter than the network's own time): never.

The back-off after attempt n, counted from 0, is random between 0 and 0.1 s * 2^n, at most 10 s. A wait that would end
after `timeout_s` raises the refusal at once. Sending a request twice is harmless: inference has no side effect.
"""

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal, Self, final

from penstock.client.calls import Calls, Content
from penstock.client.generated_steps import AsyncGeneratedSteps, GeneratedSteps, opening, opening_async
from penstock.client.http import answer_of, httpx2, no_answer
from penstock.client.lasting_stream import Reconnect
from penstock.client.retry import Attempt, ClientConfig, NoAnswer, Outcome, Priority, Steps, T, run, run_async
from penstock.client.shared_streams import AsyncSharedStreams, SharedStreams
from penstock.client.stream import (
    AsyncClientStream,
    ClientStream,
    Encoding,
    StreamOptions,
    open_stream,
    open_stream_async,
)
from penstock.client.web_socket import open_connection, open_connection_async
from penstock.core.errors import PenstockError
from penstock.core.speech.hot_words import HotWord

# Shorter than the server's idle timeout, so that the server does not close a connection under a request.
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=60.0)
# Of an attempt whose time is over before its response is whole.
_OVERDUE = NoAnswer("", timed_out=True)


@final
class Client:
    """A client for any number of threads; connections are kept and reused.

        with penstock.Client("http://localhost:8000") as client:
            client.ask("digits", Path("three.png").read_bytes())

    A request is sent again after status 503 (as `Retry-After` says), 502, once after 500, and if the connection was
    refused or broke before the response; never after any other status, and never beyond `timeout_s`. A request may be
    computed twice, which is harmless.

    Environment variables are not read. Pass a `transport` for a proxy, a Unix socket or your own TLS:
    `httpx2.HTTPTransport(proxy=..., uds=..., verify=...)`.

    Args:
        url: URL of the server, with the path before its routes if a proxy adds one.
        api_key: Sent with every request as `Authorization: Bearer KEY`.
        latency_ms: Latency budget of an inference, per attempt, in milliseconds; None for the server's.
        priority: `"interactive"` or `"background"`; None for the server's default.
        retries: Maximum number of times that a request is sent again.
        timeout_s: Time limit of a call with all its attempts and waits, in seconds, also where a response comes slowly.
            Where the network falls silent after the connection was made, or in the middle of a response, a call may
            take longer: a silence may last as long as its whole attempt.
        transport: Carries requests instead of the client's own connections.
        clock_s: A monotonic clock in seconds.
        sleep: Waits for a number of seconds.
        random: Gives numbers from 0 to below 1.

    Raises:
        ClientError: An argument is out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        latency_ms: float | None = None,
        priority: Priority | None = None,
        retries: int = 3,
        timeout_s: float = 30.0,
        transport: httpx2.BaseTransport | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = random.random,
    ) -> None:
        config = ClientConfig(
            url=url, api_key=api_key, latency_ms=latency_ms, priority=priority, retries=retries, timeout_s=timeout_s
        )
        self._config = config
        self._calls = Calls(config, clock_s=clock_s, random=random)
        self._clock_s, self._sleep = clock_s, sleep
        self._http = httpx2.Client(base_url=url, transport=transport, limits=_LIMITS, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ask(
        self,
        name: str,
        content: Content,
        *,
        content_type: str = "",
        latency_ms: float | None = None,
        priority: Priority | None = None,
    ) -> Any:
        """Get the application's reply to one input.

        Args:
            name: Name of the application.
            content: Bytes of a picture or of anything else that the application decodes; a text; or numbers of its
                input's shape, as nested lists or an array; several inputs as a dictionary of these by name.
            content_type: Type of the bytes, such as `"image/png"`, by default detected by the server; of a text, by
                default `"text/plain"`.
            latency_ms: Latency budget of this request in milliseconds; by default the client's.
            priority: Priority of this request; by default the client's.

        Returns:
            The reply's JSON values.

        Raises:
            RequestError: The server refused; the class says why.
            ClientError: No response came.
        """
        return self._run(
            self._calls.ask(name, content, content_type=content_type, latency_ms=latency_ms, priority=priority)
        )

    def predict(
        self, name: str, array: Any, *, latency_ms: float | None = None, priority: Priority | None = None
    ) -> Any:
        """Get the network's output for one chunk, or for several at once. Numbers are sent as raw bytes.

        Args:
            name: Name of the application.
            array: One chunk of the input's shape, or several, `[n, ...]`; numbers that the input's
                dtype can hold, alone or as a dictionary by the input's name. Several inputs, or inputs of varying
                length: a dictionary of arrays by name, or a list of such dictionaries; those of equal lengths share a
                request.
            latency_ms: Latency budget of this request in milliseconds; by default the client's.
            priority: Priority of this request; by default the client's.

        Returns:
            The output, of the output's shape, or `[n, ...]` for several. Several outputs, or outputs of varying length:
            a dictionary of arrays by name without padding, or a list of such dictionaries.

        Raises:
            RequestError: The server refused, or the array is not what the application takes.
            ClientError: No response came, or it does not match the server's description.
        """
        return self._run(self._calls.predict(name, array, latency_ms=latency_ms, priority=priority))

    def generate(
        self,
        name: str,
        content: Content,
        *,
        content_type: str = "",
        latency_ms: float | None = None,
        priority: Priority | None = None,
    ) -> GeneratedSteps:
        """Get the outputs of an answer that takes steps, each as soon as it is computed.

            for step in client.generate("translator", b"Good morning.", content_type="text/plain"):
                print(step["token"])

        Args:
            name: Name of the application, one that generates.
            content: As for `ask`.
            content_type: As for `ask`.
            latency_ms: Latency budget up to the first output in milliseconds; by default the client's.
            priority: Priority of this request; by default the client's.

        Returns:
            An iterator over the outputs of the steps, by name as JSON values; at its end `ended` says why the answer
            ended, and `reply` is the application's reply to it. Closing it cancels the answer.

        Raises:
            RequestError: The server refused.
            ClientError: No response came.
        """
        opened: list[httpx2.Response] = []
        steps = self._calls.generate(name, content, content_type=content_type, latency_ms=latency_ms, priority=priority)
        try:
            run(steps, opening(self._http, partial(_request, self._http), opened), self._sleep)
        except PenstockError:
            # A response that is not one of steps, too.
            for response in opened:
                response.close()
            raise
        return GeneratedSteps(self._config, opened[-1])

    def apps(self) -> list[dict[str, Any]]:
        """List the applications: name, description, input, output and accepted content types of each."""
        return self._run(self._calls.apps())

    def ready(self) -> bool:
        """Check once whether the server accepts requests; False if it cannot be reached."""
        return self._run(self._calls.ready())

    def stats(self) -> dict[str, Any]:
        """Get the server's counts and histograms since its start."""
        return self._run(self._calls.stats())

    def load(self, name: str) -> None:
        """Load a model of the server's repository, and return when it is ready."""
        self._run(self._calls.load(name))

    def unload(self, name: str) -> None:
        """Unload a model."""
        self._run(self._calls.unload(name))

    def stream(
        self,
        name: str,
        *,
        rate_hz: float | None = None,
        encoding: Encoding | None = None,
        events: Literal["json", "binary"] = "json",
        latency_ms: float | None = None,
        hot_words: Sequence[HotWord | str] | None = None,
        tls: ssl.SSLContext | None = None,
        reconnect: Reconnect | None = None,
    ) -> ClientStream:
        """Open a live stream to an application; use it in a `with`.

            with client.stream("hark", rate_hz=48_000) as stream:
                for piece in microphone:
                    stream.send(piece)
                for result in stream.end():
                    print(result.event)

        A chain whose first part is live gives a `SegmentResult` for what its other parts answer, too.

        Args:
            name: Name of the application or chain.
            rate_hz: Sample rate of the signal; by default the application's.
            encoding: Encoding of the samples; by default 16-bit samples, and the input's dtype for other signals.
            events: `"json"` for the application's events, `"binary"` for the outputs themselves.
            latency_ms: Time from a chunk's arrival to its result, in milliseconds; by default the server's.
            hot_words: Words and phrases that are likelier, where an application decodes utterances again at their ends.
            tls: For `https` with your own certificates.
            reconnect: How to go on after the connection or the server is gone: `penstock.Reconnect()`. None ends the
                stream with its connection. That of a chain always ends.

        Raises:
            RequestError: The server refused.
            ClientError: No response came.
        """
        options = StreamOptions(
            rate_hz=rate_hz, encoding=encoding, events=events, latency_ms=latency_ms, hot_words=hot_words
        )
        return open_stream(self._config, partial(self._calls.stream, name), options, tls, self._sleep, reconnect)

    def streams(self, *, tls: ssl.SSLContext | None = None) -> SharedStreams:
        """Open a connection that many live streams share, of any applications; use it in a `with`.

            with client.streams() as shared:
                streams = [shared.open("hark") for _ in range(100)]

        It costs server and client less than a connection for each stream. Each stream is answered, and ends, alone.

        Args:
            tls: For `https` with your own certificates.

        Raises:
            RequestError: The server refused.
            ClientError: No response came.
        """
        connection = open_connection(self._config, self._calls.shared(), tls, self._sleep)
        return SharedStreams(self._config, self._calls, connection, self._sleep)

    def _run(self, steps: Steps[T]) -> T:
        return run(steps, self._send, self._sleep)

    def _send(self, attempt: Attempt) -> Outcome:
        end_s, parts = self._clock_s() + attempt.timeout_s, list[bytes]()
        try:
            response = self._http.send(_request(self._http, attempt), stream=True)
            try:
                for part in response.iter_bytes():
                    parts.append(part)
                    if self._clock_s() > end_s:
                        return _OVERDUE
            finally:
                response.close()
        except httpx2.RequestError as error:
            return no_answer(error)
        return answer_of(response, b"".join(parts))


@final
class AsyncClient:
    """`Client` for asyncio: the same arguments, the same calls, to be awaited.

        async with penstock.AsyncClient("http://localhost:8000") as client:
            replies = await asyncio.gather(*(client.ask("digits", picture) for picture in pictures))

    Args:
        url: As for `Client`, like the others.
        api_key: Sent with every request as `Authorization: Bearer KEY`.
        latency_ms: Latency budget of an inference, per attempt, in milliseconds; None for the server's.
        priority: `"interactive"` or `"background"`; None for the server's default.
        retries: Maximum number of times that a request is sent again.
        timeout_s: Time limit of a call with all its attempts and waits, in seconds.
        transport: Carries requests instead of the client's own connections, `httpx2.AsyncHTTPTransport(...)`.
        clock_s: A monotonic clock in seconds.
        sleep: Waits for a number of seconds.
        random: Gives numbers from 0 to below 1.

    Raises:
        ClientError: An argument is out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        latency_ms: float | None = None,
        priority: Priority | None = None,
        retries: int = 3,
        timeout_s: float = 30.0,
        transport: httpx2.AsyncBaseTransport | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random: Callable[[], float] = random.random,
    ) -> None:
        config = ClientConfig(
            url=url, api_key=api_key, latency_ms=latency_ms, priority=priority, retries=retries, timeout_s=timeout_s
        )
        self._config = config
        self._calls = Calls(config, clock_s=clock_s, random=random)
        self._clock_s, self._sleep = clock_s, sleep
        self._http = httpx2.AsyncClient(base_url=url, transport=transport, limits=_LIMITS, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(
        self,
        name: str,
        content: Content,
        *,
        content_type: str = "",
        latency_ms: float | None = None,
        priority: Priority | None = None,
    ) -> Any:
        """As `Client.ask`."""
        return await self._run(
            self._calls.ask(name, content, content_type=content_type, latency_ms=latency_ms, priority=priority)
        )

    async def predict(
        self, name: str, array: Any, *, latency_ms: float | None = None, priority: Priority | None = None
    ) -> Any:
        """As `Client.predict`."""
        return await self._run(self._calls.predict(name, array, latency_ms=latency_ms, priority=priority))

    async def generate(
        self,
        name: str,
        content: Content,
        *,
        content_type: str = "",
        latency_ms: float | None = None,
        priority: Priority | None = None,
    ) -> AsyncGeneratedSteps:
        """As `Client.generate`: `async for step in await client.generate(...)`."""
        opened: list[httpx2.Response] = []
        steps = self._calls.generate(name, content, content_type=content_type, latency_ms=latency_ms, priority=priority)
        try:
            await run_async(steps, opening_async(self._http, partial(_request, self._http), opened), self._sleep)
        except PenstockError:
            for response in opened:
                await response.aclose()
            raise
        return AsyncGeneratedSteps(self._config, opened[-1])

    async def apps(self) -> list[dict[str, Any]]:
        """As `Client.apps`."""
        return await self._run(self._calls.apps())

    async def ready(self) -> bool:
        """As `Client.ready`."""
        return await self._run(self._calls.ready())

    async def stats(self) -> dict[str, Any]:
        """As `Client.stats`."""
        return await self._run(self._calls.stats())

    async def load(self, name: str) -> None:
        """As `Client.load`."""
        await self._run(self._calls.load(name))

    async def unload(self, name: str) -> None:
        """As `Client.unload`."""
        await self._run(self._calls.unload(name))

    async def stream(
        self,
        name: str,
        *,
        rate_hz: float | None = None,
        encoding: Encoding | None = None,
        events: Literal["json", "binary"] = "json",
        latency_ms: float | None = None,
        hot_words: Sequence[HotWord | str] | None = None,
        tls: ssl.SSLContext | None = None,
        reconnect: Reconnect | None = None,
    ) -> AsyncClientStream:
        """As `Client.stream`: `async with await client.stream("hark") as stream`."""
        options = StreamOptions(
            rate_hz=rate_hz, encoding=encoding, events=events, latency_ms=latency_ms, hot_words=hot_words
        )
        steps_of = partial(self._calls.stream, name)
        return await open_stream_async(self._config, steps_of, options, tls, self._sleep, reconnect)

    async def streams(self, *, tls: ssl.SSLContext | None = None) -> AsyncSharedStreams:
        """As `Client.streams`: `async with await client.streams() as shared`."""
        connection = await open_connection_async(self._config, self._calls.shared(), tls, self._sleep)
        return AsyncSharedStreams(self._config, self._calls, connection, self._sleep)

    async def _run(self, steps: Steps[T]) -> T:
        return await run_async(steps, self._send, self._sleep)

    async def _send(self, attempt: Attempt) -> Outcome:
        end_s, parts = self._clock_s() + attempt.timeout_s, list[bytes]()
        try:
            # The timeouts of httpx2 are those of a part, and a server may fall silent after several.
            async with asyncio.timeout(attempt.timeout_s):
                response = await self._http.send(_request(self._http, attempt), stream=True)
                try:
                    async for part in response.aiter_bytes():
                        parts.append(part)
                        if self._clock_s() > end_s:
                            return _OVERDUE
                finally:
                    await asyncio.shield(response.aclose())
        except TimeoutError:
            return _OVERDUE
        except httpx2.RequestError as error:
            return no_answer(error)
        return answer_of(response, b"".join(parts))


def _request(http: httpx2.Client | httpx2.AsyncClient, attempt: Attempt) -> httpx2.Request:
    call = attempt.call
    return http.build_request(
        call.method, call.path, content=call.body, headers=call.headers, timeout=attempt.timeout_s
    )
