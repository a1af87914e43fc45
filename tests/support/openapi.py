"""Requests that schemathesis generates from a document of OpenAPI."""

from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.support.serving import RunningServer


def operations_of(schema: Any) -> dict[str, Any]:
    """The operations of a document, by label such as `GET /v2`."""
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


def no_failure(context: Any, response: Any, case: Any) -> None:
    """Check that the server did not fail, see schemathesis's `CheckFunction`."""
    assert response.status_code not in (500, 501, 502), response.text


def check_answers(server: RunningServer, operation: Any, mode: GenerationMode, cases: int) -> None:
    """Send generated requests to one operation; every answer must be one that the document names."""

    @settings(
        max_examples=cases,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(operation.as_strategy(mode))
    def answers_as_it_says(case: Any) -> None:
        case.call_and_validate(
            f"http://{server.host}:{server.port}",
            additional_checks=[no_failure],
            # Of the server errors, a busy machine gives 503, which the documents name.
            excluded_checks=[not_a_server_error],
        )

    answers_as_it_says()
