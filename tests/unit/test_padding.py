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


def test_examples_of_one_length_are_enough_to_find_it(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match="depends on padding: computed alone"):
        write(PaddedMean, tmp_path, 4, 4, 4)
    write(Mean, tmp_path, 4, 4, 4)


class Even(Mean):
    def forward(self, ids: Tensor, tokens: Tensor) -> Tensor:
        assert int(tokens.min()) >= 4, "a text of fewer words"
        return super().forward(ids, tokens)


def test_a_network_that_fails_on_shorter_ones_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(Even, tmp_path, 4, 4)
    assert "whether the network depends on padding is not known" in caplog.text
    assert "AssertionError: a text of fewer words" in caplog.text


def test_the_shortest_possible_examples_are_taken_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(PaddedMean, tmp_path, 1, 1)
    assert not caplog.text
