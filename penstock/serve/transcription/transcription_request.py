"""The form of `POST /v1/audio/transcriptions`: what of it has an effect, what has none, and what is refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, final

from penstock.core.errors import InvalidInput, UnsupportedContent
from penstock.serve.exchange.form import FormPart
from penstock.serve.transcription.transcripts import FORMS

GRANULARITIES = "timestamp_granularities[]"
# They are taken, and have no effect.
_HINTS = ("prompt", "temperature", "chunking_strategy", "keywords[]", "languages[]")
FIELDS = ("file", "model", "language", "response_format", "stream", "include[]", GRANULARITIES, *_HINTS)
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
    """

    sound: bytes
    model: str = ""
    form: str = "json"
    granularities: frozenset[str] = frozenset({"segment"})
    language: str = ""
    stream: bool = False

    @classmethod
    def of(cls, parts: Mapping[str, Sequence[FormPart]]) -> Self:
        """Read the parts of a form.

        Args:
            parts: By name; each has one at least, those of `LISTS` alone may have several.

        Raises:
            InvalidInput: There is no file, or a field has a value that is not served.
            UnsupportedContent: The file is no WAV.
        """
        if "file" not in parts:
            raise InvalidInput("The form has no part 'file'; send a WAV in it.")
        sound = parts["file"][0].content
        if not sound:
            raise InvalidInput("The file is empty; send a WAV.")
        if sound[:4] != b"RIFF" or sound[8:12] != b"WAVE":
            raise UnsupportedContent(
                "The file is no WAV, which alone is read here; convert it, for example with 'ffmpeg -i FILE out.wav'."
            )
        texts = {name: [_text(part) for part in found] for name, found in parts.items() if name != "file"}
        form = texts.get("response_format", ["json"])[0] or "json"
        if form not in FORMS:
            raise InvalidInput(f"response_format is {form[:40]!r}; it must be {', '.join(FORMS)}.")
        granularities = frozenset(texts.get(GRANULARITIES, ["segment"]))
        if unknown := sorted(granularities - {"segment", "word"}):
            raise InvalidInput(f"{GRANULARITIES} has {unknown[0][:40]!r}; it takes segment and word.")
        if any(texts.get("include[]", ())):
            raise InvalidInput("There are no log-probabilities of tokens here; leave include[] out.")
        stream = texts.get("stream", ["false"])[0].lower()
        if stream not in ("true", "false"):
            raise InvalidInput(f"stream is {stream[:40]!r}; it must be true or false.")
        if stream == "true" and form not in ("json", "text"):
            raise InvalidInput(f"A stream has no response_format {form!r}; leave it out, or send stream=false.")
        return cls(
            sound=sound,
            model=texts.get("model", [""])[0],
            form=form,
            granularities=granularities,
            language=texts.get("language", [""])[0][:40],
            stream=stream == "true",
        )


def _text(part: FormPart) -> str:
    if len(part.content) > MAX_TEXT_BYTES:
        raise InvalidInput(f"The field {part.name!r} has {len(part.content):,} bytes; at most {MAX_TEXT_BYTES:,}.")
    try:
        return part.content.decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"The field {part.name!r} is not UTF-8; send text.") from None
