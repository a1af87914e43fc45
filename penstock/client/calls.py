"""The calls of a server, each as steps of `exchange`, from which both clients make their methods."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, TypeAlias, cast, final
from urllib.parse import quote

import numpy as np
import orjson

from penstock.client.binary_tensors import HEAD_LENGTH, request_body
from penstock.client.record_calls import RecordCalls, chunks_of
from penstock.client.retry import GATEWAY, Answer, Call, ClientConfig, Priority, Steps, exchange, json_of
from penstock.core.errors import (
    ApplicationError,
    BundleCorrupt,
    InvalidInput,
    InvalidResponse,
    Overloaded,
    RequestError,
    TimedOut,
    UnknownRoute,
    Unreachable,
)
from penstock.core.generate import Generate, whole_answer
from penstock.core.record import ChunkSpec, RecordSpec, chunk_spec
from penstock.core.spec import Array, TensorSpec
from penstock.core.streams.stream_entries import PATH

# n rows of one request

TEXT = "text/plain"
JSON = "application/json"
RAW = "application/octet-stream"
EVENTS = "text/event-stream"

# Bytes of a picture or another file, a text, or numbers: nested lists or an array, or several of these by name.
Content: TypeAlias = str | bytes | bytearray | memoryview | Sequence[Any] | Array | Mapping[str, Any]


class Specs(NamedTuple):
    """Input and output of an application; `is_only` if its one output is not named though a record holds it."""

    input: ChunkSpec
    output: ChunkSpec
    is_only: bool = False


@final
class Calls:
    """The calls of one client.

    Args:
        config: Configuration of the client.
        clock_s: A monotonic clock in seconds.
        random: Gives numbers from 0 to below 1, for the waits between attempts.
    """

    def __init__(self, config: ClientConfig, *, clock_s: Callable[[], float], random: Callable[[], float]) -> None:
        self._config = config
        self._clock_s = clock_s
        self._random = random
        # Input and output of each application, as the server last described them.
        self._specs: dict[str, Specs] = {}

    def ask(
        self,
        name: str,
        content: Content,
        *,
        content_type: str = "",
        latency_ms: float | None = None,
        priority: Priority | None = None,
    ) -> Steps[Any]:
        """The steps of `Client.ask`."""
        answer = yield from self._asked(name, content, content_type, self._config_of(latency_ms, priority), {})
        return json_of(answer, self._config)

    def generate(
        self,
        name: str,
        content: Content,
        *,
        content_type: str = "",
        latency_ms: float | None = None,
        priority: Priority | None = None,
    ) -> Steps[Answer]:
        """The steps of `Client.generate`, up to the head of the response."""
        config = self._config_of(latency_ms, priority)
        answer = yield from self._asked(name, content, content_type, config, {"Accept": EVENTS})
        if answer.headers.get("content-type", "").partition(";")[0] != EVENTS:
            raise InvalidInput(f"{name!r} answers in one step; use ask or predict.")
        return answer

    def _asked(
        self, name: str, content: Content, content_type: str, config: ClientConfig, more: dict[str, str]
    ) -> Steps[Answer]:
        if not (content_type.isascii() and content_type.isprintable()):
            raise InvalidInput(
                f"content_type is {content_type!r}; it must be printable ASCII, as it goes into a header."
            )
        if isinstance(content, bytes | bytearray | memoryview):
            body = bytes(content)
        elif isinstance(content, str):
            # As JSON it would have quotation marks around it.
            body, content_type = content.encode(), content_type or TEXT
        else:
            body, content_type = _numbers(content), content_type or JSON
        headers = _option_headers(config) | more | ({"Content-Type": content_type} if content_type else {})
        return self._exchange(Call(method="POST", path=_app(name), headers=headers, body=body), config)

    def predict(
        self, name: str, array: Any, *, latency_ms: float | None = None, priority: Priority | None = None
    ) -> Steps[Any]:
        """The steps of `Client.predict`."""
        config = self._config_of(latency_ms, priority)
        deadline_s = self._clock_s() + config.timeout_s
        known = self._specs.get(name)
        if known is not None:
            try:
                return (yield from self._predict(name, known, array, config, deadline_s))
            except (InvalidInput, UnknownRoute, InvalidResponse):
                # Another bundle may be served by now: read the server's description again.
                self._specs.pop(name, None)
        specs = self._specs[name] = yield from self._described(name, config, deadline_s)
        return (yield from self._predict(name, specs, array, config, deadline_s))

    def _predict(self, name: str, specs: Specs, array: Any, config: ClientConfig, deadline_s: float) -> Steps[Any]:
        input_spec, output_spec, is_only = specs
        if isinstance(input_spec, RecordSpec) or isinstance(output_spec, RecordSpec):
            calls = RecordCalls(name=name, input=input_spec, output=output_spec)
            found = yield from self._predict_records(calls, array, config, deadline_s)
            return _unnamed(found, output_spec.tensors[0].name) if is_only else found
        chunks, single = chunks_of(name, input_spec, array)
        call = _raw_call(name, chunks[0]) if single else _binary_call(name, *request_body({input_spec.name: chunks}))
        answer = yield from self._exchange(
            replace(call, headers=call.headers | _option_headers(config)), config, deadline_s
        )
        if single:
            return _outputs(answer.body, output_spec.shape, output_spec, config)
        return _outputs(
            _raw_tensor(answer, output_spec, config), (len(chunks), *output_spec.shape), output_spec, config
        )

    def _predict_records(
        self, calls: RecordCalls, given: Any, config: ClientConfig, deadline_s: float
    ) -> Steps[dict[str, Array] | Array | list[Any]]:
        requests, single = calls.requests(given)
        outputs: dict[int, Any] = {}
        for request in requests:
            call = _binary_call(calls.name, *request_body(request.arrays))
            answer = yield from self._exchange(
                replace(call, headers=call.headers | _option_headers(config)), config, deadline_s
            )
            head = _head_of(answer, config)
            try:
                found = calls.outputs(head, answer.body[len(head) :], request)
            except ValueError as error:
                raise _invalid_response(config, str(error)) from None
            outputs.update(zip(request.rows, found, strict=True))
        if single:
            return outputs[0]
        rows = [outputs[row] for row in range(len(outputs))]
        return rows if isinstance(calls.output, RecordSpec) else np.stack(rows)

    def stream(self, name: str) -> Steps[Answer]:
        """`GET /v1/apps/{name}/stream`, upgraded to a WebSocket."""
        return self._exchange(Call(method="GET", path=f"{_app(name)}/stream"), self._config)

    def shared(self) -> Steps[Answer]:
        """`GET /v1/streams`, upgraded to a WebSocket; also a stream that is opened on it."""
        return self._exchange(Call(method="GET", path=PATH), self._config)

    def apps(self) -> Steps[list[dict[str, Any]]]:
        """List the applications: name, description, input, output and accepted content types of each."""
        return (yield from self._listed(self._config))

    def stats(self) -> Steps[dict[str, Any]]:
        """Get the server's counts and histograms since its start."""
        answer = yield from self._exchange(Call(method="GET", path="/v1/stats"), self._config)
        return json_of(answer, self._config)

    def ready(self) -> Steps[bool]:
        """Check once whether the server accepts requests; False if it cannot be reached."""
        try:
            yield from self._exchange(Call(method="GET", path="/v2/health/ready"), replace(self._config, retries=0))
        except (Overloaded, Unreachable, TimedOut):
            return False
        except RequestError as error:
            # A proxy that found no server.
            if error.status not in GATEWAY:
                raise
            return False
        return True

    def load(self, name: str) -> Steps[None]:
        """Load a model of the server's repository, and return when it is ready."""
        return self._change(name, "load")

    def unload(self, name: str) -> Steps[None]:
        """Unload a model."""
        return self._change(name, "unload")

    def _change(self, name: str, verb: str) -> Steps[None]:
        # Either may be sent twice.
        path = f"/v2/repository/models/{quote(name, safe='')}/{verb}"
        call = Call(method="POST", path=path, headers={"Content-Type": JSON}, body=b"{}")
        yield from self._exchange(call, self._config)

    def _config_of(self, latency_ms: float | None, priority: Priority | None) -> ClientConfig:
        if latency_ms is None and priority is None:
            return self._config
        own = self._config
        latency_ms = own.latency_ms if latency_ms is None else latency_ms
        return replace(own, latency_ms=latency_ms, priority=priority or own.priority)

    def _exchange(self, call: Call, config: ClientConfig, deadline_s: float | None = None) -> Steps[Answer]:
        # Compression costs the server's event loop more than it saves of a data centre's network.
        headers = {"Accept-Encoding": "identity"} | call.headers
        if config.api_key is not None:
            headers["Authorization"] = f"Bearer {config.api_key}"
        if deadline_s is None:
            deadline_s = self._clock_s() + config.timeout_s
        return exchange(
            replace(call, headers=headers), config, deadline_s=deadline_s, clock_s=self._clock_s, random=self._random
        )

    def _described(self, name: str, config: ClientConfig, deadline_s: float) -> Steps[Specs]:
        apps = yield from self._listed(config, deadline_s)
        try:
            if all(app["name"] != name for app in apps) and (yield from self._loads(name, config, deadline_s)):
                apps = yield from self._listed(config, deadline_s)
            found = {app["name"]: (app["inputs"], app["outputs"], app.get("generate")) for app in apps}
            if name not in found:
                raise UnknownRoute(f"There is no model {name!r} at {config.url}; there is {', '.join(found)}.")
            *specs, generate = found[name]
            input_spec, output_spec = (chunk_spec(map(TensorSpec.from_json, each)) for each in specs)
            if generate is not None:
                whole = whole_answer(output_spec.tensors, Generate.from_json(generate).max_steps)
                return Specs(input_spec, whole, isinstance(output_spec, TensorSpec))
        except (ApplicationError, KeyError, TypeError, BundleCorrupt) as error:
            raise _invalid_response(config, f"its description of an application cannot be read ({error})") from None
        return Specs(input_spec, output_spec)

    def _loads(self, name: str, config: ClientConfig, deadline_s: float) -> Steps[bool]:
        """Wait for a model that is loaded on first use; returns whether there is one."""
        try:
            yield from self._exchange(Call(method="GET", path=f"/v2/models/{quote(name, safe='')}"), config, deadline_s)
        except UnknownRoute:
            return False
        return True

    def _listed(self, config: ClientConfig, deadline_s: float | None = None) -> Steps[list[dict[str, Any]]]:
        found = json_of((yield from self._exchange(Call(method="GET", path="/v1/apps"), config, deadline_s)), config)
        if not isinstance(found, dict) or not isinstance(found.get("apps"), list):
            raise _invalid_response(config, "/v1/apps has no list 'apps'")
        return found["apps"]


def _unnamed(found: Any, name: str) -> Any:
    return [each[name] for each in found] if isinstance(found, list) else found[name]


def _app(name: str) -> str:
    return f"/v1/apps/{quote(name, safe='')}"


def _option_headers(config: ClientConfig) -> dict[str, str]:
    options = {} if config.latency_ms is None else {"Penstock-Latency-Ms": f"{config.latency_ms:g}"}
    return options if config.priority is None else options | {"Penstock-Priority": config.priority}


def _numbers(content: Sequence[Any] | Array | Mapping[str, Any]) -> bytes:
    try:
        numbers = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY, default=np.ndarray.tolist)
    except orjson.JSONEncodeError as error:
        raise InvalidInput(
            f"The content is a {type(content).__name__} that JSON cannot carry ({error}); send a file's bytes, nested "
            "lists of numbers or an array."
        ) from None
    # orjson writes null for them.
    if b"null" in numbers and _holds_nan(content):
        raise InvalidInput("The content holds NaN or infinity, which JSON cannot carry; send finite numbers.")
    return numbers


def _holds_nan(content: Any) -> bool:
    if isinstance(content, Mapping):
        return any(map(_holds_nan, cast(Mapping[str, Any], content).values()))
    if isinstance(content, list | tuple):
        return any(map(_holds_nan, cast(Sequence[Any], content)))
    if isinstance(content, np.ndarray):
        return content.dtype.kind == "f" and not np.isfinite(content).all()
    return isinstance(content, float | np.floating) and not np.isfinite(content)


def _raw_call(name: str, chunk: Array) -> Call:
    return Call(method="POST", path=_app(name), headers={"Content-Type": RAW, "Accept": RAW}, body=chunk.tobytes())


def _binary_call(name: str, body: bytes, head_length: int) -> Call:
    return Call(
        method="POST",
        path=f"/v2/models/{quote(name, safe='')}/infer",
        headers={"Content-Type": RAW, HEAD_LENGTH: str(head_length)},
        body=body,
    )


def _head_of(answer: Answer, config: ClientConfig) -> bytes:
    """The JSON head of a binary response."""
    text = answer.headers.get(HEAD_LENGTH.lower(), "")
    if not text.isdigit():
        raise _invalid_response(config, f"an inference came with {HEAD_LENGTH} {text!r}")
    return answer.body[: int(text)]


def _raw_tensor(answer: Answer, output: TensorSpec, config: ClientConfig) -> bytes:
    """The bytes of the one output of a binary response."""
    head = _head_of(answer, config)
    try:
        (tensor,) = orjson.loads(head)["outputs"]
        datatype = tensor["datatype"]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        raise _invalid_response(config, f"the head of an inference is {head[:80]!r}") from None
    if datatype != output.protocol_datatype:
        raise _invalid_response(config, f"the output is {datatype}, not {output.protocol_datatype} as described")
    return answer.body[len(head) :]


def _outputs(raw: bytes, shape: tuple[int, ...], output: TensorSpec, config: ClientConfig) -> Array:
    expected = prod(shape) * output.numpy_dtype.itemsize
    if len(raw) != expected:
        raise _invalid_response(config, f"the output has {len(raw):,} bytes; {output.describe()} has {expected:,}")
    # Copied, because an array over bytes is read-only.
    return np.frombuffer(raw, output.numpy_dtype).reshape(shape).copy()


def _invalid_response(config: ClientConfig, what: str) -> InvalidResponse:
    return InvalidResponse(f"{config.url} is no Penstock server, or serves another bundle than a moment ago: {what}.")
