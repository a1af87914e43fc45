"""The OpenAPI document of several kinds of applications: valid schemas, which take what the server takes."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest

from penstock.core.application import Application
from penstock.core.dim import Dim
from penstock.core.spec import TensorSpec
from penstock.serve.http.openapi import document
from tests.support.generating import COUNTER
from tests.support.small import FOUR, THREE, small

JSON = "application/json"
TOKENS = Dim("tokens", max=4)
NAMED = Application(
    name="named",
    inputs={
        "inputs": TensorSpec(dtype="int64", shape=(TOKENS,), meaning="ids", limits=(0, 9)),
        "seed": TensorSpec(dtype="uint8", shape=(), meaning="seed", default=0),
    },
    outputs={"mood": TensorSpec(dtype="float32", shape=(2,), meaning="mood")},
    model=object,
)
TEXTS = small(name="texts", decode=bytes, accepts=("text/plain",), reply=str)
OWN_JSON = small(name="own", decode=bytes, accepts=("application/json", "image/png"))
BITS = Application(
    name="bits",
    input=TensorSpec(dtype="bool", shape=(2,), meaning="bits"),
    output=TensorSpec(dtype="bool", shape=(2,), meaning="bits"),
    model=object,
)


def described(*applications: Application, takes_keys: bool = False) -> dict[str, Any]:
    served: Any = [
        SimpleNamespace(name=each.name, application=each, shows=each.shows, max_rows=3) for each in applications
    ]
    return document(served, takes_keys=takes_keys)


def post(found: dict[str, Any], path: str) -> dict[str, Any]:
    return found["paths"][path]["post"]


def schemas(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if "schema" in value:
            yield value["schema"]
        for inner in value.values():
            yield from schemas(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from schemas(inner)


def test_every_schema_is_valid_and_every_operation_has_a_name_of_its_own() -> None:
    found = described(small(), NAMED, TEXTS, OWN_JSON, BITS)
    for schema in schemas(found["paths"]):
        assert schema == {"$ref": "#/components/schemas/Error"} or jsonschema_rs.meta.is_valid(schema)
    names = [operation["operationId"] for path in found["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names) == 3 + 5 * 4


@pytest.mark.parametrize(
    ("application", "good", "bad"),
    [
        (
            small(),
            [
                [1, 2, 3, 4.5],
                [[1, 2, 3, 4]],
                {"inputs": [[1, 2, 3, 4]] * 3},
                {"instances": [[1, 2, 3, 4]]},
                {"input": [1, 2, 3, 4]},
                [{"input": [1, 2, 3, 4]}],
                {"inputs": [{"input": [1, 2, 3, 4]}]},
            ],
            [
                [1, 2, 3],
                [],
                [["1", 2, 3, 4]],
                {"inputs": []},
                {"inputs": [[1, 2, 3, 4]] * 4},
                [1, 2, 3, 1e39],
                {},
                {"input": [1, 2, 3]},
                {"input": [1, 2, 3, 4], "other": 1},
                {"inputs": [{"other": [1, 2, 3, 4]}]},
            ],
        ),
        (
            NAMED,
            [{"inputs": [1]}, {"inputs": [1, 9], "seed": 255}, [{"inputs": [1]}], {"instances": [{"inputs": [1]}]}],
            [{"seed": 1}, {"inputs": [10]}, {"inputs": [1] * 5}, {"inputs": [1], "seed": 256}, {"inputs": [[1]]}],
        ),
        (TEXTS, [{"inputs": ["a", [1, 2, 3, 4]]}, [1, 2, 3, 4]], ["a", ["a"], {"inputs": [1]}]),
        (BITS, [[0, True], [[1, 0]]], [[2, 0], [0.5, 0]]),
    ],
)
def test_bodies_that_are_taken_are_valid(application: Application, good: list[Any], bad: list[Any]) -> None:
    content = post(described(application), f"/v1/apps/{application.name}")["requestBody"]["content"]
    validator = jsonschema_rs.validator_for(content[JSON]["schema"])
    assert [body for body in good if not validator.is_valid(body)] == []
    assert [body for body in bad if validator.is_valid(body)] == []


def test_content_types_are_those_that_are_taken() -> None:
    def taken(application: Application) -> set[str]:
        return set(post(described(application), f"/v1/apps/{application.name}")["requestBody"]["content"])

    plain = {JSON, "multipart/form-data", "application/octet-stream"}
    assert taken(small()) == plain
    assert taken(TEXTS) == plain | {"text/plain"}
    assert taken(OWN_JSON) == plain | {"image/png"}
    assert taken(NAMED) == {JSON, "multipart/form-data"}


def test_replies_are_described_unless_the_application_makes_them() -> None:
    def reply(application: Application) -> Any:
        found = post(described(application), f"/v1/models/{application.name}:predict")
        return found["responses"]["200"]["content"][JSON]["schema"]

    assert jsonschema_rs.is_valid(reply(small()), {"predictions": [[1.5, 2, 3]]})
    assert not jsonschema_rs.is_valid(reply(small()), {"predictions": [[1.5, 2]]})
    assert jsonschema_rs.is_valid(reply(NAMED), {"predictions": [[1, 2]]})
    assert jsonschema_rs.is_valid(reply(TEXTS), {"predictions": ["any", {"JSON": 1}]})


def test_replies_that_take_steps_say_why_they_ended() -> None:
    found = described(COUNTER)
    schema = post(found, "/v1/models/counter:predict")["responses"]["200"]["content"][JSON]["schema"]
    assert jsonschema_rs.is_valid(schema, {"predictions": [{"token": [1]}], "ended": ["max_steps"]})
    assert not jsonschema_rs.is_valid(schema, {"predictions": [{"token": [1]}]})
    assert "text/event-stream" in post(found, "/v1/apps/counter")["responses"]["200"]["content"]


def test_keys_are_described_where_they_are_needed() -> None:
    assert described(small(), takes_keys=True)["security"] == [{"key": []}]
    assert "security" not in described(small())


def test_units_and_meaning_are_in_the_description() -> None:
    spec = TensorSpec(dtype="float32", shape=(4,), meaning="speech", units="volts")
    content = post(described(small(input=spec)), "/v1/apps/small")["requestBody"]["content"]
    assert content[JSON]["schema"]["anyOf"][0]["description"] == "speech, volts"
    assert FOUR.units == THREE.units == ""
