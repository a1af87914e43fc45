"""Both clients and several tensors of varying length, on a fake network before the server's own parser."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.core.dim import Dim
from penstock.core.errors import InvalidInput, InvalidResponse, Overloaded
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.serve.exchange.request import Head, Request
from penstock.serve.http.oip_http import infer_response, parse_infer

TOKENS, FOUND = Dim("tokens", max=6), Dim("found", max=6, min=0)
IDS = TensorSpec(name="ids", dtype="int64", shape=(TOKENS,), meaning="token ids", limits=(0, 99))
WEIGHTS = TensorSpec(name="weights", dtype="float32", shape=(TOKENS, 2), meaning="weights of each token")
SUM = TensorSpec(name="sum", dtype="float32", shape=(2,), meaning="weighted sum")
ODD = TensorSpec(name="odd", dtype="int64", shape=(FOUND,), meaning="odd ids")
BACK = TensorSpec(name="back", dtype="int64", shape=(TOKENS,), meaning="ids from the last to the first")
INPUT, OUTPUT = RecordSpec((IDS, WEIGHTS)), RecordSpec((SUM, ODD, BACK))

URL = "http://server:8000"
Example = dict[str, Array]


def described(inputs: RecordSpec = INPUT, outputs: RecordSpec = OUTPUT) -> dict[str, Any]:
    return {"apps": [{"name": "text", "inputs": inputs.to_json(), "outputs": outputs.to_json()}]}


def answer(example: Example) -> Example:
    """The right answer to one example."""
    ids, weights = example["ids"], example["weights"]
    return {"sum": (ids[:, None] * weights).sum(0, np.float32), "odd": ids[ids % 2 == 1], "back": ids[::-1]}


def serve(request: httpx2.Request) -> httpx2.Response:
    if request.url.path == "/v1/apps":
        return httpx2.Response(200, json=described())
    if request.url.path == "/v1/apps/text":
        reply = answer(INPUT.unpack(INPUT.from_numbers(json.loads(request.content))))
        return httpx2.Response(200, json={name: array.tolist() for name, array in reply.items()})
    head = Head("POST", request.url.path, dict(request.headers.items()))
    infer = parse_infer(Request(head, request.content), INPUT, OUTPUT, 16)
    outputs = np.stack([OUTPUT.check(answer(INPUT.unpack(record))) for record in infer.chunks])
    response = infer_response(infer, outputs, "text", "1", OUTPUT)
    return httpx2.Response(200, content=response.body, headers=dict(response.headers))


Serve = Callable[[httpx2.Request], httpx2.Response]


def ask(respond: Serve, method: str, *arguments: Any, kind: str = "Client", sent: list[str] | None = None) -> Any:
    """Call a new client whose requests `respond` answers."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        if sent is not None:
            sent.append(request.url.path)
        return respond(request)

    transport = httpx2.MockTransport(handle)
    if kind == "Client":
        with penstock.Client(URL, transport=transport, sleep=lambda _: None) as client:
            return getattr(client, method)(*arguments)

    async def call() -> Any:
        async with penstock.AsyncClient(URL, transport=transport) as client:
            return await getattr(client, method)(*arguments)

    return asyncio.run(call())


def example(ids: list[int]) -> Example:
    return {"ids": np.array(ids), "weights": np.arange(2 * len(ids), dtype=np.float32).reshape(-1, 2)}


def assert_equal(found: Example, expected: Example) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=8))
def test_every_row_is_answered_as_alone_and_without_padding(rows: list[list[int]]) -> None:
    examples = [example(ids) for ids in rows]
    sent: list[str] = []
    found = ask(serve, "predict", "text", examples, sent=sent)
    # One request for each length.
    assert len(sent) == 1 + len({len(ids) for ids in rows})
    for given_one, answered in zip(examples, found, strict=True):
        assert_equal(answered, answer(given_one))


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_one_dictionary_has_one_answer(kind: str) -> None:
    one = example([3, 1, 4])
    found = ask(serve, "predict", "text", {name: array.tolist() for name, array in one.items()}, kind=kind)
    assert_equal(found, answer(one))
    found["sum"] += 1  # the caller's own
    reply = ask(serve, "ask", "text", one, kind=kind)
    assert reply == {name: array.tolist() for name, array in answer(one).items()}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"ids": [1]}, "'weights' is missing"),
        (example([1]) | {"other": [1]}, "no input 'other'"),
        (example([1]) | {"ids": [1, 2]}, "send both equally long"),
        (example([1] * 7), "from 1 to 6"),
        ({"ids": [], "weights": np.zeros((0, 2))}, "0 tokens"),
        (example([1]) | {"ids": [0.5]}, "it must be a whole number"),
        (example([100]), "from 0 to 99"),
        (example([1, 2]) | {"weights": [[1.0], [1.0, 2.0]]}, "weights has lists of different lengths"),
        (example([1]) | {"ids": ["a"]}, "not only numbers"),
        ([], "list is empty"),
        (np.zeros((1, 6)), "takes a dictionary of arrays by name"),
        ([np.zeros(6)], "by name"),
        ("text", "takes a dictionary of arrays by name"),
    ],
)
def test_wrong_inputs_are_refused_before_they_are_sent(wrong: Any, sentence: str) -> None:
    sent: list[str] = []
    with pytest.raises(InvalidInput, match=sentence):
        ask(serve, "predict", "text", wrong, sent=sent)
    assert sent == ["/v1/apps"]


def changed(change: Callable[[dict[str, Any]], object], tail: bytes = b"") -> Serve:
    """A server whose responses are changed."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        response = serve(request)
        length = int(response.headers.get("Inference-Header-Content-Length", "0"))
        if not length:
            return response
        head = json.loads(response.content[:length])
        change(head)
        start = json.dumps(head).encode()
        headers = {"Inference-Header-Content-Length": str(len(start))}
        return httpx2.Response(200, content=start + response.content[length:] + tail, headers=headers)

    return respond


def named(head: dict[str, Any], name: str) -> dict[str, Any]:
    return next(tensor for tensor in head["outputs"] if tensor["name"] == name)


@pytest.mark.parametrize(
    ("respond", "sentence"),
    [
        (changed(lambda head: head["outputs"].pop(0)), "bytes"),
        (changed(lambda head: named(head, "sum").update(name="total")), "'sum' is missing"),
        (changed(lambda head: named(head, "found").update(name="count")), "'found' is missing"),
        (changed(lambda head: named(head, "sum").update(datatype="INT32")), "as described"),
        (changed(lambda head: named(head, "sum").update(datatype="TEXT")), "head of an inference"),
        (changed(lambda head: named(head, "sum").update(shape=[2, 1])), "as described"),
        (changed(lambda head: named(head, "sum").update(shape=[-1, -2])), "bytes for"),
        (changed(lambda head: named(head, "back").update(shape=[3, 1])), "as described"),
        (changed(lambda head: head.update(outputs=3)), "head of an inference"),
        (changed(lambda head: None, tail=b"x"), "bytes follow the head"),
    ],
)
def test_a_response_that_does_not_fit_is_refused(respond: Serve, sentence: str) -> None:
    with pytest.raises(InvalidResponse, match=sentence):
        ask(respond, "predict", "text", example([3, 1, 4]))


def test_a_refused_request_is_sent_again() -> None:
    refusals = 2

    def respond(request: httpx2.Request) -> httpx2.Response:
        nonlocal refusals
        if request.url.path != "/v1/apps" and refusals:
            refusals -= 1
            return httpx2.Response(503, json={"error": "busy"}, headers={"Retry-After": "0"})
        return serve(request)

    assert_equal(ask(respond, "predict", "text", example([3])), answer(example([3])))

    def busy(request: httpx2.Request) -> httpx2.Response:
        return serve(request) if request.url.path == "/v1/apps" else httpx2.Response(503, headers={"Retry-After": "0"})

    with pytest.raises(Overloaded):
        ask(busy, "predict", "text", example([3]))


def test_one_input_with_several_outputs() -> None:
    four = TensorSpec(name="four", dtype="float32", shape=(4,), meaning="four numbers")
    outputs = RecordSpec((TensorSpec(name="half", dtype="float32", shape=(2,), meaning="two"), SUM))

    def respond(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/apps":
            return httpx2.Response(200, json=described(RecordSpec((four,)), outputs))
        head = Head("POST", request.url.path, dict(request.headers.items()))
        infer = parse_infer(Request(head, request.content), four, outputs, 16)
        records = outputs.records({"half": infer.chunks[:, :2], "sum": infer.chunks[:, 2:]}, {})
        response = infer_response(infer, records, "text", "1", outputs)
        return httpx2.Response(200, content=response.body, headers=dict(response.headers))

    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    for row, found in zip(rows, ask(respond, "predict", "text", rows), strict=True):
        assert_equal(found, {"half": row[:2], "sum": row[2:]})
    assert_equal(ask(respond, "predict", "text", rows[1].tolist()), {"half": rows[1, :2], "sum": rows[1, 2:]})
    with pytest.raises(InvalidInput, match=r"takes float32\[4\]"):
        ask(respond, "predict", "text", rows[:, :3])
