"""The server against its own /openapi.json, with requests that schemathesis generates from it."""

from typing import Any

import pytest
import schemathesis
from schemathesis import GenerationMode

from tests.support.openapi import check_answers, operations_of
from tests.support.serving import RunningServer

CASES = 15
JSON = "application/json"


def without_maximum_of_rows(schema: Any) -> None:
    """Take the maximum of rows out: schemathesis counts 413 as no rejection."""
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        without_maximum_of_rows(inner)
    if isinstance(schema, dict) and schema.get("maxItems") != schema.get("minItems"):
        schema.pop("maxItems", None)


def operations(server: RunningServer, mode: GenerationMode) -> dict[str, Any]:
    """The operations of its document, with bodies of JSON alone: bytes of any other type may be any, or invalid."""
    document = server.ask("GET", "/openapi.json")[2]
    for path in document["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", []):
                # A server that answers at all answers within this. Shorter budgets are right too.
                if parameter["name"] == "Penstock-Latency-Ms" and mode.is_positive:
                    parameter["schema"] = {"type": "number", "minimum": 1000, "maximum": 600_000}
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]
                operation["requestBody"]["content"] = {JSON: content[JSON]}
                without_maximum_of_rows(content[JSON])
    return operations_of(schemathesis.openapi.from_dict(document))


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_the_documents(server: RunningServer, mode: GenerationMode) -> None:
    found = operations(server, mode)
    posts = [label for label in found if label.startswith("POST")]
    assert len(posts) == 2
    # Without a parameter or a body there is nothing that could be wrong.
    for label in found if mode.is_positive else posts:
        check_answers(server, found[label], mode, CASES)
