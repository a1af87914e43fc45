"""The clients of a server: `Client` for threads, `AsyncClient` for asyncio. What they say and hear is in `calls`.

When a request is sent again, at most `retries` times and always within `timeout_s`:

- status 503: after the seconds of `Retry-After` and up to a quarter more; without that header after a back-off;
- no connection, or one that broke before the answer was whole, and status 502, a proxy's: after a back-off;
- status 500: once, after a back-off; a second one means that this input makes the application fail;
- any other status, every 4xx and 504 (the budget is shorter than the network's own time) among them: never.

The back-off after attempt n, from 0 on, is random, from 0 to 0.1 s * 2^n, and never above 10 s. Where a wait would end
after `timeout_s`, the refusal is raised at once. To send a request twice does no harm: inference has no side effect.
"""

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Self, final

from penstock.core.spec import Array
from penstock.serve.calls import Calls, Content
from penstock.serve.exchange import Answer, Attempt, Lost, Outcome, Priority, Steps, T, Terms
from penstock.serve.stream_client import (
    AsyncClientStream,
    ClientStream,
    Encoding,
    Wishes,
    opened,
    opened_async,
)

try:
    import httpx2
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "penstock.Client needs httpx2: pip install 'penstock[client]'", name=error.name
    ) from error

# Shorter than a server keeps a silent connection, so that it is not closed under a request.
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=60.0)


@final
class Client:
    """Asks a server, from any number of threads; connections are kept and reused.

        with penstock.Client("http://localhost:8000") as client:
            client.ask("digits", Path("three.png").read_bytes())

    A request is sent again after status 503 (when `Retry-After` says), 502, once after 500, and when the connection was
    refused or broke before the answer; never after any other status, and never beyond `timeout_s`. A request may so be
    computed twice, which does no harm.

    Environment variables are not read. What goes through a proxy, a Unix socket or TLS of your own is a `transport`:
    `httpx2.HTTPTransport(proxy=..., uds=..., verify=...)`.

    Args:
        url: The server's, with the path before its routes if a proxy adds one.
        api_key: Goes with every request as `Authorization: Bearer KEY`.
        latency_ms: The budget of an inference, per attempt, in milliseconds; None leaves it to the server.
        priority: `"interactive"` or `"background"`; None leaves it to the server.
        retries: How often a request may be sent again.
        timeout_s: How long a call may take with all attempts and the waits between them, in seconds. An attempt ends
            when the network is silent for what is left of it.
        transport: What carries requests instead of connections of its own.
        clock_s: A monotonic clock in seconds.
        sleep: Waits for so many seconds.
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
        terms = Terms(
            url=url, api_key=api_key, latency_ms=latency_ms, priority=priority, retries=retries, timeout_s=timeout_s
        )
        self._terms = terms
        self._calls = Calls(terms, clock_s=clock_s, random=random)
        self._sleep = sleep
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
        """The application's reply to one input.

        Args:
            name: The application's.
            content: The bytes of a picture or of whatever the application decodes; or numbers of its input's shape, as
                nested lists or an array.
            content_type: Of the bytes, such as `"image/png"`; the server finds out without.
            latency_ms: The budget of this request in milliseconds, instead of the client's.
            priority: Of this request, instead of the client's.

        Returns:
            The reply's JSON values.

        Raises:
            RequestError: The server refused; the class says why.
            ClientError: No answer came.
        """
        return self._run(self._calls.ask(name, content, content_type, latency_ms, priority))

    def predict(
        self, name: str, array: Any, *, latency_ms: float | None = None, priority: Priority | None = None
    ) -> Array:
        """The network's own output for one chunk, or for several at once. Numbers travel as raw bytes.

        Args:
            name: The application's.
            array: One chunk of the input's shape, or several, `[n, ...]`; numbers that the input's
                dtype can hold.
            latency_ms: The budget of this request in milliseconds, instead of the client's.
            priority: Of this request, instead of the client's.

        Returns:
            The output, of the output's shape, or `[n, ...]` for several.

        Raises:
            RequestError: The server refused, or the array is not what the application takes.
            ClientError: No answer came, or it does not fit what the server said of itself.
        """
        return self._run(self._calls.predict(name, array, latency_ms, priority))

    def stream(
        self,
        name: str,
        *,
        rate_hz: float | None = None,
        encoding: Encoding | None = None,
        events: Literal["json", "binary"] = "json",
        latency_ms: float | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> ClientStream:
        """A live stream to an application, open; use it in a `with`.

            with client.stream("hark", rate_hz=48_000) as stream:
                for piece in microphone:
                    stream.send(piece)
                for result in stream.end():
                    print(result.event)

        Args:
            name: The application's.
            rate_hz: Of the samples that will be sent; the application's by default.
            encoding: Of the samples; 16-bit samples by default, and for a signal that is no sound, the input's dtype.
            events: `"json"` for what the application makes of its outputs, `"binary"` for the outputs themselves.
            latency_ms: How long after it came a chunk must be answered, in milliseconds, instead of the client's.
            tls: For `https` with certificates of your own.

        Raises:
            RequestError: The server refused.
            ClientError: No answer came.
        """
        wishes = Wishes(rate_hz=rate_hz, encoding=encoding, events=events, latency_ms=latency_ms)
        return opened(self._terms, self._calls.stream(name), wishes, tls, self._sleep)

    def apps(self) -> list[dict[str, Any]]:
        """What is served: of each application its name, description, input, output and accepted content types."""
        return self._run(self._calls.apps())

    def ready(self) -> bool:
        """Whether the server takes requests now; False while it cannot be reached. Asks once."""
        return self._run(self._calls.ready())

    def stats(self) -> dict[str, Any]:
        """The server's counts and histograms since its start."""
        return self._run(self._calls.stats())

    def load(self, name: str) -> None:
        """Have the server load a model of its repository, and return when it is ready."""
        self._run(self._calls.repository(name, "load"))

    def unload(self, name: str) -> None:
        """Have the server unload a model."""
        self._run(self._calls.repository(name, "unload"))

    def _run(self, steps: Steps[T]) -> T:
        outcome: Outcome | None = None
        while True:
            try:
                # A generator that has not begun takes only None, which its type cannot say.
                attempt = next(steps) if outcome is None else steps.send(outcome)
            except StopIteration as done:
                return done.value
            if attempt.wait_s > 0:
                self._sleep(attempt.wait_s)
            outcome = self._send(attempt)

    def _send(self, attempt: Attempt) -> Outcome:
        try:
            return _answer(self._http.send(_request(self._http, attempt)))
        except httpx2.RequestError as error:
            return _lost(error)


@final
class AsyncClient:
    """`Client` for asyncio: the same arguments, the same calls, to be awaited.

        async with penstock.AsyncClient("http://localhost:8000") as client:
            replies = await asyncio.gather(*(client.ask("digits", picture) for picture in pictures))

    Args:
        url: As `Client`, and so are the others.
        api_key: The server's key for this client.
        latency_ms: The budget of an inference, per attempt, in milliseconds; None leaves it to the server.
        priority: `"interactive"` or `"background"`; None leaves it to the server.
        retries: How often a request may be sent again.
        timeout_s: How long a call may take with all attempts and the waits between them, in seconds.
        transport: What carries requests instead of connections of its own, `httpx2.AsyncHTTPTransport(...)`.
        clock_s: A monotonic clock in seconds.
        sleep: Waits for so many seconds.
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
        terms = Terms(
            url=url, api_key=api_key, latency_ms=latency_ms, priority=priority, retries=retries, timeout_s=timeout_s
        )
        self._terms = terms
        self._calls = Calls(terms, clock_s=clock_s, random=random)
        self._sleep = sleep
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
        return await self._run(self._calls.ask(name, content, content_type, latency_ms, priority))

    async def predict(
        self, name: str, array: Any, *, latency_ms: float | None = None, priority: Priority | None = None
    ) -> Array:
        """As `Client.predict`."""
        return await self._run(self._calls.predict(name, array, latency_ms, priority))

    async def stream(
        self,
        name: str,
        *,
        rate_hz: float | None = None,
        encoding: Encoding | None = None,
        events: Literal["json", "binary"] = "json",
        latency_ms: float | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> AsyncClientStream:
        """As `Client.stream`: `async with await client.stream("hark") as stream`."""
        wishes = Wishes(rate_hz=rate_hz, encoding=encoding, events=events, latency_ms=latency_ms)
        return await opened_async(self._terms, self._calls.stream(name), wishes, tls, self._sleep)

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
        await self._run(self._calls.repository(name, "load"))

    async def unload(self, name: str) -> None:
        """As `Client.unload`."""
        await self._run(self._calls.repository(name, "unload"))

    async def _run(self, steps: Steps[T]) -> T:
        outcome: Outcome | None = None
        while True:
            try:
                attempt = next(steps) if outcome is None else steps.send(outcome)
            except StopIteration as done:
                return done.value
            if attempt.wait_s > 0:
                await self._sleep(attempt.wait_s)
            outcome = await self._send(attempt)

    async def _send(self, attempt: Attempt) -> Outcome:
        try:
            return _answer(await self._http.send(_request(self._http, attempt)))
        except httpx2.RequestError as error:
            return _lost(error)


def _request(http: httpx2.Client | httpx2.AsyncClient, attempt: Attempt) -> httpx2.Request:
    call = attempt.call
    return http.build_request(
        call.method, call.path, content=call.body, headers=call.headers, timeout=attempt.timeout_s
    )


def _answer(response: httpx2.Response) -> Answer:
    return Answer(
        response.status_code, {name.lower(): value for name, value in response.headers.items()}, response.content
    )


def _lost(error: httpx2.RequestError) -> Lost:
    return Lost(str(error) or type(error).__name__, isinstance(error, httpx2.TimeoutException))
