"""Batches of applications with several inputs, of texts, without a decode, with single numbers, and of chains."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Bundle
from penstock.core.source_files.find_application import find_application
from tests.support.chained import answer, picture, write_chained
from tests.support.generating import SERVED, counter_bundle, examples
from tests.support.serving import RunningServer

JSON = {"Content-Type": "application/json"}
TIMED = {**JSON, "Penstock-Timing": "1"}
FROM_CURL = {"Content-Type": "application/x-www-form-urlencoded"}

# One of each kind: NAME is its name, INPUTS and DECODE its side of the requests.
APPLICATION = """
import numpy as np
from torch import nn
from penstock import Application, Dim, TensorSpec
from penstock.core.errors import InvalidInput

tokens = Dim("tokens", max=8)


class Sum(nn.Module):
    def forward(self, {arguments}):
        total = {total}
        return total.reshape(total.shape[0], -1).sum(1)


def decode(body, content_type):
    text = body.decode()
    if not text:
        raise InvalidInput("The text is empty; send at least one character.")
    return {{"ids": np.frombuffer(text[:8].encode("ascii"), np.uint8).astype(np.int64)}}


app = Application(
    name="{name}",
    {inputs},
    output=TensorSpec(dtype="float32", shape=(), meaning="their sum", name="sum"),
    model=Sum,
)
"""
KINDS = {
    "pair": (
        "inputs, weights",
        "inputs * weights",
        'inputs={"inputs": TensorSpec(dtype="float32", shape=(tokens,), meaning="numbers"),'
        ' "weights": TensorSpec(dtype="float32", shape=(tokens,), meaning="weights")}',
    ),
    "letters": (
        "ids",
        "ids.float()",
        'inputs={"ids": TensorSpec(dtype="int64", shape=(tokens,), meaning="letters")}, decode=decode,'
        ' accepts=("text/plain",)',
    ),
    "number": ("x", "x", 'input=TensorSpec(dtype="float32", shape=(), meaning="a number", name="x")'),
}


def write_bundle(folder: Path, name: str) -> str:
    arguments, total, inputs = KINDS[name]
    folder.mkdir()
    text = APPLICATION.format(name=name, arguments=arguments, total=total, inputs=inputs)
    (folder / "app.py").write_text(text)
    found = find_application(str(folder / "app.py"))
    ones: Any = {tensor: np.ones(3, spec.numpy_dtype) for tensor, spec in found.application.inputs.items()}
    given = [ones, ones] if name != "number" else np.ones(2, np.float32)
    Bundle.write(found, found.model(), given, to=folder / "bundle")
    return str(folder / "bundle")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("kinds")
    with RunningServer(None, *(write_bundle(folder / name, name) for name in KINDS)) as server:
        yield server


def ask(server: RunningServer, name: str, body: Any, headers: dict[str, str] = JSON) -> tuple[int, Any]:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, _, reply = server.ask("POST", f"/v1/apps/{name}", sent, headers)
    return status, reply if status == 200 else reply["error"]


def pair(*numbers: float) -> dict[str, list[float]]:
    return {"inputs": list(numbers), "weights": [2.0] * len(numbers)}


def test_rows_of_several_inputs_may_have_lengths_of_their_own(server: RunningServer) -> None:
    rows = [pair(1), pair(1, 2, 3), pair(5, 6)]
    assert ask(server, "pair", rows) == (200, [2, 12, 22])
    assert ask(server, "pair", {"instances": rows}) == (200, {"predictions": [2, 12, 22]})


def test_an_input_of_the_fields_name_makes_one_row(server: RunningServer) -> None:
    assert ask(server, "pair", pair(1, 2)) == (200, 6)
    assert ask(server, "pair", {"inputs": [pair(1), pair(2)]}) == (
        400,
        "The input 'weights' is missing; send 'inputs', 'weights'.",
    )


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ([pair(1), {"inputs": [1]}], "[1]: The input 'weights' is missing"),
        ([pair(1), {**pair(1), "mask": [1]}], "[1]: There is no input 'mask'"),
        ([pair(1), {"inputs": [1, 2], "weights": [1]}], "[1]: "),
        ([pair(1), [1]], "The input is a list"),
        ([pair(1), pair(*range(9))], "[1]: inputs has 9 tokens; it must have from 1 to 8"),
        (b'[{"inputs": [1], "weights": [1], "weights": [2]}]', "a name twice"),
        ([], "The input is a list"),
        ({"instances": []}, "0 rows; send at least one"),
    ],
)
def test_bad_rows_of_several_inputs(server: RunningServer, body: Any, sentence: str) -> None:
    status, error = ask(server, "pair", body)
    assert (status, sentence in error) == (400, True), error


def test_texts_are_rows_of_the_named_forms(server: RunningServer) -> None:
    sums = {text: sum(map(ord, text[:8])) for text in ("a", "hello", "a text that is cut")}
    assert ask(server, "letters", {"inputs": list(sums)}) == (200, {"outputs": list(sums.values())})
    reply = server.ask("POST", "/v1/models/letters:predict", json.dumps({"instances": [*sums, {"ids": [7]}]}).encode())
    assert reply[2] == {"predictions": [*sums.values(), 7]}
    assert ask(server, "letters", {"inputs": ["a", ""]}) == (
        400,
        "inputs[1]: The text is empty; send at least one character.",
    )
    # Its decode raises, which is the application's failure.
    assert ask(server, "letters", {"inputs": ["a", "é"]})[0] == 500


def test_what_curl_sends_to_an_application_of_texts_is_a_text(server: RunningServer) -> None:
    assert ask(server, "letters", b"hello", FROM_CURL) == (200, sum(b"hello"))


def test_single_numbers_are_rows_of_a_list(server: RunningServer) -> None:
    assert ask(server, "number", 3) == (200, 3)
    assert ask(server, "number", [3, 4, 5]) == (200, [3, 4, 5])
    assert ask(server, "number", {"inputs": [3]}) == (200, {"outputs": [3]})
    assert ask(server, "number", {"inputs": 3})[0] == 400


@pytest.mark.parametrize("headers", [FROM_CURL, {}])
def test_without_a_decode_json_needs_no_content_type(server: RunningServer, headers: dict[str, str]) -> None:
    assert ask(server, "number", {"inputs": [3, 4]}, headers) == (200, {"outputs": [3, 4]})
    assert ask(server, "number", [3, 4], headers) == (200, [3, 4])


def test_the_flag_of_curl_is_named_without_a_decode_too(server: RunningServer) -> None:
    for body in (b"a=1&b=2", b"three", b""):
        status, error = ask(server, "number", body, FROM_CURL)
        assert (status, error.endswith("send JSON with `-H 'Content-Type: application/json'`.")) == (415, True), error
        assert "curl" not in ask(server, "number", body, {"Content-Type": "text/plain"})[1]
    assert (
        "with `@in/rows-1.json` curl sends the file of that name"
        in ask(server, "number", b"in/rows-1.json", FROM_CURL)[1]
    )


def test_an_object_of_no_stated_type_is_json_where_there_is_no_decode(server: RunningServer) -> None:
    for headers in (FROM_CURL, {}, JSON):
        assert ask(server, "number", {"x": 3}, headers) == (200, 3)
        status, error = ask(server, "number", {"y": 3}, headers)
        assert status == 400
        assert 'not a number; send float32[] alone or as {"x": ...}' in error


def test_a_request_of_the_open_inference_protocol_is_sent_on(server: RunningServer) -> None:
    body = {"id": "1", "inputs": [{"name": "numbers", "shape": [1], "datatype": "FP32", "data": [3]}]}
    for name in ("number", "letters"):
        status, error = ask(server, name, body)
        assert (status, error.endswith(f"POST it to /v2/models/{name}/infer.")) == (400, True), error


@pytest.mark.thorough
def test_a_chain_takes_batches(tmp_path: Path) -> None:
    chained = write_chained(tmp_path, partial=False)
    marks = [[(1, 1)], [(1, 1), (4, 5), (7, 7)], [(2, 2), (5, 5)]]
    rows = [picture(*each).tolist() for each in marks]
    with RunningServer(None, *chained.arguments, "--frontends", "0") as server:
        for body, replies in ((rows, lambda found: found), ({"inputs": rows}, lambda found: found["outputs"])):
            found = replies(ask(server, "look", body)[1])
            assert [reply["weights"] for reply in found] == [answer(*each) for each in marks]
        found = server.ask("POST", "/v1/models/look:predict", json.dumps({"instances": rows}).encode())[2]
        assert [reply["weights"] for reply in found["predictions"]] == [answer(*each) for each in marks]
        said = server.ask("GET", "/v1/models/look")[2]
        assert (said["name"], said["ready"], said["id"]) == ("look", True, "look")
        # Its parts have times of their own.
        assert "server-timing" not in server.ask("POST", "/v1/apps/look", json.dumps(rows).encode(), TIMED)[1]
        status, error = ask(server, "look", {"inputs": [*rows, [[1]]]})
        assert (status, error[:11]) == (400, "inputs[3]: ")


@pytest.mark.thorough
def test_whole_answers_of_several_steps_come_as_a_batch(tmp_path: Path) -> None:
    bundle = counter_bundle(tmp_path / "bundle", SERVED)
    with RunningServer(bundle.folder, "--app", "tests.support.generating:SERVED", "--executor", "auto") as server:
        rows = [{name: np.asarray(each).tolist() for name, each in given.items()} for given in examples()[:3]]
        single = [ask(server, "counter", row)[1] for row in rows]
        ended = [reply.pop("ended") for reply in single]
        assert ask(server, "counter", {"inputs": rows}) == (200, {"outputs": single, "ended": ended})
        for body in (rows, rows[0]):
            status, headers, _ = server.ask("POST", "/v1/apps/counter", json.dumps(body).encode(), TIMED)
            assert (status, "server-timing" in headers) == (200, False)


def test_a_form_of_fields_is_told_how_curl_sends_json(server: RunningServer) -> None:
    status, said = ask(server, "pair", b"inputs=%5B1%5D&weights=%5B2%5D", FROM_CURL)
    assert status == 400
    assert said.endswith(
        "sends application/x-www-form-urlencoded; send JSON with `-H 'Content-Type: application/json'`."
    )
    # What is JSON but no input needs no other header.
    assert "curl" not in ask(server, "pair", b'{"inputs": [1]}', FROM_CURL)[1]
