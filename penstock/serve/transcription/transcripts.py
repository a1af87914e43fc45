"""A whole transcript in the forms of OpenAI's `/v1/audio/transcriptions`: json, verbose_json, text, srt, vtt."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import orjson

from penstock.core.speech.spoken import Word
from penstock.serve.transcription.utterances import Utterance

JSON, PLAIN = "application/json", "text/plain; charset=utf-8"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """The speech of a recording.

    Args:
        utterances: Its utterances, in order; those without text are left out.
        duration_s: Length of the recording.
        language: As the client said.
    """

    utterances: Sequence[Utterance]
    duration_s: float
    language: str = ""

    @property
    def text(self) -> str:
        """All of the text."""
        return " ".join(utterance.text for utterance in self.utterances)

    @property
    def words(self) -> list[Word]:
        """All words."""
        return [word for utterance in self.utterances for word in utterance.words]


# What a form makes of a transcript: its media type, and the body.
Form = Callable[[Transcript, frozenset[str]], tuple[str, bytes]]


def json_form(transcript: Transcript, _: frozenset[str]) -> tuple[str, bytes]:
    """The text and the duration."""
    return JSON, orjson.dumps({"text": transcript.text, "usage": _usage(transcript)})


def verbose_form(transcript: Transcript, granularities: frozenset[str]) -> tuple[str, bytes]:
    """Text, duration, language, and the times of segments, words or both."""
    body: dict[str, Any] = {
        "task": "transcribe",
        "language": transcript.language or "und",
        "duration": _s(transcript.duration_s),
        "text": transcript.text,
        "usage": _usage(transcript),
    }
    if "segment" in granularities:
        body["segments"] = [_segment(index, each) for index, each in enumerate(transcript.utterances)]
    if "word" in granularities:
        body["words"] = [
            {"word": word.text, "start": _s(word.start_s), "end": _s(word.end_s)} for word in transcript.words
        ]
    return JSON, orjson.dumps(body)


def text_form(transcript: Transcript, _: frozenset[str]) -> tuple[str, bytes]:
    """The text alone, and a line end."""
    return PLAIN, f"{transcript.text}\n".encode()


def srt_form(transcript: Transcript, _: frozenset[str]) -> tuple[str, bytes]:
    """Subtitles as SubRip."""
    cues = [
        f"{number}\n{_clock(begin_s, ',')} --> {_clock(end_s, ',')}\n{each.text}\n\n"
        for number, each in enumerate(transcript.utterances, 1)
        for begin_s, end_s in (span_s(each),)
    ]
    return PLAIN, "".join(cues).encode()


def vtt_form(transcript: Transcript, _: frozenset[str]) -> tuple[str, bytes]:
    """Subtitles as WebVTT."""
    cues = [
        f"{_clock(begin_s, '.')} --> {_clock(end_s, '.')}\n{_escaped(each.text)}\n\n"
        for each in transcript.utterances
        for begin_s, end_s in (span_s(each),)
    ]
    return PLAIN, ("WEBVTT\n\n" + "".join(cues)).encode()


FORMS: dict[str, Form] = {
    "json": json_form,
    "verbose_json": verbose_form,
    "text": text_form,
    "srt": srt_form,
    "vtt": vtt_form,
}


def span_s(utterance: Utterance) -> tuple[float, float]:
    """From the first word to the end of the last one; the utterance's part of the signal where there are no words."""
    words = utterance.words
    return (words[0].start_s, words[-1].end_s) if words else (utterance.start_s, utterance.end_s)


def _usage(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": _s(transcript.duration_s)}


def _segment(index: int, utterance: Utterance) -> dict[str, Any]:
    begin_s, end_s = span_s(utterance)
    raw = utterance.text.encode()
    logs = [math.log(max(word.probability, 1e-10)) for word in utterance.words]
    return {
        "id": index,
        "start": _s(begin_s),
        "end": _s(end_s),
        "text": utterance.text,
        "avg_logprob": round(sum(logs) / len(logs), 4) if logs else 0.0,
        # As Whisper computes it, which clients compare with a threshold.
        "compression_ratio": round(len(raw) / len(zlib.compress(raw)), 4),
        # They are of Whisper alone.
        "seek": 0,
        "tokens": [],
        "temperature": 0.0,
        "no_speech_prob": 0.0,
    }


def _clock(seconds: float, point: str) -> str:
    millis = round(max(0.0, seconds) * 1e3)
    return f"{millis // 3_600_000:02}:{millis // 60_000 % 60:02}:{millis // 1_000 % 60:02}{point}{millis % 1_000:03}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _s(seconds: float) -> float:
    return round(seconds, 3)
