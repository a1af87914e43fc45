"""Settings of a transcription session of OpenAI's realtime API: what a `session.update` may say."""

from dataclasses import dataclass, replace
from typing import Any, Self, cast, final

from penstock.core.speech.hot_words import HotWord
from penstock.core.speech.sound import MAX_RATE_HZ, MIN_RATE_HZ
from penstock.core.wording.shown import shown
from penstock.serve.transcription.hinted_words import prompted
from penstock.serve.transcription.vendor_errors import BadParameter

# OpenAI's own defaults.
PCM_HZ, PCMU_HZ = 24_000, 8_000
SILENCE_MS = 500
MAX_SILENCE_MS = 10_000
# Fields of `transcription`. The model is checked, prompt and keywords give hot words; the others have no effect.
_TRANSCRIPTION = {"model", "language", "languages", "prompt", "delay", "keywords"}
_TURNS = {"type", "silence_duration_ms", "threshold", "prefix_padding_ms", "create_response", "interrupt_response"}
MAX_HINT = 4_096


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RealtimeSettings:
    """Settings of one session.

    Args:
        model: Name of the application.
        encoding: One of `penstock.core.speech.sound.ENCODINGS`.
        rate_hz: Of the client's sound.
        silence_ms: Silence that commits what was spoken; None if the client commits.
        hints: Language and prompt of the client, which are told back.
    """

    model: str
    encoding: str = "pcm_s16le"
    rate_hz: int = PCM_HZ
    silence_ms: int | None = SILENCE_MS
    hints: tuple[tuple[str, Any], ...] = ()

    def updated(self, session: Any) -> Self:
        """The settings after a `session.update`; what it leaves out stays.

        Raises:
            BadParameter: A setting is unknown, out of range, or not done here.
        """
        if not isinstance(session, dict):
            raise BadParameter("session is no object; send one with the type transcription.", "session")
        fields = _object(session, "session", {"type", "audio", "include", "object", "id"})
        if fields.get("type") != "transcription":
            raise BadParameter(
                f"session.type is {shown(fields.get('type'))}; transcription alone is served.", "session.type"
            )
        if fields.get("include"):
            raise BadParameter("There are no log-probabilities here; leave include out.", "session.include")
        audio = _object(_given(fields, "audio", {}), "session.audio", {"input"})
        where = "session.audio.input"
        given = _object(
            _given(audio, "input", {}), where, {"format", "transcription", "turn_detection", "noise_reduction"}
        )
        if given.get("noise_reduction") is not None:
            raise BadParameter("Noise is not reduced here; set noise_reduction to null.", f"{where}.noise_reduction")
        now = self
        if given.get("format") is not None:
            encoding, rate_hz = _format_of(given["format"], f"{where}.format")
            now = replace(now, encoding=encoding, rate_hz=rate_hz)
        if given.get("transcription") is not None:
            now = now._transcribing(given["transcription"], f"{where}.transcription")
        if "turn_detection" in given:
            now = replace(now, silence_ms=_silence_of(given["turn_detection"], f"{where}.turn_detection"))
        return now

    def _transcribing(self, given: Any, where: str) -> Self:
        fields = _object(given, where, _TRANSCRIPTION)
        model = fields.pop("model", None)
        if model not in (None, self.model):
            raise BadParameter(
                f"This stream is of {self.model!r}; for {shown(model)} open one with ?model= in its URL.",
                f"{where}.model",
            )
        hints = {name: hint for name, hint in fields.items() if hint is not None}
        for name, hint in hints.items():
            texts: list[Any] = hint if isinstance(hint, list) else [hint]
            if not all(isinstance(text, str) for text in texts):
                raise BadParameter(f"{where}.{name} is {shown(hint)}; it takes text.", f"{where}.{name}")
        if len(str(hints)) > MAX_HINT:
            raise BadParameter(f"The hints are longer than {MAX_HINT:,} characters; send shorter ones.", where)
        return replace(self, hints=tuple(hints.items()))

    @property
    def hot_words(self) -> tuple[HotWord, ...]:
        """Hot words in `prompt` and `keywords`."""
        hints = {name: hint if isinstance(hint, list) else [hint] for name, hint in self.hints}
        return prompted("\n".join(hints.get("prompt", ())), hints.get("keywords", ()))

    def to_json(self, identifier: str) -> dict[str, Any]:
        """The session as the client is told it."""
        if self.encoding == "mulaw":
            form: dict[str, Any] = {"type": "audio/pcmu"}
        else:
            form = {"type": "audio/pcm", "rate": self.rate_hz}
        turns = None if self.silence_ms is None else {"type": "server_vad", "silence_duration_ms": self.silence_ms}
        return {
            "type": "transcription",
            "object": "realtime.transcription_session",
            "id": identifier,
            "audio": {
                "input": {
                    "format": form,
                    "transcription": {"model": self.model} | dict(self.hints),
                    "turn_detection": turns,
                    "noise_reduction": None,
                }
            },
        }


def _given(fields: dict[str, Any], name: str, otherwise: Any) -> Any:
    """A field, or what stands for it where it is missing or null."""
    value = fields.get(name)
    return otherwise if value is None else value


def _object(value: Any, where: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadParameter(f"{where} is no object; send one, or leave it out.", where)
    fields = dict(cast(dict[str, Any], value))
    if unknown := sorted(fields.keys() - known):
        raise BadParameter(
            f"{where} has {unknown[0][:40]!r}; it takes {', '.join(sorted(known))}.", f"{where}.{unknown[0][:40]}"
        )
    return fields


def _format_of(value: Any, where: str) -> tuple[str, int]:
    fields = _object(value, where, {"type", "rate"})
    kind = fields.get("type", "audio/pcm")
    if kind == "audio/pcmu":
        return "mulaw", _number(_given(fields, "rate", PCMU_HZ), PCMU_HZ, PCMU_HZ, f"{where}.rate")
    if kind != "audio/pcm":
        raise BadParameter(f"The format is {shown(kind)}; send audio/pcm or audio/pcmu.", f"{where}.type")
    return "pcm_s16le", _number(_given(fields, "rate", PCM_HZ), MIN_RATE_HZ, MAX_RATE_HZ, f"{where}.rate")


def _silence_of(value: Any, where: str) -> int | None:
    if value is None:
        return None
    fields = _object(value, where, _TURNS)
    if fields.get("type") != "server_vad":
        raise BadParameter(f"turn_detection is {shown(fields.get('type'))}; send server_vad, or null.", f"{where}.type")
    silence_ms = _given(fields, "silence_duration_ms", SILENCE_MS)
    return _number(silence_ms, 0, MAX_SILENCE_MS, f"{where}.silence_duration_ms")


def _number(value: Any, least: int, most: int, where: str) -> int:
    if type(value) is not int or not least <= value <= most:
        range_ = f"from {least:,} to {most:,}" if least < most else f"{least:,}"
        raise BadParameter(f"{where} is {shown(value)}; it must be {range_}.", where)
    return value
