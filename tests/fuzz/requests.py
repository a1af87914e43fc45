"""Valid and invalid requests for a served application, each with its expected statuses."""

import gzip
import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.spec import TensorSpec

RAW = "application/octet-stream"
JSON = "application/json"
# A server that is busy may refuse what is right.
RIGHT = frozenset({200, 503})
# What changed at random may still be right; the server's own failure is never.
ANY = frozenset({200, 400, 404, 405, 408, 413, 415, 501, 503, 504, 505})
MAX_HEAD_BYTES = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class App:
    """The description of an application in `GET /v1/apps`.

    Args:
        name: Its name in the paths.
        input: One chunk.
        accepts: Its content types.
        max_body_bytes: The largest body.
    """

    name: str
    input: TensorSpec
    accepts: tuple[str, ...]
    max_body_bytes: int

    def chunk(self, variant: int) -> Any:
        """One of two inputs that every dtype can hold."""
        flat = np.arange(self.input.size) % 2 if variant else np.ones(self.input.size)
        return flat.astype(self.input.numpy_dtype).reshape(self.input.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Bytes for one connection and the expected reply.

    Args:
        data: What is sent.
        statuses: The right statuses of each answer, in order; None where nobody knows how many answers there are.
        variant: Which chunk was asked for, if the answers' content is to be compared.
        endless: Sent again and again until an answer comes.
        is_head: Whether the answer has no body.
    """

    data: bytes
    statuses: tuple[frozenset[int], ...] | None
    variant: int | None = None
    endless: bytes = b""
    is_head: bool = False


def request(method: str, path: str, body: bytes = b"", *lines: str, sized: bool = True) -> bytes:
    """The bytes of a request."""
    length = [f"Content-Length: {len(body)}"] if sized and (body or method == "POST") else []
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: fuzz", *lines, *length, "", ""]).encode("latin-1") + body


def chunked(body: bytes, chance: random.Random) -> bytes:
    """A body in chunks of random lengths, some with extensions."""
    parts: list[bytes] = []
    while body:
        count = chance.randint(1, max(1, len(body)))
        extension = chance.choice((b"", b"", b";a=b", b' ;a="c d"'[1:]))
        parts.append(b"%x%s\r\n%s\r\n" % (count, extension, body[:count]))
        body = body[count:]
    return b"".join(parts) + b"0\r\n" + chance.choice((b"", b"", b"Trailer: a\r\n")) + b"\r\n"


def _tensor(app: App, variant: int) -> dict[str, Any]:
    spec = app.input
    data = app.chunk(variant).ravel().tolist()
    return {"name": spec.name, "datatype": spec.protocol_datatype, "shape": [1, *spec.shape], "data": data}


def right(app: App, variant: int, chance: random.Random) -> bytes:
    """A request for a chunk, in one of the ways that `/v1/apps` takes."""
    path, array = f"/v1/apps/{app.name}", app.chunk(variant)
    as_json = json.dumps(array.tolist()).encode()
    match chance.randrange(5):
        case 0:
            return request("POST", path, array.tobytes(), f"Content-Type: {RAW}")
        case 1:
            return request("POST", path, as_json, f"content-type:{JSON};charset=utf-8")
        case 2:
            packed = gzip.compress(array.tobytes())
            return request("POST", path, packed, f"Content-Type: {RAW}", "Content-Encoding: gzip")
        case 3:
            body = chunked(array.tobytes(), chance)
            return request("POST", path, body, f"Content-Type: {RAW}", "Transfer-Encoding: chunked", sized=False)
        case _:
            padding = [f"X-{count}: {'x' * chance.randrange(100)}" for count in range(chance.randrange(40))]
            return request("POST", f"{path}?a=b", b" \n" * 50 + as_json, f"Content-Type: {JSON}", *padding)


def right_infer(app: App, variant: int, chance: random.Random) -> bytes:
    """An inference request of the Open Inference Protocol."""
    tensor, path = _tensor(app, variant), f"/v2/models/{app.name}/infer"
    if chance.random() < 0.5:
        return request("POST", path, json.dumps({"id": "fuzz", "inputs": [tensor]}).encode())
    raw = app.chunk(variant).tobytes()
    del tensor["data"]
    head = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": len(raw)}}]}).encode()
    return request("POST", path, head + raw, f"Inference-Header-Content-Length: {len(head)}")


def looking(app: App, chance: random.Random) -> Case:
    """A request for the metadata of the server."""
    model = f"/v2/models/{app.name}"
    paths = ("/v1/apps", "/v1/stats", "/metrics", "/", "/v2", "/v2/health/live", "/v2/health/ready", model)
    method = chance.choice(("GET", "HEAD"))
    path = chance.choice((*paths, f"{model}/ready", f"{model}/config", f"{model}/stats", f"{model}/versions/1"))
    accepts = chance.choice(("", "gzip", "deflate;q=0.5, gzip;q=0", "*"))
    return Case(
        data=request(method, path, b"", f"Accept-Encoding: {accepts}"),
        statuses=(frozenset({200}),),
        is_head=method == "HEAD",
    )


def wrong(app: App, chance: random.Random) -> Case:
    """Well-formed HTTP with content that must be rejected."""
    cases = [*_wrong_asks(app), *_wrong_routes(app), *_wrong_infers(app)]
    data, status = chance.choice(cases)
    return Case(data=data, statuses=(frozenset({status}),))


def _wrong_asks(app: App) -> list[tuple[bytes, int]]:
    path, raw = f"/v1/apps/{app.name}", app.chunk(0).tobytes()
    as_json, as_raw = f"Content-Type: {JSON}", f"Content-Type: {RAW}"
    too_much = bytes(app.max_body_bytes + MAX_HEAD_BYTES + 1)
    bodies = [(b"[", 400), (b"[" * 5_000 + b"]" * 5_000, 400), (b'{"a": 1}', 400), (b"[null]", 400), (b'["1"]', 400)]
    bodies += [(b"[[[[[[[[1]]]]]]]]", 400), (b"[1e999]", 400), (b"[NaN]", 400), (b"\xff\xfe", 400), (b"", 400)]
    cases = [(request("POST", path, body, as_json), status) for body, status in bodies]
    cases += [(request("POST", path, body, as_raw), 400) for body in (b"", raw[:-1], raw + b"x")]
    cases += [
        (request("POST", path, raw, "Content-Type: text/nobody-takes"), 415),
        (request("POST", path, raw, as_raw, "Content-Encoding: br"), 415),
        (request("POST", path, raw, as_raw, "Content-Encoding: gzip"), 400),
        (request("POST", path, gzip.compress(raw)[:-4], as_raw, "Content-Encoding: gzip"), 400),
        (request("POST", path, gzip.compress(raw) + b"tail", as_raw, "Content-Encoding: gzip"), 400),
        (request("POST", path, gzip.compress(too_much, 1), as_raw, "Content-Encoding: gzip"), 413),
        (request("POST", path, too_much, as_raw), 413),
    ]
    cases += [
        (request("POST", path, raw, as_raw, f"Penstock-Latency-Ms: {text}"), 400)
        for text in ("soon", "-1", "nan", "inf", "0", "1e99", "²", "9" * 5_000)
    ]
    cases.append((request("POST", path, raw, as_raw, "Penstock-Latency-Ms: 1e-6"), 504))
    if "image/png" in app.accepts:
        picture = "Content-Type: image/png"
        cases += [(request("POST", path, body, picture), 400) for body in (b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", raw)]
    return cases


def _wrong_routes(app: App) -> list[tuple[bytes, int]]:
    ask, model = f"/v1/apps/{app.name}", f"/v2/models/{app.name}"
    cases = [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/apps/nobody", 404),
        ("POST", f"{ask}%2f", 404),
        ("GET", "/v2x", 404),
    ]
    cases += [("GET", ask, 405), ("POST", "/v1/stats", 405), ("DELETE", "/", 405), ("POST", "/v1/stats%00", 404)]
    cases += [("GET", f"{model}/infer", 405), ("POST", f"{model}/versions/2/infer", 404), ("GET", f"{model}/..", 404)]
    cases += [("GET", "/page/../server.py", 404), ("GET", "/page/%2e%2e/server.py", 404), ("OPTIONS", "*", 200)]
    return [(request(method, path), status) for method, path, status in cases]


def _wrong_infers(app: App) -> list[tuple[bytes, int]]:
    path, good = f"/v2/models/{app.name}/infer", _tensor(app, 0)
    nested: Any = []
    for _ in range(900):
        nested = [nested]
    tensors: list[tuple[dict[str, Any], int]] = [
        ({"name": "nobody"}, 400),
        ({"name": nested}, 400),
        ({"shape": []}, 400),
    ]
    tensors += [({"datatype": "BYTES"}, 400), ({"datatype": None}, 400), ({"shape": [0, *app.input.shape]}, 400)]
    tensors += [({"shape": [-1, *app.input.shape]}, 400), ({"shape": [1 << 62, *app.input.shape]}, 413)]
    tensors += [({"data": "x"}, 400), ({"data": []}, 400), ({"parameters": {"binary_data_size": 1}}, 400)]
    tensors += [({"parameters": {"shared_memory_region": "a"}}, 400), ({"parameters": None}, 400)]
    heads: list[tuple[Any, int]] = [({"inputs": [good | changes]}, status) for changes, status in tensors]
    heads += [([], 400), ({}, 400), ({"inputs": [good, good]}, 400), ({"inputs": [good], "outputs": [{}]}, 400)]
    heads += [({"inputs": [good], "id": nested}, 400), ({"inputs": [good], "outputs": 1}, 400)]
    heads += [
        ({"inputs": [good], "parameters": {"timeout": value}}, 400) for value in (-1, "x", 2**64 - 1, 1.5, nested)
    ]
    heads.append(({"inputs": [good], "parameters": {"timeout": 1}}, 504))
    body = json.dumps({"inputs": [good]}).encode()
    return [(request("POST", path, json.dumps(head).encode()), status) for head, status in heads] + [
        (request("POST", path, body, f"Inference-Header-Content-Length: {text}"), 400)
        for text in ("²", "-1", "+5", "0x5", "9" * 5_000, str(len(body) + 1), "0", str(len(body) - 1))
    ]


def not_http(app: App, chance: random.Random) -> Case:
    """Bytes that are not HTTP/1.1, or exceed its limits."""
    post = f"POST /v1/apps/{app.name} HTTP/1.1\r\nHost: a\r\n".encode()
    chunks = post + b"Transfer-Encoding: chunked\r\n"
    data, status = chance.choice(
        [
            (b"garbage\r\n\r\n", 400),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(300), 400),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
            (b"GET / HTTP/1.1\r\nHost: a\r\nNo colon\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nA b: c\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nA: \x00\r\n\r\n", 400),
            (b"GET / HTTP/9.9\r\n\r\n", 505),
            (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
            (b"GET / HTTP/1.1\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
            (b"GET http://a/v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n", 200),
            (post + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
            (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            # What needs no upgrade is answered without one (RFC 9110, section 7.8).
            (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 200),
            (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
            (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 501),
            (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a/../b\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", 200),
            (post + b"Penstock-Latency-Ms: 5\r\nPenstock-Latency-Ms: 6\r\nContent-Length: 0\r\n\r\n", 400),
            (post + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
            (post + b"Content-Length: -5\r\n\r\n", 400),
            (post + b"Content-Length: 5x\r\n\r\n", 400),
            (post + b"Content-Length: 99999999999999999999999999\r\n\r\n", 400),
            (post + b"Content-Length: 99999999999\r\n\r\n", 413),
            (post + b"Content-Length: 9223372036854775808\r\n\r\n", 413),
            (chunks + b"Content-Length: 3\r\n\r\n0\r\n\r\n", 400),
            (chunks + b"\r\nzz\r\n", 400),
            (chunks + b"\r\n-1\r\n", 400),
            (chunks + b"\r\n3\r\nabcd\r\n", 400),
            (chunks + b"\r\nffffffffffffffffff\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 413),
            (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 413),
            (
                b"GET / HTTP/1.1\r\nHost: a\r\n"
                + b"".join(b"H%d: x\r\n" % n for n in range(chance.choice((65, 500, 5_000))))
                + b"\r\n",
                413,
            ),
        ]
    )
    return Case(data=data, statuses=(frozenset({status}),))


def endless(app: App, chance: random.Random) -> Case:
    """A head, a body, a trailer or chunk without end."""
    head = f"POST /v1/apps/{app.name} HTTP/1.1\r\nHost: a\r\n".encode()
    chunks = head + b"Transfer-Encoding: chunked\r\n\r\n"
    data, more, status = chance.choice(
        [
            (chunks, b"10000\r\n" + bytes(65_536) + b"\r\n", 413),
            (chunks, b"1\r\na\r\n" * 5_000, 413),
            (chunks + b"1;", b"a" * 65_536, 413),
            (chunks + b"0\r\nTrailer: ", b"a" * 65_536, 413),
            (chunks + b"0\r\n", b"T: a\r\n" * 5_000, 413),
            (head + b"X: ", b"a" * 65_536, 413),
            (head, b"X: a\r\n" * 5_000, 413),
            (b"GET /", b"a" * 65_536, 413),
            (b"", b"\r\n" * 30_000, 413),
        ]
    )
    return Case(data=data, statuses=(frozenset({status}),), endless=more)
