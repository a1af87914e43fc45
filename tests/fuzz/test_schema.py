"""The server against openapi.yaml, with requests that schemathesis generates from it."""

from pathlib import Path

import pytest
import schemathesis
from schemathesis import GenerationMode

from tests.support.openapi import check_answers, operations_of
from tests.support.serving import RunningServer

# Not through schemathesis's own plug-in, which needs an older pytest.
SCHEMA = schemathesis.openapi.from_path(Path(__file__).with_name("openapi.yaml"))
OPERATIONS = operations_of(SCHEMA)
# Without a parameter or a body there is nothing that could be wrong.
MODES = [(label, mode) for label in OPERATIONS for mode in GenerationMode if mode.is_positive or "{" in label]
CASES = 40


@pytest.mark.parametrize(("label", "mode"), MODES)
def test_every_answer_is_the_schemas(server: RunningServer, label: str, mode: GenerationMode) -> None:
    check_answers(server, OPERATIONS[label], mode, CASES)
