"""The server against openapi.yaml, with requests that schemathesis generates from it."""

from pathlib import Path
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.support.serving import RunningServer

# Not through schemathesis's own plug-in, which needs an older pytest.
SCHEMA = schemathesis.openapi.from_path(Path(__file__).with_name("openapi.yaml"))
OPERATIONS: dict[str, Any] = {found.ok().label: found.ok() for found in cast(Any, SCHEMA.get_all_operations())}
# Without a parameter or a body there is nothing that could be wrong.
MODES = [(label, mode) for label in OPERATIONS for mode in GenerationMode if mode.is_positive or "{" in label]
CASES = 40


@pytest.mark.parametrize(("label", "mode"), MODES)
def test_every_answer_is_the_schemas(server: RunningServer, label: str, mode: GenerationMode) -> None:
    @settings(
        max_examples=CASES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(OPERATIONS[label].as_strategy(mode))
    def answers_as_it_says(case: Any) -> None:
        case.call_and_validate(f"http://{server.host}:{server.port}")

    answers_as_it_says()
