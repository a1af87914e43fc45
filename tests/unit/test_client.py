"""Both clients on a fake network and a fake clock: what they send, what they make of answers, when they ask again."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
import pytest

import penstock
from penstock.core.errors import (
    DeadlineImpossible,
    InvalidInput,
    InvalidResponse,
    Overloaded,
    TimedOut,
    Unauthorized,
    UnknownRoute,
)
from penstock.core.spec import TensorSpec
from tests.support.clock import Clock

URL = "http://server:8000"
TAKEN = TensorSpec(dtype="float32", shape=(4,), meaning="four numbers", name="numbers")
GIVEN = TensorSpec(dtype="float32", shape=(2,), meaning="sums of pairs", name="sums")
APPS = {"apps": [{"name": "pairs", "inputs": [TAKEN.to_json()], "outputs": [GIVEN.to_json()]}]}
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)

# Is given each request; what it gives comes back.
Respond = Callable[[httpx2.Request], httpx2.Response]
Ask = Callable[..., Any]


@dataclass
class Rig:
    """Makes either client on a fake network and a fake clock, and calls it."""

    kind: str
    clock: Clock = field(default_factory=Clock)
    requests: list[httpx2.Request] = field(default_factory=list[httpx2.Request])

    def client(self, respond: Respond, **options: Any) -> Ask:
        """`call(method, *arguments)` of a client whose requests `respond` answers."""

        def handle(request: httpx2.Request) -> httpx2.Response:
            self.requests.append(request)
            return respond(request)

        made: Any
        common: dict[str, Any] = {"clock_s": self.clock, "random": lambda: 0.5, **options}
        common["transport"] = httpx2.MockTransport(handle)
        if self.kind == "Client":
            made = penstock.Client(URL, sleep=self.clock.sleep, **common)
            return lambda method, *arguments, **named: getattr(made, method)(*arguments, **named)
        made = penstock.AsyncClient(URL, sleep=self.clock.sleep_async, **common)
        return lambda method, *arguments, **named: asyncio.run(getattr(made, method)(*arguments, **named))


@pytest.fixture(params=["Client", "AsyncClient"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


def pairs(request: httpx2.Request) -> httpx2.Response:
    """A server of `pairs`, which adds neighbours."""
    if request.url.path == "/v1/apps":
        return httpx2.Response(200, json=APPS)
    length = int(request.headers.get("inference-header-content-length", "0"))
    numbers = np.frombuffer(request.content[length:], "<f4").reshape(-1, 2).sum(1, dtype=np.float32)
    if request.url.path == "/v1/apps/pairs":
        return httpx2.Response(200, content=numbers.tobytes())
    assert json.loads(request.content[:length])["inputs"][0] == {
        "name": "numbers",
        "datatype": "FP32",
        "shape": [len(numbers) // 2, 4],
        "parameters": {"binary_data_size": len(request.content) - length},
    }
    head = json.dumps({"outputs": [{"name": "sums", "datatype": "FP32"}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return httpx2.Response(200, content=head + numbers.tobytes(), headers=headers)


def test_ask_sends_bytes_as_they_are(rig: Rig) -> None:
    ask = rig.client(lambda _: httpx2.Response(200, json={"digit": 3}), api_key="secret", latency_ms=20)
    assert ask("ask", "digits", b"\x89PNG", content_type="image/png", priority="background") == {"digit": 3}
    (request,) = rig.requests
    assert (request.method, str(request.url), request.content) == ("POST", f"{URL}/v1/apps/digits", b"\x89PNG")
    sent = {name: request.headers.get(name) for name in ("authorization", "content-type", "accept-encoding")}
    assert sent == {"authorization": "Bearer secret", "content-type": "image/png", "accept-encoding": "identity"}
    assert request.headers["penstock-latency-ms"] == "20"
    assert request.headers["penstock-priority"] == "background"


def test_ask_leaves_to_the_server_what_nobody_said(rig: Rig) -> None:
    ask = rig.client(lambda _: httpx2.Response(200, json={}))
    ask("ask", "a/b", bytearray(b"x"), latency_ms=1.5)
    ask("ask", "a/b", b"x")
    first, second = rig.requests
    assert first.headers["penstock-latency-ms"] == "1.5"
    assert first.url.raw_path == b"/v1/apps/a%2Fb"
    names = {"content-type", "authorization", "penstock-latency-ms", "penstock-priority"}
    assert names.isdisjoint(second.headers)


@pytest.mark.parametrize(("given", "sent"), [({}, "text/plain"), ({"content_type": "text/x-mail"}, "text/x-mail")])
def test_ask_sends_a_text_as_it_is(rig: Rig, given: dict[str, str], sent: str) -> None:
    rig.client(lambda _: httpx2.Response(200, json={}))("ask", "mail", "grüß dich", **given)
    assert rig.requests[0].headers["content-type"] == sent
    assert rig.requests[0].content == "grüß dich".encode()


@pytest.mark.parametrize("numbers", [[1, 2, 3, 4], (1, 2, 3, 4), np.arange(1, 5), np.arange(1, 8, 1)[:4]])
def test_ask_sends_numbers_as_json(rig: Rig, numbers: Any) -> None:
    ask = rig.client(lambda _: httpx2.Response(200, json={}))
    ask("ask", "iris", numbers)
    assert rig.requests[0].headers["content-type"] == "application/json"
    assert json.loads(rig.requests[0].content) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "content",
    [[1, 2, float("nan")], np.array([1, np.inf], np.float32), {"a": [[np.float32(np.nan)]]}, [{"a": -np.inf}]],
)
def test_ask_refuses_what_json_would_carry_as_null(rig: Rig, content: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^The content holds NaN or infinity, which JSON cannot carry"):
        rig.client(pairs)("ask", "pairs", content)
    assert not rig.requests


def test_predict_one_and_several(rig: Rig) -> None:
    ask = rig.client(pairs)
    one = ask("predict", "pairs", [1, 2, 3, 4])
    several = ask("predict", "pairs", ROWS.astype(np.float64)[:, ::-1])
    assert (one.dtype, one.tolist(), several.tolist()) == (np.float32, [3, 7], [[5, 1], [13, 9], [21, 17]])
    one += 1  # what comes back is the caller's own
    assert [request.url.path for request in rig.requests] == ["/v1/apps", "/v1/apps/pairs", "/v2/models/pairs/infer"]
    assert rig.requests[1].headers["accept"] == rig.requests[1].headers["content-type"] == "application/octet-stream"
    assert ask("predict", "pairs", {"numbers": [1, 2, 3, 4]}).tolist() == [3, 7]


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((2, 3)), "takes float32"),
        (np.zeros((0, 4)), "with n from 1"),
        (np.zeros((1, 2, 4)), r"\[1, 2, 4\]"),
        ([1, 2, 3, np.nan], "NaN"),
        ([1, 2, 3, 1e300], "it must be a finite number"),
        (["a"], "holds text, not only numbers"),
        ([[1, 2, 3, 4], [1, 2]], "lists of different lengths"),
        (b"a file", r"^The input is bytes; predict takes arrays, float32\[4\]. Give a file's bytes or a text to ask.$"),
        ({"wrong": [1, 2, 3, 4]}, "^There is no input 'wrong'; there is 'numbers'"),
    ],
)
def test_predict_refuses_what_cannot_be_before_it_is_sent(rig: Rig, array: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        rig.client(pairs)("predict", "pairs", array)
    assert [request.url.path for request in rig.requests] == ["/v1/apps"]


def test_predict_of_what_is_not_there(rig: Rig) -> None:
    def server(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v2/models/odd":
            return httpx2.Response(404, json={"error": "There is no model 'odd' here; there is 'pairs'."})
        return pairs(request)

    with pytest.raises(UnknownRoute, match="no model 'odd' at http://server:8000; there is pairs"):
        rig.client(server)("predict", "odd", [1])
    # It could have been one that is loaded on first use.
    assert [request.url.path for request in rig.requests] == ["/v1/apps", "/v2/models/odd"]


def test_predict_learns_that_another_bundle_is_served(rig: Rig) -> None:
    ask = rig.client(lambda request: server(request))
    server: Respond = pairs
    assert ask("predict", "pairs", [1, 2, 3, 4]).tolist() == [3, 7]

    def wider(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/apps":
            taken = TAKEN.to_json() | {"shape": [6]}
            given = GIVEN.to_json() | {"shape": [3]}
            return httpx2.Response(200, json={"apps": [{"name": "pairs", "inputs": [taken], "outputs": [given]}]})
        return pairs(request)

    server = wider
    assert ask("predict", "pairs", [1, 2, 3, 4, 5, 6]).tolist() == [3, 7, 11]


@pytest.mark.parametrize(
    ("content", "length"),
    [
        (b"1234567", ""),
        (b"{}", "2"),
        (b"[]", "2"),
        (b"123456789", "x"),
        (b'{"outputs":[{"datatype":"INT8"}]}', "33"),
        (b'{"outputs":[{"datatype":"FP32"}]}1', "33"),
        (b'{"outputs":[{"datatype":"FP32"}]}1', "3333"),
    ],
)
@pytest.mark.parametrize("array", [ROWS[0], ROWS], ids=["one", "several"])
def test_predict_takes_no_output_that_does_not_fit(rig: Rig, content: bytes, length: str, array: Any) -> None:
    def respond(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/apps":
            return pairs(request)
        return httpx2.Response(200, content=content, headers={"Inference-Header-Content-Length": length})

    with pytest.raises(InvalidResponse, match="http://server:8000 is no Penstock server, or serves another"):
        rig.client(respond)("predict", "pairs", array)


@pytest.mark.parametrize("apps", [[], {}, {"apps": 3}, {"apps": [3]}, {"apps": [{"name": "pairs"}]}])
def test_what_is_no_penstock_server_is_said(rig: Rig, apps: Any) -> None:
    with pytest.raises(InvalidResponse):
        rig.client(lambda _: httpx2.Response(200, json=apps))("predict", "pairs", [1, 2, 3, 4])


def test_an_answer_that_is_not_json(rig: Rig) -> None:
    with pytest.raises(InvalidResponse, match="'<html>', which is not JSON"):
        rig.client(lambda _: httpx2.Response(200, content=b"<html>"))("stats")


def test_the_rest_of_the_calls(rig: Rig) -> None:
    ask = rig.client(lambda request: httpx2.Response(200, json=APPS))
    assert ask("apps") == APPS["apps"]
    assert ask("stats") == APPS
    assert ask("ready") is True
    assert ask("load", "iris") is None
    assert ask("unload", "iris") is None
    assert [f"{request.method} {request.url.path}" for request in rig.requests] == [
        "GET /v1/apps",
        "GET /v1/stats",
        "GET /v2/health/ready",
        "POST /v2/repository/models/iris/load",
        "POST /v2/repository/models/iris/unload",
    ]


def refused(status: int, **headers: str) -> Respond:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: httpx2.Response(status, json={"error": "no"}, headers=named)


def broken(kind: type[httpx2.TransportError]) -> Respond:
    def respond(request: httpx2.Request) -> httpx2.Response:
        raise kind("broken", request=request)

    return respond


def scripted(*responds: Respond) -> Respond:
    """Each request is for the next of them."""
    remaining: Iterator[Respond] = iter(responds)
    return lambda request: next(remaining)(request)


def test_ready_is_asked_once(rig: Rig) -> None:
    assert rig.client(broken(httpx2.ConnectError))("ready") is False
    assert rig.client(refused(503, retry_after="5"))("ready") is False
    with pytest.raises(Unauthorized):
        rig.client(refused(401))("ready")
    assert (len(rig.requests), rig.clock.waits) == (3, [])


@pytest.mark.parametrize("respond", [refused(502), refused(504), broken(httpx2.ConnectTimeout)])
def test_a_server_that_a_proxy_does_not_find_or_that_is_silent_is_not_ready(rig: Rig, respond: Respond) -> None:
    assert rig.client(respond)("ready") is False


class Body(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """A body that comes byte by byte, and knows whether it was closed.

    Args:
        between: Called before each byte.
    """

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self.between, self.closed = between, False

    def __iter__(self) -> Iterator[bytes]:
        for byte in b"{  }":
            self.between()
            yield bytes([byte])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


def test_the_answer_of_an_application_of_one_step_is_not_left_open(rig: Rig) -> None:
    body = Body()
    one_step = rig.client(lambda _: httpx2.Response(200, headers={"Content-Type": "application/json"}, stream=body))
    with pytest.raises(InvalidInput, match="answers in one step"):
        one_step("generate", "digits", b"x")
    assert body.closed


@pytest.mark.parametrize(("each_s", "comes"), [(2.4, True), (2.6, False)])
def test_a_response_that_comes_slowly_has_the_time_of_the_call_and_no_more(
    rig: Rig, each_s: float, comes: bool
) -> None:
    body = Body(lambda: rig.clock.sleep(each_s))
    slow = rig.client(lambda _: httpx2.Response(200, stream=body), timeout_s=10)
    if comes:
        assert slow("ask", "digits", b"x") == {}
    else:
        with pytest.raises(TimedOut, match="within 10 s"):
            slow("ask", "digits", b"x")
    assert body.closed


class SilentBody(Body):
    """A body that sends one byte and then nothing."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()


def test_a_response_that_stops_in_the_middle_ends_a_call_of_asyncio_in_its_time() -> None:
    body = SilentBody()
    ask = Rig("AsyncClient").client(lambda _: httpx2.Response(200, stream=body), timeout_s=0.05)
    with pytest.raises(TimedOut, match=r"within 0\.05 s"):
        ask("ask", "digits", b"x")
    assert body.closed


def test_a_content_type_that_no_header_can_hold_is_refused(rig: Rig) -> None:
    with pytest.raises(InvalidInput, match=r"content_type is 'text/plain\\n'; it must be printable ASCII"):
        rig.client(pairs)("ask", "pairs", b"x", content_type="text/plain\n")
    assert not rig.requests


def test_a_client_waits_and_asks_again(rig: Rig) -> None:
    respond = scripted(
        broken(httpx2.ReadError),
        refused(503, retry_after="2"),
        broken(httpx2.RemoteProtocolError),
        lambda _: httpx2.Response(200, json={"digit": 3}),
    )
    assert rig.client(respond)("ask", "digits", b"x") == {"digit": 3}
    assert rig.clock.waits == pytest.approx([0.05, 2.3, 0.2])
    assert len({request.content for request in rig.requests}) == 1


@pytest.mark.parametrize(
    ("respond", "error"),
    [
        (broken(httpx2.ReadTimeout), TimedOut),
        (broken(httpx2.PoolTimeout), TimedOut),
        (refused(504), DeadlineImpossible),
        (refused(400), InvalidInput),
    ],
)
def test_a_client_gives_up_at_once(rig: Rig, respond: Respond, error: type[Exception]) -> None:
    with pytest.raises(error):
        rig.client(scripted(respond))("ask", "digits", b"x")
    assert rig.clock.waits == []


def test_predict_has_one_timeout_for_all_its_requests(rig: Rig) -> None:
    full = refused(503, retry_after="6")
    with pytest.raises(Overloaded):
        rig.client(scripted(full, pairs, full), timeout_s=10)("predict", "pairs", [1, 2, 3, 4])
    assert rig.clock.waits == [pytest.approx(6.8)]


def test_both_clients_offer_the_same() -> None:
    def offered(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(value).parameters)
            for name, value in vars(kind).items()
            if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_"))
        }

    assert offered(penstock.Client) == offered(penstock.AsyncClient)


@pytest.mark.parametrize("kind", [penstock.Client, penstock.AsyncClient])
def test_every_call_has_a_signature_and_a_description_of_its_own(kind: type) -> None:
    for name in ("ask", "predict", "apps", "ready", "stats", "load", "unload", "stream", "close"):
        call = vars(kind)[name]
        assert call.__doc__
        assert call.__qualname__ == f"{kind.__name__}.{name}"
        assert next(iter(inspect.signature(call).parameters)) == "self"
