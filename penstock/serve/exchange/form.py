"""Bodies of multipart/form-data (RFC 7578): one part for each tensor, by its name."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
from multipart import MultipartError, MultipartSegment, ParserLimitReached, PushMultipartParser, parse_options_header

from penstock.core.dim import Dim
from penstock.core.errors import InvalidInput, UnsupportedContent, one_line
from penstock.core.picture_file import PictureFile
from penstock.core.record import ChunkSpec, RecordSpec, given_by_name
from penstock.core.spec import Array, TensorSpec
from penstock.core.wording.json_fault import json_fault
from penstock.serve.exchange.json_bound import check_json

MULTIPART = "multipart/form-data"
RAW = "application/octet-stream"
TEXT = "text/plain"
JSON = "application/json"
# RFC 7578, section 4.4: a field without a type is text.
_NUMBERS = ("", TEXT, JSON)
# RFC 2046, section 5.1.1.
_MAX_BOUNDARY = 70
_PLAIN_ENCODINGS = ("", "7bit", "8bit", "binary")


@dataclass(frozen=True, kw_only=True, slots=True)
class FormPart:
    """One part of a body.

    Args:
        name: Of the tensor.
        content_type: Media type in lower case, without parameters; empty if there is none.
        content: Its bytes.
    """

    name: str
    content_type: str
    content: bytes


def boundary_of(content_type: str) -> str:
    """The boundary in the value of a Content-Type header.

    Raises:
        InvalidInput: There is none, or it is too long.
    """
    boundary = parse_options_header(content_type)[1].get("boundary", "")
    if not 1 <= len(boundary) <= _MAX_BOUNDARY or not boundary.isascii() or not boundary.isprintable():
        raise InvalidInput(f"The Content-Type names no boundary of 1 to {_MAX_BOUNDARY} characters; send it.")
    return boundary


def parts_of(body: bytes, boundary: str, names: tuple[str, ...], optional: Collection[str] = ()) -> dict[str, FormPart]:
    """Split a body into its parts by name.

    Args:
        body: The whole body; its size is bounded by the caller.
        boundary: Between the parts.
        names: The tensors; each has one part. The only part for the only tensor may have any name.
        optional: Those that may be missing, because they have a default.

    Raises:
        InvalidInput: No form, or a part is missing, unknown, there twice or encoded.
    """
    found: dict[str, FormPart] = {}
    # One more, so that a second part of a name is called that.
    parts = _parts(body, boundary, names, len(names) + 1, "input", checked=len(names) > 1)
    if len(names) == 1:
        parts = list(parts)
        if len(parts) == 1:
            return {names[0]: replace(parts[0], name=names[0])}
    for part in parts:
        if part.name in found:
            raise InvalidInput(f"The body has the input {part.name!r} twice; send each of {_listed(names)} once.")
        found[part.name] = part
    given_by_name(names, found, optional)
    return found


def fields_of(
    body: bytes, boundary: str, names: tuple[str, ...], lists: Collection[str], max_parts: int
) -> dict[str, list[FormPart]]:
    """Split a body into its fields by name, of which any may be missing.

    Args:
        body: The whole body; its size is bounded by the caller.
        boundary: Between the parts.
        names: The fields.
        lists: Those that may come several times.
        max_parts: Most parts of the body.

    Raises:
        InvalidInput: No form, or a part is unknown, there twice or encoded.
    """
    found: dict[str, list[FormPart]] = {}
    for part in _parts(body, boundary, names, max_parts, "field"):
        if part.name in found and part.name not in lists:
            raise InvalidInput(f"The body has the field {part.name!r} twice; send it once.")
        found.setdefault(part.name, []).append(part)
    return found


def _parts(
    body: bytes, boundary: str, names: tuple[str, ...], max_parts: int, kind: str, *, checked: bool = True
) -> Iterator[FormPart]:
    """Split a body into its parts; `checked` ones have a name among those given."""
    try:
        with PushMultipartParser(boundary, strict=True, max_segment_count=max_parts) as parser:
            header, content = None, b""
            for event in parser.parse(body):
                if isinstance(event, MultipartSegment):
                    header, content = event, b""
                elif event is None:
                    assert header is not None
                    yield _part(header, content, names if checked else None, kind)
                else:
                    content += event
    except ParserLimitReached as error:
        raise InvalidInput(
            f"The form has more parts or headers than it may ({one_line(error)}); send {_listed(names)}."
        ) from None
    except MultipartError as error:
        raise InvalidInput(f"The body is not multipart/form-data that can be read ({one_line(error)}).") from None


def _part(header: MultipartSegment, content: bytes, names: tuple[str, ...] | None, kind: str) -> FormPart:
    name = header.name or ""
    if names is not None and name not in names:
        raise InvalidInput(f"There is no {kind} {name[:80]!r}; there is {_listed(names)}.")
    encoding = (header.header("Content-Transfer-Encoding") or "").strip().lower()
    if encoding not in _PLAIN_ENCODINGS:
        raise InvalidInput(f"The part {name!r} is encoded as {encoding[:40]!r}; send its bytes as they are.")
    # RFC 7578, section 4.4: a file without a type is any bytes, and a field is text.
    type_ = header.header("Content-Type") or (RAW if header.filename else "")
    return FormPart(name=name, content_type=type_.partition(";")[0].strip().lower(), content=content)


def chunk_of_parts(
    input: ChunkSpec,
    parts: Mapping[str, FormPart],
    accepts: tuple[str, ...] = (),
    picture: PictureFile | None = None,
) -> Array:
    """Make the chunk of parts that hold JSON numbers, or raw little-endian bytes where their type says so.

    Args:
        input: Of the application.
        parts: By the names of its tensors.
        accepts: Content types that its `decode` takes, as the only part or as that of the picture.
        picture: The picture beside other tensors; None where there is none.

    Raises:
        InvalidInput: A part does not fit its tensor.
        UnsupportedContent: A part is of another type.
    """
    files: dict[str, Array] = {}
    for part in parts.values():
        is_picture = picture is not None and part.name == picture.tensor
        if picture is not None and is_picture and part.content_type in accepts:
            files[part.name] = picture.pixels(part.content)
        elif part.content_type not in (*_NUMBERS, RAW):
            taken = ", ".join(dict.fromkeys((*(accepts if is_picture or len(parts) == 1 else ()), TEXT, JSON, RAW)))
            raise UnsupportedContent(
                f"The part {part.name!r} has the Content-Type {part.content_type[:80]!r}, which is not taken; send "
                f"{taken}."
            )
    if isinstance(input, TensorSpec):
        (part,) = parts.values()
        if part.content_type == RAW:
            return raw_chunk(input, part.content, accepts)
        return input.from_numbers(_numbers(part, input))
    return input.from_numbers(files | {name: _given(part, input) for name, part in parts.items() if name not in files})


def raw_chunk(input: ChunkSpec, body: bytes, accepts: tuple[str, ...]) -> Array:
    """Make the chunk of raw bytes.

    Args:
        input: Of the application.
        body: The bytes.
        accepts: Content types that its `decode` takes.

    Raises:
        InvalidInput: They are no chunk; a wrong number of bytes may be a file that was sent without its type.
    """
    try:
        return input.from_bytes(body)
    except InvalidInput as error:
        files = [accepted for accepted in accepts if accepted not in (JSON, RAW)]
        if not files or not isinstance(input, TensorSpec) or len(body) == input.nbytes:
            raise
        raise InvalidInput(
            f"{str(error).rstrip('.')}; send a file with its own Content-Type, {' or '.join(files)}."
        ) from None


def _given(part: FormPart, input: RecordSpec) -> Any:
    return _array(input.by_name[part.name], part.content) if part.content_type == RAW else _numbers(part, input)


def _numbers(part: FormPart, input: ChunkSpec) -> Any:
    try:
        check_json(part.content, input, 1)
        return orjson.loads(part.content)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"The part {part.name!r} is not JSON that can be read ({json_fault(error)}).") from None


def _array(spec: TensorSpec, content: bytes) -> Array:
    """The array of raw bytes, whose number gives the one length that varies."""
    varying = [axis for axis, size in enumerate(spec.shape) if isinstance(size, Dim)]
    if len(varying) > 1:
        raise InvalidInput(f"{spec.name} is {spec.describe()}; bytes have no lengths, so send it as JSON.")
    shape = [int(size) for size in spec.shape]
    if varying:
        shape[varying[0]] = 1
    row = spec.numpy_dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if len(content) % row or (not varying and len(content) != row):
        raise InvalidInput(f"The part {spec.name!r} has {len(content):,} bytes, which are no {spec.describe()}.")
    if varying:
        dim: Any = spec.shape[varying[0]]
        shape[varying[0]] = len(content) // row
        if not dim.min <= shape[varying[0]] <= dim:
            raise InvalidInput(
                f"{spec.name} has {shape[varying[0]]:,} {dim.name}; it must have from {dim.min:,} to {int(dim):,}."
            )
    sized = spec.at({spec.shape[axis].name: shape[axis] for axis in varying})  # pyright: ignore
    return sized.from_bytes(content)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))


def only_file(parts: Mapping[str, FormPart], accepts: tuple[str, ...]) -> FormPart | None:
    """The part that the application's `decode` reads: the only one, of a content type that it takes."""
    if len(parts) != 1:
        return None
    (part,) = parts.values()
    return part if (part.content_type or TEXT) in accepts else None
