"""A body may be as long as the application that it is for takes, whatever the other applications of the server take."""

import zlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.core.errors import Overloaded, RequestError, TooLarge, Unauthorized, UnknownRoute, WrongMethod
from penstock.core.spec import TensorSpec
from penstock.serve.exchange.access import Access, Keys
from penstock.serve.exchange.request import MAX_HEAD_BYTES, Head, Request
from penstock.serve.exchange.response import Response, internal_error
from penstock.serve.http.encoding import CHECKED_BYTES, decompress
from penstock.serve.http.parser import RequestParser
from penstock.serve.http.routes import Routes
from penstock.serve.registry.model_registry import ModelRegistry
from tests.support.routes import routes_of

SMALL, LARGE = 1_000, 100_000
SPEC = TensorSpec(dtype="uint8", shape=(4,), meaning="four numbers")


def registry(refusals: list[RequestError]) -> ModelRegistry:
    """A live and two other models, one of which takes large bodies."""
    models = ModelRegistry(cast(Any, None), loading=False)
    for name, limit, streams in (("small", SMALL, None), ("large", LARGE, None), ("hark", SMALL, object())):
        application = SimpleNamespace(
            max_body_bytes=limit, input=SPEC, output=SPEC, accepts=(), decode=None, generate=None
        )
        served = SimpleNamespace(
            name=name,
            version="1",
            application=application,
            streams=streams,
            count_rejection=refusals.append,
            version_headers=(),
        )
        models.put(cast(Any, served))
    return models


@pytest.fixture
def refusals() -> list[RequestError]:
    return []


@pytest.fixture
def routes(refusals: list[RequestError]) -> Routes:
    return routes_of(registry(refusals), Access())


def head(path: str, *headers: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: a", *headers, "", "")).encode()


def refusal(routes: Routes, pieces: Iterable[bytes]) -> RequestError | None:
    parser = RequestParser(routes.max_body_bytes)
    found = None
    for piece in pieces:
        _, found = parser.feed(piece)
    return found


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/apps/small", SMALL),
        ("/v1/apps/sm%61ll?a=b", SMALL),
        ("/v1/apps/hark", SMALL),
        ("/v1/apps/large", LARGE),
        ("/v2/models/small/infer", SMALL + MAX_HEAD_BYTES),
        ("/v2/models/small/versions/1/infer", SMALL + MAX_HEAD_BYTES),
        ("/v2/models/large/infer", LARGE + MAX_HEAD_BYTES),
    ],
)
def test_a_body_is_rejected_by_its_head_alone(routes: Routes, path: str, limit: int) -> None:
    assert refusal(routes, [head(path, f"Content-Length: {limit}")]) is None
    found = refusal(routes, [head(path, f"Content-Length: {limit + 1}")])
    assert isinstance(found, TooLarge)
    assert str(found) == f"The body has {limit + 1:,} bytes or more; at most {limit:,} are taken."


def keyed(tmp_path: Path) -> Routes:
    (tmp_path / "keys").write_text("anna 0123456789abcdef\n")
    return routes_of(registry([]), Access(Keys.read(tmp_path / "keys")))


@pytest.mark.parametrize("body", ["Content-Length: 1", "Transfer-Encoding: chunked", "Expect: 100-continue"])
def test_who_has_no_key_is_rejected_before_a_body_is_read(tmp_path: Path, body: str) -> None:
    parser = RequestParser(keyed(tmp_path).max_body_bytes)
    length = ("Content-Length: 9",) if body.startswith("Expect") else ()
    _, found = parser.feed(head("/v1/apps/small", body, *length))
    assert isinstance(found, Unauthorized)
    assert not parser.expects_continue
    # Without a body the connection goes on.
    for data in (b"GET /v1/stats HTTP/1.1\r\nHost: a\r\n\r\n", head("/v1/apps/small", "Content-Length: 0")):
        requests, found = RequestParser(keyed(tmp_path).max_body_bytes).feed(data)
        assert (len(requests), found) == (1, None)


@pytest.mark.parametrize("path", ["/v1/apps/nobody", "/nowhere", "/v1/stats"])
def test_a_long_body_for_nobody_is_not_read(routes: Routes, path: str) -> None:
    for body in (f"Content-Length: {MAX_HEAD_BYTES + 1}", "Transfer-Encoding: chunked"):
        found = refusal(routes, [head(path, body)])
        assert isinstance(found, UnknownRoute | WrongMethod)
    assert refusal(routes, [head(path, f"Content-Length: {MAX_HEAD_BYTES}")]) is None


def test_a_chunked_body_has_the_same_limit(routes: Routes) -> None:
    start = head("/v1/apps/small", "Transfer-Encoding: chunked")
    assert refusal(routes, [start, b"%x\r\n" % SMALL, bytes(SMALL), b"\r\n0\r\n\r\n"]) is None
    assert isinstance(refusal(routes, [start, b"%x\r\n" % (SMALL + 1), bytes(SMALL + 1)]), TooLarge)


def test_a_decompressed_body_has_the_same_limit(routes: Routes, refusals: list[RequestError]) -> None:
    body = zlib.compress(bytes(SMALL + 1))
    parser = RequestParser(routes.max_body_bytes)
    data = head("/v1/apps/small", "Content-Encoding: deflate", f"Content-Length: {len(body)}") + body
    ((request,), _) = parser.feed(data)
    assert isinstance(request, Request)
    answers: list[Response] = []
    routes.handle(request, answers.append)
    assert [answer.status for answer in answers] == [413]
    assert [type(error) for error in refusals] == [TooLarge]


@pytest.mark.parametrize("size", [0, CHECKED_BYTES - 1, CHECKED_BYTES, CHECKED_BYTES + 1, 4 * CHECKED_BYTES, 300_000])
@pytest.mark.parametrize("limit", [1, CHECKED_BYTES, 4 * CHECKED_BYTES - 1, 1 << 20])
def test_a_body_that_is_checked_as_it_is_unpacked_is_the_same(size: int, limit: int) -> None:
    body = np.random.default_rng(size).integers(0, 4, size, np.uint8).tobytes()
    seen: list[bytes] = []
    if size > limit:
        with pytest.raises(TooLarge):
            decompress(zlib.compress(body), "deflate", limit, seen.append)
    else:
        assert decompress(zlib.compress(body), "deflate", limit, seen.append) == body
    assert seen == [body[: len(each)] for each in seen]
    assert all(CHECKED_BYTES <= len(each) <= limit for each in seen)
    if min(size, limit) > CHECKED_BYTES:
        assert seen


def test_no_more_is_unpacked_than_is_needed_to_refuse_it() -> None:
    sizes: list[int] = []

    def refuse(beginning: bytes) -> None:
        sizes.append(len(beginning))
        if len(beginning) > CHECKED_BYTES:
            raise TooLarge("too large")

    with pytest.raises(TooLarge, match="too large"):
        decompress(zlib.compress(bytes(64 << 20)), "deflate", 64 << 20, refuse)
    assert sizes == [CHECKED_BYTES, 4 * CHECKED_BYTES]


@pytest.mark.parametrize("failing", ["named", "max_body_bytes"])
def test_a_failure_to_route_is_logged_once_and_answered_with_500(
    routes: Routes, failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise LookupError("a mistake in the server")

    # The limit of a request for no model is that of the largest one.
    path = "/v1/apps/small" if failing == "named" else "/v2"
    data = head(path, "Content-Length: 0")
    with monkeypatch.context() as broken:
        broken.setattr(ModelRegistry, failing, property(fail) if failing == "max_body_bytes" else fail)
        parser = RequestParser(routes.max_body_bytes)
        requests, rejection = parser.feed(data)
    assert requests == []
    assert rejection is not None
    answer = routes.reject(rejection, parser.head)
    assert (answer.status, answer.body) == (500, b'{"error":"%b"}' % str(internal_error()).encode())
    assert [record.getMessage() for record in caplog.records] == [f"POST '{path}' failed"]
    assert "a mistake in the server" in caplog.text
    # The failure is not kept for the next request with this head.
    assert refusal(routes, [data]) is None


def test_a_rejected_body_is_counted_for_its_model(routes: Routes, refusals: list[RequestError]) -> None:
    parser = RequestParser(routes.max_body_bytes)
    _, found = parser.feed(head("/v1/apps/small", f"Content-Length: {SMALL + 1}"))
    assert found is not None
    assert routes.reject(found, parser.head).status == 413
    assert refusals == [found]


def test_a_parser_without_memory_does_not_call_the_request_malformed() -> None:
    def without_memory(_: Head) -> int:
        raise MemoryError

    data = head("/", "Content-Length: 1") + b"1"
    requests, rejection = RequestParser(without_memory).feed(data)
    assert requests == []
    assert isinstance(rejection, Overloaded)
    assert "memory" in str(rejection)
