"""Rejections in the form of the service whose client asks."""

import re
import uuid
from collections.abc import Callable
from dataclasses import replace

import orjson

from penstock.core.errors import (
    DeadlineImpossible,
    Forbidden,
    InvalidInput,
    Overloaded,
    QuotaExceeded,
    RequestError,
    Unauthorized,
    UnknownRoute,
)
from penstock.serve.exchange.response import Answer, Response, rejected

TRANSCRIPTIONS, REALTIME, LISTEN = "/v1/audio/transcriptions", "/v1/realtime", "/v1/listen"

# The body of a rejection, and its headers.
Shape = Callable[[RequestError], tuple[bytes, tuple[tuple[str, str], ...]]]
# Clients of WebSockets see headers of a refused handshake, and mostly no body.
REQUEST_ID, ERROR = "dg-request-id", "dg-error"
_NOT_IN_HEADERS = re.compile(r"[^ -~]")


class UnknownModel(UnknownRoute):
    """No served application of this name has words."""


class BadParameter(InvalidInput):
    """A parameter of a request of OpenAI's clients that is missing or wrong; `param` is its name or path."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def openai_error(error: RequestError) -> bytes:
    """As OpenAI's API reference has it: `{"error": {"message", "type", "param", "code"}}`."""
    code = None
    param = error.param if isinstance(error, BadParameter) else None
    if isinstance(error, UnknownModel):
        code, param = "model_not_found", "model"
    elif isinstance(error, Unauthorized):
        code = "invalid_api_key"
    elif isinstance(error, QuotaExceeded):
        code = "rate_limit_exceeded"
    elif isinstance(error, Overloaded):
        code = "server_overloaded"
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    fields = {"message": str(error), "type": kind, "param": param, "code": code}
    return orjson.dumps({"error": fields})


def _openai(error: RequestError) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    return openai_error(error), ()


def deepgram_error(error: RequestError) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """As Deepgram's reference has it: `{"err_code", "err_msg", "request_id"}`, and in headers."""
    codes: tuple[tuple[type[RequestError], str], ...] = (
        (Unauthorized, "INVALID_AUTH"),
        (Forbidden, "INSUFFICIENT_PERMISSIONS"),
        (QuotaExceeded, "TOO_MANY_REQUESTS"),
        (Overloaded, "SERVICE_UNAVAILABLE"),
        (DeadlineImpossible, "SERVICE_UNAVAILABLE"),
        (UnknownRoute, "NOT_FOUND"),
    )
    otherwise = "Bad Request" if error.status < 500 else "INTERNAL_SERVER_ERROR"
    code = next((code for kind, code in codes if isinstance(error, kind)), otherwise)
    request_id = str(uuid.uuid4())
    body = orjson.dumps({"err_code": code, "err_msg": str(error), "request_id": request_id})
    return body, ((ERROR, _NOT_IN_HEADERS.sub("?", str(error))), (REQUEST_ID, request_id))


# Paths that clients of these services ask for, served or not: they show the sentence of their own form alone.
_SHAPES: dict[str, Shape] = {LISTEN: deepgram_error, "/v2/listen": deepgram_error}
_OPENAI_ONLY = ("/v1/audio", "/v1/chat", "/v1/completions", "/v1/embeddings", "/v1/realtime", "/v1/responses")
# It is KServe's too, whose clients read the status; an inference request of its protocol has the server's own form.
_MODELS, _VERB = "/v1/models", ":"


def shape_of(path: str) -> Shape | None:
    """The form of rejections at a path; None for the server's own."""
    found = _SHAPES.get(path)
    if found is not None or not path.startswith("/v1/"):
        return found
    first = "/".join(path.split("/", 3)[:3])
    return _openai if first in _OPENAI_ONLY or (first == _MODELS and _VERB not in path) else None


def shaped(shape: Shape, response: Response) -> Response:
    """A response with its rejection in a form, if it is one."""
    if response.error is None:
        return response
    body, headers = shape(response.error)
    return replace(response, body=body, headers=response.headers + headers)


def shaping(shape: Shape, answer: Answer) -> Answer:
    """Return a function that answers with rejections in a form."""
    return lambda response: answer(shaped(shape, response))


def rejected_as(shape: Shape | None, error: RequestError) -> Response:
    """Make the response to a request that is rejected, in a form; None for the server's own."""
    return rejected(error) if shape is None else shaped(shape, rejected(error))
