"""Iterators over the events of an answer that takes steps: errors, ends and closing, on bytes without a socket."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import orjson
import pytest

from penstock.client.generated_steps import AsyncGeneratedSteps, GeneratedSteps
from penstock.client.retry import ClientConfig
from penstock.core.errors import DeadlineImpossible, InvalidResponse, Overloaded, RequestError, Unreachable
from penstock.serve.http.generated_answer import error_event, event

CONFIG = ClientConfig(url="http://server:8000")


class Chunks(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """A body that comes in chunks, and knows whether it was closed."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks, self.closed = chunks, False

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            if self.closed:
                raise httpx2.ReadError("closed")
            yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


class Steps:
    """Either iterator over a body, called alike: in a runner the one for asyncio."""

    def __init__(self, runner: asyncio.Runner | None, body: Chunks) -> None:
        response = httpx2.Response(200, stream=body)
        self.runner = runner
        self.steps: Any = (GeneratedSteps if runner is None else AsyncGeneratedSteps)(CONFIG, response)

    def next(self) -> dict[str, Any] | None:
        """The next output; None at the end."""
        return next(self.steps, None) if self.runner is None else self.runner.run(self._anext())

    async def _anext(self) -> dict[str, Any] | None:
        return await anext(self.steps, None)

    def close(self) -> None:
        """Close the iterator."""
        if self.runner is None:
            self.steps.close()
        else:
            self.runner.run(self.steps.close())


@pytest.fixture(params=["sync", "async"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner | None]:
    if request.param == "sync":
        yield None
    else:
        with asyncio.Runner() as made:
            yield made


def output(number: int) -> bytes:
    return event(b"", orjson.dumps({"output": number}))


@pytest.mark.parametrize(
    ("bad", "expected"), [(error_event(RequestError("broken")), RequestError), (b"data: ?\n\n", InvalidResponse)]
)
def test_an_error_comes_after_the_outputs_before_it_and_closes_the_response(
    runner: asyncio.Runner | None, bad: bytes, expected: type[Exception]
) -> None:
    body = Chunks(output(1) + output(2) + bad + output(3), output(4))
    steps = Steps(runner, body)
    assert [steps.next(), steps.next()] == [{"output": 1}, {"output": 2}]
    with pytest.raises(expected):
        steps.next()
    assert body.closed
    assert steps.next() is None


def test_a_connection_that_breaks_closes_the_response(runner: asyncio.Runner | None) -> None:
    body = Chunks(output(1))
    steps = Steps(runner, body)
    assert steps.next() == {"output": 1}
    with pytest.raises(Unreachable, match="before the answer ended"):
        steps.next()
    assert body.closed


def test_a_closed_iterator_is_at_its_end(runner: asyncio.Runner | None) -> None:
    steps = Steps(runner, Chunks(output(1) + output(2), output(3)))
    assert steps.next() == {"output": 1}
    steps.close()
    assert steps.next() is None
    assert steps.next() is None


@pytest.mark.parametrize(
    "error", [DeadlineImpossible("too short"), Overloaded("busy", 7.0), Overloaded("busy"), RequestError("broken")]
)
def test_an_error_event_keeps_the_kind_of_its_error_and_the_time_to_come_back(
    runner: asyncio.Runner | None, error: RequestError
) -> None:
    steps = Steps(runner, Chunks(output(1), error_event(error)))
    assert steps.next() == {"output": 1}
    with pytest.raises(RequestError, match=str(error)) as raised:
        steps.next()
    assert raised.value.status == error.status
    if type(error) is not RequestError:
        assert type(raised.value) is type(error)
    if isinstance(error, Overloaded):
        assert isinstance(raised.value, Overloaded)
        assert raised.value.retry_after_s == error.retry_after_s


@pytest.mark.parametrize("data", [{"error": "broken"}, {"error": "broken", "status": "x"}, [], "broken"])
def test_an_error_event_without_a_status_is_a_failure_of_the_server(runner: asyncio.Runner | None, data: Any) -> None:
    steps = Steps(runner, Chunks(event(b"error", orjson.dumps(data))))
    with pytest.raises((RequestError, InvalidResponse)):
        steps.next()
