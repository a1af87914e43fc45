"""Sessions of speech services: any cut of the sound, any order of results, any flush; and any bytes at all."""

import base64
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ComputeFailed, InvalidInput, RequestError, TooLarge
from penstock.core.speech.sound import Samples
from penstock.core.speech.spoken import Speech, Word
from penstock.serve.streams.protocol import FLOWING, OVER
from penstock.serve.transcription.listen_options import ListenOptions
from penstock.serve.transcription.listen_session import ListenSession
from penstock.serve.transcription.realtime_session import RealtimeSession
from penstock.serve.transcription.realtime_settings import RealtimeSettings
from tests.support.services import RATE_HZ, Conversation, listening, model, realtime, runs_of

# Parts of a signal, between two flushes.
PARTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4)
CUTS = st.lists(st.integers(0, 80), max_size=12)
# Results that come after each message.
PACES = st.lists(st.integers(0, 3), min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


PCM = {"type": "audio/pcm", "rate": RATE_HZ}


def session_of(**settings: Any) -> dict[str, Any]:
    return {"type": "transcription", "audio": {"input": settings}}


def is_a_refusal(error: RequestError) -> None:
    assert 400 <= error.status < 500
    assert str(error).endswith(".")


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place for place in places if place < len(data))})
    return [data[begin:end] for begin, end in pairwise(edges)]


def words_of(messages: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    return [
        (word["word"], word["start"], word["end"])
        for message in messages
        for word in message["channel"]["alternatives"][0]["words"]
    ]


@given(PARTS, CUTS, PACES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_deepgrams_results_are_those_of_the_signal(
    parts: list[list[int]], cuts: list[int], paces: list[int], interim: bool
) -> None:
    talk = listening(pause_s=None, endpointing=False, interim_results=interim)
    at, expected, sent = 0, [], 0
    for part in parts:
        sound_T = np.array(part, np.int16)
        for piece in cut(sound_T.tobytes(), cuts):
            talk.send(piece)
            talk.answer(paces[sent % len(paces)])
            sent += 1
        talk.text(type="Finalize")
        expected.append(runs_of(sound_T, at))
        at += len(part)
    talk.text(type="CloseStream")
    talk.answer()
    *results, about = talk.said
    finals = [message for message in results if message["is_final"]]
    assert [message["from_finalize"] for message in finals] == [True] * len(parts)
    assert [words_of([message]) for message in finals] == expected
    assert [message["channel"]["alternatives"][0]["transcript"] for message in finals] == [
        " ".join(text for text, _, _ in words) for words in expected
    ]
    edges = np.cumsum([0, *map(len, parts)]) / RATE_HZ
    assert [message["start"] for message in finals] == pytest.approx(edges[:-1].tolist())
    assert [message["duration"] for message in finals] == pytest.approx(np.diff(edges).tolist(), abs=1e-3)
    assert about["duration"] == pytest.approx(at / RATE_HZ)
    assert interim or results == finals
    assert (talk.closed, talk.session.state) == ((1000, ""), OVER)


@given(PARTS, PACES, st.sampled_from([0.001, 0.004, 0.02]), st.sampled_from([None, 1 / RATE_HZ]))
@settings(max_examples=100, deadline=None)
def test_words_that_come_late_lie_within_their_results(
    parts: list[list[int]], paces: list[int], pause_s: float, frame_s: float | None
) -> None:
    options = ListenOptions(encoding="pcm_s16le", rate_hz=RATE_HZ, pause_s=pause_s)
    talk = Conversation(ListenSession(model(frame_s=frame_s), options, stream="some", created="now"))
    for number, part in enumerate(parts):
        talk.send(np.array(part, np.int16).tobytes())
        talk.answer(paces[number % len(paces)])
    talk.text(type="CloseStream")
    talk.answer()
    *results, _ = talk.said
    whole = np.array([number for part in parts for number in part], np.int16)
    assert words_of(results) == runs_of(whole)
    for result in results:
        for _, start_s, end_s in words_of([result]):
            assert result["start"] <= start_s
            assert end_s <= result["start"] + result["duration"] + 1e-9


@given(PARTS, CUTS, PACES)
@settings(max_examples=200, deadline=None)
def test_openais_items_are_those_of_the_signal(parts: list[list[int]], cuts: list[int], paces: list[int]) -> None:
    talk = realtime()
    talk.text(type="session.update", session=session_of(format=PCM, turn_detection=None))
    sent = 0
    for part in parts:
        for piece in cut(np.array(part, np.int16).tobytes(), [2 * place for place in cuts]):
            talk.text(type="input_audio_buffer.append", audio=base64.b64encode(piece).decode())
            talk.answer(paces[sent % len(paces)])
            sent += 1
        talk.text(type="input_audio_buffer.commit")
    talk.answer()
    expected = [" ".join(text for text, _, _ in runs_of(np.array(part, np.int16))) for part in parts]
    committed = [said for said in talk.said if said["type"].endswith(".committed")]
    completed = [said for said in talk.said if said["type"].endswith(".completed")]
    assert [said["transcript"] for said in completed] == expected
    assert [said["item_id"] for said in completed] == [said["item_id"] for said in committed]
    assert [said["previous_item_id"] for said in committed] == [None, *(said["item_id"] for said in committed[:-1])]
    assert sum(said["usage"]["seconds"] for said in completed) == pytest.approx(sum(map(len, parts)) / RATE_HZ)
    for said in completed:
        deltas = [
            each["delta"]
            for each in talk.said
            if each["type"].endswith(".delta") and each["item_id"] == said["item_id"]
        ]
        assert "".join(deltas) == said["transcript"]
    assert len({said["event_id"] for said in talk.said}) == len(talk.said)
    assert talk.session.state is FLOWING


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 60), PACES)
@settings(max_examples=100, deadline=None)
def test_a_server_that_drains_answers_what_came(part: list[int], at: int, paces: list[int]) -> None:
    sound_T = np.array(part, np.int16)
    for talk in (listening(pause_s=None), realtime()):
        if isinstance(talk.session, ListenSession):
            talk.send(sound_T.tobytes() or b"\0")
        else:
            talk.text(type="session.update", session=session_of(format=PCM, turn_detection=None))
            talk.text(type="input_audio_buffer.append", audio=base64.b64encode(sound_T.tobytes()).decode())
        talk.answer(paces[0])
        talk.finish(1012, "over")
        # What the client sends meanwhile is not answered.
        talk.send(b"late")
        talk.send_text(b"late")
        talk.answer()
        assert (talk.closed, talk.session.state) == ((1012, "over"), OVER)
        words = " ".join(text for text, _, _ in runs_of(sound_T))
        if isinstance(talk.session, ListenSession):
            assert [said["type"] for said in talk.said] == ["Results"] * bool(words) + ["Metadata"]
        else:
            completed = [said["transcript"] for said in talk.said if said["type"].endswith(".completed")]
            assert completed == [words] * bool(words)


Step = tuple[str, Any]
LISTEN = st.sampled_from(["KeepAlive", "Finalize", "CloseStream", "Configure", "Resume", ""])
REALTIME = st.sampled_from(
    ["session.update", "response.create", *(f"input_audio_buffer.{it}" for it in ("append", "commit", "clear"))]
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.binary(max_size=20)),
        st.tuples(st.just("json"), JSON),
        st.tuples(
            st.just("typed"), st.tuples(LISTEN | REALTIME, st.dictionaries(st.text(max_size=8), JSON, max_size=2))
        ),
        st.tuples(st.just("audio"), st.binary(max_size=40)),
        st.tuples(st.just("update"), st.tuples(st.sampled_from(["format", "turn_detection", "transcription"]), JSON)),
        st.tuples(st.just("sound"), st.binary(max_size=40)),
        st.tuples(st.just("answer"), st.integers(0, 5)),
        st.tuples(st.just("finish"), st.just(None)),
    ),
    max_size=30,
)


def play(talk: Conversation, step: Step) -> None:
    kind, value = step
    if kind == "text":
        talk.send_text(value)
    elif kind == "json":
        talk.send_text(orjson.dumps(value))
    elif kind == "typed":
        talk.text(**(value[1] | {"type": value[0]}))
    elif kind == "audio":
        talk.text(type="input_audio_buffer.append", audio=base64.b64encode(value).decode())
    elif kind == "update":
        talk.text(type="session.update", session=session_of(**{value[0]: value[1]}))
    elif kind == "sound":
        talk.send(value)
    elif kind == "answer":
        talk.answer(value)
    else:
        talk.finish(1012, "over")


def is_told(talk: Conversation, why: str) -> None:
    messages, code, reason = talk.session.ending(1007, why)
    assert 1000 <= code < 5000
    assert reason.endswith(why)
    for message in messages:
        assert orjson.loads(message.payload)["error"]["message"] == why


@pytest.mark.thorough
@given(STEPS, st.sampled_from(["listen", "wav", "mulaw", "realtime"]))
@settings(max_examples=400, deadline=None)
def test_whatever_a_client_sends_it_is_answered_or_refused(steps: list[Step], kind: str) -> None:
    if kind == "realtime":
        talk = realtime()
    else:
        options = {"wav": ("wav", None), "mulaw": ("mulaw", 8_000)}.get(kind, ("pcm_s16le", RATE_HZ))
        talk = listening(encoding=options[0], rate_hz=options[1], interim_results=True, vad_events=True)
    try:
        for step in steps:
            play(talk, step)
    except RequestError as error:
        is_a_refusal(error)
        is_told(talk, str(error))
        return
    # Nothing that was refused has disturbed what comes after it.
    talk.finish(1012, "over")
    talk.answer()
    assert talk.session.state is OVER
    assert talk.closed is not None


@given(
    st.text(max_size=60)
    | st.dictionaries(st.sampled_from(["encoding", "sample_rate", "endpointing"]), st.text(max_size=8), max_size=3).map(
        lambda fields: "&".join(f"{name}={value}" for name, value in fields.items())
    )
)
@settings(max_examples=300, deadline=None)
def test_any_query_is_read_or_refused(query: str) -> None:
    try:
        options = ListenOptions.of(query)
    except InvalidInput as error:
        is_a_refusal(error)
        return
    ListenSession(model(), options, stream="some", created="now")


@given(JSON)
@settings(max_examples=300, deadline=None)
def test_any_settings_are_taken_or_refused(session: Any) -> None:
    for given_session in (session, {"type": "transcription", "audio": {"input": session}}, session_of(format=session)):
        try:
            settings = RealtimeSettings(model="runs").updated(given_session)
        except InvalidInput as error:
            is_a_refusal(error)
        else:
            orjson.dumps(settings.to_json("sess_some"))


@pytest.mark.parametrize("levels", [300, 1_000])
@pytest.mark.parametrize(
    "message",
    [
        '{"type":DEEP}',
        '{"type":"session.update","session":DEEP}',
        '{"type":"session.update","session":{"type":DEEP}}',
        *(
            '{"type":"session.update","session":{"type":"transcription","audio":{"input":' + setting + "}}}"
            for setting in (
                "DEEP",
                '{"format":{"type":DEEP}}',
                '{"format":{"rate":DEEP}}',
                '{"transcription":{"model":DEEP}}',
                '{"transcription":{"prompt":DEEP}}',
                '{"turn_detection":{"type":DEEP}}',
                '{"turn_detection":{"type":"server_vad","silence_duration_ms":DEEP}}',
            )
        ),
    ],
)
def test_deeply_nested_events_are_refused(message: str, levels: int) -> None:
    talk = realtime()
    talk.send_text(message.replace("DEEP", "[" * levels + "]" * levels).encode())
    error = talk.said[-1]["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith(".")
    assert len(error["message"]) < 300


@pytest.mark.parametrize("levels", [300, 1_000])
def test_a_deeply_nested_channel_is_refused(levels: int) -> None:
    talk = listening()
    talk.send_text(b'{"type":"Finalize","channel":' + b"[" * levels + b"]" * levels + b"}")
    assert (talk.said[-1]["type"], talk.said[-1]["variant"]) == ("Error", "SchemaError")


def test_settings_of_another_type_are_not_taken_for_missing_ones() -> None:
    now = RealtimeSettings(model="runs")
    vad = {"type": "server_vad", "silence_duration_ms": 0}
    assert now.updated(session_of(turn_detection=vad)).silence_ms == 0
    for wrong in (
        {"type": "transcription", "audio": 0},
        {"type": "transcription", "audio": {"input": ""}},
        session_of(turn_detection=vad | {"silence_duration_ms": False}),
        session_of(format={"type": "audio/pcmu", "rate": 16_000}),
        session_of(transcription={"prompt": 17}),
        session_of(transcription={"keywords": [["alpha"]]}),
    ):
        with pytest.raises(InvalidInput):
            now.updated(wrong)
    hints = {"language": None, "prompt": "words", "keywords": ["alpha"]}
    told = now.updated(session_of(transcription=hints)).to_json("some")["audio"]["input"]["transcription"]
    assert told == {"model": "runs", "prompt": "words", "keywords": ["alpha"]}


def test_more_sound_than_a_message_may_have_is_refused() -> None:
    with pytest.raises(TooLarge, match="at most 10,000 are taken"):
        listening().send(bytes(2 * 10_001))
    with pytest.raises(TooLarge, match="at most 80,000 are taken"):
        listening(encoding="mulaw", rate_hz=8_000).send(bytes(80_001))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda event: event,
        lambda event: 1 / 0,
        lambda event: Speech(delta="\ud800"),
        lambda event: Speech(words=[Word(text="w", start_s=float("nan"), end_s=1.0)]),
        lambda event: Speech(words=[Word(text="\ud800", start_s=0.0, end_s=1.0)]),
    ],
)
def test_an_application_that_says_nonsense_fails_on_its_stream_alone(wrong: Any) -> None:
    made = model(speech=wrong)
    sound: Samples = np.array([1] * 8 + [0] * 8, np.int16)
    options = ListenOptions(encoding="pcm_s16le", rate_hz=RATE_HZ)
    talk = Conversation(ListenSession(made, options, stream="some", created="now"))
    talk.send(sound.tobytes())
    with pytest.raises(ComputeFailed, match="events failed"):
        talk.answer()
    other = Conversation(RealtimeSession(made, stream="some"))
    other.text(type="session.update", session=session_of(format=PCM))
    other.text(type="input_audio_buffer.append", audio=base64.b64encode(sound.tobytes()).decode())
    with pytest.raises(ComputeFailed, match="events failed"):
        other.answer()
