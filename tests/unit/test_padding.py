"""A network whose answer depends on padding is found when its bundle is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from penstock import Application, Bundle, Dim, Generate, TensorSpec
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
    sentence = (
        "depends on padding .*: computed alone, the network's answers differ .* which a parameter of its name gives"
    )
    with pytest.raises(ApplicationError, match=sentence):
        write(PaddedMean, tmp_path, 3, 5)
    assert not (tmp_path / "bundle").exists()


def test_a_network_that_takes_the_lengths_is_not(tmp_path: Path) -> None:
    write(Mean, tmp_path, 1, 3, 5, 8)


def test_examples_of_one_length_are_enough_to_find_it(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match=r"depends on padding .*: computed alone"):
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
    write(Mean, tmp_path, 1, 1)
    assert not caplog.text


@pytest.mark.parametrize("lengths", [[1], [1, 1], [1, 1, 1], [2, 2]])
def test_a_length_of_one_is_compared_with_the_network_at_that_length(tmp_path: Path, lengths: list[int]) -> None:
    """Executors pad a lone row of length 1 to 2, so that two padded answers would agree."""
    with pytest.raises(ApplicationError, match=r"depends on padding .*: computed alone"):
        write(PaddedMean, tmp_path, *lengths)
    write(Mean, tmp_path, *lengths)


class Pairs(nn.Module):
    """The largest sum of two neighbours: it takes no single id, and a zero does not change it."""

    def forward(self, ids: Tensor) -> Tensor:
        return ids.float().unfold(1, 2, 1).sum(2).amax(1)


def test_a_network_that_cannot_do_without_the_padding_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(Pairs, tmp_path, 1, 2, 5)
    assert (
        "whether the network depends on padding is not known: it fails on an example that is not padded" in caplog.text
    )


class Variance(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return (ids - ids.float().mean(1, keepdim=True)).square().sum(1) / (ids.shape[1] - 1)


def test_an_answer_that_is_finite_by_its_padding_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match="computed alone, example 0 is answered with NaN or infinity"):
        write(Variance, tmp_path, 1, 1)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze()


def write_rows(model: type[nn.Module], folder: Path) -> Any:
    application = Application(
        name="rows",
        input=TensorSpec(dtype="float32", shape=(3,), meaning="numbers"),
        output=TensorSpec(dtype="float32", shape=(3,), meaning="numbers"),
        model=model,
    )
    examples = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    return Bundle.write(application, model(), examples, to=folder / "bundle")


def test_a_network_that_mixes_rows_is_refused(tmp_path: Path) -> None:
    sentence = (
        "depends on the other rows of its batch: computed alone, the network's answers differ .*each row by itself"
    )
    with pytest.raises(ApplicationError, match=sentence):
        write_rows(Centred, tmp_path)
    write_rows(Normed, tmp_path)


def test_a_network_that_takes_no_single_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match=r"gives float32\[3\] for 1 chunks, but its output is declared as"):
        write_rows(Squeezed, tmp_path)


class Counter(nn.Module):
    """Counts up from a number, in steps of the largest of the batch if `mixes`."""

    mixes = True

    def begin(self, start: Tensor) -> dict[str, Tensor]:
        return {"k": start}

    def step(self, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        k = state["k"]
        k = k + (k.max() if self.mixes else 1)
        return k, {"k": k}, k > 100


class Alone(Counter):
    mixes = False


class PageMean(nn.Module):
    """Answers with the mean of its memory, in which a step has room for more entries than there are."""

    counts_padding = True

    def begin(self, ids: Tensor) -> dict[str, Tensor]:
        return {"memory": ids.float()}

    def step(self, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        memory = state["memory"]
        mean = memory.mean(1) if self.counts_padding else memory.sum(1) / state["tokens"]
        return mean, {"memory": memory}, mean > -1


class MemoryMean(PageMean):
    counts_padding = False


def write_steps(model: type[nn.Module], folder: Path, examples: list[Any], input: TensorSpec, state: TensorSpec) -> Any:
    application = Application(
        name="steps",
        inputs={"ids" if input.dims else "start": input},
        output=TensorSpec(dtype=state.dtype, shape=(), meaning="number"),
        generate=Generate(state={"memory" if input.dims else "k": state}, max_steps=8),
        model=model,
    )
    name = "ids" if input.dims else "start"
    given: Any = [{name: each} for each in examples] if input.dims else np.array(examples)
    return Bundle.write(application, model(), given, to=folder / "bundle")


def test_an_answer_in_steps_that_mixes_rows_is_refused(tmp_path: Path) -> None:
    number = TensorSpec(dtype="int64", shape=(), meaning="number")
    with pytest.raises(ApplicationError, match=r"depends on the other rows of its batch: computed alone, .*; compute"):
        write_steps(Counter, tmp_path, [3, 90], number, number)
    write_steps(Alone, tmp_path, [3, 90], number, number)


def test_the_room_of_a_state_is_padding_too(tmp_path: Path) -> None:
    """A step's tensors have whole pages, so that all examples within a page are padded to the same room."""
    memory = TensorSpec(dtype="float32", shape=(Dim("tokens", max=40),), meaning="memory")
    ids = TensorSpec(dtype="int64", shape=(Dim("tokens", max=40),), meaning="ids")
    examples = [np.arange(1, n + 1) for n in (2, 3, 5)]
    with pytest.raises(ApplicationError, match=r"depends on padding .*: computed alone, "):
        write_steps(PageMean, tmp_path, examples, ids, memory)
    write_steps(MemoryMean, tmp_path, examples, ids, memory)
