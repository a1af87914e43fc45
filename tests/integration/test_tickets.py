"""Live streams whose server is killed after they have outgrown what their client keeps: they go on with a ticket."""

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Client, Reconnect
from penstock.client.stream_results import StreamResult
from penstock.core.errors import InvalidTicket
from penstock.core.spec import Array
from tests.support.live import CHUNK, new_live_bundle, sounds
from tests.support.serving import RunningServer
from tests.support.switch import Switch

pytestmark = pytest.mark.timeout(300)

MESSAGES, CUTS = 60, (20, 21, 45)
SOUND = sounds(1, MESSAGES * CHUNK)[0]
# Less than between two cuts: without tickets the stream would end.
SMALL = 12 * CHUNK * 2
# A busy machine is silent for longer than a server that is well.
LASTING = Reconnect(silent_s=10, kept_bytes=SMALL)
OPTIONS = ("--ticket-s", "0.2")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_live_bundle(tmp_path_factory)


def key_file(folder: Path, *numbers: int) -> str:
    file = folder / f"key-{numbers}"
    file.write_text("\n".join(f"{number:064x}" for number in numbers))
    return str(file)


def pieces() -> list[Array]:
    return [SOUND[at : at + CHUNK] for at in range(0, len(SOUND), CHUNK)]


def place_of(server: RunningServer) -> tuple[str, int]:
    return server.host, server.port


def assert_same(results: list[StreamResult], expected: list[StreamResult], atol: float = 1e-5) -> None:
    assert [(each.seq, each.last) for each in results] == [(each.seq, each.last) for each in expected]
    for result, other in zip(results, expected, strict=True):
        assert (result.event is None) == (other.event is None), result.seq
        if result.event is not None:
            np.testing.assert_allclose(result.event, other.event, atol=atol)


def undisturbed(server: RunningServer, **options: Any) -> list[StreamResult]:
    url, key = f"http://{server.host}:{server.port}", key_of(options)
    # A resampler that can be gone on with holds back more, so that results have other frames.
    reconnect = Reconnect(silent_s=60)
    with Client(url, **key) as client, client.stream("hark", reconnect=reconnect, **options) as stream:
        for piece in pieces():
            stream.send(piece)
        return list(stream.end())


def key_of(options: dict[str, Any]) -> dict[str, Any]:
    return {"api_key": options.pop("api_key")} if "api_key" in options else {}


@contextmanager
def two_servers(
    bundle: Path, first: tuple[str, ...], second: tuple[str, ...]
) -> Generator[tuple[RunningServer, RunningServer]]:
    with RunningServer(bundle, *first) as one, RunningServer(bundle, *second) as other:
        yield one, other


def lasting(switch: Switch, reconnect: Reconnect, then: Any, **options: Any) -> list[StreamResult]:
    """Results of a stream that is cut, and whose server is another one from the first cut on."""
    results: list[StreamResult] = []
    with (
        Client(switch.url, **key_of(options)) as client,
        client.stream("hark", reconnect=reconnect, **options) as stream,
    ):
        for number, piece in enumerate(pieces()):
            stream.send(piece)
            results.append(next(iter(stream)))
            if number in CUTS:
                then(number)
        return results + list(stream.end())


@pytest.mark.thorough
@pytest.mark.parametrize("frontends", ["0", "1"])
def test_a_stream_that_outgrew_its_client_goes_on_at_another_server(
    bundle: Path, tmp_path: Path, frontends: str
) -> None:
    options = ("--ticket-key", key_file(tmp_path, 1), *OPTIONS, "--frontends", frontends)
    with two_servers(bundle, options, options) as (first, second), Switch(place_of(first)) as switch:
        expected = undisturbed(second)

        def then(number: int) -> None:
            if number == CUTS[0]:
                first.process.send_signal(signal.SIGKILL)
                switch.target = place_of(second)
            switch.cut()

        assert_same(lasting(switch, LASTING, then), expected)
        # From here on, the first one is gone, and the third connection is of a ticket of the second.
        assert switch.opened == 1 + len(CUTS)
        first.process.wait()


@pytest.mark.thorough
def test_resampled_sound_goes_on(bundle: Path, tmp_path: Path) -> None:
    options = ("--ticket-key", key_file(tmp_path, 1), *OPTIONS)
    with RunningServer(bundle, *options) as server, Switch(place_of(server)) as switch:
        expected = undisturbed(server, rate_hz=16_000)
        results = lasting(switch, Reconnect(silent_s=10, kept_bytes=2 * SMALL), lambda _: switch.cut(), rate_hz=16_000)
        # The rounding of a sample is that of another filter.
        assert_same(results, expected, atol=0.05)


def test_the_asyncio_client_goes_on(bundle: Path, tmp_path: Path) -> None:
    options = ("--ticket-key", key_file(tmp_path, 1), *OPTIONS)
    with RunningServer(bundle, *options) as server, Switch(place_of(server)) as switch:

        async def speak() -> list[StreamResult]:
            results: list[StreamResult] = []
            async with AsyncClient(switch.url) as client, await client.stream("hark", reconnect=LASTING) as stream:
                for number, piece in enumerate(pieces()):
                    await stream.send(piece)
                    results.append(await anext(aiter(stream)))
                    if number in CUTS:
                        switch.cut()
                return results + [result async for result in await stream.end()]

        assert_same(asyncio.run(speak()), undisturbed(server))


@pytest.mark.thorough
@pytest.mark.parametrize("kept_bytes", [1 << 20, SMALL])
def test_a_ticket_of_another_key_is_refused_and_all_is_sent_if_it_is_there(
    bundle: Path, tmp_path: Path, kept_bytes: int
) -> None:
    ours, theirs = (("--ticket-key", key_file(tmp_path, number), *OPTIONS) for number in (1, 2))
    with two_servers(bundle, ours, theirs) as (first, second), Switch(place_of(first)) as switch:

        def then(number: int) -> None:
            switch.target = place_of(second if number == CUTS[0] else first)
            switch.cut()

        reconnect = Reconnect(silent_s=10, kept_bytes=kept_bytes)
        if kept_bytes == SMALL:
            with pytest.raises(InvalidTicket, match=r"server key.*That is not kept any more, see kept_bytes"):
                lasting(switch, reconnect, then)
        else:
            assert_same(lasting(switch, reconnect, then), undisturbed(first))


@pytest.mark.thorough
def test_keys_are_rotated_and_tickets_are_of_one_client(bundle: Path, tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.write_text("mill river-water-turns-it\ndam river-water-stops-it\n")
    before, after = key_file(tmp_path, 1), key_file(tmp_path, 2)
    old = ("--ticket-key", before, *OPTIONS, "--api-keys", str(clients))
    new = ("--ticket-key", after, "--ticket-key", before, *OPTIONS, "--api-keys", str(clients))
    with two_servers(bundle, old, new) as (first, second), Switch(place_of(first)) as switch:

        def then(number: int) -> None:
            switch.target = place_of(second)
            switch.cut()

        results = lasting(switch, LASTING, then, api_key="river-water-turns-it")
        assert_same(results, undisturbed(first, api_key="river-water-turns-it"))


def test_a_key_that_is_none_stops_the_server_in_one_sentence(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    with pytest.raises(AssertionError, match="is no key of 64 hexadecimal digits; 'openssl rand -hex 32' makes one"):
        RunningServer(bundle, "--ticket-key", str(file))
