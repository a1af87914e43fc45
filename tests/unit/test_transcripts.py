"""Transcripts in the forms of OpenAI's API."""

import orjson
import pytest

from penstock.core.speech.spoken import Word
from penstock.serve.transcription.transcripts import FORMS, Transcript
from penstock.serve.transcription.utterances import Cause, Utterance

WORDS = [
    Word(text="one", start_s=1.0, end_s=1.5, probability=0.5),
    Word(text="two", start_s=1.6, end_s=2.0, probability=1.0),
]
SAID = Transcript(
    utterances=[
        Utterance(text="one two", words=WORDS, start_s=0.0, end_s=2.5, cause=Cause.PAUSE),
        Utterance(text="a <b> & c", words=[], start_s=2.5, end_s=3_725.0625, cause=Cause.FLUSH),
    ],
    duration_s=3_725.0625,
)
NOTHING = Transcript(utterances=[], duration_s=1.0)


def made(form: str, *granularities: str, transcript: Transcript = SAID) -> bytes:
    return FORMS[form](transcript, frozenset(granularities))[1]


def test_subtitles() -> None:
    assert made("srt").decode() == (
        "1\n00:00:01,000 --> 00:00:02,000\none two\n\n2\n00:00:02,500 --> 01:02:05,062\na <b> & c\n\n"
    )
    assert made("vtt").decode() == (
        "WEBVTT\n\n00:00:01.000 --> 00:00:02.000\none two\n\n00:00:02.500 --> 01:02:05.062\na &lt;b&gt; &amp; c\n\n"
    )


def test_json_and_text() -> None:
    usage = {"type": "duration", "seconds": 3_725.062}
    assert orjson.loads(made("json")) == {"text": "one two a <b> & c", "usage": usage}
    assert made("text") == b"one two a <b> & c\n"


@pytest.mark.parametrize("granularities", [(), ("word",), ("segment",), ("word", "segment")])
def test_times_are_given_as_they_are_asked_for(granularities: tuple[str, ...]) -> None:
    found = orjson.loads(made("verbose_json", *granularities))
    assert ("words" in found, "segments" in found) == ("word" in granularities, "segment" in granularities)
    assert (found["duration"], found["language"], found["task"]) == (3_725.062, "und", "transcribe")
    if "word" in granularities:
        assert found["words"] == [
            {"word": "one", "start": 1.0, "end": 1.5},
            {"word": "two", "start": 1.6, "end": 2.0},
        ]
    if "segment" in granularities:
        first, second = found["segments"]
        assert (first["id"], first["start"], first["end"], first["text"]) == (0, 1.0, 2.0, "one two")
        assert first["avg_logprob"] == pytest.approx(-0.3466, abs=1e-4)
        assert (second["start"], second["end"], second["avg_logprob"]) == (2.5, 3_725.062, 0.0)


def test_nothing_said() -> None:
    assert orjson.loads(made("json", transcript=NOTHING))["text"] == ""
    assert made("srt", transcript=NOTHING) == b""
    assert made("vtt", transcript=NOTHING) == b"WEBVTT\n\n"
    assert orjson.loads(made("verbose_json", "segment", transcript=NOTHING))["segments"] == []
