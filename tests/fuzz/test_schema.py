"""The server against openapi.yaml, with requests that schemathesis generates from it."""

from pathlib import Path

import pytest
import schemathesis
import yaml
from schemathesis import GenerationMode

from tests.support.openapi import check_answers, operations_of
from tests.support.serving import RunningServer

# Not through schemathesis's own plug-in, which needs an older pytest.
DOCUMENT = Path(__file__).with_name("openapi.yaml").read_text()
# Whatever is wrong in a request, a budget below a second is not.
SHORT = DOCUMENT.replace("minimum: 1000, maximum: 600000}", "exclusiveMinimum: 0, maximum: 600000}").replace(
    "minimum: 1000000, maximum: 600000000}", "minimum: 1, maximum: 600000000}"
)
OPERATIONS = {
    mode: operations_of(schemathesis.openapi.from_dict(yaml.safe_load(DOCUMENT if mode.is_positive else SHORT)))
    for mode in GenerationMode
}
# Without a parameter or a body there is nothing that could be wrong.
MODES = [(label, mode) for mode, found in OPERATIONS.items() for label in found if mode.is_positive or "{" in label]
CASES = 40


@pytest.mark.parametrize(("label", "mode"), MODES)
def test_every_answer_is_the_schemas(server: RunningServer, label: str, mode: GenerationMode) -> None:
    check_answers(server, OPERATIONS[mode][label], mode, CASES)
