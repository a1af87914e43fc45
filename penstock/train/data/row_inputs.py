"""Columns of a dataset as inputs: files decoded, numbers as they are."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from penstock.core.errors import BadExample, PenstockError, TrainError
from penstock.core.record import ChunkSpec
from penstock.core.spec import TensorSpec
from penstock.train.data.columns import Column
from penstock.train.data.picture_reader import PictureReader, encoded, is_of_the_machine
from penstock.train.data.row_source import Kind, Values, as_file
from penstock.train.data.sampler import Indices, Seeds
from penstock.train.data.sound_reader import SoundReader

# B rows that are read

_TYPES = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG", "image/png"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
)


class Reader(NamedTuple):
    """Makes a column of arrays of a column of values. Processes of a loader get a pickled copy.

    Args:
        column: `column(values, indices_B, seeds_B)`, B arrays.
        is_picture: True if it crops pictures.
    """

    column: Callable[[Values, Indices, Seeds], Column]
    is_picture: bool = False


def decoding(kind: Kind, column: str, spec: ChunkSpec, decode: Callable[[bytes, str], Any], *, random: bool) -> Reader:
    """Make the reader of a column by an application's `decode`.

    Raises:
        TrainError: The column has nothing to decode, or `random` is True.
    """
    if random:
        raise TrainError("DatasetExamples has random=True and a decode, which is not random; give one of them.")
    if kind not in ("picture", "sound", "text", "bytes"):
        raise TrainError(f"column {column!r} has no text, bytes or files to decode; leave decode out.")

    return Reader(partial(_one_by_one, partial(_decoded, spec, decode)))


def plain_reader(
    kind: Kind, column: str, spec: TensorSpec, *, random: bool, share: float, rate_hz: int | None
) -> Reader:
    """Make the reader of a column that needs no `decode`.

    Args:
        kind: The kind of the column.
        column: Its name.
        spec: The tensor that it becomes.
        random: Crop pictures at random.
        share: Of a centre crop.
        rate_hz: Sample rate of sounds; None if it is not known.

    Raises:
        TrainError: The column cannot become that tensor.
    """
    is_picture_spec = spec.dtype == "uint8" and len(spec.shape) in (2, 3) and not spec.dims
    if kind == "picture" or (kind == "bytes" and is_picture_spec):
        pictures = PictureReader(spec, random=random, share=share, user="DatasetExamples")
        return Reader(partial(_crops, pictures), is_picture=True)
    if kind == "sound" or (kind == "bytes" and len(spec.shape) == 1 and spec.dtype in ("int16", "float32")):
        if rate_hz is None:
            raise TrainError(f"the sounds of column {column!r} have no rate; give sample_rate_hz=16000, for example.")
        return Reader(partial(_one_by_one, partial(_sound, SoundReader(spec, rate_hz))))
    if kind in ("number", "label"):
        return Reader(_numbers)
    raise TrainError(
        f"column {column!r} holds {'text' if kind == 'text' else 'values that are no numbers'}, and the input is "
        f"{spec.describe()}; give decode=app.decode, or row=FUNCTION of a row, which returns its input and target."
    )


def _one_by_one(function: Callable[[Any], Any], values: Values, indices_B: Indices, _: Seeds) -> Column:
    return [_read(function, value, index) for value, index in zip(values, indices_B.tolist(), strict=True)]


def _crops(pictures: PictureReader, values: Values, indices_B: Indices, seeds_B: Seeds) -> Column:
    places = zip(values, pictures.draws(seeds_B), indices_B.tolist(), strict=True)
    return [_read(partial(_crop, pictures, draws), value, index) for value, draws, index in places]


def _crop(pictures: PictureReader, draws: list[float], value: Any) -> Any:
    return pictures.read(as_file(value), "", draws)


def _decoded(spec: ChunkSpec, decode: Callable[[bytes, str], Any], value: Any) -> Any:
    if isinstance(value, str):
        return spec.check(decode(value.encode(), "text/plain"))
    content = encoded(as_file(value))
    return spec.check(decode(content, content_type(content)))


def _sound(sounds: SoundReader, value: Any) -> Any:
    return sounds.read(value if isinstance(value, Path) else bytes(value))


def _numbers(values: Values, _indices_B: Indices, _seeds_B: Seeds) -> Column:
    return values


def content_type(content: bytes) -> str:
    """Return the content type of a file by its first bytes."""
    if content[:4] == b"RIFF":
        return "image/webp" if content[8:12] == b"WEBP" else "audio/wav"
    return next((name for start, name in _TYPES if content.startswith(start)), "application/octet-stream")


def _read(function: Callable[[Any], Any], value: Any, index: int) -> Any:
    try:
        return function(value)
    except Exception as error:
        # Each decoder has its own errors for damaged files: EOFError, struct.error, IndexError, ...
        own = isinstance(error, PenstockError)
        reason = str(error).rstrip(".") if own else f"{type(error).__name__}: {error}"
        if is_of_the_machine(error):
            raise TrainError(
                f"the file of row {index:,} cannot be read ({reason}), which is an error of the machine, not of the "
                f"file; correct it and resume."
            ) from error
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({reason})"
        raise BadExample(f"the file of row {index:,} {why}.", index=index, name=f"row {index}") from error
