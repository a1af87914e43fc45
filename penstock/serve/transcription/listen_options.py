"""The query of Deepgram's `/v1/listen`: what of it has an effect, what has none, and what is refused."""

from dataclasses import dataclass
from typing import Self, final
from urllib.parse import parse_qsl

from penstock.core.errors import InvalidInput
from penstock.core.speech.hot_words import HotWord
from penstock.core.speech.sound import MAX_RATE_HZ, MIN_RATE_HZ
from penstock.serve.transcription.hinted_words import boosted

# Silence that ends an utterance where the client chooses none.
PAUSE_MS = 300
# Deepgram's own limits.
MIN_UTTERANCE_END_MS, MAX_MS = 1_000, 5_000
MAX_PARAMETERS = 200
_ENCODINGS = {"linear16": "pcm_s16le", "mulaw": "mulaw"}
# They ask for what the application either does or not; no answer is wrong without them.
_HINTS = {
    "dictation", "extra", "filler_words", "language", "language_hint", "measurements",
    "mip_opt_out", "no_delay", "numerals", "profanity_filter", "punctuate", "replace", "smart_format", "tag",
    "tier", "token", "version",
}  # fmt: skip
# They ask for something in the answer that it would lack.
_ABSENT = ("multichannel", "diarize", "diarize_model", "detect_entities", "redact", "search", "callback")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ListenOptions:
    """Options of one stream.

    Args:
        model: Name of the application; empty for the only one.
        encoding: One of `penstock.core.speech.sound.ENCODINGS`.
        rate_hz: Of the client's sound; None for a WAV.
        channels: Channels of it.
        interim_results: Whether results come before their utterance ends.
        pause_s: Silence that ends an utterance; None to leave that to the application.
        endpointing: Whether ends of utterances are told.
        utterance_end_s: Silence after a word that is told; None for none.
        vad_events: Whether starts of speech are told.
        hot_words: Of `keyterm` and `keywords`.
    """

    model: str = ""
    encoding: str = "wav"
    rate_hz: int | None = None
    channels: int = 1
    interim_results: bool = False
    pause_s: float | None = PAUSE_MS / 1e3
    endpointing: bool = True
    utterance_end_s: float | None = None
    vad_events: bool = False
    hot_words: tuple[HotWord, ...] = ()

    @classmethod
    def of(cls, query: str) -> Self:
        """Read the query of a request.

        Raises:
            InvalidInput: A parameter is unknown, has a value that is out of range, or asks for what is not done here.
        """
        try:
            pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS, errors="strict")
        except (ValueError, UnicodeDecodeError):
            raise InvalidInput(
                f"The query is not UTF-8, or has more than {MAX_PARAMETERS} parameters; send fewer."
            ) from None
        hot_words = boosted([(name, value) for name, value in pairs if name in _HOT_WORDS])
        given = {name: value for name, value in pairs if name not in _HOT_WORDS}
        for name in _ABSENT:
            if given.pop(name, "false").lower() not in ("false", ""):
                raise InvalidInput(f"{name} is not done here; leave it out.")
        if unknown := sorted(given.keys() - _HINTS - _READ):
            known = ", ".join(sorted({*_READ, *_HOT_WORDS}))
            raise InvalidInput(f"There is no parameter {unknown[0][:40]!r}; there are {known}.")
        encoding, rate_hz = _sound_of(given)
        interim_results = _flag(given, "interim_results")
        endpointing = given.get("endpointing", "true").lower()
        pause_ms = None if endpointing == "false" else PAUSE_MS
        if endpointing not in ("false", "true"):
            pause_ms = _number(given, "endpointing", 0, MAX_MS)
        utterance_end_ms = None
        if "utterance_end_ms" in given:
            utterance_end_ms = _number(given, "utterance_end_ms", MIN_UTTERANCE_END_MS, MAX_MS)
            if not interim_results:
                raise InvalidInput("utterance_end_ms needs interim_results=true; send both.")
        return cls(
            model=given.get("model", ""),
            encoding=encoding,
            rate_hz=rate_hz,
            channels=_number(given, "channels", 1, 2) if "channels" in given else 1,
            interim_results=interim_results,
            pause_s=None if pause_ms is None else pause_ms / 1e3,
            endpointing=endpointing != "false",
            utterance_end_s=None if utterance_end_ms is None else utterance_end_ms / 1e3,
            vad_events=_flag(given, "vad_events"),
            hot_words=hot_words,
        )


_HOT_WORDS = ("keyterm", "keywords")
_READ = {
    "channels", "encoding", "endpointing", "interim_results", "model", "sample_rate", "utterance_end_ms", "vad_events",
}  # fmt: skip


def _sound_of(given: dict[str, str]) -> tuple[str, int | None]:
    encoding = given.get("encoding")
    if encoding is None:
        if "sample_rate" in given:
            raise InvalidInput(
                f"sample_rate needs encoding: send {' or '.join(_ENCODINGS)}, or a WAV without the two parameters."
            )
        return "wav", None
    if encoding not in _ENCODINGS:
        raise InvalidInput(
            f"encoding is {encoding[:40]!r}; send {' or '.join(_ENCODINGS)}, or a WAV without encoding and sample_rate."
        )
    if "sample_rate" not in given:
        raise InvalidInput(f"encoding {encoding!r} needs sample_rate, in Hz; send it.")
    return _ENCODINGS[encoding], _number(given, "sample_rate", MIN_RATE_HZ, MAX_RATE_HZ)


def _number(given: dict[str, str], name: str, least: int, most: int) -> int:
    text = given[name]
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise InvalidInput(f"{name} is {text[:40]!r}; it must be a whole number from {least:,} to {most:,}.")
    return int(text)


def _flag(given: dict[str, str], name: str) -> bool:
    text = given.get(name, "false").lower()
    if text not in ("true", "false"):
        raise InvalidInput(f"{name} is {text[:40]!r}; it must be true or false.")
    return text == "true"
