"""Live streams through the Open Inference Protocol's sequences, with tritonclient unchanged, and recordings by POST."""

import io
import json
import time
import warnings
import wave
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from penstock.core.spec import Array
from tests.support.live import CHUNK, RATE_HZ, new_live_bundle, offline, sounds
from tests.support.serving import RunningServer, write_doubler

with warnings.catch_warnings():
    # gevent, which the client brings, warns at import about its own use of deprecated names.
    warnings.simplefilter("ignore")
    import tritonclient.http

# The clients are not typed.
http: Any = tritonclient.http
rpc: Any = tritonclient.grpc

KEYS = {"ann": "a-key-of-thirty-two-characters-a", "ben": "a-key-of-thirty-two-characters-b"}
Infer = Callable[..., Array]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_live_bundle(tmp_path_factory)


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    other = write_doubler(tmp_path_factory.mktemp("doubler"))
    with RunningServer(bundle, str(other), "--grpc-port", "0", "--idle-timeout-s", "100") as server:
        yield server


@pytest.fixture(scope="module")
def clients(server: RunningServer) -> Iterator[dict[str, Any]]:
    with clients_of(server) as clients:
        yield clients


@contextmanager
def clients_of(server: RunningServer) -> Generator[dict[str, Any]]:
    """By protocol."""
    assert server.process.stdout is not None
    port = server.process.stdout.readline().split()[-1]
    clients = {
        "http": http.InferenceServerClient(f"127.0.0.1:{server.port}"),
        "grpc": rpc.InferenceServerClient(f"127.0.0.1:{port}"),
    }
    yield clients
    for client in clients.values():
        client.close()


def asking(clients: dict[str, Any], how: str) -> Infer:
    """Sends one chunk and gives what came of it: by `http`, `json` or `grpc`."""
    kind = rpc if how == "grpc" else http

    def infer(chunk: Array, *, batched: bool = True, model: str = "hark", **options: Any) -> Array:
        given = kind.InferInput("sound", [1, len(chunk)] if batched else [len(chunk)], "INT16")
        binary = {} if how == "grpc" else {"binary_data": how == "http"}
        given.set_data_from_numpy(chunk[None] if batched else chunk, **binary)
        if how == "json":
            options["outputs"] = [kind.InferRequestedOutput("scores", binary_data=False)]
        return clients["grpc" if how == "grpc" else "http"].infer(model, [given], **options).as_numpy("scores")

    return infer


def chunks(sound: Array, size: int = CHUNK) -> Iterator[tuple[Array, dict[str, bool]]]:
    for at in range(0, len(sound), size):
        yield sound[at : at + size], {"sequence_start": at == 0, "sequence_end": at + size >= len(sound)}


def open_streams(server: RunningServer) -> int:
    return server.ask("GET", "/v1/stats")[2]["models"]["hark"]["streams"]["open"]


def soon(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["http", "json", "grpc"])
def test_the_results_are_those_of_the_whole_signal(
    server: RunningServer, clients: dict[str, Any], bundle: Path, how: str
) -> None:
    infer, sound = asking(clients, how), sounds(1, 3000)[0]
    for number, size in enumerate((CHUNK, 100)):
        parts = [
            infer(chunk, batched=number == 0, sequence_id=1 + number, **flags) for chunk, flags in chunks(sound, size)
        ]
        assert all(part.ndim == (3 if number == 0 else 2) for part in parts)
        frames = np.concatenate([part.reshape(-1, 2) for part in parts])
        np.testing.assert_allclose(frames, offline(bundle, sound[None])[0], atol=1e-5)
    assert open_streams(server) == 0


@pytest.mark.parametrize("how", ["http", "json", "grpc"])
def test_two_at_once_never_mix_and_the_end_may_be_empty(clients: dict[str, Any], bundle: Path, how: str) -> None:
    infer, signals, got = asking(clients, how), sounds(2, 1600), ([], [])
    for at in range(0, 1600, CHUNK):
        for index, name in enumerate((7, "7")):
            chunk = signals[index][at : at + CHUNK]
            got[index].append(infer(chunk, sequence_id=name, sequence_start=at == 0)[0])
    for index, name in enumerate((7, "7")):
        got[index].append(infer(signals[index][:0], sequence_id=name, sequence_end=True)[0])
        np.testing.assert_allclose(np.concatenate(got[index]), offline(bundle, signals)[index], atol=1e-5)


def test_one_request_may_be_the_whole_sequence(clients: dict[str, Any], bundle: Path) -> None:
    sound = sounds(1, 300)[0]
    for how in ("http", "grpc"):
        frames = asking(clients, how)(sound, sequence_id=3, sequence_start=True, sequence_end=True)
        np.testing.assert_allclose(frames[0], offline(bundle, sound[None])[0], atol=1e-5)


def test_a_second_start_begins_anew(server: RunningServer, clients: dict[str, Any], bundle: Path) -> None:
    sound, infer, other = sounds(1, 900)[0], asking(clients, "http"), asking(clients, "grpc")
    infer(sound[:CHUNK], sequence_id="again", sequence_start=True)
    # A sequence belongs to its id, not to a connection.
    infer(sound[:CHUNK], sequence_id="again", sequence_start=True)
    rest = sound[CHUNK:]
    parts = [other(chunk, sequence_id="again", sequence_end=last["sequence_end"]) for chunk, last in chunks(rest)]
    frames = infer(sound[:CHUNK], sequence_id="again", sequence_start=True, sequence_end=True)
    assert sum(part.shape[1] for part in parts) > 0
    np.testing.assert_allclose(frames[0], offline(bundle, sound[None, :CHUNK])[0], atol=1e-5)
    assert open_streams(server) == 0


def test_the_answers_of_a_grpc_stream_come_in_order(clients: dict[str, Any], bundle: Path) -> None:
    signals, answers = sounds(3, 8000), Queue[tuple[Any, Any]]()
    clients["grpc"].start_stream(lambda result, error: answers.put((result, error)))
    sent = 0
    for number, parts in enumerate(zip(*(chunks(signal, 160) for signal in signals), strict=True)):
        for index, (chunk, flags) in enumerate(parts):
            given = rpc.InferInput("sound", [1, len(chunk)], "INT16")
            given.set_data_from_numpy(chunk[None])
            name = f"{index}/{number}"
            clients["grpc"].async_stream_infer("hark", [given], request_id=name, sequence_id=index + 1, **flags)
            sent += 1
    got: list[list[tuple[int, Array]]] = [[] for _ in signals]
    for _ in range(sent):
        result, error = answers.get(timeout=10)
        assert error is None, error
        index, _, number = result.get_response().id.partition("/")
        got[int(index)].append((int(number), result.as_numpy("scores")[0]))
    clients["grpc"].stop_stream()
    for index, results in enumerate(got):
        assert [number for number, _ in results] == list(range(50))
        frames = np.concatenate([frames for _, frames in results])
        np.testing.assert_allclose(frames, offline(bundle, signals)[index], atol=1e-5)


def test_requests_that_are_pipelined_over_grpc_stay_in_order(clients: dict[str, Any], bundle: Path) -> None:
    sound, answers = sounds(1, 6000)[0], Queue[tuple[int, Any]]()
    for number, (chunk, flags) in enumerate(chunks(sound, 200)):
        given = rpc.InferInput("sound", [1, len(chunk)], "INT16")
        given.set_data_from_numpy(chunk[None])

        def answered(result: Any, error: Any, number: int = number) -> None:
            answers.put((number, error or result.as_numpy("scores")))

        clients["grpc"].async_infer("hark", [given], answered, sequence_id="ahead", **flags)
        if number == 0:
            answers.put(answers.get(timeout=10))
    got = dict(answers.get(timeout=10) for _ in range(30))
    frames = np.concatenate([got[number][0] for number in range(30)])
    np.testing.assert_allclose(frames, offline(bundle, sound[None])[0], atol=1e-5)


@pytest.mark.thorough
def test_silence_ends_a_sequence(bundle: Path) -> None:
    with RunningServer(bundle, "--grpc-port", "0", "--idle-timeout-s", "1") as server, clients_of(server) as clients:
        asking(clients, "http")(sounds(1, CHUNK)[0], sequence_id=77, sequence_start=True)
        soon(lambda: open_streams(server) == 0)
        for how, status in (("http", "400"), ("grpc", "StatusCode.INVALID_ARGUMENT")):
            with pytest.raises(
                InferenceServerException, match="Sequence 77 was not started or ended by itself"
            ) as said:
                asking(clients, how)(sounds(1, CHUNK)[0], sequence_id=77)
            assert said.value.status() == status
            assert "after 1 s of silence; send sequence_start" in said.value.message()
        assert server.ask("GET", "/v1/stats")[2]["models"]["hark"]["slots"]["in_use"] == 0


@pytest.mark.parametrize("how", ["http", "grpc"])
@pytest.mark.parametrize(
    ("frames", "options", "said"),
    [
        (CHUNK, {}, "name it by sequence_id, not 0"),
        (CHUNK + 1, {"sequence_id": 5, "sequence_start": True}, "with 1 to 320 frames"),
        (0, {"sequence_id": 5, "sequence_start": True}, "has no frames; send 1 to 320"),
        (CHUNK, {"sequence_id": "x" * 129, "sequence_start": True}, "at most 128 characters"),
        (CHUNK, {"sequence_id": 5, "sequence_start": True, "timeout": 1}, "shorter than the network's own time"),
        (CHUNK, {"sequence_id": 5, "sequence_end": True}, "was not started"),
    ],
)
def test_mistakes_are_said(
    server: RunningServer, clients: dict[str, Any], how: str, frames: int, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InferenceServerException, match=said):
        asking(clients, how)(np.zeros(frames, np.int16), **options)
    assert open_streams(server) == 0


def test_a_bad_chunk_leaves_the_sequence_as_it_was(clients: dict[str, Any], bundle: Path) -> None:
    sound, infer = sounds(1, 600)[0], asking(clients, "grpc")
    first = infer(sound[:CHUNK], sequence_id=8, sequence_start=True)
    with pytest.raises(InferenceServerException, match="frames"):
        infer(np.zeros(CHUNK + 1, np.int16), sequence_id=8)
    rest = infer(sound[CHUNK:], sequence_id=8, sequence_end=True)
    np.testing.assert_allclose(np.concatenate([first[0], rest[0]]), offline(bundle, sound[None])[0], atol=1e-5)


def test_an_application_that_remembers_nothing_takes_no_sequence(clients: dict[str, Any]) -> None:
    for kind, client in ((http, clients["http"]), (rpc, clients["grpc"])):
        given = kind.InferInput("numbers", [1, 4], "FP32")
        given.set_data_from_numpy(np.ones((1, 4), np.float32))
        assert client.infer("doubler", [given], sequence_id=0, sequence_start=True).as_numpy("doubles").sum() == 8
        with pytest.raises(InferenceServerException, match="remembers nothing from one request to the next"):
            client.infer("doubler", [given], sequence_id=4, sequence_start=True)


def test_the_metadata_says_what_varies(clients: dict[str, Any]) -> None:
    metadata = clients["http"].get_model_metadata("hark")
    assert metadata["inputs"] == [{"name": "sound", "datatype": "INT16", "shape": [1, -1]}]
    assert metadata["outputs"] == [{"name": "scores", "datatype": "FP32", "shape": [1, -1, 2]}]
    config = clients["http"].get_model_config("hark")
    assert (config["max_batch_size"], config["input"][0]["dims"], config["output"][0]["dims"]) == (1, [-1], [-1, 2])
    assert config["sequence_batching"] == {"max_sequence_idle_microseconds": 100_000_000, "direct": {}}
    config = clients["grpc"].get_model_config("hark").config
    assert config.sequence_batching.max_sequence_idle_microseconds == 100_000_000
    assert config.WhichOneof("scheduling_choice") == "sequence_batching"
    assert config.sequence_batching.WhichOneof("strategy_choice") == "direct"
    assert clients["grpc"].get_model_config("doubler").config.WhichOneof("scheduling_choice") is None
    assert "sequence" in clients["http"].get_server_metadata()["extensions"]
    assert "sequence" in clients["grpc"].get_server_metadata().extensions


def nested(place: dict[str, Any], data: list[Any], shape: list[int]) -> bytes:
    tensor = {"name": "sound", "datatype": "INT16", "shape": shape, "data": data}
    return json.dumps({"inputs": [tensor], "parameters": place}).encode()


def test_json_may_be_nested(server: RunningServer) -> None:
    place = {"sequence_id": 6, "sequence_start": True, "sequence_end": True}
    answers = [
        server.ask("POST", "/v2/models/hark/infer", nested(place, data, shape))[2]["outputs"][0]
        for data, shape in (([[1, 2, 3]], [1, 3]), ([1, 2, 3], [1, 3]), ([1, 2, 3], [3]))
    ]
    assert answers[0] == answers[1]
    assert answers[0]["data"] == answers[2]["data"]
    assert [answers[0]["shape"][0], *answers[2]["shape"]] == [1, *answers[0]["shape"][1:]]
    for wrong in ({"sequence_id": True}, {"sequence_id": 1.5}, {"sequence_id": 6, "sequence_start": "yes"}):
        status, _, said = server.ask("POST", "/v2/models/hark/infer", nested(wrong, [1], [1]))
        assert (status, "must be" in said["error"]) == (400, True)


def wav(sound: Array, rate_hz: int = RATE_HZ) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate_hz)
        out.writeframes(sound.tobytes())
    return file.getvalue()


def events(server: RunningServer, body: bytes, content_type: str) -> list[Any]:
    status, _, answer = server.ask("POST", "/v1/apps/hark", body, {"Content-Type": content_type})
    assert status == 200, answer
    assert answer.keys() == {"events"}
    return answer["events"]


@pytest.mark.thorough
def test_a_whole_recording_is_heard_at_once(server: RunningServer, bundle: Path) -> None:
    sound = np.tile(sounds(1, 8000)[0], 12)[:-77]
    expected = offline(bundle, sound[None])[0]
    for body, content_type in (
        (wav(sound), "audio/wav"),
        (wav(sound), "application/x-www-form-urlencoded"),
        (sound.tobytes(), "application/octet-stream"),
    ):
        frames = [frame for event in events(server, body, content_type) for frame in event]
        np.testing.assert_allclose(frames, expected, atol=1e-4)
    faster = wav(np.repeat(sound[:8000], 2), 2 * RATE_HZ)
    frames = [frame for event in events(server, faster, "audio/x-wav") for frame in event]
    assert len(frames) == offline(bundle, sound[None, :8000]).shape[1]
    assert events(server, b"", "application/octet-stream") == []
    hark, doubler = server.ask("GET", "/v1/apps")[2]["apps"]
    assert hark["accepts"] == ["audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave", "application/octet-stream"]
    assert doubler["accepts"][-2:] == ["application/json", "application/octet-stream"]
    assert open_streams(server) == 0


@pytest.mark.parametrize(
    ("body", "content_type", "status", "said"),
    [
        (b"RIFF", "audio/wav", 400, "ended before its header"),
        (b"no sound at all", "audio/wav", 400, "no WAV"),
        (b"123", "application/octet-stream", 400, "takes whole frames of 2"),
        (b"[1, 2]", "application/json", 415, "send a WAV as audio/wav, or samples as application/octet-stream"),
        (b"\xff\xfb", "audio/mpeg", 415, "send a WAV as audio/wav"),
        (b"", "application/x-www-form-urlencoded", 415, "send a WAV as audio/wav"),
        (wav(np.zeros(100, np.int16))[:-1], "audio/wav", 400, "within a frame"),
        (bytes(1 << 24), "application/octet-stream", 413, ""),
    ],
)
def test_what_is_no_recording_is_said(
    server: RunningServer, body: bytes, content_type: str, status: int, said: str
) -> None:
    found, _, answer = server.ask("POST", "/v1/apps/hark", body, {"Content-Type": content_type})
    assert (found, said in answer["error"]) == (status, True), answer
    assert open_streams(server) == 0


@pytest.mark.thorough
def test_keys_front_ends_and_a_drain(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    options = ("--frontends", "2", "--api-keys", str(tmp_path / "keys"))
    ann, ben = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
    with RunningServer(bundle, *options) as server:
        sound = sounds(1, 2000)[0]
        for name in range(1, 5):
            client = http.InferenceServerClient(f"127.0.0.1:{server.port}")
            infer = asking({"http": client}, "http")
            parts = []
            for chunk, flags in chunks(sound):
                parts.append(infer(chunk, sequence_id=name, headers=ann, **flags)[0])
                if not flags["sequence_end"]:
                    # On the same connection, and so in the same front-end: another client's key, another sequence.
                    with pytest.raises(InferenceServerException, match=f"Sequence {name} was not started"):
                        infer(chunk, sequence_id=name, headers=ben)
            np.testing.assert_allclose(np.concatenate(parts), offline(bundle, sound[None])[0], atol=1e-5)
            client.close()
        status, _, answer = server.ask("POST", "/v1/apps/hark", wav(sound), {"Content-Type": "audio/wav"} | ann)
        assert status == 200
        frames = [frame for event in answer["events"] for frame in event]
        np.testing.assert_allclose(frames, offline(bundle, sound[None])[0], atol=1e-5)
        seen = refuses_in_a_drain(server)
    # On a busy machine a drain may be over before anybody asked; then there is nothing to see.
    for _ in range(4):
        if not seen:
            with RunningServer(bundle, *options) as server:
                seen = refuses_in_a_drain(server)
    assert seen


def refuses_in_a_drain(server: RunningServer) -> bool:
    """Check that a server that drains starts no sequence; False if it listened no more when it was asked."""

    def start(name: int) -> tuple[int, Any]:
        body = nested({"sequence_id": name, "sequence_start": True}, [0] * CHUNK, [1, CHUNK])
        headers = {"Authorization": f"Bearer {KEYS['ann']}"}
        status, _, reply = server.ask("POST", "/v2/models/hark/infer", body, headers)
        return status, reply

    assert start(2)[0] == 200
    server.stop()
    try:
        # Nobody knows which of the first ones come before the signal.
        while (answer := start(3))[0] == 200:
            pass
    except ConnectionError:
        return False
    assert (answer[0], "The server is shutting down" in answer[1]["error"]) == (503, True), answer
    assert server.process.wait(10) == 0
    return True
