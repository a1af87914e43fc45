"""What a client can ask of a server, each call as steps of `exchange`: the same for both clients."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias, final
from urllib.parse import quote

import numpy as np
import orjson

from penstock.core.errors import (
    BundleCorrupt,
    InvalidInput,
    NotUnderstood,
    Overloaded,
    UnknownRoute,
    Unreachable,
)
from penstock.core.spec import Array, TensorSpec
from penstock.serve.exchange import Answer, Call, Priority, Steps, Terms, exchange, json_of

# n rows of one request

JSON = "application/json"
RAW = "application/octet-stream"
HEAD_LENGTH = "Inference-Header-Content-Length"

# A picture or another file as its bytes, or numbers: nested lists or an array.
Content: TypeAlias = bytes | bytearray | memoryview | Sequence[Any] | Array
Specs: TypeAlias = tuple[TensorSpec, TensorSpec]


@final
class Calls:
    """The calls of one client.

    Args:
        terms: What holds for them.
        clock_s: A monotonic clock in seconds.
        random: Gives numbers from 0 to below 1, for the waits between attempts.
    """

    def __init__(self, terms: Terms, *, clock_s: Callable[[], float], random: Callable[[], float]) -> None:
        self._terms = terms
        self._clock_s = clock_s
        self._random = random
        # What each application takes and gives, as the server last said.
        self._specs: dict[str, Specs] = {}

    def ask(
        self, name: str, content: Content, content_type: str, latency_ms: float | None, priority: Priority | None
    ) -> Steps[Any]:
        """`POST /v1/apps/{name}`: the application's reply."""
        terms = self._terms_of(latency_ms, priority)
        if isinstance(content, bytes | bytearray | memoryview):
            body = bytes(content)
        else:
            body, content_type = _numbers(content), content_type or JSON
        headers = _wishes(terms) | ({"Content-Type": content_type} if content_type else {})
        answer = yield from self._exchange(Call(method="POST", path=_app(name), headers=headers, body=body), terms)
        return json_of(answer, terms)

    def predict(self, name: str, array: Any, latency_ms: float | None, priority: Priority | None) -> Steps[Array]:
        """One chunk as raw bytes, or several as the Open Inference Protocol's binary tensors."""
        terms = self._terms_of(latency_ms, priority)
        deadline_s = self._clock_s() + terms.timeout_s
        known = self._specs.get(name)
        if known is not None:
            try:
                return (yield from self._predict(name, known, array, terms, deadline_s))
            except (InvalidInput, UnknownRoute, NotUnderstood):
                # Perhaps another bundle is served by now: the server says once more what it takes.
                self._specs.pop(name, None)
        specs = self._specs[name] = yield from self._described(name, terms, deadline_s)
        return (yield from self._predict(name, specs, array, terms, deadline_s))

    def _predict(self, name: str, specs: Specs, array: Any, terms: Terms, deadline_s: float) -> Steps[Array]:
        taken, given = specs
        chunks = taken.cast(np.asarray(array))
        batched = chunks.shape != taken.shape
        if batched and (chunks.shape[1:] != taken.shape or len(chunks) < 1):
            raise InvalidInput(
                f"The array is {chunks.dtype}{list(chunks.shape)}; {name!r} takes {taken.describe()}, or several of "
                f"them as {['n', *taken.shape]} with n from 1."
            )
        call = _infer_call(name, taken, chunks) if batched else _raw_call(name, chunks)
        answer = yield from self._exchange(replace(call, headers=call.headers | _wishes(terms)), terms, deadline_s)
        if batched:
            return _outputs(_raw_tensor(answer, given, terms), (len(chunks), *given.shape), given, terms)
        return _outputs(answer.body, given.shape, given, terms)

    def stream(self, name: str) -> Steps[Answer]:
        """`GET /v1/apps/{name}/stream`, which is answered well by a WebSocket."""
        return self._exchange(Call(method="GET", path=f"{_app(name)}/stream"), self._terms)

    def apps(self) -> Steps[list[dict[str, Any]]]:
        """`GET /v1/apps`."""
        answer = yield from self._exchange(Call(method="GET", path="/v1/apps"), self._terms)
        return self._listed(answer)

    def stats(self) -> Steps[dict[str, Any]]:
        """`GET /v1/stats`."""
        answer = yield from self._exchange(Call(method="GET", path="/v1/stats"), self._terms)
        return json_of(answer, self._terms)

    def ready(self) -> Steps[bool]:
        """`GET /v2/health/ready`, once."""
        try:
            yield from self._exchange(Call(method="GET", path="/v2/health/ready"), replace(self._terms, retries=0))
        except (Overloaded, Unreachable):
            return False
        return True

    def repository(self, name: str, verb: str) -> Steps[None]:
        """`POST /v2/repository/models/{name}/load` or `unload`; both may be said twice."""
        path = f"/v2/repository/models/{quote(name, safe='')}/{verb}"
        call = Call(method="POST", path=path, headers={"Content-Type": JSON}, body=b"{}")
        yield from self._exchange(call, self._terms)

    def _terms_of(self, latency_ms: float | None, priority: Priority | None) -> Terms:
        if latency_ms is None and priority is None:
            return self._terms
        own = self._terms
        latency_ms = own.latency_ms if latency_ms is None else latency_ms
        return replace(own, latency_ms=latency_ms, priority=priority or own.priority)

    def _exchange(self, call: Call, terms: Terms, deadline_s: float | None = None) -> Steps[Answer]:
        # Packed answers would cost the server's event loop more than they save a data centre's network.
        headers = {"Accept-Encoding": "identity"} | call.headers
        if terms.api_key is not None:
            headers["Authorization"] = f"Bearer {terms.api_key}"
        if deadline_s is None:
            deadline_s = self._clock_s() + terms.timeout_s
        return exchange(
            replace(call, headers=headers), terms, deadline_s=deadline_s, clock_s=self._clock_s, random=self._random
        )

    def _described(self, name: str, terms: Terms, deadline_s: float) -> Steps[Specs]:
        answer = yield from self._exchange(Call(method="GET", path="/v1/apps"), terms, deadline_s)
        try:
            found = {app["name"]: (app["input"], app["output"]) for app in self._listed(answer)}
            if name not in found:
                raise UnknownRoute(f"There is no model {name!r} at {terms.url}; there is {', '.join(found)}.")
            taken, given = (TensorSpec.from_json(spec) for spec in found[name])
        except (KeyError, TypeError, BundleCorrupt) as error:
            raise _strange(terms, f"what it says of an application cannot be read ({error})") from None
        return taken, given

    def _listed(self, answer: Answer) -> list[dict[str, Any]]:
        found = json_of(answer, self._terms)
        if not isinstance(found, dict) or not isinstance(found.get("apps"), list):
            raise _strange(self._terms, "/v1/apps has no list 'apps'")
        return found["apps"]


def _app(name: str) -> str:
    return f"/v1/apps/{quote(name, safe='')}"


def _wishes(terms: Terms) -> dict[str, str]:
    wishes = {} if terms.latency_ms is None else {"Penstock-Latency-Ms": f"{terms.latency_ms:g}"}
    return wishes if terms.priority is None else wishes | {"Penstock-Priority": terms.priority}


def _numbers(content: Sequence[Any] | Array) -> bytes:
    try:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY, default=np.ndarray.tolist)
    except orjson.JSONEncodeError as error:
        raise InvalidInput(
            f"The content is a {type(content).__name__} that JSON cannot carry ({error}); send a file's bytes, nested "
            "lists of numbers or an array."
        ) from None


def _raw_call(name: str, chunk: Array) -> Call:
    return Call(method="POST", path=_app(name), headers={"Content-Type": RAW, "Accept": RAW}, body=chunk.tobytes())


def _infer_call(name: str, taken: TensorSpec, chunks: Array) -> Call:
    """Several chunks `[n, ...]` in the Open Inference Protocol, version 2, with binary tensors both ways."""
    raw = chunks.tobytes()
    tensor = {
        "name": taken.name,
        "datatype": taken.protocol_datatype,
        "shape": list(chunks.shape),
        "parameters": {"binary_data_size": len(raw)},
    }
    head = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    return Call(
        method="POST",
        path=f"/v2/models/{quote(name, safe='')}/infer",
        headers={"Content-Type": RAW, HEAD_LENGTH: str(len(head))},
        body=head + raw,
    )


def _raw_tensor(answer: Answer, output: TensorSpec, terms: Terms) -> bytes:
    """The bytes of the one output of a binary answer."""
    text = answer.headers.get(HEAD_LENGTH.lower(), "")
    if not text.isdigit():
        raise _strange(terms, f"an inference came with {HEAD_LENGTH} {text!r}")
    head = answer.body[: int(text)]
    try:
        (tensor,) = orjson.loads(head)["outputs"]
        datatype = tensor["datatype"]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        raise _strange(terms, f"the head of an inference is {head[:80]!r}") from None
    if datatype != output.protocol_datatype:
        raise _strange(terms, f"the output is {datatype}, where it said {output.protocol_datatype}")
    return answer.body[int(text) :]


def _outputs(raw: bytes, shape: tuple[int, ...], output: TensorSpec, terms: Terms) -> Array:
    expected = prod(shape) * output.numpy_dtype.itemsize
    if len(raw) != expected:
        raise _strange(terms, f"the output has {len(raw):,} bytes, where {output.describe()} makes {expected:,}")
    # A copy, because what NumPy finds in bytes cannot be written to.
    return np.frombuffer(raw, output.numpy_dtype).reshape(shape).copy()


def _strange(terms: Terms, what: str) -> NotUnderstood:
    return NotUnderstood(f"{terms.url} is no Penstock server, or serves another bundle than a moment ago: {what}.")
