"""Answers that take steps, as iterators over the server's events; `EventReader` holds the protocol without a socket."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Self, final

import orjson

from penstock.client.http import answer_of, httpx2, no_answer
from penstock.client.retry import Attempt, ClientConfig, Outcome, error_of, error_of_event
from penstock.core.errors import InvalidResponse, PenstockError, Unreachable

OK = 200


@final
class EventReader:
    """Reads server-sent events of one answer.

    Args:
        config: Configuration of the client.

    Attributes:
        ended: Reason why the answer ended, `"end"` or `"max_steps"`; None until then.
        reply: The application's reply to the whole answer; None until then.
    """

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._rest = b""
        self._steps: deque[dict[str, Any]] = deque()
        self._error: PenstockError | None = None
        self.ended: str | None = None
        self.reply: Any = None

    def feed(self, data: bytes) -> None:
        """Take bytes of the body; an error in them is raised by `next`, after the outputs before it."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        for block in blocks:
            if self._error is not None:
                return
            parts = (line.partition(b": ") for line in block.split(b"\n"))
            fields = {name: value for name, _, value in parts}
            try:
                value = orjson.loads(fields[b"data"])
                self._take(fields.get(b"event", b""), value)
            except (AttributeError, KeyError, TypeError, orjson.JSONDecodeError) as error:
                self._error = InvalidResponse(
                    f"{self._config.url} sent an event that cannot be read ({error!r}): {block[:80]!r}."
                )

    def _take(self, name: bytes, value: dict[str, Any]) -> None:
        if name == b"error":
            self._error = error_of_event(value, self._config)
        elif name == b"done":
            self.ended, self.reply = value["ended"], value["reply"]
        else:
            self._steps.append(value)

    def next(self) -> dict[str, Any] | None:
        """Return the output of the next step that has come, by name; None if none has.

        Raises:
            RequestError: The answer failed after the outputs that have been returned.
            InvalidResponse: What came after them is no event of a generated answer.
        """
        if self._steps:
            return self._steps.popleft()
        if self._error is not None:
            raise self._error
        return None

    def check_whole(self) -> None:
        """Check at the end of the body that the answer ended.

        Raises:
            Unreachable: The connection broke before.
        """
        if self.ended is None:
            raise Unreachable(f"{self._config.url} closed the connection before the answer ended; send it again.")


class _Generated:
    def __init__(self, config: ClientConfig, response: httpx2.Response) -> None:
        self._reader = EventReader(config)
        self._response = response
        self._config = config
        self._closed = False

    @property
    def ended(self) -> str | None:
        """Reason why the answer ended, `"end"` or `"max_steps"`; None until the last step has been read."""
        return self._reader.ended

    @property
    def reply(self) -> Any:
        """The application's reply to the whole answer; None until the last step has been read."""
        return self._reader.reply

    def _broken(self, error: httpx2.RequestError) -> Exception:
        return error_of(no_answer(error), self._config)


@final
class GeneratedSteps(_Generated, Iterator[dict[str, Any]]):
    """The outputs of the steps of one answer, by name, as they come. Closing it early cancels the answer."""

    def __init__(self, config: ClientConfig, response: httpx2.Response) -> None:
        super().__init__(config, response)
        self._body = response.iter_raw()

    def __next__(self) -> dict[str, Any]:
        while not self._closed:
            try:
                if (step := self._reader.next()) is not None:
                    return step
                data = next(self._body, None)
                if data is None:
                    self.close()
                    self._reader.check_whole()
                else:
                    self._reader.feed(data)
            except PenstockError:
                self.close()
                raise
            except httpx2.RequestError as error:
                self.close()
                raise self._broken(error) from error
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the server computes no further step."""
        self._closed = True
        self._response.close()


@final
class AsyncGeneratedSteps(_Generated, AsyncIterator[dict[str, Any]]):
    """`GeneratedSteps` for `async for`."""

    def __init__(self, config: ClientConfig, response: httpx2.Response) -> None:
        super().__init__(config, response)
        self._body = response.aiter_raw()

    async def __anext__(self) -> dict[str, Any]:
        while not self._closed:
            try:
                if (step := self._reader.next()) is not None:
                    return step
                data = await anext(self._body, None)
                if data is None:
                    await self.close()
                    self._reader.check_whole()
                else:
                    self._reader.feed(data)
            except PenstockError:
                await self.close()
                raise
            except httpx2.RequestError as error:
                await self.close()
                raise self._broken(error) from error
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; the server computes no further step."""
        self._closed = True
        await self._response.aclose()


def opening(
    http: httpx2.Client, request_of: Callable[[Attempt], httpx2.Request], opened: list[httpx2.Response]
) -> Callable[[Attempt], Outcome]:
    """Return a function that sends an attempt; a response of status 200 is left open and put into a list."""

    def send(attempt: Attempt) -> Outcome:
        try:
            response = http.send(request_of(attempt), stream=True)
            if response.status_code == OK:
                opened.append(response)
                return answer_of(response, b"")
            try:
                return answer_of(response, response.read())
            finally:
                response.close()
        except httpx2.RequestError as error:
            return no_answer(error)

    return send


def opening_async(
    http: httpx2.AsyncClient, request_of: Callable[[Attempt], httpx2.Request], opened: list[httpx2.Response]
) -> Callable[[Attempt], Awaitable[Outcome]]:
    """`opening` for asyncio."""

    async def send(attempt: Attempt) -> Outcome:
        try:
            response = await http.send(request_of(attempt), stream=True)
            if response.status_code == OK:
                opened.append(response)
                return answer_of(response, b"")
            try:
                return answer_of(response, await response.aread())
            finally:
                await asyncio.shield(response.aclose())
        except httpx2.RequestError as error:
            return no_answer(error)

    return send
