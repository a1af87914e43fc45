"""A network whose answer depends on padding is found when its bundle is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from penstock import Application, Bundle, Dim, TensorSpec
from penstock.core.errors import ApplicationError

TOKENS = Dim("tokens", max=8)
IDS = TensorSpec(dtype="int64", shape=(TOKENS,), meaning="ids")
MEAN = TensorSpec(dtype="float32", shape=(), meaning="mean of the ids")


class PaddedMean(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids.float().mean(1)


class Mean(nn.Module):
    def forward(self, ids: Tensor, tokens: Tensor) -> Tensor:
        return ids.float().sum(1) / tokens


def write(model: type[nn.Module], folder: Path, *lengths: int) -> Any:
    application = Application(name="mean", inputs={"ids": IDS}, outputs={"mean": MEAN}, model=model)
    return Bundle.write(application, model(), [{"ids": np.arange(1, n + 1)} for n in lengths], to=folder / "bundle")


def test_a_network_that_counts_padding_is_refused(tmp_path: Path) -> None:
    sentence = "depends on padding: computed alone, the network's answers differ .* which a parameter of its name gives"
    with pytest.raises(ApplicationError, match=sentence):
        write(PaddedMean, tmp_path, 3, 5)
    assert not (tmp_path / "bundle").exists()


def test_a_network_that_takes_the_lengths_is_not(tmp_path: Path) -> None:
    write(Mean, tmp_path, 1, 3, 5, 8)
