"""A network small enough to bundle in a millisecond, as an object and as the text of a user's app.py."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.application import Application
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.bundle_writer import Bundle

FOUR = TensorSpec(dtype="float32", shape=(4,), meaning="four numbers")
THREE = TensorSpec(dtype="float32", shape=(3,), meaning="scores", labels=("a", "b", "c"), name="scores")

APP_PY = """
from torch import nn

from penstock import Application, TensorSpec


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).tanh()


app = Application(
    name="small",
    description="Four numbers in, three out.",
    input=TensorSpec(dtype="float32", shape=(4,), meaning="four numbers"),
    output=TensorSpec(dtype="float32", shape=(3,), meaning="scores", labels=("a", "b", "c"), name="scores"),
    model=Small,
)
"""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.layer(x_BF).tanh()


def small(**changes: Any) -> Application:
    """The application as an object, with some fields changed."""
    fields: dict[str, Any] = {"name": "small", "input": FOUR, "output": THREE, "model": Small}
    return Application(**(fields | changes))


def examples(count: int = 5) -> Array:
    return np.random.default_rng(0).standard_normal((count, 4)).astype(np.float32)


def network(seed: int = 0) -> Small:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Small()


def write_app(folder: Path, text: str = APP_PY) -> Path:
    """Write a user's app.py into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "app.py"
    file.write_text(text)
    return file


def written(folder: Path, seed: int = 0, **changes: Any) -> Bundle:
    """Write a bundle of the object."""
    return Bundle.write(small(**changes), network(seed), examples(), to=folder)
