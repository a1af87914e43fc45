"""Networks compiled in a process of their own while they are served, on a CPU: the cache, refusals and kills."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock
from penstock.runtime.execution import Execution
from penstock.runtime.executor import Executor
from penstock.runtime.gpu.compilation import CompiledBatch
from penstock.runtime.gpu.compile_ahead import CompileAhead
from penstock.runtime.gpu.compiled_files import compiled_file, refusal
from penstock.runtime.gpu.gpu_network import gpu_network
from penstock.runtime.gpu.precision import GpuWay
from penstock.runtime.load import Predictor, load
from penstock.runtime.streaming_executor import RunStep

pytestmark = [
    pytest.mark.slow,
    # Those of torch's compiler are its own.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs a C++ compiler for a CPU"),
]

APPLICATION = """
import torch
from torch import nn

from penstock import Application, TensorSpec


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, numbers):
        {before}
        return self.out(numbers * 2).relu()


app = Application(
    name="net",
    description="A linear layer.",
    input=TensorSpec(dtype="float32", shape=(4,), meaning="numbers"),
    output=TensorSpec(dtype="float32", shape=(3,), meaning="numbers"),
    model=Net,
)
"""
FP32 = GpuWay(precision="fp32")


class Taker(Executor):
    """Takes every step that it is offered, and runs it once."""

    def __init__(self, rows: list[int]) -> None:
        self.graph_rows = rows
        self.taken: dict[int, torch.Tensor] = {}

    def offer(self, rows: int, run: RunStep) -> float | None:
        zeros = torch.zeros(rows, dtype=torch.int64)
        with torch.inference_mode():
            self.taken[rows] = run(torch.ones(rows, 4), zeros, (), zeros != 0).output_BU
        return 1.0

    def step(self, batch: object) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError


def bundled(folder: Path, before: str = "pass") -> Predictor:
    file = folder / "app.py"
    file.write_text(APPLICATION.format(before=before))
    found = penstock.core.source_files.find_application.find_application(str(file))
    torch.manual_seed(0)
    inputs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    penstock.Bundle.write(found, found.model(), inputs, to=folder / "bundle")
    return load(folder / "bundle")


def ahead_of(predictor: Predictor, place: Path) -> tuple[CompileAhead, Taker]:
    application, how = predictor.application, Execution(cache=place, cores=1, device="cpu")
    network = gpu_network(predictor.module, application.input, application.output, FP32, "cpu")
    taker = Taker([1, 4])
    return CompileAhead(taker, network, predictor, how, FP32, place), taker  # pyright: ignore[reportArgumentType]


def test_batches_are_compiled_once_checked_and_compiled_again_if_a_file_is_damaged(tmp_path: Path) -> None:
    predictor, place = bundled(tmp_path), tmp_path / "cache"
    ahead, taker = ahead_of(predictor, place)
    assert ahead.sizes(largest=1) == [1, 4]
    assert ahead.sizes(largest=4) == [4, 1]
    assert list(ahead.batches([4, 1])) == [CompiledBatch(4, 1.0), CompiledBatch(1, 1.0)]
    expected = predictor.predict(np.ones((1, 4), np.float32))
    for rows, found in taker.taken.items():
        assert found.shape == (rows, 3)
        np.testing.assert_allclose(found.numpy(), np.repeat(expected, rows, 0), atol=1e-5)
    assert ahead.reason == ""
    # From the files: no process is started.
    again, taker = ahead_of(predictor, place)
    again._results = None  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    assert [batch.rows for batch in again.batches([4, 1])] == [4, 1]
    # A damaged file is removed, said, and made anew at the next start.
    file = compiled_file(place, FP32, 4)
    file.write_bytes(file.read_bytes()[:100])
    damaged, _ = ahead_of(predictor, place)
    assert [batch.rows for batch in damaged.batches([4, 1])] == [1]
    assert "cannot be loaded" in damaged.reason
    anew, _ = ahead_of(predictor, place)
    assert sorted(batch.rows for batch in anew.batches([4, 1])) == [1, 4]


def test_a_network_that_cannot_be_recorded_is_named_and_not_tried_again(tmp_path: Path) -> None:
    # It depends on a number in a tensor, so that it could not be captured either.
    predictor, place = (
        bundled(tmp_path, "numbers = numbers if float(numbers.sum()) > 0 else numbers * 1"),
        tmp_path / "c",
    )
    ahead, taker = ahead_of(predictor, place)
    assert list(ahead.batches([4])) == []
    assert taker.taken == {}
    assert ahead.reason != ""
    assert refusal(compiled_file(place, FP32, 4)).rstrip(".") == ahead.reason
    again, _ = ahead_of(predictor, place)
    again._results = None  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    assert list(again.batches([4])) == []
    assert again.reason == ahead.reason


def test_what_an_application_prints_is_not_taken_for_a_result(tmp_path: Path) -> None:
    predictor = bundled(tmp_path, "print('a network that prints')")
    ahead, _ = ahead_of(predictor, tmp_path / "cache")
    assert list(ahead.batches([1])) == [CompiledBatch(1, 1.0)]
    assert ahead.reason == ""


def test_a_batch_that_fails_where_it_is_used_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, place = bundled(tmp_path), tmp_path / "cache"
    ahead, _ = ahead_of(predictor, place)
    assert [batch.rows for batch in ahead.batches([1])] == [1]
    file = compiled_file(place, FP32, 1)

    def offer(error: Exception) -> Callable[[int, RunStep], float]:
        def raises(rows: int, run: RunStep) -> float:
            raise error

        return raises

    # The memory may suffice at the next start; a size that does not fit never will.
    for error, kept in ((torch.OutOfMemoryError("no memory"), True), (AssertionError("expected size 3 == 4"), False)):
        ahead, taker = ahead_of(predictor, place)
        monkeypatch.setattr(taker, "offer", offer(error))
        assert list(ahead.batches([1])) == []
        assert ahead.reason == str(error)
        assert file.is_file() == kept


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    predictor = bundled(tmp_path)
    (tmp_path / "file").write_text("")
    ahead, _ = ahead_of(predictor, tmp_path / "file" / "cache")
    assert list(ahead.batches([4])) == []
    assert "cannot be used" in ahead.reason


def test_closing_ends_the_compiler(tmp_path: Path) -> None:
    ahead, taker = ahead_of(bundled(tmp_path), tmp_path / "cache")
    ahead.close()
    assert list(ahead.batches([4, 1])) == []
    assert taker.taken == {}
