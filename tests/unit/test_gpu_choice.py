"""The choice of a way to run a network on a GPU, with executors that run it on a CPU instead."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock import Application, Bundle, Dim, Finish, Live, TensorSpec
from penstock.core.bundles.bundle import BundleFiles, read_bundle
from penstock.core.errors import ApplicationError, GoldenMismatch, ServeError
from penstock.core.spec import Array
from penstock.nn.recurrent import GRU
from penstock.nn.streaming import FrameWise, Sequential
from penstock.runtime.execution import Execution
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.runtime.gpu import gpu_choice, gpu_network
from penstock.runtime.gpu.compile_records import CompileRecords
from penstock.runtime.gpu.gpu_choice import CHOICES, gpu_runnable
from penstock.runtime.gpu.graph_cache import GraphShapes
from penstock.runtime.load import as_found
from penstock.runtime.runnable import Runnable
from penstock.runtime.streaming_executor import StreamingExecutor
from penstock.runtime.torch_executor import TorchExecutor

POINT = TensorSpec(dtype="float32", shape=(4,), meaning="numbers")
SCORES = TensorSpec(dtype="float32", shape=(3,), meaning="scores", labels=("a", "b", "c"))
NUMBERS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def eager(network: Any, *, max_rows: int, **_: Any) -> StreamingExecutor:
    """Stands in for the executor of CUDA graphs."""
    return StreamingExecutor(network, max_rows=max_rows)


class EagerRecords(Executor):
    """Stands in for the executor of CUDA graphs by rows and length."""

    def __init__(
        self, network: Any, input: Any, output: Any, *, max_rows: int, device: str, limit_bytes: int, timed: bool
    ) -> None:
        self.input, self.output, self.max_rows = input, output, max_rows
        self._eager = TorchExecutor(network.network.module, input, output, max_rows)
        self._eager._network = network
        self.captured: list[int] = []
        self.timed, self.graphs, self.shapes = timed, 3, GraphShapes([], max_rows)

    def step(self, batch: StepInput) -> StepOutput:
        return self._eager.step(batch)

    def predict(self, chunk_B: Array) -> Array:
        return self._eager.predict(chunk_B)

    def capture_for(self, chunk_B: Array) -> None:
        self.captured.append(len(chunk_B))

    def capture_grid(self) -> None:
        self.captured.append(-1)


@pytest.fixture(autouse=True)
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A machine with a GPU that is a CPU; returns the milliseconds that each precision takes, to be changed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(gpu_choice, "CudaGraphExecutor", eager)
    monkeypatch.setattr(gpu_choice, "RecordGraphExecutor", EagerRecords)
    times_ms = {"fp32": 4.0, "tf32": 3.0, "bf16": 1.0, "fp16": 1.0}
    tried: list[str] = []
    named = gpu_choice._named

    def noted(application: Any, way: Any, device: str) -> Any:
        tried.append(way.precision)
        return named(application, way, device)

    monkeypatch.setattr(gpu_choice, "_named", noted)
    monkeypatch.setattr(gpu_choice, "_ms", lambda _: times_ms[tried[-1]])
    return times_ms


def bundled(folder: Path, network: Callable[[], nn.Module], examples: Any = NUMBERS, **given: Any) -> Any:
    fields: dict[str, Any] = given if "inputs" in given else {"input": POINT, "output": SCORES} | given
    torch.manual_seed(0)
    made = network().eval()
    application = Application(name="net", description="A network.", model=lambda: made, **fields)
    Bundle.write(as_found(application), made, examples, to=folder / "bundle")
    return read_bundle(folder / "bundle"), application


def served(files: BundleFiles, application: Application, folder: Path, precision: str = "auto", **how: Any) -> Runnable:
    execution = Execution(cache=folder / "cache", cores=1, device="cpu", precision=precision, **how)
    return gpu_runnable(files, as_found(application), execution, slots=8)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def test_auto_takes_the_fastest_and_remembers_it(
    tmp_path: Path, simulated_gpu: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    files, application = bundled(tmp_path, linear)
    with caplog.at_level(logging.INFO):
        assert served(files, application, tmp_path).runs_by == "torch in bf16"
    assert "a batch takes fp32 4.00 ms, tf32 3.00 ms, bf16 1.00 ms; chosen is bf16" in caplog.text
    (remembered,) = (tmp_path / "cache" / "gpu").glob("*/" + CHOICES.format(precision="auto"))
    assert json.loads(remembered.read_text())["precision"] == "bf16"
    simulated_gpu["bf16"] = 100.0
    assert served(files, application, tmp_path).runs_by == "torch in bf16"
    for damaged in ("{", json.dumps({"precision": "bf16", "colour": 3}), '{"precision": "int3"}'):
        remembered.write_text(damaged)
        caplog.clear()
        assert served(files, application, tmp_path).runs_by == "torch in tf32"
        assert "is tried anew" in caplog.text


def test_the_more_accurate_of_two_that_are_as_fast_is_taken(tmp_path: Path, simulated_gpu: dict[str, float]) -> None:
    simulated_gpu.update(fp32=1.0, tf32=0.99, bf16=0.96)
    files, application = bundled(tmp_path, linear)
    assert served(files, application, tmp_path).runs_by == "torch in fp32"


class Cancels(nn.Module):
    """The difference of two large numbers, of which bf16 keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        nn.init.constant_(self.out.bias, 1000.0)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.out(numbers) - 1000.0


def test_a_precision_that_loses_too_much_is_left_out_and_refused_by_name(tmp_path: Path) -> None:
    files, application = bundled(tmp_path, Cancels)
    assert served(files, application, tmp_path).runs_by == "torch in tf32"
    with pytest.raises(GoldenMismatch, match=r"^in bf16, by autocast with fp32 weights on cpu, .* differ"):
        served(files, application, tmp_path, "bf16")


class Close(nn.Module):
    """Two scores that differ by less than bf16 resolves, beside a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            self.out.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [1.003, 0, 0, 0], [-9.0, 0, 0, 0]]))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.out(numbers)


def test_auto_leaves_a_precision_out_that_names_another_label(tmp_path: Path) -> None:
    examples = np.abs(NUMBERS)
    files, application = bundled(tmp_path, Close, examples)
    assert served(files, application, tmp_path).runs_by == "torch in tf32"
    # By name, the tolerance alone counts.
    assert served(files, application, tmp_path, "bf16").runs_by == "torch in bf16"


class KeepsWeights(nn.Module):
    """Loses its answer where a weight outside of products is converted."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.tensor(1000.3))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.out(numbers).float() + (self.shift.float() - 1000.3)


def test_weights_stay_in_fp32_where_that_is_needed(tmp_path: Path) -> None:
    files, application = bundled(tmp_path, KeepsWeights)
    assert served(files, application, tmp_path, "bf16").runs_by == "torch in bf16, by autocast with fp32 weights"


def test_convolutions_work_channels_last_where_that_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten())  # noqa: E731
    files, application = bundled(tmp_path, network)
    times_ms = iter([1.0, 0.9])
    monkeypatch.setattr(gpu_choice, "_ms", lambda _: next(times_ms))
    assert served(files, application, tmp_path, "bf16").runs_by == "torch in bf16, channels last"
    # Remembered: the next start tries that layout alone.
    times_ms = iter([1.0])
    assert served(files, application, tmp_path, "bf16").runs_by == "torch in bf16, channels last"
    times_ms = iter([1.0, 0.99])
    assert served(files, application, tmp_path / "other", "bf16").runs_by == "torch in bf16"


class Raises(nn.Module):
    """Cannot run in a reduced precision, and says why in two lines."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, numbers: Tensor) -> Tensor:
        found = self.out(numbers)
        if found.dtype != torch.float32:
            raise RuntimeError("expected Float\nbut found BFloat16.")
        return found


def test_a_network_that_raises_in_a_precision_is_named(tmp_path: Path) -> None:
    files, application = bundled(tmp_path, Raises)
    with pytest.raises(ApplicationError, match=r"'net' cannot run in bf16.* \(RuntimeError: expected Float but found"):
        served(files, application, tmp_path, "bf16")
    assert served(files, application, tmp_path).runs_by == "torch in tf32"


def test_live_networks_are_converted_whole(tmp_path: Path) -> None:
    files, application = bundled(
        tmp_path,
        lambda: Sequential(GRU(4, 3)),
        np.random.default_rng(0).normal(size=(3, 10, 4)).astype(np.float32),
        input=TensorSpec(dtype="float32", shape=(5, 4), meaning="frames"),
        output=TensorSpec(dtype="float32", shape=(5, 3), meaning="scores"),
        live=Live(rate_hz=10),
        chunks=4,
    )
    runnable = served(files, application, tmp_path)
    assert runnable.runs_by == "torch in bf16"
    assert runnable.slots == 8
    assert isinstance(runnable.executor, StreamingExecutor)
    assert {leaf.dtype for leaf in runnable.executor.states.save(0)} == {torch.bfloat16}


TOKENS = Dim("tokens", max=8)


class Sums(nn.Module):
    """A sum of tokens of any number."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 3)

    def forward(self, words: Tensor, tokens: Tensor) -> Tensor:
        keep = torch.arange(words.shape[1]) < tokens[:, None]
        return self.out((words * keep[..., None]).sum(1))


def test_networks_of_any_length_take_the_same_way(tmp_path: Path) -> None:
    words = TensorSpec(dtype="float32", shape=(TOKENS, 2), meaning="vectors")
    examples = [{"words": np.full((length, 2), length, np.float32)} for length in (1, 3, 8)]
    files, application = bundled(tmp_path, Sums, examples, inputs={"words": words}, outputs={"scores": SCORES})
    runnable = served(files, application, tmp_path)
    assert runnable.runs_by == "torch in bf16"
    assert isinstance(runnable.executor, EagerRecords)
    assert runnable.executor.captured == [-1]
    assert not runnable.executor.timed
    assert runnable.compile_ahead is None
    compiled = served(files, application, tmp_path, compile=True)
    assert isinstance(compiled.executor, EagerRecords)
    assert compiled.executor.timed
    assert isinstance(compiled.compile_ahead, CompileRecords)


class Best(nn.Module):
    """The largest score."""

    def forward(self, scores: Tensor) -> Tensor:
        return scores.max(1, keepdim=True).values


def test_the_inputs_of_a_finish_are_checked_too(tmp_path: Path) -> None:
    best = TensorSpec(dtype="float32", shape=(1,), meaning="the largest score")
    between = TensorSpec(dtype="float32", shape=(3,), meaning="scores")
    files, application = bundled(tmp_path, linear, output=best, finish=Finish(inputs={"scores": between}, module=Best))
    assert served(files, application, tmp_path).runs_by == "torch in bf16"


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, application = bundled(tmp_path, linear)
    how = Execution(cache=tmp_path, cores=1, device="cuda:3")
    with pytest.raises(ServeError, match="there are 1 GPUs"):
        gpu_runnable(files, as_found(application), how, slots=8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ServeError, match="sees no GPU; leave it out, or repair the driver"):
        gpu_runnable(files, as_found(application), how, slots=8)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ServeError, match=r"sees no GPU, because it is a build for the CPU alone \(.*\); leave it out"):
        gpu_runnable(files, as_found(application), how, slots=8)


def test_a_cache_that_cannot_be_written_costs_the_trials_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, application = bundled(tmp_path, linear)
    (tmp_path / "cache").write_text("")
    assert served(files, application, tmp_path).runs_by == "torch in bf16"
    assert "cannot be written" in caplog.text


def test_of_two_labels_that_are_as_good_either_may_be_named(tmp_path: Path) -> None:
    # Such as one of a million pixels of a segmentation, whose labels are equal but for rounding.
    files, application = bundled(tmp_path, linear)
    files.golden.outputs[0, :2] = files.golden.outputs[0].max() + 1
    given = files.golden.outputs.copy()
    given[0, 1] += 0.4 * files.golden.tolerance
    predictor: Any = SimpleNamespace(application=application, files=files)
    how = Execution(cache=tmp_path, cores=1, precision="auto")
    assert gpu_choice._checked(predictor, files.golden, how, lambda _: given) <= files.golden.tolerance
    given[0, 2] = given[0].max() + 1
    with pytest.raises(GoldenMismatch, match=r"^1 labels"):
        gpu_choice._checked(predictor, replace(files.golden, tolerance=10.0), how, lambda _: given)


class NeedsFloat64(nn.Module):
    """Refuses chunks of another dtype than the declared one, which compiled code would misread."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, numbers: Tensor) -> Tensor:
        if numbers.dtype != torch.float64:
            raise RuntimeError(f"given {numbers.dtype}")
        return self.out(numbers.float())


def test_chunks_come_in_their_declared_dtype(tmp_path: Path) -> None:
    wide = TensorSpec(dtype="float64", shape=(4,), meaning="numbers")
    files, application = bundled(tmp_path, NeedsFloat64, NUMBERS.astype(np.float64), input=wide)
    assert served(files, application, tmp_path).runs_by == "torch in bf16"


class Never(nn.Module):
    """Runs on a CPU alone."""

    runs = True

    def forward(self, numbers: Tensor) -> Tensor:
        if not self.runs:
            raise RuntimeError(f"no kernel with autocast {torch.is_autocast_enabled('cpu')}")
        return numbers[:, :3] * 1


def test_the_error_of_the_most_accurate_precision_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, application = bundled(tmp_path, Never)
    fold = gpu_choice.with_folded_norms

    def folded(predictor: Any, place: Path) -> Any:
        found = fold(predictor, place)
        monkeypatch.setattr(Never, "runs", False)
        return found

    monkeypatch.setattr(gpu_choice, "with_folded_norms", folded)
    with pytest.raises(ApplicationError, match=r"cannot run in fp32 .* autocast False"):
        served(files, application, tmp_path)


FOLDS = [["network.module.1", "network.module.2"]]


def normed() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 2), nn.BatchNorm1d(1), nn.Flatten())


def test_folded_norms_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, application = bundled(tmp_path, normed)

    served(files, application, tmp_path, precision="fp32")
    (remembered,) = (tmp_path / "cache" / "gpu").glob("*/folds.json")
    assert json.loads(remembered.read_text()) == FOLDS
    monkeypatch.setattr(gpu_network, "find_folds", lambda *_: pytest.fail("a run was recorded again"))
    served(files, application, tmp_path, precision="fp32")


@pytest.mark.parametrize("content", ["", "{", '[["1", "7"]]', "[3]"])
def test_damaged_memory_of_folded_norms_is_made_anew(content: str, tmp_path: Path) -> None:
    files, application = bundled(tmp_path, normed)
    served(files, application, tmp_path, precision="fp32")
    (remembered,) = (tmp_path / "cache" / "gpu").glob("*/folds.json")
    remembered.write_text(content)
    served(files, application, tmp_path, precision="fp32")
    assert json.loads(remembered.read_text()) == FOLDS


def test_precisions_are_compared_by_fewer_rows_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, application = bundled(tmp_path, linear)
    tried: list[int] = []

    def small(network: Any, *, max_rows: int, **_: Any) -> StreamingExecutor:
        tried.append(max_rows)
        if max_rows > len(NUMBERS):
            raise torch.OutOfMemoryError("no memory")
        return eager(network, max_rows=max_rows)

    monkeypatch.setattr(gpu_choice, "CudaGraphExecutor", small)
    assert served(files, application, tmp_path, max_rows=6).runs_by == "torch in bf16"
    assert set(tried) == {6}
    tried.clear()
    with pytest.raises(torch.OutOfMemoryError):
        served(files, application, tmp_path / "other")
    # The executor that serves is made last.
    assert tried == [64, 6] * 3 + [1024]


def test_a_live_network_that_loses_too_much_is_refused_for_that(tmp_path: Path) -> None:
    class Far(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = Cancels()

        def forward(self, frames: Tensor) -> Tensor:
            return self.out(frames)

    files, application = bundled(
        tmp_path,
        lambda: Sequential(FrameWise(Far())),
        np.random.default_rng(0).normal(size=(3, 10, 4)).astype(np.float32),
        input=TensorSpec(dtype="float32", shape=(5, 4), meaning="frames"),
        output=TensorSpec(dtype="float32", shape=(5, 3), meaning="scores"),
        live=Live(rate_hz=10),
        chunks=4,
    )
    with pytest.raises(GoldenMismatch, match=r"^in bf16 on cpu, .* differ"):
        served(files, application, tmp_path, "bf16")


def test_a_precision_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    files, application = bundled(tmp_path, linear)
    with pytest.raises(ApplicationError, match=r"'fp8'; it must be one of fp32, bf16, fp16, tf32"):
        served(files, application, tmp_path, "fp8")
