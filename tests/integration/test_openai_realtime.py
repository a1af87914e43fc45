"""Transcription over OpenAI's realtime API by OpenAI's own client, as its users have it."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from penstock.core.speech.sound import Samples
from tests.support.serving import RunningServer, write_doubler
from tests.support.tones import pieces, silence, spoken, tones_bundle

KEY = "a-key-of-thirty-two-characters-a"
PCM_HZ = 24_000
TRANSCRIPTION = "conversation.item.input_audio_transcription"

# The client connects as it did with older versions of websockets.
pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tones")
    other = write_doubler(tmp_path_factory.mktemp("doubler"))
    keys = folder / "keys"
    keys.write_text(f"me {KEY}\n")
    with RunningServer(tones_bundle(folder), str(other), "--api-keys", str(keys)) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    base = f"http://{server.host}:{server.port}/v1"
    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
        yield client


def opened(client: openai.OpenAI) -> AbstractContextManager[Any]:
    return client.realtime.connect(extra_query={"intent": "transcription"}, max_retries=0)


def updated(stream: Any, **input: Any) -> Any:
    """Have the session begin with the client committing, unless the input says otherwise."""
    assert stream.recv().type == "session.created"
    settings = {"transcription": {"model": "tones", "language": "en"}, "turn_detection": None} | input
    stream.session.update(session={"type": "transcription", "audio": {"input": settings}})
    found = stream.recv()
    assert found.type == "session.updated", found
    return found.session


def say(stream: Any, sound_T: Samples, size: int = 1_920) -> None:
    for piece in pieces(sound_T, size):
        stream.input_audio_buffer.append(audio=base64.b64encode(piece).decode())


def until(stream: Any, kind: str) -> list[Any]:
    events: list[Any] = []
    while not events or events[-1].type != kind:
        events.append(stream.recv())
        assert events[-1].type != "error", events[-1]
    return events


def test_an_item_is_recognised_when_it_is_committed(client: openai.OpenAI) -> None:
    with opened(client) as stream:
        session = updated(stream)
        assert (session.type, session.object) == ("transcription", "realtime.transcription_session")
        given = session.audio.input
        assert (given.format.rate, given.turn_detection, given.transcription.language) == (PCM_HZ, None, "en")
        say(stream, spoken("alpha", "bravo", rate_hz=PCM_HZ))
        stream.input_audio_buffer.commit()
        events = until(stream, f"{TRANSCRIPTION}.completed")
        deltas = [event for event in events if event.type == f"{TRANSCRIPTION}.delta"]
        assert "".join(event.delta for event in deltas) == "alpha bravo"
        assert len(deltas) == 4
        (committed,) = [event for event in events if event.type == "input_audio_buffer.committed"]
        done = events[-1]
        assert done.transcript == "alpha bravo"
        assert (done.usage.type, done.usage.seconds) == ("duration", pytest.approx(0.7, abs=0.01))
        assert {event.item_id for event in events} == {done.item_id}
        assert len({event.event_id for event in events}) == len(events)
        # The next item in the same session.
        say(stream, spoken("charlie", rate_hz=PCM_HZ))
        stream.input_audio_buffer.commit()
        events = until(stream, f"{TRANSCRIPTION}.completed")
        assert events[-1].transcript == "charlie"
        assert events[-1].item_id != done.item_id
        (again,) = [event for event in events if event.type == "input_audio_buffer.committed"]
        assert (committed.previous_item_id, again.previous_item_id) == (None, done.item_id)


def test_commits_in_a_row_are_answered_in_order(client: openai.OpenAI) -> None:
    with opened(client) as stream:
        updated(stream)
        for word in ("alpha", "bravo", "charlie"):
            say(stream, spoken(word, rate_hz=PCM_HZ))
            stream.input_audio_buffer.commit()
        found = [until(stream, f"{TRANSCRIPTION}.completed")[-1] for _ in range(3)]
        assert [event.transcript for event in found] == ["alpha", "bravo", "charlie"]
        assert len({event.item_id for event in found}) == 3


def test_pauses_commit_where_the_server_detects_turns(client: openai.OpenAI) -> None:
    with opened(client) as stream:
        session = updated(stream, turn_detection={"type": "server_vad", "silence_duration_ms": 400})
        assert session.audio.input.turn_detection.silence_duration_ms == 400
        quiet = silence(1.5, PCM_HZ)
        say(stream, np.concatenate([spoken("alpha", rate_hz=PCM_HZ), quiet, spoken("bravo", rate_hz=PCM_HZ), quiet]))
        first, second = (until(stream, f"{TRANSCRIPTION}.completed") for _ in range(2))
        for events, transcript, at_ms in ((first, "alpha", 100), (second, "bravo", 2_000)):
            kinds = [event.type.removeprefix("input_audio_buffer.") for event in events]
            kinds = [kind for kind in kinds if not kind.endswith("delta")]
            assert kinds == ["speech_started", "speech_stopped", "committed", f"{TRANSCRIPTION}.completed"]
            assert events[-1].transcript == transcript
            assert events[0].audio_start_ms == pytest.approx(at_ms, abs=90)
            assert {event.item_id for event in events} == {events[0].item_id}
        assert first[0].item_id != second[0].item_id


def test_what_is_cleared_is_not_transcribed(client: openai.OpenAI) -> None:
    with opened(client) as stream:
        updated(stream)
        say(stream, spoken("alpha", rate_hz=PCM_HZ)[:4_800])
        stream.input_audio_buffer.clear()
        until(stream, "input_audio_buffer.cleared")
        say(stream, spoken("bravo", rate_hz=PCM_HZ))
        stream.input_audio_buffer.commit()
        assert until(stream, f"{TRANSCRIPTION}.completed")[-1].transcript == "bravo"


def test_telephone_sound_and_other_rates_are_taken(client: openai.OpenAI) -> None:
    with opened(client) as stream:
        assert updated(stream, format={"type": "audio/pcm", "rate": 8_000}).audio.input.format.rate == 8_000
        say(stream, spoken("delta"))
        stream.input_audio_buffer.commit()
        assert until(stream, f"{TRANSCRIPTION}.completed")[-1].transcript == "delta"
        stream.session.update(session={"type": "transcription", "audio": {"input": {"format": {"type": "audio/pcmu"}}}})
        assert stream.recv().session.audio.input.format.type == "audio/pcmu"
        stream.input_audio_buffer.append(audio=base64.b64encode(b"\xff" * 8_000).decode())
        stream.input_audio_buffer.commit()
        done = until(stream, f"{TRANSCRIPTION}.completed")[-1]
        assert (done.transcript, done.usage.seconds) == ("", pytest.approx(1.0))


def test_many_sessions_at_once_do_not_mix(client: openai.OpenAI) -> None:
    words = ["alpha", "bravo", "charlie", "delta"] * 2
    found: dict[int, str] = {}

    def one(index: int) -> None:
        with opened(client) as stream:
            updated(stream)
            say(stream, spoken(words[index], words[index - 1], rate_hz=PCM_HZ), 960)
            stream.input_audio_buffer.commit()
            found[index] = until(stream, f"{TRANSCRIPTION}.completed")[-1].transcript

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(words))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: f"{words[index]} {words[index - 1]}" for index in range(len(words))}


INPUT = {"type": "transcription", "audio": {"input": {}}}
MEGAHERTZ = {"format": {"type": "audio/pcm", "rate": 10_000_000}}


def update(**input: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"type": "transcription", "audio": {"input": input}}}


@pytest.mark.parametrize(
    ("event", "param", "why"),
    [
        ({"type": "input_audio_buffer.append", "audio": "not base64!"}, "audio", "no base64"),
        ({"type": "input_audio_buffer.append", "audio": "AAA"}, "audio", "no base64"),
        ({"type": "input_audio_buffer.append", "audio": "ÄÖÜ="}, "audio", "no base64"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "audio", "3 bytes; send whole frames of 2"),
        ({"type": "input_audio_buffer.append"}, "audio", "no audio"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA" * 180_000}, None, "at most 240,000 are taken"),
        ({"type": "input_audio_buffer.commit"}, None, "nothing to commit"),
        ({"type": "response.create"}, "type", "no event 'response.create' in a transcription"),
        ({"type": 7}, "type", "no event 7"),
        ({}, "type", "no event None"),
        (update(format={"type": "audio/pcm", "rate": 1}), "session.audio.input.format.rate", "is 1; it must be from"),
        (update(**MEGAHERTZ), "session.audio.input.format.rate", "is 10000000; it must be from 1,000 to 384,000"),
        (update(format={"type": "audio/opus"}), "session.audio.input.format.type", "send audio/pcm or audio/pcmu"),
        (
            update(transcription={"model": "doubler"}),
            "session.audio.input.transcription.model",
            "open one with ?model=",
        ),
        (update(turn_detection={"type": "semantic_vad"}), "session.audio.input.turn_detection.type", "send server_vad"),
        (update(noise_reduction={"type": "near_field"}), "session.audio.input.noise_reduction", "set noise_reduction"),
        (update(colour="red"), "session.audio.input.colour", "has 'colour'; it takes"),
        ({"type": "session.update", "session": {"type": "realtime"}}, "session.type", "transcription alone is served"),
        ({"type": "session.update"}, "session", "session is no object; send one with the type transcription"),
    ],
)
def test_bad_events_get_an_error_and_the_session_goes_on(
    client: openai.OpenAI, event: dict[str, Any], param: str | None, why: str
) -> None:
    with opened(client) as stream:
        updated(stream)
        stream.send(event | {"event_id": "mine"})
        found = stream.recv()
        assert (found.type, found.error.type) == ("error", "invalid_request_error")
        assert (found.error.param, found.error.event_id) == (param, "mine")
        assert why in found.error.message
        say(stream, spoken("alpha", rate_hz=PCM_HZ))
        stream.input_audio_buffer.commit()
        assert until(stream, f"{TRANSCRIPTION}.completed")[-1].transcript == "alpha"


def test_the_format_does_not_change_within_an_item(client: openai.OpenAI) -> None:
    with opened(client) as stream:
        updated(stream)
        say(stream, spoken("alpha", rate_hz=PCM_HZ))
        stream.send(update(format={"type": "audio/pcm", "rate": 8_000}))
        while (event := stream.recv()).type != "error":
            pass
        assert "commit or clear it first" in event.error.message


def raw(server: RunningServer, query: str = "intent=transcription", **options: Any) -> ClientConnection:
    url = f"ws://{server.host}:{server.port}/v1/realtime?{query}"
    bearer = {"Authorization": f"Bearer {KEY}"}
    return connect(url, additional_headers=bearer, compression=None, **options)


@pytest.mark.thorough
def test_a_client_that_reads_nothing_is_cut_off_alone(tmp_path: Path) -> None:
    message = json.dumps(update(transcription={"prompt": "x" * 4_000}))
    with RunningServer(tones_bundle(tmp_path)) as server:
        base = f"http://{server.host}:{server.port}/v1"
        with openai.OpenAI(base_url=base, api_key="none") as client, opened(client) as good:
            updated(good)
            # Each is answered with as many bytes.
            with raw(server) as stream:
                with suppress(ConnectionClosed):
                    for _ in range(10_000):
                        stream.send(message)
                with pytest.raises(ConnectionClosed):
                    stream.send(message)
            say(good, spoken("alpha", rate_hz=PCM_HZ))
            good.input_audio_buffer.commit()
            assert until(good, f"{TRANSCRIPTION}.completed")[-1].transcript == "alpha"
        assert "Traceback" not in server.log()


@pytest.mark.thorough
def test_garbage_and_giant_frames_end_their_own_session_alone(server: RunningServer, client: openai.OpenAI) -> None:
    with opened(client) as good:
        updated(good)
        say(good, spoken("alpha", rate_hz=PCM_HZ))
        with raw(server) as stream:
            assert json.loads(stream.recv())["type"] == "session.created"
            for bad in ("{", "[]", "7", b"\0\1"):
                stream.send(bad)
                assert json.loads(stream.recv())["error"]["type"] == "invalid_request_error"
            stream.send("x" * (2 << 20))
            error = json.loads(stream.recv())["error"]
            assert "at most 1,048,576 are taken" in error["message"]
            with pytest.raises(ConnectionClosed) as raised:
                stream.recv()
            assert raised.value.rcvd is not None
            assert raised.value.rcvd.code == 1009
        with raw(server) as stream:
            stream.recv()
            stream.socket.sendall(bytes(64))
            assert json.loads(stream.recv())["error"]["type"] == "invalid_request_error"
            with pytest.raises(ConnectionClosed) as raised:
                stream.recv()
            assert raised.value.rcvd is not None
            assert raised.value.rcvd.code == 1002
        good.input_audio_buffer.commit()
        assert until(good, f"{TRANSCRIPTION}.completed")[-1].transcript == "alpha"


def test_refused_upgrades_say_why(server: RunningServer) -> None:
    for query, status, code, why in (
        ("model=gpt-realtime", 404, "model_not_found", "no model 'gpt-realtime' that recognises words"),
        ("intent=conversation", 400, None, "transcription alone is served"),
        ("model=%ff", 400, None, "not UTF-8"),
    ):
        with pytest.raises(InvalidStatus) as raised:
            raw(server, query)
        error = json.loads(raised.value.response.body)["error"]
        assert (raised.value.response.status_code, error["code"]) == (status, code)
        assert why in error["message"]
    # A page offers its key as a subprotocol.
    url = f"ws://{server.host}:{server.port}/v1/realtime"
    with connect(url, subprotocols=["realtime", f"openai-insecure-api-key.{KEY}"], compression=None) as stream:  # type: ignore
        assert stream.subprotocol == "realtime"
        assert json.loads(stream.recv())["type"] == "session.created"
    with connect(url.replace("realtime", "listen"), subprotocols=["token", KEY], compression=None) as stream:  # type: ignore
        assert stream.subprotocol == "token"


def test_a_drained_server_completes_what_came(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tones")
    with RunningServer(tones_bundle(folder)) as server:
        with raw(server) as stream:
            stream.send(json.dumps(update(turn_detection=None)))
            audio = base64.b64encode(spoken("alpha", "bravo", rate_hz=PCM_HZ).tobytes()).decode()
            stream.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
            said: list[Any] = []
            with suppress(ConnectionClosed):
                while True:
                    said.append(json.loads(stream.recv(30)))
                    if said[-1].get("delta") == "al":
                        server.stop()
            assert stream.close_code == 1012
        assert [event["transcript"] for event in said if event["type"] == f"{TRANSCRIPTION}.completed"] == [
            "alpha bravo"
        ]
