"""Both clients against real servers: one of Penstock, and one that refuses and breaks connections first."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import pytest
from PIL import Image

import penstock
from penstock.core.errors import (
    ComputeFailed,
    DeadlineImpossible,
    InvalidInput,
    Overloaded,
    TimedOut,
    TooLarge,
    UnknownRoute,
    Unreachable,
    UnsupportedContent,
)
from tests.support.serving import RunningServer, write_doubler

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
Ask = Callable[..., Any]


def asked(kind: str, url: str, **options: Any) -> Ask:
    """`ask(method, *arguments)` of a client of that kind, of its own for each call."""
    if kind == "Client":

        def ask(method: str, *arguments: Any, **named: Any) -> Any:
            with penstock.Client(url, **options) as client:
                return getattr(client, method)(*arguments, **named)

        return ask

    def run(method: str, *arguments: Any, **named: Any) -> Any:
        async def call() -> Any:
            async with penstock.AsyncClient(url, **options) as client:
                return await getattr(client, method)(*arguments, **named)

        return asyncio.run(call())

    return run


@pytest.fixture(params=["Client", "AsyncClient"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    bundle = write_doubler(tmp_path_factory.mktemp("client"))
    with RunningServer(bundle) as server:
        yield f"http://127.0.0.1:{server.port}"


def test_ask_and_predict(kind: str, url: str) -> None:
    ask = asked(kind, url)
    assert ask("ask", "doubler", [1, 2, 3, 4]) == {"doubled": [2, 4, 6, 8]}
    assert ask("ask", "doubler", ROWS[0]) == {"doubled": [0, 2, 4, 6]}
    assert ask("ask", "doubler", b"3", content_type="text/x-number") == {"doubled": [6] * 4}
    picture = BytesIO()
    Image.new("L", (2, 2), 7).save(picture, "PNG")
    assert ask("ask", "doubler", picture.getvalue(), content_type="image/png") == {"doubled": [14] * 4}
    assert ask("predict", "doubler", ROWS[0]).tolist() == [0, 2, 4, 6]
    several = ask("predict", "doubler", ROWS.astype(int), priority="background")
    assert (several.dtype, several.tolist()) == (np.float32, (ROWS * 2).tolist())


def test_what_the_server_says_of_itself(kind: str, url: str) -> None:
    ask = asked(kind, url)
    assert ask("ready") is True
    assert [app["name"] for app in ask("apps")] == ["doubler"]
    assert ask("stats")["slots"]["total"] > 0


@pytest.mark.parametrize(
    ("error", "method", "arguments"),
    [
        (InvalidInput, "ask", ("doubler", [1, 2, 3])),
        (InvalidInput, "predict", ("doubler", ROWS[:, :3])),
        (UnknownRoute, "ask", ("tripler", [1])),
        (UnknownRoute, "predict", ("tripler", [1])),
        (TooLarge, "ask", ("doubler", bytes(1 << 21))),
        (TooLarge, "predict", ("doubler", np.zeros((2000, 4)))),
        (ComputeFailed, "predict", ("doubler", [13, 0, 0, 0])),
        (ComputeFailed, "predict", ("doubler", [17, 0, 0, 0])),
    ],
)
def test_refusals_are_exceptions(
    kind: str, url: str, error: type[Exception], method: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(error):
        asked(kind, url)(method, *arguments)


def test_refusals_by_content_type_and_budget(kind: str, url: str) -> None:
    with pytest.raises(UnsupportedContent, match="text/plain"):
        asked(kind, url)("ask", "doubler", b"3", content_type="text/plain")
    with pytest.raises(DeadlineImpossible):
        asked(kind, url, latency_ms=0.001)("ask", "doubler", [1, 2, 3, 4])


def test_many_at_once_keep_their_answers(url: str) -> None:
    async def ask_all() -> list[Any]:
        async with penstock.AsyncClient(url, latency_ms=5000) as client:
            return await asyncio.gather(*(client.predict("doubler", [n, 0, 0, 0]) for n in range(100, 300)))

    assert [answer[0] for answer in asyncio.run(ask_all())] == [2 * n for n in range(100, 300)]


def test_threads_share_a_client(url: str) -> None:
    answers: dict[int, float] = {}
    with penstock.Client(url, latency_ms=5000) as client:

        def ask(n: int) -> None:
            answers[n] = client.predict("doubler", [n, 0, 0, 0])[0]

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(100, 116)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert answers == {n: 2 * n for n in range(100, 116)}


def test_a_server_that_is_not_there_yet(kind: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        ask = asked(kind, f"http://127.0.0.1:{taken.getsockname()[1]}", retries=1)
        assert ask("ready") is False
        with pytest.raises(Unreachable):
            ask("apps")


def test_a_server_that_goes_down_is_not_ready(kind: str, tmp_path: Path) -> None:
    with RunningServer(write_doubler(tmp_path)) as server:
        ask = asked(kind, f"http://127.0.0.1:{server.port}")
        assert ask("ready") is True
        server.stop()
        end_s = time.monotonic() + 10
        while ask("ready"):
            assert time.monotonic() < end_s
        assert server.process.wait(10) == 0
        assert ask("ready") is False


@final
class Scripted:
    """A server on a real socket that treats its connections one after another as the script says.

    Args:
        script: What goes back on each connection, after the request is read; None resets it instead.
    """

    def __init__(self, *script: bytes | None) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.times_s: list[float] = []
        self.requests: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        for said in self._script:
            with suppress(OSError):
                connection, _ = self._listener.accept()
                with connection:
                    self.requests.append(connection.recv(65536))
                    self.times_s.append(time.monotonic())
                    if said is None:
                        # Lingering for no time makes the kernel reset the connection.
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    else:
                        connection.sendall(said)


def said(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


FULL = said("503 Service Unavailable", b'{"error": "full"}', "Retry-After: 1")
DONE = said("200 OK", b'{"digit": 3}')


def test_it_comes_back_when_the_server_says(kind: str) -> None:
    with Scripted(FULL, DONE) as server:
        assert asked(kind, server.url)("ask", "digits", b"x") == {"digit": 3}
    assert 1.0 <= server.times_s[1] - server.times_s[0] < 5.0


def test_it_sends_again_what_was_lost(kind: str) -> None:
    with Scripted(None, b"", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf", DONE) as server:
        assert asked(kind, server.url)("ask", "digits", b"x") == {"digit": 3}
    assert len(server.requests) == 4
    assert all(request.startswith(b"POST /v1/apps/digits HTTP/1.1\r\n") for request in server.requests)


def test_it_does_not_wait_for_longer_than_its_timeout(kind: str) -> None:
    with Scripted(said("503 Service Unavailable", b'{"error": "full"}', "Retry-After: 9")) as server:
        begun_s = time.monotonic()
        with pytest.raises(Overloaded, match="full") as refusal:
            asked(kind, server.url, timeout_s=8)("ask", "digits", b"x")
    assert refusal.value.retry_after_s == 9.0
    assert time.monotonic() - begun_s < 8


def test_a_silent_server_is_left(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun_s = time.monotonic()
        with pytest.raises(TimedOut, match=r"within 0.3 s"):
            asked(kind, f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)("apps")
    assert 0.3 <= time.monotonic() - begun_s < 5.0


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_the_repository(kind: str, verb: str) -> None:
    with Scripted(said("200 OK", b"")) as server:
        asked(kind, server.url, api_key="secret")(verb, "iris")
    (request,) = server.requests
    assert request.startswith(f"POST /v2/repository/models/iris/{verb} HTTP/1.1\r\n".encode())
    assert b"authorization: bearer secret\r\n" in request.lower()
