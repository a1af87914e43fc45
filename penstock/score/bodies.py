"""Encoded bodies, such as JPEG or WAV, as the inputs of a network: what a request's body is to a server."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import PurePosixPath
from typing import Any, final

import numpy as np

from penstock.core.application import Application, decoded_chunk
from penstock.core.decode import text_fault
from penstock.core.errors import InvalidInput, RequestError, ScoreError, one_line
from penstock.core.spec import Array
from penstock.core.speech.sound import sound_decoder
from penstock.core.streams.live import WAV, is_sound
from penstock.runtime.onnx.prepare_session import PrepareSession
from penstock.score.chunks import Chunks, empty_chunks

_TYPES = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
    ".wav": WAV[0],
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
    ".mp3": "audio/mpeg",
    ".txt": "text/plain",
    ".json": "application/json",
}
# The first bytes of a file.
_MAGIC: Mapping[bytes, str] = {
    b"\xff\xd8\xff": "image/jpeg",
    b"\x89PNG": "image/png",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}


@final
class BodyReader:
    """Decodes bodies; thread-safe where the application's `decode` is.

    Args:
        application: Its `decode` reads them; sound of a live application is decoded as a server does.
        prepare: The application's `prepare`; None if it has none.
        content_type: The type of all bodies; None to find it for each.

    Raises:
        ScoreError: The application reads no bodies, or not of this type.
    """

    def __init__(self, application: Application, prepare: PrepareSession | None, content_type: str | None) -> None:
        self._application, self._prepare, self._given = application, prepare, content_type
        live = application.live
        is_heard = live is not None and is_sound(application.input)
        self.accepts: tuple[str, ...] = WAV if is_heard else application.accepts
        if not self.accepts:
            raise ScoreError(
                f"application {application.name!r} has no decode, so it reads no files or encoded bodies; give its "
                f"tensors as columns of Parquet or in JSONL, or train it with a decode."
            )
        if content_type is not None and content_type not in self.accepts:
            raise ScoreError(
                f"--content-type is {content_type!r}, and application {application.name!r} reads "
                f"{', '.join(self.accepts)}; give one of them."
            )

    def takes(self, name: str) -> bool:
        """True for the name of a file that is read."""
        return self._given is not None or self._type_of_name(name) is not None

    def type_of_name(self, name: str) -> str:
        """The content type of a file that is read."""
        return self._given or self._type_of_name(name) or self.accepts[0]

    def _type_of_name(self, name: str) -> str | None:
        found = _TYPES.get(PurePosixPath(name).suffix.lower())
        return found if found in self.accepts else None

    def _type_of(self, body: bytes) -> str:
        if self._given is not None:
            return self._given
        found = next((kind for magic, kind in _MAGIC.items() if body.startswith(magic)), None)
        if body[:4] == b"RIFF":
            found = {b"WEBP": "image/webp", b"WAVE": WAV[0]}.get(body[8:12])
        return found if found in self.accepts else self.accepts[0]

    def chunks(self, bodies: Sequence[bytes | None], types: Sequence[str] | None = None) -> Chunks:
        """Decode the bodies of some rows.

        Args:
            bodies: The bodies; None where a row has none.
            types: Their content types; found from their first bytes by default.
        """
        spec, count = self._application.input, len(bodies)
        signals: list[Array] = []
        array = empty_chunks(spec, count)
        chunks = Chunks(array=array)
        sizes = [(0, 0)] * count if self._application.shows is not None else None
        for row, body in enumerate(bodies):
            found = None
            try:
                if body is None:
                    raise InvalidInput("the row has no body (null); give a value.")
                found, size = self._decoded(body, self._type_of(body) if types is None else types[row])
                if sizes is not None:
                    sizes[row] = size
            except RequestError as error:
                chunks.errors[row] = str(error)
            if self._application.live is not None:
                signals.append(np.zeros((0, *spec.shape[1:]), spec.numpy_dtype) if found is None else found)
            elif found is not None:
                array[row] = found
        chunks.sizes = sizes
        if self._application.live is not None:
            chunks.array = signals
        return chunks

    def _decoded(self, body: bytes, content_type: str) -> tuple[Array, tuple[int, int]]:
        application = self._application
        if len(body) > application.max_body_bytes and application.live is None:
            raise InvalidInput(f"the body has {len(body):,} bytes; at most {application.max_body_bytes:,} are taken.")
        if application.live is not None:
            return self._sound(body, application.live.rate_hz), (0, 0)
        assert application.decode is not None, application.name
        try:
            raw: Any = application.decode(body, content_type)
        except RequestError:
            raise
        except (Exception, SystemExit) as error:
            # The application's code may raise anything.
            raise text_fault(error, body) or InvalidInput(
                f"the decode raised {type(error).__name__}: {one_line(error)}."
            ) from error
        chunk = decoded_chunk(application, raw) if self._prepare is None else self._prepare(raw)
        return chunk, raw.shape[:2] if application.shows is not None else (0, 0)

    def _sound(self, body: bytes, rate_hz: float) -> Array:
        decoder = sound_decoder("wav", None, rate_hz, inf)
        found = np.concatenate([decoder.feed(body), decoder.flush()])
        if not found.size:
            raise InvalidInput("the sound has no samples.")
        return found


def body_reader(
    application: Application, prepare: PrepareSession | None, *, content_type: str | None, body: str | None
) -> BodyReader | None:
    """The reader of encoded bodies; None where the application reads none.

    Args:
        application: The application.
        prepare: Its `prepare`; None if it has none.
        content_type: The type of all bodies; None to find it for each.
        body: The column of bodies; None if none was named.

    Raises:
        ScoreError: A type or a column was named, and there is no reader for it.
    """
    live = application.live is not None
    if is_sound(application.input) if live else application.decode is not None:
        return BodyReader(application, prepare, content_type)
    wanted = "--body" if body is not None else "--content-type" if content_type is not None else ""
    if wanted:
        raise ScoreError(f"application {application.name!r} has no decode, which {wanted} needs; leave it out.")
    return None
