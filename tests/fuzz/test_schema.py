"""What the server takes and answers is what openapi.yaml says, for requests that schemathesis makes of that schema."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from penstock import Bundle
from penstock.core.application import find_application
from tests.support.serving import RunningServer

# Finite for whatever is finite, so that no number that the schema allows is a fault of the network.
APPLICATION = """
import torch
from torch import nn

from penstock import Application, TensorSpec


class Bounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x.tanh() * self.factor


app = Application(
    name="bounded",
    input=TensorSpec(dtype="float32", shape=(4,), meaning="four numbers", name="numbers"),
    output=TensorSpec(dtype="float32", shape=(4,), meaning="their bounds", name="bounds"),
    max_body_bytes=1 << 16,
    model=":Bounded",
)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("bounded")
    (folder / "app.py").write_text(APPLICATION)
    found = find_application(str(folder / "app.py"))
    Bundle.write(found, found.model(), np.zeros((1, 4), np.float32), to=folder / "bundle")
    # A budget that a busy machine keeps.
    with RunningServer(folder / "bundle", "--latency-ms", "5000") as server:
        yield server


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
