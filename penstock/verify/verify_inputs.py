"""Examples that every backend runs: the golden examples of a pack or a bundle, and files."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.application import Application, decoded_chunk
from penstock.core.errors import InvalidInput, PackError, RequestError, SourceError
from penstock.core.pictures.dense import Dense
from penstock.core.spec import Array
from penstock.core.speech.sound import sound_decoder
from penstock.core.streams.live import is_sound
from penstock.device.slides import open_slide

TYPES = {
    ".bmp": "image/bmp",
    ".gif": "image/gif",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".json": "application/json",
    ".png": "image/png",
    ".txt": "text/plain",
    ".wav": "audio/wav",
    ".webp": "image/webp",
}
# Pictures that Pillow reads, and files of slides that OpenSlide does.
SLIDES = (
    *(ending for ending, kind in TYPES.items() if kind.startswith("image/")),
    *(".bif", ".mrxs", ".ndpi", ".scn", ".svs", ".svslide", ".tif", ".tiff"),
)
PNG, TEXT = "image/png", "text/plain"
# Tiles of each slide that are compared, and that are read to find them.
MAX_TILES, MAX_READ = 16, 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One input.

    Args:
        name: Name in messages: its file.
        raw: The input without a batch dimension, an array or a record; for a live application a whole signal.
        body: The same as a request body, if there is one.
        content_type: Content type of the body.
    """

    name: str
    raw: Array
    body: bytes | None = None
    content_type: str = ""


def golden_examples(inputs: Iterable[Array], application: Application) -> list[Example]:
    """Make examples of the golden inputs of a pack or a bundle; pictures of any size have a PNG file as their body."""
    png = application.prepare is not None and PNG in application.accepts
    content_type = PNG if png else ""
    return [
        Example(
            name=f"golden example {number}",
            raw=raw,
            body=as_png(raw) if png else None,
            content_type=content_type,
        )
        for number, raw in enumerate(inputs)
    ]


def examples_of(paths: list[Path], application: Application) -> Iterator[Example | str]:
    """Read files, including those in folders, as examples; a sentence for each that cannot be read.

    Raises:
        PackError: A path does not exist, or holds no file that the application reads.
    """
    for path in paths:
        if not path.exists():
            raise PackError(f"{path} does not exist; name files or folders that {application.name!r} reads.")
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        known = [file for file in files if _is_known(file, application) or not path.is_dir()]
        if not known:
            kinds = SLIDES if application.dense is not None else TYPES
            raise PackError(f"{path} holds no file of a known kind ({', '.join(sorted(kinds))}).")
        for file in known:
            if application.dense is not None:
                yield from _tiles(file, application, application.dense)
                continue
            try:
                yield _example(file, application)
            except (RequestError, OSError) as error:
                yield f"{file}: {error}"


def _tiles(file: Path, application: Application, dense: Dense) -> Iterator[Example | str]:
    """Some tiles of a slide that are not empty, evenly over it; a sentence if there are none or it cannot be read."""
    height, width, _ = application.input_tensor.shape
    down, across = height - 2 * dense.margin, width - 2 * dense.margin
    try:
        with open_slide(file) as slide:
            rows, columns = -(-slide.height // down), -(-slide.width // across)
            step, count = -(-rows * columns // MAX_TILES), 0
            places = (place for first in range(step) for place in range(first, rows * columns, step))
            for place in islice(places, MAX_READ):
                top, left = down * (place // columns), across * (place % columns)
                tile = slide.read(left - dense.margin, top - dense.margin, width, height)
                if not dense.is_empty(tile):
                    count += 1
                    yield Example(name=f"{file}, tile at {left}, {top}", raw=tile)
                if count == MAX_TILES:
                    return
            if not count:
                yield f"{file}: no tile was found that is not empty."
    except (SourceError, OSError) as error:
        yield f"{file}: {error}"


def _is_known(file: Path, application: Application) -> bool:
    if application.dense is not None:
        return file.suffix.lower() in SLIDES
    kind = TYPES.get(file.suffix.lower())
    # Folders of pictures have notes.
    return kind is not None and (kind != TEXT or TEXT in application.accepts)


def _example(file: Path, application: Application) -> Example:
    body, kind = file.read_bytes(), TYPES.get(file.suffix.lower(), "")
    if application.live is not None:
        if not is_sound(application.input):
            raise InvalidInput(f"application {application.name!r} takes no sound, and so no files.")
        decoder = sound_decoder("wav", None, application.live.rate_hz)
        raw = np.concatenate([decoder.feed(body), decoder.flush()])
        return Example(name=str(file), raw=raw)
    if application.decode is None:
        raise InvalidInput(f"application {application.name!r} has no decode, and so takes no files.")
    given = application.decode(body, kind)
    raw = decoded_chunk(application, given) if application.prepare is None else application.prepare.raw.check(given)
    return Example(name=str(file), raw=raw, body=body, content_type=kind)


def as_png(raw: Array) -> bytes:
    """Encode a picture, uint8 `[H, W]` or `[H, W, C]`, as a PNG file without its alpha channel."""
    from PIL import Image

    # Decoding turns transparent pixels black; the network ignores the alpha channel.
    opaque: Any = raw[..., :3] if raw.ndim == 3 and raw.shape[2] == 4 else raw
    sink = io.BytesIO()
    Image.fromarray(opaque).save(sink, "PNG")
    return sink.getvalue()
