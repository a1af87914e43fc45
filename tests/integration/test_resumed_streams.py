"""Engines that are killed under live streams of every protocol, whose clients hear what they would have heard."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import ClientConnection, connect

from penstock import Client
from penstock.core.spec import Array
from tests.support.live import CHUNK, new_live_bundle, offline, sounds
from tests.support.processes import eventually, kill
from tests.support.serving import RunningServer

pytestmark = pytest.mark.thorough

CHUNKS = 12
OWN, SHARED, SEQUENCES = 4, 4, 2


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_live_bundle(tmp_path_factory)


@pytest.fixture(scope="module")
def signals() -> Array:
    return sounds(OWN + SHARED + SEQUENCES, CHUNKS * CHUNK)


@pytest.fixture(scope="module")
def whole(bundle: Path, signals: Array) -> Array:
    return offline(bundle, signals)


class Speaker:
    """A WebSocket of one stream, read message by message: each result comes once, with the next number."""

    def __init__(self, server: RunningServer) -> None:
        url = f"ws://{server.host}:{server.port}/v1/apps/hark/stream"
        self._stream: ClientConnection = connect(url, compression=None, legacy=True)
        self._stream.send('{"type":"start"}')
        assert json.loads(self._stream.recv())["type"] == "ready"
        self._sent = self._heard = 0
        self.frames: list[Any] = []

    def send(self, samples: Array) -> None:
        self._stream.send(self._sent.to_bytes(4, "little") + samples.tobytes())
        self._sent += 1

    def hear(self) -> None:
        """Wait until all that was sent is answered."""
        while self._heard < self._sent:
            self._take(json.loads(self._stream.recv(60)))

    def end(self) -> list[Any]:
        self._stream.send('{"type":"end"}')
        for said in self._stream:
            message = json.loads(said)
            if message["type"] == "result":
                self._take(message)
            else:
                assert message == {"type": "end", "chunks": self._sent}
        assert self._stream.close_code == 1000
        return self.frames

    def _take(self, message: dict[str, Any]) -> None:
        assert message["seq"] == self._heard, message
        self._heard += 1
        self.frames += message["event"] or ()


class Sequence:
    """A sequence of the Open Inference Protocol, over HTTP."""

    def __init__(self, server: RunningServer, name: int) -> None:
        self._server, self._name, self._begun = server, name, False
        self.frames: list[Any] = []

    def send(self, samples: Array, *, end: bool = False) -> None:
        given = {"name": "sound", "datatype": "INT16", "shape": [1, samples.size], "data": samples.tolist()}
        parameters = {"sequence_id": self._name, "sequence_start": not self._begun, "sequence_end": end}
        self._begun = True
        body = json.dumps({"inputs": [given], "parameters": parameters}).encode()
        status, _, reply = self._server.ask("POST", "/v2/models/hark/infer", body)
        assert status == 200, reply
        (output,) = reply["outputs"]
        self.frames += np.reshape(output["data"], (-1, 2)).tolist()


def stats(server: RunningServer) -> dict[str, Any]:
    return server.ask("GET", "/v1/stats")[2]["models"]["hark"]


def test_streams_of_every_protocol_go_on_in_the_other_engine(bundle: Path, signals: Array, whole: Array) -> None:
    options = ("--device", "cpu,cpu", "--frontends", "1")
    with (
        RunningServer(bundle, *options) as server,
        Client(f"http://{server.host}:{server.port}", retries=0) as client,
        client.streams() as connection,
    ):
        # It is ready with the first of them.
        eventually(lambda: len(stats(server)["engines"]) == 2, within_s=60)
        own = [Speaker(server) for _ in range(OWN)]
        shared = [connection.open("hark") for _ in range(SHARED)]
        sequences = [Sequence(server, number + 1) for number in range(SEQUENCES)]
        sequence_signals = signals[OWN + SHARED :]

        def say(at: int) -> None:
            for speaker, sound in zip(own, signals, strict=False):
                speaker.send(sound[at * CHUNK : (at + 1) * CHUNK])
            with connection.together():
                for stream, sound in zip(shared, signals[OWN:], strict=False):
                    stream.send(sound[at * CHUNK : (at + 1) * CHUNK])
            for sequence, sound in zip(sequences, sequence_signals, strict=True):
                sequence.send(sound[at * CHUNK : (at + 1) * CHUNK], end=at == CHUNKS - 1)

        for at in range(4):
            say(at)
        own[0].hear()

        def open_in() -> list[int]:
            return [each["streams_open"] for each in stats(server)["engines"]]

        eventually(lambda: sum(open_in()) == len(signals), within_s=10)
        # Where one measured far lower costs, it has more of them.
        resumed = max(open_in())
        most = open_in().index(resumed)
        kill(server, f"engine {most} on cpu")
        for at in range(4, 8):
            say(at)
        for speaker in own:
            speaker.hear()
        eventually(lambda: stats(server)["streams"]["resumed"] == resumed, within_s=10)
        eventually(lambda: len(stats(server)["engines"]) == 2, within_s=120)
        # Now all of them are in one.
        kill(server, f"engine {1 - most} on cpu")
        for at in range(8, CHUNKS):
            say(at)
        heard = [speaker.end() for speaker in own]
        heard += [[frame for result in stream.end() for frame in result.event or ()] for stream in shared]
        heard += [sequence.frames for sequence in sequences]
        for frames, expected in zip(heard, whole, strict=True):
            np.testing.assert_allclose(frames, expected, atol=1e-5)
        streams = stats(server)["streams"]
        assert (streams["resumed"] - resumed, streams["lost"], streams["aborted"]) == (10, 0, 0)
        assert streams["replayed"] > 0
        text = server.ask("GET", "/metrics")[2].decode()
        assert f'penstock_streams_resumed_total{{app="hark"}} {streams["resumed"]}.0' in text
        assert 'penstock_streams_lost_total{app="hark",reason="no_engine"} 0.0' in text


@pytest.fixture(scope="module")
def alone(bundle: Path) -> Iterator[RunningServer]:
    with RunningServer(bundle, "--device", "cpu", "--frontends", "1") as server:
        yield server


def test_streams_wait_for_the_only_engine(alone: RunningServer, signals: Array, whole: Array) -> None:
    speakers = [Speaker(alone) for _ in range(OWN)]
    sequence = Sequence(alone, 7)
    last = len(signals) - 1
    for at in range(CHUNKS):
        part = slice(at * CHUNK, (at + 1) * CHUNK)
        for speaker, sound in zip(speakers, signals, strict=False):
            speaker.send(sound[part])
        if at == 5:
            for speaker in speakers[:2]:
                speaker.hear()
            kill(alone, "engine")
            eventually(lambda: alone.ask("GET", "/v2/health/ready")[0] == 503, within_s=10)
        elif at == 9:
            eventually(lambda: alone.ask("GET", "/v2/health/ready")[0] == 200, within_s=120)
        # While no engine is there, a request of a sequence is refused, and its client sends it again.
        if at not in (5, 6, 7, 8):
            sequence.send(signals[last, part])
        elif at == 8:
            eventually(lambda: alone.ask("GET", "/v2/health/ready")[0] == 200, within_s=120)
            for missed in (5, 6, 7, 8):
                sequence.send(signals[last, missed * CHUNK : (missed + 1) * CHUNK])
    sequence.send(signals[last, :0], end=True)
    for speaker, expected in zip(speakers, whole, strict=False):
        np.testing.assert_allclose(speaker.end(), expected, atol=1e-5)
    np.testing.assert_allclose(sequence.frames, whole[last], atol=1e-5)
    assert stats(alone)["streams"]["resumed"] == OWN + 1
    assert stats(alone)["streams"]["open"] == 0
