"""A server of answers that take steps: whole answers, events, clients that go away, and requests that fail alone."""

import asyncio
import http.client
import json
import queue
import socket
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

import penstock
from penstock.bench.load.generator import Load, measure
from penstock.bench.load.golden_target import golden_target
from penstock.core.errors import ComputeFailed, InvalidInput
from tests.support.generating import MOST, PAST, SERVED, SLOW, SLOWEST, counter_bundle, digits, examples
from tests.support.serving import RunningServer
from tests.support.thorough import thorough
from tests.unit.test_generation_executor import by_hand

with warnings.catch_warnings():
    # gevent, which the client brings, warns at import about its own use of deprecated names.
    warnings.simplefilter("ignore")
    import tritonclient.http

TRITON_HTTP: Any = tritonclient.http
TRITON_GRPC: Any = tritonclient.grpc
ASK = "/v1/apps/counter"
EVENTS = {"Accept": "text/event-stream"}


@dataclass(kw_only=True)
class Serving:
    """A server of the toy network."""

    bundle: Path
    server: RunningServer
    grpc: str

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def ask(self, given: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], str]:
        client = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        client.request("POST", ASK, json.dumps(numbers(given)).encode(), headers or {})
        response = client.getresponse()
        body = response.read().decode()
        client.close()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, body

    def stats(self) -> dict[str, Any]:
        return self.server.ask("GET", "/v1/stats")[2]


def numbers(given: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(each).tolist() for name, each in given.items()}


@pytest.fixture(scope="module", params=["0", pytest.param("1", marks=pytest.mark.slow)])
def serving(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Serving]:
    bundle = counter_bundle(tmp_path_factory.mktemp("counter") / "bundle", SERVED)
    options = ("--app", "tests.support.generating:SERVED", "--grpc-port", "0", "--frontends", request.param)
    with RunningServer(bundle.folder, *[*options, "--executor", "auto"]) as server:
        assert server.process.stdout is not None
        yield Serving(
            bundle=bundle.folder, server=server, grpc=f"127.0.0.1:{server.process.stdout.readline().split()[-1]}"
        )


def events_of(body: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a body, each with its name, empty for a step."""
    events: list[tuple[str, dict[str, Any]]] = []
    for block in body.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append((fields.get("event", ""), json.loads(fields["data"])))
    return events


def test_answers_that_take_steps_have_load_reports(serving: Serving) -> None:
    one = next(each for each in examples() if len(by_hand(each)) > 2)
    for accepts in ({}, EVENTS):
        head = serving.ask(one, {**accepts, "endpoint-load-metrics-format": "json"})[1]
        report = json.loads(head["endpoint-load-metrics"].removeprefix("JSON "))
        assert report["application_utilization"] >= 0
        assert report["named_metrics"]["predicted_finish_ms"] > 0


def test_whole_answers_say_why_they_ended(serving: Serving) -> None:
    one = next(each for each in examples() if len(by_hand(each)) > 2)
    status, head, body = serving.ask(one)
    assert (status, head["penstock-ended"]) == (200, "end")
    answer = json.loads(body)
    assert (answer["token"], answer["ended"]) == (by_hand(one), "end")
    assert np.shape(answer["sums"]) == (len(by_hand(one)), 4)
    status, head, body = serving.ask(one | {"most": 2})
    assert json.loads(body)["token"] == by_hand(one)[:2]
    assert (head["penstock-ended"], json.loads(body)["ended"]) == ("max_steps", "max_steps")


def test_each_step_is_an_event_and_the_last_has_the_reply(serving: Serving) -> None:
    one = next(each for each in examples() if len(by_hand(each)) > 2)
    status, head, body = serving.ask(one, EVENTS)
    assert (status, head["content-type"]) == (200, "text/event-stream")
    *steps, (name, done) = events_of(body)
    assert [each["token"] for _, each in steps] == by_hand(one)
    assert [each["reply"]["token"] for _, each in steps] == [by_hand(one)[: n + 1] for n in range(len(steps))]
    assert name == "done"
    assert (done["ended"], done["steps"], done["reply"]["token"]) == ("end", len(by_hand(one)), by_hand(one))


def test_many_clients_at_once_get_the_answers_of_their_requests(serving: Serving) -> None:
    inputs = [digits(1 + number % 40, number) for number in range(60)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda each: json.loads(serving.ask(each)[2])["token"], inputs))
    assert answers == [by_hand(each) for each in inputs]


def test_a_request_on_which_the_network_raises_fails_alone(serving: Serving) -> None:
    status, _, body = serving.ask({"digits": [29]})
    assert (status, "network failed on this input" in body) == (500, True)
    status, _, body = serving.ask({"digits": [30, 1]}, EVENTS)
    assert status == 200, "the first three steps have been sent by then"
    assert [name for name, _ in events_of(body)] == ["", "", "", "error"]
    assert serving.ask({"digits": [30, 1], "most": 3})[0] == 200


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": 1}, "The input 'digits' is missing"),
        ({"digits": [1], "sead": 1}, "There is no input 'sead'"),
        ({"digits": [1], "most": 65}, "most holds 65; it must be from 1 to 64."),
        ({"digits": [1] * 41}, "digits has 41 length; it must have from 1 to 40."),
    ],
)
def test_bad_input_is_refused_in_a_sentence(serving: Serving, given: dict[str, Any], message: str) -> None:
    for headers in ({}, EVENTS):
        status, _, body = serving.ask(given, headers)
        assert (status, message in json.loads(body)["error"]) == (400, True), body


def test_a_client_that_goes_away_frees_its_row(serving: Serving) -> None:
    body = json.dumps(numbers(digits(5) | {"seed": SLOWEST})).encode()
    head = f"POST {ASK} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", serving.server.port)) as client:
        client.sendall(head.encode() + body)
        received = b""
        while b"data: " not in received:
            received += client.recv(65_536)
        assert serving.stats()["slots"]["in_use"] == 1
    wait_until_idle(serving)


def test_a_step_waits_for_no_client_and_rows_join_those_in_progress(serving: Serving) -> None:
    with (
        penstock.Client(f"http://{serving.address}") as client,
        # To its end it would take 50 steps of 150 ms.
        client.generate("counter", digits(5) | {"seed": SLOWEST}) as slowest,
    ):
        next(slowest)
        assert json.loads(serving.ask(digits(9, 1))[2])["token"] == by_hand(digits(9, 1))
        assert serving.stats()["slots"]["in_use"], "the slow answer was waited for"
    wait_until_idle(serving)
    answer = json.loads(serving.ask(digits(5) | {"seed": SLOW})[2])
    assert (len(answer["token"]), answer["ended"]) == (int(PAST), "max_steps")


def test_the_inference_protocol_gives_whole_answers(serving: Serving) -> None:
    given = np.stack([digits(6, seed)["digits"] for seed in range(3)])
    with TRITON_HTTP.InferenceServerClient(serving.address) as client:
        tensor = TRITON_HTTP.InferInput("digits", given.shape, "INT64")
        tensor.set_data_from_numpy(given)
        result = client.infer("counter", [tensor])
        metadata = client.get_model_metadata("counter")
    expected = [by_hand({"digits": row}) for row in given]
    steps = result.as_numpy("steps").tolist()
    assert steps == [len(each) for each in expected]
    tokens = result.as_numpy("token")
    assert [row[:count].tolist() for row, count in zip(tokens, steps, strict=True)] == expected
    assert [each["shape"] for each in metadata["outputs"]] == [[-1, -1], [-1, -1, 4], [-1]]


@pytest.mark.parametrize("binary", [True, False])
def test_the_inference_protocol_says_why_each_answer_ended(serving: Serving, binary: bool) -> None:
    long, short = digits(6, 2), digits(6, 1)
    assert len(by_hand(long)) > 1
    given = np.stack([long["digits"], short["digits"]])
    with TRITON_HTTP.InferenceServerClient(serving.address) as client:
        for rows, ended in (([(0, 1)], "max_steps"), ([(0, 1), (1, MOST)], "max_steps,end")):
            tensors: list[Any] = []
            for name, of in (
                ("digits", given[[row for row, _ in rows]]),
                ("most", np.array([most for _, most in rows])),
            ):
                tensors.append(TRITON_HTTP.InferInput(name, of.shape, "INT64"))
                tensors[-1].set_data_from_numpy(of, binary_data=binary)
            wanted = [TRITON_HTTP.InferRequestedOutput("token", binary_data=binary)]
            result = client.infer("counter", tensors, outputs=wanted)
            assert result.get_response()["parameters"] == {"ended": ended}
            body, length = TRITON_HTTP.InferenceServerClient.generate_request_body(tensors, outputs=wanted)
            headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
            status, head, _ = serving.server.ask("POST", "/v2/models/counter/infer", body, headers)
            assert (status, head["penstock-ended"]) == (200, ended)


def test_batches_say_why_each_answer_ended(serving: Serving) -> None:
    one = next(each for each in examples() if len(by_hand(each)) > 2)
    rows = [numbers(one | {"most": 2}), numbers(one)]
    for path, field, replies in (
        (ASK, "inputs", "outputs"),
        (ASK, "instances", "predictions"),
        ("/v1/models/counter:predict", "instances", "predictions"),
    ):
        status, head, answer = serving.server.ask("POST", path, json.dumps({field: rows}).encode())
        assert (status, head["penstock-ended"]) == (200, "max_steps,end")
        assert (set(answer), answer["ended"]) == ({replies, "ended"}, ["max_steps", "end"])
        assert [each["token"] for each in answer[replies]] == [by_hand(one)[:2], by_hand(one)]
    # A bare list has no place for it beside the replies.
    _, head, answer = serving.server.ask("POST", ASK, json.dumps(rows).encode(), {"Content-Type": "application/json"})
    assert (head["penstock-ended"], len(answer)) == ("max_steps,end", 2)


def test_the_metrics_count_outputs_and_their_times(serving: Serving) -> None:
    def read() -> dict[str, float]:
        lines = serving.server.ask("GET", "/metrics")[2].decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}

    label, one = '{app="counter",engine="0"}', next(each for each in examples() if len(by_hand(each)) > 2)
    before = read()
    assert serving.ask(one)[0] == 200
    after = read()
    for name, more in (
        ("generated_outputs_total", len(by_hand(one))),
        ("first_output_seconds_count", 1),
        ("step_seconds_count", len(by_hand(one)) - 1),
    ):
        assert after[f"penstock_{name}{label}"] - before[f"penstock_{name}{label}"] == more
    # The engine writes the count after it has handed over the answer.
    deadline = time.monotonic() + 10
    while read()[f"penstock_generating_rows{label}"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_client_yields_each_step_and_gives_the_reply_at_the_end(serving: Serving) -> None:
    one = next(each for each in examples() if len(by_hand(each)) > 2)
    with penstock.Client(f"http://{serving.address}") as client:
        steps = client.generate("counter", one)
        assert [step["token"] for step in steps] == by_hand(one)
        assert (steps.ended, steps.reply["token"]) == ("end", by_hand(one))
        assert client.predict("counter", one)["token"].tolist() == by_hand(one)
        assert client.ask("counter", one | {"most": 1})["ended"] == "max_steps"
        with pytest.raises(InvalidInput, match="most holds 0"):
            client.generate("counter", one | {"most": 0})
        with pytest.raises(ComputeFailed, match="network failed"):
            list(client.generate("counter", {"digits": [30, 1]}))
        start_s = time.monotonic()
        with client.generate("counter", digits(5) | {"seed": SLOWEST}) as slow:
            next(slow)
        assert time.monotonic() - start_s < 4, "closing cancels the answer"


def test_the_asynchronous_client_yields_steps_of_several_answers_at_once(serving: Serving) -> None:
    async def run() -> list[list[int]]:
        async with penstock.AsyncClient(f"http://{serving.address}") as client:

            async def tokens(number: int) -> list[int]:
                return [step["token"] async for step in await client.generate("counter", digits(9, number))]

            return await asyncio.gather(*map(tokens, range(5)))

    assert asyncio.run(run()) == [by_hand(digits(9, number)) for number in range(5)]


def test_a_websocket_has_a_message_for_each_step(serving: Serving) -> None:
    one = next(each for each in examples() if len(by_hand(each)) > 2)
    url = f"ws://{serving.address}{ASK}/stream"
    with connect(url) as socket_:
        socket_.send(json.dumps(numbers(one)))
        *steps, done = [json.loads(message) for message in socket_]
    assert [step["token"] for step in steps] == by_hand(one)
    assert (done["done"]["ended"], done["done"]["reply"]["token"]) == ("end", by_hand(one))
    for given, code, reason in (
        ({"digits": []}, 1007, "digits has 0 length"),
        ({"digits": [30, 1]}, 1011, "network failed on this input"),
    ):
        with connect(url) as socket_:
            socket_.send(json.dumps(given))
            with pytest.raises(ConnectionClosedError) as closed:
                list(socket_)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, reason in closed.value.rcvd.reason) == (code, True)
    with connect(url) as socket_:
        socket_.send(json.dumps(numbers(digits(5) | {"seed": SLOWEST})))
        socket_.recv()
    wait_until_idle(serving)


def wait_until_idle(serving: Serving) -> None:
    # To its end the slowest answer would take 50 steps of 150 ms.
    end_s = time.monotonic() + 4
    while serving.stats()["slots"]["in_use"]:
        assert time.monotonic() < end_s, "the row is still in progress"
        time.sleep(0.01)


def infer_input(given: dict[str, Any]) -> list[Any]:
    tensors: list[Any] = []
    for name, each in given.items():
        array = np.asarray(each, np.int64)
        tensors.append(TRITON_GRPC.InferInput(name, array.shape, "INT64"))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def test_tritons_grpc_stream_gives_a_response_for_each_step(serving: Serving) -> None:
    inputs = [digits(1 + number, number) for number in range(4)]
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with TRITON_GRPC.InferenceServerClient(serving.grpc) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        for number, each in enumerate(inputs):
            client.async_stream_infer("counter", infer_input(each), request_id=str(number))
        tokens: dict[str, list[int]] = {str(number): [] for number in range(4)}
        open_requests = set(tokens)
        while open_requests:
            result, error = results.get(timeout=10)
            assert error is None
            response = result.get_response()
            tokens[response.id].append(int(result.as_numpy("token")))
            if response.parameters["triton_final_response"].bool_param:
                assert response.parameters["ended"].string_param == "end"
                open_requests.discard(response.id)
        client.async_stream_infer("counter", infer_input({"digits": [30, 1]}))
        errors = [results.get(timeout=10)[1] for _ in range(4)]
        assert errors[:3] == [None] * 3
        assert "network failed on this input" in str(errors[3])
        client.async_stream_infer("counter", infer_input(digits(5) | {"seed": SLOWEST}))
        results.get(timeout=10)
        client.stop_stream(cancel_requests=True)
    wait_until_idle(serving)
    assert [tokens[str(number)] for number in range(4)] == [*map(by_hand, inputs)]


def test_grpc_infer_gives_the_whole_answer(serving: Serving) -> None:
    one = digits(9, 1)
    with TRITON_GRPC.InferenceServerClient(serving.grpc) as client:
        result = client.infer("counter", infer_input(one))
        assert result.get_response().parameters["ended"].string_param == "end"
        short = client.infer("counter", infer_input(one | {"most": 1}))
        assert short.get_response().parameters["ended"].string_param == "max_steps"
    assert result.as_numpy("token").tolist() == by_hand(one)


@pytest.mark.parametrize("body", ["raw", thorough("json")])
def test_the_load_generator_checks_whole_answers(serving: Serving, body: str) -> None:
    target = golden_target(f"http://{serving.address}", serving.bundle, body)
    result = measure(target, Load(rate=None, connections=4, seconds=0.3))
    assert (result.wrong, result.checked > 0) == (0, True)
