"""Heads and bodies of plain requests (pictures, text, JSON, raw bytes, forms of tensors), and the JSON of a reply."""

import logging
import re
from dataclasses import dataclass
from typing import Any, cast, final

import orjson

from penstock.core.application import Application, decoded_chunk
from penstock.core.errors import ComputeFailed, InvalidInput, RequestError, UnsupportedContent
from penstock.core.picture_file import PictureFile
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.core.wording.json_fault import json_fault
from penstock.serve.exchange.accept import accepts
from penstock.serve.exchange.budget import options_of
from penstock.serve.exchange.form import (
    JSON,
    MULTIPART,
    TEXT,
    boundary_of,
    chunk_of_parts,
    only_file,
    parts_of,
    raw_chunk,
)
from penstock.serve.exchange.json_bound import QUICK_BYTES, check_json
from penstock.serve.exchange.request import Head
from penstock.serve.exchange.timing import is_timed
from penstock.serve.frontend.decode_pool import decode_failure
from penstock.serve.http.generated_answer import EVENTS
from penstock.serve.http.picture_beside import has_text, picture_of, with_pixels
from penstock.serve.registry.generated import REPLY_FAILED
from penstock.serve.registry.served_chain import Served

log = logging.getLogger(__name__)

RAW = "application/octet-stream"
INSTANCES = "instances"
# The fields of several rows, and those of their replies.
FIELDS = {"inputs": "outputs", INSTANCES: "predictions"}
# Content types that clients send by default; the type is then found from the body.
URL_ENCODED = "application/x-www-form-urlencoded"
UNSPECIFIED = ("", URL_ENCODED)
# `curl -d FILE`, which lacks the @.
_FILE_NAME = re.compile(rb"[\w./~-]{1,120}\.\w{1,8}")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlainTerms:
    """The terms that a head sets for its requests.

    Args:
        content_type: Media type of the body.
        boundary: Boundary of a form's parts; None for a body that is no form, or one that the application decodes.
        budget_ns: Latency budget; None for the default.
        low_priority: Whether the requests run after the others.
        timed: Whether the response has the times of the request.
        raw_reply: Whether the response is raw bytes.
        events: Whether the client accepts server-sent events.
    """

    content_type: str
    boundary: str | None
    budget_ns: int | None
    low_priority: bool
    timed: bool
    raw_reply: bool
    events: bool

    @classmethod
    def of(cls, application: Application, head: Head) -> "PlainTerms":
        """Read the head of a request.

        Raises:
            InvalidInput: The budget, the priority or the boundary of a form is malformed.
        """
        content_type = content_type_of(head)
        is_form = content_type == MULTIPART and MULTIPART not in application.accepts
        boundary = boundary_of(head.headers["content-type"]) if is_form else None
        budget_ns, low_priority = options_of(head)
        return cls(
            content_type=content_type,
            boundary=boundary,
            budget_ns=budget_ns,
            low_priority=low_priority,
            timed=is_timed(head),
            # Several tensors have no raw form.
            raw_reply=accepts(head, RAW) and not isinstance(application.output, RecordSpec),
            events=accepts(head, EVENTS),
        )

    def content_of(self, application: Application, body: bytes) -> tuple[str, bytes, Array | None]:
        """Take the content type and the bytes of a body, or of a form's part that `decode` reads; or a form's chunk.

        Raises:
            RequestError: The form is malformed, or lacks a tensor.
        """
        if self.boundary is None:
            return self.content_type, body, None
        optional = [name for name, spec in application.inputs.items() if spec.default is not None]
        parts = parts_of(body, self.boundary, tuple(application.inputs), optional)
        file = None if application.decode is None else only_file(parts, application.accepts)
        if file is not None:
            return file.content_type or TEXT, file.content, None
        return "", b"", chunk_of_parts(application.input, parts, application.accepts, picture_of(application))


def content_type_of(head: Head) -> str:
    """Media type of the body, in lower case, without parameters."""
    return head.headers.get("content-type", "").partition(";")[0].strip().lower()


def chunk_of(served: Served, content_type: str, body: bytes) -> Array | bytes:
    """Make the chunk of a request's body.

    Raises:
        RequestError: The body is not an input of the application.
    """
    application = served.application
    if is_decoded(application, content_type, body):
        return decoded(served, body, content_type)
    if content_type == RAW:
        return raw_chunk(application.input, body, application.accepts)
    if isinstance(application.input, RecordSpec) and (content_type == JSON or content_type in UNSPECIFIED):
        return _record_of(served, application.input, body, takes_text=TEXT in application.accepts)
    if _is_list(body) and (content_type == JSON or content_type in UNSPECIFIED):
        return application.input.from_numbers(numbers_of(served, body))
    if (content_type == JSON and "application/json" not in application.accepts) or _is_bare_object(
        application, content_type, body
    ):
        assert isinstance(application.input, TensorSpec), content_type
        return _tensor_of(served, application.input, body)
    raw = () if isinstance(application.input, RecordSpec) else (RAW,)
    taken = ", ".join(dict.fromkeys((*application.accepts, JSON, *raw)))
    raise UnsupportedContent(f"Content-Type {content_type!r} is not taken by {served.name!r}; send {taken}.")


def numbers_by_name(input: ChunkSpec, numbers: Any) -> Any:
    """Return the numbers of the one input that an object names; anything else as it is."""
    if isinstance(input, TensorSpec) and input.name not in FIELDS and isinstance(numbers, dict):
        given = cast(dict[str, Any], numbers)
        return given[input.name] if list(given) == [input.name] else given
    return numbers


def may_have_file(terms: PlainTerms, body: bytes, picture: PictureFile) -> bool:
    """True if a body may have a picture's file beside other tensors, which takes a thread to decode."""
    if terms.boundary is not None:
        return True
    is_object = terms.content_type in (JSON, *UNSPECIFIED) and body.lstrip()[:1] == b"{"
    return is_object and has_text(body, picture)


def chunk_of_message(served: Served, body: bytes) -> Array | bytes:
    """Make the chunk of a WebSocket's message, in the event loop.

    Raises:
        RequestError: The message is not an input of the application, or has a picture's file, which takes a thread.
    """
    picture = picture_of(served.application)
    if picture is not None and has_text(body, picture):
        raise InvalidInput(
            f"A WebSocket takes {picture.tensor!r} as nested lists of numbers, and names without escapes; POST a file "
            f"to /v1/apps/{served.name}."
        )
    return chunk_of(served, JSON, body)


def with_flag(application: Application, content_type: str, body: bytes, error: RequestError) -> RequestError:
    """Add the missing option of `curl -d` to the error of a body that came with its Content-Type and was not JSON."""
    if content_type != URL_ENCODED or not isinstance(error, InvalidInput | UnsupportedContent):
        return error
    is_json = body.lstrip()[:1] in (b"[", b"{")
    if not isinstance(error, UnsupportedContent) and is_json and not is_decoded(application, content_type, body):
        return error
    files = [accepted for accepted in application.accepts if accepted != JSON]
    file = f", and a file as `--data-binary @FILE -H 'Content-Type: {files[0]}'`" if files else ""
    if _FILE_NAME.fullmatch(body):
        name = body.decode()
        file += f". The body is the text {name!r}: with `@{name}` curl sends the file of that name"
    return type(error)(
        f"{str(error).rstrip('.')}. `curl -d` sends {URL_ENCODED}; send JSON with `-H 'Content-Type: {JSON}'`{file}."
    )


def _tensor_of(served: Served, spec: TensorSpec, body: bytes) -> Array:
    """Make the chunk of one input from JSON that is no list: a number, or an object that has the input by its name."""
    found = numbers_of(served, body)
    numbers = numbers_by_name(spec, found)
    if numbers is not found:
        if body.count(b'"') > 2:
            # JSON's parser keeps the last of two values of one name.
            raise InvalidInput("The body has a name twice; send each once.")
        return spec.from_numbers(numbers)
    if not spec.shape and not isinstance(found, dict):
        return spec.from_numbers(found)
    wanted, form = ("an array", " as nested arrays,") if spec.shape else ("a number", "")
    raise InvalidInput(
        f"The body is JSON but not {wanted}; send {spec.describe()}{form} alone or as "
        f'{{"{spec.name}": ...}}, or several as {{"inputs": [...]}}.'
    )


def _record_of(served: Served, input: RecordSpec, body: bytes, *, takes_text: bool) -> Array:
    given = numbers = numbers_of(served, body)
    picture = picture_of(served.application)
    if picture is not None:
        numbers = with_pixels(given, picture)
    strings = 0 if numbers is given else 1
    try:
        record = input.from_numbers(numbers)
    except InvalidInput as error:
        values: list[object] = list(numbers.values()) if isinstance(numbers, dict) else [numbers]  # pyright: ignore
        if takes_text and any(isinstance(each, str) for each in values):
            raise InvalidInput(f"{str(error).rstrip('.')}; or send it as {TEXT}.") from None
        raise
    # The only strings are the names and a picture, and JSON's parser keeps the last of two values of one name.
    if body.count(b'"') > 2 * (len(cast(dict[str, Any], given)) + strings):
        names = ", ".join(map(repr, input.by_name))
        twice = [name for name in input.by_name if body.count(f'"{name}"'.encode()) > 1]
        which = f"the input {twice[0]!r}" if twice else "an input"
        raise InvalidInput(f"The body has {which} twice; send each of {names} once.")
    return record


def is_decoded(application: Application, content_type: str, body: bytes) -> bool:
    """True if a body of this content type is handed to the application's `decode`."""
    # Arrays and raw bytes need no decoding.
    if application.decode is None or content_type == RAW:
        return False
    if content_type in UNSPECIFIED or content_type == JSON:
        if isinstance(application.input, RecordSpec) and body.lstrip()[:1] == b"{":
            return content_type in application.accepts
        return not _is_list(body) and (content_type in UNSPECIFIED or content_type in application.accepts)
    return content_type in application.accepts


def _is_bare_object(application: Application, content_type: str, body: bytes) -> bool:
    """True if a body of no stated type is a JSON object that no `decode` may want."""
    return content_type in UNSPECIFIED and application.decode is None and body.lstrip()[:1] == b"{"


def _is_list(body: bytes) -> bool:
    return body.lstrip()[:1] == b"["


def numbers_of(served: Served, body: bytes) -> object:
    """Parse a JSON body of one row or several.

    Raises:
        InvalidInput: See `json_of`.
        TooLarge: It has more lists or values than a request may have.
    """
    if len(body) > QUICK_BYTES:
        check_json(body, served.application.input, served.max_rows)
    return json_of(body)


def json_of(body: bytes) -> object:
    """Parse a JSON body.

    Raises:
        InvalidInput: The body is malformed, too deep, or has NaN.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"The body is not JSON that can be read ({json_fault(error)}).") from None


def decoded(served: Served, body: bytes, content_type: str) -> Array:
    """Make the chunk of a body by the application's `decode`.

    Raises:
        RequestError: The body is not an input of the application, or the `decode` raised an error, which is logged.
    """
    application = served.application
    assert application.decode is not None
    begin_ns = served.now_ns()
    try:
        return decoded_chunk(application, application.decode(body, content_type))
    except RequestError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code raises anything
        raise decode_failure(error, body, served.name) from None
    finally:
        served.slow_decodes.add(begin_ns, served.now_ns())


def reply_json(served: Served, output: Array, raw_shape: tuple[int, ...] = ()) -> bytes:
    """Serialize the application's reply; boxes in the pixels of a decoded array of `raw_shape`.

    Raises:
        ComputeFailed: The `reply` raised an error, which is logged.
    """
    shows = served.shows
    try:
        found = served.unpacked(output)
        if shows is not None and raw_shape:
            height, width, *_ = raw_shape
            found = shows.in_picture(found, height, width, served.application.outputs)
        return orjson.dumps(served.reply(found))
    except (Exception, SystemExit):
        log.exception("the reply of %r raised, or gave what is no JSON; that request alone fails", served.name)
        raise ComputeFailed(REPLY_FAILED) from None
