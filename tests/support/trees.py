"""Texts of varying length with named tensors, and a network whose outputs are a dictionary."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock import Application, Dim, TensorSpec
from penstock.core.record import RecordSpec
from penstock.train.data.examples import ArraySet

TOKENS = Dim("tokens", max=9)
APP = Application(
    name="text",
    inputs={
        "ids": TensorSpec(dtype="int64", shape=(TOKENS,), meaning="token ids", limits=(0, 9)),
        "mask": TensorSpec(dtype="float32", shape=(TOKENS,), meaning="1 for a token"),
    },
    output=TensorSpec(dtype="float32", shape=(2,), meaning="scores"),
    model=nn.Identity,
)
assert isinstance(APP.input, RecordSpec)
RECORD = APP.input


def texts(sizes: list[int], *, tags: bool = False) -> ArraySet:
    """Make texts whose label is the parity of the first token."""
    rng = np.random.default_rng(len(sizes))
    ids = [rng.integers(0, 10, size) for size in sizes]
    label = np.array([row[0] % 2 for row in ids])
    return ArraySet(
        inputs={"ids": ids, "mask": [np.ones(size, np.float32) for size in sizes]},
        targets={"label": label, "tags": [row % 2 for row in ids]} if tags else label,
    )


class Scores(nn.Module):
    """The mean of token scores, in a dictionary with the scores of each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Any]:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        tags = self.out(self.norm(hidden))
        first = tags[:, 0]
        return {"label": first, "tags": tags, "penalty": first.square().mean(), "extra": None, "kept": "a word"}
