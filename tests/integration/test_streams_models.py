"""Live streams of models that come and go, of engines that are killed, under TLS, and from asyncio."""

import asyncio
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from penstock import AsyncClient, Client
from penstock.core.errors import InvalidInput, Overloaded, Unauthorized, UnknownRoute, Unreachable
from tests.support.live import CHUNK, new_live_bundle, offline, sounds
from tests.support.processes import eventually, kill
from tests.support.serving import RunningServer
from tests.support.tls import certificate


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_live_bundle(tmp_path_factory)


def url_of(server: RunningServer, scheme: str = "http") -> str:
    return f"{scheme}://{server.host}:{server.port}"


def test_a_model_that_is_replaced_or_unloaded_ends_its_streams_in_peace(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "hark" / "1")
    sound = sounds(1, CHUNK)[0]
    with RunningServer(None, "--models", str(tmp_path)) as server, Client(url_of(server)) as client:
        for change in (client.load, client.unload):
            if change == client.load:
                shutil.copytree(bundle, tmp_path / "hark" / "2")
            with client.stream("hark") as stream:
                stream.send(sound)
                results = iter(stream)
                frames = list(next(results).event or ())
                thread = threading.Thread(target=change, args=("hark",))
                thread.start()
                last = next(results)
                assert last.last
                frames += last.event or ()
                with pytest.raises(Overloaded, match="Another version is served now, or none"):
                    next(results)
                thread.join()
            np.testing.assert_allclose(frames, offline(bundle, sound[None])[0], atol=1e-5)
        with pytest.raises(UnknownRoute, match="no model 'hark'"):
            client.stream("hark")


@pytest.mark.slow
def test_where_nothing_is_kept_a_killed_engine_ends_its_streams_and_the_next_ones_are_taken_in(bundle: Path) -> None:
    sound = sounds(1, CHUNK)[0]
    options = ("--frontends", "1", "--replay-s", "0")
    with RunningServer(bundle, *options) as server, Client(url_of(server)) as client:
        with client.stream("hark") as stream:
            stream.send(sound)
            results = iter(stream)
            next(results)
            kill(server, "engine")
            with pytest.raises(Overloaded, match=r"engine stopped.*Retry after 3 s"):
                list(results)
        eventually(client.ready, within_s=30)
        with client.stream("hark") as stream:
            stream.send(sound)
            frames = [frame for result in stream.end() for frame in result.event or ()]
        np.testing.assert_allclose(frames, offline(bundle, sound[None])[0], atol=1e-5)
        assert client.stats()["streams"]["open"] == 0


async def hear(url: str, sound: "np.ndarray[tuple[int], np.dtype[np.int16]]", **options: object) -> list[object]:
    async with AsyncClient(url) as client, await client.stream("hark", **options) as stream:  # pyright: ignore[reportArgumentType]
        assert stream.ready["chunk_frames"] == CHUNK
        await stream.send(sound)
        return [frame async for result in await stream.end() for frame in result.event or ()]


@pytest.mark.thorough
def test_tls_and_asyncio_and_a_crowd(bundle: Path, tmp_path: Path) -> None:
    made = certificate(tmp_path)
    signals = sounds(30, 3000)
    expected = offline(bundle, signals)
    with RunningServer(bundle, *made.options()) as server:

        async def crowd() -> list[list[object]]:
            url = url_of(server, "https")
            return await asyncio.gather(*(hear(url, signal, tls=made.trusting()) for signal in signals))

        for heard, whole in zip(asyncio.run(crowd()), expected, strict=True):
            np.testing.assert_allclose(np.array(heard), whole, atol=1e-5)

        async def wrong() -> None:
            async with AsyncClient(url_of(server, "https")) as client:
                with pytest.raises(InvalidInput, match="rate_hz is 10"):
                    await client.stream("hark", rate_hz=10, tls=made.trusting())
                stream = await client.stream("hark", events="binary", tls=made.trusting())
                with pytest.raises(InvalidInput, match="The samples are float64; pcm_s16le takes int16"):
                    await stream.send(np.zeros(3))
                await stream.send(b"\0")
                with pytest.raises(InvalidInput, match="whole frames of 2"):
                    _ = [result async for result in await stream.end()]
                with pytest.raises(InvalidInput, match="has ended; open another"):
                    await stream.send(b"\0\0")
                await stream.close()

        asyncio.run(wrong())


def test_errors_of_a_client_are_sentences(bundle: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("me a-key-of-thirty-two-characters-a\n")
    with RunningServer(bundle, "--api-keys", str(keys)) as server:
        with Client(url_of(server), retries=0) as client, pytest.raises(Unauthorized, match="requires an API key"):
            client.stream("hark")
        with Client(url_of(server), api_key="a-key-of-thirty-two-characters-a") as client:
            wav = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x40\x1f\0\0\x80\x3e\0\0\x02\0\x10\0data\0\0\0\0"
            sound = sounds(1, 3000)[0]
            with client.stream("hark", encoding="wav") as stream:
                stream.send(wav + sound.tobytes())
                frames = [frame for result in stream.end() for frame in result.event or ()]
            np.testing.assert_allclose(frames, offline(bundle, sound[None])[0], atol=1e-5)
            with client.stream("hark", events="binary") as stream:
                stream.send(sound)
                outputs = [result.output for result in stream.end() if result.output is not None]
            np.testing.assert_allclose(
                np.concatenate(outputs).reshape(-1, 2), offline(bundle, sound[None])[0], atol=1e-5
            )
            with client.stream("hark") as stream:
                server.process.kill()
                with pytest.raises(Unreachable, match="hung up in the middle of a stream"):
                    list(stream)
        with Client(url_of(server), retries=0) as client, pytest.raises(Unreachable, match="cannot be reached"):
            client.stream("hark")
