"""The description of the plain routes in OpenAPI 3.1, made of the specs of the served applications."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from penstock.core.application import Application
from penstock.core.dim import Dim
from penstock.core.generate import END, MAX_STEPS
from penstock.core.machine.version import __version__
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import TensorSpec
from penstock.core.streams.live import WAV, is_sound
from penstock.serve.exchange.budget import BUDGET_HEADER, MAX_BUDGET_MS, PRIORITIES, PRIORITY_HEADER
from penstock.serve.exchange.form import JSON, MULTIPART, RAW, TEXT
from penstock.serve.exchange.timing import SERVER_TIMING, TIMING_HEADER
from penstock.serve.http.generated_answer import EVENTS
from penstock.serve.http.picture_beside import picture_of
from penstock.serve.http.plain_body import FIELDS, INSTANCES
from penstock.serve.registry.generated import ENDED, answers_in_steps
from penstock.serve.registry.served_chain import Served, ServedChain

Schema = dict[str, Any]

OPENAPI = "3.1.0"
PATH = "/openapi.json"
# Any JSON, or any bytes of a media type.
_ANY: Schema = {}
_ERRORS = {
    "400": "The content is invalid.",
    "404": "There is no such application.",
    "413": "The body is too large, or has too many rows.",
    "415": "The content type or encoding is not supported.",
    "500": "The application's code failed on this request.",
    "503": "Rejected, because the answer would be too late; Retry-After has the retry time in seconds.",
    "504": "The budget is shorter than the network's own time.",
}
_PARAMETERS: list[Schema] = [
    {
        "name": BUDGET_HEADER.title(),
        "in": "header",
        "description": "Latency budget of this request in milliseconds.",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_BUDGET_MS},
    },
    {
        "name": PRIORITY_HEADER.title(),
        "in": "header",
        "description": "Low priority, `background`, runs only where it delays no request of normal priority.",
        "schema": {"type": "string", "enum": list(PRIORITIES)},
    },
    {
        "name": TIMING_HEADER.title(),
        "in": "header",
        "description": f"1 for the times of the request in the header {SERVER_TIMING} of the response.",
        "schema": {"type": "integer", "enum": [0, 1]},
    },
]


def document(models: Iterable[Served], *, takes_keys: bool) -> dict[str, Any]:
    """Make the description of the plain routes of a server.

    Args:
        models: The served models.
        takes_keys: Whether requests need an API key.
    """
    paths = {
        "/v1/apps": _get("apps", "The applications, with their specs.", {"apps": _list_of({"type": "object"})}),
        "/v1/models": _get("models", "Names of the models.", {"models": _list_of({"type": "string"})}),
        "/v1/stats": _get("stats", "Counts and histograms since the start.", {}),
    }
    for served in models:
        paths |= _paths_of(served)
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    components: Schema = {"schemas": {"Error": error}}
    found: dict[str, Any] = {
        "openapi": OPENAPI,
        "info": {"title": "Penstock", "version": __version__},
        "paths": paths,
        "components": components,
    }
    if takes_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _paths_of(served: Served) -> dict[str, Any]:
    application, name = served.application, served.name
    row, reply = _chunk(application.input), _reply(served)
    replies = {
        "200": {
            "description": "The reply.",
            "content": _reply_content(served, _rows(reply, served.max_rows), reply),
        }
    }
    paths = {
        f"/v1/apps/{name}": {
            "post": {
                "operationId": f"ask_{name}",
                "summary": application.description or f"Ask {name}.",
                "parameters": _PARAMETERS,
                "requestBody": {"required": True, "content": _request_content(served, row)},
                "responses": replies | _errors(),
            }
        },
        f"/v1/apps/{name}/examples": _get(
            f"examples_{name}",
            f"Golden examples of {name} as requests to try.",
            {"examples": _list_of({"type": "object"})},
        ),
        f"/v1/models/{name}": _get(
            f"ready_{name}",
            f"Readiness of {name}.",
            {"name": {"type": "string"}, "ready": {"type": "boolean"}},
        ),
    }
    if isinstance(served, ServedChain) and served.segments is not None:
        # It takes streams alone, which OpenAPI does not describe.
        del paths[f"/v1/apps/{name}"]
    elif application.live is None:
        instances = _rows(_instance(application, row), served.max_rows)
        several = _rows(reply, served.max_rows)
        predictions = _json(_rows_object(FIELDS[INSTANCES], several, with_ends=answers_in_steps(served)))
        paths[f"/v1/models/{name}:predict"] = {
            "post": {
                "operationId": f"predict_{name}",
                "summary": f"Replies of {name} to several instances.",
                "parameters": _PARAMETERS,
                "requestBody": {
                    "required": True,
                    "content": _json(_rows_object(INSTANCES, instances)),
                },
                "responses": {"200": {"description": "The replies.", "content": predictions}} | _errors(),
            }
        }
    return paths


def _request_content(served: Served, row: Schema) -> dict[str, Any]:
    application = served.application
    if application.live is not None:
        # A whole recording.
        return dict.fromkeys((WAV[0], RAW) if is_sound(application.input_tensor) else (RAW,), _ANY)
    content = {kind: {"schema": {"type": "string"}} if kind == TEXT else _ANY for kind in application.accepts}
    if JSON not in content:
        own = application.inputs if isinstance(application.input, RecordSpec) else {}
        named = _rows(_instance(application, row), served.max_rows)
        forms = [_rows_object(field, named) for field in FIELDS if field not in own]
        by_name = _by_name(application)
        several = [_rows(form, served.max_rows) for form in (row, *by_name)]
        content[JSON] = {"schema": {"anyOf": [_row(application), *by_name, *several, *forms]}}
    if MULTIPART not in content:
        picture = picture_of(application)
        content[MULTIPART] = {"schema": _tensors(application.inputs) if picture is None else _row(application)}
    if not isinstance(application.input, RecordSpec):
        content[RAW] = _ANY
    return content


def _reply_content(served: Served, replies: Schema, reply: Schema) -> dict[str, Any]:
    application = served.application
    if application.live is not None:
        return _json({"type": "object", "properties": {"events": _list_of(_ANY)}, "required": ["events"]})
    named = [_rows_object(field, replies) for field in FIELDS.values()]
    content = _json({"anyOf": [reply, replies, *named]} if reply else _ANY)
    if not isinstance(application.answer, RecordSpec):
        content[RAW] = _ANY
    if answers_in_steps(served):
        content[EVENTS] = {"schema": {"type": "string"}}
    return content


def _reply(served: Served) -> Schema:
    application = served.application
    # The application's own code makes any JSON, and of boxes the likely ones are left.
    if application.reply is not None or served.shows is not None or answers_in_steps(served):
        return _ANY
    return _chunk(application.output)


def _row(application: Application) -> Schema:
    """The schema of one row of inputs in JSON; a picture beside others may be a text, in base64."""
    row, picture = _chunk(application.input), picture_of(application)
    if picture is None:
        return row
    properties = row["properties"]
    either = {"anyOf": [properties[picture.tensor], {"type": "string", "contentEncoding": "base64"}]}
    return row | {"properties": properties | {picture.tensor: either}}


def _by_name(application: Application) -> list[Schema]:
    """The schema of one input in an object; none where the input is several tensors, or its name means several rows."""
    spec = application.input
    return [] if isinstance(spec, RecordSpec) or spec.name in FIELDS else [_tensors({spec.name: spec})]


def _instance(application: Application, row: Schema) -> Schema:
    takes_text = application.decode is not None and TEXT in application.accepts and application.prepare is None
    forms = [row, *_by_name(application), *([{"type": "string"}] if takes_text else [])]
    return {"anyOf": forms} if len(forms) > 1 else row


def _chunk(spec: ChunkSpec) -> Schema:
    return _tensors(spec.by_name) if isinstance(spec, RecordSpec) else _tensor(spec)


def _tensors(specs: Mapping[str, TensorSpec]) -> Schema:
    return {
        "type": "object",
        "properties": {name: _tensor(spec) for name, spec in specs.items()},
        "required": [name for name, spec in specs.items() if spec.default is None],
        "additionalProperties": False,
    }


def _tensor(spec: TensorSpec) -> Schema:
    schema = _number(spec)
    for size in reversed(spec.shape):
        least = size.min if isinstance(size, Dim) else size
        schema = {**_list_of(schema), "minItems": least, "maxItems": int(size)}
    about = ", ".join(filter(None, (spec.meaning, spec.units)))
    return schema | ({"description": about} if about else {})


def _number(spec: TensorSpec) -> Schema:
    if spec.dtype == "bool":
        return {"type": ["boolean", "integer"], "minimum": 0, "maximum": 1}
    low, high = spec.limits or _limits(spec)
    kind = "number" if spec.takes_nan else "integer"
    return {"type": kind, "minimum": low, "maximum": high}


def _limits(spec: TensorSpec) -> tuple[float, float]:
    if spec.takes_nan:
        largest = _largest(np.finfo(spec.numpy_dtype))
        return -largest, largest
    whole = np.iinfo(spec.numpy_dtype)
    return int(whole.min), int(whole.max)


def _largest(info: np.finfo) -> float:
    """The largest number of JSON that is not rounded to infinity."""
    largest = float(info.max)
    if info.bits == 64:
        return largest
    return math.nextafter(largest + 2.0 ** (info.maxexp - info.nmant - 2), 0)


def _rows(row: Schema, max_rows: int) -> Schema:
    return {**_list_of(row), "minItems": 1, "maxItems": max_rows}


def _rows_object(field: str, rows: Schema, *, with_ends: bool = False) -> Schema:
    """The schema of several rows, and of why the answer of each ended."""
    properties = {field: rows} | ({ENDED: _list_of({"enum": [END, MAX_STEPS]})} if with_ends else {})
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _json(schema: Schema) -> dict[str, Any]:
    return {JSON: {"schema": schema}}


def _get(operation: str, summary: str, properties: Mapping[str, Schema]) -> dict[str, Any]:
    content = _json({"type": "object", "properties": dict(properties), "required": list(properties)})
    found = {"200": {"description": summary, "content": content}}
    return {"get": {"operationId": operation, "summary": summary, "responses": found}}


def _errors() -> dict[str, Any]:
    content = _json({"$ref": "#/components/schemas/Error"})
    return {status: {"description": why, "content": content} for status, why in _ERRORS.items()}
