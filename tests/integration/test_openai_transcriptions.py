"""`POST /v1/audio/transcriptions` by OpenAI's own client, as its users have it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from tests.support.processes import eventually
from tests.support.serving import RunningServer, write_doubler
from tests.support.tones import silence, spoken, tones_bundle, wav

KEY = "a-key-of-thirty-two-characters-a"
BOUNDARY = "a-boundary"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", "Authorization": f"Bearer {KEY}"}
# A second and more of silence ends an utterance.
SAID = wav(spoken("alpha", "bravo"), 8000)
TEXT = "alpha bravo"
PATH = "/v1/audio/transcriptions"


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


def asked(client: openai.OpenAI, sound: bytes = SAID, **options: Any) -> Any:
    return client.audio.transcriptions.create(file=("said.wav", sound), model="tones", **options)


def test_the_text_of_a_recording(client: openai.OpenAI) -> None:
    found = asked(client)
    assert found.text == TEXT
    assert found.usage.seconds == pytest.approx(0.7)


def test_a_recording_at_another_rate_says_the_same(client: openai.OpenAI) -> None:
    for rate_hz in (16_000, 24_000, 44_100):
        assert asked(client, wav(spoken("alpha", "delta", rate_hz=rate_hz), rate_hz)).text == "alpha delta"


def test_words_and_segments_have_their_times(client: openai.OpenAI) -> None:
    sound = np.concatenate([spoken("alpha", "bravo"), silence(1.5), spoken("charlie")])
    found = asked(
        client, wav(sound), response_format="verbose_json", timestamp_granularities=["word", "segment"], language="en"
    )
    assert (found.text, found.language) == ("alpha bravo charlie", "en")
    assert found.duration == pytest.approx(2.6)
    words = [(word.word, word.start, word.end) for word in found.words]
    assert [word for word, _, _ in words] == ["alpha", "bravo", "charlie"]
    for (_, start_s, end_s), expected_s in zip(words, (0.1, 0.4, 2.3), strict=True):
        assert start_s == pytest.approx(expected_s, abs=0.041)
        assert end_s == pytest.approx(expected_s + 0.2, abs=0.041)
    assert [segment.text for segment in found.segments] == ["alpha bravo", "charlie"]
    assert [segment.start for segment in found.segments] == [words[0][1], words[2][1]]
    assert found.segments[0].avg_logprob == pytest.approx(-0.1054, abs=1e-4)
    # Segments alone, where nothing is said of it.
    assert asked(client, response_format="verbose_json").words is None


def test_subtitles_and_plain_text(client: openai.OpenAI) -> None:
    assert asked(client, response_format="text") == f"{TEXT}\n"
    begin, arrow, end = "00:00:00,", " --> ", "alpha bravo\n\n"
    srt = asked(client, response_format="srt")
    assert srt.startswith(f"1\n{begin}")
    assert arrow in srt
    assert srt.endswith(end)
    vtt = asked(client, response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:00.")
    assert vtt.endswith(end)


def test_text_comes_while_it_is_recognised(client: openai.OpenAI) -> None:
    events = list(asked(client, stream=True))
    *deltas, done = events
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert len(deltas) == 4
    assert "".join(event.delta for event in deltas) == TEXT
    assert (done.type, done.text) == ("transcript.text.done", TEXT)


def test_nothing_is_said_in_silence(client: openai.OpenAI) -> None:
    quiet = wav(silence(1.0))
    assert asked(client, quiet).text == ""
    assert asked(client, quiet, response_format="srt") == ""
    assert [event.type for event in asked(client, quiet, stream=True)] == ["transcript.text.done"]


def test_models_are_listed_for_both_protocols(client: openai.OpenAI, server: RunningServer) -> None:
    assert [model.id for model in client.models.list()] == ["tones", "doubler"]
    assert client.models.retrieve("tones").id == "tones"
    bearer = {"Authorization": f"Bearer {KEY}"}
    assert server.ask("GET", "/v1/models", headers=bearer)[2]["models"] == ["tones", "doubler"]
    assert server.ask("GET", "/v1/models/tones", headers=bearer)[2]["ready"] is True


def refused(client: openai.OpenAI, error: type[openai.APIStatusError], **options: Any) -> Any:
    given: dict[str, Any] = {"file": ("said.wav", SAID), "model": "tones"} | options
    with pytest.raises(error) as raised:
        client.audio.transcriptions.create(**given)
    return raised.value


def test_a_client_reads_why_it_was_refused(client: openai.OpenAI, server: RunningServer) -> None:
    error = refused(client, openai.NotFoundError, model="whisper-1")
    assert (error.code, error.param, error.type) == ("model_not_found", "model", "invalid_request_error")
    assert "no model 'whisper-1' that recognises words; there is 'tones'" in error.message
    assert "'doubler' that recognises" in refused(client, openai.NotFoundError, model="doubler").message
    error = refused(client, openai.APIStatusError, file=("said.mp3", b"ID3" + bytes(2000)))
    assert error.status_code == 415
    assert "is no WAV" in error.message
    error = refused(client, openai.BadRequestError, response_format="diarized_json")
    assert "response_format is 'diarized_json'" in error.message
    assert error.param == "response_format"
    assert refused(client, openai.BadRequestError, file=("empty.wav", b"")).param == "file"
    error = refused(client, openai.APIStatusError, file=("long.wav", wav(silence(7_200.0))))
    assert error.status_code == 413
    assert "at most 2,016,384 are taken. Cut the recording, or send it as a live stream." in error.message
    error = refused(client, openai.APIStatusError, file=("long.wav", wav(silence(125.3))))
    assert error.status_code == 413
    assert "'tones' takes at most 2,000,000" in error.message
    with openai.OpenAI(base_url=client.base_url, api_key="unknown", max_retries=0) as other:
        assert refused(other, openai.AuthenticationError).code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError, match="requires an API key"):
            other.models.list()


def test_a_client_reads_that_something_is_not_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="There is no model 'whisper-1' here"):
        client.models.retrieve("whisper-1")
    with pytest.raises(openai.NotFoundError, match="There is no '/v1/chat/completions' here"):
        client.chat.completions.create(model="tones", messages=[])
    with pytest.raises(openai.NotFoundError, match="There is no '/v1/audio/speech' here"):
        client.audio.speech.create(model="tones", voice="alloy", input="alpha")


def form(*parts: tuple[str, str, bytes]) -> bytes:
    body = b""
    for name, file, content in parts:
        named = f'form-data; name="{name}"' + (f'; filename="{file}"' if file else "")
        body += f"--{BOUNDARY}\r\nContent-Disposition: {named}\r\n\r\n".encode() + content + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


FILE = ("file", "said.wav", SAID)


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (form(("model", "", b"tones")), 400, "no part 'file'"),
        (form(FILE, FILE), 400, "the field 'file' twice"),
        (form(("file", "said.wav", b"")), 400, "is empty"),
        (form(FILE, ("voice", "", b"x")), 400, "no field 'voice'"),
        (form(FILE, ("model", "", b"\xff")), 400, "not UTF-8"),
        (form(FILE, ("stream", "", b"maybe")), 400, "stream is 'maybe'"),
        (form(FILE, ("stream", "", b"true"), ("response_format", "", b"srt")), 400, "stream has no response_format"),
        (form(FILE, ("timestamp_granularities[]", "", b"phoneme")), 400, "takes segment and word"),
        (form(FILE, ("timestamp_granularities[]", "", b"word")), 400, "'json' does not have; send verbose_json"),
        (form(FILE, ("include[]", "", b"logprobs")), 400, "leave include[] out"),
        (form(FILE, *[("timestamp_granularities[]", "", b"word")] * 100), 400, "more parts"),
        (form(("file", "said.wav", SAID[:20])), 400, "WAV ended before its header"),
        (form(("file", "said.wav", SAID[:-1])), 400, "ends within a frame"),
        (form(FILE)[:-9], 400, "not multipart/form-data"),
        (b"garbage", 400, "not multipart/form-data"),
        (b"", 400, "not multipart/form-data"),
    ],
)
def test_bad_forms_are_refused_in_openais_shape(server: RunningServer, body: bytes, status: int, why: str) -> None:
    found, _, reply = server.ask("POST", PATH, body, FORM)
    assert found == status
    assert why in reply["error"]["message"]
    assert reply["error"]["type"] == "invalid_request_error"


def test_other_requests_are_refused_in_openais_shape(server: RunningServer) -> None:
    bearer = {"Authorization": FORM["Authorization"]}
    for method, headers, status in (
        ("GET", bearer, 405),
        ("POST", bearer | {"Content-Type": "application/json"}, 400),
        ("POST", bearer | {"Content-Type": "multipart/form-data"}, 400),
        ("POST", FORM | {"Authorization": "Bearer wrong"}, 401),
        ("POST", FORM | {"Content-Length": str(3 << 40)}, 413),
    ):
        found, _, reply = server.ask(method, PATH, b"" if method == "POST" else None, headers)
        assert (found, set(reply)) == (status, {"error"}), reply
        assert reply["error"]["message"]


def test_without_a_name_the_only_model_answers(server: RunningServer) -> None:
    status, _, reply = server.ask("POST", PATH, form(FILE), FORM)
    assert (status, reply["text"]) == (200, TEXT)
    # Deepgram's scheme is as good as another.
    status, _, reply = server.ask("POST", PATH, form(FILE), FORM | {"Authorization": f"Token {KEY}"})
    assert (status, reply["text"]) == (200, TEXT)


def test_requests_leave_nothing_behind(client: openai.OpenAI, server: RunningServer) -> None:
    bearer = {"Authorization": f"Bearer {KEY}"}
    before = server.ask("GET", "/v1/stats", headers=bearer)[2]["models"]["tones"]
    asked(client)
    refused(client, openai.APIStatusError, file=("said.wav", SAID[:-1]))

    def now() -> Any:
        return server.ask("GET", "/v1/stats", headers=bearer)[2]["models"]["tones"]

    # A slot that is left while its chunk is computed is free a moment later.
    eventually(lambda: now()["slots"]["in_use"] == 0, within_s=20)
    after = now()
    assert after["streams"]["opened"] - before["streams"]["opened"] == 2
    assert after["streams"]["aborted"] - before["streams"]["aborted"] == 1
    assert after["streams"]["open"] == 0
