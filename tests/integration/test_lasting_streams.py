"""Live streams of Penstock's clients that go on after their connection, or their server, is gone."""

import asyncio
import signal
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve

from penstock import AsyncClient, Client, Reconnect
from penstock.client.stream import ClientStream
from penstock.client.stream_results import StreamResult
from penstock.core.errors import ClientError, InvalidResponse, TooSlow, Unreachable
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import make_network
from tests.support.live import CHUNK, LIVE_PY, new_live_bundle, sounds, write_live_app
from tests.support.serving import RunningServer
from tests.support.switch import Switch

pytestmark = pytest.mark.timeout(120)

# A busy machine is silent for longer than a server that is well.
LASTING = Reconnect(silent_s=10)
MESSAGES = 40
SOUND = sounds(1, MESSAGES * CHUNK)[0]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_live_bundle(tmp_path_factory)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[RunningServer]:
    with RunningServer(bundle) as server:
        yield server


def pieces() -> list[Array]:
    return [SOUND[at : at + CHUNK] for at in range(0, len(SOUND), CHUNK)]


def place_of(server: RunningServer) -> tuple[str, int]:
    return server.host, server.port


def assert_same(results: list[StreamResult], expected: list[StreamResult]) -> None:
    """Each result once, in order; its numbers to rounding, since a batch may have rows of a stream that was left."""
    kinds = [[(result.seq, result.last, result.flushed) for result in each] for each in (results, expected)]
    assert kinds[0] == kinds[1]
    for result, other in zip(results, expected, strict=True):
        assert (result.event is None) == (other.event is None)
        if result.event is not None:
            np.testing.assert_allclose(result.event, other.event, atol=1e-5)


@contextmanager
def through_a_switch(
    server: RunningServer, reconnect: Reconnect | None = None, **options: Any
) -> Generator[tuple[Switch, ClientStream]]:
    with (
        Switch(place_of(server)) as switch,
        Client(switch.url, **options) as client,
        client.stream("hark", reconnect=reconnect) as stream,
    ):
        yield switch, stream


def undisturbed(server: RunningServer, flush_at: int = -1) -> list[StreamResult]:
    with Client(f"http://{server.host}:{server.port}") as client, client.stream("hark") as stream:
        for number, piece in enumerate(pieces()):
            stream.send(piece)
            if number == flush_at:
                stream.flush()
        return list(stream.end())


def test_a_stream_goes_on_after_any_cut(server: RunningServer) -> None:
    expected = undisturbed(server)
    with through_a_switch(server, LASTING) as (switch, stream):
        results: list[StreamResult] = []
        for number, piece in enumerate(pieces()):
            stream.send(piece)
            results.append(next(iter(stream)))
            if number in (3, 4, 17):
                switch.cut()
        switch.cut()
        results += stream.end()
        assert switch.opened == 5
    assert_same(results, expected)


@pytest.mark.thorough
def test_what_was_not_answered_is_answered_after_a_cut(server: RunningServer) -> None:
    expected = undisturbed(server)
    with through_a_switch(server, LASTING) as (switch, stream):
        for number, piece in enumerate(pieces()):
            stream.send(piece)
            if number in (0, 20):
                switch.cut()
        assert_same(list(stream.end()), expected)


@pytest.mark.thorough
def test_a_server_that_is_killed_is_followed_by_another(bundle: Path, server: RunningServer) -> None:
    expected = undisturbed(server)
    with RunningServer(bundle) as first, through_a_switch(first, LASTING) as (switch, stream):
        results: list[StreamResult] = []
        for number, piece in enumerate(pieces()):
            stream.send(piece)
            if number < 10:
                results.append(next(iter(stream)))
            if number == 12:
                first.process.send_signal(signal.SIGKILL)
                switch.target = place_of(server)
        results += stream.end()
        first.process.wait()
    assert_same(results, expected)


@pytest.mark.thorough
def test_a_connection_that_says_nothing_is_left(server: RunningServer) -> None:
    expected = undisturbed(server)
    with through_a_switch(server, Reconnect(silent_s=0.3)) as (switch, stream):
        results: list[StreamResult] = []
        for number, piece in enumerate(pieces()):
            if number == 10:
                switch.hold()
            stream.send(piece)
            results.append(next(iter(stream)))
        results += stream.end()
        # More on a machine that is busy for longer.
        assert switch.opened >= 2
    assert_same(results, expected)


@pytest.mark.thorough
def test_what_was_answered_before_a_flush_is_not_sent_again(server: RunningServer) -> None:
    expected = undisturbed(server, flush_at=12)
    with through_a_switch(server, Reconnect(silent_s=10, kept_bytes=30 * CHUNK * 2)) as (switch, stream):
        results: list[StreamResult] = []
        for number, piece in enumerate(pieces()):
            stream.send(piece)
            results.append(next(iter(stream)))
            if number == 12:
                stream.flush()
                results.append(next(iter(stream)))
            if number in (11, 25):
                switch.cut()
        results += stream.end()
    assert_same(results, expected)


def test_without_it_the_stream_ends(server: RunningServer) -> None:
    with through_a_switch(server) as (switch, stream):
        stream.send(pieces()[0])
        next(iter(stream))
        switch.cut()
        with pytest.raises(Unreachable, match="hung up in the middle of a stream"):
            next(iter(stream))


def test_it_ends_where_no_server_comes_in_time(server: RunningServer) -> None:
    with through_a_switch(server, Reconnect(for_s=0.5, silent_s=10), retries=0) as (switch, stream):
        stream.send(pieces()[0])
        next(iter(stream))
        switch.target = ("127.0.0.1", 9)
        switch.cut()
        with pytest.raises(Unreachable, match="hung up in the middle of a stream"):
            next(iter(stream))


def test_it_ends_where_it_has_outgrown_what_is_kept(server: RunningServer) -> None:
    with through_a_switch(server, Reconnect(silent_s=10, kept_bytes=3 * CHUNK * 2)) as (switch, stream):
        for piece in pieces()[:5]:
            stream.send(piece)
            next(iter(stream))
        switch.cut()
        with pytest.raises(Unreachable):
            next(iter(stream))


@pytest.mark.thorough
def test_what_the_server_refuses_is_not_tried_again(bundle: Path) -> None:
    with RunningServer(bundle, "--idle-timeout-s", "0.5") as server:
        with through_a_switch(server, LASTING) as (switch, stream), pytest.raises(TooSlow):
            next(iter(stream))
        assert switch.opened == 1


@pytest.mark.thorough
def test_another_stream_is_not_taken_for_the_same(server: RunningServer, tmp_path: Path) -> None:
    shorter = LIVE_PY.replace("(320,)", "(160,)").replace("(4, 2)", "(3, 2)")
    found = find_application(str(write_live_app(tmp_path, shorter)))
    Bundle.write(found, make_network(found), sounds(), to=tmp_path / "bundle")
    with RunningServer(tmp_path / "bundle") as other, through_a_switch(server, LASTING) as (switch, stream):
        stream.send(pieces()[0])
        next(iter(stream))
        switch.target = place_of(other)
        switch.cut()
        with pytest.raises(InvalidResponse, match="its chunk_frames was 320, and is 160 on the server"):
            next(iter(stream))


@pytest.mark.parametrize(
    ("name", "value"),
    [("for_s", -1), ("for_s", float("nan")), ("silent_s", 0), ("silent_s", float("inf")), ("kept_bytes", -1)],
)
def test_settings_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ClientError, match=f"^{name} is {value}; it must be"):
        Reconnect(**{name: value})  # pyright: ignore[reportArgumentType]


def test_streams_of_asyncio_go_on(server: RunningServer) -> None:
    expected = undisturbed(server)

    async def played(switch: Switch) -> list[StreamResult]:
        async with AsyncClient(switch.url) as client, await client.stream("hark", reconnect=LASTING) as stream:
            results: list[StreamResult] = []
            for number, piece in enumerate(pieces()):
                await stream.send(piece)
                results.append(await anext(aiter(stream)))
                if number in (3, 4, 17):
                    switch.cut()
            switch.cut()
            return results + [result async for result in await stream.end()]

    with Switch(place_of(server)) as switch:
        assert_same(asyncio.run(played(switch)), expected)
        assert switch.opened == 5


@pytest.mark.parametrize("reconnect", [None, LASTING])
def test_a_server_that_goes_away_while_a_stream_begins(server: RunningServer, reconnect: Reconnect | None) -> None:
    begun: list[str] = []

    def hang_up_first(connection: ServerConnection) -> None:
        begun.append(str(connection.recv()))
        if len(begun) == 1:
            connection.socket.shutdown(socket.SHUT_RDWR)
            return
        with connect(f"ws://{server.host}:{server.port}/v1/apps/hark/stream") as upstream:
            upstream.send(begun[-1])
            connection.send(upstream.recv())

    with serve(hang_up_first, "127.0.0.1", 0) as front:
        serving = threading.Thread(target=front.serve_forever)
        serving.start()
        with Client(f"http://127.0.0.1:{front.socket.getsockname()[1]}") as client:
            if reconnect is None:
                with pytest.raises(Unreachable, match="in the middle of a stream"):
                    client.stream("hark", reconnect=reconnect)
            else:
                client.stream("hark", reconnect=reconnect).close()
        front.shutdown()
        serving.join()
    assert len(begun) == (1 if reconnect is None else 2)
