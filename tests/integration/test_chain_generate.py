"""A chain whose last part generates: whole answers, and events as they come."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Bundle, load_chain
from penstock.core.find_application import find_application
from tests.support.chained import picture, write_chained
from tests.support.generating import examples
from tests.support.serving import RunningServer

SPELL = "from tests.support.generating import SERVED as app\n"
CHAIN = """
import numpy as np
from penstock import Chain, ChainStep


def digits(results, picture):
    return {"digits": 1 + results["marks"]["corners"].astype(np.int64).sum(1)}


chain = Chain(name="tell", steps=(ChainStep(part="marks"), ChainStep(part="counter", feed=digits)))
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
    return [chained.marks, folder / "counter", folder / "tell.py", folder / "count.py"]


@pytest.fixture(scope="module")
def server(arguments: list[Path]) -> Iterator[RunningServer]:
    with RunningServer(None, *map(str, arguments), "--frontends", "0") as server:
        yield server


def expected(arguments: list[Path]) -> dict[str, np.ndarray[Any, Any]]:
    return load_chain(arguments[2], arguments[:2]).predict(picture(*MARKS))


def test_a_whole_answer_is_that_of_the_loaded_chain(server: RunningServer, arguments: list[Path]) -> None:
    body = json.dumps(picture(*MARKS).tolist()).encode()
    status, _, reply = server.ask("POST", "/v1/apps/tell", body, JSON)
    assert status == 200
    answer = expected(arguments)
    assert len(answer["token"]) > 1
    assert reply["token"] == answer["token"].tolist()
    assert np.allclose(reply["sums"], answer["sums"])


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
