"""A server whose network accepts every input of its spec, so that every fault is the server's."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import Bundle
from penstock.core.source_files.find_application import find_application
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


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bounded")
    (folder / "app.py").write_text(APPLICATION)
    found = find_application(str(folder / "app.py"))
    Bundle.write(found, found.model(), np.zeros((1, 4), np.float32), to=folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="session")
def server(bundle: Path) -> Iterator[RunningServer]:
    """A server with a latency budget that holds on a busy machine."""
    with RunningServer(bundle) as server:
        yield server
