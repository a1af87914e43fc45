"""`/v1/listen` by Deepgram's own client, as its users have it."""

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import pytest
from deepgram import AsyncDeepgramClient, DeepgramClient
from deepgram.environment import DeepgramClientEnvironment
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from penstock.core.speech.sound import Samples
from tests.support.serving import RunningServer, write_doubler
from tests.support.tones import RATE_HZ, pieces, silence, spoken, tones_bundle, wav

KEY = "a-key-of-thirty-two-characters-a"
TOKEN = {"Authorization": f"Token {KEY}"}
# The client looks for the protocol of older versions of websockets, which is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:websockets:DeprecationWarning")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tones")
    other = write_doubler(tmp_path_factory.mktemp("doubler"))
    keys = folder / "keys"
    keys.write_text(f"me {KEY}\n")
    with RunningServer(tones_bundle(folder), str(other), "--api-keys", str(keys)) as server:
        yield server


def client_of(server: RunningServer, key: str = KEY) -> DeepgramClient:
    http, ws = f"http://{server.host}:{server.port}", f"ws://{server.host}:{server.port}"
    environment = DeepgramClientEnvironment(base=http, production=ws, agent=ws, agent_rest=http)
    return DeepgramClient(api_key=key, environment=environment)


def opened(server: RunningServer, key: str = KEY, **options: Any) -> AbstractContextManager[Any]:
    given: dict[str, Any] = {"model": "tones", "encoding": "linear16", "sample_rate": RATE_HZ} | options
    return client_of(server, key).listen.v1.connect(**given)


def told(server: RunningServer, sound_T: Samples, size: int = 400, **options: Any) -> list[Any]:
    """All messages of a stream of one sound."""
    with opened(server, **options) as stream:
        for piece in pieces(sound_T, size):
            stream.send_media(piece)
        stream.send_close_stream()
        return list(stream)


def texts(messages: list[Any]) -> list[tuple[str, bool, bool]]:
    return [
        (message.channel.alternatives[0].transcript, message.is_final, message.speech_final)
        for message in messages
        if message.type == "Results"
    ]


def test_a_stream_is_recognised(server: RunningServer) -> None:
    messages = told(server, spoken("alpha", "bravo"))
    assert [message.type for message in messages] == ["Results", "Metadata"]
    result, about = messages
    alternative = result.channel.alternatives[0]
    assert (alternative.transcript, alternative.confidence) == ("alpha bravo", 0.9)
    assert [word.punctuated_word for word in alternative.words] == ["alpha", "bravo"]
    assert [word.start for word in alternative.words] == pytest.approx([0.1, 0.4], abs=0.041)
    assert [word.end for word in alternative.words] == pytest.approx([0.3, 0.6], abs=0.041)
    assert (result.start, result.duration) == (0.0, pytest.approx(0.7))
    assert (result.is_final, result.metadata.model_info.name) == (True, "tones")
    assert result.metadata.request_id == about.request_id
    assert (about.duration, about.channels) == (pytest.approx(0.7), 1)


def test_what_was_sent_has_its_hash(server: RunningServer) -> None:
    sound = spoken("delta")
    assert told(server, sound)[-1].sha256 == hashlib.sha256(sound.tobytes()).hexdigest()


def test_pauses_end_utterances_and_words_come_before(server: RunningServer) -> None:
    sound = np.concatenate([spoken("alpha", "bravo"), silence(2.0), spoken("charlie"), silence(2.0)])
    options: dict[str, Any] = {
        "interim_results": "true",
        "utterance_end_ms": 1000,
        "vad_events": "true",
        "endpointing": 300,
    }
    messages = told(server, sound, **options)
    assert texts(messages) == [
        ("al", False, False),
        ("alpha", False, False),
        ("alpha br", False, False),
        ("alpha bravo", False, False),
        ("alpha bravo", True, True),
        ("ch", False, False),
        ("charlie", False, False),
        ("charlie", True, True),
    ]
    results = [message for message in messages if message.type == "Results"]
    for message in results:
        (alternative,) = message.channel.alternatives
        assert [word.word for word in alternative.words] == alternative.transcript.split()
        assert alternative.confidence >= 0.9
    finals = [message for message in results if message.is_final]
    assert finals[0].start + finals[0].duration == pytest.approx(0.9, abs=0.081)
    assert finals[1].start == pytest.approx(finals[0].start + finals[0].duration)
    starts = [message.timestamp for message in messages if message.type == "SpeechStarted"]
    assert starts == pytest.approx([0.1, 2.8], abs=0.081)
    ends = [message.last_word_end for message in messages if message.type == "UtteranceEnd"]
    assert ends == [finals[0].channel.alternatives[0].words[-1].end, finals[1].channel.alternatives[0].words[-1].end]
    kinds = [message.type for message in messages]
    assert kinds.index("UtteranceEnd") > kinds.index("Results")


def test_without_endpoints_an_utterance_ends_as_the_application_says(server: RunningServer) -> None:
    sound = np.concatenate([spoken("alpha"), silence(1.0), spoken("bravo")])
    assert texts(told(server, sound, endpointing="false")) == [("alpha", True, False), ("bravo", True, False)]


def test_finalize_gives_the_rest_and_the_stream_goes_on(server: RunningServer) -> None:
    with opened(server, endpointing="false") as stream:
        # It ends within the word.
        for piece in pieces(spoken("alpha")[: round(0.25 * RATE_HZ)], 400):
            stream.send_media(piece)
        stream.send_finalize()
        first = stream.recv()
        for piece in pieces(spoken("delta"), 400):
            stream.send_media(piece)
        stream.send_finalize()
        second = stream.recv()
        stream.send_finalize()
        empty = stream.recv()
        stream.send_close_stream()
        rest = list(stream)
    assert [(each.from_finalize, each.is_final) for each in (first, second, empty)] == [(True, True)] * 3
    assert [each.channel.alternatives[0].transcript for each in (first, second, empty)] == ["alpha", "delta", ""]
    # Times go on where the signal began anew.
    assert second.channel.alternatives[0].words[0].start == pytest.approx(0.35, abs=0.041)
    assert [each.type for each in rest] == ["Metadata"]


@pytest.mark.parametrize("rate_hz", [16_000, 44_100])
def test_sound_of_any_rate_form_and_size_of_message_is_the_same(server: RunningServer, rate_hz: int) -> None:
    sound = spoken("alpha", "delta", rate_hz=rate_hz)
    for size in (37, 4_096):
        assert texts(told(server, sound, size, sample_rate=rate_hz))[0][0] == "alpha delta"
    file = np.frombuffer(wav(sound, rate_hz)[: len(wav(sound, rate_hz)) // 2 * 2], np.int16)
    assert texts(told(server, file, 37, encoding=None, sample_rate=None))[0][0] == "alpha delta"
    stereo = np.repeat(sound, 2)
    assert texts(told(server, stereo, 1_000, sample_rate=rate_hz, channels=2))[0][0] == "alpha delta"


def test_the_asynchronous_client_works_too(server: RunningServer) -> None:
    async def run() -> list[Any]:
        client = AsyncDeepgramClient(api_key=KEY, environment=client_of(server)._client_wrapper.get_environment())
        async with client.listen.v1.connect(model="tones", encoding="linear16", sample_rate=RATE_HZ) as stream:
            for piece in pieces(spoken("charlie"), 800):
                await stream.send_media(piece)
            await stream.send_close_stream()
            return [message async for message in stream]

    assert texts(asyncio.run(run()))[0][0] == "charlie"


def test_many_clients_at_once_do_not_mix(server: RunningServer) -> None:
    words = ["alpha", "bravo", "charlie", "delta"] * 2
    found: dict[int, str] = {}

    def one(index: int) -> None:
        sound = spoken(words[index], words[index - 1], rate_hz=16_000)
        found[index] = texts(told(server, sound, 320, sample_rate=16_000))[0][0]

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(words))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: f"{words[index]} {words[index - 1]}" for index in range(len(words))}


def raw(server: RunningServer, query: str = "", **options: Any) -> ClientConnection:
    query = query or f"encoding=linear16&sample_rate={RATE_HZ}&model=tones"
    url = f"ws://{server.host}:{server.port}/v1/listen?{query}"
    return connect(url, additional_headers=TOKEN, compression=None, **options)


def test_a_stream_has_the_identifier_of_its_handshake(server: RunningServer) -> None:
    with raw(server) as stream:
        stream.send('{"type":"CloseStream"}')
        (about,), _, _ = closed(stream)
        assert stream.response is not None
        assert about["request_id"] == stream.response.headers["dg-request-id"]


def closed(stream: ClientConnection) -> tuple[list[Any], int, str]:
    """All that the server says, and how it closes."""
    said: list[Any] = []
    with suppress(ConnectionClosed):
        while True:
            said.append(json.loads(stream.recv(30)))
    assert stream.close_code is not None
    return said, stream.close_code, stream.close_reason or ""


@pytest.mark.slow
def test_ten_silent_seconds_end_a_stream_and_keep_alive_does_not(server: RunningServer) -> None:
    with raw(server) as silent, raw(server) as kept, opened(server) as other:
        begin_s = time.monotonic()
        silent.send(bytes(320))

        def keep() -> None:
            for _ in range(3):
                kept.send('{"type":"KeepAlive"}')
                time.sleep(5)

        keeper = threading.Thread(target=keep)
        keeper.start()
        said, code, reason = closed(silent)
        # Where the machine stands still, both this test and the server come to it later.
        assert 10 <= time.monotonic() - begin_s < 20
        assert (said, code, reason[:9]) == ([], 1011, "NET-0001:")
        keeper.join()
        kept.send('{"type":"CloseStream"}')
        assert closed(kept)[1] == 1000
        # The one that sent nothing at all is gone too, as it should be.
        with pytest.raises(ConnectionClosed):
            other.recv()


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("encoding=linear16&sample_rate=1", "sample_rate is '1'; it must be a whole number from 1,000 to 384,000"),
        ("encoding=linear16&sample_rate=10000000", "sample_rate is '10000000'"),
        ("encoding=linear16&sample_rate=-8000", "sample_rate is '-8000'"),
        ("encoding=linear16&sample_rate=8e3", "sample_rate is '8e3'"),
        ("encoding=linear16", "needs sample_rate"),
        ("sample_rate=8000", "sample_rate needs encoding: send linear16 or mulaw, or a WAV without"),
        ("encoding=opus&sample_rate=48000", "encoding is 'opus'; send linear16 or mulaw, or a WAV"),
        ("encoding=linear16&sample_rate=8000&channels=6", "channels is '6'"),
        ("encoding=linear16&sample_rate=8000&utterance_end_ms=1000", "needs interim_results"),
        ("encoding=linear16&sample_rate=8000&interim_results=true&utterance_end_ms=10", "from 1,000 to 5,000"),
        ("encoding=linear16&sample_rate=8000&interim_results=maybe", "must be true or false"),
        ("encoding=linear16&sample_rate=8000&endpointing=soon", "endpointing is 'soon'"),
        ("encoding=linear16&sample_rate=8000&diarize=true", "diarize is not done here"),
        ("encoding=linear16&sample_rate=8000&colour=red", "endpointing, interim_results, keyterm, keywords, model"),
        ("&".join(f"a{i}=1" for i in range(300)), "more than 200"),
        ("model=%ff", "not UTF-8"),
    ],
)
def test_bad_queries_are_refused_in_deepgrams_shape(server: RunningServer, query: str, why: str) -> None:
    with pytest.raises(InvalidStatus) as raised:
        raw(server, query)
    response = raised.value.response
    reply = json.loads(response.body)
    assert response.status_code == 400
    assert reply["err_code"] == "Bad Request"
    assert why in reply["err_msg"]
    # Most clients see the headers alone.
    assert response.headers["dg-error"] == reply["err_msg"]
    assert response.headers["dg-request-id"] == reply["request_id"] != ""


def test_other_refusals_have_that_shape_too(server: RunningServer) -> None:
    with pytest.raises(InvalidStatus) as status, opened(server, key="wrong"):
        pass
    assert status.value.response.status_code == 401
    with pytest.raises(InvalidStatus) as status:
        raw(server, "model=n%C3%B6va-3%0A&encoding=linear16&sample_rate=8000")
    assert "no model 'n?va-3\\n' that" in status.value.response.headers["dg-error"]
    with pytest.raises(InvalidStatus) as status:
        raw(server, "model=nova-3&encoding=linear16&sample_rate=8000")
    reply = json.loads(status.value.response.body)
    assert reply["err_code"] == "NOT_FOUND"
    assert "no model 'nova-3' that recognises words; there is 'tones'" in reply["err_msg"]
    code, _, reply = server.ask("GET", "/v1/listen", headers=TOKEN)
    assert (code, reply["err_code"]) == (400, "Bad Request")
    code, _, reply = server.ask("POST", "/v1/listen", b"", TOKEN)
    assert (code, reply["err_code"]) == (405, "Bad Request")
    assert "send them to /v1/audio/transcriptions" in reply["err_msg"]
    code, _, reply = server.ask("GET", "/v1/listen")
    assert (code, reply["err_code"]) == (401, "INVALID_AUTH")


def test_unknown_messages_are_named_and_the_stream_goes_on(server: RunningServer) -> None:
    with raw(server) as stream:
        bad = ['{"type":"Resume"}', "{", "[]", '"x"', '{"type":["Finalize"]}', '{"type":"Finalize","channel":7}']
        for text in bad:
            stream.send(text)
            error = json.loads(stream.recv())
            assert (error["type"], error["variant"]) == ("Error", "SchemaError")
            assert error["description"].endswith((".", "Configure."))
        stream.send('{"type":"Configure"}')
        assert json.loads(stream.recv())["type"] == "ConfigureSuccess"
        stream.send('{"type":"Configure","keyterms":["alpha"]}')
        assert json.loads(stream.recv())["code"] == "CONFIGURE_KEYTERMS_NOT_SUPPORTED"
        for piece in pieces(spoken("bravo"), 400):
            stream.send(piece)
        stream.send(b"")
        said, code, _ = closed(stream)
        assert said[0]["channel"]["alternatives"][0]["transcript"] == "bravo"
        assert (said[-1]["type"], code) == ("Metadata", 1000)


def test_garbage_ends_its_own_stream_alone(server: RunningServer) -> None:
    with opened(server) as good:
        good.send_media(spoken("alpha").tobytes())
        with raw(server, "model=tones") as stream:
            stream.send(b"no RIFF at all")
            assert closed(stream)[1:] == (
                1008,
                "DATA-0000: The stream is no WAV; it does not begin with RIFF and WAVE.",
            )
        with raw(server, max_size=None) as stream:
            stream.send(bytes(1 << 21))
            _, code, reason = closed(stream)
            assert (code, reason[:10]) == (1008, "DATA-0000:")
        with raw(server) as stream:
            stream.send(bytes(2 * 11 * RATE_HZ))
            assert "at most 80,000 are taken" in closed(stream)[2]
        with raw(server) as stream:
            stream.send("x" * 20_000)
            assert closed(stream)[1] == 1008
        good.send_close_stream()
        assert texts(list(good))[0][0] == "alpha"


def test_a_drained_server_answers_what_came(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tones")
    with RunningServer(tones_bundle(folder)) as server:
        query = f"encoding=linear16&sample_rate={RATE_HZ}&model=tones&interim_results=true"
        with connect(f"ws://{server.host}:{server.port}/v1/listen?{query}", compression=None) as stream:
            stream.send(spoken("alpha", "bravo").tobytes())
            # All of it has come.
            while json.loads(stream.recv(30))["channel"]["alternatives"][0]["transcript"] != "alpha bravo":
                pass
            server.stop()
            said, code, _ = closed(stream)
    *_, last, about = said
    assert (last["channel"]["alternatives"][0]["transcript"], last["is_final"]) == ("alpha bravo", True)
    assert (about["type"], code) == ("Metadata", 1012)


def test_quotas_count_these_streams_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tones")
    with RunningServer(tones_bundle(folder), "--max-streams-per-address", "1") as server:
        url = f"ws://{server.host}:{server.port}/v1/listen?encoding=linear16&sample_rate={RATE_HZ}"
        with connect(url, compression=None), pytest.raises(InvalidStatus) as raised:
            connect(url, compression=None)
        assert raised.value.response.status_code == 429
        assert json.loads(raised.value.response.body)["err_code"] == "TOO_MANY_REQUESTS"
