"""Low priority of a request: a header, and a parameter of the Open Inference Protocol."""

from typing import Any

import orjson
import pytest

from penstock.core.errors import InvalidInput
from penstock.serve.exchange.budget import is_low_priority
from penstock.serve.exchange.request import Head, Request
from penstock.serve.http.oip_http import parse_infer
from tests.support.small import FOUR, THREE


def background(parameters: dict[str, Any]) -> bool:
    tensor = {"name": FOUR.name, "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    body = orjson.dumps({"inputs": [tensor], "parameters": parameters})
    return parse_infer(Request(Head("POST", "/v2/models/small/infer", {}), body), FOUR, THREE, 16).priority > 1


@pytest.mark.parametrize(
    ("text", "second"),
    [(None, False), ("interactive", False), ("background", True), ("Background", True), ("INTERACTIVE", False)],
)
def test_the_header_names_the_class(text: str | None, second: bool) -> None:
    assert is_low_priority(text) is second


@pytest.mark.parametrize("text", ["", "low", "1", "background, background", "hintergrund"])
def test_another_class_is_refused_with_the_two_that_there_are(text: str) -> None:
    with pytest.raises(InvalidInput, match="must be interactive or background"):
        is_low_priority(text)


@pytest.mark.parametrize(("priority", "second"), [(None, False), (0, False), (1, False), (2, True), (2**40, True)])
def test_the_parameter_counts_from_the_highest_and_0_is_the_servers_choice(priority: int | None, second: bool) -> None:
    assert background({} if priority is None else {"priority": priority}) is second


@pytest.mark.parametrize("priority", [-1, 1.5, "2", True, [2]])
def test_another_parameter_is_refused(priority: Any) -> None:
    with pytest.raises(InvalidInput, match="must be a whole number, 1 for the highest"):
        background({"priority": priority})
