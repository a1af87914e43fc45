"""The form of `POST /v1/audio/transcriptions`: what of it has an effect, what has none, and what is refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, final

from penstock.core.errors import UnsupportedContent
from penstock.core.speech.hot_words import HotWord
from penstock.serve.exchange.form import FormPart
from penstock.serve.transcription.hinted_words import prompted
from penstock.serve.transcription.transcripts import FORMS
from penstock.serve.transcription.vendor_errors import BadParameter

GRANULARITIES = "timestamp_granularities[]"
# They are taken, and have no effect.
_HINTS = ("temperature", "chunking_strategy", "languages[]")
FIELDS = (
    "file",
    "model",
    "language",
    "response_format",
    "stream",
    "include[]",
    "prompt",
    "keywords[]",
    GRANULARITIES,
    *_HINTS,
)
# Fields that may come several times.
LISTS = (GRANULARITIES, "include[]", "keywords[]", "languages[]")
MAX_PARTS = 64
MAX_TEXT_BYTES = 16_384


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TranscriptionRequest:
    """One request.

    Args:
        sound: The file.
        model: Name of the application; empty for the only one.
        form: Of the answer, in `penstock.serve.transcription.transcripts.FORMS`.
        granularities: Of the times in `verbose_json`: segment, word or both.
        language: As the client said.
        stream: Whether the answer is events.
        hot_words: Of `prompt` and `keywords[]`.
    """

    sound: bytes
    model: str = ""
    form: str = "json"
    granularities: frozenset[str] = frozenset({"segment"})
    language: str = ""
    stream: bool = False
    hot_words: tuple[HotWord, ...] = ()

    @classmethod
    def of(cls, parts: Mapping[str, Sequence[FormPart]]) -> Self:
        """Read the parts of a form.

        Args:
            parts: By name; each has one at least, those of `LISTS` alone may have several.

        Raises:
            BadParameter: There is no file, or a field has a value that is not served.
            UnsupportedContent: The file is no WAV.
        """
        if "file" not in parts:
            raise BadParameter("The form has no part 'file'; send a WAV in it.", "file")
        sound = parts["file"][0].content
        if not sound:
            raise BadParameter("The file is empty; send a WAV.", "file")
        if sound[:4] != b"RIFF" or sound[8:12] != b"WAVE":
            raise UnsupportedContent(
                "The file is no WAV, which alone is read here; convert it, for example with 'ffmpeg -i FILE out.wav'."
            )
        texts = {name: [_text(part) for part in found] for name, found in parts.items() if name != "file"}
        form = texts.get("response_format", ["json"])[0] or "json"
        if form not in FORMS:
            raise BadParameter(f"response_format is {form[:40]!r}; it must be {', '.join(FORMS)}.", "response_format")
        granularities = frozenset(texts.get(GRANULARITIES, ["segment"]))
        if unknown := sorted(granularities - {"segment", "word"}):
            raise BadParameter(f"{GRANULARITIES} has {unknown[0][:40]!r}; it takes segment and word.", GRANULARITIES)
        if GRANULARITIES in texts and form != "verbose_json":
            raise BadParameter(
                f"{GRANULARITIES} asks for times, which response_format {form!r} does not have; send verbose_json, or "
                f"leave it out.",
                GRANULARITIES,
            )
        if any(texts.get("include[]", ())):
            raise BadParameter("There are no log-probabilities of tokens here; leave include[] out.", "include[]")
        stream = texts.get("stream", ["false"])[0].lower()
        if stream not in ("true", "false"):
            raise BadParameter(f"stream is {stream[:40]!r}; it must be true or false.", "stream")
        if stream == "true" and form not in ("json", "text"):
            raise BadParameter(
                f"A stream has no response_format {form!r}; leave it out, or send stream=false.", "response_format"
            )
        return cls(
            sound=sound,
            model=texts.get("model", [""])[0],
            form=form,
            granularities=granularities,
            language=texts.get("language", [""])[0][:40],
            stream=stream == "true",
            hot_words=prompted(texts.get("prompt", [""])[0], texts.get("keywords[]", ())),
        )


def _text(part: FormPart) -> str:
    if len(part.content) > MAX_TEXT_BYTES:
        raise BadParameter(
            f"The field {part.name!r} has {len(part.content):,} bytes; at most {MAX_TEXT_BYTES:,}.", part.name
        )
    try:
        return part.content.decode()
    except UnicodeDecodeError:
        raise BadParameter(f"The field {part.name!r} is not UTF-8; send text.", part.name) from None
