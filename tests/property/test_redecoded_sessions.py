"""Sessions whose utterances are decoded again: a second decoding that is greedy, too, changes nothing at all.

So each frame is in the utterance that its text is in, whatever ended it, and times count from the start of the stream.
"""

import base64
import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.apps.speech.transcript import revised, spoken, transcribed
from penstock.core.application import Application
from penstock.core.spec import Array, TensorSpec
from penstock.core.speech.endpoint_beam import EndpointBeam, Redecoded
from penstock.core.speech.sound import Samples
from penstock.core.speech.spoken import Word
from penstock.core.speech.utterance_decoder import UtteranceFrames
from penstock.core.streams.live import Live
from penstock.serve.streams.protocol import LiveProtocol
from penstock.serve.streams.session import Session
from penstock.serve.transcription import listen_session
from penstock.serve.transcription.listen_options import ListenOptions
from penstock.serve.transcription.listen_session import ListenSession
from penstock.serve.transcription.realtime_session import RealtimeSession
from penstock.serve.transcription.speech_model import SpeechModel
from tests.support.services import CHUNK, DELAY, RATE_HZ, Conversation

SYMBOLS = ("-", " ", "a", "b")
FRAME_S = 1 / RATE_HZ
# Signals name a symbol in each frame, in runs; long runs of blanks are pauses.
RUNS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from((1, 2, 3, 12, 40))), min_size=1, max_size=14)
PARTS = st.lists(RUNS, min_size=1, max_size=3)
PACES = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def application(beam: EndpointBeam | None) -> Application:
    return Application(
        name="letters",
        input=TensorSpec(dtype="int16", shape=(CHUNK,), meaning="sound", name="sound"),
        output=TensorSpec(
            dtype="float32", shape=(CHUNK + DELAY, len(SYMBOLS)), meaning="symbols", name="symbols", labels=SYMBOLS
        ),
        live=Live(
            rate_hz=RATE_HZ,
            events=partial(transcribed, symbols=SYMBOLS, frame_s=FRAME_S),
            speech=spoken,
            frame_s=FRAME_S,
            beam=beam,
        ),
        chunks=4,
        model="nobody:asks",
    )


def output(sound_T: Samples) -> Array:
    """Frames in which the named symbol is almost certain."""
    frames_TV = np.full((len(sound_T), len(SYMBOLS)), np.log(0.0001), np.float32)
    frames_TV[np.arange(len(sound_T)), sound_T] = np.log(0.9997)
    return frames_TV.reshape(-1)


def greedy(frames: UtteranceFrames) -> Redecoded:
    """The text of the likeliest symbols, in capitals, to tell it from what the application says."""
    words: list[Word] = []
    text, begin, end, before = "", 0, 0, 0
    best_T = frames.log_probability_TV.argmax(1).tolist()
    for number, symbol in zip([*frames.frame_T.tolist(), 0], [*best_T, 1], strict=True):
        if symbol > 1:
            begin = begin if text else number
            text += SYMBOLS[symbol].upper() if symbol != before else ""
            end = number + 1
        elif symbol == 1 and text:
            words.append(Word(text=text, start_s=begin * FRAME_S, end_s=end * FRAME_S))
            text = ""
        before = symbol
    return Redecoded(text=" ".join(word.text for word in words), words=tuple(words))


def signal_of(runs: list[tuple[int, int]]) -> Samples:
    return np.concatenate([np.full(count, symbol, np.int16) for symbol, count in runs])


def talks(make: Any) -> list[Conversation]:
    """One with a beam and one without."""
    beam = EndpointBeam(frame_s=FRAME_S, revise=revised)
    return [Conversation(make(application(given)), output, greedy) for given in (beam, None)]


def model(app: Application) -> SpeechModel:
    return SpeechModel(name="letters", version="1", content_hash="0" * 64, application=app)


def played(talk: Conversation, parts: list[list[tuple[int, int]]], paces: list[int], size: int, flush: Any) -> None:
    pace = itertools.cycle(paces)
    for number, runs in enumerate(parts):
        data = signal_of(runs).tobytes()
        for at in range(0, len(data), size):
            send(talk, data[at : at + size])
            talk.answer(next(pace))
        if number < len(parts) - 1:
            talk.text(**flush)


def send(talk: Conversation, data: bytes) -> None:
    if isinstance(talk.session, RealtimeSession):
        talk.text(type="input_audio_buffer.append", audio=base64.b64encode(data).decode())
    else:
        talk.send(data)


def finals(talk: Conversation) -> list[tuple[str, list[tuple[str, float, float]]]]:
    found: list[tuple[str, list[tuple[str, float, float]]]] = []
    for message in talk.said:
        if message["type"] == "Results" and message["is_final"]:
            (alternative,) = message["channel"]["alternatives"]
            words = [(each["word"], round(each["start"], 3), round(each["end"], 3)) for each in alternative["words"]]
            found.append((alternative["transcript"], words))
    return found


def are_the_same(better: Conversation, plain: Conversation, *, times: bool = True) -> None:
    found, expected = finals(better), finals(plain)
    assert [text for text, _ in found] == [text.upper() for text, _ in expected]
    if times:
        ours, theirs = ([word for _, words in each for word in words] for each in (found, expected))
        assert [word for word, *_ in ours] == [word.upper() for word, *_ in theirs]
        # The application rounds to hundredths of a second.
        np.testing.assert_allclose([word[1:] for word in ours], [word[1:] for word in theirs], atol=0.0051)


@pytest.mark.thorough
@given(PARTS, PACES, st.integers(1, 40), st.sampled_from((None, 0.01, 0.03)))
@settings(max_examples=200, deadline=None)
def test_deepgrams_results_are_the_same_in_capitals(
    parts: list[list[tuple[int, int]]], paces: list[int], size: int, pause_s: float | None
) -> None:
    options = ListenOptions(encoding="pcm_s16le", rate_hz=RATE_HZ, pause_s=pause_s, interim_results=True)

    def make(app: Application) -> LiveProtocol:
        return ListenSession(model(app), options, stream="some", created="now")

    better, plain = talks(make)
    for talk in (better, plain):
        played(talk, parts, paces, 2 * size, {"type": "Finalize"})
        talk.text(type="CloseStream")
        talk.answer()
    # Where a pause ends an utterance, the times of its last word are those of results.
    are_the_same(better, plain, times=pause_s is None)
    interim = [[message for message in talk.said if not message.get("is_final", True)] for talk in (better, plain)]
    assert interim[0] == interim[1]


@given(PARTS, PACES, st.integers(1, 40), st.sampled_from((None, 0.01, 0.03)))
@settings(max_examples=60, deadline=None)
def test_words_lie_within_their_results_which_follow_one_another(
    parts: list[list[tuple[int, int]]], paces: list[int], size: int, pause_s: float | None
) -> None:
    options = ListenOptions(
        encoding="pcm_s16le", rate_hz=RATE_HZ, pause_s=pause_s, interim_results=True, utterance_end_s=0.02
    )
    for talk in talks(lambda app: ListenSession(model(app), options, stream="some", created="now")):
        played(talk, parts, paces, 2 * size, {"type": "Finalize"})
        talk.text(type="CloseStream")
        talk.answer()
        until_s, last_word_s = 0.0, None
        for message in talk.said:
            if message["type"] == "UtteranceEnd":
                assert last_word_s is None or message["last_word_end"] == last_word_s
            if message["type"] != "Results":
                continue
            begin_s, end_s = message["start"], message["start"] + message["duration"]
            assert begin_s == pytest.approx(until_s)
            for word in message["channel"]["alternatives"][0]["words"]:
                # The application rounds to hundredths of a second.
                assert begin_s - 0.0051 <= word["start"] <= word["end"] <= end_s + 0.0051
            if message["is_final"]:
                until_s = end_s
                for word in message["channel"]["alternatives"][0]["words"]:
                    last_word_s = word["end"]
            else:
                last_word_s = None


def test_an_utterance_end_comes_behind_silence_alone() -> None:
    # Letters of 4 ms with pauses of 20, 40 and 60 ms behind them, in chunks of 4 ms; each is an utterance of its own.
    runs = [(2, 4), (0, 20), (3, 4), (0, 40), (2, 4), (0, 60)]
    options = ListenOptions(
        encoding="pcm_s16le",
        rate_hz=RATE_HZ,
        pause_s=0.01,
        interim_results=True,
        utterance_end_s=0.05,
        vad_events=True,
    )
    for talk in talks(lambda app: ListenSession(model(app), options, stream="some", created="now")):
        played(talk, [runs], [9], 8, {})
        began = [message["timestamp"] for message in talk.said if message["type"] == "SpeechStarted"]
        np.testing.assert_allclose(began, [0.0, 0.024, 0.068], atol=0.0041)
        ends = [message["last_word_end"] for message in talk.said if message["type"] == "UtteranceEnd"]
        # The last pause alone is as long as the client asks.
        np.testing.assert_allclose(ends, [0.072], atol=0.0041)
        words = [word[1:] for _, words in finals(talk) for word in words]
        np.testing.assert_allclose(words[-1], [0.068, 0.072], atol=0.0051)


@pytest.mark.thorough
@given(PARTS, PACES, st.integers(1, 40), st.sampled_from((None, 10, 30)))
@settings(max_examples=200, deadline=None)
def test_openais_transcripts_are_the_same_in_capitals(
    parts: list[list[tuple[int, int]]], paces: list[int], size: int, silence_ms: int | None
) -> None:
    better, plain = talks(lambda app: RealtimeSession(model(app), stream="some"))
    turns = None if silence_ms is None else {"type": "server_vad", "silence_duration_ms": silence_ms}
    settings: dict[str, Any] = {"format": {"type": "audio/pcm", "rate": RATE_HZ}, "turn_detection": turns}
    for talk in (better, plain):
        talk.text(type="session.update", session={"type": "transcription", "audio": {"input": settings}})
        played(talk, parts, paces, 2 * size, {"type": "input_audio_buffer.commit"})
        talk.finish(1001, "over")
        talk.answer()
    told = [[{**each, "event_id": "", "transcript": ""} for each in talk.said] for talk in (better, plain)]
    assert told[0] == told[1]
    transcripts, expected = (
        [message["transcript"] for message in talk.said if message["type"].endswith(".completed")]
        for talk in (better, plain)
    )
    assert transcripts == [text.upper() for text in expected]


@given(PARTS, PACES, st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_our_events_have_the_same_text_in_capitals(
    parts: list[list[tuple[int, int]]], paces: list[int], size: int
) -> None:
    better, _ = talks(lambda app: Session(app, name="letters", stream="some", latency_ms=50))
    pace, number = itertools.cycle(paces), 0
    better.text(type="start")
    for runs in parts:
        data = signal_of(runs).tobytes()
        for at in range(0, len(data), 2 * size):
            better.send(number.to_bytes(4, "little") + data[at : at + 2 * size])
            better.answer(next(pace))
            number += 1
        better.text(type="flush")
        number += 1
    better.text(type="end")
    better.answer()
    events = [message["event"] for message in better.said if message.get("event")]
    told = ""
    for event in events:
        told += event["text"]
        if event.get("final"):
            assert event["utterance"]["text"].split() == told.upper().split()
            told = ""
    assert told == ""


@pytest.mark.thorough
def test_an_utterance_that_is_cut_for_its_length_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    # Before the application ends it, after 20 s.
    monkeypatch.setattr(listen_session, "MAX_RESULT_S", 7.0)
    options = ListenOptions(encoding="pcm_s16le", rate_hz=RATE_HZ, pause_s=None)
    better, plain = talks(lambda app: ListenSession(model(app), options, stream="some", created="now"))
    # Words without a pause of 1.2 s, for a minute and more; a word begins in the chunk in which the one before ends.
    runs = [(1, 1), (2, 2), (0, 90), (3, 2), (0, 87)] * 400
    for talk in (better, plain):
        played(talk, [runs], [2], 2_000, {})
        talk.text(type="CloseStream")
        talk.answer()
    assert len(finals(plain)) >= 3
    assert len(better.redecoded) == len(finals(plain))
    are_the_same(better, plain)
