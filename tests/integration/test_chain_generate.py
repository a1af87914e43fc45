"""A chain whose last part generates: whole answers, and events as they come."""

import http.client
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import tritonclient.grpc
from playwright.sync_api import Browser, expect
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from penstock import Bundle, Client, load_chain
from penstock.core.source_files.find_application import find_application
from tests.support.chained import picture, write_chained
from tests.support.generating import examples
from tests.support.page import Watch, url_of
from tests.support.processes import eventually
from tests.support.serving import RunningServer

SPELL = "from tests.support.generating import SERVED as app\n"
CHAIN = """
import numpy as np
from penstock import Chain, ChainStep


def digits(results, picture):
    return {"digits": 1 + results["marks"]["corners"].astype(np.int64).sum(1)}


chain = Chain(name="tell", steps=(ChainStep(part="marks"), ChainStep(part="counter", feed=digits)))
"""
# One output without a `reply`, and an answer that is cut.
TOKENS = """
from dataclasses import replace
from tests.support.generating import COUNTER, Counter, tensor


class Tokens(Counter):
    def step(self, state):
        output, after, done = super().step(state)
        return {"token": output["token"]}, after, done


app = replace(COUNTER, name="tokens", outputs={"token": tensor("int64")}, model=Tokens)
"""
CUT = """
import numpy as np
from penstock import Chain, ChainStep
from tell import digits

feed = lambda results, picture: digits(results, picture) | {"most": np.array(2)}
chain = Chain(name="cut", steps=(ChainStep(part="marks"), ChainStep(part="tokens", feed=feed)))
"""
# The next step waits for the whole answer.
COUNT = """
from penstock import Chain, ChainStep, TensorSpec
from tell import chain as tell


def count(results, picture):
    return len(results["counter"]["token"])


chain = Chain(
    name="count",
    steps=(*tell.steps, ChainStep(run=count)),
    output=TensorSpec(dtype="int64", shape=(), meaning="steps", name="count"),
)
"""
MARKS = [(1, 1), (4, 5), (7, 7)]
TRITON: Any = tritonclient.grpc
JSON = {"Content-Type": "application/json"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("tell")
    chained = write_chained(folder)
    (folder / "spell.py").write_text(SPELL)
    (folder / "tell.py").write_text(CHAIN)
    (folder / "count.py").write_text(COUNT)
    found = find_application(str(folder / "spell.py"))
    Bundle.write(found, found.model(), examples(), to=folder / "counter")
    (folder / "tokens.py").write_text(TOKENS)
    (folder / "cut.py").write_text(CUT)
    found = find_application(str(folder / "tokens.py"))
    Bundle.write(found, found.model(), examples(), to=folder / "tokens")
    chains = [folder / f"{name}.py" for name in ("tell", "count", "cut")]
    return [chained.marks, folder / "counter", *chains, folder / "tokens"]


@pytest.fixture(scope="module")
def server(arguments: list[Path]) -> Iterator[RunningServer]:
    with RunningServer(None, *map(str, arguments), "--frontends", "0") as server:
        yield server


@pytest.fixture(scope="module")
def grpc_server(arguments: list[Path]) -> Iterator[tuple[RunningServer, str]]:
    # In two processes, as with several cores.
    with RunningServer(None, *map(str, arguments), "--frontends", "1", "--grpc-port", "0") as server:
        assert server.process.stdout is not None
        yield server, f"127.0.0.1:{server.process.stdout.readline().split()[-1]}"


def expected(arguments: list[Path]) -> dict[str, np.ndarray[Any, Any]]:
    return load_chain(arguments[2], arguments[:2]).predict(picture(*MARKS))


def test_a_whole_answer_is_that_of_the_loaded_chain(server: RunningServer, arguments: list[Path]) -> None:
    body = json.dumps(picture(*MARKS).tolist()).encode()
    status, head, reply = server.ask("POST", "/v1/apps/tell", body, JSON)
    assert (status, head["penstock-ended"], reply["ended"]) == (200, "end", "end")
    answer = expected(arguments)
    assert len(answer["token"]) > 1
    assert reply["token"] == answer["token"].tolist()
    assert np.allclose(reply["sums"], answer["sums"])


def test_a_chain_says_why_its_answer_ended(server: RunningServer, arguments: list[Path]) -> None:
    tokens = expected(arguments)["token"].tolist()[:2]
    one, marked = {"token": tokens, "ended": "max_steps"}, picture(*MARKS).tolist()
    status, head, reply = server.ask("POST", "/v1/apps/cut", json.dumps(marked).encode(), JSON)
    assert (status, head["penstock-ended"], reply) == (200, "max_steps", one)
    batch = json.dumps({"instances": [marked, marked]}).encode()
    status, head, reply = server.ask("POST", "/v1/models/cut:predict", batch)
    assert (status, head["penstock-ended"]) == (200, "max_steps,max_steps")
    assert reply == {"predictions": [{"token": tokens}] * 2, "ended": ["max_steps"] * 2}
    tensor = {"name": "picture", "shape": [1, 8, 8], "datatype": "UINT8", "data": [marked]}
    infer = json.dumps({"inputs": [tensor]}).encode()
    status, head, reply = server.ask("POST", "/v2/models/cut/infer", infer)
    assert (status, reply.get("parameters")) == (200, {"ended": "max_steps"}), reply
    assert head["penstock-ended"] == "max_steps"
    with Client(f"http://{server.host}:{server.port}") as client:
        assert client.ask("cut", picture(*MARKS)) == one
        steps = client.generate("cut", json.dumps(marked).encode(), content_type="application/json")
        assert [step["token"] for step in steps] == tokens
        assert (steps.ended, steps.reply) == ("max_steps", one)
    with connect(f"ws://{server.host}:{server.port}/v1/apps/cut/stream") as socket:
        socket.send(json.dumps(marked))
        *_, done = [json.loads(message) for message in socket]
    assert done == {"done": {"ended": "max_steps", "steps": 2, "reply": one}}
    paths = server.ask("GET", "/openapi.json")[2]["paths"]
    described = paths["/v1/models/cut:predict"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert jsonschema_rs.is_valid(described, {"predictions": [{"token": tokens}] * 2, "ended": ["max_steps"] * 2})
    assert "text/event-stream" in paths["/v1/apps/cut"]["post"]["responses"]["200"]["content"]
    # An answer of one step has no end of its own.
    assert "penstock-ended" not in server.ask("POST", "/v1/apps/count", json.dumps(marked).encode(), JSON)[1]


def test_each_output_is_an_event_and_the_end_has_the_reply(server: RunningServer, arguments: list[Path]) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    body = json.dumps(picture(*MARKS).tolist()).encode()
    connection.request("POST", "/v1/apps/tell", body, JSON | {"Accept": "text/event-stream"})
    response = connection.getresponse()
    assert response.getheader("Content-Type") == "text/event-stream"
    *outputs, done = [part for part in response.read().decode().split("\n\n") if part]
    connection.close()
    tokens = expected(arguments)["token"].tolist()
    assert [json.loads(each.removeprefix("data: "))["token"] for each in outputs] == tokens
    name, data = done.split("\n")
    assert name == "event: done"
    last = json.loads(data.removeprefix("data: "))
    assert (last["steps"], last["ended"], last["reply"]["token"]) == (len(tokens), "end", tokens)


def test_a_rejection_before_the_first_output_is_a_response(server: RunningServer) -> None:
    # No marks: no digits, which the second part does not take.
    body = json.dumps(picture().tolist()).encode()
    status, _, reply = server.ask("POST", "/v1/apps/tell", body, JSON | {"Accept": "text/event-stream"})
    assert status == 500
    assert reply["error"].startswith(
        "The feed of step 'counter' of chain 'tell' gives no input of 'counter': digits has 0 length"
    )


def test_the_whole_answer_feeds_another_step(server: RunningServer, arguments: list[Path]) -> None:
    steps = len(expected(arguments)["token"])
    assert load_chain(arguments[3], arguments[:2]).predict(picture(*MARKS)) == steps
    headers = JSON | {"Accept": "text/event-stream"}
    # There is nothing to send before the end.
    assert server.ask("POST", "/v1/apps/count", json.dumps(picture(*MARKS).tolist()).encode(), headers)[2] == steps


def test_a_websocket_has_a_message_for_each_step(server: RunningServer, arguments: list[Path]) -> None:
    url = f"ws://{server.host}:{server.port}/v1/apps/tell/stream"
    tokens = expected(arguments)["token"].tolist()
    with connect(url) as socket:
        socket.send(json.dumps(picture(*MARKS).tolist()))
        *steps, done = [json.loads(message) for message in socket]
    assert [step["token"] for step in steps] == tokens
    assert set(steps[0]) == {"token", "sums", "reply"}
    assert (done["done"]["ended"], done["done"]["steps"]) == ("end", len(tokens))
    assert done["done"]["reply"]["token"] == tokens
    for given, code, reason in (
        # Not the chain's input; an input for which the feed gives none; no JSON.
        ([[1, 2]], 1007, "picture"),
        (picture().tolist(), 1011, "gives no input of 'counter'"),
        ("none", 1007, "not an array"),
    ):
        with connect(url) as socket:
            socket.send(json.dumps(given))
            with pytest.raises(ConnectionClosedError) as closed:
                list(socket)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, reason in closed.value.rcvd.reason) == (code, True), closed.value.rcvd
    with connect(url) as socket:
        socket.send(json.dumps(picture(*MARKS).tolist()))
        socket.send(json.dumps(picture(*MARKS).tolist()))
        with pytest.raises(ConnectionClosedError, match="A second request came"):
            list(socket)


def test_a_chain_that_answers_at_once_has_no_websocket(server: RunningServer) -> None:
    url = f"ws://{server.host}:{server.port}/v1/apps/count/stream"
    with pytest.raises(InvalidStatus) as refused, connect(url):
        pass
    assert b"'count' takes single requests, not streams" in (refused.value.response.body or b"")


def test_the_client_yields_each_step(server: RunningServer, arguments: list[Path]) -> None:
    with Client(f"http://{server.host}:{server.port}") as client:
        steps = client.generate("tell", json.dumps(picture(*MARKS).tolist()).encode(), content_type="application/json")
        tokens = [step["token"] for step in steps]
        assert tokens == expected(arguments)["token"].tolist()
        assert (steps.ended, steps.reply["token"]) == ("end", tokens)
        assert client.predict("tell", picture(*MARKS))["token"].tolist() == tokens
        assert [app["stepped"] for app in client.apps() if "parts" in app] == [True, False, True]


def test_grpc_infer_says_why_the_answer_ended(grpc_server: tuple[RunningServer, str]) -> None:
    marked = picture(*MARKS)
    tensor = TRITON.InferInput("picture", list(marked.shape), "UINT8")
    tensor.set_data_from_numpy(marked)
    with TRITON.InferenceServerClient(grpc_server[1]) as client:
        assert client.infer("cut", [tensor]).get_response().parameters["ended"].string_param == "max_steps"
        assert "ended" not in client.infer("count", [tensor]).get_response().parameters


def test_tritons_grpc_stream_gives_a_response_for_each_step(
    grpc_server: tuple[RunningServer, str], arguments: list[Path]
) -> None:
    server, address = grpc_server

    def given(marked: np.ndarray[Any, Any]) -> list[Any]:
        tensor = TRITON.InferInput("picture", list(marked.shape), "UINT8")
        tensor.set_data_from_numpy(marked)
        return [tensor]

    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    tokens, ended = expected(arguments)["token"].tolist(), ""
    with TRITON.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer("tell", given(picture(*MARKS)), request_id="a")
        found: list[int] = []
        while not ended:
            result, error = results.get(timeout=20)
            assert error is None
            response = result.get_response()
            assert (response.id, response.model_name) == ("a", "tell")
            found.append(int(result.as_numpy("token")))
            assert result.as_numpy("sums").shape == (4,)
            if response.parameters["triton_final_response"].bool_param:
                ended = response.parameters["ended"].string_param
        assert (found, ended) == (tokens, "end")
        # The feed gives nothing of a picture without marks; two rows are more than a stream of steps takes.
        client.async_stream_infer("tell", given(picture()))
        assert "gives no input of 'counter'" in str(results.get(timeout=20)[1])
        client.async_stream_infer("tell", given(np.stack([picture(*MARKS)] * 2)))
        assert "a stream of steps takes one row a request" in str(results.get(timeout=20)[1])
        # A chain whose answer is made of a whole one has one response.
        client.async_stream_infer("count", given(picture(*MARKS)))
        assert int(results.get(timeout=20)[0].as_numpy("count")) == len(tokens)
        client.stop_stream()

    def counts() -> tuple[int, int]:
        tell = server.ask("GET", "/v1/stats")[2]["models"]["tell"]
        return tell["answered"], tell["failed"]

    # They may be counted after the responses were sent.
    eventually(lambda: counts() >= (1, 1), within_s=10)
    assert counts() == (1, 1)


def test_the_page_shows_the_steps(browser: Browser, server: RunningServer, arguments: list[Path], watch: Watch) -> None:
    page = browser.new_page()
    watch.look_at(page)
    page.goto(url_of(server))
    page.locator("#apps").select_option("tell")
    page.get_by_role("button", name="Example 1").click()
    expect(page.locator(".steps li").first).to_be_visible()
    expect(page.locator(".answer-time").first).to_contain_text("round trip")
    page.close()
    assert watch.complaints == []
